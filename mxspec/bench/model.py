"""The expected time of a call, computed only from the GPU's data sheet and the op's `@spec`.

`us = KERNEL_US + max(bytes / memory, flops / matmul)`. Each rate is the rate of the data sheet times the share of it
that an H200 reaches (`devices.py`).

The model has been compared with measured times only on an H200, not on an H100 or a B200. There it is good for
memory-bound calls that move more than 100 MB, and for large matmuls. It is too low for FP8 matmuls in which both
operands have a scale for each row. A smaller call takes mostly the time of its launch, and the model does not know this
time. benchmarks/results/decisions.md says how close the model is. `tests/engine/test_bench.py` compares it with the
stored run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mxspec import devices
from mxspec.devices import Device
from mxspec.formats import E8M0FNU
from mxspec.spec import Case, Reference, meta


class Cost(NamedTuple):
    """The cost of a call: its bytes, its flops, and whether its operands are FP8."""

    bytes_moved: int
    flops: int
    fp8: bool
    mx: bool = False  # whether the operands have E8M0 scales


def cost(reference: Reference[..., object], case: Case) -> Cost:
    """The cost of a call. Nothing is allocated or run.

    A call that the contract refuses raises the op's own error. Sizes that no tensor can have raise a ValueError.
    """
    with _sizes_that_a_tensor_has(f"{reference.__name__}, {case.name}"):
        with FakeTensorMode():
            args = case.args()
        args = tuple(map(meta, args))  # on the meta device a reference takes less time than on fake tensors
        spec = reference.spec
        outputs = spec.outputs(args, reference(*args, **case.kwargs))
        return Cost(spec.bytes_moved(args, outputs), spec.flops(args, outputs), is_fp8(args), is_mx(args))


@contextlib.contextmanager
def _sizes_that_a_tensor_has(call: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"{call}: {str(error).partition(chr(10))[0]}") from error


def is_fp8(args: tuple[Any, ...]) -> bool:
    """Whether a call has operands of one byte."""
    return any(arg.element_size() == 1 for arg in args if isinstance(arg, Tensor))


def is_mx(args: tuple[Any, ...]) -> bool:
    """Whether a call has E8M0 scales."""
    return any(arg.dtype == E8M0FNU.dtype for arg in args if isinstance(arg, Tensor))


def expected_us(device: Device, cost: Cost) -> float:
    """The expected time of a kernel with this cost, in microseconds."""
    fp8 = cost.fp8 and (device.mx or not cost.mx)  # tensor cores without MX multiply the values of MX codes in bf16
    share = devices.FP8_SHARE if fp8 else devices.BF16_SHARE
    peak_tflops = device.fp8_tflops if fp8 else device.bf16_tflops
    memory_us = cost.bytes_moved / (devices.MEMORY_SHARE * device.memory_gbps * 1e3)
    matmul_us = cost.flops / (share * peak_tflops * 1e6)
    return devices.KERNEL_US + max(memory_us, matmul_us)
