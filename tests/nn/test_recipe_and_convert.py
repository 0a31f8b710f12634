"""Recipes, and `convert`, which replaces a model's layers with layers of a recipe."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest
import torch
from torch import nn

import mxspec
from mxspec.check import sqnr_db
from mxspec.nn import RECIPES, Float8BlockwiseLinear, GroupedExperts, MXLinear, Recipe, cache_weights, convert, watch


def test_the_named_recipes():
    assert {name: (r.format, r.scaling, r.grad_dtype, r.wgrad_bf16) for name, r in RECIPES.items()} == {
        "mxfp8_rceil": ("mxfp8", "rceil", torch.float8_e4m3fn, False),
        "mxfp8_floor": ("mxfp8", "floor", torch.float8_e4m3fn, False),
        "mxfp8_rceil_wgrad_bf16": ("mxfp8", "rceil", torch.float8_e4m3fn, True),
        "fp8_128": ("fp8_128", "rceil", torch.float8_e4m3fn, False),
        "fp8_128_pow2": ("fp8_128", "rceil", torch.float8_e4m3fn, False),
        **{name: ("nvfp4", "rceil", torch.float8_e4m3fn, False) for name in RECIPES if name.startswith("nvfp4")},
        "bf16": ("bf16", "rceil", torch.float8_e4m3fn, False),
    }
    assert {name: (r.hadamard, r.stochastic_rounding) for name, r in RECIPES.items() if r.format == "nvfp4"} == {
        "nvfp4": (None, None),
        "nvfp4_no_hadamard": (False, None),
        "nvfp4_nearest": (None, False),
        "nvfp4_nearest_no_hadamard": (False, False),
    }
    assert {name for name, recipe in RECIPES.items() if recipe.scale_format == "pow2"} == {"fp8_128_pow2"}


def test_a_recipe_of_another_format_is_the_named_one():
    """`None` follows the format, so `replace` does not carry what another format has."""
    assert replace(RECIPES["mxfp8_rceil"], format="nvfp4") == RECIPES["nvfp4"] == Recipe("nvfp4")
    assert replace(RECIPES["nvfp4"], format="mxfp8") == RECIPES["mxfp8_rceil"]


def test_a_recipe_is_frozen_and_checked():
    recipe = replace(RECIPES["mxfp8_floor"], grad_dtype=torch.float8_e5m2)
    assert (recipe.scaling, recipe.grad_dtype) == ("floor", torch.float8_e5m2)
    with pytest.raises(FrozenInstanceError):
        recipe.scaling = "rceil"
    with pytest.raises(ValueError, match="unknown format 'mxfp4'; needs one of mxfp8, fp8_128, nvfp4, bf16"):
        Recipe("mxfp4")
    with pytest.raises(ValueError, match="fp8_128 has no scaling, grad_dtype or wgrad_bf16"):
        replace(RECIPES["fp8_128"], grad_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="unknown scaling 'nearest'; needs one of floor, rceil"):
        Recipe(scaling="nearest")
    with pytest.raises(TypeError, match=r"grad_dtype = torch.bfloat16; needs torch.float8_e4m3fn or torch.float8_e5m2"):
        Recipe(grad_dtype=torch.bfloat16)
    for what in ("hadamard", "stochastic_rounding"):
        with pytest.raises(
            ValueError, match=r"mxfp8 has no hadamard or stochastic_rounding. Leave them out, or use nvfp4"
        ):
            Recipe(**{what: True})
    with pytest.raises(ValueError, match="nvfp4 has no scaling, grad_dtype or wgrad_bf16"):
        replace(RECIPES["nvfp4"], wgrad_bf16=True)
    for what in ("wgrad_bf16", "save_weight_codes", "hadamard", "stochastic_rounding"):
        with pytest.raises(TypeError, match=rf"Recipe: {what} = 'no'; needs True or False"):
            Recipe(**{what: "no"})
    assert all(r.save_weight_codes for r in RECIPES.values())
    assert not replace(RECIPES["fp8_128"], save_weight_codes=False).save_weight_codes
    with pytest.raises(ValueError, match="Recipe: bf16 has no save_weight_codes, because it quantizes no weight"):
        Recipe("bf16", save_weight_codes=False)
    with pytest.raises(ValueError, match="Recipe: unknown scale_format 'e8m0'; needs one of fp32, pow2"):
        Recipe("fp8_128", scale_format="e8m0")
    with pytest.raises(ValueError, match=r"Recipe: mxfp8 has no scale_format\. Leave it out, or use fp8_128"):
        Recipe(scale_format="pow2")


@pytest.mark.parametrize("save_weight_codes", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_quantizer_of_fp8_128_pow2_makes_scales_that_are_powers_of_two(dtype, save_weight_codes, monkeypatch):
    """The Linear, the experts and a watch read no other scale. The gradients of fp8_128 have other bits."""
    asked, out = set(), {}

    def noted(name, op, *args, **kwargs):
        asked.add((name, kwargs["scale_format"]))
        return op(*args, **kwargs)

    for name in mxspec.__all__:
        if "fp8_quantize" in name:
            monkeypatch.setattr(mxspec, name, partial(noted, name, getattr(mxspec, name)))
    torch.manual_seed(0)
    linear, experts = Float8BlockwiseLinear(128, 128).to(dtype), GroupedExperts(2, 128, 128, "fp8_128").to(dtype)
    x = torch.randn(40, 128).to(dtype)
    for name in ("fp8_128", "fp8_128_pow2"):
        recipe = replace(RECIPES[name], save_weight_codes=save_weight_codes)
        linear.recipe = recipe
        experts.set_recipe(recipe)
        asked.clear()
        x.requires_grad_().grad = None
        with watch(nn.ModuleList([linear, experts])):
            experts(linear(x), torch.tensor([15, 40], dtype=torch.int32)).square().sum().backward()
        out[name] = x.grad
        wanted = {"fp8_quantize_1x128", "fp8_quantize_128x128", "fp8_quantize_rowcol_groups"}
        if dtype == torch.bfloat16:
            wanted |= {"swiglu_fp8_quantize_rowcol_groups", "swiglu_backward_fp8_quantize_rowcol_groups"}
        assert asked == {(op, RECIPES[name].scale_format) for op in wanted}
    assert 15 < sqnr_db(*out.values()) < 60


def test_codes_of_fp8_128_pow2_lose_nothing_when_they_are_quantized_along_the_tokens():
    """Row codes, then column codes of their values: powers of two keep them, fp32 scales round nearly all again."""
    torch.manual_seed(0)
    x = torch.randn(256, 256)
    differing = {}
    for name in ("fp8_128", "fp8_128_pow2"):
        scale_format = RECIPES[name].scale_format
        rows = mxspec.fp8_dequantize(*mxspec.fp8_quantize_1x128(x, scale_format=scale_format), out_dtype=torch.float32)
        codes = mxspec.fp8_quantize_1x128(rows, axis=-2, scale_format=scale_format)
        columns = mxspec.fp8_dequantize(*codes, axis=-2, out_dtype=torch.float32)
        differing[name] = (rows != columns).float().mean().item()
    assert differing["fp8_128_pow2"] < 1e-4
    assert differing["fp8_128"] > 0.5


class Block(nn.Module):
    """A model with two Linears (one is used in two places), experts, and layers that cannot be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)
        self.layers = nn.ModuleList([nn.Linear(256, 128, bias=False), nn.LayerNorm(128)])
        self.same = self.up
        self.head = nn.Linear(128, 10)
        self.hooked = nn.Linear(128, 128)
        self.hooked.register_forward_hook(lambda *_: None)
        self.attention = nn.MultiheadAttention(128, 2)
        self.experts = GroupedExperts(2, 128, 64, recipe="bf16")


LEFT = {
    "hooked": "it has hooks, and a new layer would lose them",
    "attention.out_proj": "nn.MultiheadAttention reads the weight of this Linear and never calls the Linear",
    "attention.in_proj_weight": "convert does not know how MultiheadAttention uses this parameter",
}


def test_convert_to_mx():
    model = Block().eval()
    parameters = dict(model.named_parameters())
    report = convert(model, "mxfp8_floor")
    assert report.swapped == {
        "up": "MXLinear", "layers.0": "MXLinear", "same": "MXLinear", "experts": "GroupedExperts of mxfp8",
    }  # fmt: skip
    head = "MXLinear: out_features = 10 must be a multiple of 32. Use a PyTorch layer, or pad the model."
    assert report.left == {"head": head, **LEFT}
    assert model.up is model.same
    assert type(model.layers[0]) is MXLinear
    assert {m.recipe for m in (model.up, model.layers[0], model.experts)} == {RECIPES["mxfp8_floor"]}
    assert not model.up.training
    assert type(model.head) is nn.Linear
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is p for name, p in parameters.items())
    text = str(report)
    assert text.startswith("4 swapped to mxfp8_floor, 4 left\n")
    assert "\n  up: MXLinear\n" in text
    assert f"\n  head: left, {head}" in text
    again, up = convert(model, "mxfp8_rceil"), model.up
    assert again.swapped == report.swapped
    assert {m.recipe for m in (up, model.layers[0], model.experts)} == {RECIPES["mxfp8_rceil"]}
    other = convert(model, "fp8_128")
    assert other.left["up"] == "it is a MXLinear of mxfp8 already, and takes only mxfp8 and bf16"
    assert other.swapped == {"experts": "GroupedExperts of fp8_128"}
    assert model.up is up


def test_convert_to_fp8():
    model = Block()
    model.wide = GroupedExperts(2, 128, 256)
    parameters = dict(model.named_parameters())
    report = convert(model, "fp8_128")
    linears = dict.fromkeys(("up", "layers.0", "same"), "Float8BlockwiseLinear")
    assert report.swapped == {**linears, **dict.fromkeys(("experts", "wide"), "GroupedExperts of fp8_128")}
    assert model.wide.recipe == RECIPES["fp8_128"]
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert report.left["head"].startswith("Float8BlockwiseLinear: out_features = 10 must be a multiple of 16")
    assert type(model.same) is Float8BlockwiseLinear
    assert model.experts.recipe == RECIPES["fp8_128"]


@pytest.mark.parametrize("name", ["mxfp8_floor", "fp8_128"])
def test_convert_gives_every_layer_the_whole_recipe(name):
    model, recipe = Block(), replace(RECIPES[name], save_weight_codes=False)
    convert(model, recipe)
    assert {m.recipe for m in (model.up, model.layers[0], model.experts)} == {recipe}


def test_convert_to_bf16_leaves_linears():
    model = Block()
    convert(model, "mxfp8_rceil", lambda layer, name: name == "experts")
    report = convert(model, RECIPES["bf16"])
    assert report.swapped == {"experts": "GroupedExperts of bf16, which multiplies float32 weights in bfloat16, too"}
    assert convert(Block().bfloat16(), "bf16").swapped == {"experts": "GroupedExperts of bf16"}
    assert report.left["up"] == "for bf16, nn.Linear is enough: give it bfloat16, or use autocast"
    assert type(model.up) is nn.Linear


def test_the_filter_sees_layers_and_names():
    model, seen = Block(), []
    report = convert(model, "mxfp8_rceil", lambda layer, name: seen.append((layer, name)) or name.startswith("layers"))
    assert [name for _, name in seen] == ["up", "layers.0", "same", "head", "hooked", "experts"]
    assert seen[0][0] is model.up
    assert list(report.swapped) == ["layers.0"]
    assert {report.left.pop("attention.out_proj"), report.left.pop("attention.in_proj_weight")} == {
        LEFT["attention.out_proj"], LEFT["attention.in_proj_weight"],
    }  # fmt: skip
    assert set(report.left.values()) == {"filter_fn returned false"}


def test_a_converted_model_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert(model, "mxfp8_rceil")
    x, losses = torch.randn(64, 64), []
    target = x[:, :32].cumsum(1) / 8
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def no_hook(*_):
    """A hook that does nothing."""


EXTRAS = {
    "buffers mask": lambda m: m.register_buffer("mask", torch.ones(1)),
    "buffers draft": lambda m: m.register_buffer("draft", torch.ones(1), persistent=False),
    "parameters gain": lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(1))),
    "modules adapter": lambda m: m.add_module("adapter", nn.Linear(64, 64)),
    "hooks": lambda m: m.register_state_dict_post_hook(no_hook),
    "buffers mask and hooks": lambda m: (m.register_buffer("mask", None), m.register_load_state_dict_pre_hook(no_hook)),
}


@pytest.mark.parametrize("registered", EXTRAS)
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128", "bf16"])
def test_a_linear_with_more_than_its_parameters_is_left(registered, recipe):
    model = nn.Sequential(nn.Linear(128, 128))
    before = model[0]
    EXTRAS[registered](before)
    assert convert(model, recipe).left["0"] == f"it has {registered}, and a new layer would lose them"
    assert model[0] is before


@pytest.mark.parametrize("name", ["forward", "extra_repr", "recipe", "_cached", "_compiled_call_impl"])
def test_a_linear_on_which_a_name_of_ours_was_set_is_left(name):
    model = nn.Sequential(nn.Linear(128, 128))
    setattr(model[0], name, no_hook)
    assert convert(model, "mxfp8_rceil").left == {"0": f"it has the attribute {name}, a name that MXLinear itself uses"}


def test_a_parametrized_linear_is_left():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)))
    assert convert(model, "mxfp8_rceil").left == {"0": "it is a ParametrizedLinear, not a plain nn.Linear"}


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
def test_attributes_of_the_users_come_along(recipe):
    lazy = nn.LazyLinear(128)
    lazy(torch.ones(2, 128))
    model = nn.Sequential(nn.Linear(128, 128), lazy)
    model[0].tag = tag = {"group": 3}
    model[0]._is_hf_initialized = True
    assert len(convert(model, recipe).swapped) == 2
    assert model[0].tag is tag
    assert model[0]._is_hf_initialized


@pytest.fixture
def multiplied(monkeypatch):
    """A list that records the layers that compute their products from now on."""
    seen = []
    for kind in (MXLinear, Float8BlockwiseLinear):
        quantized = kind._quantized
        monkeypatch.setattr(kind, "_quantized", lambda self, *a, q=quantized: seen.append(self) or q(self, *a))
    return seen


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_in_evaluation_is_quantized(recipe, norm_first, multiplied):
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(128, 2, 256, batch_first=True, dropout=0.0, norm_first=norm_first)
    model, x = nn.Sequential(plain), torch.randn(2, 5, 128)
    report = convert(model, recipe, include="0.linear?")
    assert list(report.swapped) == ["0.linear1", "0.linear2"]
    assert list(report.left) == ["0.self_attn.out_proj", "0.self_attn.in_proj_weight"]
    trained = model(x)
    multiplied.clear()
    with torch.no_grad():
        evaluated = model.eval()(x)
    assert multiplied == [plain.linear1, plain.linear2]
    assert sqnr_db(evaluated, trained.detach()) >= 30  # attention's fast path rounds differently


def test_an_encoder_of_padded_tokens_in_evaluation_is_quantized(multiplied):
    """PyTorch's encoder makes nested tensors of padded tokens, and only the fast path of its layers accepts them."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 256, batch_first=True, dropout=0.0), 2)
    x, padded = torch.randn(2, 6, 128), torch.arange(6) >= torch.tensor([[6], [4]])
    convert(encoder, "mxfp8_rceil", include=["layers.1.*"])
    trained = encoder(x, src_key_padding_mask=padded)
    multiplied.clear()
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=padded)
    assert multiplied == [encoder.layers[1].linear1, encoder.layers[1].linear2]
    assert sqnr_db(evaluated[~padded], trained[~padded].detach()) >= 30


def test_an_encoder_of_which_nothing_was_exchanged_stays_fast():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 256, batch_first=True), 1)
    report = convert(encoder, "mxfp8_rceil")
    assert not report.swapped
    assert report.left["layers.0.linear1"] == report.left["layers.0.linear2"]
    assert report.left["layers.0.linear1"].startswith("in evaluation, nn.TransformerEncoderLayer reads the weight")
    assert encoder.use_nested_tensor
    assert encoder.layers[0].activation_relu_or_gelu


def test_decoder_layers_and_whole_transformers_are_quantized_in_evaluation(multiplied):
    model = nn.Transformer(128, 2, 1, 1, 256, batch_first=True)
    report = convert(model, "mxfp8_rceil", include="encoder.*")
    multiplied.clear()
    with torch.no_grad():
        model.eval()(torch.randn(2, 5, 128), torch.randn(2, 3, 128))
    assert {f"{side}coder.layers.0.linear{i}" for side in ("en", "de") for i in (1, 2)} == report.swapped.keys()
    assert len(multiplied) == 4


def test_linears_whose_weight_their_module_reads_are_left():
    attention = nn.MultiheadAttention(128, 2)
    attention.out_proj = nn.Linear(128, 128)
    model = nn.ModuleList([attention, attention.out_proj])
    report = convert(model, "mxfp8_rceil")
    assert report.left == {
        "0.out_proj": "nn.MultiheadAttention reads the weight of this Linear and never calls the Linear",
        "0.in_proj_weight": "convert does not know how MultiheadAttention uses this parameter",
    }
    assert report.swapped == {"1": "MXLinear"}  # the same Linear, in the place where its module calls it


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="is new in PyTorch 2.13")
def test_the_linear_of_a_fused_loss_is_left():
    report = convert(nn.Sequential(nn.LinearCrossEntropyLoss(64, 128)), "mxfp8_rceil")
    assert report.left == {
        "0.linear": "nn.LinearCrossEntropyLoss reads the weight of this Linear and never calls the Linear"
    }


def test_what_cannot_be_converted():
    with pytest.raises(ValueError, match="the model is a Linear itself"):
        convert(nn.Linear(64, 64), "mxfp8_rceil")
    with pytest.raises(ValueError, match="convert: unknown recipe 'fp8'"):
        convert(Block(), "fp8")
    model = Block()
    convert(model, "mxfp8_rceil", lambda layer, name: name == "up")
    with cache_weights(model), pytest.raises(RuntimeError, match="cache_weights holds the model's weights"):
        convert(model, "mxfp8_floor")
    half = nn.Sequential(nn.Linear(64, 64, dtype=torch.float16))
    assert convert(half, "mxfp8_rceil").left == {
        "0": "MXLinear: parameters have dtype torch.float16; needs torch.bfloat16 or torch.float32"
    }


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_prints_what_makes_it_again(recipe):
    shown = repr(recipe)
    assert eval(shown, {"Recipe": Recipe, "torch": torch}) == recipe
    assert ("scaling" in shown, "scale_format" in shown, "hadamard" in shown) == tuple(
        recipe.format == f for f in ("mxfp8", "fp8_128", "nvfp4")
    )
