"""to_blocked_k_groups: scales of token groups in 128x4 tiles, each group tiled on its own; groups along the columns."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.groups import first_tokens, padded_rows
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.to_blocked import DTYPES, to_blocked
from mxspec.spec import spec


def check_args(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> None:
    op = "to_blocked_k_groups"
    checks.tensor_dtype(op, "scale", scale, DTYPES)
    checks.rank(op, "scale", scale, (2,))
    checks.offsets(op, "offs", offs, ("scale", scale))
    columns = padded_rows(scale.shape[1], offs.shape[0], 4)
    checks.fits_int32(op, f"the padded columns of {offs.shape[0]} groups", columns)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "C", scale.shape[1])


def tile_places(end: Tensor, row_tiles: int, col_tiles: int) -> Tensor:
    """Return where each tile of the padded groups goes, one row of tiles after another.

    `end` counts columns, in multiples of 4. The tiles of a group are consecutive: the tile in row r and column t has
    place `r * width + t - first` within its group.
    """
    t = torch.arange(col_tiles, device=end.device)
    g = torch.searchsorted(end, 4 * t, right=True)  # the columns after the last group count as one more group
    first = first_tokens(end)[g] // 4
    last = torch.cat([end, end.new_full((1,), 4 * col_tiles)])[g] // 4
    r = torch.arange(row_tiles, device=end.device)[:, None]
    place = first * row_tiles + r * (last - first) + t - first  # (row_tiles, col_tiles), a permutation
    return place.clamp(0, max(0, row_tiles * col_tiles - 1)).flatten()  # not a permutation if offs is out of order


@spec(check_args=check_args)
def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    """Rearrange the scales of each group of columns into its own 128x4 tiles: the operands of the weight gradient.

    Group g has the columns k with `offs[g-1] <= k < offs[g]` (group 0 begins at column 0), `c` of them. Its bytes are
    `to_blocked` of the group alone: `Rp * 4*ceil(c/4)` consecutive bytes, with `Rp = 128*ceil(R/128)`. They begin at
    byte `start[g] * Rp` of the result; `start[g]` is the sum of `4*ceil(c/4)` over the groups before. The shape of the
    result only gives the number of bytes.

    Args:
        scale: `(R, C)`; float8_e8m0fnu, float8_e4m3fn or uint8; any strides.
        offs: `(G,)` int32 on scale's device: the exclusive end of each group, in columns of scale (tokens / 32). The
            ends never decrease, and the last is at most C. Columns from the last end on are dropped.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives bytes without meaning, but no access outside scale and
            the result.

    Returns:
        `(blocked, start)`.

        - blocked: `(Rp, C + 4*G)`, contiguous, of scale's dtype; large enough for any sizes of the groups. Bytes that
          belong to no scale are 0.
        - start: `(G + 1,)` int64, in columns. The last entry is the number of columns that all groups take.

    Special values: the op moves bytes and never reads them as numbers. An empty group takes no bytes.

    Raises:
        TypeError: scale or offs has a dtype that is not listed above.
        ValueError: a rank or a device is not as above; there would be 2^31 padded columns or more; or, with check_offs,
            offs is not in order.

    Example:
        >>> scale = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
        >>> blocked, start = to_blocked_k_groups(scale, torch.tensor([1, 3], dtype=torch.int32))
        >>> blocked.shape, start.tolist()
        (torch.Size([128, 11]), [0, 4, 8])
        >>> blocked.flatten()[:3].tolist(), blocked.flatten()[512:515].tolist()
        ([1, 0, 0], [2, 3, 0])

    Source: PyTorch, `torch.nn.functional.scaled_grouped_mm` with 2-D operands; torchao,
        `mx_block_rearrange_2d_K_groups`.
    """
    check_args(scale, offs, check_offs=check_offs)
    (R, C), G = scale.shape, offs.shape[0]
    padded, _, end = pad_token_groups(scale.mT, offs, 4)  # (columns, R)
    row_tiles, col_tiles = -(-R // 128), padded.shape[0] // 4
    tiles = to_blocked(padded.mT).view(torch.uint8).view(row_tiles, col_tiles, 512)

    place = tile_places(end, row_tiles, col_tiles)
    blocked = torch.zeros_like(tiles).view(-1, 512)
    blocked[place] = tiles.view(-1, 512)
    size = 128 * row_tiles, C + 4 * G
    return blocked.flatten()[: size[0] * size[1]].view(size).view(scale.dtype), first_tokens(end).to(torch.int64)
