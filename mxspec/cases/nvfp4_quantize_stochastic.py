"""The cases of nvfp4_quantize_stochastic: calls by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

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
    made,
    shape_of,
)
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, laid, strides_fit, turned
from mxspec.cases.nvfp4_quantize import AMAX, AMAX_STRIDES, amax_fits, amax_of, edge_blocks, hides, small_matrices
from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.spec import Case, Shapes, normal, random_bits, random_normal, these

EDGE = {"edge"}


def cases() -> Iterator[Case]:
    bf16, fp16, fp32 = checks.FLOAT_DTYPES
    for i, (dtype, axis, kind) in enumerate(product((bf16, fp16, fp32), (-1, -2), ("bytes", "seed"))):
        kw: dict[str, Any] = {"axis": axis, "scale_layout": SCALE_LAYOUTS[i // 2 % 2]}
        name = f"{str(dtype)[6:]}, axis {axis}, {kind}, {kw['scale_layout']} scales"
        x, amax = random_bits(96, 160, dtype=dtype, seed=i), torch.tensor(2.0 ** (i - 4))
        yield Case(f"random bit patterns, {name}", these(x, _random(kind, x.shape, i), amax), kw)
        yield Case(f"96x160, {name}", partial(_call, kind, (96, 160), dtype, i), kw)
        yield Case(f"3x48x80, {name}", partial(_call, kind, (3, 48, 80), dtype, i), kw)
    for axis, kind, layout in product((-1, -2), ("bytes", "seed"), SCALE_LAYOUTS):
        kw = {"axis": axis, "scale_layout": layout}
        end = f"axis {axis}, {kind}, {layout}"
        ragged, one = ((301, 416), (1, 16)) if axis == -1 else ((416, 301), (16, 1))
        yield Case(f"one block, {end}", partial(_call, kind, one), kw, flags=EDGE)
        yield Case(f"ragged, {end}", partial(_call, kind, ragged), kw)
        yield Case(f"transposed input, {end}", partial(_viewed, kind, (160, 96), "transposed"), kw)
        yield Case(f"every second column, {end}", partial(_viewed, kind, (96, 320), "columns"), kw)
        yield Case(f"every second row, {end}", partial(_viewed, kind, (192, 64), "rows"), kw)
        yield Case(f"empty, {end}", these(*_beside(torch.zeros(0, 0), kind)), kw, flags=EDGE)
        yield Case(f"no experts, {end}", these(*_beside(torch.zeros(0, 16, 64), kind)), kw, flags=EDGE)
        yield Case(f"an amax for each matrix, {end}", these(*_call(kind, (3, 32, 48)), _AMAX), kw)
        edge = turned(edge_blocks(), axis)
        yield Case(f"edge blocks, {end}", these(*_beside(edge, kind)), kw, flags=EDGE)
        zeros = torch.where(normal(32, 48) < 0, -0.0, 0.0)
        yield Case(f"zeros of both signs, {end}", these(*_beside(zeros, kind)), kw, flags=EDGE)
    for dtype in (bf16, fp16, fp32):
        name, amax = str(dtype)[6:], torch.tensor(2688.0)
        x, random = numbers_and_bytes(dtype)
        yield Case(f"every step, {name}", these(x, random, amax), flags=EDGE)
        yield Case(f"every step, {name}, axis -2", these(x.mT, random.mT, amax), {"axis": -2}, flags=EDGE)
        for byte in (0, 255):
            same = torch.full_like(random, byte)
            yield Case(f"every byte {byte}, {name}", these(x, same, amax), flags=EDGE)
        yield Case(f"a larger amax, {name}", these(*_call("seed", (32, 64), dtype), torch.tensor(2.0**40)))
        yield Case(f"a smaller amax, {name}", these(*_call("seed", (32, 64), dtype), torch.tensor(0.3)), flags=EDGE)
        for number in (torch.nan, torch.inf, -torch.inf, -1.0, 0.0, -0.0, 2.0**-149, torch.finfo(fp32).max):
            args = (*_call("seed", (4, 32), dtype), torch.tensor(number))
            yield Case(f"amax {number}, {name}", these(*args), flags=EDGE)
        for number in (torch.nan, torch.inf, -torch.inf):
            x = random_normal(32, 48, dtype=dtype)
            x[5, 17] = number
            yield Case(f"{number} in the matrix, {name}", these(*_beside(x, "seed")), flags=EDGE)
            yield Case(f"{number} in a block, {name}", these(*_beside(x, "bytes"), torch.tensor(3.0)), flags=EDGE)
    for shift in (-149, -140, -126, -117, -105, -60, 60, 120):
        x = (normal(32, 64) * 2.0 ** (shift // 2) * 2.0 ** (shift - shift // 2)).clamp(-torch.finfo(fp32).max)
        yield Case(f"magnitudes near 2^{shift}", these(*_beside(x, "seed")), flags=EDGE)
    for name, x in small_matrices():
        yield Case(name, these(*_beside(x, "bytes")), flags=EDGE)
    x = random_normal(2, 48)
    x[0, 5] = torch.nan
    yield Case("nan in a block, an amax of 0", these(*_beside(x, "bytes"), torch.tensor(0.0)), flags=EDGE)
    for i, (seed, offset) in enumerate(SEEDS):
        x, state = random_normal(2, 48, 64, seed=i), torch.tensor([seed, offset])
        for axis in (-1, -2):
            yield Case(f"seed {seed}, offset {offset}, axis {axis}", these(x, state), {"axis": axis}, flags=EDGE)
    yield Case("seed and offset apart", these(random_normal(32, 64), torch.tensor([7, -1, 9, -1])[::2]))
    yield Case("the seed is the offset", these(random_normal(32, 64), torch.tensor([11]).expand(2)))
    bytes_ = _random("bytes", (64, 96), 3)
    yield Case("bytes of the transpose", these(random_normal(96, 64), bytes_.mT))
    yield Case("every second byte", these(random_normal(64, 48), bytes_[:, ::2]))
    yield Case("one byte for a row", these(random_normal(64, 48), bytes_[:, :1].expand(64, 48)))
    yield Case("one row of bytes", these(random_normal(64, 96), bytes_[:1].expand(64, 96)), {"axis": -2})
    yield Case(
        "negated view",
        lambda: _beside(torch.complex(normal(4, 64), normal(4, 64, seed=1)).conj().imag, "bytes"),
        flags=EDGE,
    )
    yield Case("no rows", these(torch.zeros(0, 64), torch.tensor([1, 2])), flags=EDGE)
    empty = these(torch.zeros(4, 0), torch.zeros(4, 0, dtype=torch.uint8))
    yield Case("no columns", empty, {"scale_layout": "blocked"}, flags=EDGE)
    row = random_normal(1, 2048), torch.arange(2048).to(torch.uint8)[None]
    large = these(*(t.expand(2**20 + 256, 2048) for t in row))
    for axis, layout in product((-1, -2), SCALE_LAYOUTS):
        kw = {"axis": axis, "scale_layout": layout}
        yield Case(f"2^31 elements and more, axis {axis}, {layout}", large, kw, flags={"large"})

    x, random = torch.zeros(32, 64), torch.zeros(32, 64, dtype=torch.uint8)
    pair = torch.tensor([1, 2])

    def refused(name, args, error, match, **kwargs):
        return Case(name, these(*args), kwargs, raises=error, match=match)

    yield refused("K = 100", (torch.zeros(4, 100), pair), ValueError, "K = 100 is not a multiple of 16, the block size")
    yield refused("M = 100", (torch.zeros(100, 32), pair), ValueError, "M = 100 is not a multiple", axis=-2)
    yield refused("1-D", (torch.zeros(64), pair), ValueError, "2-D or 3-D")
    yield refused("int32", (x.int(), pair), TypeError, "x has dtype torch.int32")
    yield refused("axis 0", (x, pair), ValueError, "axis = 0", axis=0)
    yield refused("unknown layout", (x, pair), ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("int32 seed", (x, pair.int()), TypeError, "random has dtype torch.int32; needs torch.uint8 or")
    yield refused("a seed alone", (x, pair[:1]), ValueError, "random has shape (1,); needs (2,)")
    yield refused("bytes of another shape", (x, random.mT), ValueError, "random has shape (64, 32); needs (32, 64)")
    yield refused("a byte for a block", (x, random[:, ::16]), ValueError, "random has shape (32, 4); needs (32, 64)")
    yield refused("random elsewhere", (x, pair.to("meta")), ValueError, "needs one device")
    yield refused("amax of bf16", (x, pair, torch.tensor(1.0, dtype=bf16)), TypeError, "tensor_amax has dtype")
    yield refused("amax (1,) of a matrix", (x, pair, torch.ones(1)), ValueError, "tensor_amax has shape (1,); needs ()")
    yield refused("amax elsewhere", (x, pair, torch.tensor(1.0, device="meta")), ValueError, "needs one device")


_AMAX = torch.tensor([2688.0, 0.7, 3e5])
SEEDS = ((0, 0), (-1, -1), (1, 2), (2**32 + 5, 7), (5, 2**32 + 7), (-(2**63), 2**63 - 1), (0x3A4BC5D6 << 29, 1 << 31))


def _random(kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A byte for each element of a shape, or a seed and an offset."""
    if kind == "bytes":
        return random_bits(*shape, dtype=torch.uint8, seed=seed + 100)
    return random_bits(2, dtype=torch.int32, seed=seed + 100).to(torch.int64) * 0x1234567


def _beside(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return x, _random(kind, tuple(x.shape))


def _viewed(kind: str, shape: tuple[int, int], view: str) -> tuple[Tensor, Tensor]:
    x = random_normal(*shape)
    return _beside({"transposed": x.mT, "columns": x[:, ::2], "rows": x[::2]}[view], kind)


def _call(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    return random_normal(*shape, dtype=dtype, seed=seed), _random(kind, shape, seed)


def numbers_and_bytes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(rows, 16)` numbers for a tensor amax of 2688, and their bytes. Each block begins with 6, so its scale is 1.

    The numbers lie k/256 of the way between two neighbouring codes, or 1/1024 of the way beside. Their bytes are the
    first and the last byte, and the bytes around the byte at which the code changes.
    """
    values, numbers, bytes_ = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), [], []
    for lo, hi in pairwise(values):
        for k, beside, sign in product((0, 1, 2, 3, 127, 128, 253, 254, 255), (0, 0.25, -0.25), (1.0, -1.0)):
            for byte in sorted({0, 255, *(max(0, min(255, 256 - k + turn)) for turn in (-1, 0, 1))}):
                numbers.append(sign * max(lo + (hi - lo) * (k + beside) / 256, 0.0))
                bytes_.append(byte)
    x = torch.tensor(numbers + -len(numbers) % 15 * [0.0]).unflatten(0, (-1, 15))
    r = torch.tensor(bytes_ + -len(numbers) % 15 * [0], dtype=torch.uint8).unflatten(0, (-1, 15))
    first = torch.full((-len(x) % 16 + len(x), 1), 6.0)
    more = (0, 0, 0, -len(x) % 16)  # 16 blocks and a multiple of them, for axis -2
    pad = torch.nn.functional.pad
    return torch.cat([first, pad(x, more)], 1).to(dtype), torch.cat([first.to(torch.uint8), pad(r, more)], 1)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        name = "x".join(map(str, shape))

        def args(shape: tuple[int, ...] = shape) -> tuple[Tensor, Tensor, Tensor]:
            x = torch.randn(*shape, dtype=torch.bfloat16)
            return x, torch.tensor([1, 2]), x.abs().amax((-2, -1)).float()

        for layout in SCALE_LAYOUTS if len(shape) == 2 else ("blocked",):
            kw: dict[str, Any] = {"scale_layout": layout}
            yield Case(f"{name}, seed, amax given, {layout}", args, kw)
            if shape[-2] % NVFP4_BLOCK_SIZE == 0 and shape[-2] * shape[-1] >= 2**22:
                yield Case(f"{name}, seed, amax given, {layout}, axis -2", args, {**kw, "axis": -2})


KINDS = ("bytes", "seed")
_SEED_STRIDES = ("row-major", "columns apart", "one column repeated")
RANDOM_STRIDES = (*STRIDES, *EXPERT_STRIDES)


def _possible(choice: Choice) -> bool:
    axis = axis_of(choice)
    if not amax_fits(choice, 16 if axis == -2 else 1, 16 if axis == -1 else 1):
        return False
    kind, strides, begins = (choice.get(name) for name in ("random", "random strides", "random begins"))
    if kind == "seed":
        return strides in (None, *_SEED_STRIDES)
    if strides in EXPERT_STRIDES and choice.get("experts", 2) is None:
        return False
    if strides == "none" and begins not in (None, "at 0"):
        return False
    told = {"rows", "cols", "experts"} <= choice.keys()
    if kind is None or not told:
        return True
    shape = shape_of(choice)
    if 0 in shape and begins not in (None, "at 0"):
        return False
    return strides is None or strides_fit(strides, shape)


def _make(choice: Choice) -> tuple[Tensor, ...]:
    x = made(choice, shape_of(choice), axis_of(choice) == -2)
    random, strides, begins = _random(choice["random"], x.shape), choice["random strides"], choice["random begins"]
    random = laid(random, strides, begins) if choice["random"] == "bytes" else laid(random[None], strides, begins)[0]
    return x, random, *amax_of(choice, x)


OPTIONS = {"axis": (-1, -2), "scale_layout": SCALE_LAYOUTS}
DIMENSIONS = {
    **STACK,
    "rows": (0, 1, 48, 161, 256, 1056, 4128),
    "cols": (0, 1, 48, 161, 256, 1056, 4128),
    "random": KINDS,
    "random strides": RANDOM_STRIDES,
    "random begins": BEGINS,
    "amax": AMAX,
    "amax strides": AMAX_STRIDES,
    "amax begins": BEGINS,
}
_SEED = {"random": "seed", "random strides": "row-major", "random begins": "at 0"}
_GIVEN = {"amax": "its own", "amax strides": "dense", "amax begins": "at 0"}
_NONE = {"amax": "not given", "amax strides": "none", "amax begins": "at 0"}
ALSO = [{**choice, **_GIVEN} for choice in REPEATED]
ALSO += [
    {"experts": 9, "strides": strides, **_GIVEN}
    for strides in ("column-major", "one column repeated", "columns apart", "rows apart")
]
ALSO += [{"experts": 1, **_GIVEN}]
_BYTES = {"random": "bytes", "random begins": "at 0"}
ALSO += [
    {"experts": 257, "random strides": "column-major", **_BYTES},
    {"experts": 257, "random strides": "rows apart", **_BYTES},
    {"experts": 257, "random strides": "experts inside the rows", **_BYTES},
    {"experts": 257, "random strides": "one row repeated", **_BYTES},
    {"experts": 9, "strides": "one expert repeated", "random strides": "one row repeated", **_BYTES},
    {"experts": 9, "strides": "experts inside the rows", "random strides": "rows apart", **_BYTES},
    {"experts": 9, "strides": "one row repeated", "values": "finite", **_GIVEN},
    {"experts": 1, "random strides": "row-major", **_BYTES},
    {"experts": 9, "rows": 48, "cols": 4128, "random strides": "experts inside the rows", **_BYTES},
    {"experts": 9, "rows": 4128, "cols": 48, "random strides": "experts inside the rows", **_BYTES},
    {"experts": 9, "cols": 256, "random strides": "one expert repeated", **_BYTES},
    {"experts": 9, "rows": 48, "cols": 4128, "axis": -1, "random strides": "one expert repeated", **_BYTES},
    {"experts": 9, "rows": 4128, "cols": 48, "random strides": "one expert repeated", **_BYTES},
    {"experts": 9, "rows": 48, "cols": 4128, "random strides": "one row repeated", **_BYTES},
    {"experts": 9, "strides": "one expert repeated", "random strides": "rows apart", **_BYTES},
    {"experts": 9, "rows": 0, **_GIVEN},
    {"rows": 4128, "cols": 48, "random strides": "column-major", **_BYTES},
    {"experts": 9, "strides": "one expert repeated", "random strides": "experts inside the rows", **_BYTES},
    {"experts": 9, "strides": "row-major", "random strides": "experts inside the rows", **_BYTES},
    {"experts": 9, "cols": 256, "random strides": "one row repeated", **_BYTES},
    {"experts": 33, "random strides": "column-major", "amax": "its own", "amax strides": "apart", **_BYTES},
    {"experts": 9, "strides": "one expert repeated", "values": "finite", **_GIVEN},
]
BEYOND = [
    {**choice, **_SEED, **_NONE} for choice in (*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART)
]
SPACE = Space(DIMENSIONS, _make, OPTIONS, _possible, ALSO, hides, implied=("none",), beyond=BEYOND)
TOLD_BEFORE = ("random.rows", "random.cols", "random.experts", "random.rank", "random.shape")
_OF_MATRICES = r"(?:column-major|experts inside the rows|one expert repeated|one row repeated|rows apart)"
IMPOSSIBLE = (
    *of_blocks(16),
    (r"tensor_amax not given \| tensor_amax\..*", "there is no amax"),
    (r"x\.experts = 0 \| tensor_amax\..*", "there is no amax"),
    (r"(?:x\.experts = 1|x\.rank 2) \| tensor_amax\.strides .*", "one amax has no stride"),
    (r"random\.dtype int64 \| random\.strides " + _OF_MATRICES, "a seed and an offset are a vector"),
    (r"x\.(?:rows|cols|experts) = 0 \| random\.strides " + _OF_MATRICES, "there is no byte"),
    (r"x\.rows = 1 \| random\.strides " + _OF_MATRICES.replace("|one expert repeated", ""), "one row has no stride"),
    (r"x\.cols = 1 \| random\.strides (?:column-major|rows apart)", "one column has no stride"),
    (r"(?:x\.experts = 1|x\.rank 2) \| random\.strides .*experts? .*", "one expert has no stride"),
)
