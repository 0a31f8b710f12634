"""Float8BlockwiseLinear alone: which products it computes, how often it quantizes, and its benchmark."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mxspec
from mxspec.nn import Float8BlockwiseLinear, cache_weights
from tests.helpers import DEVICE, ROOT, SIZES, layer, module_of, step, tokens

K, N = SIZES[Float8BlockwiseLinear]


def test_only_the_gradients_that_are_needed(monkeypatch):
    module, x = layer(Float8BlockwiseLinear), tokens(128, K)
    products = []
    gemm = mxspec.fp8_gemm
    monkeypatch.setattr(mxspec, "fp8_gemm", lambda *a, **kw: products.append(a[2].shape) or gemm(*a, **kw))
    module(x.detach()).sum().backward()
    assert products == [(N, K), (K, 128)]  # forward, wgrad
    products.clear()
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert products == [(N, K), (K, N)]  # forward, dgrad


def _count(monkeypatch) -> list[tuple[int, ...]]:
    quantized = []
    quantize = mxspec.fp8_quantize_128x128
    monkeypatch.setattr(mxspec, "fp8_quantize_128x128", lambda w, **kw: quantized.append(w.shape) or quantize(w, **kw))
    return quantized


def test_a_weight_is_quantized_once_a_forward_or_once_a_block(monkeypatch):
    quantized = _count(monkeypatch)
    model = nn.Sequential(layer(Float8BlockwiseLinear), nn.ReLU(), Float8BlockwiseLinear(N, K, device=DEVICE))
    x = tokens(60, K)
    once = step(model[0], x)
    assert quantized == [(N, K)]
    quantized.clear()
    with cache_weights(model):
        assert quantized == [(N, K), (K, N)]
        assert all(map(torch.equal, step(model[0], x), once))
        model(x).sum().backward()
        assert len(quantized) == 2
    model(x)
    assert len(quantized) == 4


def test_its_benchmark_compares_before_it_times(capsys, monkeypatch):
    benchmark = module_of(ROOT / "benchmarks" / "linear.py")
    pace = benchmark.Pace(0, 1, 1)
    assert benchmark.measure(128, K, N, DEVICE, pace) > 0
    assert "wgrad" in capsys.readouterr().out
    monkeypatch.setattr(benchmark, "MIN_SQNR_DB", 60)
    with pytest.raises(AssertionError, match=r"y: 2\d\.\d dB against bfloat16; needs 60"):
        benchmark.measure(128, K, N, DEVICE, pace)
