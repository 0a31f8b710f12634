"""Compare planned launches with ordinary launches, without a GPU.

    python -m tests.engine.planned_launches BACKEND CASES OP ...

CPU tensors stand in for GPU tensors. `stub_cuda.c` stands in for the driver: it keeps the grid, the stream and the
bytes of all parameters of each launch. The addresses of the memory that a call allocates differ from call to call. So
such an address is compared as the number of its allocation and an offset.

Prints a line of JSON for each case: the op, the case, the number of launches, what is wrong, and the kernels.

STUB_MAJOR is the major compute capability of the GPU: 9 is Hopper, and 10 is Blackwell.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxspec import dispatch, plans
from mxspec.check import embedded
from mxspec.dispatch import planned
from mxspec.plans.plan import Device

STREAM = 77
SIZES = {"i1": 4, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 4, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
SIZES |= {"fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8}
stub = ctypes.CDLL(os.environ.get("STUB_CUDA"))  # without the stub, as when tests are collected, nothing is called
if "STUB_CUDA" in os.environ:
    stub.stub_take.restype = ctypes.c_size_t
ALLOCATED: list[Tensor] = []
KERNELS: set[str] = set()  # the names of the kernels that were launched
MAJOR = int(os.environ.get("STUB_MAJOR", "9"))


class Allocations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func) or "zeros" in str(func):
            ALLOCATED.append(result)
        return result


def parameters(signature: Any, release: str) -> list[int]:
    """The bytes of each parameter of a kernel, from its signature."""
    if isinstance(signature, tuple):
        return [size for part in signature for size in parameters(part, release)]
    if signature == "constexpr":
        return []
    if signature.startswith("tensordesc"):
        rank = signature.partition("[")[2].partition("]")[0].count(",") + 1
        return [128, *[4] * rank, *[8] * rank]
    if release == "3.6" and signature in ("i1", "u1"):  # later releases take 4 bytes
        return [1]
    return [8 if signature[0] == "*" else SIZES[signature]]


def pretend_to_helion() -> None:
    """Make Helion compile for the pretended GPU when it gets CPU tensors.

    The type checker does not allow to replace functions of other modules, so these lines tell it not to look.
    """
    import helion.runtime
    import torch._inductor.runtime.hints as hints
    from helion._compiler.compile_environment import CompileEnvironment

    cuda, to_fake_tensor = torch.device("cuda:0"), CompileEnvironment._to_fake_tensor
    hint = hints.DeviceProperties("cuda", 0, 132, MAJOR * 10, MAJOR, warp_size=32)

    def to_cuda(self: Any, tensor: Tensor, source: Any) -> Any:
        fake = to_fake_tensor(self, tensor, source)
        fake.fake_device = cuda
        return fake

    torch.cuda.is_available, torch.cuda.get_device_name = (lambda: True), (lambda device=None: "sm90")
    sys.modules["helion.runtime.kernel"]._find_device = lambda args: cuda  # type: ignore[attr-defined]
    CompileEnvironment._to_fake_tensor = to_cuda  # type: ignore[method-assign]
    hints.DeviceProperties.create = lambda device: hint  # type: ignore[method-assign]
    helion.runtime.get_num_sm = lambda device, *, reserved_sms=0: 132 - reserved_sms


def pretend() -> None:
    """Make the CPU a GPU for Triton's driver, for the kernels' choice of a way, and for plans."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    properties = SimpleNamespace(multi_processor_count=132, major=MAJOR, minor=0)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (MAJOR, 0)
    torch.cuda.current_device = lambda: -1
    gpu = CudaDriver()
    gpu.get_current_device, gpu.get_current_stream = (lambda: -1), (lambda device: STREAM)
    gpu.get_current_target = lambda: GPUTarget("cuda", MAJOR * 10, 32)
    gpu.get_device_capability = lambda device=None: (MAJOR, 0)
    driver.set_active(gpu)
    release, ordinary = ".".join(triton.__version__.split(".")[:2]), JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = ordinary(self, *args, **kwargs)
        KERNELS.add(self.fn.__name__)
        sizes = [*parameters(tuple(kernel.src.signature.values()), release), 8, 8]
        stub.stub_sizes(ctypes.c_ulonglong(kernel.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        return kernel

    JITFunction.run = run

    def empty(memory: Any) -> Tensor:
        ALLOCATED.append(torch.empty_strided(*memory[:2], dtype=memory[2]))
        return ALLOCATED[-1]

    Device.empty, Device.current = staticmethod(empty), staticmethod(lambda: -1)
    Device.stream = staticmethod(lambda device: STREAM)

    from mxspec.triton_kernels import (
        fp8_gemm,
        fp8_grouped_gemm,
        fp8_grouped_gemm_wgrad,
        mx_gemm,
        mx_grouped_gemm,
        mx_grouped_gemm_wgrad,
    )
    from mxspec.triton_kernels.blackwell import mx_matmul

    class OnGpu:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.device = tensor, torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tensor, name)

    for module in (fp8_gemm, fp8_grouped_gemm, fp8_grouped_gemm_wgrad, mx_gemm, mx_grouped_gemm, mx_grouped_gemm_wgrad):
        module.reads = lambda a, *more, reads=module.reads: reads(OnGpu(a), *more)  # type: ignore[attr-defined]

    mx_matmul.capability = torch.cuda.get_device_capability

    def ordinarily(fn: Any, args: Any, kwargs: Any, backend: Any) -> Any:
        fn.spec.check_args(*args, **kwargs)
        return getattr(dispatch.kernel_module(fn.__name__, backend), fn.__name__)(*args, **kwargs)

    planned.resolve.run = ordinarily  # type: ignore[assignment]


def take() -> bytes:
    """What was launched since the last call."""
    buffer = ctypes.create_string_buffer(1 << 20)
    length = stub.stub_take(buffer)
    return buffer.raw[:length]


def comparable(launched: bytes, inputs: list[Tensor]) -> list[Any]:
    """The words of all launches, with places in memory instead of addresses."""
    places = [(f"memory {i}", t) for i, t in enumerate(ALLOCATED)] + [(f"input {i}", t) for i, t in enumerate(inputs)]
    words: list[Any] = []
    at = 0
    while at < len(launched):  # a pointer may begin at any multiple of 4 bytes
        word = int.from_bytes(launched[at : at + 8], "little")
        found = [
            (name, word - t.untyped_storage().data_ptr())
            for name, t in places
            if 0 <= word - t.untyped_storage().data_ptr() < max(1, t.untyped_storage().nbytes())
        ]
        words.append(found[0] if found else launched[at : at + 4].hex())
        at += 8 if found else 4
    return words


def difference(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str) -> tuple[int, str]:
    """The number of launches of a call, and how its planned launch differs from its ordinary launch."""
    name = fn.__name__
    plans.PLANS.clear()

    def call(args: tuple[Any, ...]) -> tuple[Any, list[Any], str]:
        ALLOCATED.clear()
        found = plans.described(name, backend, args, kwargs)
        assert found is not None
        plan = plans.PLANS.find(found[0])
        with Allocations() if plan is None else torch.no_grad():
            result = planned.run(fn, args, dict(kwargs), backend, found)
        inputs = [value for value in args if isinstance(value, Tensor)]
        said = plan if isinstance(plan, str) else "planned" if plan else "ordinary"
        return result, comparable(take(), inputs), said

    def moved(args: tuple[Any, ...]) -> tuple[Any, ...]:  # to other addresses of the same alignment
        return tuple(another(value) if isinstance(value, Tensor) else value for value in args)

    call(args)
    plain, expected, _ = call(args)  # recorded; nothing else may see the allocations of this call
    again = moved(args)
    result, got, said = call(again)
    kernels = len(expected)
    if said != "planned":
        return kernels, said
    with plans.turned_off():
        found = None
        ALLOCATED.clear()
        with Allocations():
            plain = planned.run(fn, again, dict(kwargs), backend, found)
    expected = comparable(take(), [value for value in again if isinstance(value, Tensor)])
    if got != expected:
        wrong = [(i, a, b) for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
        return kernels, f"words differ: {len(got)} and {len(expected)}: {wrong[:6]}"
    forms = [[(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes(), t.storage_offset()) for t in outputs(r)]
             for r in (result, plain)]  # fmt: skip
    return kernels, "" if forms[0] == forms[1] else f"outputs differ: {forms}"


def outputs(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


def another(tensor: Tensor) -> Tensor:
    """A copy with the same strides and the same alignment at another address."""
    size = tensor.untyped_storage().nbytes()
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    begin = (tensor.untyped_storage().data_ptr() - memory.data_ptr()) % 16 + 16
    inside = memory[begin : begin + size].view(torch.uint8).untyped_storage()
    offset = (memory.storage_offset() + begin) // tensor.element_size() + tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype).set_(inside, offset, tensor.shape, tensor.stride())


def main(backend: str, ops: list[str], most: int) -> None:
    pretend()
    if backend == "helion":
        pretend_to_helion()
    for op in ops:
        fn, done = dispatch.reference(op), 0
        for case in fn.spec.cases():
            if case.raises or case.flags & {"large", "slow"} or done >= most or case.kwargs.get("check_offs"):
                continue
            args = case.args()
            if MAJOR == 10 and not (op.startswith("mx_") and "blocked" in case.name):
                continue
            supports = getattr(dispatch.kernel_module(op, backend), "supports", None)
            if supports and supports(*args, **case.kwargs):
                continue
            for way, given in (("as given", args), ("embedded", embedded(args, fn, case.kwargs))):
                KERNELS.clear()
                words, wrong = difference(fn, given, dict(case.kwargs), backend)
                print(json.dumps([op, f"{case.name}, {way}", words, wrong, sorted(KERNELS)]), flush=True)
            done += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3:], int(sys.argv[2]))
