"""The cases of nvfp4_quantize_groups: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.groups import (
    ARRANGED,
    BEYOND,
    GROUPS,
    arranged_groups,
    groups_fit,
    in_groups,
    offsets,
    padded_fits,
    sizes_of,
)
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import MATRIX, REPEATED, axis_of, fits, made, shape_of
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.tensors import BEGINS, turned
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs
from mxspec.cases.nvfp4_quantize import AMAX, AMAX_STRIDES, edge_blocks, ties_under_scales, varied
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.spec import Case, Shapes, random_bits, random_normal, these

EDGE = {"edge"}


def cases() -> Iterator[Case]:
    def args(sizes: list[int], M: int, K: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        return random_normal(M, K, dtype=dtype), offs_of(sizes)

    def with_amax(sizes: list[int], M: int, K: int) -> tuple[Tensor, ...]:
        return *args(sizes, M, K), 2.0 ** torch.arange(len(sizes)) * 3

    for axis, (name, sizes, M, _, flags) in product((-1, -2), grouped()):
        if len(sizes) < 300:  # more groups would take minutes in an interpreter, because of their padding
            yield Case(f"{name}, axis {axis}", partial(args, sizes, M, 96), {"axis": axis}, flags=flags)
            yield Case(
                f"{name}, amax given, axis {axis}", partial(with_amax, sizes, M, 48), {"axis": axis}, flags=flags
            )
    for i, (axis, layout, dtype) in enumerate(product((-1, -2), SCALE_LAYOUTS, checks.FLOAT_DTYPES)):
        kw: dict[str, Any] = {"axis": axis, "scale_layout": layout}
        end = f"{str(dtype)[6:]}, axis {axis}, {layout}"
        # Without an amax, a NaN would make all scales of its group the same.
        bits, amax = random_bits(110, 64, dtype=dtype, seed=i), torch.tensor([2.0 ** (i - 4), 3.0])
        yield Case(f"random bit patterns, {end}", these(bits, offs_of([70, 30]), amax), kw)
        yield Case(f"three groups, {end}", partial(args, [40, 1, 64], 110, 80, dtype), kw)
        ties = turned(ties_under_scales().to(dtype), axis)
        half = len(ties) // 32 * 16
        yield Case(f"ties of codes, {end}", these(ties, offs_of([half, len(ties) - half])), kw, flags=EDGE)
    for layout in SCALE_LAYOUTS:  # whole tiles of tokens and columns
        kw = {"axis": -2, "scale_layout": layout}
        yield Case(f"three groups, 256 columns, axis -2, {layout}", partial(args, [140, 1, 69], 215, 256), kw)
    for axis, pad_to, layout in product((-1, -2), (128, 384), SCALE_LAYOUTS):
        kw = {"axis": axis, "pad_to": pad_to, "scale_layout": layout}
        yield Case(f"pad_to {pad_to}, axis {axis}, {layout}", partial(args, [140, 1], 150, 160), kw)
        for number in (torch.nan, torch.inf, -1.0, 0.0, 2.0**-149):
            amax = torch.tensor([3.0, number, 7.0])
            x, offs = args([5, 20, 10], 40, 48)
            yield Case(f"amax {number}, pad_to {pad_to}, axis {axis}, {layout}", these(x, offs, amax), kw, flags=EDGE)
    for axis in (-1, -2):
        kw = {"axis": axis}
        for number in (torch.nan, torch.inf, -torch.inf):
            x, offs = args([5, 20, 10], 40, 48)
            x[7, 20] = number
            yield Case(f"{number} in a group, axis {axis}", these(x, offs), kw, flags=EDGE)
            amax = torch.tensor([3.0, 4.0, 7.0])
            yield Case(f"{number} in a block, axis {axis}", these(x, offs, amax), kw, flags=EDGE)
        small = torch.cat([random_normal(40, 32, dtype=torch.float32) * 2.0**k for k in (-130, 0, 90)])
        yield Case(f"groups of other sizes of numbers, axis {axis}", these(small, offs_of([40, 40, 40])), kw)
        x, offs = args([130, 70], 210, 64)
        yield Case(f"a larger amax, axis {axis}", these(x, offs, torch.tensor([2.0**40, 2.0**20])), kw)
        yield Case(f"a smaller amax, axis {axis}", these(x, offs, torch.tensor([0.3, 0.01])), kw, flags=EDGE)
        yield Case(f"an amax repeated, axis {axis}", these(x, offs, torch.tensor([7.0]).expand(2)), kw)
        yield Case(f"every second amax, axis {axis}", these(x, offs, torch.arange(1.0, 5.0)[::2]), kw)
        yield Case(f"transposed input, axis {axis}", lambda: (random_normal(64, 210).mT, offs_of([130, 70])), kw)
        yield Case(f"every second row, axis {axis}", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])), kw)
        edge = edge_blocks()
        yield Case(f"edge blocks, axis {axis}", these(edge, offs_of([16, 16])), kw, flags=EDGE)
        yield Case(f"rows far apart, axis {axis}", lambda: (far_apart(140, 64), offs_of([100, 39])), kw, flags=EDGE)
        yield Case(f"no columns, axis {axis}", partial(args, [3, 4], 7, 0), kw, flags=EDGE)
        yield Case(f"no columns, amax given, axis {axis}", partial(with_amax, [3, 4], 7, 0), kw, flags=EDGE)
        yield Case(f"checked, axis {axis}", partial(args, [30, 10], 41, 64), {"check_offs": True, **kw})
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]), torch.tensor([3.0]))
        yield Case(f"2^31 elements and more, amax given, axis {axis}", large, kw, flags={"large"})
    yield Case("odd K, axis -2", partial(args, [30, 200], 230, 333), {"axis": -2}, flags=EDGE)

    x, offs = args([5, 0, 40], 50, 64)

    def refused(name, error, match, x=x, offs=offs, amax=None, **kwargs):
        return Case(name, these(x, offs, *([] if amax is None else [amax])), kwargs, raises=error, match=match)

    yield refused("K = 100", ValueError, "K = 100 is not a multiple of 16, the block size", torch.zeros(50, 100))
    yield refused("float64", TypeError, "torch.float64", x.double())
    yield refused("3-D", ValueError, "2-D", x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("pad_to 64", ValueError, "pad_to = 64; needs a multiple of 128", pad_to=64)
    yield refused("pad_to 0", ValueError, "pad_to = 0; needs at least 1", pad_to=0)
    yield refused("pad_to 128.0", TypeError, "pad_to = 128.0", pad_to=128.0)
    yield refused("axis 0", ValueError, "axis = 0", axis=0)
    yield refused("unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("amax of bf16", TypeError, "tensor_amax has dtype", amax=torch.ones(3, dtype=torch.bfloat16))
    yield refused("one amax of three", ValueError, "tensor_amax has shape (); needs (3,)", amax=torch.tensor(1.0))
    yield refused("amax elsewhere", ValueError, "one device", amax=torch.ones(3, device="meta"))
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int) -> tuple[Tensor, ...]:
        x, offs = torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, 8)
        return x, offs, x.abs().amax().float().expand(8).contiguous()

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            for axis in (-1, -2):
                name = f"{M}x{K}, G 8, amax given, blocked" + (", axis -2" if axis == -2 else "")
                yield Case(name, partial(args, M, K), {"axis": axis})


def _possible(choice: Choice) -> bool:
    pad_to = given(choice, "pad_to", 128) or 128
    if not (groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", pad_to)):
        return False
    amax, strides, begins = (choice.get(name) for name in ("amax", "amax strides", "amax begins"))
    later, G = begins not in (None, "at 0"), arranged_groups(choice)
    if amax == "not given" and (strides not in (None, "none") or later):
        return False
    if strides == "none" and (amax not in (None, "not given") or later):
        return False
    if G is not None and G < 2 and strides in ("one repeated", "apart"):
        return False
    if G == 0 and (amax == "special" or later):
        return False
    return fits(choice, 1, 16 if axis_of(choice) == -1 else 1)


def _hides(choice: Choice) -> bool:
    """A NaN in x, without a tensor_amax, makes every scale and code of its group the same. So may a special amax."""
    if choice.get("amax") == "special":
        return choice.get("groups") not in ("forty", "three hundred", "singles", "of 128, three hundred")
    return choice.get("amax") == "not given" and choice.get("values") in ("special", "special, Inf first", "bits")


def _make(choice: Choice) -> tuple[Tensor, ...]:
    x, offs = made(choice, shape_of(choice), axis_of(choice) == -2), offsets(choice, choice["rows"])
    if choice["amax"] == "not given":
        return x, offs
    finite = x.resolve_neg().float().nan_to_num(0, 0, 0).abs()
    sizes = sizes_of(choice["groups"], in_groups(choice, choice["rows"]))
    parts = finite.split([*sizes, len(x) - sum(sizes)])[:-1]
    own = torch.stack([part.max() if part.numel() else torch.tensor(5.0) for part in parts]) if parts else torch.ones(0)
    return x, offs, varied(choice, own, x.shape[0] + x.shape[1])


_NONE = {"amax": "not given", "amax strides": "none", "amax begins": "at 0"}
SIZES = (0, 1, 48, 161, 256, 1056, 4128)
_SIZES = {"rows": SIZES, "cols": SIZES}
DIMENSIONS = {
    **_SIZES,
    **GROUPS,
    **MATRIX,
    **_SIZES,
    "amax": AMAX,
    "amax strides": AMAX_STRIDES,
    "amax begins": BEGINS,
}
SPACE = Space(
    DIMENSIONS,
    _make,
    {"axis": (-1, -2), "pad_to": (128, 384), "scale_layout": SCALE_LAYOUTS, "check_offs": (False, True)},
    _possible,
    [*REPEATED, *ARRANGED],
    _hides,
    implied=("none",),
    beyond=[{**choice, **_NONE} for choice in BEYOND],
)
TOKENS = "x.rows"
IMPOSSIBLE = (
    (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", "K is a multiple of 16"),
    (r"tensor_amax not given \| tensor_amax\..*", "there is no amax"),
    (r"offs\.groups = 0 \| tensor_amax\..*", "there is no amax"),
    (r"offs\.groups = 1 \| tensor_amax\.strides .*", "one amax has no stride"),
    *PADDED_GROUPS,
)
