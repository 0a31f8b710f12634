"""A Linear whose three matmuls multiply MXFP8 codes, blocks of 32 along the dimension that is summed.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, along K | weight, along K | `(tokens, N)` |
| dgrad | dO, along N | weight^T, along N | `(tokens, K)` |
| wgrad | dO^T, along the tokens | x^T, along the tokens | `(N, K)` of the weight's dtype |

Each tensor is read once and quantized along both of its dimensions: x and the weight in the forward, dO in the
backward. What is saved of x are its codes along the tokens, a byte an element.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

import mxspec
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.nn._autograd import first_derivative_only, keep, kept
from mxspec.nn._cache import Quantized
from mxspec.nn._linear import QuantizedLinear, whole_blocks
from mxspec.nn.recipe import Recipe, recipe_of

_SCALE_LAYOUT = "plain"  # what mx_gemm's kernels on Hopper read; cuBLAS wants `blocked`
Operand = tuple[Tensor | None, Tensor | None]  # K-major codes and their scale, or two None where no matmul reads them


def _operands(
    x: Tensor, along_features: bool, along_tokens: bool, elem_dtype: torch.dtype, scaling: str, backend: str | None
) -> tuple[Operand, Operand]:
    """x and x^T as the matmuls read them, from one read of x; tokens of zeros fill the last block of tokens."""
    options: Any = {
        "elem_dtype": elem_dtype, "scaling": scaling, "scale_layout": _SCALE_LAYOUT, "backend": backend
    }  # fmt: skip
    rows: Operand = (None, None)
    columns: Operand = (None, None)
    padded = whole_blocks(x, MX_BLOCK_SIZE) if along_tokens else x
    if along_features and along_tokens:
        q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(padded, **options)
        # Tiles of 128 rows are as many with the padding as without, and what stands in them for it is never read.
        rows = q_row[: x.shape[0]], s_row[: x.shape[0]] if _SCALE_LAYOUT == "plain" else s_row
        columns = q_col.mT, s_col
    elif along_features:
        rows = mxspec.mx_quantize(x, axis=-1, **options)
    elif along_tokens:
        q_col, s_col = mxspec.mx_quantize(padded, axis=-2, **options)
        columns = q_col.mT, s_col
    return rows, columns


def _gemm(a: Operand, b: Operand, out_dtype: torch.dtype, backend: str | None) -> Tensor:
    return mxspec.mx_gemm(*a, *b, out_dtype=out_dtype, scale_layout=_SCALE_LAYOUT, backend=backend)  # type: ignore[arg-type]


class _Linear(torch.autograd.Function):
    """`x @ weight^T` of two matrices, both quantized beforehand."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        a_scale: Tensor,
        xt: Tensor | None,
        xt_scale: Tensor | None,
        w: Tensor,
        w_scale: Tensor,
        wt: Tensor,
        wt_scale: Tensor,
        recipe: Recipe,
        backend: str | None,
        name: str,
    ) -> Tensor:
        return _gemm((a, a_scale), (w, w_scale), x.dtype, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, _, xt, xt_scale, _, _, wt, wt_scale, ctx.recipe, backend, name = inputs
        dgrad, wgrad = ctx.needs_input_grad[:2]
        keep(
            ctx,
            x,
            weight,
            name,
            backend,
            x if wgrad and ctx.recipe.wgrad_bf16 else None,
            xt if wgrad else None,
            xt_scale if wgrad else None,
            wt if dgrad else None,
            wt_scale if dgrad else None,
        )
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, xt, xt_scale, wt, wt_scale) = gradients, kept(ctx)
        recipe, backend, (dgrad, wgrad) = ctx.recipe, ctx.backend, ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        rows, columns = _operands(
            grad, dgrad, wgrad and not recipe.wgrad_bf16, recipe.grad_dtype, recipe.scaling, backend
        )
        if dgrad:
            grad_x = _gemm(rows, (wt, wt_scale), ctx.x_dtype, backend)
        if wgrad and recipe.wgrad_bf16:
            grad_weight = (grad.bfloat16().mT @ x.bfloat16()).to(ctx.weight_dtype)
        elif wgrad:
            grad_weight = _gemm(columns, (xt, xt_scale), ctx.weight_dtype, backend)
        return grad_x, grad_weight, *(None,) * 11


class MXLinear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply MXFP8 codes.

    `y = x @ weight^T + bias`, each operand quantized in blocks of 32 along the dimension that its matmul sums over. The
    weight is quantized once a forward, for dgrad as well; `cache_weights` stretches that over several. Where the
    weight needs a gradient, x is quantized along the tokens in the forward and only those codes are kept of it; a
    number of tokens that is no multiple of 32 is padded with zeros for that. Parameters and state dict are those of
    `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 32.
        bias: whether there is one; it is added to the rounded product.
        device, dtype: of the parameters; bfloat16 or float32.
        recipe: an mxfp8 `Recipe` or its name. With `wgrad_bf16` the gradient of the weight is a bfloat16 matmul of dO
            and x, rounded to bfloat16, and x itself is kept.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens; under autocast it is cast as `nn.Linear` would.
        Returns `(..., N)` of that dtype. The gradient of the weight is summed in fp32 and rounded once, to the
            weight's dtype.

    Special values: a NaN or an Inf in a token makes the token's output NaN; one in the weight its column.

    Raises:
        TypeError: a dtype other than those, or an input that is no tensor.
        ValueError: features that are no multiples of 32, an x of another last dimension or device, or not dense, a
            recipe of another format.
        RuntimeError: a weight that changed while `cache_weights` held its codes, the derivative of a gradient, as a
            gradient penalty needs it, or a checkpointed forward that ran again by another backend.

    Example:
        >>> layer = MXLinear.from_linear(nn.Linear(64, 32), recipe="mxfp8_floor")
        >>> layer(torch.zeros(5, 64)).shape
        torch.Size([5, 32])

    Source: OCP MX v1.0; NVIDIA, "Recipes for Pre-training LLMs with MXFP8", 2025.
    """

    block_size: ClassVar[int] = MX_BLOCK_SIZE

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "mxfp8_rceil",
    ) -> None:
        found = recipe_of(recipe, "MXLinear")
        if found.format != "mxfp8":
            raise ValueError(f"MXLinear: the recipe's format is {found.format}; needs mxfp8")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = found

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe | str = "mxfp8_rceil") -> Self:
        """The same parameters, not copies of them, in a layer of this kind; nothing else of the Linear comes along."""
        return cls._with_parameters_of(linear, recipe=recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"

    def _quantize(self, weight: Tensor, backend: str | None) -> Quantized:
        w, w_scale, wt, wt_scale = mxspec.mx_quantize_rowcol(
            weight, scaling=self.recipe.scaling, scale_layout=_SCALE_LAYOUT, backend=backend
        )
        return w, w_scale, wt.mT, wt_scale

    def _product(self, x: Tensor, codes: Quantized, backend: str | None) -> Tensor:
        kept = torch.is_grad_enabled() and self.weight.requires_grad and not self.recipe.wgrad_bf16
        rows, columns = _operands(x.detach(), True, kept, torch.float8_e4m3fn, self.recipe.scaling, backend)
        return _Linear.apply(x, self.weight, *rows, *columns, *codes, self.recipe, backend, type(self).__name__)
