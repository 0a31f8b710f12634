"""unpad_token_groups: the rows of padded groups without their padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.groups import rows_of_tokens, take_rows
from mxspec.spec import Gradient, spec


def check_args(padded: Tensor, offs: Tensor, start: Tensor, num_tokens: int, *, check_offs: bool = False) -> None:
    op = "unpad_token_groups"
    checks.token_rows(op, "padded", padded)
    checks.offsets(op, "offs", offs, ("padded", padded))
    checks.offsets(op, "start", start, ("padded", padded))
    checks.shape(op, "start", start, tuple(offs.shape), "as offs has")
    checks.size(op, "num_tokens", num_tokens)
    checks.fits_int32(op, "num_tokens", num_tokens)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "num_tokens", num_tokens)


def _bytes_moved(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """Each token is read once and written once. Padding is not read."""
    return 2 * outputs[0].nbytes + args[1].nbytes + args[2].nbytes


def _backward(saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor | None, ...]:
    offs, start, rows = saved
    return torch.ops.mxspec.place_token_groups(gradients[0], offs, start, rows, backend=backend), None, None, None


@spec(
    check_args=check_args,
    bytes_moved=_bytes_moved,
    gradient=Gradient(save=lambda args, outputs: (args[1], args[2], args[0].shape[0]), backward=_backward),
)
def unpad_token_groups(
    padded: Tensor, offs: Tensor, start: Tensor, num_tokens: int, *, check_offs: bool = False
) -> Tensor:
    """Remove the padding: the inverse of `pad_token_groups` on the rows that belong to a group.

    Group g holds the tokens t with `first <= t < offs[g]`, where `first` is `offs[g-1]`, or 0 for group 0. Row `t` of
    the result, a token of group g, is row `start[g] + t - first` of padded.

    Args:
        padded: `(R, K)`; real numbers of 1, 2 or 4 bytes; any strides.
        offs: `(G,)` int32 on padded's device: the exclusive end of each group, counted in tokens. The ends never
            decrease, and the last is at most num_tokens.
        start: `(G,)` int32 on padded's device: the row of padded at which each group begins, as `pad_token_groups`
            gives it. Groups may come in any order and with any gaps. A row that groups share is read by each of them.
        num_tokens: the number of rows of the result, 0 to 2^31 - 1.
        check_offs: True reads offs (not start) on the host, which waits for the device, and raises if offs is not in
            order. False waits for nothing; an offs out of order then gives rows without meaning, but no access outside
            padded and the result.

    Returns:
        `(num_tokens, K)`, padded's dtype, contiguous. Rows that belong to no group are zeros, and so are rows whose
        place lies outside padded. The gradient of padded is `place_token_groups` of the result's gradient. That is
        right if no two groups share a row: if several gradients belong to one row, it keeps the last and does not sum
        them.

    Special values: the op moves rows as bytes. Zeros are the byte 0 (in float8_e8m0fnu that is 2^-127).

    Raises:
        TypeError: padded, offs or start has a dtype that is not listed above, or num_tokens is not an integer.
        ValueError: a rank, a shape, a device or num_tokens is not as above; or, with check_offs, offs is not in order.

    Example:
        >>> padded = torch.tensor([[1], [0], [2], [3], [0], [0]], dtype=torch.int16)
        >>> offs, start = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        >>> unpad_token_groups(padded, offs, start, 4).flatten().tolist()
        [1, 2, 3, 0]

    Source: torchao, `prototype/moe_training`, `unpad_token_groups`.
    """
    check_args(padded, offs, start, num_tokens, check_offs=check_offs)
    return take_rows(padded, rows_of_tokens(offs, start, num_tokens))
