"""Grouped matmuls in bfloat16, with gradients.

PyTorch's grouped matmul leaves some rows and experts uninitialized. These functions write zeros there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from mxspec.nn._autograd import first_derivative_only, keep, kept


class GroupedBf16(torch.autograd.Function):
    """`x @ w^T`, the tokens of each expert with the expert's weights. A transposed w is `(E, K, N)`: `x @ w`.

    PyTorch's own derivative of a grouped matmul also leaves memory uninitialized. So a second derivative raises here
    too.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, offs: Tensor, name: str, transposed: bool) -> Tensor:
        return _by_experts(x, w if transposed else w.mT, offs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        (x, w, offs, name, ctx.transposed), (dgrad, wgrad) = inputs, ctx.needs_input_grad[:2]
        keep(ctx, x, w, name, None, x if wgrad else None, w if dgrad else None, offs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,), (x, w, offs) = gradients, kept(ctx)
        (dgrad, wgrad), grad_x, grad_w = ctx.needs_input_grad[:2], None, None
        if dgrad:
            grad_x = _by_experts(contiguous(grad_out), w.mT if ctx.transposed else w, offs)
        if wgrad:
            grad_w = wgrad_bf16(x, grad_out, offs) if ctx.transposed else wgrad_bf16(grad_out, x, offs)
        return grad_x, grad_w, None, None, None


def wgrad_bf16(grad_out: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    """The gradient of one weight, or of every expert's weight. An expert without tokens gets zeros."""
    if offs is None:
        return grad_out.mT @ x
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return _zero(grouped_mm(contiguous(grad_out).mT, contiguous(x), offs=offs), empty[:, None, None])


def contiguous(tokens: Tensor) -> Tensor:
    # A tensor without tokens is contiguous whatever its strides, but grouped_mm accepts only a new tensor's strides.
    return tokens.contiguous() if tokens.numel() else tokens.clone(memory_format=torch.contiguous_format)


def _by_experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    of_none = torch.arange(x.shape[0], device=x.device) >= offs[-1:]
    return _zero(grouped_mm(x, w, offs=offs), of_none[:, None])


def _zero(out: Tensor, where: Tensor) -> Tensor:
    """Write zeros into the uninitialized part of a bfloat16 product, which `where` marks."""
    if torch.compiler.is_compiling():  # in torch 2.11, if a forward changes its result in place, all gradients are zero
        return out.masked_fill(where, 0)
    out.view(torch.float64).masked_fill_(where, 0)  # as float64, since PyTorch's kernel fills one element per thread
    return out
