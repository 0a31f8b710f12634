"""SwiGLU on Helion tiles, `silu(gate) * up`, and its gradient. `reference/common/swiglu.py` defines both."""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.numerics import widened

# Ref mode runs no Triton source. It computes the sigmoid in fp64 instead, as the reference does.
_REF = os.environ.get("HELION_INTERPRET") == "1"

# Silu, rounded to bfloat16, needs only an approximation of two units in the last place: a test tries every gate. Below
# -87.25, the sigmoid is below the smallest normal number, and counts as 0.
_SILU = """
@triton.jit
def swiglu_silu(x):
    s = 1.0 / (1.0 + tl.exp2(x * -1.4426950216293335))
    return x * tl.where(x < -87.25, 0.0, s)
"""


# The gradient needs more. `triton_kernels/common/swiglu.py` explains the steps.
_EXACT_SIGMOID = """
@triton.jit
def swiglu_exact_sigmoid(x):
    x_64 = tl.minimum(x, 64.0)
    t = tl.fma(x_64, -1.44268798828125, 12582912.0)
    whole = t - 12582912.0
    rest = tl.fma(x_64, -7.05420098e-06, tl.fma(x_64, -1.44268798828125, -whole))
    power = tl.fma(tl.fma(0.00133969157, rest, 0.00966591109), rest, 0.0555034429)
    power = tl.fma(tl.fma(tl.fma(power, rest, 0.240223229), rest, 0.693147004), rest, 1.0)
    power = (power.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    y = -1.0 - power
    s = -1.0 / y
    s = tl.where(x < -87.25, 0.0, tl.fma(tl.fma(y, s, 1.0), s, s))
    s = tl.where(tl.abs(x) < 0.00390625, tl.fma(x, 0.25 - 2.0**-26, 0.5), s)
    s = tl.where(x == -1.28125, 0.21733751893043518, s)
    return tl.where(x == -8.375, 0.00023050671734381467, s)
"""

# The product is rounded before the sum. It is written as a sum with +0, so that no compiler fuses the two.
_SLOPE = """
@triton.jit
def swiglu_slope(x, s):
    return tl.fma(x, 1.0 - s, 0.0) + 1.0
"""


def _ref_sigmoid(x: Tensor) -> Tensor:
    x = x.double()
    s = torch.where(x.abs() < 2.0**-12, 0.5 + x * (0.25 - 2.0**-26), 1.0 / (1.0 + torch.exp(-x))).float()
    return torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)


def _silu(gate: Tensor) -> Tensor:
    """`gate * sigmoid(gate)` in fp32. Rounded to bfloat16, it is right for every gate."""
    return gate * _ref_sigmoid(gate) if _REF else hl.triton_kernel(_SILU, args=(gate,), output_like=gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of bfloat16. Silu and the product are each rounded to bfloat16."""
    silu = _silu(widened(gate)).to(torch.bfloat16)
    return (widened(silu) * widened(up)).to(torch.bfloat16)


def gradients(gate: Tensor, up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the gate and of up in bfloat16."""
    x, d = widened(gate), widened(dh)
    s = _ref_sigmoid(x) if _REF else hl.triton_kernel(_EXACT_SIGMOID, args=(x,), output_like=x)
    slope = 1.0 + x * (1.0 - s) if _REF else hl.triton_kernel(_SLOPE, args=(x, s), output_like=x)
    d_up = d * widened((x * s).to(torch.bfloat16))
    d_silu = (d * widened(up)).to(torch.bfloat16)
    return (widened(d_silu) * s * slope).to(torch.bfloat16), d_up.to(torch.bfloat16)


def swiglu_run(
    x: Tensor, m: Tensor, stride_m: int, d: Tensor, up_d: Tensor, inside: Tensor | None, left: Tensor, run: int,
    step: int = 1, i: int = 0,
) -> Tensor:  # fmt: skip
    """`silu(gate) * up` of `run` tokens, along new last dimensions of 2, as `load_run` loads them.

    A token is computed before it is joined with other tokens. So few intermediate values are in registers at a time.
    """
    if run == 1:
        there = left > i if inside is None else inside & (left > i)
        gate = hl.load(x, [m * stride_m + d], extra_mask=there)
        return swiglu(gate, hl.load(x, [m * stride_m + up_d], extra_mask=there))
    rest = stride_m, d, up_d, inside, left, run // 2, 2 * step
    return hl.join(swiglu_run(x, m, *rest, i), swiglu_run(x, m + step, *rest, i + step))


def gradient_run(
    x: Tensor, dh: Tensor, m: Tensor, stride_m: int, dh_stride_m: int, gate: Tensor, up: Tensor, h: Tensor,
    in_gate: Tensor, inside: Tensor | None, left: Tensor, run: int, step: int = 1, i: int = 0,
) -> Tensor:  # fmt: skip
    """The gradient of gate or of up, of `run` tokens, as `swiglu_run` gives SwiGLU.

    - `gate`, `up`, `h`: the places of each feature's gate and up in x, and of its gradient in dh.
    - `in_gate`: which features are those of the gate. The others do not need up, but a mask would take registers. The
      program of the gate's features reads the same up, so the L2 cache has it.
    """
    if run == 1:
        there = left > i if inside is None else inside & (left > i)
        d_gate, d_up = gradients(
            hl.load(x, [m * stride_m + gate], extra_mask=there),
            hl.load(x, [m * stride_m + up], extra_mask=there),
            hl.load(dh, [m * dh_stride_m + h], extra_mask=there),
        )
        return torch.where(in_gate, d_gate, d_up)
    rest = stride_m, dh_stride_m, gate, up, h, in_gate, inside, left, run // 2, 2 * step
    return hl.join(gradient_run(x, dh, m, *rest, i), gradient_run(x, dh, m + step, *rest, i + step))
