"""SwiGLU in bfloat16, `silu(gate) * up`, and its gradient. Each rounding is the one that PyTorch makes.

PyTorch's eager kernels compute `silu(gate)` and its derivative in fp32 and round each result to bfloat16. The last bits
of their exponential differ from machine to machine. So `sigmoid` is computed in float64 here, and rounded. A test shows
that no bfloat16 result of PyTorch's CPU kernels tells the difference, except for three gates from -88.5 to -87.5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """The real number `1 / (1 + e^-x)`, rounded to fp32; 0 where it is below the smallest normal number, 2^-126.

    Near 0 it is `1/2 + x/4 - x^3/48`. For some small x, `1/2 + x/4` lies in the middle of two fp32 numbers, and float64
    has no room for the rest. So for small x the sum is moved toward 1/2 by a little, which passes no other middle.
    """
    x = x.double()
    s = torch.where(x.abs() < 2.0**-12, 0.5 + x * (0.25 - 2.0**-26), 1.0 / (1.0 + torch.exp(-x))).float()
    return torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)  # False for NaN, so NaN stays


def silu(gate: Tensor) -> Tensor:
    """`gate * sigmoid(gate)`, rounded to fp32 and then to bfloat16."""
    return (gate.float() * sigmoid(gate)).bfloat16()


def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and the up of `(M, 2I)`: each `(M, I)`."""
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, rounded to bfloat16."""
    return silu(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> Tensor:
    """The gradient of gate and up, `(M, 2I)` bfloat16, from the gradient of `swiglu`. Each argument is `(M, I)`.

    `d_up = dh * silu(gate)` and `d_silu = dh * up`, each rounded to bfloat16. With `s = sigmoid(gate)`,
    `d_gate = (d_silu * s) * (1 + gate * (1 - s))`: each operation is rounded to fp32, and the result to bfloat16.
    """
    d_up, d_silu = dh * silu(gate), dh * up
    s = sigmoid(gate)
    d_gate = (d_silu.float() * s) * (1.0 + gate.float() * (1.0 - s))
    return torch.cat([d_gate.bfloat16(), d_up], -1)
