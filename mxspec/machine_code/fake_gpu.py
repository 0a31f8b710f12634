"""A GPU that does not exist: a kernel's host function is called on meta tensors, and its launches compile.

The compilers see the signature, the alignments and the options of the real launch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxspec.dispatch import interpreters

TARGETS = {"sm90": 90, "sm100": 100}
# The multiprocessors of an H200 and of a B200. Their number sets the grid of a persistent kernel, which does not change
# the kernel's machine code.
_SM_COUNT = {"sm90": 132, "sm100": 148}


def unavailable() -> str | None:
    """Why nothing can be compiled in this process, or None."""
    if variables := interpreters():
        return f"{variables[0]}=1 runs kernels without compiling them"
    try:
        import triton  # noqa: F401  # only tests whether it can be imported
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


def _forget_devices() -> None:
    """Empty the caches in which the kernel modules and Helion keep facts about a device."""
    for name, module in list(sys.modules.items()):
        if name == "helion._compat" or re.match(r"mxspec\.\w+_kernels\b", name):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _fake_helion(target: str, properties: Any) -> contextlib.ExitStack:
    """Make a Helion kernel treat meta tensors as CUDA tensors, and compile every one of its configurations."""
    import helion.runtime
    import torch._inductor.runtime.hints as hints
    import torch._subclasses.fake_tensor as fake_tensor
    from helion._compiler.compile_environment import CompileEnvironment

    runtime = sys.modules["helion.runtime.kernel"]  # the attribute of that name is the decorator
    cuda = torch.device("cuda:0")
    hint = hints.DeviceProperties(
        "cuda", 0, properties.multi_processor_count, TARGETS[target], properties.major, warp_size=32
    )
    to_fake_tensor = CompileEnvironment._to_fake_tensor

    def to_cuda(self: Any, tensor: Tensor, source: Any) -> Any:
        fake = to_fake_tensor(self, tensor, source)
        if fake.device.type == "meta":
            fake.fake_device = cuda
        return fake

    def describe(device: torch.device) -> Any:
        return hint

    def processors(device: torch.device, *, reserved_sms: int = 0) -> int:
        return int(properties.multi_processor_count) - reserved_sms

    @functools.cache
    def twin(kernel: Any) -> Any:  # with caches of its own, so that no real launch finds this code
        return type(kernel)(kernel.fn, configs=kernel.configs, settings=kernel.settings, key=kernel._key_fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = twin(self)
        args = kernel.normalize_args(*args, **kwargs)
        bound = kernel.bind(args)
        for config in kernel.configs or [bound.config_spec.default_config()]:
            result = bound.compile_config(config)(*args)
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(runtime, _find_device=lambda args: cuda))
        stack.enter_context(mock.patch.multiple(runtime.Kernel, __call__=call))
        stack.enter_context(mock.patch.multiple(CompileEnvironment, _to_fake_tensor=to_cuda))
        stack.enter_context(mock.patch.object(hints.DeviceProperties, "create", describe))
        stack.enter_context(
            mock.patch.object(helion.runtime, "get_num_sm", processors)
        )  # the grid of persistent kernels
        if hasattr(fake_tensor, "init_gpu_context"):  # a CUDA build of torch would look for the device
            stack.enter_context(mock.patch.multiple(fake_tensor, init_gpu_context=lambda device: None))
        return stack.pop_all()


class Launches(list[Any]):
    """The compiled kernel of each launch. `grids` holds the number of programs of each, in three dimensions."""

    grids: list[tuple[int, ...]]

    def clear(self) -> None:
        super().clear()
        self.grids = []


@contextlib.contextmanager
def fake_gpu(target: str) -> Iterator[Launches]:
    """Pretend that the current CUDA device is a `target`, and compile every kernel that would be launched.

    Gives the list of kernels that Triton compiled. It grows with each launch on meta tensors. A real launch on a real
    device does not find anything that was cached inside.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    arch = TARGETS[target]
    compiled = Launches()
    compiled.clear()
    real_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(real_run(self, *args, grid=grid, warmup=True, **kwargs))  # a warm-up stops before the launch
        compiled.grids.append(tuple(grid) if isinstance(grid, tuple | list) else tuple(grid(kwargs)))
        return compiled[-1]

    device = SimpleNamespace(
        get_current_device=lambda: target,  # the key of Triton's cache; a real device is a number
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    properties = SimpleNamespace(
        name=target, major=arch // 10, minor=0, multi_processor_count=_SM_COUNT[target], warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, gcnArchName="",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        _forget_devices()
        stack.callback(_forget_devices)
        stack.enter_context(mock.patch.dict(os.environ))  # Helion changes Triton's cache directory
        stack.enter_context(mock.patch.multiple(driver, _active=device))
        stack.enter_context(mock.patch.multiple(JITFunction, run=run))
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda,
                is_available=lambda: True,
                current_device=lambda: 0,
                get_device_capability=lambda device=None: (arch // 10, 0),
                get_device_properties=lambda device=None: properties,
                get_device_name=lambda device=None: target,
            )
        )
        if "helion" in sys.modules:
            stack.enter_context(_fake_helion(target, properties))
        yield compiled
