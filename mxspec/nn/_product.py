"""A differentiable matmul of activations and a weight: one matrix, or one matrix per expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.nn._autograd import first_derivative_only, keep, kept, signature_once
from mxspec.nn._bf16 import GroupedBf16, contiguous, wgrad_bf16
from mxspec.nn._format import Format, Operand, Tokens, Weight


def product(x: Tensor, w: Tensor, offs: Tensor | None, tokens: Tokens, weight: Weight, by: Format) -> Tensor:
    """`x @ w^T`. The caller has checked x and w, and has quantized them to `tokens` and `weight`."""
    return _Product.apply(x, w, offs, tokens, weight, by, False)


def grouped_product(
    x: Tensor, w: Tensor, offs: Tensor, tokens: Tokens | None, weight: Weight | None, by: Format | None,
    name: str,
    transposed: bool = False,
) -> Tensor:  # fmt: skip
    """`product` of token groups. Without a format, the matmul is in bfloat16. A transposed w is `(E, K, N)`."""
    if by is None or tokens is None or weight is None:
        operand = w.bfloat16().contiguous()
        return GroupedBf16.apply(contiguous(x.bfloat16()), operand, offs, name, transposed).to(x.dtype)
    return _Product.apply(x, w, offs, tokens, weight, by, transposed)


@signature_once
class _Product(torch.autograd.Function):
    """The matmuls read `tokens` and `weight`. x and w are arguments because autograd gives them the gradients.

    The gradient of a transposed w is computed transposed: its two operands change places.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, offs: Tensor | None, tokens: Tokens, weight: Weight, by: Format, transposed: bool
    ) -> Tensor:
        assert tokens.rows is not None
        return by.gemm(tokens.rows, weight.codes, weight.scale, offs, x.shape[0], x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, offs, tokens, weight, by, transposed = inputs
        ctx.watch = by.watch and by.watch.product(by, x, w, offs, tokens, ctx.needs_input_grad[0], transposed)
        (dgrad, wgrad), (codes, scale, *_) = ctx.needs_input_grad[:2], tokens.columns or (None, None)
        w_t, scale_t = weight.for_dgrad(w)
        keep(
            ctx,
            x,
            w,
            by.name,
            by,
            offs,
            x if wgrad and codes is None else None,
            codes if wgrad else None,
            scale if wgrad else None,
            w_t if dgrad else None,
            scale_t if dgrad else None,
        )
        ctx.by, ctx.x_dtype, ctx.w_dtype, ctx.transposed = by, x.dtype, w.dtype, transposed
        ctx.saves_w = weight.codes_t is None

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,), (offs, x, codes, scale, w_t, scale_t) = gradients, kept(ctx)
        by, (dgrad, wgrad), grad_x, grad_w = ctx.by, ctx.needs_input_grad[:2], None, None
        for_wgrad = wgrad and not by.recipe.wgrad_bf16
        # If one read makes both directions, it does so here. Else the codes for wgrad are made after dgrad, so that
        # the codes of both directions are never in memory at once.
        rows, columns, random = by.gradients(grad_out, offs, dgrad, for_wgrad and by.reads_once(offs))
        if dgrad:
            if ctx.saves_w:
                w_t, scale_t = by.saved_weight(w_t, ctx.transposed, rows.codes)
            grad_x = by.gemm(rows, w_t, scale_t, offs, grad_out.shape[0], ctx.x_dtype)
        rows = w_t = scale_t = None  # free the memory for wgrad
        if for_wgrad:
            columns = columns or by.gradients(grad_out, offs, False, True).columns
            x_columns = Operand(codes, scale)
            if codes is None:
                x_columns = by.tokens(x, offs, torch.float8_e4m3fn, False, True).columns
            x_columns = x_columns._replace(end=columns.end)
            operands = (x_columns, columns) if ctx.transposed else (columns, x_columns)
            grad_w = by.wgrad(*operands, offs, ctx.w_dtype)
        elif wgrad:
            a, b = (x, grad_out) if ctx.transposed else (grad_out, x)
            grad_w = wgrad_bf16(a.bfloat16(), b.bfloat16(), offs).to(ctx.w_dtype)
        if ctx.watch is not None:
            ctx.watch.gradient(lambda: grad_out, offs, dgrad, for_wgrad, random)
            ctx.watch.activation(lambda: x, offs, False, for_wgrad and codes is None)
        return grad_x, grad_w, None, None, None, None, None
