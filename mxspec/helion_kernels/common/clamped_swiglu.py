"""The clamped SwiGLU of gpt-oss on Helion tiles. `reference/common/clamped_swiglu.py` defines it."""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.numerics import widened

# Ref mode runs no Triton source. It computes the sigmoid in fp64 instead, as the reference does.
_REF = os.environ.get("HELION_INTERPRET") == "1"

# `triton_kernels/common/clamped_swiglu.py` explains the steps.
_GLU = """
@triton.jit
def clamped_swiglu_glu(x):
    t = tl.fma(x, -2.4554443359375, 12582912.0)
    whole = t - 12582912.0
    rest = tl.fma(x, -2.2623655e-05, tl.fma(x, -2.4554443359375, -whole))
    power = tl.fma(tl.fma(0.00133969157, rest, 0.00966591109), rest, 0.0555034429)
    power = tl.fma(tl.fma(tl.fma(power, rest, 0.240223229), rest, 0.693147004), rest, 1.0)
    power = (power.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    y = -1.0 - power
    s = -1.0 / y
    return x * tl.where(x < -51.375, 0.0, tl.fma(tl.fma(y, s, 1.0), s, s))
"""


def _glu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)` in fp32. Rounded to bfloat16, it is right for every gate."""
    if _REF:
        s = (1.0 / (1.0 + torch.exp(x.double() * -1.702))).float()
        return x * torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)
    return hl.triton_kernel(_GLU, args=(x,), output_like=x)


def _with_bias(v: Tensor, bias: Tensor, grouped: Tensor) -> Tensor:
    """The sum in bfloat16, widened. Rows without a group have no bias."""
    wide = widened(v)
    return torch.where(grouped, widened((wide + widened(bias)).to(torch.bfloat16)), wide)


def clamped_swiglu(gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, grouped: Tensor) -> Tensor:
    """The activation of gates and ups and their biases, in bfloat16."""
    g, u = _with_bias(gate, of_gate, grouped), _with_bias(up, of_up, grouped)
    g, u = torch.where(g > 7.0, 7.0, g), torch.where(u > 7.0, 7.0, u)  # NaN stays
    u = torch.where(u < -7.0, -7.0, u)
    glu = _glu(g).to(torch.bfloat16)
    return (widened(glu) * widened((u + 1.0).to(torch.bfloat16))).to(torch.bfloat16)
