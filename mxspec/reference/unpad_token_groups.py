"""unpad_token_groups: the rows of padded groups without their padding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.reference import _checks
from mxspec.reference._groups import bounds, padded_rows, rows_of_tokens, take_rows
from mxspec.reference._groups_cases import DTYPES, far_apart, grouped, offs_of, random_offs, start_of
from mxspec.spec import Case, Gradient, Shapes, random_bits, random_normal, spec, these


def check_args(padded: Tensor, offs: Tensor, start: Tensor, num_tokens: int, *, check_offs: bool = False) -> None:
    op = "unpad_token_groups"
    _checks.token_rows(op, "padded", padded)
    _checks.offsets(op, "offs", offs, ("padded", padded))
    _checks.offsets(op, "start", start, ("padded", padded))
    _checks.shape(op, "start", start, tuple(offs.shape), "as offs has")
    _checks.size(op, "num_tokens", num_tokens)
    _checks.fits_int32(op, "num_tokens", num_tokens)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "num_tokens", num_tokens)


def cases() -> Iterator[Case]:
    def args(sizes, M, K, alignment=32, dtype=torch.bfloat16):
        rows = padded_rows(M, len(sizes), alignment)
        bits = random_bits(rows, K, dtype=torch.uint8 if dtype == torch.bool else dtype)
        return bits > 127 if dtype == torch.bool else bits, offs_of(sizes), start_of(sizes, alignment), M

    for name, sizes, M, K, flags in grouped():
        alignment = 32 if len(sizes) < 300 else 8  # or padding is most of it
        yield Case(name, partial(args, sizes, M, K, alignment), flags=flags)
    for alignment in (1, 3, 128):
        yield Case(f"alignment {alignment}", partial(args, [7, 0, 33, 24], 70, 256, alignment))
    for dtype in DTYPES:
        yield Case(f"{str(dtype)[6:]}", partial(args, [70, 0, 9], 80, 512, dtype=dtype))
    for K in (1, 40, 1100):
        yield Case(f"K = {K}", partial(args, [5, 40], 45, K), flags={"edge"})
    padded, offs, start, M = args([5, 0, 40], 50, 256)
    yield Case("padded is too short", these(padded[:60], offs, start, M), flags={"edge"})
    yield Case("a gap before the first group", these(padded, offs, start + 3, M), flags={"edge"})
    turned = torch.tensor([45, 45, 0], dtype=torch.int32)  # the last group first, the empty one where the first begins
    yield Case("groups in another order", these(padded, offs, turned, M))
    yield Case("groups that share rows", these(padded, offs, start // 8, M), flags={"edge"})
    yield Case("no columns", these(padded[:, :0], offs, start, M), flags={"edge"})
    yield Case("no tokens asked for", these(padded, offs * 0, start * 0, 0), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(256, padded.shape[0]).mT, offs, start, M))
    yield Case("every second start", these(padded, offs, start.repeat_interleave(2)[::2], M), flags={"edge"})
    far = lambda: (far_apart(200, 64), offs_of([70, 60]), start_of([70, 60], 128), 130)  # noqa: E731
    yield Case("rows far apart", far, flags={"edge"})
    yield Case("checked", these(padded, offs, start, M), {"check_offs": True})

    def refused(name, error, match, padded=padded, offs=offs, start=start, M=M, **kwargs):
        return Case(name, these(padded, offs, start, M), kwargs, raises=error, match=match)

    yield refused("float64", TypeError, "padded has dtype torch.float64; needs real", padded.double())
    yield refused("1-D", ValueError, "2-D", padded[0])
    yield refused("int64 offs", TypeError, "torch.int64", offs=offs.long())
    yield refused("int64 start", TypeError, "torch.int64", start=start.long())
    yield refused("one start too few", ValueError, "start has shape (2,); needs (3,) as offs has", start=start[:2])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("-1 tokens", ValueError, "num_tokens = -1", M=-1)
    yield refused("too many tokens", ValueError, "fewer than 2^31", M=2**31)
    yield refused("offs past the tokens", ValueError, "offs[-1] = 45 is past num_tokens = 44", M=44, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int, alignment: int) -> tuple[Tensor, Tensor, Tensor, int]:
        offs = random_offs(M, G)
        start = bounds(offs, alignment)[0]
        return torch.randn(padded_rows(M, G, alignment), K, dtype=torch.bfloat16), offs, start, M

    for M, K, G in shapes.padding:
        if G in (8, 256):
            yield Case(f"{M}x{K}, G {G}, 32", partial(args, M, K, G, 32))


def _bytes_moved(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """Each token read once and written once; padding is not read."""
    return 2 * outputs[0].nbytes + args[1].nbytes + args[2].nbytes


def _backward(saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor | None, ...]:
    offs, start, rows = saved
    return torch.ops.mxspec.place_token_groups(gradients[0], offs, start, rows, backend=backend), None, None, None


@spec(
    cases=cases,
    check_args=check_args,
    bytes_moved=_bytes_moved,
    bench_cases=bench_cases,
    gradient=Gradient(save=lambda args, outputs: (args[1], args[2], args[0].shape[0]), backward=_backward),
)
def unpad_token_groups(
    padded: Tensor, offs: Tensor, start: Tensor, num_tokens: int, *, check_offs: bool = False
) -> Tensor:
    """Take the padding out again: the inverse of `pad_token_groups` on the rows that belong to a group.

    Row `t` of the result, in group g with the rows `first = offs[g-1] .. offs[g]`, is row `start[g] + t - first` of
    padded.

    Args:
        padded: `(R, K)`; real numbers of 1, 2 or 4 bytes; any strides.
        offs: `(G,)` int32 on padded's device, the exclusive end of each group among the tokens. Never decreasing, the
            last at most num_tokens.
        start: `(G,)` int32 on padded's device, the row of padded at which each group begins, as `pad_token_groups`
            gives it; groups in any order and with any gaps. Where groups share a row, each of them reads it.
        num_tokens: rows of the result, 0 to 2^31 - 1.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order; start is not
            read there. Without it nothing waits; an offs out of order gives rows that mean nothing, and no access
            outside padded and the result.

    Returns:
        `(num_tokens, K)`, padded's dtype, contiguous. Rows that belong to no group are zeros, and so are those whose
        place lies outside padded. The gradient of padded is `place_token_groups` of the result's. That is right where
        no two groups share a row: of several gradients for one row it keeps the last, and adds nothing up.

    Special values: rows are moved as bytes; zeros are the byte 0 (in float8_e8m0fnu that is 2^-127).

    Raises:
        TypeError: the dtype of padded, offs or start; num_tokens is no integer.
        ValueError: a rank, a shape, a device, num_tokens; with check_offs, offs.

    Example:
        >>> padded = torch.tensor([[1], [0], [2], [3], [0], [0]], dtype=torch.int16)
        >>> offs, start = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        >>> unpad_token_groups(padded, offs, start, 4).flatten().tolist()
        [1, 2, 3, 0]

    Source: torchao, `prototype/moe_training`, `unpad_token_groups`.
    """
    check_args(padded, offs, start, num_tokens, check_offs=check_offs)
    return take_rows(padded, rows_of_tokens(offs, start, num_tokens))
