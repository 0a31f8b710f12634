"""Layers whose widths are no multiples of 128: the last FP8 block is shorter, in the forward and in both gradients."""

import pytest
import torch
from torch import nn

from mxspec.nn import Float8BlockwiseLinear, GroupedExperts, convert, fp8_grouped_mm, watch
from tests.helpers import ends


def sqnr_db(got, expected):
    got, expected = got.detach().double(), expected.detach().double()
    return 10 * torch.log10(expected.square().sum() / (got - expected).square().sum())


@pytest.mark.parametrize(("N", "K"), [(144, 208), (16, 16), (48, 2880)])
def test_a_linear(N, K):
    torch.manual_seed(0)
    plain = nn.Linear(K, N)
    layer = Float8BlockwiseLinear.from_linear(plain)
    results = []
    for by in (plain, layer):
        x = torch.randn(40, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        by.zero_grad()
        by(x).square().sum().backward()
        results.append((by(x), x.grad, by.weight.grad.clone()))
    assert all(sqnr_db(got, expected) > 20 for expected, got in zip(*results, strict=True))


def test_a_shorter_block_has_a_scale_of_its_own():
    """Features 128 to 143 are 2^20 times as large as the others. They do not take the others' precision."""
    torch.manual_seed(0)
    layer = Float8BlockwiseLinear(144, 32, bias=False)
    x = torch.randn(8, 144)
    x[:, 128:] *= 2.0**20
    with torch.no_grad():
        layer.weight[:, 128:] = 0
        assert sqnr_db(layer(x), x @ layer.weight.mT) > 20


def test_grouped_matmuls_and_experts():
    torch.manual_seed(0)
    x, w, offs = torch.randn(50, 144), torch.randn(3, 80, 144), ends(20, 20, 45)
    out, expected = fp8_grouped_mm(x, w, offs), torch.zeros(50, 80)
    for e, (begin, end) in enumerate(((0, 20), (20, 20), (20, 45))):
        expected[begin:end] = x[begin:end] @ w[e].mT
    assert sqnr_db(out, expected) > 20
    assert not out[45:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts(dtype):
    """The fused ops of SwiGLU run in bfloat16, the plain ops in float32."""
    results = []
    for recipe in ("fp8_128", None):
        torch.manual_seed(0)
        experts = GroupedExperts(2, 144, 80, recipe="fp8_128", dtype=dtype)
        x = torch.randn(50, 144).to(dtype).requires_grad_()
        if recipe is None:
            parts = []
            for e, (begin, end) in enumerate(((0, 33), (33, 50))):
                gate, up = (x[begin:end].float() @ w[e].float().mT for w in (experts.w_gate, experts.w_up))
                parts.append((nn.functional.silu(gate) * up) @ experts.w_down[e].float().mT)
            out = torch.cat(parts)
        else:
            out = experts(x, ends(33, 50)).float()
        out.square().sum().backward()
        results.append((out, x.grad, experts.w_gate_up.grad, experts.w_down.grad))
    assert all(sqnr_db(got, expected) > 18 for got, expected in zip(*results, strict=True))


def test_convert_and_watch_count_the_elements_that_exist():
    model = nn.Sequential(nn.Linear(144, 48), nn.Linear(48, 100))
    report = convert(model, "fp8_128")
    assert report.swapped == {"0": "Float8BlockwiseLinear"}
    assert "out_features = 100 must be a multiple of 16" in report.left["1"]
    with watch(model) as watched:
        model(torch.randn(8, 144)).sum().backward()
    assert "0" in str(watched)
