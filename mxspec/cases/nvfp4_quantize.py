"""The cases of nvfp4_quantize: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import every_exponent
from mxspec.cases.common.codes import laid_flat
from mxspec.cases.common.impossible import of_blocks
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import (
    EXPERTS_PAST_A_GRID,
    LARGE_BOTH_WAYS,
    ONE_COLUMN_APART,
    PAST_A_GRID,
    REPEATED,
    STACK,
    axis_of,
    fits,
    made,
    shape_of,
)
from mxspec.cases.common.space import Space, given
from mxspec.cases.common.tensors import BEGINS, turned
from mxspec.cases.common.token_groups import far_apart
from mxspec.formats import E2M1, E4M3FN, NVFP4_BLOCK_SIZE, ElementFormat
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.nvfp4_quantize import BLOCKS
from mxspec.spec import Case, Shapes, normal, random_bits, random_normal, these
from mxspec.spec import given as given_tensor

EDGE = {"edge"}


def cases() -> Iterator[Case]:
    bf16, fp16, fp32 = checks.FLOAT_DTYPES
    for i, (dtype, axis, block) in enumerate(product((bf16, fp16, fp32), (-1, -2), BLOCKS)):
        kw: dict[str, Any] = {"axis": axis, "block": block, "scale_layout": SCALE_LAYOUTS[i // 2 % 2]}
        name = f"{str(dtype)[6:]}, axis {axis}, {block}, {kw['scale_layout']} scales"
        x, amax = random_bits(96, 160, dtype=dtype, seed=i), torch.tensor(2.0 ** (i - 4))
        yield Case(f"random bit patterns, {name}", these(x, amax), kw)
        yield Case(f"96x160, {name}", given_tensor(random_normal, 96, 160, dtype=dtype, seed=i), kw)
        yield Case(f"3x48x80, {name}", given_tensor(random_normal, 3, 48, 80, dtype=dtype, seed=i), kw)
    for axis, block, layout in product((-1, -2), BLOCKS, SCALE_LAYOUTS):
        kw = {"axis": axis, "block": block, "scale_layout": layout}
        end = f"axis {axis}, {block}, {layout}"
        ragged = (304, 336) if block == "16x16" else ((301, 416) if axis == -1 else (416, 301))
        one = (16, 16) if block == "16x16" else ((1, 16) if axis == -1 else (16, 1))
        yield Case(f"one block, {end}", given_tensor(random_normal, *one), kw, flags=EDGE)
        yield Case(f"ragged, {end}", given_tensor(random_normal, *ragged), kw)
        yield Case(f"transposed input, {end}", lambda: (random_normal(96, 160).mT,), kw)
        yield Case(f"every second column, {end}", lambda: (random_normal(96, 320)[:, ::2],), kw)
        yield Case(f"every second row, {end}", lambda: (random_normal(192, 64)[::2],), kw)
        yield Case(f"empty, {end}", given_tensor(torch.zeros, 0, 0), kw, flags=EDGE)
        yield Case(f"no experts, {end}", given_tensor(torch.zeros, 0, 16, 64), kw, flags=EDGE)
        yield Case(f"an amax for each matrix, {end}", lambda: _stack(bf16), kw)
        yield Case(f"edge blocks, {end}", these(turned(edge_blocks(), axis)), kw, flags=EDGE)
        yield Case(f"zeros of both signs, {end}", these(torch.where(normal(32, 48) < 0, -0.0, 0.0)), kw, flags=EDGE)
    for dtype in (bf16, fp16, fp32):
        name = str(dtype)[6:]
        codes = codes_and_ties().to(dtype)
        yield Case(f"every code and tie, {name}", these(codes, torch.tensor(2688.0)), flags=EDGE)
        yield Case(f"every code and tie, {name}, axis -2", these(codes.mT, torch.tensor(2688.0)), {"axis": -2})
        above = torch.tensor(2688.0).nextafter(torch.tensor(torch.inf))
        yield Case(f"ties, an amax just above, {name}", these(codes, above), flags=EDGE)
        yield Case(f"every scale and tie, {name}", these(scales_and_ties().to(dtype)), flags=EDGE)
        yield Case(f"ties of codes under every scale, {name}", these(ties_under_scales().to(dtype)), flags=EDGE)
        yield Case(f"a larger amax, {name}", these(random_normal(32, 64, dtype=dtype), torch.tensor(2.0**40)))
        yield Case(f"a smaller amax, {name}", these(random_normal(32, 64, dtype=dtype), torch.tensor(0.3)), flags=EDGE)
        special = [torch.nan, torch.inf, -torch.inf, -1.0, 0.0, -0.0, 2.0**-149, torch.finfo(fp32).max]
        for number in special:
            amax = torch.tensor(number)
            yield Case(f"amax {number}, {name}", these(random_normal(4, 32, dtype=dtype), amax), flags=EDGE)
        for number in (torch.nan, torch.inf, -torch.inf):
            x = random_normal(32, 48, dtype=dtype)
            x[5, 17] = number
            yield Case(f"{number} in the matrix, {name}", these(x), flags=EDGE)
            for block in BLOCKS:
                kw = {"block": block}
                yield Case(f"{number} in a block, {name}, {block}", these(x, torch.tensor(3.0)), kw, flags=EDGE)
                under_zero = these(x, torch.tensor(0.0))
                yield Case(f"{number} in a block, an amax of 0, {name}, {block}", under_zero, kw, flags=EDGE)
    for block in BLOCKS:
        x = torch.stack([random_normal(16, 32), torch.full((16, 32), torch.nan), random_normal(16, 32, seed=3)])
        yield Case(f"NaN in one matrix of three, {block}", these(x), {"block": block}, flags=EDGE)
    for shift in (-149, -140, -126, -117, -105, -60, 60, 120):
        x = normal(32, 64) * 2.0 ** (shift // 2) * 2.0 ** (shift - shift // 2)
        yield Case(f"magnitudes near 2^{shift}", these(x.clamp(-torch.finfo(fp32).max)), flags=EDGE)
    for name, x in small_matrices():
        for block in BLOCKS:
            yield Case(f"{name}, {block}", these(x), {"block": block}, flags=EDGE)
    yield Case("every exponent", lambda: (every_exponent(E4M3FN),), flags=EDGE)
    yield Case("every exponent beside a small amax", lambda: (every_exponent(E4M3FN), torch.tensor(2.0**-100)))
    separating = torch.zeros(2, 16)
    separating[0, 0], separating[1, 0] = 1.015625, 0.0003719329833984375
    yield Case("peers separate here", these(separating), flags=EDGE)
    yield Case("negated view", lambda: (torch.complex(normal(4, 64), normal(4, 64, seed=1)).conj().imag,), flags=EDGE)
    yield Case("no rows", given_tensor(torch.zeros, 0, 64), flags=EDGE)
    yield Case("no columns", given_tensor(torch.zeros, 4, 0), {"scale_layout": "blocked"}, flags=EDGE)
    yield Case("no columns, with an amax", these(torch.zeros(4, 0), torch.tensor(3.0)), flags=EDGE)
    yield Case("ties of codes, large numbers, bfloat16", these((ties_under_scales() * 2.0**116).bfloat16()), flags=EDGE)
    yield Case("every second column, float32", lambda: (normal(48, 96)[:, ::2],))
    yield Case("every second column, blocked", lambda: (random_normal(96, 320)[:, ::2],), {"scale_layout": "blocked"})
    apart = {"scale_layout": "blocked"}
    yield Case("rows far apart, blocked", lambda: (far_apart(70, 32, apart=2**25),), apart, flags=EDGE)
    yield Case("an amax repeated", lambda: (random_normal(3, 32, 64), torch.tensor([7.0]).expand(3)))
    yield Case("every second amax", lambda: (random_normal(3, 32, 64), torch.arange(1.0, 7.0)[::2]))
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
    for axis, layout in product((-1, -2), SCALE_LAYOUTS):
        kw = {"axis": axis, "scale_layout": layout}
        yield Case(f"2^31 elements and more, axis {axis}, {layout}", large, kw, flags={"large"})

    def refused(name, args, error, match, **kwargs):
        return Case(name, these(*args), kwargs, raises=error, match=match)

    x = torch.zeros(32, 64)
    yield refused("K = 100", (torch.zeros(4, 100),), ValueError, "K = 100 is not a multiple of 16, the block size")
    yield refused("M = 100", (torch.zeros(100, 32),), ValueError, "M = 100 is not a multiple", axis=-2)
    yield refused("N = 100", (torch.zeros(2, 100, 32),), ValueError, "N = 100 is not a multiple", block="16x16")
    yield refused("1-D", (torch.zeros(64),), ValueError, "2-D or 3-D")
    yield refused("4-D", (torch.zeros(1, 1, 1, 32),), ValueError, "2-D or 3-D")
    yield refused("int32", (torch.zeros(4, 32, dtype=torch.int32),), TypeError, "torch.int32")
    yield refused(
        "already e2m1", (torch.zeros(4, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),), TypeError, "float4_e2m1"
    )
    yield refused("axis 0", (x,), ValueError, "axis = 0", axis=0)
    yield refused("1x32 blocks", (x,), ValueError, "block = '1x32'", block="1x32")
    yield refused("unknown layout", (x,), ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("amax of bf16", (x, torch.tensor(1.0, dtype=bf16)), TypeError, "tensor_amax has dtype torch.bfloat16")
    yield refused("amax a float", (x, 1.0), TypeError, "tensor_amax is a float")
    yield refused("amax (1,) of a matrix", (x, torch.ones(1)), ValueError, "tensor_amax has shape (1,); needs ()")
    yield refused("one amax of two", (x[None].expand(2, 32, 64), torch.tensor(1.0)), ValueError, "needs (2,)")
    yield refused("amax elsewhere", (x, torch.tensor(1.0, device="meta")), ValueError, "needs one device")


def small_matrices() -> Iterator[tuple[str, Tensor]]:
    """Matrices whose magnitudes are subnormal: those of all blocks, or of one block. Then a NaN beside zeros."""
    bf16, fp16, fp32 = checks.FLOAT_DTYPES
    yield "all magnitudes 2^-20, float16", torch.full((32, 16), 2.0**-20, dtype=fp16)
    yield "all magnitudes 2^-130", torch.full((32, 16), 2.0**-130)
    yield "all magnitudes 2^-127, bfloat16", torch.full((32, 16), 2.0**-127, dtype=bf16)
    x = torch.full((32, 16), 2.0**-124)
    x[:16] = 2.0**-127
    yield "a block of magnitude 2^-127", x
    x = torch.zeros(32, 16, dtype=fp32)
    x[20, 3] = torch.nan
    yield "a NaN beside blocks of zeros", x


def edge_blocks() -> Tensor:
    """`(32, 112)` fp32, whose largest magnitude is 2688: block scales that are zero, subnormal, or the largest."""
    ratios = torch.tensor([0.0, 2.0**-10, 2.0**-9, 1.5 * 2.0**-10, 2.0**-6, 7.5 * 2.0**-9, 1.0]) / 448
    fractions = torch.tensor([1.0, -1.0, 0.75, -0.5, 1 / 12, -1 / 24, 0.0, -0.0, 0.3, -0.9, 5 / 12, 7 / 12, 1e-4, 0.25])
    block = torch.cat([fractions, torch.tensor([1e-30, -1e-30])])  # (16,)
    rows = (ratios[:, None] * 2688 * block).flatten()  # (112,)
    return torch.stack([rows.roll(16 * i) for i in range(32)])


def _stack(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random_normal(3, 32, 48, dtype=dtype), torch.tensor([2688.0, 0.7, 3e5])


def _grid(fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    """The values of a format that are not negative, and the midpoints between neighbours."""
    values = torch.tensor([fmt.value(code) for code in range(fmt.largest_code + 1)])
    return values, (values[1:] + values[:-1]) / 2


def codes_and_ties() -> Tensor:
    """`(rows, 16)` fp32 for a tensor amax of 2688: each block begins with 6, so its scale is 1."""
    values, ties = _grid(E2M1)
    beside = [ties.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    numbers = torch.cat([values, ties, *beside])
    numbers = torch.cat([numbers, -numbers])
    rest = torch.cat([numbers, torch.zeros(-len(numbers) % 15)]).unflatten(0, (-1, 15))
    return torch.cat([torch.full((len(rest), 1), 6.0), rest], 1)


def scales_and_ties() -> Tensor:
    """`(rows, 16)` fp32 with the largest magnitude 448. A block's largest is a scale, a tie, or beside a tie."""
    values, ties = _grid(E4M3FN)
    beside = [ties * (1 - 2.0**-8), ties * (1 + 2.0**-7)]
    amax = torch.cat([values, ties, *beside]).sort().values
    fractions = torch.tensor(
        [1.0, -0.75, 0.5, 0.25, -0.125, 1 / 12, -1 / 24, 0.9, -0.6, 0.4, 0.2, 0.0, -0.0, 1e-3, -1.0]
    )
    return torch.cat([amax[:, None], amax[:, None] * fractions], 1)


def ties_under_scales() -> Tensor:
    """`(126, 16)` fp32 with the largest magnitude 2688: a block for each scale s, with the tie `m * s` of each code."""
    ties = _grid(E2M1)[1]
    scales = _grid(E4M3FN)[0][1:]
    return scales[:, None] * torch.cat([torch.tensor([6.0]), ties, -ties, torch.tensor([0.0])])


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        name = "x".join(map(str, shape))

        def args(shape: tuple[int, ...] = shape) -> tuple[Tensor, Tensor]:
            x = torch.randn(*shape, dtype=torch.bfloat16)
            return x, x.abs().amax((-2, -1)).float()

        for layout in SCALE_LAYOUTS if len(shape) == 2 else ("blocked",):
            kw: dict[str, Any] = {"scale_layout": layout}
            yield Case(f"{name}, amax given, {layout}", args, kw)
            if shape[-2] % NVFP4_BLOCK_SIZE == 0 and shape[-2] * shape[-1] >= 2**22:
                yield Case(f"{name}, amax given, {layout}, axis -2", args, {**kw, "axis": -2})
                yield Case(f"{name}, amax given, {layout}, 16x16", args, {**kw, "block": "16x16"})
        if len(shape) == 2 and shape[0] * shape[1] >= 2**26:
            x = given_tensor(torch.randn, *shape, dtype=torch.bfloat16)
            yield Case(f"{name}, plain", x)


AMAX = ("not given", "its own", "half of its own", "sixteen times its own", "of 24 bits", "special")
SPECIAL = (torch.nan, 2.0**-140, torch.inf, -2.0, 0.0, -torch.inf, -0.0, 2.0**-149, 2.0**-127)
AMAX_STRIDES = ("none", "dense", "one repeated", "apart")


def multiples(choice: Choice) -> tuple[int, int]:
    """The numbers of which the rows and the columns of a choice are multiples."""
    axis, square = axis_of(choice), given(choice, "block", "1x16") == "16x16"
    return 16 if axis == -2 or square else 1, 16 if axis == -1 or square else 1


def _possible(choice: Choice) -> bool:
    return amax_fits(choice, *multiples(choice))


def amax_fits(choice: Choice, rows: int, cols: int) -> bool:
    """Whether a choice can be made: a stack whose sizes are multiples of these numbers, and its tensor_amax."""
    if not fits(choice, rows, cols):
        return False
    amax, strides, begins = (choice.get(name) for name in ("amax", "amax strides", "amax begins"))
    if amax == "not given" and (strides not in (None, "none") or begins not in (None, "at 0")):
        return False
    if strides == "none" and amax not in (None, "not given") and choice.get("experts", 0) != 0:
        return False
    if amax not in (None, "not given") and strides is not None and "experts" in choice:
        many = choice["experts"] is not None and choice["experts"] > 1
        if (strides == "none") != (choice["experts"] == 0) or (strides in ("one repeated", "apart") and not many):
            return False
    if strides == "none" and begins not in (None, "at 0"):
        return False
    return amax != "special" or choice.get("experts") != 0


def hides(choice: Choice) -> bool:
    """A NaN in x, without a tensor_amax, makes every scale and code of its matrix the same. So may a special amax."""
    if choice.get("amax") == "special":
        return choice.get("experts", 9) in (None, 1, 2)
    return choice.get("amax") == "not given" and choice.get("values") in ("special", "special, Inf first", "bits")


def _make(choice: Choice) -> tuple[Tensor, ...]:
    x = made(choice, shape_of(choice), axis_of(choice) == -2)
    return x, *amax_of(choice, x)


def amax_of(choice: Choice, x: Tensor) -> tuple[Tensor, ...]:
    """The tensor_amax of a choice, or nothing if the choice gives none."""
    if choice["amax"] == "not given":
        return ()
    finite = x.resolve_neg().float().nan_to_num(0, 0, 0).abs()
    own = finite.amax((-2, -1)) if x.numel() else torch.ones(x.shape[:-2])
    return (varied(choice, own, x.shape[-2] + x.shape[-1]),)


def varied(choice: Choice, own: Tensor, turn: int) -> Tensor:
    """The numbers for a choice, from the largest magnitudes of the matrices. `turn` says which special is the first."""
    factor = {"half of its own": 0.5, "sixteen times its own": 16.0, "of 24 bits": 1 + 5 * 2.0**-21}
    amax = own * factor.get(choice["amax"], 1.0)
    if choice["amax"] == "special":
        first = turn % len(SPECIAL)
        amax = torch.tensor(SPECIAL).roll(-first).repeat(own.numel())[: own.numel()].reshape(own.shape)
    return laid_of_matrices(amax, choice["amax strides"], choice["amax begins"])


def laid_of_matrices(numbers: Tensor, strides: str, begins: str) -> Tensor:
    """A number for each matrix, `()` or `(E,)`, with these strides and this place in memory."""
    if numbers.ndim == 0:
        return laid_flat(numbers[None], begins)[0]
    if strides == "one repeated":
        return laid_flat(numbers[:1], begins).expand(len(numbers))
    if strides == "apart":
        return laid_flat(torch.stack([numbers, torch.full_like(numbers, torch.nan)], -1).flatten(), begins)[::2]
    return laid_flat(numbers, begins)


DIMENSIONS = {
    **STACK,
    "rows": (0, 1, 48, 161, 256, 1056, 4128),
    "cols": (0, 1, 48, 161, 256, 1056, 4128),
    "amax": AMAX,
    "amax strides": AMAX_STRIDES,
    "amax begins": BEGINS,
}
OPTIONS = {"axis": (-1, -2), "block": BLOCKS, "scale_layout": SCALE_LAYOUTS}
_GIVEN = {"amax": "its own", "amax strides": "dense", "amax begins": "at 0"}
_NONE = {"amax": "not given", "amax strides": "none", "amax begins": "at 0"}
ALSO = [{**choice, **_GIVEN} for choice in REPEATED]
ALSO += [
    {"experts": 9, "strides": strides, **_GIVEN}
    for strides in ("column-major", "one column repeated", "columns apart", "rows apart")
]
ALSO += [{"experts": 1, **_GIVEN}]
BEYOND = [{**choice, **_NONE} for choice in (*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART)]
SPACE = Space(
    DIMENSIONS, _make, OPTIONS, _possible, ALSO, hides, implied=("none",), decisive=("axis", "block"), beyond=BEYOND
)
OF_SQUARES = (r"block = 16x16 \| x\.(?:rows|cols) (?:= 1|odd)", "both sizes are multiples of 16")
IMPOSSIBLE = (
    *of_blocks(16),
    (r"tensor_amax not given \| tensor_amax\..*", "there is no amax"),
    (r"x\.experts = 0 \| tensor_amax\..*", "there is no amax"),
    (r"(?:x\.experts = 1|x\.rank 2) \| tensor_amax\.strides .*", "one amax has no stride"),
    OF_SQUARES,
)
