"""Grouped matmuls in bfloat16, with gradients.

PyTorch's grouped matmul leaves some rows and experts uninitialized. These functions write zeros there. In plain
eager mode they write these zeros in place. Under torch.compile or a dispatch mode they copy the whole result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import mxspec
from mxspec.nn._autograd import first_derivative_only, keep, kept, signature_once

MAX_GROUPS = 1023  # the limit of PyTorch's grouped matmul


@signature_once
class GroupedBf16(torch.autograd.Function):
    """`x @ w^T` of each expert's tokens and weights. If w is stored transposed, `(E, K, N)`, this is `x @ w`.

    PyTorch's own derivative of a grouped matmul also leaves memory uninitialized. So a second derivative raises here
    too.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, offs: Tensor, name: str, transposed: bool) -> Tensor:
        return gemm_bf16(x, w if transposed else w.mT, offs)

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
            grad_x = gemm_bf16(contiguous(grad_out), w.mT if ctx.transposed else w, offs)
        if wgrad:
            grad_w = wgrad_bf16(x, grad_out, offs) if ctx.transposed else wgrad_bf16(grad_out, x, offs)
        return grad_x, grad_w, None, None, None


def wgrad_bf16(grad_out: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    """The gradient of one weight, or of every expert's weight. An expert without tokens gets zeros."""
    if offs is None:
        return grad_out.mT @ x
    return _with_zeros(grouped_mm(contiguous(grad_out).mT, contiguous(x), offs=offs), offs)


def contiguous(tokens: Tensor) -> Tensor:
    # PyTorch calls an empty tensor contiguous whatever its strides are. grouped_mm accepts only a new tensor's strides.
    return tokens.contiguous() if tokens.numel() else tokens.clone(memory_format=torch.contiguous_format)


def gemm_bf16(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The tokens of each expert times the expert's matrix of w, `(E, K, N)`. Rows without an expert are 0."""
    return _with_zeros(grouped_mm(x, w, offs=offs), offs)


def _with_zeros(out: Tensor, offs: Tensor) -> Tensor:
    """Write zeros into the uninitialized rows or matrices of a bfloat16 product."""
    # In torch 2.11, if a compiled forward changes its result in place, all gradients are zero. Selective checkpointing,
    # which is a dispatch mode, raises if a product that it has saved is changed.
    if not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():
        mxspec.zero_unused_(out, offs, backend="auto")  # whatever the user chose: all backends write the same bytes
        return out
    begins = torch.cat([offs.new_zeros(1), offs[:-1]])
    unused = offs <= begins if out.ndim == 3 else torch.arange(out.shape[0], device=out.device) >= offs[-1:]
    return out.masked_fill(unused.view(-1, *[1] * (out.ndim - 1)), 0)
