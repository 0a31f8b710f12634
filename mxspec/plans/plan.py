"""A plan: the memory, the launches and the results of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A launch gets a stream and the addresses: first those of the inputs, then those of the plan's memory.
Launch = Callable[[int, list[int]], Any]


class Memory(NamedTuple):
    """A tensor that the call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Pointer(NamedTuple):
    """An index in the list of addresses, and an offset in bytes from that address."""

    place: int
    offset: int


class Descriptor(NamedTuple):
    """A tensor descriptor of Triton, and the pointer of its tensor."""

    descriptor: Any
    pointer: Pointer


class Refused(Exception):
    """A call cannot have a plan. The message says why."""


@dataclass(frozen=True)
class Part:
    """A tensor of the plan's memory, or a view of it if `view` has a shape, strides and an offset."""

    memory: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def of(self, memory: list[Tensor]) -> Tensor:
        tensor = memory[self.memory]
        if self.view is None:
            return tensor
        shape, strides, offset = self.view  # the offset in the plan's memory, which may begin later in its storage
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


class TorchCall(NamedTuple):
    """A call of a function of torch, for example a matmul. All its tensors are parts of the plan's memory."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, memory: list[Tensor]) -> None:
        options = {name: _with_tensors(value, memory) for name, value in self.options.items()}
        self.function(*(_with_tensors(value, memory) for value in self.arguments), **options)


def _with_tensors(value: Any, memory: list[Tensor]) -> Any:
    return value.of(memory) if type(value) is Part else value


class Device:
    """The functions of torch that a plan calls. A test replaces them to run plans without a GPU."""

    current: Callable[[], int] = staticmethod(getattr(torch._C, "_cuda_getDevice", lambda: -1))
    stream: Callable[[int], int] = staticmethod(getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0))

    @staticmethod
    def empty(memory: Memory) -> Tensor:
        """Uninitialized memory on the current GPU. This function of torch skips torch's dispatcher."""
        return torch._C._dynamo.guards._empty_strided_cuda(*memory)  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class Plan:
    """All that a call does, apart from the addresses of its tensors and the stream."""

    device: int
    memory: tuple[Memory, ...]
    launches: tuple[Launch | TorchCall, ...]
    results: tuple[Part, ...] | None  # None: the call returns None
    alone: bool  # whether the call returns its only output, and no tuple
    watched: Callable[[], bool]  # whether the launches must take the ordinary path, for a profiler or a debugger

    def run(self, addresses: list[int]) -> Any:
        """Do the call for tensors at these addresses, on the current stream."""
        if Device.current() != self.device:  # a kernel launches on the current device, so make it the tensors'
            with torch.cuda.device(self.device):
                return self.run(addresses)
        memory = []
        for needed in self.memory:
            tensor = Device.empty(needed)
            memory.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = Device.stream(self.device)
        for launch in self.launches:
            if isinstance(launch, TorchCall):
                launch.run(memory)
            else:
                launch(stream, addresses)
        if self.results is None:
            return None
        results = [result.of(memory) for result in self.results]
        return results[0] if self.alone else tuple(results)
