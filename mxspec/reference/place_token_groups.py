"""place_token_groups: put groups of rows at the rows that `start` names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.common.groups import rows_of_tokens, take_rows
from mxspec.spec import Gradient, spec


def check_args(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, *, check_offs: bool = False) -> None:
    op = "place_token_groups"
    checks.token_rows(op, "x", x)
    checks.offsets(op, "offs", offs, ("x", x))
    checks.offsets(op, "start", start, ("x", x))
    checks.shape(op, "start", start, tuple(offs.shape), "as offs has")
    checks.size(op, "num_rows", num_rows)
    checks.fits_int32(op, "num_rows", num_rows)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", x.shape[0])


def _backward(saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor | None, ...]:
    offs, start, M = saved
    return torch.ops.mxspec.unpad_token_groups(gradients[0], offs, start, M, backend=backend), None, None, None


@spec(
    check_args=check_args,
    gradient=Gradient(save=lambda args, outputs: (args[1], args[2], args[0].shape[0]), backward=_backward),
)
def place_token_groups(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, *, check_offs: bool = False) -> Tensor:
    """Put each group of rows at its row `start[g]` of a matrix of zeros: the inverse of `unpad_token_groups`.

    With `first = offs[g-1]` (0 for the first group), row `start[g] + i` of the result is row `first + i` of x, for
    every `i < offs[g] - first`. `pad_token_groups` computes `start` and then does this. The op alone is the gradient of
    `unpad_token_groups`.

    Args:
        x: `(M, K)`, the rows of each group together; real numbers of 1, 2 or 4 bytes; any strides.
        offs: `(G,)` int32 on x's device: the exclusive end of each group in x. The ends never decrease, and the last is
            at most M. Rows from the last end on belong to no group.
        start: `(G,)` int32 on x's device: the row of the result at which each group begins. Groups may come in any
            order and with any gaps, and should share no row. If several tokens have the same row, the result holds the
            token that comes last in x.
        num_rows: the number of rows of the result, 0 to 2^31 - 1.
        check_offs: True reads offs (not start) on the host, which waits for the device, and raises if offs is not in
            order. False waits for nothing; an offs out of order then gives rows without meaning, but no access outside
            x and the result.

    Returns:
        `(num_rows, K)`, x's dtype, contiguous. Rows without a token are zeros. Tokens whose row lies before row 0 or
        past row num_rows - 1 are dropped. The gradient of x is `unpad_token_groups` of the result's gradient; a token
        that lost its row to another token also gets the gradient of that row.

    Special values: the op moves rows as bytes. Zeros are the byte 0 (in float8_e8m0fnu that is 2^-127).

    Raises:
        TypeError: x, offs or start has a dtype that is not listed above, or num_rows is not an integer.
        ValueError: a rank, a shape, a device or num_rows is not as above; or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.tensor([[1], [2], [3]], dtype=torch.int16)
        >>> offs, start = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        >>> place_token_groups(x, offs, start, 5).flatten().tolist()
        [1, 0, 2, 3, 0]

    Source: mxspec, as the inverse that torchao's `unpad_token_groups` needs for its gradient.
    """
    check_args(x, offs, start, num_rows, check_offs=check_offs)
    row = rows_of_tokens(offs, start, x.shape[0])
    there = (row >= 0) & (row < num_rows)
    token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    source = token.new_full((num_rows + 1,), -1)  # the token of each row; tokens without a row go to the last entry
    source = source.scatter_reduce(0, torch.where(there, row, num_rows).to(torch.int64), token, "amax")
    return take_rows(x, source[:-1])
