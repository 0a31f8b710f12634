"""Rows that came as codes: what the quantizers, the layers and all other ops read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mxspec
from mxspec.check import default_device
from mxspec.distributed._coded import Coded, rows_of
from mxspec.distributed._wire import Wire
from mxspec.nn import RECIPES, GroupedExperts

DEVICE = default_device()
M, D, HIDDEN = 304, 160, 128  # 128x1 blocks need a multiple of 16 rows
OFFS = torch.tensor([100, 100, 290], dtype=torch.int32, device=DEVICE)
FP8 = ["fp8_128", "fp8_128_pow2"]


def some_rows(dtype: torch.dtype = torch.bfloat16, finite: bool = True) -> Tensor:
    """Rows of all magnitudes below 2^126, with a row of zeros. If not finite, also NaN and Inf."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(M, D, generator=g) * 2.0 ** torch.randint(-140, 120, (M, 1), generator=g)
    x *= 2.0 ** torch.randint(-12, 1, (M, D), generator=g)
    x[5] = 0
    x[6, ::2] = -0.0
    if not finite:
        x[7, 3], x[8, 4] = torch.nan, -torch.inf
    return x.to(DEVICE, dtype)


def coded(recipe: str, x: Tensor, elem_dtype: torch.dtype = torch.float8_e4m3fn) -> Coded:
    wire = Wire(RECIPES[recipe], None, elem_dtype)
    rows = rows_of(wire.encode(x), wire, x.shape[1], x.dtype)
    assert isinstance(rows, Coded)
    return rows


def same_bytes(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(
        a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


MESSAGES = [(160, 176), (2048, 2176), (2880, 3072), (7168, 7424)]


@pytest.mark.parametrize(
    ("recipe", "width", "size"),
    [(recipe, *sizes) for recipe in ("fp8_128", "mxfp8_rceil") for sizes in MESSAGES] + [("fp8_128", 2032, 2096)],
)
def test_a_message_is_filled_up_with_zeros(recipe, width, size):
    """To a multiple of 16 bytes, or of 128 bytes for wide rows."""
    wire = Wire(RECIPES[recipe], None)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    message = wire.encode(x)
    codes, scale = wire.parts(message, width)
    used = width + scale.shape[1] * scale.element_size()
    assert message.shape == (3, size)
    assert not message[:, used:].any()
    quantize = mxspec.mx_quantize if recipe == "mxfp8_rceil" else mxspec.fp8_quantize_1x128
    assert same_bytes((codes, scale), quantize(x, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", FP8)
def test_fp8_quantizers_give_the_codes_that_came_and_requantize_them_along_the_tokens(recipe, dtype):
    x, option = some_rows(dtype, finite=False), {"scale_format": RECIPES[recipe].scale_format}
    if (recipe, dtype) == ("fp8_128", torch.float32):
        for saves in (True, False):
            wire = Wire(replace(RECIPES[recipe], save_weight_codes=saves), None)
            rows = rows_of(wire.encode(x), wire, D, dtype)
            assert type(rows) is Tensor
            assert same_bytes((rows,), (wire.decode(wire.encode(x), D, dtype),))
        return
    rows = coded(recipe, x)
    for major in ("k", "mn"):
        got = mxspec.fp8_quantize_1x128(rows, scale_major=major, **option)
        expected = mxspec.fp8_quantize_1x128(x, scale_major=major, **option)
        assert same_bytes(got, expected)
        assert got[1].stride() == expected[1].stride()
    columns = mxspec.fp8_quantize_k_groups(rows, OFFS, **option)
    assert same_bytes(columns, mxspec.fp8_quantize_k_groups(rows.values(), OFFS, **option))
    assert same_bytes(mxspec.fp8_quantize_rowcol_groups(rows, OFFS, **option), (*got, *columns))


@pytest.mark.parametrize("recipe", FP8)
def test_fp8_values_that_are_quantized_again_are_the_same_numbers(recipe):
    """So the matmuls of codes that came are those of one process, which quantizes the values of the codes."""
    x, option = some_rows(), {"scale_format": RECIPES[recipe].scale_format}
    rows = coded(recipe, x)
    back = [mxspec.fp8_quantize_1x128(t, **option) for t in (rows, rows.values())]
    numbers = [mxspec.fp8_dequantize(*each, out_dtype=torch.float32) for each in back]
    assert torch.equal(*numbers)
    assert torch.equal(back[0][0].view(torch.uint8), back[1][0].view(torch.uint8)) == (recipe == "fp8_128")


@pytest.mark.parametrize("elem_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_floor"])
def test_mx_codes_along_the_tokens_have_the_bytes_of_the_values(recipe, elem_dtype):
    x, options = some_rows(finite=False), {"scaling": RECIPES[recipe].scaling, "elem_dtype": elem_dtype}
    rows = coded(recipe, x, elem_dtype)
    for axis in (-2, -1):
        got, expected = (mxspec.mx_quantize_groups(t, OFFS, axis=axis, **options) for t in (rows, rows.values()))
        assert same_bytes(got, expected)


def test_only_the_quantizers_of_the_recipe_read_codes(monkeypatch):
    """Another quantizer, and other options, read values: the result is that of the values."""
    rows, called = coded("fp8_128_pow2", some_rows()), []
    values = rows.values()
    decode = Wire.decode
    monkeypatch.setattr(Wire, "decode", lambda *args: called.append(args) or decode(*args))
    pow2 = {"scale_format": "pow2"}
    assert type(mxspec.fp8_quantize_rowcol_groups(rows, OFFS, **pow2)[0]) is Tensor
    assert not called
    for op, args, options in [
        (mxspec.fp8_quantize_1x128, (), {"scale_format": "fp32"}),
        (mxspec.fp8_quantize_1x128, (), {"eps": 1e-3, **pow2}),
        (mxspec.fp8_quantize_1x128, (), {"axis": -2, **pow2}),
        (mxspec.fp8_quantize_rowcol_groups, (OFFS,), {"scale_format": "fp32"}),
        (mxspec.mx_quantize_groups, (OFFS,), {"axis": -2}),
        (torch.add, (1,), {}),
    ]:
        called.clear()
        got, expected = (op(t, *args, **options) for t in (rows, values))
        assert called
        pairs = [(got,), (expected,)] if isinstance(got, Tensor) else [got, expected]
        assert same_bytes(*pairs), (op, options)


def test_new_codes_along_the_tokens_may_have_other_options():
    """eps and scale_format belong to the new codes alone."""
    rows = coded("fp8_128_pow2", some_rows())
    got, expected = (mxspec.fp8_quantize_k_groups(t, OFFS, eps=1e-3) for t in (rows, rows.values()))
    assert same_bytes(got, expected)


def test_it_is_a_tensor_of_the_rows_shape_and_dtype():
    x = some_rows()[:32]
    rows = coded("fp8_128", x)
    assert (rows.shape, rows.dtype, rows.device, rows.stride()) == (x.shape, x.dtype, x.device, x.stride())
    for same in (rows.detach(), rows.view_as(x)):
        assert isinstance(same, Coded)
        assert same.message is rows.message
    assert torch.equal(rows.view(64, 80), rows.values().view(64, 80))
    assert torch.equal(rows + 0, rows.values())
    assert repr(rows).startswith("Coded((32, 160), torch.bfloat16, Recipe(format='fp8_128'")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", ["fp8_128_pow2", "fp8_128", "mxfp8_rceil"])
def test_experts_compute_with_codes_what_they_compute_with_their_values(recipe, dtype):
    if (recipe, dtype) == ("fp8_128", torch.float32):
        pytest.skip("such rows never stay codes")
    torch.manual_seed(0)
    layer = GroupedExperts(3, D, HIDDEN, recipe, device=DEVICE, dtype=dtype)
    rows = coded(recipe, torch.randn(M, D).to(DEVICE, dtype))
    gradient = coded(recipe, torch.randn(M, D).to(DEVICE, dtype))
    results = []
    for x, grad in ((rows, gradient), (rows.values(), gradient.values())):
        layer.zero_grad()
        given = x.detach().requires_grad_()
        out = layer(given, OFFS)
        out.backward(grad)
        assert type(given.grad) is Tensor
        results.append([out.detach(), given.grad, layer.w_gate_up.grad, layer.w_down.grad])
    assert all(map(torch.equal, *results))
