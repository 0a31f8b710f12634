"""place_token_groups: groups of rows put where they are told to begin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from mxspec.reference import _checks
from mxspec.reference._groups import bounds, padded_rows, rows_of_tokens, take_rows
from mxspec.reference._groups_cases import DTYPES, far_apart, grouped, offs_of, random_offs, start_of
from mxspec.spec import Case, Gradient, Shapes, random_bits, random_normal, spec, these


def check_args(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, *, check_offs: bool = False) -> None:
    op = "place_token_groups"
    _checks.token_rows(op, "x", x)
    _checks.offsets(op, "offs", offs, ("x", x))
    _checks.offsets(op, "start", start, ("x", x))
    _checks.shape(op, "start", start, tuple(offs.shape), "as offs has")
    _checks.size(op, "num_rows", num_rows)
    _checks.fits_int32(op, "num_rows", num_rows)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", x.shape[0])


def cases() -> Iterator[Case]:
    def args(sizes, M, K, alignment=32, dtype=torch.bfloat16):
        x = random_bits(M, K, dtype=torch.uint8) > 127 if dtype == torch.bool else random_bits(M, K, dtype=dtype)
        return x, offs_of(sizes), start_of(sizes, alignment), padded_rows(M, len(sizes), alignment)

    def shuffled(G):
        sizes = Random(G).choices((0, 1, 2, 5), k=G)
        order = Random(G).sample(range(G), G)  # of the groups in the result
        begins = dict(zip(order, start_of([sizes[g] for g in order], 4).tolist(), strict=True))
        start = torch.tensor([begins[g] for g in range(G)], dtype=torch.int32)
        return random_normal(sum(sizes), 16), offs_of(sizes), start, padded_rows(sum(sizes), G, 4)

    for name, sizes, M, K, flags in grouped():
        alignment = 32 if len(sizes) < 300 else 8  # or padding is most of it
        if len(sizes) < 1000:  # which unpad has, and which would be a minute here
            yield Case(name, partial(args, sizes, M, K, alignment), flags=flags)
    for dtype in DTYPES:
        yield Case(f"{str(dtype)[6:]}", partial(args, [70, 0, 9], 80, 512, dtype=dtype))
    for K in (1, 40, 1100):
        yield Case(f"K = {K}", partial(args, [5, 40], 45, K), flags={"edge"})
    x, offs, start, rows = args([5, 0, 40], 50, 256)
    yield Case("a gap before the first group", these(x, offs, start + 3, rows + 8), flags={"edge"})
    turned = torch.tensor([45, 45, 0], dtype=torch.int32)  # the last group first, the empty one where the first begins
    yield Case("groups in another order", these(x, offs, turned, rows))
    yield Case("300 groups in another order", partial(shuffled, 300), flags={"edge"})
    yield Case("groups that share rows", these(x, offs, start // 8, rows), flags={"edge"})
    yield Case("groups before the first row", these(x, offs, start - 3, rows), flags={"edge"})
    yield Case("no room for the last rows", these(x, offs, start, 60), flags={"edge"})
    yield Case("no rows", these(x, offs, start, 0), flags={"edge"})
    yield Case("no columns", these(x[:, :0], offs, start, rows), flags={"edge"})
    yield Case("every second column", these(random_normal(50, 512)[:, ::2], offs, start, rows))
    yield Case("every second offset", these(x, offs.repeat_interleave(2)[::2], start, rows), flags={"edge"})
    yield Case(
        "rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39]), start_of([100, 39], 32), 150), flags={"edge"}
    )
    yield Case("checked", these(x, offs, start, rows), {"check_offs": True})

    def refused(name, error, match, x=x, offs=offs, start=start, rows=rows, **kwargs):
        return Case(name, these(x, offs, start, rows), kwargs, raises=error, match=match)

    yield refused("float64", TypeError, "torch.float64; needs real numbers of 1, 2 or 4 bytes", x.double())
    yield refused("1-D", ValueError, "2-D", x[0])
    yield refused("int64 offs", TypeError, "torch.int64", offs=offs.long())
    yield refused("int64 start", TypeError, "torch.int64", start=start.long())
    yield refused("2-D offs", ValueError, "1-D", offs=offs[None])
    yield refused("one start too few", ValueError, "start has shape (2,); needs (3,) as offs has", start=start[:2])
    yield refused("start elsewhere", ValueError, "one device", start=start.to("meta"))
    yield refused("-1 rows", ValueError, "num_rows = -1", rows=-1)
    yield refused("too many rows", ValueError, "fewer than 2^31", rows=2**31)
    yield refused(
        "offs past M", ValueError, "offs[-1] = 99 is past M = 50", offs=torch.full_like(offs, 99), check_offs=True
    )


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int) -> tuple[Tensor, Tensor, Tensor, int]:
        offs = random_offs(M, G)
        return torch.randn(M, K, dtype=torch.bfloat16), offs, bounds(offs, 32)[0], padded_rows(M, G, 32)

    for M, K, G in shapes.padding:
        if G in (8, 256):
            yield Case(f"{M}x{K}, G {G}", partial(args, M, K, G))


def _backward(saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor | None, ...]:
    offs, start, M = saved
    return torch.ops.mxspec.unpad_token_groups(gradients[0], offs, start, M, backend=backend), None, None, None


@spec(
    cases=cases,
    check_args=check_args,
    bench_cases=bench_cases,
    gradient=Gradient(save=lambda args, outputs: (args[1], args[2], args[0].shape[0]), backward=_backward),
)
def place_token_groups(x: Tensor, offs: Tensor, start: Tensor, num_rows: int, *, check_offs: bool = False) -> Tensor:
    """Put each group of rows where it is told to begin, in a matrix of zeros: the inverse of `unpad_token_groups`.

    With `first = offs[g-1]`, 0 for the first group, row `start[g] + i` of the result is row `first + i` of x for every
    `i < offs[g] - first`. `pad_token_groups` is this with the `start` that it computes; by itself it is the gradient
    of `unpad_token_groups`.

    Args:
        x: `(M, K)`, the rows of each group together; real numbers of 1, 2 or 4 bytes; any strides.
        offs: `(G,)` int32 on x's device, the exclusive end of each group in x. Never decreasing, the last at most M;
            rows from there on belong to no group.
        start: `(G,)` int32 on x's device, the row of the result at which each group begins. Groups in any order
            and with any gaps; no two share a row. If some do, the later token stands there.
        num_rows: of the result, 0 to 2^31 - 1.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order; start is not
            read there. Without it nothing waits; an offs out of order gives rows that mean nothing, and no access
            outside x and the result.

    Returns:
        `(num_rows, K)`, x's dtype, contiguous. Rows where no group lies are zeros; rows of groups that reach before
        row 0 or past num_rows are dropped. The gradient of x is `unpad_token_groups` of the result's; a token whose
        row another one has taken gets the gradient of that row all the same.

    Special values: rows are moved as bytes; zeros are the byte 0 (in float8_e8m0fnu that is 2^-127).

    Raises:
        TypeError: the dtype of x, offs or start; num_rows is no integer.
        ValueError: a rank, a shape, a device, num_rows; with check_offs, offs.

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
    source = token.new_full((num_rows + 1,), -1)  # the token of each row; tokens without one meet in the last place
    source = source.scatter_reduce(0, torch.where(there, row, num_rows).to(torch.int64), token, "amax")
    return take_rows(x, source[:-1])
