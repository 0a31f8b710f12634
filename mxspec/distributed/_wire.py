"""Rows as codes: the message of a row is its D codes, and then the bytes of its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE
from mxspec.nn import Recipe

ALIGNMENT = 16  # bytes, what TMA needs for the start of a row


@dataclass(frozen=True)
class Wire:
    """The codes of a recipe, quantized along the features, as bytes. The scales have the plain layout.

    The message of a row has D codes of one byte. For mxfp8, D / 32 scales of one byte follow; for fp8_128,
    ceil(D / 128) scales of four bytes. Bytes of 0 fill the message up to a multiple of 16 bytes, because TMA reads the
    codes in place. For a D that is a multiple of 512, there are none.
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
        parts = [part.contiguous().view(torch.uint8) for part in (codes, scale)]
        if missing := -sum(part.shape[1] for part in parts) % ALIGNMENT:
            parts.append(parts[0].new_zeros(len(x), missing))
        return torch.cat(parts, 1)

    def parts(self, message: Tensor, D: int) -> tuple[Tensor, Tensor]:
        """The codes `(M, D)` and the scales of messages, as views."""
        if self.recipe.format == "mxfp8":
            scale = message[:, D : D + D // MX_BLOCK_SIZE].view(torch.float8_e8m0fnu)
            return message[:, :D].view(self.elem_dtype), scale
        scale = message[:, D : D + -(-D // FP8_BLOCK_SIZE) * 4].view(torch.float32)
        return message[:, :D].view(torch.float8_e4m3fn), scale

    def decode(self, message: Tensor, D: int, dtype: torch.dtype) -> Tensor:
        """The values of the codes, rounded to dtype: `(M, D)`."""
        options: dict[str, Any] = {"out_dtype": dtype, "backend": self.backend}
        op = mxspec.mx_dequantize if self.recipe.format == "mxfp8" else mxspec.fp8_dequantize
        return op(*self.parts(message, D), **options)


def wires(recipe: Recipe, backend: str | None) -> tuple[Wire, Wire]:
    """The wire of the tokens, and the wire of the gradient of the results."""
    return Wire(recipe, backend), Wire(recipe, backend, recipe.grad_dtype)


def check_wire(asked_by: str, recipe: Recipe) -> None:
    if recipe.format == "bf16":
        raise ValueError(f"{asked_by}: wire='codes' sends the codes of the recipe, and bf16 has none; needs 'values'")
