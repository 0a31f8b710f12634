"""The cases of nvfp4_fake_quantize: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import every_exponent
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
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import turned
from mxspec.cases.nvfp4_quantize import (
    DIMENSIONS,
    OF_SQUARES,
    codes_and_ties,
    edge_blocks,
    multiples,
    scales_and_ties,
    small_matrices,
    ties_under_scales,
)
from mxspec.formats import E4M3FN, NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.nvfp4_quantize import BLOCKS
from mxspec.spec import Case, Shapes, normal, random_bits, random_normal, these
from mxspec.spec import given as given_tensor

EDGE = {"edge"}


def cases() -> Iterator[Case]:
    for i, (dtype, axis, block) in enumerate(product(checks.FLOAT_DTYPES, (-1, -2), BLOCKS)):
        kw: dict[str, Any] = {"axis": axis, "block": block}
        name = f"{str(dtype)[6:]}, axis {axis}, {block}"
        yield Case(f"random bit patterns, {name}", partial(_bits, dtype, i), kw, flags=EDGE)
        yield Case(f"96x160, {name}", given_tensor(random_normal, 96, 160, dtype=dtype, seed=i), kw)
        yield Case(f"3x48x80, {name}", partial(_stack, dtype, i), kw)
    for axis, block in product((-1, -2), BLOCKS):
        kw = {"axis": axis, "block": block}
        end = f"axis {axis}, {block}"
        ragged = (304, 336) if block == "16x16" else ((301, 416) if axis == -1 else (416, 301))
        one = (16, 16) if block == "16x16" else ((1, 16) if axis == -1 else (16, 1))
        yield Case(f"one block, {end}", given_tensor(random_normal, *one), kw, flags=EDGE)
        yield Case(f"ragged, {end}", given_tensor(random_normal, *ragged), kw)
        yield Case(f"transposed input, {end}", lambda: (random_normal(96, 160).mT,), kw)
        yield Case(f"every second column, {end}", lambda: (random_normal(96, 320)[:, ::2],), kw)
        yield Case(f"every second row, {end}", lambda: (random_normal(192, 64)[::2],), kw)
        yield Case(f"empty, {end}", given_tensor(torch.zeros, 0, 0), kw, flags=EDGE)
        yield Case(f"no experts, {end}", given_tensor(torch.zeros, 0, 16, 64), kw, flags=EDGE)
        yield Case(f"edge blocks, {end}", these(turned(edge_blocks(), axis)), kw, flags=EDGE)
        zeros = torch.where(normal(32, 48) < 0, -0.0, 0.0)
        yield Case(f"zeros of both signs, {end}", these(zeros), kw, flags=EDGE)
        yield Case(f"40 experts, {end}", lambda: (_of_magnitudes(random_normal(40, 32, 48)),), kw)
    for dtype in checks.FLOAT_DTYPES:
        name = str(dtype)[6:]
        for what, numbers in (
            ("every code and tie", codes_and_ties), ("every scale and tie", scales_and_ties),
            ("ties of codes under every scale", ties_under_scales),
        ):  # fmt: skip
            for axis in (-1, -2):
                x = turned(_alone(numbers()).to(dtype), axis)
                yield Case(f"{what}, {name}, axis {axis}", these(x), {"axis": axis}, flags=EDGE)
        squares = ties_under_scales().repeat_interleave(16, 0).to(dtype)
        yield Case(f"ties of codes under every scale, {name}, 16x16", these(squares), {"block": "16x16"}, flags=EDGE)
        for number in (torch.nan, torch.inf, -torch.inf):
            x = random_normal(3, 32, 48, dtype=dtype)
            x[1, 5, 17] = number
            for block in BLOCKS:
                yield Case(f"{number} in one matrix of three, {name}, {block}", these(x), {"block": block}, flags=EDGE)
    for shift in (-149, -140, -126, -117, -105, -60, 60, 120):
        x = (normal(32, 64) * 2.0 ** (shift // 2) * 2.0 ** (shift - shift // 2)).clamp(-torch.finfo(torch.float32).max)
        for block in BLOCKS:
            yield Case(f"magnitudes near 2^{shift}, {block}", these(x), {"block": block}, flags=EDGE)
            narrow = these(x.to(torch.bfloat16))
            yield Case(f"bfloat16 magnitudes near 2^{shift}, {block}", narrow, {"block": block}, flags=EDGE)
    for name, x in small_matrices():
        for block in BLOCKS:
            yield Case(f"{name}, {block}", these(x), {"block": block}, flags=EDGE)
    # Kernels that find the magnitudes and write the values at once do it side by side only for many matrices.
    yield Case("600 experts", lambda: (_of_magnitudes(random_normal(600, 16, 16)),), {"block": "16x16"})
    yield Case("every exponent", lambda: (every_exponent(E4M3FN),), flags=EDGE)
    yield Case("negated view", lambda: (torch.complex(normal(4, 64), normal(4, 64, seed=1)).conj().imag,), flags=EDGE)
    yield Case("no rows", given_tensor(torch.zeros, 0, 64), flags=EDGE)
    yield Case("no columns", given_tensor(torch.zeros, 4, 0), flags=EDGE)
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
    for axis in (-1, -2):
        yield Case(f"2^31 elements and more, axis {axis}", large, {"axis": axis}, flags={"large"})

    def refused(name, args, error, match, **kwargs):
        return Case(name, these(*args), kwargs, raises=error, match=match)

    x = torch.zeros(32, 64)
    yield refused("K = 100", (torch.zeros(4, 100),), ValueError, "K = 100 is not a multiple of 16, the block size")
    yield refused("M = 100", (torch.zeros(100, 32),), ValueError, "M = 100 is not a multiple", axis=-2)
    yield refused("N = 100", (torch.zeros(2, 100, 32),), ValueError, "N = 100 is not a multiple", block="16x16")
    yield refused("1-D", (torch.zeros(64),), ValueError, "2-D or 3-D")
    yield refused("float64", (x.double(),), TypeError, "torch.float64")
    yield refused("axis 0", (x,), ValueError, "axis = 0", axis=0)
    yield refused("1x32 blocks", (x,), ValueError, "block = '1x32'", block="1x32")


def _bits(dtype: torch.dtype, seed: int) -> tuple[Tensor]:
    """Random bit patterns, without NaN and Inf except in the last matrix of three."""
    x = random_bits(3, 32, 160, dtype=dtype, seed=seed)
    x[:2] = torch.where(x[:2].isfinite(), x[:2], 1.0)
    return (x,)


def _of_magnitudes(x: Tensor) -> Tensor:
    """The matrices of a stack, multiplied by powers of two. Their tensor scales are then different."""
    return x * torch.tensor([2.0 ** (e % 9) for e in range(len(x))], dtype=x.dtype)[:, None, None]


def _stack(dtype: torch.dtype, seed: int) -> tuple[Tensor]:
    return (_of_magnitudes(random_normal(3, 48, 80, dtype=dtype, seed=seed)),)


def _alone(blocks: Tensor) -> Tensor:
    """With a row in which 2688 is the largest magnitude, so that the tensor scale is 1."""
    return torch.cat([torch.full((1, blocks.shape[1]), 2688.0), blocks])


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*shapes.matrices, *shapes.experts):
        x, name = given_tensor(torch.randn, *shape, dtype=torch.bfloat16), "x".join(map(str, shape))
        if shape[-2] % NVFP4_BLOCK_SIZE == 0:
            yield Case(f"{name}, 16x16", x, {"block": "16x16"})
        if len(shape) == 2:
            yield Case(name, x)


def _possible(choice: Choice) -> bool:
    return fits(choice, *multiples(choice))


def _blind(choice: Choice) -> bool:
    """A NaN makes every value of its matrix the same."""
    return choice.get("values") in ("special", "special, Inf first", "bits")


def _make(choice: Choice) -> tuple[Tensor]:
    return (made(choice, shape_of(choice), axis_of(choice) == -2),)


SPACE = Space(
    {**STACK, "rows": DIMENSIONS["rows"], "cols": DIMENSIONS["cols"]},
    _make,
    {"axis": (-1, -2), "block": BLOCKS},
    _possible,
    [*REPEATED, *({"experts": 9, "strides": s} for s in ("column-major", "one column repeated", "rows apart"))],
    _blind,
    implied=("none",),
    decisive=("axis", "block"),
    beyond=[*PAST_A_GRID, EXPERTS_PAST_A_GRID, *LARGE_BOTH_WAYS, ONE_COLUMN_APART],
)
IMPOSSIBLE = (*of_blocks(16), OF_SQUARES)
