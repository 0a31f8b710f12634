"""`cvt.rp.satfinite.ue8m0x2.f32`: a model of the instruction gives the bytes of `rceil`, except for Inf.

The kernels compute the byte with integers on every GPU (`triton_kernels/common/numerics.py`). The instruction would
save nothing: benchmarks/results/decisions.md.
"""

import pytest
import torch

from mxspec.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2
from mxspec.reference.common.numerics import divided, shared_exponent

FORMATS = {fmt.name: fmt for fmt in (E2M1, E2M3, E3M2, E4M3FN, E5M2)}


def converted(x):
    """What the PTX ISA says of the instruction: round up to a power of two; Inf and more than 2^127 give 254."""
    mantissa, exponent = torch.frexp(x.double())  # x is mantissa * 2^exponent, and the mantissa is at least 1/2
    byte = (torch.where(mantissa == 0.5, exponent - 1, exponent) + 127).clamp(0, 254)
    byte = torch.where(x == 0, 0, torch.where(x.isinf(), 254, byte))
    return torch.where(x.isnan(), 255, byte).to(torch.uint8)


def magnitudes(fmt):
    """Every bfloat16 magnitude, and the fp32 numbers beside each `max * 2^k` and each power of two."""
    bf16 = torch.arange(0x7F80, dtype=torch.int32) << 16
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    middles = torch.cat([powers, powers * fmt.max]).float()
    beside = middles[middles.isfinite()].view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    random = torch.randint(0x7F800000, (100_000,), dtype=torch.int32)
    return torch.cat([bf16, beside.flatten().clamp(0, 0x7F7FFFFF), random]).view(torch.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scaled", ["divided", "multiplied by the rounded reciprocal"])
def test_a_finite_amax_gives_the_byte_of_rceil(name, scaled):
    fmt = FORMATS[name]
    amax = magnitudes(fmt)
    quotient = divided(amax, fmt.max) if scaled == "divided" else amax * torch.tensor(fmt.max).reciprocal()
    assert converted(quotient).equal(shared_exponent(amax, fmt, "rceil"))


def test_a_nan_gives_the_byte_of_rceil_and_inf_does_not():
    amax = torch.tensor([torch.nan, torch.inf])
    assert converted(amax / E4M3FN.max).tolist() == [255, 254]
    assert shared_exponent(amax, E4M3FN, "rceil").tolist() == [255, 255]
