"""Rows as codes: the message of a row is its D codes, and then the bytes of its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE
from mxspec.nn import Recipe

WIDE = 2048  # from this width on, rows are filled up to whole lines


def alignment(D: int) -> int:
    """The number of bytes of which a message of D elements has a multiple.

    TMA needs 16 bytes. On an H100, a matmul of 7168 columns reads rows that begin at lines of the cache, of 128 bytes,
    7% faster than other rows. Narrow rows would grow too much.
    """
    return 128 if D >= WIDE else 16


@dataclass(frozen=True)
class Wire:
    """The codes of a recipe, quantized along the features, as bytes. The scales have the plain layout.

    The message of a row has D codes of one byte. For mxfp8, D / 32 scales of one byte follow; for fp8_128,
    ceil(D / 128) scales of four bytes. Bytes of 0 fill the message up to a multiple of 16 bytes, or of 128 bytes for
    2048 elements or more, because the matmuls read the codes in place.
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
        # PyTorch joins two parts at the memory's speed, and three parts four times slower.
        parts[1] = pad(parts[1], (0, -sum(part.shape[1] for part in parts) % alignment(x.shape[1])))
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
    if recipe.format == "nvfp4":  # a tensor scale belongs to all tokens of an expert, and a rank has a part of them
        raise ValueError(f"{asked_by}: wire='codes' sends codes of mxfp8 and fp8_128, not of nvfp4; needs 'values'")
