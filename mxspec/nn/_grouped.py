"""A grouped matmul with gradients: the tokens of each expert by the expert's own weights.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, along K | w, along K | `(M, N)` |
| dgrad | dO, along N | w^T, along N | `(M, K)` |
| wgrad | dO^T, along the tokens of each group | x^T, likewise | `(E, N, K)` of w's dtype |

Nothing is read on the host. The weights are read once for both of their operands; `fp8_128` has them in 128x128 blocks,
all else in blocks along the dimension named. What is saved of x are its codes along the tokens, a byte an element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from mxspec.nn._autograd import first_derivative_only, keep, kept
from mxspec.nn._cache import Quantized
from mxspec.nn._grouped_formats import FORMATS, Groups
from mxspec.nn.recipe import Recipe


class Tokens(NamedTuple):
    """The activations as the forward reads them, and as wgrad will."""

    rows: Tensor
    rows_scale: Tensor
    start: Tensor | None
    end: Tensor | None
    columns: Tensor | None = None
    columns_scale: Tensor | None = None


def quantize_experts(w: Tensor, recipe: Recipe, backend: str | None) -> Quantized:
    """The codes of weights `(E, N, K)` for the forward and for dgrad; none where bfloat16 is read."""
    return () if recipe.format == "bf16" else FORMATS[recipe.format].experts(w, recipe, backend)


def quantize_input(x: Tensor, offs: Tensor, for_wgrad: bool, recipe: Recipe, backend: str | None) -> Tokens | None:
    """The activations of any number of weights; none where bfloat16 is read."""
    if recipe.format == "bf16":
        return None
    of, x, e4m3 = FORMATS[recipe.format], x.detach(), torch.float8_e4m3fn
    tokens = Tokens(*of.rows(x, offs, e4m3, recipe, backend))
    if torch.is_grad_enabled() and for_wgrad and not recipe.wgrad_bf16:
        columns = of.columns(x, offs, e4m3, recipe, backend)
        tokens = tokens._replace(columns=columns.codes, columns_scale=columns.scale)
    return tokens


def product(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    tokens: Tokens | None,
    codes: Quantized,
    recipe: Recipe,
    backend: str | None,
    name: str,
) -> Tensor:
    """`x @ w^T`, group by group, of what has been checked and quantized; for the layer or function of that name."""
    if tokens is None:
        return _GroupedBf16.apply(_contiguous(x.bfloat16()), w.bfloat16().contiguous(), offs, name).to(x.dtype)
    return _Grouped.apply(x, w, offs, *tokens, *codes, recipe, backend, name)


class _Grouped(torch.autograd.Function):
    """x and w quantized beforehand; both are given for their gradients."""

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        offs: Tensor,
        rows: Tensor,
        rows_scale: Tensor,
        start: Tensor | None,
        end: Tensor | None,
        columns: Tensor | None,
        columns_scale: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        across: Tensor,
        across_scale: Tensor,
        recipe: Recipe,
        backend: str | None,
        name: str,
    ) -> Tensor:
        a = Groups(rows, rows_scale, start, end)
        return FORMATS[recipe.format].gemm(a, codes, scale, offs, x.shape[0], x.dtype, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, offs, *_, columns, columns_scale, _, _, across, across_scale, ctx.recipe, backend, name = inputs
        dgrad, wgrad = ctx.needs_input_grad[:2]
        keep(
            ctx,
            x,
            w,
            name,
            backend,
            offs,
            x if wgrad and ctx.recipe.wgrad_bf16 else None,
            columns if wgrad else None,
            columns_scale if wgrad else None,
            across if dgrad else None,
            across_scale if dgrad else None,
        )
        ctx.x_dtype, ctx.w_dtype = x.dtype, w.dtype

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (offs, x, columns, columns_scale, across, across_scale) = gradients, kept(ctx)
        recipe, backend, (dgrad, wgrad) = ctx.recipe, ctx.backend, ctx.needs_input_grad[:2]
        of, grad_x, grad_w = FORMATS[recipe.format], None, None
        if dgrad:
            dy = of.rows(grad, offs, recipe.grad_dtype, recipe, backend)
            grad_x = of.gemm(dy, across, across_scale, offs, grad.shape[0], ctx.x_dtype, backend)
        if wgrad and recipe.wgrad_bf16:
            grad_w = _wgrad_bf16(grad.bfloat16(), x.bfloat16(), offs).to(ctx.w_dtype)
        elif wgrad:
            dy = of.columns(grad, offs, recipe.grad_dtype, recipe, backend)
            grad_w = of.wgrad(dy, columns, columns_scale, ctx.w_dtype, backend)
        return grad_x, grad_w, *(None,) * 14


class _GroupedBf16(torch.autograd.Function):
    """PyTorch's grouped matmul of bfloat16, with zeros where it leaves what was in memory.

    Its own derivative leaves such memory too, so that a second one is refused here as well.
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
        (grad,), (x, w, offs) = gradients, kept(ctx)
        grad_x = _by_experts(_contiguous(grad), w, offs) if ctx.needs_input_grad[0] else None
        grad_w = _wgrad_bf16(grad, x, offs) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


def _by_experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    of_none = torch.arange(x.shape[0], device=x.device) >= offs[-1:]
    return _zero(grouped_mm(x, w, offs=offs), of_none[:, None])


def _wgrad_bf16(grad: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return _zero(grouped_mm(_contiguous(grad).mT, _contiguous(x), offs=offs), empty[:, None, None])


def _contiguous(tokens: Tensor) -> Tensor:
    # No tokens are contiguous by any strides; grouped_mm takes only those of a new tensor.
    return tokens.contiguous() if tokens.numel() else tokens.clone(memory_format=torch.contiguous_format)


def _zero(out: Tensor, where: Tensor) -> Tensor:
    """A product of bfloat16, with zeros where it has what was in memory."""
    if torch.compiler.is_compiling():  # torch 2.11 makes every gradient zero of a forward that changes its result
        return out.masked_fill(where, 0)
    out.view(torch.float64).masked_fill_(where, 0)  # by eight bytes a thread, where PyTorch's kernel has one element
    return out
