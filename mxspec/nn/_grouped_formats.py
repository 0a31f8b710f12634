"""A grouped matmul's pieces, format by format: how its operands are quantized, and which ops multiply them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE
from mxspec.nn._cache import Quantized
from mxspec.nn.recipe import Recipe


class Groups(NamedTuple):
    """Token groups as a matmul reads them."""

    codes: Tensor
    scale: Tensor
    start: Tensor | None  # where a group begins among padded tokens, and where its padding ends
    end: Tensor | None


class MX:
    """Blocks of 32 and blocked scales; tokens are padded for every matmul, in the pass that quantizes them."""

    @staticmethod
    def experts(w: Tensor, recipe: Recipe, backend: str | None) -> Quantized:
        codes, scale, across, across_scale = mxspec.mx_quantize_rowcol(
            w, scaling=recipe.scaling, scale_layout="blocked", backend=backend
        )
        return codes, scale, across.mT, across_scale

    @staticmethod
    def rows(x: Tensor, offs: Tensor, elem_dtype: torch.dtype, recipe: Recipe, backend: str | None) -> Groups:
        options: Any = {"elem_dtype": elem_dtype, "scaling": recipe.scaling, "backend": backend}
        return Groups(*mxspec.mx_quantize_groups(x, offs, axis=-1, **options))

    @staticmethod
    def columns(x: Tensor, offs: Tensor, elem_dtype: torch.dtype, recipe: Recipe, backend: str | None) -> Groups:
        options: Any = {"elem_dtype": elem_dtype, "scaling": recipe.scaling, "backend": backend}
        return Groups(*mxspec.mx_quantize_groups(x, offs, axis=-2, **options))

    @staticmethod
    def gemm(
        a: Groups, b: Tensor, b_scale: Tensor, offs: Tensor, num_tokens: int, dtype: torch.dtype, backend: str | None
    ) -> Tensor:
        out = mxspec.mx_grouped_gemm(a.codes, a.scale, b, b_scale, a.end, out_dtype=dtype, backend=backend)
        return mxspec.unpad_token_groups(out, offs, a.start, num_tokens, backend=backend)

    @staticmethod
    def wgrad(dy: Groups, x: Tensor, x_scale: Tensor, dtype: torch.dtype, backend: str | None) -> Tensor:
        return mxspec.mx_grouped_gemm_wgrad(dy.codes, dy.scale, x, x_scale, dy.end, out_dtype=dtype, backend=backend)


class FP8:
    """Blocks of 128 with fp32 scales; tokens are padded for the gradient of the weights only."""

    @staticmethod
    def experts(w: Tensor, recipe: Recipe, backend: str | None) -> Quantized:
        return mxspec.fp8_quantize_128x128(w, with_transpose=True, backend=backend)

    @staticmethod
    def rows(x: Tensor, offs: Tensor, elem_dtype: torch.dtype, recipe: Recipe, backend: str | None) -> Groups:
        # Scales that lie MN-major are what the matmuls read without a transpose before.
        return Groups(*mxspec.fp8_quantize_1x128(x, scale_major="mn", backend=backend), None, None)

    @staticmethod
    def columns(x: Tensor, offs: Tensor, elem_dtype: torch.dtype, recipe: Recipe, backend: str | None) -> Groups:
        return Groups(*mxspec.fp8_quantize_k_groups(x, offs, backend=backend))

    @staticmethod
    def gemm(
        a: Groups, b: Tensor, b_scale: Tensor, offs: Tensor, num_tokens: int, dtype: torch.dtype, backend: str | None
    ) -> Tensor:
        return mxspec.fp8_grouped_gemm(a.codes, a.scale, b, b_scale, offs, out_dtype=dtype, backend=backend)

    @staticmethod
    def wgrad(dy: Groups, x: Tensor, x_scale: Tensor, dtype: torch.dtype, backend: str | None) -> Tensor:
        return mxspec.fp8_grouped_gemm_wgrad(dy.codes, dy.scale, x, x_scale, dy.end, out_dtype=dtype, backend=backend)


FORMATS: dict[str, type[MX] | type[FP8]] = {"mxfp8": MX, "fp8_128": FP8}
# What N and K are multiples of; bfloat16's are those of MX, for a model to change between the two.
BLOCK_SIZES = {"mxfp8": MX_BLOCK_SIZE, "fp8_128": FP8_BLOCK_SIZE, "bf16": MX_BLOCK_SIZE}
