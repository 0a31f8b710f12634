"""The cases of swiglu_backward_fp8_quantize_rowcol_groups: written by hand, worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.cases.common.groups import offsets
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import REPEATED, fits, made, shape_of
from mxspec.cases.common.rowcol_groups import ALSO, BEYOND, dimensions, grouped_cases, possible, refused_offs
from mxspec.cases.common.space import Space
from mxspec.cases.common.swiglu import every_gate, gates, least_gates, with_subnormal
from mxspec.cases.common.tensors import BEGINS, STRIDES, VALUES
from mxspec.cases.common.token_groups import far_apart, offs_of, random_offs
from mxspec.cases.fp8_quantize_1x128 import TAILS, tokens_of
from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these


def cases() -> Iterator[Case]:
    def tokens(M: int, columns: int = 256) -> tuple[Tensor, ...]:
        return gates(M, columns), random_normal(M, columns // 2, seed=3)

    yield from grouped_cases(tokens)
    gradient = (1 + torch.arange(512)[:, None] * torch.arange(3, 131) % 128 / 128).bfloat16()
    yield Case("every gate", lambda: (every_gate(), gradient, offs_of([130, 382])), flags={"edge"})
    ones = torch.ones(8, 128, dtype=torch.bfloat16)
    yield Case("a sigmoid below 2^-126", lambda: (least_gates(), ones, offs_of([1] * 8)), flags={"edge"})
    for scale_format in SCALE_FORMATS:
        bits = [random_bits(200, columns, dtype=torch.bfloat16, seed=columns) for columns in (512, 256)]
        name = f"random bit patterns, {scale_format}"
        yield Case(name, these(*bits, offs_of([140, 50])), {"scale_format": scale_format}, flags={"edge"})
    yield Case("subnormal values", lambda: (*map(with_subnormal, tokens(40)), offs_of([33, 7])), flags={"edge"})
    yield Case("no columns", lambda: (*tokens(139, 0), offs_of([130, 9])), flags={"edge"})
    yield Case("transposed input", lambda: (*(t.mT for t in (gates(256, 210), gates(128, 210))), offs_of([130, 70])))
    yield Case("every second row", lambda: (*(t[::2] for t in tokens(300)), offs_of([130, 9])))
    yield Case("every second column", lambda: (*(t[:, ::2] for t in tokens(150, 512)), offs_of([130, 9])))
    far = lambda: (far_apart(140, 256), far_apart(140, 128), offs_of([100, 39]))  # noqa: E731
    yield Case("rows far apart", far, flags={"edge"})
    for i, width in enumerate((*TAILS, 64)):
        kw = {"scale_format": SCALE_FORMATS[i % 2]}
        yield Case(f"2I = {2 * width}", partial(of_width, width), kw)
    yield Case("a block of both gradients, of which one is NaN", _both_gradients, flags={"edge"})
    yield Case("zeros", lambda: (*(-torch.zeros_like(t) for t in tokens(150)), offs_of([140, 9])), flags={"edge"})
    large = [random_normal(1, columns, seed=columns).expand(2**20 + 256, columns) for columns in (2048, 1024)]
    yield Case("2^31 elements and more", these(*large, offs_of([2**20 + 256])), flags={"large"})

    yield from refused_offs(tokens)
    (gate_up, dh), offs = tokens(50, 512), offs_of([5, 0, 40])

    def refused(name: str, error: type[Exception], match: str, gate_up: Tensor = gate_up, dh: Tensor = dh) -> Case:
        return Case(name, these(gate_up, dh, offs), raises=error, match=match)

    for wide in (16, 400):
        yield refused(f"2I = {wide}", ValueError, f"2I = {wide} is not a multiple of 32; pad", gate_up[:, :wide])
    yield refused(
        "a gradient of another width",
        ValueError,
        "dh has shape (50, 128); needs (50, 144)",
        gate_up[:, :288],
        dh[:, :128],
    )
    yield refused("float32", TypeError, "gate_up has dtype torch.float32", gate_up.float())
    yield refused("a float32 gradient", TypeError, "dh has dtype torch.float32", dh=dh.float())
    yield refused("3-D", ValueError, "2-D", gate_up[None])
    yield refused("a gradient as wide as gate_up", ValueError, "dh has shape (50, 512); needs (50, 256)", dh=gate_up)
    yield refused("a gradient elsewhere", ValueError, "one device", dh=dh.to("meta"))


def of_width(width: int) -> tuple[Tensor, Tensor, Tensor]:
    M, offs = tokens_of(width)
    return gates(M, 2 * width), random_normal(M, width, seed=3), offs


def _both_gradients() -> tuple[Tensor, Tensor, Tensor]:
    """I is 144: block 1 of the gradient holds the last 16 columns of d_gate and the first 112 columns of d_up.

    A NaN up makes only d_gate NaN. An up of 2^100 makes d_gate far larger than d_up.
    """
    gate_up, dh, offs = of_width(144)
    gate_up[7, 144 + 140], gate_up[132, 144 + 130], gate_up[9, 3] = torch.nan, 2.0**100, torch.nan
    return gate_up, dh, offs


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(M, 2 * D, dtype=torch.bfloat16), torch.randn(M, D, dtype=torch.bfloat16), random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**29:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


def of_dh(choice: Choice) -> Choice:
    """The choice of dh's strides, values and place, under the names of a matrix."""
    own = {name.removeprefix("dh "): value for name, value in choice.items() if name.startswith("dh ")}
    sizes = {"rows": choice["rows"]} if "rows" in choice else {}
    half = {"cols": choice["cols"] // 2} if "cols" in choice else {}
    return {"experts": None, "negated": False, "dtype": torch.bfloat16, **sizes, **half, **own}


def make(choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    dh = of_dh(choice)
    return made(choice, shape_of(choice)), made(dh, shape_of(dh)), offsets(choice, choice["rows"])


def _possible(choice: Choice) -> bool:
    return possible(choice, cols=2 * FP8_SIZE_MULTIPLE) and fits(of_dh(choice))


OF_DH = {"dh strides": STRIDES, "dh values": VALUES, "dh begins": BEGINS, "dh negated": (False, True)}
SPACE = Space(
    {
        **dimensions((0, 256, 288, 1280, 4352), (torch.bfloat16,)),
        **OF_DH,
    },
    make,
    {"scale_format": SCALE_FORMATS, "check_offs": (False, True)},
    _possible,
    [*(part for part in REPEATED if part.get("cols") not in (1, 1056)), *ALSO],
    beyond=[{"dh strides": "row-major", "dh values": "finite", "dh begins": "at 0", **choice} for choice in BEYOND],
)
TOKENS = "gate_up.rows"
TOLD_BEFORE = ("dh.rows", "dh.cols")
_OF_VALUES = r"(?:strides|begins|sign|values|[+-]?Inf|NaN|-0|subnormal|largest|negative|tie|saturating|block) ?.*"
IMPOSSIBLE = (
    (r"gate_up\.(?:rows|cols) = 0 \| dh\." + _OF_VALUES, "dh is empty too"),
    (r"gate_up\.rows = 1 \| dh\.strides (?:column-major|one row repeated|rows apart)", "one row has no stride"),
    *PADDED_GROUPS,
)
