"""The cases of to_blocked_k_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.bytes import SCALES, made
from mxspec.cases.common.groups import ARRANGED, GROUPS, groups_fit, in_groups_of_three, offsets
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import LARGE_BOTH_WAYS, fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs, refused_scales
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.spec import Case, Shapes, random_bits, these


def cases() -> Iterator[Case]:
    def args(R, sizes, C, dtype=torch.uint8):
        return random_bits(R, C, dtype=dtype), offs_of(sizes)

    for name, sizes, C, _, flags in grouped():
        yield Case(name, partial(args, 40, sizes, C), flags=flags)
    for R in (1, 128, 130, 300):
        yield Case(f"R = {R}", partial(args, R, [7, 0, 70, 3], 83))
    yield Case("e8m0fnu", partial(args, 130, [4, 9], 13, torch.float8_e8m0fnu))
    yield Case("e4m3fn, the scales of NVFP4", partial(args, 130, [4, 9], 13, torch.float8_e4m3fn))
    scale, offs = args(130, [5, 0, 12], 20)
    yield Case("no rows", these(scale[:0], offs), flags={"edge"})
    yield Case("one tile and no group", these(scale[:, :1], offs[:0]))
    yield Case("transposed input", lambda: (random_bits(20, 130, dtype=torch.uint8).mT, offs))
    yield Case(
        "rows far apart", lambda: (far_apart(140, 8, torch.float16).view(torch.uint8), offs_of([9, 6])), flags={"edge"}
    )
    yield Case("checked", these(scale, offs), {"check_offs": True})
    large = random_bits(1, 64, dtype=torch.uint8).expand(2**25 + 256, 64)
    yield Case("2^31 bytes and more", these(large, offs_of([64])), flags={"large"})

    yield from refused_scales(scale, offs)
    bad = these(scale, offs + 20)
    yield Case("offs past C", bad, {"check_offs": True}, raises=ValueError, match="offs[-1] = 37 is past C = 20")


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(R: int, C: int, G: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 256, (R, C), dtype=torch.uint8), random_offs(C, G)

    for M, K, G in shapes.padding:
        if G in (8, 256):
            R, C = K, M // MX_BLOCK_SIZE  # the scales of `(M, K)` tokens quantized along the tokens
            yield Case(f"{R}x{C}, G {G}", partial(args, R, C, G))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    return made(choice), offsets(choice, choice["cols"])


def _possible(choice: Choice) -> bool:
    return fits(choice) and groups_fit(choice, choice.get("cols"))


ALSO = [{"cols" if name == "rows" else name: value for name, value in part.items()} for part in ARRANGED]
ALSO.append({"cols": 1, "groups": "forty", "offs": "dense"})
SPACE = Space(
    {"rows": SCALES["rows"], "cols": SCALES["cols"], **GROUPS, **SCALES},
    _make,
    {"check_offs": (False, True)},
    _possible,
    ALSO,
    beyond=in_groups_of_three(*LARGE_BOTH_WAYS),
)
MOVES_BYTES = True
TOKENS = "scale.cols"
