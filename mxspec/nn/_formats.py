"""The training formats: how each quantizes the operands of a layer's three matmuls, and which ops multiply them.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, along K | w, along K | `(M, N)` |
| dgrad | grad_out, along N | w^T, along N | `(M, K)` |
| wgrad | grad_out^T, along the tokens | x^T, along the tokens | `(N, K)`, or `(E, N, K)` of experts, of w's dtype |

A `Format` serves one forward and its backward: it has their recipe and their backend. `offs` holds the ends of token
groups, each of which has a matrix of weights; None stands for one matrix. Nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE
from mxspec.nn.recipe import Recipe

_SCALE_LAYOUT = "plain"  # what mx_gemm's kernels on Hopper read; cuBLAS wants `blocked`


class Operand(NamedTuple):
    """K-major codes and their scale. Padded token groups also have each group's first row and the end of its rows."""

    codes: Tensor
    scale: Tensor
    start: Tensor | None = None
    end: Tensor | None = None


class Tokens(NamedTuple):
    """Activations, or their gradients: along the features, and along the tokens. None where no matmul reads them."""

    rows: Operand | None
    columns: Operand | None


class Weight(NamedTuple):
    """The codes of a weight for the forward, and those of its transpose for dgrad."""

    codes: Tensor
    scale: Tensor
    codes_t: Tensor
    scale_t: Tensor


@dataclass(frozen=True)
class Format:
    recipe: Recipe
    backend: str | None
    name: str  # of the layer or the function, for its errors

    def weight(self, w: Tensor) -> Weight:
        """The codes of a weight `(N, K)` or `(E, N, K)`, from one read."""
        raise NotImplementedError

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        """The codes of activations `(M, K)` or of their gradients."""
        raise NotImplementedError

    def gemm(self, a: Operand, b: Tensor, b_scale: Tensor, offs: Tensor | None, M: int, dtype: torch.dtype) -> Tensor:
        """The forward, or dgrad."""
        raise NotImplementedError

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def saves_codes(self, offs: Tensor | None) -> bool:
        """Whether x's codes along the tokens are kept for wgrad; else x itself is."""
        return True

    def reads_once(self, offs: Tensor | None) -> bool:
        """Whether one op makes the codes of both directions."""
        return False

    def activations(self, x: Tensor, offs: Tensor | None, weight_needs_grad: bool) -> Tokens:
        """What the forward reads of x, and what wgrad will."""
        along_tokens = torch.is_grad_enabled() and weight_needs_grad and self.saves_codes(offs)
        return self.tokens(x.detach(), offs, torch.float8_e4m3fn, True, along_tokens)


class MX(Format):
    """Blocks of 32. One matrix is read once for both directions. Token groups are padded for every matmul."""

    def _options(self, **more: Any) -> dict[str, Any]:
        return {"scaling": self.recipe.scaling, "backend": self.backend, **more}

    def weight(self, w: Tensor) -> Weight:
        layout = "blocked" if w.ndim == 3 else _SCALE_LAYOUT
        codes, scale, codes_t, scale_t = mxspec.mx_quantize_rowcol(w, **self._options(scale_layout=layout))
        return Weight(codes, scale, codes_t.mT, scale_t)

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        options = self._options(elem_dtype=elem_dtype)
        if offs is not None:
            return Tokens(
                Operand(*mxspec.mx_quantize_groups(x, offs, axis=-1, **options)) if along_features else None,
                Operand(*mxspec.mx_quantize_groups(x, offs, axis=-2, **options)) if along_tokens else None,
            )
        options["scale_layout"] = _SCALE_LAYOUT
        padded = whole_blocks(x, MX_BLOCK_SIZE) if along_tokens else x
        if along_features and along_tokens:
            q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(padded, **options)
            # Tiles of 128 rows are as many with the padding as without, and no matmul reads what stands in them for it.
            s_row = s_row[: x.shape[0]] if _SCALE_LAYOUT == "plain" else s_row
            return Tokens(Operand(q_row[: x.shape[0]], s_row), Operand(q_col.mT, s_col))
        if along_tokens:
            q_col, s_col = mxspec.mx_quantize(padded, axis=-2, **options)
            return Tokens(None, Operand(q_col.mT, s_col))
        return Tokens(Operand(*mxspec.mx_quantize(x, axis=-1, **options)) if along_features else None, None)

    def gemm(self, a: Operand, b: Tensor, b_scale: Tensor, offs: Tensor | None, M: int, dtype: torch.dtype) -> Tensor:
        options: Any = {"out_dtype": dtype, "backend": self.backend}
        if offs is None:
            return mxspec.mx_gemm(a.codes, a.scale, b, b_scale, scale_layout=_SCALE_LAYOUT, **options)
        out = mxspec.mx_grouped_gemm(a.codes, a.scale, b, b_scale, a.end, **options)
        return mxspec.unpad_token_groups(out, offs, a.start, M, backend=self.backend)

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        if offs is None:
            return self.gemm(grad_out, x.codes, x.scale, None, 0, dtype)
        return mxspec.mx_grouped_gemm_wgrad(
            grad_out.codes, grad_out.scale, x.codes, x.scale, grad_out.end, out_dtype=dtype, backend=self.backend
        )

    def saves_codes(self, offs: Tensor | None) -> bool:
        return not self.recipe.wgrad_bf16

    def reads_once(self, offs: Tensor | None) -> bool:
        return offs is None


class FP8Blocks(Format):
    """Weights in 128x128 blocks, tokens in 1x128 blocks, fp32 scales. Token groups are padded for wgrad only."""

    def weight(self, w: Tensor) -> Weight:
        return Weight(*mxspec.fp8_quantize_128x128(w, with_transpose=True, backend=self.backend))

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        rows = columns = None
        # The matmuls read scales that lie MN-major without a transpose before.
        if along_features:
            rows = Operand(*mxspec.fp8_quantize_1x128(x, scale_major="mn", backend=self.backend))
        if along_tokens and offs is not None:
            columns = Operand(*mxspec.fp8_quantize_k_groups(x, offs, backend=self.backend))
        elif along_tokens:
            padded = whole_blocks(x, FP8_BLOCK_SIZE)
            codes, scale = mxspec.fp8_quantize_1x128(padded, axis=-2, scale_major="mn", backend=self.backend)
            columns = Operand(codes.mT, scale)
        return Tokens(rows, columns)

    def gemm(self, a: Operand, b: Tensor, b_scale: Tensor, offs: Tensor | None, M: int, dtype: torch.dtype) -> Tensor:
        options: Any = {"out_dtype": dtype, "backend": self.backend}
        if offs is None:
            return mxspec.fp8_gemm(a.codes, a.scale, b, b_scale, **options)
        return mxspec.fp8_grouped_gemm(a.codes, a.scale, b, b_scale, offs, **options)

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        if offs is None:
            return self.gemm(grad_out, x.codes, x.scale, None, 0, torch.float32).to(dtype)
        return mxspec.fp8_grouped_gemm_wgrad(
            grad_out.codes, grad_out.scale, x.codes, x.scale, grad_out.end, out_dtype=dtype, backend=self.backend
        )

    def saves_codes(self, offs: Tensor | None) -> bool:
        return offs is not None


_OF_NAME: dict[str, type[Format]] = {"mxfp8": MX, "fp8_128": FP8Blocks}


def format_of(recipe: Recipe, backend: str | None, name: str) -> Format | None:
    """The format of a recipe, for a layer or function of that name; None for bfloat16, which quantizes nothing."""
    return None if recipe.format == "bf16" else _OF_NAME[recipe.format](recipe, backend, name)


def whole_blocks(x: Tensor, block_size: int) -> Tensor:
    """x with rows of zeros that fill the last block of rows, or x itself where none are missing.

    A graph for any number of rows always pads. A branch in it would be a graph for multiples of the block size, and
    another one for all else.
    """
    missing = -(-x.shape[0] // block_size) * block_size - x.shape[0]
    none_missing = missing == 0
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # not at the top: it imports sympy

        none_missing = statically_known_true(none_missing)
    return x if none_missing else pad(x, (0, 0, 0, missing))
