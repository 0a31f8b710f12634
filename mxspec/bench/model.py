"""What to expect of a call before it is measured: from the GPU's data sheet and the op's `@spec` alone.

`us = KERNEL_US + max(bytes / memory, flops / matmul)`, each rate the data sheet's times the share of it that an H200
reaches (`devices.py`). There it is within 15% where memory decides and more than 100 MB move, and for large matmuls,
but for FP8 with a scale for each row of both operands, which takes 1.4 times as long; below that a launch's own time
decides, which it does not know. On an H100 and a B200 nobody has compared it.
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
from mxspec.spec import Case, Reference


class Cost(NamedTuple):
    """What a call costs: its bytes, its flops, and whether its operands are FP8."""

    bytes_moved: int
    flops: int
    fp8: bool
    mx: bool = False  # and have E8M0 scales


def cost(reference: Reference[..., object], case: Case) -> Cost:
    """The cost of a call; nothing is allocated or run. Raises what the op raises for what its contract refuses, and
    ValueError for sizes that no tensor has."""
    with FakeTensorMode(), _sizes_that_a_tensor_has(f"{reference.__name__}, {case.name}"):
        args = case.args()
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
    """How long a kernel of these bytes and flops should take, in microseconds."""
    fp8 = cost.fp8 and (device.mx or not cost.mx)  # other tensor cores multiply the values of MX codes as bf16
    share = devices.FP8_SHARE if fp8 else devices.BF16_SHARE
    peak_tflops = device.fp8_tflops if fp8 else device.bf16_tflops
    memory_us = cost.bytes_moved / (devices.MEMORY_SHARE * device.memory_gbps * 1e3)
    matmul_us = cost.flops / (share * peak_tflops * 1e6)
    return devices.KERNEL_US + max(memory_us, matmul_us)
