"""Operands of matmuls: codes, scales, and the few special values that they hold.

A matmul is judged by the SQNR of its finite outputs, so most of every output must be finite: special values stand in
one or two rows. All other codes are normally distributed, and all other scales are within a factor of two of 1. A wrong
element then shows in the SQNR, the ratio of signal to error in dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SCALE_STRIDES, laid_flat
from mxspec.cases.common.fp8_operands import scales as fp32_scales
from mxspec.cases.common.mx_operands import codes, laid_out, scales
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, laid, small_enough, strides_fit
from mxspec.formats import BY_DTYPE, E2M1, E4M3FN, E5M2, MX_BLOCK_SIZE
from mxspec.spec import normal

Shape = tuple[int | None, ...]  # None is a size that is still open
Operand = tuple[Tensor, Tensor]  # codes with blocks along the last dimension, and plain scales

SIZES = (0, 1, 48, 384, 1041, 4128)
MX_SIZES = (0, 32, 384, 1056, 4128)  # multiples of a block; 384 is the largest that fits with 4128 rows
FP8_SIZES = (0, 128, 144, 384, 1152, 4224)
FP8_TOKENS = (0, 128, 384, 1152, 4224)  # whole blocks of 128
_CODE_STRIDES = ("none", "row-major", "rows apart", "one row repeated")
_EXTREMES = torch.tensor([0.0, -0.0, -1.5, 2.0**-140])  # fp32 scales


def operand(
    name: str, dtypes: Sequence[torch.dtype] = (), experts: bool = False, codes_apart: bool = True
) -> dict[str, Any]:
    """The dimensions of an operand.

    If there is a single dtype, it needs no dimension. `codes_apart=False` leaves out strides with gaps.
    """
    strides = _CODE_STRIDES if codes_apart else _CODE_STRIDES[:2]
    return {
        **({f"{name} dtype": dtypes} if dtypes else {}),
        f"{name} values": ("none", "finite", "zeros", "NaN", *(("Inf",) if dtypes else ())),
        f"{name} strides": (*strides, *(EXPERT_STRIDES if experts else ())),
        f"{name} begins": ("none", *BEGINS),
        f"{name}_scale values": ("none", "near 1", "extreme", "NaN"),
        f"{name}_scale strides": tuple(s for s in SCALE_STRIDES if experts or s not in EXPERT_STRIDES),
        f"{name}_scale begins": ("none", *BEGINS),
    }


def sum_of(name: str, strides: Sequence[str] = ("row-major", "rows apart")) -> dict[str, Any]:
    """The dimensions of a matrix that a product is added to."""
    return {
        f"{name} values": ("none", "finite", "zeros", "special"),
        f"{name} strides": ("none", *strides),
        f"{name} begins": ("none", *BEGINS),
    }


def tensor_fits(choice: Choice, name: str, shape: Shape) -> bool:
    """Whether a tensor of this shape can have the values, strides and place of a choice."""
    parts = [choice[f"{name} {part}"] for part in ("values", "strides", "begins") if f"{name} {part}" in choice]
    if 0 in shape or "none" in parts:
        return set(parts) <= {"none"} and (0 in shape or None in shape)
    strides = choice.get(f"{name} strides")
    return strides is None or strides_fit(strides, tuple(2 if size is None else size for size in shape))


def operand_fits(
    choice: Choice, name: str, shape: Shape, scale: Shape, blocked: Shape | None = None, unscaled: bool = False
) -> bool:
    """Whether codes of one shape can be made, with plain scales of another or blocked scales of a third.

    unscaled: whether the operand may be bfloat16, which has no scales.
    """
    dtype, values = choice.get(f"{name} dtype"), choice.get(f"{name} values")
    if values == "Inf" and dtype not in (None, E5M2.dtype, torch.bfloat16):
        return False
    if values == "NaN" and dtype == E2M1.dtype:
        return False
    if unscaled and 0 not in shape and dtype in (None, torch.bfloat16):
        in_scale = {choice[part] for part in scale_parts(name) if part in choice}
        if dtype is not None or "none" in in_scale:
            return in_scale <= {"none"} and tensor_fits(choice, name, shape)
    if blocked is not None and choice.get(f"{name}_scale strides") not in (None, "none", "row-major"):
        return False
    of_scale = scale if blocked is None else (1, *blocked)
    return tensor_fits(choice, name, shape) and tensor_fits(choice, f"{name}_scale", of_scale)


def dtypes_meet(choice: Choice) -> bool:
    """Whether an MX matmul takes the dtypes of a and b together. bfloat16 and e2m1 codes meet e2m1 codes only."""
    by_codes = choice.get("b dtype") in (None, E2M1.dtype)
    return by_codes or choice.get("a dtype") not in (torch.bfloat16, E2M1.dtype)


def scale_parts(name: str) -> list[str]:
    """The dimensions of the scale of an operand."""
    return [f"{name}_scale {part}" for part in ("values", "strides", "begins")]


def extremes_fit(choice: Choice, name: str, scale: Shape) -> bool:
    """Whether a row or a column that is not repeated has room for all the extreme fp32 scales."""
    if choice.get(f"{name}_scale values") != "extreme":
        return True
    strides, (rows, cols) = choice.get(f"{name}_scale strides"), scale[-2:]
    in_rows = strides != "one row repeated" and (rows is None or rows >= len(_EXTREMES))
    return in_rows or (strides != "one column repeated" and (cols is None or cols >= len(_EXTREMES)))


def _repeats(choice: Choice, name: str) -> bool:
    return "one row repeated" in (choice.get(f"{name} strides"), choice.get(f"{name}_scale strides"))


def hides(choice: Choice, name: str, rows: int | None, blocks: int | None, scale_rows: int | None = None) -> bool:
    """Whether an operand makes the whole product zero, NaN or Inf."""
    parts = [f"{name} {part}" for part in ("values", "strides", "begins")]
    if choice.get(f"{name} dtype") != torch.bfloat16:
        parts += scale_parts(name)
    if 0 in (rows, blocks) or "none" in (choice.get(part) for part in parts):
        return True
    if choice.get(f"{name}_scale values") == "NaN" and scale_rows == 1:
        return True
    if rows != 1 and not _repeats(choice, name):
        return False
    told, of_scale = choice.get(f"{name} values"), choice.get(f"{name}_scale values")
    if told in ("NaN", "Inf", "zeros") and (rows == 1 or choice.get(f"{name} strides") == "one row repeated"):
        return True
    if of_scale == "NaN" and (rows == 1 or choice.get(f"{name}_scale strides") == "one row repeated"):
        return True
    few = blocks is not None and blocks < 2
    return of_scale == "extreme" and (few or choice.get(f"{name}_scale strides") == "one column repeated")


def costly(*sizes: int | None) -> bool:
    """Whether a product of these sizes is so large that only few cases should have it."""
    return math.prod(size or 1 for size in sizes) > 2**24


def affordable(*sizes: int | None, tensors: Sequence[Sequence[int | None]]) -> bool:
    """Whether the reference computes a product of these sizes quickly, and whether its tensors are small."""
    return math.prod(size or 1 for size in sizes) <= 2**28 and all(
        small_enough(*(size or 1 for size in shape)) for shape in tensors
    )


def mx_operands(choice: Choice, names: tuple[str, str], shapes: Sequence[tuple[int, ...]]) -> list[Operand]:
    """Codes of two shapes and their plain scales. A matrix in bfloat16 has scales too, which have no effect on it."""
    made = [
        (
            _finite(shape, choice[f"{name} dtype"], seed),
            scales(*shape[:-1], shape[-1] // MX_BLOCK_SIZE, seed=2 + seed),
        )
        for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    for i, name in enumerate(names):
        if choice[f"{name}_scale values"] == "extreme" and made[i][1].numel():
            alone = choice[f"{names[1 - i]} dtype"] == torch.bfloat16
            _extreme_bytes(choice, (name, names[1 - i]), made[i], None if alone else made[1 - i][1], i + 1)
    for name, (q, scale) in zip(names, made, strict=True):
        with_special_codes(q, choice[f"{name} values"])
        if choice[f"{name}_scale values"] == "NaN" and scale.numel():
            scale.view(torch.uint8)[..., 0, 0] = 255
    return made


def fp8_operand(
    choice: Choice, name: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], seed: int = 0
) -> Operand:
    """Codes of one shape and scales of another. The caller plants the special values of the codes."""
    scale = fp32_scales(math.prod(scale_shape[:-1]), scale_shape[-1], 1, seed=seed + 1).view(scale_shape)
    values = choice[f"{name}_scale values"]
    if not scale.numel():
        pass
    elif values == "extreme":
        for line in (scale[..., 0, :], scale[..., 0]):
            line[..., : len(_EXTREMES)] = _EXTREMES[: line.shape[-1]]
    elif values == "NaN":
        scale[..., 0, 0] = torch.nan
        if scale.shape[-2] > 2 * len(_EXTREMES):
            scale[..., -len(_EXTREMES) :, -1] = _EXTREMES
    return _finite(shape, E4M3FN.dtype, seed), scale


def _finite(shape: tuple[int, ...], dtype: torch.dtype | None, seed: int) -> Tensor:
    """Normally distributed codes; two rows also hold -0, a subnormal and the largest code.

    These codes are in two rows, because a choice may repeat the first row or set it to zeros.
    """
    assert dtype is not None
    q = codes(*shape, dtype=dtype, seed=seed)
    if q.numel() and dtype == torch.bfloat16:
        q[..., :2, 1:4] = torch.tensor([-0.0, 2.0**-130, 2.0**7], dtype=dtype)
    elif q.numel():  # a byte of e2m1 holds two codes: 0 and -0, 0.5 and 0, 6 and 0
        planted = torch.tensor([0x80, 1, BY_DTYPE[dtype].largest_code], dtype=torch.uint8)
        q.view(torch.uint8)[..., :2, 1:4] = planted
    return q


def with_special_codes(q: Tensor, values: str) -> None:
    """Plant special codes into matrices: two in the first row, which may be repeated, and more in a few other rows."""
    bits, rows = q.view(torch.uint8), q.shape[-2]
    if not q.numel():
        return
    if values == "zeros":
        make_zeros(q, slice(None, None, 4))
    elif q.dtype == torch.bfloat16:
        if values in ("NaN", "Inf"):
            bits, code = q.view(torch.int16), 0x7FC0 if values == "NaN" else 0x7F80
            bits[..., 0, 5], bits[..., 0, 9], bits[..., rows // 2, -1] = code, code - 0x8000, code
            if rows > 4:
                bits[..., 1, 12], bits[..., 1, 13] = 0x7FC0, -0x40
                make_zeros(q, slice(2, 3))
    elif values in ("NaN", "Inf"):
        code = 0x7F if values == "NaN" else 0x7C
        bits[..., 0, 5], bits[..., 0, 9], bits[..., rows // 2, -1] = code, code | 0x80, code
        if rows > 4:
            bits[..., 1, 12], bits[..., 1, 13], bits[..., 2, :] = 0x7F, 0xFF, bits[..., 2, :] & 0x80


def make_zeros(q: Tensor, rows: Any, first: int = 0) -> None:
    """Make elements of rows zeros that keep their signs, from an element on."""
    if q.dtype == torch.bfloat16:
        q.view(torch.int16)[..., rows, first:] &= -0x8000
    else:
        signs = 0x88 if BY_DTYPE[q.dtype].per_byte == 2 else 0x80
        q.view(torch.uint8)[..., rows, first // BY_DTYPE[q.dtype].per_byte :] &= signs


def _extreme_bytes(
    choice: Choice, names: tuple[str, str], operand: Operand, other_scale: Tensor | None, block: int
) -> None:
    """Put the scale bytes 254 (2^127) and 0 (2^-127) into a row of scales.

    A block with byte 254 has byte 0 in the other operand. If that would reach every block, or if the other operand has
    no scales, its codes are zeros.
    Products then stay within fp32 and near the other products.
    """
    (name, other), (q, scale) = names, operand
    bits, (rows, blocks) = scale.view(torch.uint8), scale.shape[-2:]
    row = 0 if choice[f"{name}_scale strides"] == "one row repeated" else 1 % rows
    everywhere = choice[f"{name}_scale strides"] == "one column repeated"
    if everywhere or choice[f"{other}_scale strides"] == "one column repeated" or blocks < 3 or other_scale is None:
        block = blocks - 1
        for zero in range(rows) if _repeats(choice, name) else (row,):
            make_zeros(q, zero, 0 if everywhere else block * MX_BLOCK_SIZE)
    else:
        other_scale.view(torch.uint8)[..., block] = 0
    if everywhere:
        bits[..., (row + 1) % rows, :], bits[..., row, :] = 0, 254
    else:
        small = 0 if blocks - 1 in (block, 2) else blocks - 1
        bits[..., row if blocks > 1 else (row + 1) % rows, small] = 0
        bits[..., row, block] = 254


def lay(
    choice: Choice,
    name: str,
    operand: Operand,
    layout: str = "plain",
    rearrange: Callable[[Tensor], Tensor] | None = None,
) -> Operand:
    """Codes and scales as they lie in memory; `rearrange` makes blocked scales from plain scales."""
    q, scale = operand
    begins = choice[f"{name}_scale begins"]
    if layout == "blocked":
        assert rearrange is not None
        placed = laid_flat(laid_out(scale, layout, rearrange), begins)
    else:
        placed = laid(scale, choice[f"{name}_scale strides"], begins)
    return laid(q, choice[f"{name} strides"], choice[f"{name} begins"]), placed


def poison(choice: Choice, name: str, operand: Operand, tokens: int, blocks: int | None = None) -> None:
    """Fill the rows that belong to no group with NaN: from row `tokens` on. If `blocks` is given, fill columns instead.

    A repeated row has no memory of its own and stays. A row of zeros also stays.
    """
    q, scale = operand[0], operand[1].view(torch.uint8)
    if q.dtype == torch.bfloat16:
        code = torch.nan
    else:  # the NaN of e4m3 and e5m2; of e2m1, only the scales have one
        q, code = q.view(torch.uint8), 0x7F
    if blocks is not None:
        q[:, tokens:], scale[:, blocks * scale.shape[1] // max(operand[1].shape[1], 1) :] = code, 0xFF
    else:
        if choice[f"{name} strides"] != "one row repeated":
            q[tokens:] = code
        if choice[f"{name}_scale strides"] != "one row repeated":
            scale[tokens:] = 0xFF
    if choice[f"{name} values"] == "zeros":
        with_special_codes(operand[0], "zeros")


def summed(choice: Choice, name: str, *shape: int) -> Tensor:
    """A matrix that a product is added to: as large as the product, or zeros, or with special values."""
    x = normal(*shape, seed=4) * (0 if choice[f"{name} values"] == "zeros" else 2**18)
    if x.numel() > 1:
        x.view(-1)[-2] = 2.0**-140
    if choice[f"{name} values"] == "special":
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 2.0**-140])
        flat = x.view(-1)
        flat[: len(special)] = special[: flat.numel()]
        flat[-1] = torch.nan
    return laid(x, choice[f"{name} strides"], choice[f"{name} begins"])


def impossible(
    first: str, second: str, rows: str = "rows", cols: str = "cols", padded: Collection[str] = ()
) -> tuple[tuple[str, str], ...]:
    """The pairs of facts of two operands that cannot meet. `cols` is their common dimension, which the sum runs over.

    padded: sizes for which the scales still hold padding if the size is 0.
    """
    either = f"(?:{first}|{second})"
    one, other = rf"{first}\.{rows}", rf"{second}\.{rows}"
    scaled = [name for name in (first, second) if f"{name}.{rows}" not in padded]
    of_sums = [first] if f"{first}.{cols}" not in padded else []
    return (
        (rf"{either}\.{cols} = 0 \| {either}\.(?!{rows}|{cols}|dtype|experts|rank).*", "a sum of nothing has no codes"),
        *((rf"{of}\.{rows} = 0 \| {of}_scale\..*", "there are no scales") for of in scaled),
        *((rf"{of}\.{cols} = 0 \| {either}_scale\..*", "a sum of nothing has no scales") for of in of_sums),
        (
            rf"({either})\.{rows} = 1 \| \1_scale\.strides (?:column-major.*|one row repeated|rows apart|experts .*)",
            "the scale has one row, which has no stride",
        ),
        (rf"{one} > 4096 \| {other} > (?:1024|4096)", "more than 2.2 million elements in the result"),
        (rf"{one} > 1024 \| {other} > 4096", "more than 2.2 million elements in the result"),
        (rf"{either}\.{rows} > 4096 \| {either}\.{cols} > (?:1024|4096)", "more than 2.2 million elements in a tensor"),
        (rf"{either}\.{rows} > 1024 \| {either}\.{cols} > 4096", "more than 2.2 million elements in a tensor"),
    )


# For the weights b of experts, one expert per group.
EXPERTS = (
    (r"offs\.groups = 0 \| b\.(?!rows|dtype|rank).*", "there is no expert"),
    (r"offs\.groups = 0 \| b_scale\..*", "there is no expert"),
    (r"offs\.groups = 1 \| b(?:_scale)?\.strides (?:one expert repeated|experts .*)", "there is no other expert"),
)
PADDING_ALONE = (
    r"(?:byte (?:0|127|254)|strides (?!row-major)).*",
    "blocked scales of no tokens are bytes 255 in a run",
)
# For MX matmuls of which b may hold e2m1 codes.
OF_E2M1 = (
    (r"a\.dtype (?:bfloat16|float4_e2m1fn_x2) \| b\.dtype float8_.*", "e2m1 codes and bfloat16 meet e2m1 codes only"),
    (r"([ab])\.dtype float4_e2m1fn_x2 \| \1\.[+-]?(?:NaN|Inf) somewhere", "e2m1 has no NaN and no Inf"),
    (r"([ab])\.[+-]?(?:NaN|Inf) somewhere \| \1\.dtype float4_e2m1fn_x2", "e2m1 has no NaN and no Inf"),
    (
        r"a\.dtype (?:bfloat16|float4_e2m1fn_x2) \| b\.[+-]?(?:NaN|Inf) somewhere",
        "b is e2m1, which has no NaN and no Inf",
    ),
    (r"a\.dtype bfloat16 \| a\.largest somewhere", "bfloat16 is no element format"),
    (r"a\.dtype bfloat16 \| a_scale\..*", "bfloat16 has no scales"),
)
