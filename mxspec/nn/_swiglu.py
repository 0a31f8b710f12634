"""SwiGLU of gate and up side by side, whose gradient is written where the next matmul reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate_up: Tensor, backend: str | None) -> Tensor:
    """`silu(gate) * up` of `(M, 2 N)`, gate first; on a GPU one kernel, and one of its gradient, made by Inductor.

    The reference backend computes it by PyTorch's own kernels, one an operation, and rounds after each.
    """
    return _SwiGLU.apply(gate_up, gate_up.is_cuda and backend != "reference" and not torch.compiler.is_compiling())


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up alone, where autograd would keep silu(gate) as well. A second derivative is refused."""

    @staticmethod
    def forward(gate_up: Tensor, fused: bool) -> Tensor:
        return _compiled(_forward)(gate_up) if fused else _forward(gate_up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        gate_up, ctx.fused = inputs
        ctx.save_for_backward(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grad,), (gate_up,) = gradients, ctx.saved_tensors
        fused = ctx.fused and not torch.is_grad_enabled()  # to be refused, it must be recorded
        return (_compiled(_backward)(grad, gate_up) if fused else _backward(grad, gate_up)), None


def _forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def _backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)], -1)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True)
