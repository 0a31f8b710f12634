"""MXLinear: its three products, what is kept of x, what it takes, and what it says where it takes something not."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec.check import default_device, sqnr_db
from mxspec.nn import RECIPES, Float8BlockwiseLinear, MXLinear, Recipe, _formats, cache_weights

DEVICE = default_device()
K, N = 96, 160
MX = [name for name, recipe in RECIPES.items() if recipe.format == "mxfp8"]
E5M2 = replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2)


def layer(recipe: Recipe | str = "mxfp8_rceil", dtype: torch.dtype = torch.float32, bias: bool = True) -> MXLinear:
    torch.manual_seed(0)
    module = MXLinear(K, N, bias, DEVICE, dtype, recipe)
    nn.init.normal_(module.weight, std=0.1)  # blocks on which floor and rceil differ, unlike an initial weight's
    return module


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


def read_back(values: torch.Tensor, axis: int, scaling: str, dtype: torch.dtype) -> torch.Tensor:
    """What values are once quantized, in fp64; blocks along the tokens filled with zeros."""
    padded = nn.functional.pad(values, (0, 0, 0, -values.shape[0] % 32 if axis == -2 else 0))
    codes = mxspec.mx_quantize(padded, axis=axis, elem_dtype=dtype, scaling=scaling, backend="reference")
    read = mxspec.mx_dequantize(*codes, axis=axis, out_dtype=torch.float32, backend="reference")
    return read[: values.shape[0]].double()


def dequantized_step(module: MXLinear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """What the three matmuls are to give: products, in fp64, of operands that were quantized and read back."""
    x, grad, w, recipe = x.detach().view(-1, K), grad.view(-1, N), module.weight.detach(), module.recipe
    value, dy = (
        lambda t, axis, dtype=dtype: read_back(t, axis, recipe.scaling, dtype)
        for dtype in (torch.float8_e4m3fn, recipe.grad_dtype)
    )
    bf16 = grad.bfloat16().double().mT @ x.bfloat16().double()
    wgrad = bf16 if recipe.wgrad_bf16 else dy(grad, -2).mT @ value(x, -2)
    return [value(x, -1) @ value(w, -1).mT, dy(grad, -1) @ value(w, -2), wgrad]


@pytest.mark.parametrize("count", [1, 45, 64])
@pytest.mark.parametrize("recipe", [*MX, E5M2], ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_the_three_products_are_those_of_the_dequantized_operands(count, recipe, x_dtype, dtype):
    module, x = layer(recipe, dtype, bias=False), tokens(count, dtype=x_dtype)
    out, grad_x, grad_w = step(module, x)
    assert [t.dtype for t in (out, grad_x, grad_w)] == [x_dtype, x_dtype, dtype]
    for got, expected in zip((out, grad_x, grad_w), dequantized_step(module, x, gradient(out)), strict=True):
        # Rounded to bfloat16 once at the end: 50 dB at the least. In fp32 the kernels' sums give 100 dB and more.
        rounded = got.dtype == torch.bfloat16 or (got is grad_w and module.recipe.wgrad_bf16)
        assert sqnr_db(got, expected) >= (50 if rounded else 70)


@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_the_scales_layout_is_of_no_consequence(layout, monkeypatch):
    module, x = layer(), tokens(45)
    before = step(module, x)
    monkeypatch.setattr(_formats, "_SCALE_LAYOUT", layout)
    for got, expected in zip(step(module, x), before, strict=True):
        assert sqnr_db(got, expected) >= 70


@pytest.mark.parametrize("recipe", MX)
def test_near_the_unquantized_linear(recipe):
    module, x = layer(recipe), tokens(256)
    plain = nn.Linear(K, N, device=DEVICE)
    plain.load_state_dict(module.state_dict())
    for got, expected, least in zip(step(module, x), step(plain, x), (27, 25, 24, 50), strict=True):
        assert sqnr_db(got, expected) >= least


def test_golden_by_hand():
    module = MXLinear(32, 32, bias=False, device=DEVICE)
    with torch.no_grad():
        module.weight.zero_()
        module.weight[0] = 1.0625  # between the neighbours 1 and 1.125, the even one of which is 1
    x = torch.ones(1, 32, device=DEVICE)
    x[0, 0] = 500  # rceil: scale 2, in which 1 is exact and 500 / 2 = 250 is rounded to 256
    x.requires_grad_()
    out = module(x)
    out[0, 0].backward(torch.tensor(3.0, device=DEVICE))
    assert out[0, :2].tolist() == [512 + 31, 0]
    assert x.grad[0, :2].tolist() == [3, 3]  # 3 * 1
    assert module.weight.grad[:2, :2].tolist() == [[1536, 3], [0, 0]]  # 512 in its column by itself


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
    module, x = layer(bias=False), tokens(64)
    module(x).sum().backward()  # the gradient of the output has strides 0
    whole = module.weight.grad.clone()
    module.zero_grad()
    module(x.detach().mT.contiguous().mT).backward(torch.ones(64, N, device=DEVICE))
    assert torch.equal(module.weight.grad, whole)


OPS = ("mx_quantize", "mx_quantize_rowcol", "mx_gemm")


def calls(monkeypatch) -> list[tuple[str, tuple[int, ...], str]]:
    """The ops that run from now on: name, the first operand's shape, backend."""
    seen = []

    def watched(name, op):
        return lambda *a, **kw: seen.append((name, tuple(a[0].shape), kw["backend"])) or op(*a, **kw)

    for name in OPS:
        monkeypatch.setattr(mxspec, name, watched(name, getattr(mxspec, name)))
    return seen


def test_each_tensor_is_read_once_and_only_what_is_needed_is_computed(monkeypatch):
    module, x, seen = layer(), tokens(64), calls(monkeypatch)

    def ran(x):
        seen.clear()
        module(x).sum().backward()
        return [call[:2] for call in seen]

    rowcol, rows, columns, gemm = "mx_quantize_rowcol", "mx_quantize", "mx_quantize", "mx_gemm"
    forward = [(rowcol, (N, K)), (rowcol, (64, K)), (gemm, (64, K))]
    assert ran(x) == [*forward, (rowcol, (64, N)), (gemm, (64, N)), (gemm, (N, 64))]
    assert ran(x.detach()) == [*forward, (columns, (64, N)), (gemm, (N, 64))]
    module.weight.requires_grad_(False)
    assert ran(x) == [(rowcol, (N, K)), (rows, (64, K)), (gemm, (64, K)), (rows, (64, N)), (gemm, (64, N))]


def test_of_x_a_byte_an_element_is_kept():
    module, x = layer(dtype=torch.bfloat16, bias=False), tokens(64, dtype=torch.bfloat16)

    def saved(x):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            module(x)
        return [(t.dtype, t.nbytes) for t in kept if t.dtype != torch.float8_e8m0fnu]

    of_x, of_weight = (torch.float8_e4m3fn, 64 * K), (torch.float8_e4m3fn, N * K)
    backend = (torch.int64, 8)  # its index, which checkpointing is to bring back
    assert saved(x) == [of_x, of_weight, backend]
    assert saved(x.detach()) == [of_x, backend]
    module.weight.requires_grad_(False)
    assert saved(x) == [of_weight, backend]


def test_the_parameters_are_nn_linears():
    plain = nn.Linear(K, N, device=DEVICE)
    module = MXLinear.from_linear(plain.eval(), recipe="mxfp8_floor")
    assert module.weight is plain.weight
    assert module.bias is plain.bias
    assert module.recipe == RECIPES["mxfp8_floor"]
    assert not module.training
    assert module.state_dict().keys() == plain.state_dict().keys()
    with cache_weights(module):
        assert module.state_dict().keys() == plain.state_dict().keys()
    fresh = layer("mxfp8_floor")
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(fresh(tokens(3)), module(tokens(3)))
    assert MXLinear.from_linear(nn.Linear(K, N, bias=False)).bias is None


def test_autocast_as_nn_linear():
    module, x = layer(), tokens(40)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = module(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert (x.grad.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)
    assert torch.equal(out, module(x.detach().bfloat16()))


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_rceil_wgrad_bf16"])
def test_compiled_whole_it_gives_the_same_bits(recipe):
    torch._dynamo.reset()
    module, x = layer(recipe), tokens(4, 33)
    eager = step(module, x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled, x), eager))
    with cache_weights(module):
        assert all(map(torch.equal, step(compiled, x), eager))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_it_gives_the_same_bits(reentrant):
    module, x = layer(), tokens(45)
    kept = step(module, x)
    x.grad = None
    module.zero_grad()
    out = checkpoint(module, x, use_reentrant=reentrant)
    out.backward(gradient(out))
    again = [out, x.grad, *(p.grad for p in module.parameters())]
    assert all(map(torch.equal, again, kept))


def test_backward_takes_the_backend_of_forward(monkeypatch):
    module, x, seen = layer(), tokens(64), calls(monkeypatch)
    with mxspec.use_backend("reference"):
        out = module(x)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert [backend for _, _, backend in seen] == ["reference"] * 6


def test_weights_of_either_kind_are_quantized_once_a_block(monkeypatch):
    model = nn.Sequential(layer(), nn.ReLU(), MXLinear(N, 128, device=DEVICE))
    model.append(Float8BlockwiseLinear(128, 128, device=DEVICE))
    x, seen = tokens(32), calls(monkeypatch)
    once = model(x)
    assert [call[:2] for call in seen if call[1] in ((N, K), (128, N))] == [
        ("mx_quantize_rowcol", (N, K)),
        ("mx_quantize_rowcol", (128, N)),
    ]
    with cache_weights(model):
        seen.clear()
        assert torch.equal(model(x), once)
        model(x).sum().backward()
        assert not [call for call in seen if call[:2] == ("mx_quantize_rowcol", (N, K))]
        assert model[3]._cached is not None
    assert model[0]._cached is model[3]._cached is None


def test_cached_weights_that_changed_are_refused():
    module, x = layer(), tokens(3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(x).sum().backward()
    changed = pytest.raises(RuntimeError, match="a weight has changed")
    with changed as raised, cache_weights(module):  # at the forward
        optimizer.step()
        module(x)
    assert "forward" in [entry.name for entry in raised.traceback]
    with changed, cache_weights(module):  # on leaving
        optimizer.step()
    assert module._cached is None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"in_features": 100}, ValueError, "MXLinear: in_features = 100 is no multiple of 32"),
        ({"out_features": 48}, ValueError, "MXLinear: out_features = 48 is no multiple of 32"),
        ({"in_features": 0}, ValueError, "in_features = 0"),
        ({"dtype": torch.float16}, TypeError, "parameters of torch.float16; needs torch.bfloat16 or torch.float32"),
        ({"recipe": "fp8_128"}, ValueError, "the recipe's format is fp8_128; needs mxfp8"),
        ({"recipe": "bf16"}, ValueError, "the recipe's format is bf16; needs mxfp8"),
        ({"recipe": "mxfp8"}, ValueError, "MXLinear: unknown recipe 'mxfp8'; needs a Recipe or one of mxfp8_rceil, "),
    ],
)
def test_what_no_layer_can_be_made_of(arguments, error, words):
    with pytest.raises(error, match=words):
        MXLinear(**{"in_features": 64, "out_features": 64, **arguments})
    recipe = {"recipe": arguments.pop("recipe")} if "recipe" in arguments else {}
    with pytest.raises(error, match=words):
        MXLinear.from_linear(
            nn.Linear(**{"in_features": 64, "out_features": 64, "device": "meta", **arguments}), **recipe
        )


def test_what_it_does_not_take():
    module = layer()
    with pytest.raises(ValueError, match=r"MXLinear: input has shape \(3, 160\); needs \(..., 96\)"):
        module(torch.zeros(3, N, device=DEVICE))
    with pytest.raises(TypeError, match=r"MXLinear: input has dtype torch\.float16"):
        module(torch.zeros(3, K, device=DEVICE, dtype=torch.float16))
    with pytest.raises(ValueError, match="needs one device"):
        module(torch.zeros(3, K, device="meta" if DEVICE.type == "cpu" else "cpu"))


def test_on_meta_it_has_shapes():
    module = MXLinear(K, N, device="meta")
    assert module(torch.zeros(2, 3, K, device="meta")).shape == (2, 3, N)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_captured_in_a_cuda_graph_it_gives_the_same_bits():
    module, x = layer(dtype=torch.bfloat16), tokens(96, dtype=torch.bfloat16)
    expected = step(module, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphed = torch.cuda.make_graphed_callables(module, (x.detach().requires_grad_(),))
        got = step(graphed, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("make", [lambda: MXLinear(128, 128), lambda: Float8BlockwiseLinear(128, 128)])
def test_what_half_made_of_the_parameters_is_refused(make):
    layer = make().half()
    with pytest.raises(
        TypeError, match=r"Linear: parameters of torch\.float16; needs torch\.bfloat16 or torch\.float32"
    ):
        layer(torch.zeros(2, 128))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_leaves_what_it_leaves(dtype):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"MXLinear: input has dtype {dtype}"):
        MXLinear(128, 128)(torch.zeros(2, 128, dtype=dtype))
