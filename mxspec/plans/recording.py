"""The recorder: it watches one ordinary call, and makes a plan of what it saw."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mxspec.plans.plan import Descriptor, Memory, Part, Plan, Pointer, Refused, TorchCall

T = TypeVar("T")
_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
_ZEROS = frozenset((_aten.zeros.default, _aten.new_zeros.default))
# A plan repeats these calls, if all their tensors are memory of the call. They allocate nothing, and autocast does not
# cast their operands.
_REPEATED = frozenset((_aten.mm.out, _aten.mm.dtype_out, _aten.zero_.default))
# Methods that give the host a value. Some of them read the memory of a tensor without a call that a mode would see.
_READS = frozenset(("tolist", "item", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"))
_Launched = tuple[Any, Any, tuple[Any, ...], Any, dict[str, Any], range]
_Called = tuple[Any, tuple[Any, ...], dict[str, Any]]
_one_at_a_time = threading.Lock()


def record(call: Callable[[], T], inputs: list[Tensor]) -> tuple[T, Plan | str | None]:
    """Make a call, and a plan that repeats it for other inputs of the same description.

    Gives the result of the call, and the plan or the reason why there is none. While another thread records, the call
    is only made, and the second result is None.
    """
    if not _one_at_a_time.acquire(blocking=False):
        return call(), None
    try:
        recorder = Recorder(inputs)
        with recorder.watching(), _launches_of_this_thread(recorder):
            result = call()
        try:
            return result, recorder.plan(result)
        except Refused as refused:
            return result, str(refused)
    finally:
        _one_at_a_time.release()


@contextlib.contextmanager
def _launches_of_this_thread(recorder: Recorder) -> Iterator[None]:
    """Inside the block, the recorder sees each launch of Triton that this thread makes."""
    from triton.runtime.jit import JITFunction

    ordinary, thread = JITFunction.run, threading.get_ident()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        first = len(recorder.memory)
        kernel = ordinary(self, *args, grid=grid, warmup=warmup, **options)
        if threading.get_ident() == thread:
            recorder.launches.append((self, kernel, args, grid, options, range(first, len(recorder.memory))))
        return kernel

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = ordinary


class _Reads(TorchFunctionMode):
    """It tells the recorder of each method that reads values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self.recorder.refusal = self.recorder.refusal or f"the call reads values by {func.__name__}"
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """It sees each call of torch, and keeps all tensors that are allocated, so that no two of them share an address."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.inputs, self.memory = inputs, list[Tensor]()
        # A launch of a kernel, or a function of torch with its arguments and options.
        self.launches: list[_Launched | _Called] = []
        self.refusal = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with self, _Reads(self):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.memory.append(result)
        elif func in _ZEROS:
            self.memory.append(result)
            self.launches.append((_aten.zero_.default, (result,), {}))
        elif func in _REPEATED:
            self.launches.append((func, args, kwargs or {}))
        elif not func.is_view:  # for example a sum, a copy, or a read of a value
            self.refusal = self.refusal or f"the call uses {func}"
        return result

    def plan(self, result: Any) -> Plan:
        """The plan of the call that this recorder watched."""
        if self.refusal:
            raise Refused(self.refusal)
        if not any(len(launch) == 6 for launch in self.launches):
            raise Refused("the call launches no kernel of Triton")
        devices = {tensor.device for tensor in (*self.inputs, *self.memory)}
        if len(devices) > 1 or not all(tensor.numel() for tensor in (*self.inputs, *self.memory)):
            raise Refused("a tensor is empty or on another device")
        from mxspec.plans import launchers

        if launchers.release() not in launchers.RELEASES:
            raise Refused(f"plans are tested under Triton {', '.join(launchers.RELEASES)}")
        memory, results = self._results(result)
        made = tuple(
            self._call(*launch, memory) if len(launch) == 3 else self._launch(*launch) for launch in self.launches
        )
        device = self.inputs[0].get_device()
        return Plan(device, memory, made, results, isinstance(result, Tensor), launchers.watched)

    def _place(self, address: int) -> tuple[int, int] | None:
        """The tensor whose memory holds an address, and the bytes before the address. None if no tensor does."""
        found = []
        for place, tensor in enumerate((*self.inputs, *self.memory)):
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            before = address - tensor.data_ptr()
            if 0 <= before < extent * tensor.element_size():
                found.append((place, before))
        if len(found) > 1:
            raise Refused("two inputs share memory")
        return found[0] if found else None

    def _pointer(self, tensor: Tensor) -> Pointer:
        place = self._place(tensor.data_ptr())
        if place is None:
            raise Refused("a kernel gets memory that is neither an input nor allocated by the call")
        return Pointer(*place)

    def _argument(self, value: Any) -> Any:
        """An argument of a kernel, with pointers instead of tensors. A constant of the kernel becomes None."""
        if isinstance(value, Tensor):
            return self._pointer(value)
        if isinstance(getattr(value, "base", None), Tensor):
            return Descriptor(value, self._pointer(value.base))
        if isinstance(value, tuple | list):
            return tuple(self._argument(part) for part in value)
        if hasattr(value, "data_ptr") or (type(value) is int and self._place(value)):
            raise Refused("a kernel gets an address that is not passed as a tensor")
        return value if isinstance(value, int | float) else None

    def _launch(
        self, function: Any, kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any], during: range
    ) -> Any:
        from mxspec.plans.launchers import launcher

        by_helion = function.fn.__name__.startswith("_helion_")  # Helion wrote the function, into a file of its own
        package = "mxspec.helion_kernels" if by_helion else ".".join(function.fn.__module__.split(".")[:2])
        if not getattr(sys.modules.get(package), "PLANNED", False):
            raise Refused(f"{package} says nothing about plans")
        if function.pre_run_hooks or not isinstance(grid, tuple) or not hasattr(kernel, "packed_metadata"):
            raise Refused("the launch has a hook, a computed grid or no compiled kernel")
        if len(during) != bool(kernel.run.global_scratch_size):
            raise Refused("the memory that Triton asks for is not allocated by torch")
        names = function.signature.parameters
        bound = function.signature.bind(*args, **{name: value for name, value in options.items() if name in names})
        bound.apply_defaults()
        values = tuple(self._argument(value) for value in bound.arguments.values())
        scratch = Pointer(len(self.inputs) + during[0], 0) if during else None
        return launcher(kernel, (*grid, 1, 1)[:3], values, scratch)

    def _call(
        self, function: Any, args: tuple[Any, ...], options: dict[str, Any], memory: tuple[Memory, ...]
    ) -> TorchCall:
        def part(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            place = self._place(value.data_ptr())
            index = -1 if place is None else place[0] - len(self.inputs)
            if place is None or index < 0 or memory[index].dtype != value.dtype:
                raise Refused(f"{function} gets a tensor that is no part of the call's memory")
            return Part(index, (tuple(value.shape), value.stride(), place[1] // value.element_size()))

        return TorchCall(function, tuple(map(part, args)), {name: part(value) for name, value in options.items()})

    def _results(self, result: Any) -> tuple[tuple[Memory, ...], tuple[Part, ...] | None]:
        """The memory to allocate, and the outputs in it.

        If an output fills its memory, the plan allocates this memory with the output's shape, strides and dtype.
        """
        memory = [Memory(tuple(t.shape), t.stride(), t.dtype) for t in self.memory]
        if result is None:
            return tuple(memory), None
        outputs = (result,) if isinstance(result, Tensor) else result
        if type(outputs) is not tuple or not all(type(output) is Tensor for output in outputs):
            raise Refused("the result is neither a tensor nor a tuple of tensors")
        places = [self._place(output.data_ptr()) for output in outputs]
        results = []
        for output, place in zip(outputs, places, strict=True):
            index = -1 if place is None else place[0] - len(self.inputs)
            if place is None or index < 0:
                raise Refused("an output is an input")
            form = Memory(tuple(output.shape), output.stride(), output.dtype)
            bytes_of = [math.prod(tensor.shape) * tensor.element_size() for tensor in (output, self.memory[index])]
            alone = sum(other is not None and other[0] == place[0] for other in places) == 1
            if alone and bytes_of[0] == bytes_of[1] == output.untyped_storage().nbytes():
                memory[index] = form
                results.append(Part(index))
            elif output.dtype == memory[index].dtype:
                results.append(Part(index, (form.shape, form.strides, output.storage_offset())))
            else:
                raise Refused("an output is a part of memory of another dtype")
        return tuple(memory), tuple(results)
