"""The schemes of block-scaled weights: a weight's codes and scales, and the conversions between schemes.

A scheme knows no names of tensors. Every family of checkpoints stores one of the schemes under its own names. A weight
is `(N, K)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec import dispatch, rules
from mxspec.checkpoint import nvfp4
from mxspec.checkpoint.lossless import NotLossless, blocks_to_rows, retype
from mxspec.checkpoint.mxfp4 import mxfp4_to_fp8_blocks
from mxspec.formats import (
    E2M1,
    E2M3,
    E4M3FN,
    E8M0FNU,
    FP8_BLOCK_SIZE,
    MX_BLOCK_SIZE,
    NVFP4_BLOCK_SIZE,
    ElementFormat,
)
from mxspec.reference.common.numerics import saturating_cast, widened

CONTRACT = "contract"
COLUMNS = 4096  # columns quantized at once: a multiple of every block. A bound on the memory of temporary tensors
SCALE_FORMAT = {"fp32": "fp32", "ue8m0": "pow2"}


@dataclass(frozen=True)
class Scheme:
    """The op that quantizes to a scheme, its options, the rows and columns of a block, and the format of a code."""

    op: str
    options: dict[str, Any]
    block: tuple[int, int]
    element: ElementFormat = E4M3FN

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the tensor of codes. Codes narrower than a byte are uint8."""
        return torch.float8_e4m3fn if self.element is E4M3FN else torch.uint8


SCHEMES = {
    "fp8_128x128": Scheme("fp8_quantize_128x128", {}, (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)),
    "mxfp8": Scheme("mx_quantize", {"elem_dtype": E4M3FN.name}, (1, MX_BLOCK_SIZE)),
    "mxfp8_32x32": Scheme("mx_quantize", {"elem_dtype": E4M3FN.name}, (MX_BLOCK_SIZE, MX_BLOCK_SIZE)),
    "mxfp4": Scheme("mx_quantize", {"elem_dtype": E2M1.name}, (1, MX_BLOCK_SIZE), E2M1),
    "mxfp6": Scheme("mx_quantize", {"elem_dtype": E2M3.name}, (1, MX_BLOCK_SIZE), E2M3),
    "nvfp4": Scheme(nvfp4.OP, {}, (1, NVFP4_BLOCK_SIZE), E2M1),
}
WIDER = {("mxfp4", "mxfp6"), ("mxfp6", "mxfp8")}  # the second format holds every value of the first


@dataclass(frozen=True)
class Blocks:
    """A quantized weight.

    Attributes:
        scheme: a name in `SCHEMES`.
        codes: `(N, K)` float8_e4m3fn, or uint8: for mxfp4 and nvfp4 `(N, K/2)` with the even K in the low nibble, for
            mxfp6 `(N, 3*K/4)`, four e2m3 in three bytes.
        scale: the grid of the blocks. fp8_128x128: float32, bfloat16, float8_e8m0fnu or uint8 (E8M0 bytes). nvfp4:
            float8_e4m3fn. The other schemes: uint8.
        tensor_scale: float32, `()`, for nvfp4; None for the other schemes.
        divides: whether tensor_scale is a divisor, as in compressed-tensors. Otherwise it is a multiplier.
    """

    scheme: str
    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None
    divides: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        N, stored = self.codes.shape
        return N, SCHEMES[self.scheme].element.held(stored)

    @property
    def multiplier(self) -> Tensor | None:
        """The number by which engines multiply: tensor_scale, or the reciprocal of a divisor, rounded to fp32."""
        return self.tensor_scale.reciprocal() if self.tensor_scale is not None and self.divides else self.tensor_scale

    def values(self, dtype: torch.dtype, rows: slice = slice(None), *, multiplied: bool = False) -> Tensor:
        """The values of some rows, `fp32(q * scale)` rounded to dtype; `rows` starts at a multiple of 128.

        For nvfp4, the scale is `fp32(s * tensor_scale)`, or `fp32(s / tensor_scale)` for a divisor, as ModelOpt and
        compressed-tensors compute it. With `multiplied`, it is `fp32(s * multiplier)` in either case.
        """
        height, width = SCHEMES[self.scheme].block
        start = rows.start or 0
        codes = self.codes[rows]
        stop = start + codes.shape[0]
        scale = self.scale[start // height : -(-stop // height)]
        scale = widened_scale(scale).repeat_interleave(height, 0)[: codes.shape[0]]
        if self.tensor_scale is not None and self.multiplier is not None:
            scale = scale / self.tensor_scale if self.divides and not multiplied else scale * self.multiplier
        q = widened(codes, SCHEMES[self.scheme].element)
        K = q.shape[1]
        blocks = pad(q, (0, -K % width)).unflatten(1, (-1, width))
        return (blocks * scale.unsqueeze(-1)).flatten(1)[:, :K].to(dtype)


def widened_scale(scale: Tensor) -> Tensor:
    """Scales as float32. uint8 holds the bytes of E8M0, which are never cast by value."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def quantizer(scheme: str, rule: str, scales: str) -> Any:
    """The function of a rule that quantizes to a scheme: from `(N, K)` numbers to `(codes, scale)`.

    For nvfp4, it is the function that `nvfp4.quantizer` describes.

    Raises:
        ValueError: no rule has this name, or the rule has no function for the scheme.
    """
    chosen = SCHEMES[scheme]
    if rule != CONTRACT and rule not in rules.peers():
        raise ValueError(f"convert: no rule is named {rule!r}. {rules_that_do(scheme, scales)}")
    if rule != CONTRACT and not hasattr(getattr(rules, rule), chosen.op):
        raise ValueError(f"convert: the rule {rule!r} does not quantize to {scheme}. {rules_that_do(scheme, scales)}")
    function = dispatch.reference(chosen.op) if rule == CONTRACT else getattr(getattr(rules, rule), chosen.op)
    if scheme == "nvfp4":
        return nvfp4.quantizer(function, rule)
    options = dict(chosen.options)
    if chosen.op == "fp8_quantize_128x128":
        options["scale_format"] = SCALE_FORMAT[scales]

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] > COLUMNS:
            pieces = [quantize(piece) for piece in x.split(COLUMNS, 1)]
            return torch.cat([c for c, _ in pieces], 1), torch.cat([s for _, s in pieces], 1)
        K = x.shape[1]
        missing = -K % chosen.block[1]
        codes, scale = function(pad(x, (0, missing)) if missing else x, **options)
        codes = codes.view(torch.uint8)[:, : chosen.element.stored(K)].view(chosen.stored)
        return codes, scale if scheme == "fp8_128x128" else scale.view(torch.uint8)

    return quantize


def rules_that_do(scheme: str, scales: str) -> str:
    """A sentence that names the rules that quantize to a scheme, for error texts.

    A library may have a function of the op, and refuse the scheme's elements or scales. So each rule quantizes a block.
    """
    having, block = [], torch.ones(1, FP8_BLOCK_SIZE, dtype=torch.bfloat16)
    for rule in (CONTRACT, *rules.peers()):
        if rule == CONTRACT or hasattr(getattr(rules, rule), SCHEMES[scheme].op):
            with contextlib.suppress(NotImplementedError, ValueError, TypeError):
                quantizer(scheme, rule, scales)(block)
                having.append(rule)
    return f"Rules that quantize to {scheme} with {scales} scales: {', '.join(having)}"


def strips(rows: int) -> Iterator[slice]:
    """Slices of 128 rows, which no block crosses."""
    for start in range(0, rows, FP8_BLOCK_SIZE):
        yield slice(start, min(start + FP8_BLOCK_SIZE, rows))


def keeping(blocks: Blocks, scheme: str, scale_dtype: torch.dtype | None = None) -> Blocks | NotLossless | None:
    """The same values in another scheme; a NotLossless if a block would change; None if there is no conversion.

    For nvfp4 there is `work_nvfp4`, because weights of one layer share a tensor scale.

    Args:
        blocks: the weight.
        scheme: the scheme to store.
        scale_dtype: the dtype of the scales of fp8_128x128; None keeps it. The other schemes have uint8.
    """
    made: Any
    if blocks.scheme == scheme:
        made = blocks.codes, blocks.scale
    elif (blocks.scheme, scheme) == ("mxfp4", "fp8_128x128"):
        made = mxfp4_to_fp8_blocks(blocks.codes, blocks.scale)
    elif scheme == "mxfp8" and blocks.scheme in ("fp8_128x128", "mxfp8_32x32"):
        rows = blocks_to_rows(blocks.scale, blocks.shape, SCHEMES[blocks.scheme].block[0])
        made = rows if isinstance(rows, NotLossless) else (blocks.codes, rows)
    elif (blocks.scheme, scheme) in WIDER:
        values = widened(blocks.codes, SCHEMES[blocks.scheme].element)
        made = saturating_cast(values, SCHEMES[scheme].element).view(SCHEMES[scheme].stored), blocks.scale
    else:
        return None
    if isinstance(made, NotLossless):
        return made
    codes, scale = made
    wanted = scale_dtype if scheme == "fp8_128x128" and scale_dtype else scale.dtype
    if scheme != "fp8_128x128":
        wanted = torch.uint8
    if scale.dtype != wanted:
        scale = retype(scale, wanted)
    return scale if isinstance(scale, NotLossless) else Blocks(scheme, codes, scale)


def is_power_of_two(scale: Tensor) -> bool:
    """Whether E8M0 holds every scale, without NaN."""
    stored = retype(scale, torch.uint8)
    return isinstance(stored, Tensor) and not bool((stored == E8M0FNU.nan_code).any())
