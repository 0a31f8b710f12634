"""The formats implemented from docs/formats alone give every byte that the references give.

`from_the_pages.py` is that implementation, and imports nothing of mxspec.
"""

import ast
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from mxspec import cases, check, dispatch, layouts, vectors
from mxspec.spec import answer_of
from tests.formats import from_the_pages as pages
from tests.helpers import COMPLETE, generated

CPU = torch.device("cpu")
TAKEN_FROM_TORCH = {"Tensor", "dtype", "from_numpy", "strided"}  # and the names of dtypes


@pytest.fixture(autouse=True)
def arithmetic_without_warnings():
    with np.errstate(all="ignore"):  # overflow and NaN are results like all others here
        yield


@pytest.mark.turns(8)
@pytest.mark.parametrize("op", vectors.ops())
def test_every_case_that_is_written_by_hand(op):
    """With poisoned memory around inputs and outputs, and strides that are not the case's own."""
    by_hand = check.cases_of(op, lambda case: "generated" not in case.flags)
    results = [(case, check.check_case(op, case, getattr(pages, op), CPU)) for case in by_hand]
    for case, result in results:  # a case of gigabytes is skipped, as for the references
        assert result.status == ("skipped" if "large" in case.flags else "passed"), result.message
    assert len(results) > 10


@pytest.mark.turns(4)
@pytest.mark.parametrize("op", vectors.ops())
def test_every_case_that_is_generated(op):
    answered = refused = 0
    for case in generated(op):
        args = case.args()
        if case.raises:
            with pytest.raises(pages.Refused):
                getattr(pages, op)(*args, **case.kwargs)
            refused += 1
            continue
        got = getattr(pages, op)(*args, **case.kwargs)
        got = got if isinstance(got, tuple) else (got,)
        wanted = answer_of(dispatch.reference(op), args, case.kwargs)
        assert check.difference(got, wanted) is None, case.name
        if cases.moves_bytes(op):  # NaN too
            assert np.array_equal(pages.raw(got[0]), pages.raw(wanted[0])), case.name
        answered += 1
    assert answered > (50 if COMPLETE else 6)
    assert refused > 5


@pytest.mark.parametrize("eps", [1e-35, 3e-7, 0.3, 1, 1e35])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_fp8_at_the_bounds_of_eps(eps, scale_format):
    """Subnormal elements reach codes only under the smallest eps, and eps is rounded to fp32 before its use."""
    x = torch.tensor([[1.1e-38, -5e-39, 3e-40, 1e-45], [0.0, -0.0, 1e-3, -1e34]]).repeat(1, 32)
    got = pages.fp8_quantize_1x128(x, eps=eps, scale_format=scale_format)
    reference = dispatch.reference("fp8_quantize_1x128")
    assert check.difference(got, answer_of(reference, (x,), {"eps": eps, "scale_format": scale_format})) is None
    if eps == 1e-35:
        assert pages.raw(got[0])[0, :2].tolist() == ([0x30, 0xA6] if scale_format == "fp32" else [0x2F, 0xA6])


SHAPES = [(1, 1), (5, 6), (128, 4), (129, 5), (260, 13), (3, 5, 6), (2, 130, 9)]


@pytest.mark.parametrize(("name", "shape"), [*product(pages.OTHER_LAYOUTS, SHAPES)])
def test_other_layouts(name, shape):
    in_fp32 = torch.float32 in layouts.LAYOUTS[name].dtypes
    bits = np.random.default_rng(0).integers(1, 2**32 if in_fp32 else 256, shape)
    plain = bits.astype(np.uint32 if in_fp32 else np.uint8)
    memory, shape, strides = pages.other_layout(plain, name)
    stored = layouts.convert(pages.tensor(plain, torch.float32 if in_fp32 else torch.float8_e8m0fnu), to=name)
    assert (stored.shape, stored.stride()) == (shape, strides)
    if strides[-1] != 1 and name in ("mn_major_tma_aligned", "deepgemm_packed"):
        assert strides[-1] * stored.element_size() % 16 == 0
    assert bytes(stored.untyped_storage()) == memory.tobytes()


def test_the_table_of_other_layouts_is_whole():
    assert {"plain", "blocked", "blocked_m_groups", "blocked_k_groups", *pages.OTHER_LAYOUTS} == set(layouts.LAYOUTS)


def test_scales_change_their_dtype_exactly():
    byte = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scale = layouts.convert(pages.tensor(byte, torch.float8_e8m0fnu), to="plain", dtype=torch.float32)
    wanted = pages.tensor(pages.fp32_of(byte), torch.float32)
    assert check.difference((wanted,), (scale,)) is None
    assert np.array_equal(pages.e8m0_of(pages.fp32_of(byte)), byte)
    back = layouts.convert(wanted, to="plain", dtype=torch.float8_e8m0fnu)
    assert np.array_equal(pages.raw(back), byte)
    for number in (0.0, -1.0, 3.0, 2.0**-128, float("inf"), 1 + 2.0**-23):
        with pytest.raises(pages.Refused):
            pages.e8m0_of(np.array([[number]], np.float32))
        with pytest.raises(ValueError, match="no power of two"):
            layouts.convert(torch.tensor([[number]]), to="plain", dtype=torch.float8_e8m0fnu)


def test_the_implementation_knows_the_pages_alone():
    """It imports nothing of mxspec, and torch gives it tensors and dtypes but no arithmetic."""
    tree = ast.parse(Path(pages.__file__).read_text(encoding="utf-8"))
    modules, of_torch = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            of_torch.add(node.attr)
    assert modules == {"__future__", "collections.abc", "dataclasses", "numpy", "torch", "typing"}
    assert {name for name in of_torch if not isinstance(getattr(torch, name), torch.dtype)} <= TAKEN_FROM_TORCH
