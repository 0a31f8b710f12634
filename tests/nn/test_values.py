"""MXFP8 of token groups by way of bf16 values, as a Hopper runs it.

The tests replace the check of the GPU, so that every machine counts as a Hopper.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec import dispatch
from mxspec.check import default_device, sqnr_db
from mxspec.nn import RECIPES, GroupedExperts, _formats, cache_weights, mx_grouped_mm
from mxspec.nn._bf16 import gemm_bf16, wgrad_bf16
from tests.helpers import ends, on_hopper

BF16, DEVICE = torch.bfloat16, default_device()
E5M2 = replace(RECIPES["mxfp8_floor"], grad_dtype=torch.float8_e5m2)
K, N = 64, 96  # dim and hidden_dim
# Both ways multiply the same MXFP8 values and round the sums to bf16, so only the order of the sums differs. A bf16
# rounding alone is 56 dB, and a step has several in a row.
SAME_VALUES_DB = 40


@pytest.fixture
def by_values(monkeypatch):
    monkeypatch.setattr(_formats, "_is_hopper", lambda device: True)


def experts(recipe="mxfp8_rceil", dtype=BF16):
    torch.manual_seed(3)
    return GroupedExperts(3, K, N, recipe, device=DEVICE, dtype=dtype)


def tokens(M=160, width=K, *of_groups, dtype=BF16):
    torch.manual_seed(0)
    x = torch.randn(M, width, device=DEVICE, dtype=dtype, requires_grad=True)
    return x, ends(*(of_groups or (73, 73, 156))).to(DEVICE)


def trained(module, x, offs):
    x.grad = None
    module.zero_grad()
    out = module(x, offs)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def read_back(x, axis, offs=None, elem_dtype=torch.float8_e4m3fn, scaling="rceil"):
    """The bf16 values of x's codes, each group of tokens by itself, by the ops that quantize and dequantize."""
    read = []
    for part in [x] if offs is None else torch.tensor_split(x, offs.cpu().long()):
        missing = -part.shape[-2] % 32 if axis == -2 else 0
        padded = torch.nn.functional.pad(part, (0, 0, 0, missing))
        codes = mxspec.mx_quantize(padded, axis=axis, elem_dtype=elem_dtype, scaling=scaling, backend="reference")
        values = mxspec.mx_dequantize(*codes, axis=axis, backend="reference")
        read.append(values[..., : part.shape[-2], :])
    return torch.cat(read, -2)


def by_hand(x, w, offs, dy, recipe):
    """The output and both gradients of one grouped matmul of values."""
    of_x = {"scaling": recipe.scaling}
    of_dy = {"scaling": recipe.scaling, "elem_dtype": recipe.grad_dtype}
    out = gemm_bf16(read_back(x, -1, **of_x), read_back(w, -1, **of_x).mT, offs)
    dx = gemm_bf16(read_back(dy, -1, **of_dy), read_back(w, -2, **of_x), offs)
    return out, dx, wgrad_bf16(read_back(dy, -2, offs, **of_dy), read_back(x, -2, offs, **of_x), offs)


@pytest.mark.parametrize("recipe", [RECIPES["mxfp8_rceil"], E5M2], ids=["rceil", "floor, e5m2 gradients"])
@pytest.mark.parametrize("sizes", [(73, 73, 126), (0, 0, 130), (1, 34, 99)], ids=str)
def test_a_grouped_matmul_multiplies_the_values_of_the_codes(by_values, recipe, sizes):
    (x, offs), w = tokens(130, K, *sizes), torch.randn(3, N, K, device=DEVICE, dtype=BF16, requires_grad=True)
    dy = torch.randn(130, N, device=DEVICE, dtype=BF16)
    out = mx_grouped_mm(x, w, offs, recipe)
    out.backward(dy)
    expected = by_hand(x.detach(), w.detach(), offs, dy, recipe)
    for what, got, hand in zip(("out", "dx", "dw"), (out.detach(), x.grad, w.grad), expected, strict=True):
        assert got.equal(hand), what
    assert not out[sizes[-1] :].any()
    assert not x.grad[sizes[-1] :].any()
    assert not w.grad[1].any() or sizes[1] > sizes[0]


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_floor"])
def test_experts_by_values_are_the_experts_by_codes(by_values, monkeypatch, recipe):
    module, (x, offs) = experts(recipe), tokens()
    values = trained(module, x, offs)
    monkeypatch.setattr(_formats, "_is_hopper", lambda device: False)
    codes = trained(module, x, offs)
    for got, expected in zip(values, codes, strict=True):
        assert sqnr_db(got, expected) > SAME_VALUES_DB


def test_nothing_is_quantized_to_codes(by_values, monkeypatch):
    ran = []
    for op in dispatch.ops():
        wrapped = getattr(mxspec, op)
        monkeypatch.setattr(mxspec, op, lambda *a, op=op, run=wrapped, **k: ran.append(op) or run(*a, **k))
    module, (x, offs) = experts(), tokens()
    trained(module, x, offs)
    assert [op for op in ran if op != "zero_unused_"] == [
        "mx_fake_quantize_rowcol_groups",  # w_gate_up
        "mx_fake_quantize_rowcol_groups",  # w_down
        "mx_fake_quantize_rowcol_groups",  # x
        "swiglu",
        "mx_fake_quantize_rowcol_groups",
        "mx_fake_quantize_rowcol_groups",  # the gradient of the output
        "swiglu_backward",
        "mx_fake_quantize_rowcol_groups",
    ]


def test_weights_are_held_as_values(by_values):
    module, (x, offs) = experts(), tokens()
    expected = trained(module, x, offs)
    in_fp32 = module(x.float(), offs)
    with cache_weights(module):
        assert all(map(torch.equal, trained(module, x, offs), expected))
        assert module(x.float(), offs).equal(in_fp32), "tokens in fp32 need codes, which are made anew"
    assert module._cached is None


def test_codes_that_are_held_stay_codes(monkeypatch):
    module, (x, offs) = experts(), tokens()
    monkeypatch.setattr(_formats, "_is_hopper", lambda device: False)
    with cache_weights(module):
        expected = module(x, offs)
        monkeypatch.setattr(_formats, "_is_hopper", lambda device: True)
        assert module(x, offs).equal(expected)
        assert module.explain().endswith("multiplies codes: cache_weights holds codes")


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_or_compiled_it_gives_the_same_bits(by_values, compiled):
    torch._dynamo.reset()
    module, (x, offs) = experts(), tokens()
    expected = trained(module, x, offs)
    again = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x.grad = None
    module.zero_grad()
    out = again(x, offs) if compiled else checkpoint(again, x, offs, use_reentrant=False)
    out.square().sum().backward()
    got = [out.detach(), x.grad, *(p.grad for p in module.parameters())]
    assert all(map(torch.equal, got, expected))


def test_frozen_weights_get_no_gradient(by_values):
    module, (x, offs) = experts(), tokens()
    expected = trained(module, x, offs)
    module.w_down.requires_grad_(False)
    got = trained(module, x, offs)
    assert got[3] is None
    assert all(map(torch.equal, got[:3], expected[:3]))
    with torch.no_grad():
        assert module(x, offs).equal(expected[0])


def test_explain_says_which_way_and_why(by_values, monkeypatch):
    module = experts()
    assert module.explain() == "GroupedExperts: mxfp8 multiplies bf16 values, because Hopper has no MX tensor cores"
    assert "multiplies codes: the tokens are torch.float32" in module.explain(torch.float32)
    assert "weights torch.float32" in experts(dtype=torch.float32).explain()
    assert "multiplies wgrad in bfloat16" in experts("mxfp8_rceil_wgrad_bf16").explain()
    assert experts("bf16").explain() == "GroupedExperts: bf16 quantizes nothing and multiplies bfloat16"
    with mxspec.use_backend("reference"):
        assert module.explain().endswith("multiplies codes: the backend is 'reference'")
    many = GroupedExperts(1024, 32, 32, device="meta", dtype=BF16)
    assert many.explain().endswith("1024 experts; PyTorch's grouped matmul takes up to 1023")
    of_128 = GroupedExperts(2, 128, 128, "fp8_128", dtype=BF16)
    assert of_128.explain().endswith("fp8_128 multiplies codes: the recipe's format is fp8_128")
    monkeypatch.setattr(_formats, "_is_hopper", lambda device: False)
    assert module.explain().endswith("multiplies codes: the GPU is no Hopper")


@on_hopper
def test_a_hopper_multiplies_values_by_default():
    module, (x, offs) = experts(), tokens(1024, K, 100, 100, 1000)
    assert "multiplies bf16 values" in module.explain()
    with torch.no_grad():
        first = gemm_bf16(read_back(x, -1), read_back(module.w_gate_up, -1).mT, offs)
        hidden = mxspec.swiglu(*first.chunk(2, -1), backend="reference")
        assert module(x, offs).equal(gemm_bf16(read_back(hidden, -1), read_back(module.w_down, -1).mT, offs))
