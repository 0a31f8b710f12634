"""Token groups in Helion: which group a row belongs to, found by every program for itself from `offs`.

No launch comes before, and nothing is read on the host. A program reads all ends, a chunk at a time, which the L2
holds, sums up the padded sizes and picks the group by comparison: a few hundred cycles, which other programs hide.
The loop over the chunks stands in each kernel, since Helion traces a function that a kernel calls: a loop in there
would be unrolled, for one number of groups. What such a loop carries are tensors, not tuples of them.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

# Ref mode scans an element at a time, each in Python.
_REF = os.environ.get("HELION_INTERPRET") == "1"


def padded_rows(M: int, G: int, alignment: int) -> int:
    """The rows that hold M tokens of G groups, however they are distributed."""
    return -(-(M + G * alignment) // alignment) * alignment


def chunk(groups: int) -> int:
    """How many ends a program reads at a time: one of two sizes, or each number of groups would be another kernel."""
    return 32 if groups <= 32 else 256


def padded_ends(
    offs: Tensor, stride: int, G: int, before: Tensor, i: int, alignment: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a chunk of the groups, from i on: their numbers, and their first and last rows, padded.

    And the last of those, at which the next chunk begins.
    """
    lane = hl.arange(chunk)
    g = i + lane
    first = hl.load(offs, [(g - 1) * stride], extra_mask=(g > 0) & (g < G))
    stop = hl.load(offs, [g * stride], extra_mask=g < G)
    # 0 past the last group, where both are. No `//`, which costs a branch on the sign: sizes are not negative.
    rows = torch.div(stop - first + (alignment - 1), alignment, rounding_mode="trunc") * alignment
    end = before + (rows.cumsum(0, dtype=torch.int32) if _REF else hl.cumsum(rows, 0))
    last = torch.where(lane == chunk - 1, end, 0).sum(0, dtype=torch.int32)
    return g, end - rows, end, last


def passed(group: Tensor, begin: Tensor, row: Tensor, g: Tensor, end: Tensor, G: int) -> tuple[Tensor, Tensor]:
    """The groups that hold padded rows (N,), and the first padded row of each, once a chunk of the groups is counted.

    After the last chunk, G past the last group, which ends there.
    """
    ended = (end.unsqueeze(0) <= row.unsqueeze(1)) & (g < G).unsqueeze(0)
    last = torch.where(ended, end.unsqueeze(0), 0).amax(1)
    return group + ended.sum(1, dtype=torch.int32), torch.where(last > begin, last, begin)


def tokens_of_tile(
    row: Tensor, group: Tensor, begin: Tensor, offs: Tensor, stride: int, G: int, M: int
) -> tuple[Tensor, Tensor]:
    """The first token of a tile that begins at a padded row, and the one after the last of its group.

    What lies past the last group counts as one group more. Where offs is out of order both may be any.
    """
    first = hl.load(offs, [(group - 1) * stride], extra_mask=group > 0)
    stop = torch.where(group < G, hl.load(offs, [group * stride], extra_mask=group < G), M)
    return first + row - begin, stop


def tokens_of(group: Tensor, offs: Tensor, stride: int, G: int) -> tuple[Tensor, Tensor]:
    """The first token of a group and the one after its last; none past the last group."""
    first = hl.load(offs, [(group - 1) * stride], extra_mask=(group > 0) & (group < G))
    return first, hl.load(offs, [group * stride], extra_mask=group < G)


def tokens_left(token: Tensor, stop: Tensor, tokens: int) -> Tensor:
    """How many tokens of a group that ends at `stop` there are from each on, of `tokens` in all; for any offs."""
    limit = torch.where(stop < tokens, stop, tokens).clamp(min=0).sum(0)  # a number, which a mask in any layout takes
    return torch.where(token >= 0, limit - token, 0)


def at_or_before(ends: Tensor, stride: int, G: int, i: int, chunk: int, row: Tensor) -> Tensor:
    """Of the ends from i on, a chunk of them, how many are at or before each row (N,)."""
    g = i + hl.arange(chunk)
    end = hl.load(ends, [g * stride], extra_mask=g < G).unsqueeze(0)
    return ((end <= row.unsqueeze(1)) & (g < G).unsqueeze(0)).sum(1, dtype=torch.int32)


def token_at(
    offs: Tensor, stride_offs: int, start: Tensor, stride_start: int, G: int, i: int, chunk: int, row: Tensor
) -> Tensor:
    """The token of each row (N,) in a chunk of the groups, from i on: the last if they share a row, -1 for none.

    Groups lie in any order, so that every one of them is looked at.
    """
    g = i + hl.arange(chunk)
    first = hl.load(offs, [(g - 1) * stride_offs], extra_mask=(g > 0) & (g < G))
    stop = hl.load(offs, [g * stride_offs], extra_mask=g < G)
    place = row.unsqueeze(1) - hl.load(start, [g * stride_start], extra_mask=g < G).unsqueeze(0)  # within the group
    here = (place >= 0) & (place < (stop - first).unsqueeze(0))
    return torch.where(here, first.unsqueeze(0) + place, -1).amax(1)


def grouped_tile(
    tile: Tensor, row_tile: Tensor | int, group: Tensor, begin: Tensor, size: Tensor, G: int, row_tiles: int,
    col_tiles: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Where a tile of K-groups' scales lies among all, and whether it is one: a group's are together, row by row.

    `tile` is its column among `col_tiles` padded ones, of which its group has `size`, from `begin` on; what lies past
    the last group counts as one group more. Where offs is out of order the place may be none.
    """
    width = torch.where(group < G, size, col_tiles - begin)
    place = begin * row_tiles + width * row_tile + tile - begin
    there = (tile < col_tiles) & (row_tile < row_tiles)
    return place, there & (place >= 0) & (place < row_tiles * col_tiles)
