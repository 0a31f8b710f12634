"""pad_token_groups: pad every group of rows with zeros to a multiple of `alignment`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.groups import bounds, padded_rows
from mxspec.reference.place_token_groups import place_token_groups
from mxspec.spec import Gradient, spec


def check_args(x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False) -> None:
    op = "pad_token_groups"
    checks.token_rows(op, "x", x)
    checks.offsets(op, "offs", offs, ("x", x))
    checks.positive(op, "alignment", alignment)
    rows = padded_rows(x.shape[0], offs.shape[0], alignment)
    checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", x.shape[0])


def _backward(saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor | None, ...]:
    offs, start, M = saved
    return torch.ops.mxspec.unpad_token_groups(gradients[0], offs, start, M, backend=backend), None, None


@spec(
    check_args=check_args,
    gradient=Gradient(save=lambda args, outputs: (args[1], outputs[1], args[0].shape[0]), backward=_backward),
)
def pad_token_groups(
    x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad every group of rows with zeros to a multiple of `alignment`, without reading the group sizes on the host.

    Group g has the rows t of x with `offs[g-1] <= t < offs[g]` (group 0 begins at row 0), `m` of them. In the result
    the group begins at row `start[g]`, the sum of `alignment * ceil(m / alignment)` over the groups before. `end[g]` is
    the row after its padding. An empty group stays empty.

    Args:
        x: `(M, K)`, the tokens of each group together; real numbers of 1, 2 or 4 bytes; any strides.
        offs: `(G,)` int32 on x's device: the exclusive end of each group. The ends never decrease, and the last is at
            most M. Rows from the last end on belong to no group and are dropped.
        alignment: in rows; an int of at least 1, not necessarily a power of two.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives rows without meaning, but no access outside x and the
            result.

    Returns:
        `(padded, start, end)`. The gradient of x is `unpad_token_groups` of padded's gradient.

        - padded: `(R, K)`, x's dtype, contiguous. `R` is the smallest multiple of alignment that is at least
          `M + G*alignment`, which is enough for any sizes of the groups. Rows without a token are zeros.
        - start, end: `(G,)` int32. A grouped matmul over padded takes `end` as its offs.

    Special values: the op moves rows as bytes. Zeros are the byte 0 (in float8_e8m0fnu that is 2^-127).

    Raises:
        TypeError: x or offs has a dtype that is not listed above, or alignment is not an integer.
        ValueError: a rank or a device is not as above; alignment is below 1; there would be 2^31 padded rows or more;
            or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.tensor([[1], [2], [3]], dtype=torch.int16)
        >>> padded, start, end = pad_token_groups(x, torch.tensor([1, 1, 3], dtype=torch.int32), 4)
        >>> padded.flatten().tolist()
        [1, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        >>> start.tolist(), end.tolist()
        ([0, 4, 4], [4, 4, 8])

    Source: torchao, `prototype/moe_training`, `pad_token_groups` (alignment 32, up to 32 groups).
    """
    check_args(x, offs, alignment, check_offs=check_offs)
    start, end = bounds(offs, alignment)
    rows = padded_rows(x.shape[0], offs.shape[0], alignment)
    return place_token_groups(x, offs, start, rows), start, end
