"""MXLinear alone: which of its tensors it reads, quantizes and keeps, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mxspec
from mxspec.check import sqnr_db
from mxspec.nn import Float8BlockwiseLinear, MXLinear, _formats, cache_weights
from tests.helpers import DEVICE, SIZES, layer, step, tokens

K, N = SIZES[MXLinear]


@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_the_scales_layout_is_of_no_consequence(layout, monkeypatch):
    module, x = layer(MXLinear), tokens(45, K)
    before = step(module, x)
    monkeypatch.setattr(_formats, "_SCALE_LAYOUT", layout)
    for got, expected in zip(step(module, x), before, strict=True):
        assert sqnr_db(got, expected) >= 70


def test_golden_by_hand():
    module = MXLinear(32, 32, bias=False, device=DEVICE)
    with torch.no_grad():
        module.weight.zero_()
        module.weight[0] = 1.0625  # halfway between the codes 1 and 1.125; the code of 1 is even
    x = torch.ones(1, 32, device=DEVICE)
    x[0, 0] = 500  # rceil gives the scale 2: 1 / 2 is exact, and 500 / 2 = 250 is rounded to 256
    x.requires_grad_()
    out = module(x)
    out[0, 0].backward(torch.tensor(3.0, device=DEVICE))
    assert out[0, :2].tolist() == [512 + 31, 0]
    assert x.grad[0, :2].tolist() == [3, 3]  # 3 * 1
    assert module.weight.grad[:2, :2].tolist() == [[1536, 3], [0, 0]]  # 3 * 512 and 3 * 1


def calls(monkeypatch) -> list[tuple[str, tuple[int, ...]]]:
    """A list that records the ops that run from now on: the name, and the first operand's shape."""
    seen = []

    def watched(name, op):
        return lambda *a, **kw: seen.append((name, tuple(a[0].shape))) or op(*a, **kw)

    for name in ("mx_quantize", "mx_quantize_rowcol", "mx_gemm"):
        monkeypatch.setattr(mxspec, name, watched(name, getattr(mxspec, name)))
    return seen


def test_each_tensor_is_read_once_and_only_what_is_needed_is_computed(monkeypatch):
    module, x, seen = layer(MXLinear), tokens(64, K), calls(monkeypatch)

    def ran(x):
        seen.clear()
        module(x).sum().backward()
        return list(seen)

    rowcol, rows, columns, gemm = "mx_quantize_rowcol", "mx_quantize", "mx_quantize", "mx_gemm"
    forward = [(rowcol, (N, K)), (rowcol, (64, K)), (gemm, (64, K))]
    assert ran(x) == [*forward, (rowcol, (64, N)), (gemm, (64, N)), (gemm, (N, 64))]
    assert ran(x.detach()) == [*forward, (columns, (64, N)), (gemm, (N, 64))]
    module.weight.requires_grad_(False)
    assert ran(x) == [(rowcol, (N, K)), (rows, (64, K)), (gemm, (64, K)), (rows, (64, N)), (gemm, (64, N))]


def test_of_x_a_byte_an_element_is_kept():
    module, x = layer(MXLinear, dtype=torch.bfloat16, bias=False), tokens(64, K, dtype=torch.bfloat16)

    def saved(x):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            module(x)
        return [(t.dtype, t.nbytes) for t in kept if t.dtype != torch.float8_e8m0fnu]

    of_x, of_weight = (torch.float8_e4m3fn, 64 * K), (torch.float8_e4m3fn, N * K)
    backend = (torch.int64, 8)  # the index of the backend, for checkpointing
    assert saved(x) == [of_x, of_weight, backend]
    assert saved(x.detach()) == [of_x, backend]
    module.weight.requires_grad_(False)
    assert saved(x) == [of_weight, backend]


def test_weights_of_either_kind_are_quantized_once_a_block(monkeypatch):
    model = nn.Sequential(layer(MXLinear), nn.ReLU(), MXLinear(N, 128, device=DEVICE))
    model.append(Float8BlockwiseLinear(128, 128, device=DEVICE))
    x, seen = tokens(32, K), calls(monkeypatch)
    once = model(x)
    assert [call for call in seen if call[1] in ((N, K), (128, N))] == [
        ("mx_quantize_rowcol", (N, K)),
        ("mx_quantize_rowcol", (128, N)),
    ]
    with cache_weights(model):
        seen.clear()
        assert torch.equal(model(x), once)
        model(x).sum().backward()
        assert ("mx_quantize_rowcol", (N, K)) not in seen
        assert model[3]._cached is not None
    assert model[0]._cached is model[3]._cached is None


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_captured_in_a_cuda_graph_it_gives_the_same_bits():
    module, x = layer(MXLinear, dtype=torch.bfloat16), tokens(96, K, dtype=torch.bfloat16)
    expected = step(module, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphed = torch.cuda.make_graphed_callables(module, (x.detach().requires_grad_(),))
        got = step(graphed, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, expected))
