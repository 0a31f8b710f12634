"""Grouped matmuls of bfloat16 with gradients, with zeros where PyTorch's leave what was in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from mxspec.nn._autograd import first_derivative_only, keep, kept


class GroupedBf16(torch.autograd.Function):
    """`x @ w^T` by the experts' weights.

    The derivative of PyTorch's own also leaves what was in memory, so that a second derivative is refused here too.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, offs: Tensor, name: str) -> Tensor:
        return _by_experts(x, w.mT, offs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        (x, w, offs, name), (dgrad, wgrad) = inputs, ctx.needs_input_grad[:2]
        keep(ctx, x, w, name, None, x if wgrad else None, w if dgrad else None, offs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,), (x, w, offs) = gradients, kept(ctx)
        grad_x = _by_experts(contiguous(grad_out), w, offs) if ctx.needs_input_grad[0] else None
        grad_w = wgrad_bf16(grad_out, x, offs) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


def wgrad_bf16(grad_out: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    """The gradient of a weight, or of each expert's: zeros for an expert without tokens."""
    if offs is None:
        return grad_out.mT @ x
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return _zero(grouped_mm(contiguous(grad_out).mT, contiguous(x), offs=offs), empty[:, None, None])


def contiguous(tokens: Tensor) -> Tensor:
    # No tokens are contiguous by any strides; grouped_mm takes only those of a new tensor.
    return tokens.contiguous() if tokens.numel() else tokens.clone(memory_format=torch.contiguous_format)


def _by_experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    of_none = torch.arange(x.shape[0], device=x.device) >= offs[-1:]
    return _zero(grouped_mm(x, w, offs=offs), of_none[:, None])


def _zero(out: Tensor, where: Tensor) -> Tensor:
    """A product of bfloat16, with zeros where it has what was in memory."""
    if torch.compiler.is_compiling():  # torch 2.11 makes every gradient zero of a forward that changes its result
        return out.masked_fill(where, 0)
    out.view(torch.float64).masked_fill_(where, 0)  # by eight bytes a thread, where PyTorch's kernel has one element
    return out
