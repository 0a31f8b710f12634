"""Operands of the NVFP4 matmuls: codes with e4m3 scales, or bfloat16 values, and a tensor scale for each matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SCALE_STRIDES, laid_flat
from mxspec.cases.common.matmuls import Shape, tensor_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, laid
from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE
from mxspec.reference.common.numerics import encoded, packed
from mxspec.reference.common.nvfp4_matmul import values as exact_values
from mxspec.spec import normal

CODES, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
KINDS = ("codes", "values")
SIZES = (0, 1, 48, 384, 1041, 4128)
SUMS = (
    0,
    1,
    16,
    48,
    161,
    384,
    1056,
    2304,
    4128,
    8256,
)  # of K; 1 and 161 are no multiples of a block, so values alone have them
Operand = tuple[Tensor, Tensor | None]  # codes and plain scales with blocks along the last dimension; or values, None
Pair = tuple[Operand, Operand]


def codes(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed e2m1 codes, packed along the last dimension. `shape` counts elements."""
    if torch._C._len_torch_dispatch_stack():  # the tensors of a mode, such as FakeTensorMode, are its own
        return _made(shape, seed)
    return _kept(shape, seed).clone()


def _made(shape: tuple[int, ...], seed: int) -> Tensor:
    return packed(encoded(normal(*shape, seed=seed) * 2, E2M1), E2M1)


_kept = functools.lru_cache(maxsize=512)(_made)  # many cases of an op have the same codes


def scales(*shape: int, seed: int = 1) -> Tensor:
    """e4m3 scales from 1/2 to 15/8. They are near each other, so that any wrong scale shows in the SQNR."""
    bits = torch.randint(0x30, 0x40, shape, generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(E4M3)


def of_codes(*shape: int, seed: int = 0) -> Operand:
    return codes(*shape, seed=seed), scales(*shape[:-1], shape[-1] // NVFP4_BLOCK_SIZE, seed=2 + seed)


def of_values(*shape: int, seed: int = 0) -> Operand:
    """The values of codes, in bfloat16. The last dimension need not be a multiple of a block."""
    *lead, K = shape
    whole = -(-K // NVFP4_BLOCK_SIZE) * NVFP4_BLOCK_SIZE
    return exact_values(*of_codes(*lead, whole, seed=seed))[..., :K].to(torch.bfloat16).contiguous(), None


MAKE: dict[str, Callable[..., Operand]] = {"codes": of_codes, "values": of_values}


def pair(first: tuple[int, ...], second: tuple[int, ...], kinds: tuple[str, str] = ("codes", "codes")) -> Pair:
    return MAKE[kinds[0]](*first), MAKE[kinds[1]](*second, seed=1)


def far_values(first: tuple[int, ...], second: tuple[int, ...]) -> Pair:
    """Values of 8 bits. Along K, those of the first rise from 2^-100 to 2^100, and those of the second fall."""
    of_k = 2.0 ** torch.linspace(-100, 100, first[-1]).round()
    return ((normal(*first) * of_k).bfloat16(), None), ((normal(*second, seed=1) / of_k).bfloat16(), None)


def numbers(count: int | None, seed: int = 5) -> Tensor:
    """Tensor scales between 1/2 and 3/2, of 24 bits: `()`, or one for each of `count` groups."""
    shape = () if count is None else (count,)
    bits = torch.randint(2**23, 3 * 2**23, shape, generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.float32) * 2.0**-24


def scales_laid_out(scale: Tensor | None, layout: str, rearrange: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A plain scale unchanged, or blocked with 0xFF (NaN) in every padding byte."""
    if scale is None or layout == "plain":
        return scale
    bits = scale.view(torch.uint8)
    blocked, used = rearrange(bits), rearrange(torch.ones_like(bits))
    return torch.where(used == 1, blocked, 255).view(E4M3)


def special(first: tuple[int, ...], second: tuple[int, ...]) -> Iterator[tuple[str, Pair]]:
    """Pairs of operands; one operand has a special value in one row (of the last expert, if it has experts)."""

    def row(t: Tensor | None, i: int) -> Tensor:
        assert t is not None
        return (t[-1] if t.ndim == 3 else t)[i]

    for i, name in ((0, "the first"), (1, "the second")):
        operands = pair(first, second)
        row(operands[i][1], 5).view(torch.uint8)[1] = 0x7F
        yield f"a scale of NaN in {name}", operands
        operands = pair(first, second)
        row(operands[i][1], 2).view(torch.uint8)[:3] = torch.tensor([0, 1, 0x7E], dtype=torch.uint8)
        yield f"scales of 0, 2^-9 and 448 in {name}", operands
        operands = pair(first, second)
        of_row = row(operands[i][1], 4).view(torch.uint8)
        of_row[:] = torch.arange(of_row.numel()) % 7 + 1
        yield f"a row of subnormal scales in {name}", operands
        for number in (math.nan, math.inf, -math.inf):
            operands = pair(first, second, ("values", "values"))
            row(operands[i][0], 3)[37] = number
            yield f"a value {number} in {name}", operands


def operand(name: str, experts: bool = False, groups: bool = False) -> dict[str, Any]:
    """The dimensions of an operand, its scale and its tensor scale."""
    strides = ("none", "row-major", "rows apart", "one row repeated", "column-major")
    return {
        f"{name} kind": KINDS,
        f"{name} values": ("none", "finite", "zeros", "NaN", "Inf"),
        f"{name} strides": (*strides, *(EXPERT_STRIDES if experts else ())),
        f"{name} begins": ("none", *BEGINS),
        f"{name}_scale values": ("none", "near 1", "extreme", "NaN"),
        f"{name}_scale strides": tuple(s for s in SCALE_STRIDES if experts or s not in EXPERT_STRIDES),
        f"{name}_scale begins": ("none", *BEGINS),
        f"{name}_tensor_scale begins": BEGINS,
        **({f"{name}_tensor_scale strides": ("none", "dense", "one repeated", "apart")} if groups else {}),
    }


def numbers_fit(choice: Choice, name: str, groups: int | None) -> bool:
    """Whether the tensor scales of this many groups can have the strides of a choice."""
    strides = choice.get(f"{name}_tensor_scale strides")
    if groups is None or strides is None:
        return True
    return (strides == "none") == (groups == 0) and (groups > 1 or strides not in ("one repeated", "apart"))


def operand_fits(choice: Choice, name: str, shape: Shape, blocked: Shape | None = None) -> bool:
    """Whether an operand of these elements can be made. `blocked` is the shape of its blocked scales, if they are."""
    kind, K = choice.get(f"{name} kind"), shape[-1]
    if kind == "codes":
        if choice.get(f"{name} values") in ("NaN", "Inf") or choice.get(f"{name} strides") == "column-major":
            return False
        if K is not None and K % NVFP4_BLOCK_SIZE:
            return False
    of_scale = [choice.get(f"{name}_scale {part}") for part in ("values", "strides", "begins")]
    if kind == "values":
        return set(of_scale) <= {"none", None} and tensor_fits(choice, name, shape)
    if kind is None:
        return tensor_fits(choice, name, shape)
    if blocked is not None and of_scale[1] not in (None, "none", "row-major"):
        return False
    stored = (*shape[:-1], None if K is None else K // 2)
    plain = (*shape[:-1], None if K is None else K // NVFP4_BLOCK_SIZE)
    return tensor_fits(choice, name, stored) and tensor_fits(
        choice, f"{name}_scale", plain if blocked is None else (1, *blocked)
    )


def hides(choice: Choice, name: str, rows: int | None, K: int | None) -> bool:
    """Whether an operand makes the whole product zero, NaN or Inf."""
    if 0 in (rows, K) or choice.get(f"{name} values") == "none":
        return True
    of, of_scale = choice.get(f"{name} values"), choice.get(f"{name}_scale values")
    one = rows == 1 or choice.get(f"{name} strides") == "one row repeated"
    one_scale = rows == 1 or choice.get(f"{name}_scale strides") == "one row repeated"
    few = K is not None and K < 3 * NVFP4_BLOCK_SIZE
    return (of in ("zeros", "NaN", "Inf") and one) or (
        (of_scale == "NaN" and one_scale) or (of_scale == "extreme" and (few or one_scale))
    )


def made(choice: Choice, name: str, shape: tuple[int, ...], seed: int = 0) -> Operand:
    """Codes and plain scales, or values, with the special values of a choice."""
    kind, values = choice[f"{name} kind"], choice[f"{name} values"]
    t, scale = MAKE[kind](*shape, seed=seed)
    if t.numel() and values == "zeros":
        rows = t.view(torch.uint8 if kind == "codes" else torch.int16)[..., ::4, :]
        rows &= 0x88 if kind == "codes" else -0x8000
    elif t.numel() and values in ("NaN", "Inf"):
        number, rows_of = (math.nan if values == "NaN" else math.inf), t.shape[-2]
        t[..., 0, 0], t[..., 0, t.shape[-1] // 2], t[..., rows_of // 2, 0] = -number, number, -number
        if rows_of > 4:
            t[..., 3, -1] = math.nan
    if scale is not None and scale.numel():
        bits, of = scale.view(torch.uint8), choice[f"{name}_scale values"]
        if of == "extreme":
            last = torch.tensor([0x00, 0x01, 0x00, 0x07], dtype=torch.uint8)[: bits.shape[-1]]
            bits[..., 0, : len(last)], bits[..., -1, -len(last) :] = last, last
        elif of == "NaN":
            bits[..., 0, 0] = 0x7F
            bits[..., bits.shape[-2] // 2, -1] = 0x7F
    return t, scale


def poison(choice: Choice, name: str, operand: Operand, first: int, across: bool = False) -> None:
    """Fill the rows from `first` on with NaN, because they belong to no group. With `across`, fill columns.

    A repeated row has no memory of its own and stays. Codes have no NaN; their scales have.
    """
    t, scale = operand
    if across:
        if scale is None:
            t[..., first:] = math.nan
        else:
            scale.view(torch.uint8)[..., first // NVFP4_BLOCK_SIZE :] = 0xFF
    elif scale is None:
        if choice[f"{name} strides"] != "one row repeated":
            t[first:] = math.nan
    elif choice[f"{name}_scale strides"] != "one row repeated":
        scale.view(torch.uint8)[first:] = 0xFF


def lay(
    choice: Choice, name: str, operand: Operand, layout: str, rearrange: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """An operand as it lies in memory; `rearrange` makes blocked scales from plain bytes."""
    t, scale = operand
    begins = choice[f"{name}_scale begins"]
    if scale is not None and layout == "blocked":
        blocked = scales_laid_out(scale, layout, rearrange)
        assert blocked is not None
        scale = laid_flat(blocked, begins)
    elif scale is not None:
        scale = laid(scale, choice[f"{name}_scale strides"], begins)
    return laid(t, choice[f"{name} strides"], choice[f"{name} begins"]), scale


def impossible(first: str, second: str, rows: str = "rows", cols: str = "cols") -> tuple[tuple[str, str], ...]:
    """The pairs of facts of two operands that cannot meet, because an operand is codes with scales or values.

    `cols` is their common dimension, which the sum runs over.
    """
    name = f"({first}|{second})"
    of_values = r"(?:[+-]Inf|NaN|values)"
    of_codes = r"(?:subnormal|largest|dtype float4_e2m1fn_x2)"
    if cols == "cols":
        turned = name + r"\.strides column-major \| \1(?:_scale\..*|\." + of_codes + ".*)", "codes have one order"
    else:
        across = r"\.strides row-major \| \1_scale\.strides (?:column-major|one row repeated|rows apart)"
        turned = name + across, "codes are row-major in one column alone, and its scale is one row"
    return (
        (name + r"\.dtype float4_e2m1fn_x2 \| \1\." + of_values + " .*", "codes have no NaN and no Inf"),
        (name + r"\.dtype bfloat16 \| \1\." + of_codes + " .*", "a fact of codes"),
        (name + r"\." + of_values + r" .* \| \1\." + of_codes + ".*", "a fact of values and a fact of codes"),
        (name + r"\.(?:dtype bfloat16|" + of_values + r" .*) \| \1_scale\..*", "values have no scale"),
        turned,
        (
            name + rf"\.{cols} (?:= 1|odd) \| {name[:-1]})(?:_scale\..*|\." + of_codes + ".*)",
            "with codes, the size is a multiple of 16",
        ),
        (name + rf"\.{cols} = 1 \| {name[:-1]})\.strides column-major", "one column has no stride"),
    )


def impossible_groups(first: str, second: str, codes_of: str = "") -> tuple[tuple[str, str], ...]:
    """The pairs of facts of groups that cannot meet. `codes_of`: the operands whose blocks lie along the tokens."""
    scale = rf"(?:{first}|{second})_scale"
    found = (
        (r"offs\.groups = 0 \| \w+_tensor_scale\..*", "there is no number"),
        (r"offs\.groups = 1 \| \w+_tensor_scale\.strides .*", "one number has no stride"),
        (
            rf"{first}\.rows = 0 \| {scale if codes_of else first + '_scale'}\.zero somewhere",
            "blocked scales of no tokens are padding alone",
        ),
    )
    of_codes = r"(?:subnormal|largest|dtype float4_e2m1fn_x2)"
    along = (
        rf"offs\.some group of one token \| (?:{codes_of})(?:_scale\..*|\.{of_codes}.*)",
        "groups of codes have multiples of 16 tokens",
    )
    return (*found, along) if codes_of else found
