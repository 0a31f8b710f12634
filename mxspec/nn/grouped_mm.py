"""A grouped matmul that trains in MXFP8: the tokens of each expert by the expert's own weights.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, along K | w, along K | `(M, N)` |
| dgrad | dO, along N | w^T, along N | `(M, K)` |
| wgrad | dO^T, along the tokens of each group | x^T, likewise | `(E, N, K)` of w's dtype |

Tokens are padded group by group as they are quantized, in one pass; nothing is read on the host. The weights are
read once for both of their operands. What is saved of x are its codes along the tokens, a byte an element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import mxspec
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.nn._cache import Quantized
from mxspec.nn._linear import as_autocast, backend_now, check_features, check_input, check_parameters
from mxspec.nn.recipe import Recipe, recipe_of


class Tokens(NamedTuple):
    """Token groups as the matmuls read them."""

    rows: Tensor | None = None  # padded, codes along the features
    rows_scale: Tensor | None = None
    columns: Tensor | None = None  # padded, codes along the tokens, column-major
    columns_scale: Tensor | None = None
    start: Tensor | None = None  # where a group begins among the padded rows, and where its padding ends
    end: Tensor | None = None


def quantize_tokens(
    x: Tensor,
    offs: Tensor,
    along_features: bool,
    along_tokens: bool,
    elem_dtype: torch.dtype,
    scaling: str,
    backend: str | None,
) -> Tokens:
    options: Any = {"elem_dtype": elem_dtype, "scaling": scaling, "backend": backend}
    tokens = Tokens()
    if along_features:
        rows, scale, start, end = mxspec.mx_quantize_groups(x, offs, axis=-1, **options)
        tokens = tokens._replace(rows=rows, rows_scale=scale, start=start, end=end)
    if along_tokens:
        columns, scale, start, end = mxspec.mx_quantize_groups(x, offs, axis=-2, **options)
        tokens = tokens._replace(columns=columns, columns_scale=scale, start=start, end=end)
    return tokens


def quantize_experts(w: Tensor, recipe: Recipe, backend: str | None) -> Quantized:
    """The codes of weights `(E, N, K)` for the forward and for dgrad, blocked scales; none where bfloat16 is read."""
    if recipe.format == "bf16":
        return ()
    codes, scale, across, across_scale = mxspec.mx_quantize_rowcol(
        w, scaling=recipe.scaling, scale_layout="blocked", backend=backend
    )
    return codes, scale, across.mT, across_scale


def recipe_of_groups(recipe: Recipe | str, asked_by: str) -> Recipe:
    found = recipe_of(recipe, asked_by)
    if found.format == "fp8_128":
        raise ValueError(f"{asked_by}: there is no grouped matmul of fp8_128 yet; needs a recipe of mxfp8 or bf16")
    return found


class _GroupedMX(torch.autograd.Function):
    """x and w quantized beforehand; both are given for their gradients."""

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        offs: Tensor,
        rows: Tensor,
        rows_scale: Tensor,
        columns: Tensor | None,
        columns_scale: Tensor | None,
        start: Tensor,
        end: Tensor,
        codes: Tensor,
        scale: Tensor,
        across: Tensor,
        across_scale: Tensor,
        recipe: Recipe,
        backend: str | None,
    ) -> Tensor:
        out = mxspec.mx_grouped_gemm(rows, rows_scale, codes, scale, end, out_dtype=x.dtype, backend=backend)
        return mxspec.unpad_token_groups(out, offs, start, x.shape[0], backend=backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, offs, _, _, columns, columns_scale, _, _, _, _, across, across_scale, ctx.recipe, ctx.backend = inputs
        dgrad, wgrad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            offs,
            x if wgrad and ctx.recipe.wgrad_bf16 else None,
            columns if wgrad else None,
            columns_scale if wgrad else None,
            across if dgrad else None,
            across_scale if dgrad else None,
        )
        ctx.x_dtype, ctx.w_dtype, ctx.num_tokens = x.dtype, w.dtype, x.shape[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (offs, x, columns, columns_scale, across, across_scale) = gradients, ctx.saved_tensors
        recipe, backend, (dgrad, wgrad) = ctx.recipe, ctx.backend, ctx.needs_input_grad[:2]
        grad_x = grad_w = None
        dy = quantize_tokens(
            grad, offs, dgrad, wgrad and not recipe.wgrad_bf16, recipe.grad_dtype, recipe.scaling, backend
        )
        if dgrad:
            product = mxspec.mx_grouped_gemm(
                dy.rows, dy.rows_scale, across, across_scale, dy.end, out_dtype=ctx.x_dtype, backend=backend
            )
            grad_x = mxspec.unpad_token_groups(product, offs, dy.start, ctx.num_tokens, backend=backend)
        if wgrad and recipe.wgrad_bf16:
            grad_w = _wgrad_bf16(grad.bfloat16(), x.bfloat16(), offs).to(ctx.w_dtype)
        elif wgrad:
            grad_w = mxspec.mx_grouped_gemm_wgrad(
                dy.columns, dy.columns_scale, columns, columns_scale, dy.end, out_dtype=ctx.w_dtype, backend=backend
            )
        return grad_x, grad_w, *(None,) * 13


class _GroupedBf16(torch.autograd.Function):
    """PyTorch's grouped matmul of bfloat16, with zeros where it leaves what was in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        return _by_experts(x, w.mT, offs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, w, offs) = gradients, ctx.saved_tensors
        grad_x = _by_experts(grad.contiguous(), w, offs) if ctx.needs_input_grad[0] else None
        grad_w = _wgrad_bf16(grad, x, offs) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def _by_experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    of_none = torch.arange(x.shape[0], device=x.device) >= offs[-1:]
    return grouped_mm(x, w, offs=offs).masked_fill(of_none[:, None], 0)


def _wgrad_bf16(grad: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return grouped_mm(grad.contiguous().mT, x.contiguous(), offs=offs).masked_fill(empty[:, None, None], 0)


def quantize_input(x: Tensor, offs: Tensor, for_wgrad: bool, recipe: Recipe, backend: str | None) -> Tokens | None:
    """The activations as the forward reads them, and as wgrad will; they serve any number of weights."""
    if recipe.format == "bf16":
        return None
    kept = torch.is_grad_enabled() and for_wgrad and not recipe.wgrad_bf16
    return quantize_tokens(x.detach(), offs, True, kept, torch.float8_e4m3fn, recipe.scaling, backend)


def product(
    x: Tensor, w: Tensor, offs: Tensor, tokens: Tokens | None, codes: Quantized, recipe: Recipe, backend: str | None
) -> Tensor:
    """`mx_grouped_mm` of what has been checked and quantized."""
    if tokens is None:
        return _GroupedBf16.apply(x.bfloat16().contiguous(), w.bfloat16().contiguous(), offs).to(x.dtype)
    return _GroupedMX.apply(x, w, offs, *tokens, *codes, recipe, backend)


def mx_grouped_mm(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe | str = "mxfp8_rceil") -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, with gradients, in the recipe's format.

    `out[m] = x[m] @ w[g]^T` where g is the group of token m, that is `offs[g-1] <= m < offs[g]`; 0 where m is in none.
    Each operand of the forward, dgrad and wgrad is quantized in blocks of 32 along the dimension that its matmul sums
    over. Nothing waits for the device.

    Args:
        x: `(M, K)`, the tokens of each group together; bfloat16 or float32; under autocast it is cast first.
        w: `(E, N, K)`, bfloat16 or float32; N and K multiples of 32.
        offs: `(E,)` int32 on x's device, the exclusive end of each group, of any alignment. Never decreasing, the last
            at most M.
        recipe: an mxfp8 `Recipe` or its name, or `bf16`: PyTorch's own grouped matmul, of operands cast to bfloat16.
            With `wgrad_bf16` the gradient of w is such a matmul, rounded to bfloat16.

    Returns:
        `(M, N)` of x's dtype, contiguous. Rows from `offs[-1]` on are 0, and so are their gradients. The gradient of w
        is summed in fp32 and rounded once, to w's dtype; that of an expert without tokens is 0.

    Special values: as for `mx_grouped_gemm`: a NaN stays within its group.

    Raises:
        TypeError: the dtype of x, w or offs.
        ValueError: a rank, a shape, a device, N or K, or a recipe of fp8_128.

    Example:
        >>> x, w = torch.ones(3, 32), torch.stack([torch.ones(32, 32), -torch.ones(32, 32)])
        >>> mx_grouped_mm(x, w, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
        [32.0, -32.0, 0.0]

    Source: PyTorch, `torch.nn.functional.grouped_mm`; torchao, `prototype/moe_training`.
    """
    name = "mx_grouped_mm"
    found, x = recipe_of_groups(recipe, name), as_autocast(x)
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, w {tuple(w.shape)}; needs (M, K) and (E, N, K)")
    check_parameters(name, w.dtype)
    check_input(name, x, w.shape[2])
    check_features(name, MX_BLOCK_SIZE, N=w.shape[1], K=w.shape[2])
    check_offs(name, offs, w.shape[0], x)
    backend = backend_now()
    codes = quantize_experts(w.detach(), found, backend)
    tokens = quantize_input(x, offs, w.requires_grad, found, backend)
    return product(x, w, offs, tokens, codes, found, backend)


def check_offs(name: str, offs: Tensor, experts: int, x: Tensor) -> None:
    if offs.dtype != torch.int32:
        raise TypeError(f"{name}: offs has dtype {offs.dtype}; needs torch.int32")
    if offs.shape != (experts,) or not experts:
        raise ValueError(f"{name}: offs has shape {tuple(offs.shape)}; needs ({experts},) for {experts} experts")
    if offs.device != x.device:
        raise ValueError(f"{name}: offs is on {offs.device}; needs one device, that of x, {x.device}")
