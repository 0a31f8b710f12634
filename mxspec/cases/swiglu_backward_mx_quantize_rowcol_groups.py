"""The cases of swiglu_backward_mx_quantize_rowcol_groups: written by hand, worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.groups import ARRANGED
from mxspec.cases.common.mx_rowcol_groups import (
    OPTIONS,
    WIDTHS,
    dimensions,
    grouped_cases,
    possible,
    refused_groups,
    with_options,
)
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import REPEATED, fits
from mxspec.cases.common.rowcol_groups import BEYOND
from mxspec.cases.common.space import Space
from mxspec.cases.common.swiglu import every_gate, gates, least_gates, with_subnormal
from mxspec.cases.common.token_groups import far_apart, offs_of
from mxspec.cases.swiglu_backward_fp8_quantize_rowcol_groups import (
    IMPOSSIBLE,
    OF_DH,
    TOLD_BEFORE,
    bench_cases,
    make,
    of_dh,
    of_width,
)
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.spec import Case, random_bits, random_normal, these

__all__ = ["IMPOSSIBLE", "SPACE", "TOKENS", "TOLD_BEFORE", "bench_cases", "cases"]


def cases() -> Iterator[Case]:
    def tokens(M: int, columns: int = 192) -> tuple[Tensor, ...]:
        return gates(M, columns), random_normal(M, columns // 2, seed=3)

    yield from grouped_cases(tokens)
    gradient = (1 + torch.arange(512)[:, None] * torch.arange(3, 131) % 128 / 128).bfloat16()
    yield Case("every gate", lambda: (every_gate(), gradient, offs_of([130, 382])), flags={"edge"})
    ones = torch.ones(8, 128, dtype=torch.bfloat16)
    yield Case("a sigmoid below 2^-126", lambda: (least_gates(), ones, offs_of([1] * 8)), flags={"edge"})
    bits = [random_bits(110, columns, dtype=torch.bfloat16, seed=columns) for columns in (128, 64)]
    yield from with_options("random bit patterns", these(*bits, offs_of([33, 0, 67])), flags={"edge"})
    yield Case("subnormal values", lambda: (*map(with_subnormal, tokens(40)), offs_of([33, 7])), flags={"edge"})
    yield Case("no columns", lambda: (*tokens(139, 0), offs_of([130, 9])), flags={"edge"})
    yield Case("transposed input", lambda: (*(t.mT for t in (gates(256, 210), gates(128, 210))), offs_of([130, 70])))
    yield Case("every second row", lambda: (*(t[::2] for t in tokens(300, 256)), offs_of([130, 9])))
    yield Case("every second column", lambda: (*(t[:, ::2] for t in tokens(150, 512)), offs_of([130, 9])))
    far = lambda: (far_apart(140, 256), far_apart(140, 128), offs_of([100, 39]))  # noqa: E731
    yield Case("rows far apart", far, flags={"edge"})
    for width in WIDTHS:
        yield Case(f"2I = {2 * width}", partial(of_width, width))
    yield Case("a tile of both gradients, of which one is NaN", _both_gradients, flags={"edge"})
    yield Case("zeros", lambda: (*(-torch.zeros_like(t) for t in tokens(150)), offs_of([140, 9])), flags={"edge"})
    large = [random_normal(1, columns, seed=columns).expand(2**20 + 256, columns) for columns in (2048, 1024)]
    yield Case("2^31 elements and more", these(*large, offs_of([2**20 + 256])), flags={"large"})

    yield from refused_groups(tokens)
    (gate_up, dh), offs = tokens(50), offs_of([5, 0, 40])

    def refused(name: str, error: type[Exception], match: str, gate_up: Tensor = gate_up, dh: Tensor = dh) -> Case:
        return Case(name, these(gate_up, dh, offs), raises=error, match=match)

    for wide in (32, 160):
        yield refused(f"2I = {wide}", ValueError, f"2I = {wide} is not a multiple of 64; pad", gate_up[:, :wide])
    narrow = dh[:, :64]
    yield refused("a gradient of another width", ValueError, "dh has shape (50, 64); needs (50, 96)", dh=narrow)
    yield refused("float32", TypeError, "gate_up has dtype torch.float32", gate_up.float())
    yield refused("a float32 gradient", TypeError, "dh has dtype torch.float32", dh=dh.float())
    yield refused("3-D", ValueError, "2-D", gate_up[None])
    yield refused("a gradient as wide as gate_up", ValueError, "dh has shape (50, 192); needs (50, 96)", dh=gate_up)
    yield refused("a gradient elsewhere", ValueError, "one device", dh=dh.to("meta"))


def _both_gradients() -> tuple[Tensor, Tensor, Tensor]:
    """I is 160: the columns 128 to 255 hold the last 32 columns of d_gate and the first 96 columns of d_up.

    A NaN up makes only d_gate NaN. An up of 2^100 makes d_gate far larger than d_up.
    """
    gate_up, dh, offs = of_width(160)
    gate_up[7, 160 + 140], gate_up[132, 160 + 130], gate_up[9, 3] = torch.nan, 2.0**100, torch.nan
    return gate_up, dh, offs


def _possible(choice: Choice) -> bool:
    return possible(choice, cols=2 * MX_BLOCK_SIZE) and fits(of_dh(choice))


SPACE = Space(
    {
        **dimensions((0, 64, 256, 1088, 4160), (torch.bfloat16,)),
        **OF_DH,
    },
    make,
    OPTIONS,
    _possible,
    [*(part for part in REPEATED if part.get("cols") not in (1, 1056)), *ARRANGED],
    beyond=[
        {"dh strides": "row-major", "dh values": "finite", "dh begins": "at 0", **choice}
        for choice in BEYOND
        if choice.get("cols", 64) % 64 == 0
    ],
)
TOKENS = "gate_up.rows"
