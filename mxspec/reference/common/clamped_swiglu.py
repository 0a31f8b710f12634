"""The clamped SwiGLU of gpt-oss in bfloat16, `gate * sigmoid(1.702 * gate) * (up + 1)`, and its gradient.

Only two functions of the gate are not elementary: `gate * sigmoid(1.702 * gate)` and its derivative. Each is rounded
to bfloat16, so each is a table of 65536 numbers. Every other step is a sum or a product of two numbers of bfloat16,
rounded to bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common import checks

ALPHA, LIMIT = 1.702, 7.0  # gpt-oss, `swiglu` of its reference implementation


def check_operands(op: str, gate_up: Tensor, bias: Tensor, offs: Tensor, scale_format: str, check_offs: bool) -> None:
    """The refusals that the forward and the backward share."""
    for name, tensor in (("gate_up", gate_up), ("bias", bias)):
        checks.tensor_dtype(op, name, tensor, (torch.bfloat16,))
        checks.rank(op, name, tensor, (2,))
    checks.multiple(op, "2I", gate_up.shape[1], 2 * FP8_SIZE_MULTIPLE, of="")
    checks.fp8_groups(op, ("gate_up", gate_up), offs, scale_format, check_offs)
    needed = offs.shape[0], gate_up.shape[1]
    checks.shape(op, "bias", bias, needed, f"for {needed[0]} groups and a gate_up of shape {tuple(gate_up.shape)}")
    checks.same_device(op, ("gate_up", gate_up), ("bias", bias))


def sigmoid(gate: Tensor) -> Tensor:
    """The real number `1 / (1 + e^(-1.702 gate))`, rounded to fp32; 0 where it is below 2^-126."""
    s = (1.0 / (1.0 + torch.exp(gate.double() * -ALPHA))).float()
    return torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)  # False for NaN, so NaN stays


def glu(gate: Tensor) -> Tensor:
    """`gate * sigmoid(gate)`, rounded to fp32 and then to bfloat16."""
    return (gate.float() * sigmoid(gate)).bfloat16()


def slope(gate: Tensor) -> Tensor:
    """The derivative, `s + 1.702 gate * s * (1 - s)`, rounded to bfloat16."""
    s = sigmoid(gate).double()
    return (s + ALPHA * gate.double() * s * (1.0 - s)).bfloat16()


def with_bias(gate_up: Tensor, bias: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """The gates, `(M, I)`, and the ups, `(M, I)`: each row plus its group's bias. A row without a group has no bias."""
    rows = torch.arange(gate_up.shape[0], device=gate_up.device, dtype=torch.int32)
    group = (offs[None] <= rows[:, None]).sum(1)
    none = bias.new_full((1, bias.shape[1]), -0.0)  # x + -0 is x, also for an x of -0
    total = gate_up + torch.cat([bias, none])[group]
    return total[:, ::2], total[:, 1::2]


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`glu(min(gate, 7)) * (max(-7, min(up, 7)) + 1)`: the sum and the product are each rounded to bfloat16."""
    return glu(gate.clamp(max=LIMIT)) * (up.clamp(-LIMIT, LIMIT) + 1.0)


def clamped_swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> Tensor:
    """The gradient of gate and up, interleaved, `(M, 2I)`: 0 where a clamp changes the number, or for NaN."""
    g, u = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    d_gate, d_up = (dh * (u + 1.0)) * slope(g), dh * glu(g)
    zero = dh.new_zeros(())
    d_gate, d_up = torch.where(gate <= LIMIT, d_gate, zero), torch.where(up.abs() <= LIMIT, d_up, zero)
    return torch.stack([d_gate, d_up], -1).flatten(1)
