"""SwiGLU on Helion tiles: the sigmoid of a bfloat16 gate, `silu(gate) * up`, and its gradient.

`reference/common/swiglu.py` defines them.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.numerics import widened

# Ref mode runs no Triton source. It computes the sigmoid in fp64 instead, as the reference does.
_REF = os.environ.get("HELION_INTERPRET") == "1"
_LOG2_E = 1.4426950408889634
_HIGH = torch.tensor(_LOG2_E).item()  # log2(e), rounded to fp32
_LOW = _LOG2_E - _HIGH
_LN_2 = 0.6931471805599453

# `t` is -x * log2(e), rounded. `lost` is the part that the rounding lost, so e^-x is 2^t * (1 + lost * ln 2). `y` is
# -(1 + e^-x). Above 64, the sigmoid is 1, and `t` could be Inf. Below -87.25, the sigmoid is below the smallest normal
# number. The last bits of a quotient may be wrong, and one step of Newton's method rounds it correctly.
_SIGMOID = f"""
@triton.jit
def swiglu_sigmoid(x):
    x = tl.minimum(x, 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = x * {-_HIGH!r}
    lost = tl.fma(x, {-_LOW!r}, tl.fma(x, {-_HIGH!r}, x * {_HIGH!r}))
    y = tl.fma(tl.exp2(t), tl.fma(lost, {-_LN_2!r}, -1.0), -1.0)
    s = -1.0 / y
    s = tl.fma(tl.fma(y, s, 1.0), s, s)
    return tl.where(x < -87.25, 0.0, s)
"""
# A compiler may fuse a product and a sum, and the result is then rounded only once. So each sum is a fused multiply-add
# whose product is exact: the doubled half of a number.
_GRADIENT = """
@triton.jit
def swiglu_gradient(gate, s, d_silu):
    inverse = tl.fma(s * 0.5, -2.0, 1.0)
    return d_silu * s * tl.fma(gate * 0.5 * inverse, 2.0, 1.0)
"""


def _sigmoid(gate: Tensor) -> Tensor:
    """`1 / (1 + e^-gate)`, and 0 below the smallest normal number."""
    if not _REF:
        return hl.triton_kernel(_SIGMOID, args=(gate,), output_like=gate)
    s = (1.0 / (1.0 + torch.exp(-gate.double()))).float()
    return torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a * b` of fp32, rounded to bfloat16."""
    return (a * b).to(torch.bfloat16)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of bfloat16. Silu and the product are each rounded to bfloat16.

    With the gradient of this product in place of up, the result is the gradient of up.
    """
    x = widened(gate)
    return _product(widened(_product(x, _sigmoid(x))), widened(up))


def gradient_of_gate(gate: Tensor, up: Tensor, dh: Tensor) -> Tensor:
    """The gradient of gate, all in bfloat16, from the gradient of `swiglu`."""
    x = widened(gate)
    s, d_silu = _sigmoid(x), widened(_product(widened(dh), widened(up)))
    if _REF:
        d_gate = (d_silu * s) * (1.0 + x * (1.0 - s))
    else:
        d_gate = hl.triton_kernel(_GRADIENT, args=(x, s, d_silu), output_like=x)
    return d_gate.to(torch.bfloat16)
