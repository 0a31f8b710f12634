"""SwiGLU of gate and up side by side, whose gradient is written where the next matmul reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

_aten = torch.ops.aten


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` of `(M, 2 N)`, gate first, with autograd's values and gradients, bit for bit.

    Autograd would keep three tensors of `(M, N)` and gather the two gradients with one more copy of both; here gate
    and up are kept, and the gradients are written side by side. A second derivative is refused.
    """

    @staticmethod
    def forward(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,), (gate_up,) = gradients, ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # autograd takes no `out`, a compiler needs none
            return torch.cat([_aten.silu_backward(grad * up, gate), grad * silu(gate)], -1)
        out = torch.empty_like(gate_up)
        of_gate, of_up = out.chunk(2, -1)
        torch.mul(grad, up, out=of_gate)
        _aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        _aten.silu.out(gate, out=of_up).mul_(grad)
        return out
