"""to_blocked_m_groups: scales of token groups in 128x4 tiles, each group by itself; groups along the rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._groups import first_tokens, padded_rows
from mxspec.reference._groups_cases import far_apart, grouped, offs_of, random_offs
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.to_blocked import DTYPES, to_blocked
from mxspec.spec import Case, Shapes, random_bits, spec, these


def check_args(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> None:
    op = "to_blocked_m_groups"
    _checks.tensor_dtype(op, "scale", scale, DTYPES)
    _checks.rank(op, "scale", scale, (2,))
    _checks.offsets(op, "offs", offs, ("scale", scale))
    rows = padded_rows(scale.shape[0], offs.shape[0], 128)
    _checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", scale.shape[0])


def cases() -> Iterator[Case]:
    def args(sizes, M, C, dtype=torch.uint8):
        return random_bits(M, C, dtype=dtype), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 1000:  # which would be minutes interpreted; a test on a GPU has them
            yield Case(name, partial(args, sizes, M, 8), flags=flags)
    for C in (1, 3, 6, 64, 208):
        yield Case(f"C = {C}", partial(args, [7, 0, 130, 24], 170, C))
    yield Case("e8m0fnu", partial(args, [130, 20], 150, 12, torch.float8_e8m0fnu))
    scale, offs = args([5, 0, 130], 140, 8)
    yield Case("no columns", these(scale[:, :0], offs), flags={"edge"})
    yield Case("transposed input", lambda: (random_bits(8, 140, dtype=torch.uint8).mT, offs))
    far = lambda: (far_apart(140, 8, torch.float16).view(torch.uint8), offs_of([100, 39]))  # noqa: E731
    yield Case("rows far apart", far, flags={"edge"})
    yield Case("checked", these(scale, offs), {"check_offs": True})
    large = random_bits(1, 2048, dtype=torch.uint8).expand(2**20 + 256, 2048)
    yield Case("2^31 bytes and more", these(large, offs_of([2**20 + 256])), flags={"large"})

    def refused(name, error, match, scale=scale, offs=offs, **kwargs):
        return Case(name, these(scale, offs), kwargs, raises=error, match=match)

    yield refused("int32 scale", TypeError, "scale has dtype torch.int32", scale.int())
    yield refused("3-D", ValueError, "2-D", scale[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("offs that decrease", ValueError, "after 135", offs=offs.flip(0), check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(R: int, C: int, G: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 256, (R, C), dtype=torch.uint8), random_offs(R, G)

    for M, K, G in shapes.padding:
        if G in (8, 256):
            R, C = M, -(-K // MX_BLOCK_SIZE)
            yield Case(f"{R}x{C}, G {G}", partial(args, R, C, G))


@spec(cases=cases, check_args=check_args, bench_cases=bench_cases)
def to_blocked_m_groups(scale: Tensor, offs: Tensor, *, check_offs: bool = False) -> tuple[Tensor, Tensor]:
    """Rearrange the scales of each group of rows into 128x4 tiles of its own.

    Group g has the rows `offs[g-1] .. offs[g]`, `m` of them, and takes `128*ceil(m/128)` rows of the result: those
    bytes are `to_blocked` of the group alone. They begin at row `start[g]`, the sum over the groups before it.

    Args:
        scale: `(M, C)`; float8_e8m0fnu or uint8; any strides.
        offs: `(G,)` int32 on scale's device, the exclusive end of each group. Never decreasing, the last at most M;
            rows from there on are dropped.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order. Without it
            nothing waits; an offs out of order gives bytes that mean nothing, and no access outside scale and the
            result.

    Returns:
        `(blocked, start)`. blocked: `(M + 128*G, Cp)` with `Cp = 4*ceil(C/4)`, contiguous, of scale's dtype: enough
        for any sizes of the groups. Bytes that belong to no scale are 0. start: `(G + 1,)` int64, the last the rows
        that all groups take.

    Special values: bytes are moved, never read as numbers; an empty group takes no bytes.

    Raises:
        TypeError: the dtype of scale or offs.
        ValueError: a rank, a device, 2^31 padded rows or more; with check_offs, offs.

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
    # Groups begin at multiples of 128, so that the tiles of the whole are those of the groups, one after the other.
    return to_blocked(padded)[: size[0] * size[1]].view(size), first_tokens(end).to(torch.int64)
