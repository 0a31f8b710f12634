"""The cases of swiglu_mx_quantize_rowcol_groups: calls written by hand, calls worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.groups import ARRANGED
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.mx_rowcol_groups import (
    OPTIONS,
    WIDTHS,
    dimensions,
    grouped_cases,
    possible,
    refused_groups,
    with_options,
)
from mxspec.cases.common.quantizers import REPEATED
from mxspec.cases.common.rowcol_groups import BEYOND
from mxspec.cases.common.space import Space
from mxspec.cases.common.swiglu import every_gate, gates, least_gates, with_subnormal
from mxspec.cases.common.token_groups import far_apart, offs_of
from mxspec.cases.swiglu_fp8_quantize_rowcol_groups import bench_cases, make, of_width
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.spec import Case, random_bits, random_normal, these

__all__ = ["IMPOSSIBLE", "SPACE", "TOKENS", "bench_cases", "cases"]


def cases() -> Iterator[Case]:
    def tokens(M: int) -> tuple[Tensor, ...]:
        return (gates(M, 192),)

    yield from grouped_cases(tokens)
    yield Case("every gate", lambda: (every_gate(), offs_of([130, 382])), flags={"edge"})
    yield Case("a sigmoid below 2^-126", lambda: (least_gates(), offs_of([1] * 8)), flags={"edge"})
    bits = these(random_bits(110, 128, dtype=torch.bfloat16), offs_of([33, 0, 67]))
    yield from with_options("random bit patterns", bits, flags={"edge"})
    yield Case("subnormal values", lambda: (with_subnormal(gates(40, 256)), offs_of([33, 7])), flags={"edge"})
    yield Case("no columns", lambda: (gates(139, 0), offs_of([130, 9])), flags={"edge"})
    yield Case("transposed input", lambda: (gates(256, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (gates(300, 256)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (gates(150, 512)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 256), offs_of([100, 39])), flags={"edge"})
    for width in WIDTHS:
        yield Case(f"2I = {2 * width}", partial(of_width, width))
    yield Case("zeros", lambda: (-torch.zeros(150, 256).bfloat16(), offs_of([140, 9])), flags={"edge"})
    large = these(random_normal(1, 4096).expand(2**20 + 256, 4096), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    yield from refused_groups(tokens)
    x, offs = gates(50, 192), offs_of([5, 0, 40])
    for wide in (32, 160):
        match = f"2I = {wide} is not a multiple of 64; pad"
        yield Case(f"2I = {wide}", these(x[:, :wide], offs), raises=ValueError, match=match)
    yield Case("float32", these(x.float(), offs), raises=TypeError, match="torch.float32")
    yield Case("3-D", these(x[None], offs), raises=ValueError, match="2-D")


SPACE = Space(
    dimensions((0, 64, 256, 1088, 4160), (torch.bfloat16,)),
    make,
    OPTIONS,
    partial(possible, cols=2 * MX_BLOCK_SIZE),
    [*(part for part in REPEATED if part.get("cols") not in (1, 1056)), *ARRANGED],
    beyond=[choice for choice in BEYOND if choice.get("cols", 64) % 64 == 0],
)
TOKENS = "gate_up.rows"
IMPOSSIBLE = PADDED_GROUPS
