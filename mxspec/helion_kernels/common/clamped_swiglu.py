"""gpt-oss's clamped SwiGLU on Helion tiles, and its gradient. `reference/common/clamped_swiglu.py` defines both."""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.numerics import widened

# Ref mode runs no Triton source. It computes the sigmoid in fp64 instead, as the reference does.
_REF = os.environ.get("HELION_INTERPRET") == "1"

# `triton_kernels/common/clamped_swiglu.py` explains the steps.
_SIGMOID = """
@triton.jit
def clamped_swiglu_sigmoid(x):
    t = tl.fma(x, -2.4554443359375, 12582912.0)
    whole = t - 12582912.0
    rest = tl.fma(x, -2.2623655e-05, tl.fma(x, -2.4554443359375, -whole))
    power = tl.fma(tl.fma(0.00133969157, rest, 0.00966591109), rest, 0.0555034429)
    power = tl.fma(tl.fma(tl.fma(power, rest, 0.240223229), rest, 0.693147004), rest, 1.0)
    power = (power.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    y = -1.0 - power
    s = -1.0 / y
    return tl.where(x < -51.375, 0.0, tl.fma(tl.fma(y, s, 1.0), s, s))
"""

_SLOPE = """
@triton.jit
def clamped_swiglu_slope(y, s):
    return tl.fma(y * 1.702, 1.0 - s, s)
"""


def _sigmoid(x: Tensor) -> Tensor:
    """`sigmoid(1.702 x)` in fp32; 0 if it is below 2^-126."""
    if _REF:
        s = (1.0 / (1.0 + torch.exp(x.double() * -1.702))).float()
        return torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)
    return hl.triton_kernel(_SIGMOID, args=(x,), output_like=x)


def _slope(x: Tensor, s: Tensor) -> Tensor:
    """The derivative of `x * sigmoid(1.702 x)` in bfloat16. s is the sigmoid."""
    if _REF:
        s = s.double()
        return (s + 1.702 * x.double() * s * (1.0 - s)).to(torch.bfloat16)
    return hl.triton_kernel(_SLOPE, args=(x * s, s), output_like=x).to(torch.bfloat16)


def _with_bias(v: Tensor, bias: Tensor, grouped: Tensor) -> Tensor:
    """The sum in bfloat16, widened. Rows without a group have no bias."""
    wide = widened(v)
    return torch.where(grouped, widened((wide + widened(bias)).to(torch.bfloat16)), wide)


def _up_1(u: Tensor) -> Tensor:
    """`u + 1` in bfloat16, widened, of an up between its limits."""
    u = torch.where(u > 7.0, 7.0, u)  # NaN stays
    return widened((torch.where(u < -7.0, -7.0, u) + 1.0).to(torch.bfloat16))


def clamped_swiglu(gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, grouped: Tensor) -> Tensor:
    """The activation of gates and ups and their biases, in bfloat16."""
    g, u = _with_bias(gate, of_gate, grouped), _with_bias(up, of_up, grouped)
    x = torch.where(g > 7.0, 7.0, g)
    glu = (x * _sigmoid(x)).to(torch.bfloat16)  # right for every gate
    return (widened(glu) * _up_1(u)).to(torch.bfloat16)


def gradients(
    gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, dh: Tensor, grouped: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the gate and of up in bfloat16, of gates and ups and their biases."""
    g, u, d = _with_bias(gate, of_gate, grouped), _with_bias(up, of_up, grouped), widened(dh)
    x = torch.where(g > 7.0, 7.0, g)
    s = _sigmoid(x)
    d_glu = (d * _up_1(u)).to(torch.bfloat16)
    d_gate = (widened(d_glu) * widened(_slope(x, s))).to(torch.bfloat16)
    d_up = (d * widened((x * s).to(torch.bfloat16))).to(torch.bfloat16)
    # A NaN is not within the limits.
    return torch.where(g <= 7.0, d_gate, 0.0), torch.where(u.abs() <= 7.0, d_up, 0.0)


def clamped_swiglu_run(
    x: Tensor, m: Tensor, stride_m: int, d: Tensor, up_d: Tensor, of_gate: Tensor, of_up: Tensor, live: Tensor,
    inside: Tensor | None, left: Tensor, run: int, step: int = 1, i: int = 0,
) -> Tensor:  # fmt: skip
    """The activation of `run` tokens with the biases of their group, as `swiglu_run` gives SwiGLU."""
    if run == 1:
        there = left > i if inside is None else inside & (left > i)
        gate = hl.load(x, [m * stride_m + d], extra_mask=there)
        h = clamped_swiglu(gate, hl.load(x, [m * stride_m + up_d], extra_mask=there), of_gate, of_up, live)
        return torch.where(there, h, 0.0)  # a place without a token has a bias, too
    rest = stride_m, d, up_d, of_gate, of_up, live, inside, left, run // 2, 2 * step
    return hl.join(clamped_swiglu_run(x, m, *rest, i), clamped_swiglu_run(x, m + step, *rest, i + step))


def gradient_run(
    x: Tensor, dh: Tensor, m: Tensor, stride_m: int, dh_stride_m: int, d: Tensor, h: Tensor, of_gate: Tensor,
    of_up: Tensor, live: Tensor, inside: Tensor | None, left: Tensor, half_inside: Tensor | None, half_left: Tensor,
    run: int, step: int = 1, i: int = 0,
) -> Tensor:  # fmt: skip
    """The gradients of 8 neighbouring features of `run` tokens, as `clamped_swiglu_run` gives the activation.

    - `d`: the places of the features in x, which are 4 gates and 4 ups in turn. One access loads all 8.
    - `h`, `of_gate`, `of_up`: the places of their 4 gradients in dh, and their 4 biases.
    - `half_inside`, `half_left`: `inside` and `left` in the shape of h. Triton could not see that a mask computed from
      another mask is the same for 8 neighbours, and would load each alone.
    """
    if run == 1:
        there = left > i if inside is None else inside & (left > i)
        half_there = half_left > i if half_inside is None else half_inside & (half_left > i)
        gate_up = hl.load(x, [m * stride_m + d], extra_mask=there)
        gate, up = hl.split(gate_up.reshape(*half_there.shape, 2))
        both = gradients(gate, up, of_gate, of_up, hl.load(dh, [m * dh_stride_m + h], extra_mask=half_there), live)
        # A place without a token has a bias, too.
        return torch.where(there, hl.join(*both).reshape(there.shape), 0.0)
    rest = stride_m, dh_stride_m, d, h, of_gate, of_up, live, inside, left, half_inside, half_left, run // 2, 2 * step
    return hl.join(gradient_run(x, dh, m, *rest, i), gradient_run(x, dh, m + step, *rest, i + step))
