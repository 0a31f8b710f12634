"""MXLinear and Float8BlockwiseLinear: their products, the calls that they refuse, and all that is as in nn.Linear."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec import dispatch
from mxspec.check import sqnr_db
from mxspec.nn import RECIPES, Float8BlockwiseLinear, MXLinear, Recipe, cache_weights
from tests.helpers import DEVICE, SIZES, gradient, layer, step, tokens

FP8 = (Float8BlockwiseLinear, None)
MX = [(MXLinear, name) for name, recipe in RECIPES.items() if recipe.format == "mxfp8"]
E5M2 = (MXLinear, replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2))
HALF = r"parameters have dtype torch\.float16; needs torch\.bfloat16 or torch\.float32"
both = pytest.mark.parametrize("kind", SIZES)


def read_back(values: Tensor, axis: int, recipe: Recipe | None, dtype: torch.dtype | None = None) -> Tensor:
    """The values in fp64 after quantizing. Blocks along the tokens are filled with zeros."""
    padded = nn.functional.pad(values, (0, 0, 0, -values.shape[0] % (32 if recipe else 128) if axis == -2 else 0))
    options = {"axis": axis, "backend": "reference"}
    if recipe:
        codes = mxspec.mx_quantize(padded, elem_dtype=dtype, scaling=recipe.scaling, **options)
        read = mxspec.mx_dequantize(*codes, out_dtype=torch.float32, **options)
    else:
        codes = mxspec.fp8_quantize_1x128(padded, **options)
        read = mxspec.fp8_dequantize(*codes, out_dtype=torch.float32, **options)
    return read[: values.shape[0]].double()


def dequantized_step(module: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The expected results of the three matmuls: fp64 products of operands that were quantized and read back."""
    x, w = x.detach(), module.weight.detach()
    recipe = module.recipe if isinstance(module, MXLinear) else None
    value, dy = (
        lambda t, axis, dtype=dtype: read_back(t, axis, recipe, dtype)
        for dtype in (torch.float8_e4m3fn, recipe and recipe.grad_dtype)
    )
    if recipe:
        along, across = value(w, -1), value(w, -2)
    else:
        codes = mxspec.fp8_quantize_128x128(w, backend="reference")
        along = across = mxspec.fp8_dequantize(*codes, out_dtype=torch.float32, backend="reference").double()
    bf16 = grad.bfloat16().double().mT @ x.bfloat16().double()
    wgrad = bf16 if recipe and recipe.wgrad_bf16 else dy(grad, -2).mT @ value(x, -2)
    return [value(x, -1) @ along.mT, dy(grad, -1) @ across, wgrad]


@pytest.mark.parametrize(
    ("kind", "recipe", "count"),
    [(*of, count) for of in (*MX, E5M2) for count in (1, 45, 64)] + [(*FP8, count) for count in (1, 77, 128, 300)],
)
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_the_three_products_are_those_of_the_dequantized_operands(kind, recipe, count, x_dtype, dtype):
    module = layer(kind, recipe, dtype=dtype, bias=False)
    x = tokens(count, module.in_features, dtype=x_dtype)
    out, grad_x, grad_w = step(module, x)
    assert [t.dtype for t in (out, grad_x, grad_w)] == [x_dtype, x_dtype, dtype]
    for got, expected in zip((out, grad_x, grad_w), dequantized_step(module, x, gradient(out)), strict=True):
        # One rounding to bfloat16 at the end leaves at least 50 dB. In fp32, the kernels' sums give 70 dB or more.
        rounded = got.dtype == torch.bfloat16 or (got is grad_w and recipe and module.recipe.wgrad_bf16)
        assert sqnr_db(got, expected) >= (50 if rounded else 70)


@pytest.mark.parametrize(
    ("kind", "recipe", "count", "least"), [(*mx, 256, (27, 25, 24, 50)) for mx in MX] + [(*FP8, 300, (25, 25, 25, 25))]
)
def test_near_the_unquantized_linear(kind, recipe, count, least):
    module = layer(kind, recipe)
    x, plain = tokens(count, module.in_features), nn.Linear(*SIZES[kind], device=DEVICE)
    plain.load_state_dict(module.state_dict())
    for got, expected, at_least in zip(step(module, x), step(plain, x), least, strict=True):
        assert sqnr_db(got, expected) >= at_least


@both
def test_any_leading_dimensions_and_no_tokens(kind):
    module, (K, N) = layer(kind), SIZES[kind]
    x = tokens(6, 50, K)
    flat, split = step(module, x)[0], module(x.view(2, 3, 50, K))
    assert torch.equal(flat, split.view(6, 50, N))
    assert torch.equal(module(x[0, 0]), module(x[0, :1])[0])
    out, grad_x, grad_w, grad_bias = step(module, tokens(0, K))
    assert (out.shape, grad_x.shape) == ((0, N), (0, K))
    assert not grad_w.any()
    assert not grad_bias.any()


@both
def test_an_expanded_gradient_and_a_transposed_input(kind):
    module = layer(kind, bias=False)
    count = 64 if kind is MXLinear else 128
    x = tokens(count, module.in_features)
    module(x).sum().backward()  # the gradient of the output has strides 0
    whole = module.weight.grad.clone()
    module.zero_grad()
    module(x.detach().mT.contiguous().mT).backward(torch.ones(count, module.out_features, device=DEVICE))
    assert torch.equal(module.weight.grad, whole)


@pytest.mark.parametrize(("kind", "options"), [(MXLinear, {"recipe": "mxfp8_floor"}), (Float8BlockwiseLinear, {})])
def test_the_parameters_are_nn_linears(kind, options):
    plain = nn.Linear(*SIZES[kind], device=DEVICE)
    module = kind.from_linear(plain.eval(), **options)
    assert module.weight is plain.weight
    assert module.bias is plain.bias
    assert not options or module.recipe == RECIPES["mxfp8_floor"]
    assert not module.training
    assert module.state_dict().keys() == plain.state_dict().keys()
    with cache_weights(module):
        assert module.state_dict().keys() == plain.state_dict().keys()
    fresh, x = layer(kind, **options), tokens(3, module.in_features)
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(fresh(x), module(x))
    assert kind.from_linear(nn.Linear(*SIZES[kind], bias=False)).bias is None


@both
def test_autocast_as_nn_linear(kind):
    module = layer(kind)
    x = tokens(40, module.in_features)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = module(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert (x.grad.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)
    assert torch.equal(out, module(x.detach().bfloat16()))


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_leaves_what_it_leaves(kind, dtype):
    said = pytest.raises(TypeError, match=f"{kind.__name__}: input has dtype {dtype}")
    with torch.autocast("cpu", torch.bfloat16), said:
        kind(128, 128)(torch.zeros(2, 128, dtype=dtype))


@pytest.mark.parametrize(("kind", "recipe"), [(MXLinear, "mxfp8_rceil"), (MXLinear, "mxfp8_rceil_wgrad_bf16"), FP8])
def test_compiled_whole_it_gives_the_same_bits(kind, recipe):
    torch._dynamo.reset()
    module = layer(kind, recipe)
    x = tokens(4, 33, module.in_features)
    eager = step(module, x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled, x), eager))
    with cache_weights(module):
        assert all(map(torch.equal, step(compiled, x), eager))


@pytest.mark.parametrize(
    ("kind", "count", "reentrant"), [(MXLinear, 45, False), (MXLinear, 45, True), (Float8BlockwiseLinear, 130, False)]
)
def test_checkpointed_it_gives_the_same_bits(kind, count, reentrant):
    module = layer(kind)
    x = tokens(count, module.in_features)
    kept = step(module, x)
    x.grad = None
    module.zero_grad()
    out = checkpoint(module, x, use_reentrant=reentrant)
    out.backward(gradient(out))
    again = [out, x.grad, *(p.grad for p in module.parameters())]
    assert all(map(torch.equal, again, kept))


@both
def test_backward_takes_the_backend_of_forward(kind, monkeypatch):
    module, ran = layer(kind), []
    run = dispatch.resolve.run

    def watched(fn, args, kwargs, backend):
        ran.append((fn.__name__, backend))
        return run(fn, args, kwargs, backend)

    monkeypatch.setattr(dispatch.resolve, "run", watched)
    with mxspec.use_backend("reference"):
        out = module(tokens(128, module.in_features))
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert [backend for _, backend in ran] == ["reference"] * {MXLinear: 6, Float8BlockwiseLinear: 8}[kind]


@both
def test_cached_weights_that_changed_are_refused(kind):
    module = layer(kind)
    x = tokens(3, module.in_features)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    changed = pytest.raises(RuntimeError, match="a weight has changed")
    module(x).sum().backward()

    def other_memory() -> None:
        module.weight.data = module.weight.data.clone()

    for change in (optimizer.step, other_memory):
        with changed, cache_weights(module):  # raised on leaving the block
            change()
        with changed as raised, cache_weights(module):  # raised by the forward
            change()
            module(x)
        assert "forward" in [entry.name for entry in raised.traceback]
    with pytest.raises(RuntimeError, match="held already"), cache_weights(module), cache_weights(module):
        pass
    with pytest.raises(KeyError), cache_weights(module):
        raise KeyError  # the user must see this error, not one of cache_weights
    assert module._cached is None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("kind", "arguments", "error", "words"),
    [
        (MXLinear, {"in_features": 100}, ValueError, "MXLinear: in_features = 100 must be a multiple of 32"),
        (MXLinear, {"out_features": 48}, ValueError, "MXLinear: out_features = 48 must be a multiple of 32"),
        (MXLinear, {"recipe": "fp8_128"}, ValueError, "the recipe's format is fp8_128; needs mxfp8"),
        (MXLinear, {"recipe": "bf16"}, ValueError, "the recipe's format is bf16; needs mxfp8"),
        (MXLinear, {"recipe": "mxfp8"}, ValueError, "MXLinear: unknown recipe 'mxfp8'; needs a Recipe or one of mx"),
        (Float8BlockwiseLinear, {"in_features": 100}, ValueError, "in_features = 100 must be a multiple of 16"),
        (Float8BlockwiseLinear, {"out_features": 100}, ValueError, "out_features = 100 must be a multiple of 16"),
        (MXLinear, {"in_features": 0}, ValueError, "in_features = 0"),
        (Float8BlockwiseLinear, {"in_features": 0}, ValueError, "in_features = 0"),
        (MXLinear, {"dtype": torch.float16}, TypeError, HALF),
        (Float8BlockwiseLinear, {"dtype": torch.float16}, TypeError, HALF),
    ],
)
def test_what_no_layer_can_be_made_of(kind, arguments, error, words):
    arguments = {"in_features": 128, "out_features": 128, **arguments}
    with pytest.raises(error, match=words):
        kind(**arguments)
    recipe = {"recipe": arguments.pop("recipe")} if "recipe" in arguments else {}
    with pytest.raises(error, match=words):
        kind.from_linear(nn.Linear(**arguments, device="meta"), **recipe)


@both
def test_what_half_made_of_the_parameters_is_refused(kind):
    half = kind(128, 128).half()
    with pytest.raises(TypeError, match=f"Linear: {HALF}"):
        half(torch.zeros(2, 128))


@both
def test_what_it_does_not_take(kind):
    module, (K, N), name = layer(kind), SIZES[kind], kind.__name__
    with pytest.raises(ValueError, match=rf"{name}: input has shape \(3, {N}\); needs \(..., {K}\)"):
        module(torch.zeros(3, N, device=DEVICE))
    with pytest.raises(TypeError, match=rf"{name}: input has dtype torch\.float16"):
        module(torch.zeros(3, K, device=DEVICE, dtype=torch.float16))
    with pytest.raises(ValueError, match="needs one device"):
        module(torch.zeros(3, K, device="meta" if DEVICE.type == "cpu" else "cpu"))


@both
def test_on_meta_it_has_shapes(kind):
    K, N = SIZES[kind]
    assert kind(K, N, device="meta")(torch.zeros(2, 3, K, device="meta")).shape == (2, 3, N)
