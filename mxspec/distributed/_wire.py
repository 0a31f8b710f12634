"""Rows as codes: the message of a row is its D codes, and then the bytes of its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.nn import Recipe


@dataclass(frozen=True)
class Wire:
    """The codes of a recipe, quantized along the features, as bytes. The scales have the plain layout.

    The message of a row has D codes of one byte. For mxfp8, D / 32 scales of one byte follow; for fp8_128,
    ceil(D / 128) scales of four bytes.
    """

    recipe: Recipe
    backend: str | None
    elem_dtype: torch.dtype = torch.float8_e4m3fn

    def encode(self, x: Tensor) -> Tensor:
        """The messages of rows `(M, D)`: `(M, bytes)` uint8."""
        options: dict[str, Any] = {"backend": self.backend}
        if self.recipe.format == "mxfp8":
            options |= {"scaling": self.recipe.scaling, "elem_dtype": self.elem_dtype}
            codes, scale = mxspec.mx_quantize(x, **options)
        else:
            codes, scale = mxspec.fp8_quantize_1x128(x, scale_format=self.recipe.scale_format, **options)
        return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scale)], 1)

    def decode(self, message: Tensor, D: int, dtype: torch.dtype) -> Tensor:
        """The values of the codes, rounded to dtype: `(M, D)`."""
        codes, scale = (part.contiguous() for part in message.split([D, message.shape[1] - D], 1))
        options: dict[str, Any] = {"out_dtype": dtype, "backend": self.backend}
        if self.recipe.format == "mxfp8":
            return mxspec.mx_dequantize(codes.view(self.elem_dtype), scale.view(torch.float8_e8m0fnu), **options)
        return mxspec.fp8_dequantize(codes.view(torch.float8_e4m3fn), scale.view(torch.float32), **options)


def wires(recipe: Recipe, backend: str | None) -> tuple[Wire, Wire]:
    """The wire of the tokens, and the wire of the gradient of the results."""
    return Wire(recipe, backend), Wire(recipe, backend, recipe.grad_dtype)


def check_wire(asked_by: str, recipe: Recipe) -> None:
    if recipe.format == "bf16":
        raise ValueError(f"{asked_by}: wire='codes' sends the codes of the recipe, and bf16 has none; needs 'values'")
