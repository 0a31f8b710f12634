"""The FP8 Linear: its three products, what it takes, and what it says where it takes something not."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec.check import default_device, sqnr_db
from mxspec.nn import Float8BlockwiseLinear, cache_weights

DEVICE = default_device()
K, N = 256, 384


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> Float8BlockwiseLinear:
    torch.manual_seed(0)
    return Float8BlockwiseLinear(K, N, bias, DEVICE, dtype)


def tokens(*lead: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*lead, K, device=DEVICE, dtype=dtype, requires_grad=True)


def gradient(out: torch.Tensor) -> torch.Tensor:
    """The output's gradient, of many magnitudes."""
    torch.manual_seed(2)
    return (torch.randn(out.shape, device=DEVICE) * torch.linspace(0.01, 3, N, device=DEVICE)).to(out.dtype)


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients of one step."""
    x.grad = None
    module.zero_grad()
    out = module(x)
    out.backward(gradient(out))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def dequantized_step(linear: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """What the three matmuls are to give: products, in fp64, of operands that were quantized and read back."""

    def back(values: torch.Tensor, axis: int = -1) -> torch.Tensor:
        missing = -values.shape[0] % 128 if axis == -2 else 0
        padded = nn.functional.pad(values, (0, 0, 0, missing))
        codes = mxspec.fp8_quantize_1x128(padded, axis=axis, backend="reference")
        read = mxspec.fp8_dequantize(*codes, axis=axis, out_dtype=torch.float32, backend="reference")
        return read[: values.shape[0]].double()

    x, grad, weight = x.detach().view(-1, K), grad.view(-1, N), linear.weight.detach()
    w = mxspec.fp8_dequantize(
        *mxspec.fp8_quantize_128x128(weight, backend="reference"), out_dtype=torch.float32, backend="reference"
    ).double()
    return [back(x) @ w.mT, back(grad) @ w, back(grad, -2).mT @ back(x, -2)]


@pytest.mark.parametrize("count", [1, 77, 128, 300])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_the_three_products_are_those_of_the_dequantized_operands(count, x_dtype, dtype):
    module, x = layer(dtype, bias=False), tokens(count, dtype=x_dtype)
    out, grad_x, grad_w = step(module, x)
    assert [t.dtype for t in (out, grad_x, grad_w)] == [x_dtype, x_dtype, dtype]
    for got, expected in zip((out, grad_x, grad_w), dequantized_step(module, x, gradient(out)), strict=True):
        # Rounded to bfloat16 once at the end: 55 dB. In fp32 the kernels' sums give 70 dB and more.
        assert sqnr_db(got, expected) >= (70 if got.dtype == torch.float32 else 50)


def test_near_the_unquantized_linear():
    module, x = layer(), tokens(300)
    plain = nn.Linear(K, N, device=DEVICE)
    plain.load_state_dict(module.state_dict())
    for got, expected in zip(step(module, x), step(plain, x), strict=True):
        assert sqnr_db(got, expected) >= 25


def test_any_leading_dimensions_and_no_tokens():
    module, x = layer(), tokens(6, 50)
    flat, split = step(module, x)[0], module(x.view(2, 3, 50, K))
    assert torch.equal(flat, split.view(6, 50, N))
    assert torch.equal(module(x[0, 0]), module(x[0, :1])[0])
    out, grad_x, grad_w, grad_bias = step(module, tokens(0))
    assert (out.shape, grad_x.shape) == ((0, N), (0, K))
    assert not grad_w.any()
    assert not grad_bias.any()


def test_an_expanded_gradient_and_a_transposed_input():
    module, x = layer(bias=False), tokens(128)
    module(x).sum().backward()  # the gradient of the output has strides 0
    whole = module.weight.grad.clone()
    step(module, x)
    module.zero_grad()
    module(x.detach().mT.contiguous().mT).backward(torch.ones(128, N, device=DEVICE))
    assert torch.equal(module.weight.grad, whole)


def test_only_the_gradients_that_are_needed(monkeypatch):
    module, x = layer(), tokens(128)
    products = []
    gemm = mxspec.fp8_gemm
    monkeypatch.setattr(mxspec, "fp8_gemm", lambda *a, **kw: products.append(a[2].shape) or gemm(*a, **kw))
    module(x.detach()).sum().backward()
    assert products == [(N, K), (K, 128)]  # forward, wgrad
    products.clear()
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert products == [(N, K), (K, N)]  # forward, dgrad


def test_the_parameters_are_nn_linears():
    plain = nn.Linear(K, N, device=DEVICE)
    module = Float8BlockwiseLinear.from_linear(plain.eval())
    assert module.weight is plain.weight
    assert module.bias is plain.bias
    assert not module.training
    assert module.state_dict().keys() == plain.state_dict().keys()
    with cache_weights(module):
        assert module.state_dict().keys() == plain.state_dict().keys()
    fresh = layer()
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(fresh(tokens(3)), module(tokens(3)))
    assert Float8BlockwiseLinear.from_linear(nn.Linear(K, N, bias=False)).bias is None


def test_autocast_as_nn_linear():
    module, x = layer(), tokens(40)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = module(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert (x.grad.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)
    assert torch.equal(out, module(x.detach().bfloat16()))


def test_compiled_whole_it_gives_the_same_bits():
    torch._dynamo.reset()
    module, x = layer(), tokens(4, 33)
    eager = step(module, x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled, x), eager))
    with cache_weights(module):
        assert all(map(torch.equal, step(compiled, x), eager))


def test_checkpointed_it_gives_the_same_bits():
    module, x = layer(), tokens(130)
    kept = step(module, x)
    x.grad = None
    module.zero_grad()
    out = checkpoint(module, x, use_reentrant=False)
    out.backward(gradient(out))
    again = [out, x.grad, *(p.grad for p in module.parameters())]
    assert all(map(torch.equal, again, kept))


def test_backward_takes_the_backend_of_forward(monkeypatch):
    module, x = layer(), tokens(128)
    seen = []
    gemm = mxspec.fp8_gemm
    monkeypatch.setattr(mxspec, "fp8_gemm", lambda *a, **kw: seen.append(kw["backend"]) or gemm(*a, **kw))
    with mxspec.use_backend("reference"):
        out = module(x)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert seen == ["reference"] * 3


def _count(monkeypatch) -> list[tuple[int, ...]]:
    quantized = []
    quantize = mxspec.fp8_quantize_128x128
    monkeypatch.setattr(mxspec, "fp8_quantize_128x128", lambda w, **kw: quantized.append(w.shape) or quantize(w, **kw))
    return quantized


def test_a_weight_is_quantized_once_a_forward_or_once_a_block(monkeypatch):
    quantized = _count(monkeypatch)
    model, x = nn.Sequential(layer(), nn.ReLU(), Float8BlockwiseLinear(N, K, device=DEVICE)), tokens(60)
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


def test_cached_weights_that_changed_are_refused():
    module, x = layer(), tokens(3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    changed = pytest.raises(RuntimeError, match="a weight has changed")
    module(x).sum().backward()

    def other_memory() -> None:
        module.weight.data = module.weight.data.clone()

    for change in (optimizer.step, other_memory):
        with changed, cache_weights(module):  # on leaving
            change()
        with changed as raised, cache_weights(module):  # at the forward
            change()
            module(x)
        assert "forward" in [entry.name for entry in raised.traceback]
    with pytest.raises(RuntimeError, match="held already"), cache_weights(module), cache_weights(module):
        pass
    with pytest.raises(KeyError), cache_weights(module):
        raise KeyError  # the block's own error is the one that is seen
    assert module._cached is None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ((100, 128), ValueError, "in_features = 100 is no multiple of 128"),
        ((128, 100), ValueError, "out_features = 100 is no multiple of 128"),
        ((0, 128), ValueError, "in_features = 0"),
        ((128, 128, True, None, torch.float16), TypeError, "parameters of torch.float16; needs torch.bfloat16 or"),
    ],
)
def test_what_no_layer_can_be_made_of(sizes, error, words):
    with pytest.raises(error, match=words):
        Float8BlockwiseLinear(*sizes)
    if not sizes[4:]:
        with pytest.raises(error, match=words), torch.device("meta"):
            Float8BlockwiseLinear.from_linear(nn.Linear(*sizes))


def test_what_it_does_not_take():
    module = layer()
    with pytest.raises(ValueError, match=r"input has shape \(3, 384\); needs \(..., 256\)"):
        module(torch.zeros(3, N, device=DEVICE))
    with pytest.raises(TypeError, match=r"input has dtype torch\.float16"):
        module(torch.zeros(3, K, device=DEVICE, dtype=torch.float16))
    with pytest.raises(ValueError, match="needs one device"):
        module(torch.zeros(3, K, device="meta" if DEVICE.type == "cpu" else "cpu"))


def test_on_meta_it_has_shapes():
    module = Float8BlockwiseLinear(K, N, device="meta")
    assert module(torch.zeros(2, 3, K, device="meta")).shape == (2, 3, N)


def test_its_benchmark_compares_before_it_times(capsys, monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "linear.py"
    spec = importlib.util.spec_from_file_location("linear", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    pace = benchmark.Pace(0, 1, 1)
    assert benchmark.measure(128, K, N, DEVICE, pace) > 0
    assert "wgrad" in capsys.readouterr().out
    monkeypatch.setattr(benchmark, "MIN_SQNR_DB", 60)
    with pytest.raises(AssertionError, match=r"y: 2\d\.\d dB beside bfloat16's; needs 60"):
        benchmark.measure(128, K, N, DEVICE, pace)
