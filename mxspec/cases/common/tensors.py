"""Tensors for cases: values that reveal wrong results, laid out in memory as a case asks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxspec.formats import BY_DTYPE, E2M1, E8M0FNU, INT_OF_BYTES
from mxspec.spec import random_bits, random_normal

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 2_200_000  # the most elements of a tensor, except in cases with the flag `large`

# "none" is for empty tensors: their strides and values mean nothing.
STRIDES = (
    "none",
    "row-major",
    "column-major",
    "rows apart",
    "columns apart",
    "one row repeated",
    "one column repeated",
)
EXPERT_STRIDES = ("experts inside the rows", "one expert repeated")
BEGINS = ("at 0", "at a later word", "between words")
VALUES = ("none", "finite", "special", "special, Inf first", "bits", "zeros")


def laid(t: Tensor, strides: str = "row-major", begins: str = "at 0") -> Tensor:
    """The same values with other strides. A repeated row or column repeats the first."""
    bits = t.resolve_neg().view(INT_OF_BYTES[t.element_size()])
    moved = _LAYOUTS[strides](bits)
    start = {"none": 0, "at 0": 0, "at a later word": 64 // t.element_size(), "between words": 1}[begins]
    if start:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(moved.shape, moved.stride(), strict=True))
        memory = torch.empty(start + max(extent, 0), dtype=bits.dtype)
        memory.view(torch.uint8).fill_(0xFF)
        if moved.numel():
            memory[start:].copy_(moved.as_strided((extent,), (1,)))
        moved = memory.as_strided(moved.shape, moved.stride(), start)
    return moved.view(t.dtype)


def laid_negated(t: Tensor, strides: str, begins: str) -> Tensor:
    """A view that reads the negative of its memory, whose bytes are `t`.

    Every NaN in it is the same positive NaN, because the bits of any other negated NaN depend on the CPU's
    instructions.
    """
    bits, nan = t.view(INT_OF_BYTES[t.element_size()]), t.new_tensor(torch.nan).view(INT_OF_BYTES[t.element_size()])
    bits = torch.where(t.isnan(), nan, bits) ^ torch.iinfo(bits.dtype).min
    return torch._neg_view(laid(bits.view(t.dtype), strides, begins))


def turned(t: Tensor, axis: int) -> Tensor:
    """t, or for axis -2 its transpose in row-major memory."""
    return t if axis == -1 else t.mT.contiguous()


def _apart(t: Tensor, rows: int, cols: int) -> Tensor:
    """A copy with gaps of 0xFF bytes between rows, and between columns."""
    *lead, M, K = t.shape
    room = torch.empty(*lead, M, K * cols + rows, dtype=t.dtype)
    room.view(torch.uint8).fill_(0xFF)
    view = room[..., : K * cols : cols]
    return view.copy_(t)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "row-major": lambda t: t.contiguous(),
    "column-major": lambda t: t.mT.contiguous().mT,
    "rows apart": lambda t: _apart(t, 16, 1),
    "columns apart": lambda t: _apart(t, 0, 2),
    "one row repeated": lambda t: t[..., :1, :].contiguous().expand(t.shape),
    "one column repeated": lambda t: t[..., :1].contiguous().expand(t.shape),
    "experts apart": lambda t: _apart(t.reshape(len(t), 1, -1), 16, 1).unflatten(-1, t.shape[1:])[:, 0],
    "experts inside the rows": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
    "one expert repeated": lambda t: t[:1].contiguous().expand(t.shape),
}


def strides_fit(strides: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can show these strides: each dimension that they concern needs two elements."""
    if (strides == "none") != (0 in shape):
        return False
    if strides == "experts apart":
        return len(shape) == 3 and shape[0] > 1 and shape[-1] > 1
    if strides in EXPERT_STRIDES:
        return len(shape) == 3 and shape[0] > 1 and (strides == "one expert repeated" or shape[1] > 1) and shape[2] > 0
    rows, cols = shape[-2:]
    needed = {
        "none": True,
        "row-major": True,
        "rows apart": rows > 1 and cols > 1,
        "columns apart": cols > 1,
        "one row repeated": rows > 1,
        "one column repeated": cols > 1,
        "column-major": rows > 1 and cols > 1,
    }
    return needed[strides]


def small_enough(*sizes: int) -> bool:
    product = 1
    for size in sizes:
        product *= max(size, 1)
    return product <= LARGEST


def float_values(shape: tuple[int, ...], dtype: torch.dtype, values: str, across: bool = False) -> Tensor:
    """Floats: all finite; with every special value in the first and the last row; any bits; or zeros of both signs.

    across: whether blocks lie down the columns. The special values then go into the first and the last column.
    """
    if values == "bits":
        return random_bits(*shape, dtype=dtype)
    if values == "zeros":
        return torch.where(random_normal(*shape, dtype=dtype) < 0, -0.0, 0.0).to(dtype)
    x = random_normal(*shape, dtype=dtype)
    if values == "finite" and x.numel():
        x.view(-1)[x.numel() // 2] = torch.finfo(dtype).max
    if values.startswith("special"):
        rows = x.mT.contiguous() if across else x
        _plant(rows.view(-1, rows.shape[-1]), 5 if values.endswith("first") else 0)
        x = rows.mT.contiguous() if across else rows
        for row in (0, -1):
            for column in (0, -1):  # the corners, so that a repeated row, column or expert also ends with such a value
                x[..., row, column] = torch.inf if values.endswith("first") else torch.nan
    return x


def _plant(rows: Tensor, turn: int) -> None:
    """Put special values into rows: each kind at the start of a block, in the first row and in some other row."""
    finfo, K = torch.finfo(rows.dtype), rows.shape[1]
    kinds: list[tuple[float, ...]] = [
        (torch.nan, 1.0, -0.0),
        (finfo.max, 1.0, -finfo.max, -0.0),
        (1.0625, 1.125, -1.0625, -1.125, -0.0, 1.875, 2.0**-20),  # ties of e4m3 and e5m2
        (finfo.smallest_normal / 2, -finfo.smallest_normal / 4, -0.0),
        (-0.0, *31 * (0.0,)),
        (torch.inf, -1.0, -0.0),
        (-torch.inf, 1.0, -0.0),
    ]
    kinds = kinds[turn:] + kinds[:turn]
    along, down = (
        [(0, 32 * i, i) for i in range(-(-K // 32))],
        [(i, 0, i) for i in range(1, min(len(kinds), len(rows)))],
    )
    for row, column, i in along + down:
        kind = torch.tensor(kinds[i % len(kinds)]).to(rows.dtype)[: K - column]
        rows[row, column : column + len(kind)] = kind


def plant(t: Tensor, values: Tensor) -> None:
    """Put the values along the first row and column of the tensor and, reversed, along the last row and column.

    Each repetition of a row, a column or an expert then shows them.
    """
    for row, line in ((0, values), (-1, values.flip(0))):
        n = min(len(line), t.shape[-2])
        t[..., slice(n) if row == 0 else slice(-n, None), row] = line[:n] if row == 0 else line[-n:]
        n = min(len(line), t.shape[-1])
        t[..., row, slice(n) if row == 0 else slice(-n, None)] = line[:n] if row == 0 else line[-n:]


def code_values(shape: tuple[int, ...], dtype: torch.dtype, values: str, seed: int = 0) -> Tensor:
    """Codes of a format: finite numbers; or any byte, with each NaN and Inf planted; or zeros of both signs."""
    fmt = BY_DTYPE.get(dtype)  # None for uint8, which holds FP6: every byte is valid
    if values == "zeros":
        signs = 0x88 if fmt is E2M1 else 0x80 if fmt and fmt.nan_code is not None else 0
        return (random_bits(*shape, dtype=torch.uint8, seed=seed) & signs).view(dtype)
    bits = random_bits(*shape, dtype=torch.uint8, seed=seed)
    if values == "finite" and fmt and fmt.nan_code is not None:
        magnitude = bits & 0x7F
        bits = torch.where(magnitude > fmt.largest_code, bits & 0x80, bits)
    if values in ("bits", "Inf") and bits.numel():
        plant(bits, torch.tensor([0x7F, 0xFF, 0x7C, 0xFC, 0x80, 0x7E, 0x7B, 0x01], dtype=torch.uint8))
    return bits.view(dtype)


def scale_bytes(shape: tuple[int, ...], values: str, seed: int = 1) -> Tensor:
    """E8M0 scales: near 1, or any byte with 255, 0, 254 and 127 planted."""
    bits = random_bits(*shape, dtype=torch.uint8, seed=seed)
    if values != "special":
        bits = 120 + bits % 16
    elif bits.numel():
        plant(bits, torch.tensor([255, 0, 254, 127], dtype=torch.uint8))
    return bits.view(E8M0FNU.dtype)
