"""Triton's launcher, called without the work that `JITFunction.run` does before it. It differs between releases.

The launcher is a function in C. It takes the grid, the stream, facts about the kernel, and the kernel's arguments.
Pointers may be integers. For a tensor descriptor it takes the descriptor's bytes, its shape and its strides.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from mxspec.plans.plan import Descriptor, Launch, Pointer, Refused

# Under each release, `tests/engine/test_plans.py` compares the parameters of a planned launch with the parameters of an
# ordinary launch.
RELEASES = ("3.6", "3.7", "3.8", "3.9")
_MOST_DESCRIPTORS = 4096
_descriptors: dict[tuple[int, int], Any] = {}
_numbers = itertools.count()


def release() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def watched() -> bool:
    """Whether launches must take the ordinary path: a launch hook is set, or kernels are compiled for debugging."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of hooks may be empty
            return True
    return bool(runtime.debug) or runtime.add_stages_inspection_hook is not None


class _Address:
    """A stand-in for a tensor: Triton's descriptor asks it only for its address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _descriptor_at(descriptor: Any, meta: Any) -> Callable[[int], Any]:
    """A function that gives the bytes of a descriptor for an address. It caches the bytes.

    The bytes hold the address, the shape, the strides and the box, and no reference to the memory. So they stay right
    when the memory is freed and used again.
    """
    number, template = next(_numbers), copy.copy(descriptor)
    template.base = None
    more = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)

    def at(address: int) -> Any:
        made = _descriptors.get((number, address))
        if made is None:
            moved = copy.copy(template)
            moved.base = _Address(address)
            made = nvidia.make_tensordesc_arg(moved, meta, *more)[0]
            if len(_descriptors) >= _MOST_DESCRIPTORS:
                _descriptors.clear()
            _descriptors[number, address] = made
        return made

    return at


class _Source:
    """A Python expression for the arguments of a launch. Objects that it cannot write out get names."""

    def __init__(self, **names: Any) -> None:
        self.names = names

    def name(self, value: Any) -> str:
        name = f"value{len(self.names)}"
        self.names[name] = value
        return name

    def pointer(self, pointer: Pointer) -> str:
        return f"at[{pointer.place}]" + (f" + {pointer.offset}" if pointer.offset else "")

    def argument(self, value: Any) -> str:
        if type(value) is Pointer:
            return self.pointer(value)
        if type(value) is Descriptor:
            raise Refused("a descriptor lies in a tuple of arguments")
        if type(value) is tuple:
            return f"({''.join(f'{self.argument(v)}, ' for v in value)})"
        return repr(value) if value is None or type(value) in (int, bool) else self.name(value)

    def arguments(self, values: tuple[Any, ...], metas: list[Any]) -> str:
        texts, left = [], iter(metas)
        for value in values:
            if type(value) is Descriptor:
                descriptor = value.descriptor
                made = self.name(_descriptor_at(descriptor, next(left)))
                sizes = *descriptor.shape, *descriptor.strides
                texts += [f"{made}({self.pointer(value.pointer)})", *map(repr, map(int, sizes))]
            else:
                texts.append(self.argument(value))
        return "".join(f"{text}, " for text in texts)


def launcher(kernel: Any, grid: tuple[int, int, int], values: tuple[Any, ...], scratch: Pointer | None) -> Launch:
    """A function that launches a compiled kernel with these arguments, on a stream and for a list of addresses."""
    run, metas = kernel.run, list(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    if type(run) is not nvidia.CudaLauncher:
        raise Refused("the GPU is not NVIDIA's")
    if run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        raise Refused("the kernel is instrumented")
    descriptors = sum(type(value) is Descriptor for value in values)
    if len(metas) != descriptors or any(meta is None or meta["fp4_padded"] for meta in metas):
        raise Refused("a descriptor is not a descriptor of TMA")
    # `kernel` is among the names because Triton unloads the code of a kernel that nobody holds.
    source = _Source(function=kernel.function, packed=kernel.packed_metadata, launch=None, kernel=kernel)
    head = f"{', '.join(map(str, grid))}, stream, function, {run.launch_cooperative_grid}, {run.launch_pdl}"
    memory = "None" if scratch is None else source.pointer(scratch)
    arguments = source.arguments(values, metas)
    if release() == "3.6":  # each signature has a C function of its own
        launch = run.launch
        if isinstance(launch, types.FunctionType):  # the function that makes descriptors, around the C function
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        call = f"launch({head}, {memory}, None, packed, None, None, None, {arguments})"
    else:  # one C function for all signatures
        launch = driver.active.utils.launch
        source.names |= {"annotations": run.arg_annotations, "signature": run.kernel_signature}
        call = f"launch({head}, packed, None, None, None, {memory}, None, annotations, signature, ({arguments}))"
    source.names["launch"] = launch
    made: Launch = eval(f"lambda stream, at: {call}", source.names)
    return made
