"""Token groups in Helion: each program finds by itself, from `offs`, which group its rows belong to.

No other kernel runs before, and the host reads nothing. A program reads all ends in chunks, sums the padded sizes, and
finds its group by comparison. The ends stay in the L2 cache. The search takes a few hundred cycles, and other programs
run during that time.

The loop over the chunks is written in each kernel. Helion traces a function that a kernel calls, so a loop in such a
function would be unrolled for one number of groups. The loop carries tensors, not tuples of tensors.
"""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

# Ref mode scans one element at a time, each in Python.
_REF = os.environ.get("HELION_INTERPRET") == "1"


def padded_rows(M: int, G: int, alignment: int) -> int:
    """The number of rows that hold M tokens of G groups, however the tokens are distributed."""
    return -(-(M + G * alignment) // alignment) * alignment


def chunk(groups: int) -> int:
    """The number of ends that a program reads at a time. There are only two sizes, so that few kernels are compiled."""
    return 32 if groups <= 32 else 256


def padded_ends(
    offs: Tensor, stride: int, G: int, before: Tensor, i: int, alignment: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the groups i .. i + chunk: their numbers, and each group's padded first row and end row.

    The fourth result is the last end, at which the next chunk begins.
    """
    lane = hl.arange(chunk)
    g = i + lane
    first = hl.load(offs, [(g - 1) * stride], extra_mask=(g > 0) & (g < G))
    stop = hl.load(offs, [g * stride], extra_mask=g < G)
    # 0 past the last group: `stop` and `first` are both 0 there. No `//`, which would need a branch on the sign: sizes
    # are not negative.
    rows = torch.div(stop - first + (alignment - 1), alignment, rounding_mode="trunc") * alignment
    end = before + (rows.cumsum(0, dtype=torch.int32) if _REF else hl.cumsum(rows, 0))
    last = torch.where(lane == chunk - 1, end, 0).sum(0, dtype=torch.int32)
    return g, end - rows, end, last


def passed(group: Tensor, begin: Tensor, row: Tensor, g: Tensor, end: Tensor, G: int) -> tuple[Tensor, Tensor]:
    """Update the group and its first padded row, for padded rows (N,), with one chunk of ends.

    After the last chunk, a row past the last group has the group G, which begins where the last group ends.
    """
    ended = (end.unsqueeze(0) <= row.unsqueeze(1)) & (g < G).unsqueeze(0)
    last = torch.where(ended, end.unsqueeze(0), 0).amax(1)
    return group + ended.sum(1, dtype=torch.int32), torch.where(last > begin, last, begin)


def tokens_of_tile(
    row: Tensor, group: Tensor, begin: Tensor, offs: Tensor, stride: int, G: int, M: int
) -> tuple[Tensor, Tensor]:
    """The first token of a tile that begins at a padded row, and the token after the last token of the tile's group.

    The rows past the last group count as one more group. If offs is out of order, both results may be any number.
    """
    first = hl.load(offs, [(group - 1) * stride], extra_mask=group > 0)
    stop = torch.where(group < G, hl.load(offs, [group * stride], extra_mask=group < G), M)
    return first + row - begin, stop


def tokens_of(group: Tensor, offs: Tensor, stride: int, G: int) -> tuple[Tensor, Tensor]:
    """The first token of a group and the token after its last. Both are 0 past the last group."""
    first = hl.load(offs, [(group - 1) * stride], extra_mask=(group > 0) & (group < G))
    return first, hl.load(offs, [group * stride], extra_mask=group < G)


def tokens_left(token: Tensor, stop: Tensor, tokens: int) -> Tensor:
    """The number of tokens from `token` to the end of a group that ends at `stop`.

    The result is safe for any `offs`, because `tokens`, the number of all tokens, limits it.
    """
    limit = torch.where(stop < tokens, stop, tokens).clamp(min=0).sum(0)  # a scalar fits masks of any layout
    return torch.where(token >= 0, limit - token, 0)


def at_or_before(ends: Tensor, stride: int, G: int, i: int, chunk: int, row: Tensor) -> Tensor:
    """How many of the ends i .. i + chunk are at or before each row (N,)."""
    g = i + hl.arange(chunk)
    end = hl.load(ends, [g * stride], extra_mask=g < G).unsqueeze(0)
    return ((end <= row.unsqueeze(1)) & (g < G).unsqueeze(0)).sum(1, dtype=torch.int32)


def token_at(
    offs: Tensor, stride_offs: int, start: Tensor, stride_start: int, G: int, i: int, chunk: int, row: Tensor
) -> Tensor:
    """The token of each row (N,) in the groups i .. i + chunk, or -1 if there is none.

    If groups share a row, the last token counts.

    Groups may be in any order, so the program reads every group.
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
    """The place of a tile among all tiles of K-groups' scales, and whether the tile exists.

    The tiles of a group are stored together, row by row. `tile` is the tile's column among `col_tiles` padded columns.
    Its group has `size` of these columns, and the first is `begin`. The columns past the last group count as one more
    group. If offs is out of order, the place may be invalid: the second result is then False.
    """
    width = torch.where(group < G, size, col_tiles - begin)
    place = begin * row_tiles + width * row_tile + tile - begin
    there = (tile < col_tiles) & (row_tile < row_tiles)
    return place, there & (place >= 0) & (place < row_tiles * col_tiles)
