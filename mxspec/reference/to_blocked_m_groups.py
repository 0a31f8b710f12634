"""to_blocked_m_groups: scales of token groups in 128x4 tiles, each group tiled on its own; groups along the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.groups import first_tokens, padded_rows
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.to_blocked import DTYPES, to_blocked
from mxspec.spec import spec


def check_args(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> None:
    op = "to_blocked_m_groups"
    checks.tensor_dtype(op, "scale", scale, DTYPES)
    checks.rank(op, "scale", scale, (2,))
    checks.offsets(op, "offs", offs, ("scale", scale))
    rows = padded_rows(scale.shape[0], offs.shape[0], 128)
    checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", scale.shape[0])


@spec(check_args=check_args)
def to_blocked_m_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    """Rearrange the scales of each group of rows into its own 128x4 tiles.

    Group g has the rows r with `offs[g-1] <= r < offs[g]` (group 0 begins at row 0), `m` of them, and takes
    `128*ceil(m/128)` rows of the result. The bytes of these rows are `to_blocked` of the group alone. They begin at row
    `start[g]`, the sum of `128*ceil(m/128)` over the groups before.

    Args:
        scale: `(M, C)`; float8_e8m0fnu, float8_e4m3fn or uint8; any strides.
        offs: `(G,)` int32 on scale's device: the exclusive end of each group. The ends never decrease, and the last is
            at most M. Rows from the last end on are dropped.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives bytes without meaning, but no access outside scale and
            the result.

    Returns:
        `(blocked, start)`.

        - blocked: `(M + 128*G, Cp)` with `Cp = 4*ceil(C/4)`, contiguous, of scale's dtype; large enough for any sizes
          of the groups. Bytes that belong to no scale are 0.
        - start: `(G + 1,)` int64. The last entry is the number of rows that all groups take.

    Special values: the op moves bytes and never reads them as numbers. An empty group takes no bytes.

    Raises:
        TypeError: scale or offs has a dtype that is not listed above.
        ValueError: a rank or a device is not as above; there would be 2^31 padded rows or more; or, with check_offs,
            offs is not in order.

    Example:
        >>> scale = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
        >>> blocked, start = to_blocked_m_groups(scale, torch.tensor([1, 2], dtype=torch.int32))
        >>> blocked.shape, start.tolist()
        (torch.Size([258, 4]), [0, 128, 256])
        >>> blocked[0].tolist(), blocked[128].tolist()
        ([1, 2, 0, 0], [3, 4, 0, 0])

    Source: PyTorch, `torch.nn.functional.scaled_grouped_mm` with 2-D operands; torchao,
        `mx_block_rearrange_2d_M_groups`.
    """
    check_args(scale, offs, check_offs=check_offs)
    (M, C), G = scale.shape, offs.shape[0]
    padded, _, end = pad_token_groups(scale, offs, 128)
    size = M + 128 * G, -(-C // 4) * 4
    # Groups begin at multiples of 128, so the tiles of the whole are the tiles of the groups, one group after the
    # other.
    return to_blocked(padded)[: size[0] * size[1]].view(size), first_tokens(end).to(torch.int64)
