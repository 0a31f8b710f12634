"""pad_token_groups: the rows of every group, followed by as many zeros as make them a multiple."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.reference import _checks
from mxspec.reference._groups import bounds, padded_rows
from mxspec.reference._groups_cases import DTYPES, far_apart, grouped, offs_of, random_offs
from mxspec.reference.place_token_groups import place_token_groups
from mxspec.spec import Case, Gradient, Shapes, random_bits, random_normal, spec, these


def check_args(x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False) -> None:
    op = "pad_token_groups"
    _checks.token_rows(op, "x", x)
    _checks.offsets(op, "offs", offs, ("x", x))
    _checks.positive(op, "alignment", alignment)
    rows = padded_rows(x.shape[0], offs.shape[0], alignment)
    _checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", x.shape[0])


def cases() -> Iterator[Case]:
    def args(sizes, M, K, alignment, dtype=torch.bfloat16):
        x = random_bits(M, K, dtype=torch.uint8) > 127 if dtype == torch.bool else random_bits(M, K, dtype=dtype)
        return x, offs_of(sizes), alignment

    for name, sizes, M, K, flags in grouped():
        alignment = 32 if len(sizes) < 300 else 4  # or padding is most of it
        if len(sizes) < 1000:  # which would be minutes interpreted; a test on a GPU has them
            yield Case(f"{name}, {alignment}", partial(args, sizes, M, K, alignment), flags=flags)
        if sum(sizes) and len(sizes) < 300:
            yield Case(f"{name}, 128", partial(args, sizes, M, K, 128), flags=flags)
    for alignment in (1, 2, 3, 16, 24):
        yield Case(f"alignment {alignment}", partial(args, [7, 0, 33, 24], 70, 1024, alignment))
    yield Case("alignment 200", partial(args, [7, 0, 33], 40, 512, 200))
    for dtype in DTYPES:
        yield Case(f"{str(dtype)[6:]}", partial(args, [70, 0, 9], 80, 512, 16, dtype=dtype))
    for K in (1, 40, 1100):
        yield Case(f"K = {K}", partial(args, [5, 40], 45, K, 32), flags={"edge"})
    x, offs, alignment = args([5, 0, 40], 50, 256, 32)
    yield Case("no columns", these(x[:, :0], offs, 32), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(256, 50).mT, offs, 32))
    yield Case("every second row", lambda: (random_normal(100, 256)[::2], offs, 32))
    yield Case("every second offset", these(x, offs.repeat_interleave(2)[::2], 32), flags={"edge"})
    yield Case("checked", these(x, offs, 32), {"check_offs": True})
    yield Case("rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39]), 32), flags={"edge"})
    large = random_bits(1, 2048, dtype=torch.uint8).expand(2**20 + 256, 2048)
    yield Case("2^31 elements and more", these(large, offs_of([2**20 + 256]), 128), flags={"large"})

    def refused(name, error, match, x=x, offs=offs, alignment=alignment, **kwargs):
        return Case(name, these(x, offs, alignment), kwargs, raises=error, match=match)

    i32 = partial(torch.tensor, dtype=torch.int32)
    yield refused("float64", TypeError, "x has dtype torch.float64; needs real numbers of 1, 2 or 4 bytes", x.double())
    yield refused("complex", TypeError, "torch.complex64", x=torch.zeros(50, 4, dtype=torch.complex64))
    yield refused("a list", TypeError, "x is a list", x=[1.0])
    yield refused("sparse", ValueError, "torch.sparse_coo", x=x.float().to_sparse())
    yield refused("3-D", ValueError, "2-D", x=x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "and offs on meta; needs one device", offs=offs.to("meta"))
    yield refused("alignment 0", ValueError, "alignment = 0; needs at least 1", alignment=0)
    yield refused("alignment -32", ValueError, "alignment = -32", alignment=-32)
    yield refused("alignment 32.0", TypeError, "alignment = 32.0; needs an integer", alignment=32.0)
    yield refused("too many rows", ValueError, "the padded rows of 3 groups", alignment=2**30)
    yield refused("offs that decrease", ValueError, "offs[1] = 3 after 5", offs=i32([5, 3, 9]), check_offs=True)
    yield refused("a negative end", ValueError, "offs[0] = -1 after 0", offs=i32([-1, 3]), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=i32([5, 51]), check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int, alignment: int) -> tuple[Tensor, Tensor, int]:
        return torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, G), alignment

    for M, K, G in shapes.padding:
        for alignment in (32, 128) if G == 8 and K >= 2048 else (32,):
            yield Case(f"{M}x{K}, G {G}, {alignment}", partial(args, M, K, G, alignment))


def _backward(saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor | None, ...]:
    offs, start, M = saved
    return torch.ops.mxspec.unpad_token_groups(gradients[0], offs, start, M, backend=backend), None, None


@spec(
    cases=cases,
    check_args=check_args,
    bench_cases=bench_cases,
    gradient=Gradient(save=lambda args, outputs: (args[1], outputs[1], args[0].shape[0]), backward=_backward),
)
def pad_token_groups(
    x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad every group of rows with zeros to a multiple of `alignment`, without asking the device how many there are.

    Group g has the rows `offs[g-1] .. offs[g]` of x, `m` of them. In the result it begins at
    `start[g]`, the sum of `alignment * ceil(m / alignment)` of the groups before it, and ends with its padding at
    `end[g]`; an empty group stays empty.

    Args:
        x: `(M, K)`, the tokens of each group together; real numbers of 1, 2 or 4 bytes; any strides.
        offs: `(G,)` int32 on x's device, the exclusive end of each group. Never decreasing, the last at most M; rows
            from there on belong to no group and are dropped.
        alignment: in rows, an int of at least 1; any number, not only a power of two.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order. Without it
            nothing waits; an offs out of order gives rows that mean nothing, and no access outside x and the result.

    Returns:
        `(padded, start, end)`. padded: `(R, K)`, x's dtype, contiguous, with `R` the multiple of alignment at or above
        `M + G*alignment`, which is enough for any sizes of the groups; rows that hold no token are zeros. start, end:
        `(G,)` int32. `end` is what a grouped matmul over padded takes as its offs. The gradient of x is
        `unpad_token_groups` of padded's.

    Special values: rows are moved as bytes; zeros are the byte 0 (in float8_e8m0fnu that is 2^-127).

    Raises:
        TypeError: the dtype of x or offs; alignment is no integer.
        ValueError: a rank, a device, alignment below 1, 2^31 padded rows or more; with check_offs, offs.

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
