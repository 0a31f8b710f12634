"""The cases of to_blocked_m_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.bytes import SCALES, made
from mxspec.cases.common.groups import ARRANGED, BEYOND, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs, refused_scales
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.spec import Case, Shapes, random_bits, these


def cases() -> Iterator[Case]:
    def args(sizes, M, C, dtype=torch.uint8):
        return random_bits(M, C, dtype=dtype), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 1000:  # more groups would take minutes in an interpreter; a test on a GPU has them
            yield Case(name, partial(args, sizes, M, 8), flags=flags)
    for C in (1, 3, 6, 64, 208):
        yield Case(f"C = {C}", partial(args, [7, 0, 130, 24], 170, C))
    yield Case("e8m0fnu", partial(args, [130, 20], 150, 12, torch.float8_e8m0fnu))
    yield Case("e4m3fn, the scales of NVFP4", partial(args, [130, 20], 150, 12, torch.float8_e4m3fn))
    scale, offs = args([5, 0, 130], 140, 8)
    yield Case("no columns", these(scale[:, :0], offs), flags={"edge"})
    yield Case("transposed input", lambda: (random_bits(8, 140, dtype=torch.uint8).mT, offs))
    yield Case(
        "rows far apart",
        lambda: (far_apart(140, 8, torch.float16).view(torch.uint8), offs_of([100, 39])),
        flags={"edge"},
    )
    yield Case("checked", these(scale, offs), {"check_offs": True})
    large = random_bits(1, 2048, dtype=torch.uint8).expand(2**20 + 256, 2048)
    yield Case("2^31 bytes and more", these(large, offs_of([2**20 + 256])), flags={"large"})

    yield from refused_scales(scale, offs)
    bad = these(scale, offs.flip(0))
    yield Case("offs that decrease", bad, {"check_offs": True}, raises=ValueError, match="after 135")


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(R: int, C: int, G: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 256, (R, C), dtype=torch.uint8), random_offs(R, G)

    for M, K, G in shapes.padding:
        if G in (8, 256):
            R, C = M, -(-K // MX_BLOCK_SIZE)
            yield Case(f"{R}x{C}, G {G}", partial(args, R, C, G))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 128)


SPACE = Space(
    {"rows": SCALES["rows"], "cols": SCALES["cols"], **GROUPS, **SCALES},
    _make,
    {"check_offs": (False, True)},
    _possible,
    ARRANGED,
    beyond=BEYOND,
)
TOKENS = "scale.rows"
MOVES_BYTES = True
IMPOSSIBLE = PADDED_GROUPS
