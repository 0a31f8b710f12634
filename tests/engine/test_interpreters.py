"""Corrections to Triton's interpreter that no case of an op shows by itself."""

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from mxspec.interpreters.accelerations import distinct_rows
from mxspec.interpreters.corrections import fused_multiply_add


def rounded_once(x, y, z):
    """The fp32 nearest to `x * y + z`, ties to even, by exact arithmetic."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.uint32)) & 1))


def test_a_fused_multiply_add_is_rounded_once():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    z = np.concatenate([-(x * y)[:1000], rng.standard_normal(1000).astype(np.float32)])  # a residual; a plain sum
    expected = np.array([rounded_once(*v) for v in zip(x, y, z, strict=True)])
    assert (fused_multiply_add(x, y, z) == expected).all()
    assert (x * y + z != expected).any()


def test_a_sum_that_float64_would_round_onto_a_tie():
    """1 + 2^-24 + 2^-60 is above the tie between 1 and its neighbour, but float64 rounds it onto the tie."""
    x, y, z = np.float32([2.0**-24]), np.float32([1 + 2.0**-23]), np.float32([1.0])
    assert fused_multiply_add(x, y, z)[0] == np.float32(1 + 2.0**-23)
    y = np.float32([2.0**-24])
    assert fused_multiply_add(np.float32([2.0**-36]), y, np.float32([1 + 2.0**-23]))[0] == np.float32(1 + 2.0**-23)


def test_a_sum_that_is_subnormal_in_fp32_is_rounded_once():
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(2000).astype(np.float32) * np.float32(2.0**-70) for _ in range(2))
    z = rng.integers(-3, 4, 2000).astype(np.float32) * np.float32(2.0**-149)
    assert (fused_multiply_add(x, y, z) == np.array([rounded_once(*v) for v in zip(x, y, z, strict=True)])).all()


def test_special_values():
    x = np.float32([np.inf, np.nan, 3e38, 0.0])
    got = fused_multiply_add(x, np.float32([1.0, 1.0, 10.0, 0.0]), np.float32([-np.inf, 0.0, 0.0, -0.0]))
    assert np.isnan(got[:2]).all()
    assert got[2:].tolist() == [np.inf, 0.0]


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize(("low", "high"), [(0, 3), (0, 50), (-4, 4), (0, 2**40)])
def test_distinct_rows_are_those_of_torch(low, high, columns):
    rows = torch.randint(low, high, (300, columns), generator=torch.Generator().manual_seed(0))
    rows[100:200] = rows[:100]  # rows that occur twice
    assert torch.equal(distinct_rows(rows, dim=0), torch.unique(rows, dim=0))
    assert torch.equal(distinct_rows(rows), torch.unique(rows))


MASK = """
import torch, triton, triton.language as tl
from mxspec import interpreters

interpreters.install()

@triton.jit
def fill(out, wanted, N: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64) < wanted
    tl.store(out + tl.program_id(0) * N + tl.arange(0, N), 1, mask=mask)
    print(mask.handle.dtype, tl.broadcast_to(mask, (N,)).handle.data.dtype)

out = torch.zeros(8, dtype=torch.int32)
fill[(2,)](out, 1, N=4)
print(out.tolist())
"""


def test_a_comparison_of_numbers_is_a_mask(tmp_path):
    (tmp_path / "mask.py").write_text(MASK)  # Triton reads a kernel's source from its file
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, tmp_path / "mask.py"], env=environment, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["int1 bool", "int1 bool", "[1, 1, 1, 1, 0, 0, 0, 0]"], run.stderr


OPERATORS = """
import itertools, numpy as np
from triton.runtime import interpreter
from mxspec.interpreters import accelerations, corrections, operators

corrections.correct(interpreter)
accelerations.accelerate(interpreter)
semantic, tl = interpreter.interpreter_semantic, interpreter.tl
before = {name: getattr(semantic, name) for name in operators.NAMES}
operators.accelerate_operators(interpreter)
rng = np.random.default_rng(0)
scalars = [tl.int1, tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.uint64, tl.float16, tl.bfloat16, tl.float32]

def made(dtype, shape):
    kind = interpreter._get_np_dtype(dtype)
    values = rng.integers(0, 256, (*(shape or (1,)), kind.itemsize), dtype=np.uint8).view(kind)[..., 0]
    values = values.astype(np.uint8) & 1 == 1 if kind == bool else values
    return tl.tensor(interpreter.TensorHandle(values, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)

def bits(call, *operands):
    try:
        out = call(*operands)
    except Exception as error:
        return type(error).__name__
    values = out.handle.data
    nan = values != values
    return str(out.type), str(out.handle.dtype), values.dtype, values.shape, nan.tobytes(), values[~nan].tobytes()

compared = 0
with np.errstate(all="ignore"):
    for name, left, right in itertools.product(operators.NAMES, scalars, [*scalars, 3, -1, 0, 0.5, -0.0, True]):
        options = {"add": [False], "sub": [False], "mul": [False]}.get(name, [])
        options = options or [tl.PropagateNan.NONE] * name.endswith("imum")
        for shapes in [((4, 8), (4, 8)), ((4, 1), (1, 8)), ((4, 8), ()), ((), ())]:
            for _ in range(3):  # the second and third calls repeat what the first call did
                operands = [made(d, s) if isinstance(d, tl.dtype) else d for d, s in zip((left, right), shapes)]
                for order in (operands, operands[::-1]):
                    expected = bits(before[name], *order, *options)
                    got = bits(getattr(semantic, name), *order, *options)
                    assert got == expected, (name, left, right, shapes, got, expected)
                    compared += 1
print(compared)
"""


def test_operators_give_the_bits_of_tritons(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", OPERATORS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
