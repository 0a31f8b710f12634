"""Models of Hugging Face transformers whose experts train by a recipe, against transformers' own layers."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.nn.utils import parametrize

from mxspec.check import default_device, sqnr_db
from mxspec.nn import (
    RECIPES,
    Float8BlockwiseLinear,
    GroupedExperts,
    MXLinear,
    cache_weights,
    convert,
    fp8_grouped_mm,
    mx_grouped_mm,
    nvfp4_grouped_mm,
    watch,
)
from mxspec.nn.experts import QuantizedExperts
from mxspec.nn.recipe import recipe_of
from tests.helpers import ROOT, plain_environment

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")
DEVICE = default_device()
E, H, INNER, TOP, LAYERS, VOCAB = 4, 128, 256, 2, 2, 128
COMMON = {
    "vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": TOP, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {  # the names of the classes without Config and ForCausalLM, and the sizes
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": INNER, "num_experts": E, "head_dim": 32}),
    "mixtral": ("Mixtral", {"intermediate_size": INNER, "num_local_experts": E}),
    "olmoe": ("Olmoe", {"intermediate_size": INNER, "num_experts": E}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "moe_intermediate_size": INNER, "intermediate_size": INNER, "n_routed_experts": E,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
            "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        },
    ),
    "gpt_oss": ("GptOss", {"intermediate_size": INNER, "num_local_experts": E, "head_dim": 32}),
}  # fmt: skip


DENSE = {
    "llama": ("Llama", {"intermediate_size": INNER}),
    "qwen3": ("Qwen3", {"intermediate_size": INNER, "head_dim": 32}),
}


@functools.cache
def plain(family: str) -> nn.Module:
    """A tiny model of the family with random weights, in float32. The tests copy it."""
    name, sizes = (FAMILIES | DENSE)[family]
    config = getattr(transformers, f"{name}Config")(**COMMON, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias" in key or "experts" in key:  # transformers starts biases at 0, and large models' experts small
                parameter.normal_(std=0.1)
    return model


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(plain(family)).to(dtype)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if name.endswith("mlp.experts")}


def layer_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The experts of the last layer."""
    return list(experts_of(model_of(family, dtype)).values())[-1]


def routed(tokens: int = 21, dtype: torch.dtype = torch.float32, unused: int = 1) -> list[torch.Tensor]:
    """Tokens, the indices of their experts, and the routing weights. Expert `unused` gets no token."""
    torch.manual_seed(1)
    x = torch.randn(tokens, H, device=DEVICE, dtype=dtype)
    scores = torch.randn(tokens, E, device=DEVICE)
    scores[:, unused] = -torch.inf
    weights, index = scores.softmax(-1).topk(TOP)
    return [x.requires_grad_(), index, weights.to(dtype).requires_grad_()]


def step(layer: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients."""
    x.grad = weights.grad = None
    layer.zero_grad()
    out = layer(x, index, weights)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape, device=DEVICE).to(out.dtype))
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad} | {
        name: parameter.grad for name, parameter in layer.named_parameters()
    }


class HandGptOss(QuantizedExperts):
    """gpt-oss's experts on the base class of mxspec's, with the parameters of a plain layer of transformers."""

    weight_names = ("gate_up_proj", "down_proj")
    is_transposed = True

    def __init__(self, layer: nn.Module, recipe: str) -> None:
        super().__init__()
        self.layer, self.gate_up_proj, self.down_proj = layer, layer.gate_up_proj, layer.down_proj
        self.train_by(RECIPES[recipe], hidden=H, inner=INNER)

    def forward(self, x: torch.Tensor, offs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(ids, E).to(x.dtype)
        bias, last = self.layer.gate_up_proj_bias, self.layer.down_proj_bias
        return self.feed_forward(x, offs, lambda out: self.layer._apply_gate(out + chosen @ bias), bias) + chosen @ last


def by_hand(
    layer: nn.Module, recipe: str, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, shared: bool = False
) -> torch.Tensor:
    """The experts' output by mxspec's public layers and PyTorch's indexing, with the parameters of a plain layer."""
    order = index.flatten().argsort(stable=True)
    ids = index.flatten()[order]
    offs = torch.bincount(ids, minlength=E).cumsum(0, dtype=torch.int32)
    tokens = x[order // TOP]
    if shared:
        out = HandGptOss(layer, recipe)(tokens, offs, ids)
    elif layer.is_transposed:
        products = {"fp8_128": fp8_grouped_mm, "nvfp4": nvfp4_grouped_mm}
        mm = products.get(recipe_of(recipe, "the test").format, mx_grouped_mm)
        chosen = nn.functional.one_hot(ids, E).to(x.dtype)
        gate_up = mm(tokens, layer.gate_up_proj.mT, offs, recipe) + chosen @ layer.gate_up_proj_bias
        gate, up = gate_up[:, ::2].clamp(max=layer.limit), gate_up[:, 1::2].clamp(-layer.limit, layer.limit)
        hidden = (up + 1) * (gate * torch.sigmoid(gate * layer.alpha))
        out = mm(hidden, layer.down_proj.mT, offs, recipe) + chosen @ layer.down_proj_bias
    else:
        experts = GroupedExperts(E, H, INNER, recipe, device="meta")
        experts.w_gate_up, experts.w_down = layer.gate_up_proj, layer.down_proj
        out = experts(tokens, offs)
    out = out * weights.flatten()[order][:, None]
    return out[order.argsort()].view(-1, TOP, H).sum(1).to(x.dtype)


def converted(layer: nn.Module, recipe: str) -> nn.Module:
    """A copy of the layer that trains by the recipe."""
    around = nn.ModuleDict({"experts": copy.deepcopy(layer)})
    wide = recipe == "bf16" and torch.float32 in {weight.dtype for weight in layer.parameters()}
    said = f"{type(layer).__name__} of {RECIPES[recipe].format}"
    said += ", which multiplies float32 weights in bfloat16, too" if wide else ""
    assert convert(around, recipe).swapped == {"experts": said}
    return around["experts"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_compute_what_transformers_own_compute_in_float32(family, recipe, dtype):
    call = routed(dtype=dtype)
    truth = step(layer_of(family), *(t.detach().float().requires_grad_() if t.requires_grad else t for t in call))
    got = step(converted(layer_of(family, dtype), recipe), *call)
    for name, expected in truth.items():
        assert got[name].dtype == dtype
        if recipe == "bf16":
            assert sqnr_db(got[name], expected) >= 40, name
        else:  # a routing weight's gradient is the sum of one row, so few products average its noise
            assert sqnr_db(got[name], expected) >= 20, name
    assert sqnr_db(got["out"], truth["out"]) >= (40 if recipe == "bf16" else 22)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2)], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_compute_what_the_layers_built_by_hand_compute(family, recipe, dtype):
    layer, call = layer_of(family, dtype), routed(dtype=dtype)
    layer.limit = 0.5  # gpt-oss clamps gate and up
    expected = step(Hand(layer, recipe), *call)
    around = nn.ModuleDict({"experts": layer})
    convert(around, recipe)
    got = step(layer, *call)
    assert got.keys() == {name.removeprefix("layer.") for name in expected}
    found = recipe_of(recipe, "the test")
    for name, value in expected.items():
        mine = got[name.removeprefix("layer.")]
        if layer.is_transposed and name.endswith("proj") and found != RECIPES["mxfp8_rceil"]:
            # The gradient is computed transposed. So PyTorch's matmul in bfloat16 may sum in another order, and
            # fp8_grouped_gemm_wgrad multiplies by its two scales in another order.
            assert sqnr_db(mine, value.float()) >= (45 if found.format == "bf16" or found.wgrad_bf16 else 100), name
        elif name.endswith("bias"):
            # Two matmuls of PyTorch give it. On some processors they sum in another order.
            assert sqnr_db(mine.float(), value.float()) >= (120 if dtype == torch.float32 else 45), name
        else:
            assert torch.equal(mine, value), name


OTHERS = {  # the module, the classes' names, and sizes
    "gelu": ("mixtral", "MixtralConfig", "MixtralExperts", {"hidden_act": "gelu"}),
    "transposed": ("aria", "AriaTextConfig", "AriaExperts", {"moe_num_experts": E}),
    "without a gate": ("nemotron_h", "NemotronHConfig", "NemotronHExperts", {"n_routed_experts": E}),
    "with a norm": ("muse_spark", "MuseSparkTextConfig", "MuseSparkExperts", {"moe_hidden_size": H}),
}


def other_layer(kind: str) -> nn.Module:
    family, config, experts, sizes = OTHERS[kind]
    modules = f"transformers.models.{family}"
    pytest.importorskip(modules, reason=f"this transformers has no {family}")
    make = getattr(importlib.import_module(f"{modules}.configuration_{family}"), config)
    sizes = {"hidden_size": H, "intermediate_size": INNER, "moe_intermediate_size": INNER, **sizes}
    torch.manual_seed(0)
    module = importlib.import_module(f"{modules}.modeling_{family}")
    layer = getattr(module, experts)(make(num_local_experts=E, **sizes)).to(DEVICE)
    if not hasattr(layer, "is_transposed"):
        pytest.skip(f"in transformers {transformers.__version__}, {family}'s experts have no interface")
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    layer.config._experts_implementation = "eager"
    return layer


@pytest.mark.parametrize("kind", OTHERS)
def test_other_experts_of_the_interface_convert_too(kind):
    layer, call = other_layer(kind), routed()
    truth = step(layer, *call)
    for recipe, least in (("bf16", 38), ("fp8_128", 17)):
        got = step(converted(layer, recipe), *call)
        for name, expected in truth.items():
            assert sqnr_db(got[name], expected) >= least, (recipe, name)


class Hand(nn.Module):
    def __init__(self, layer: nn.Module, recipe: str, shared: bool = False) -> None:
        super().__init__()
        self.layer, self.how = layer, {"recipe": recipe, "shared": shared}

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return by_hand(self.layer, x=x, index=index, weights=weights, **self.how)


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    for _ in range(steps):
        ids = torch.randint(3, VOCAB, (2, 17), device=DEVICE)
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("mxfp8_rceil", torch.float32), ("fp8_128", torch.bfloat16)], ids=["mxfp8", "fp8"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_of_adamw_give_the_weights_of_a_model_built_by_hand_bit_for_bit(family, recipe, dtype):
    model, hand = model_of(family, dtype), model_of(family, dtype)
    report = convert(model, recipe)
    assert set(experts_of(hand)) <= set(report.swapped)
    # Two matmuls of PyTorch give the gradient of an expert's bias. On some processors they sum in another order, so the
    # biases do not train here. Their gradients are compared above.
    frozen = [name for name, _ in model.named_parameters() if name.endswith("proj_bias")]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
        hand.get_parameter(name).requires_grad_(False)
    for name in report.swapped:
        path, _, child = name.rpartition(".")
        layer = hand.get_submodule(name)
        fp8 = recipe == "fp8_128"
        if isinstance(layer, nn.Linear):
            new = Float8BlockwiseLinear.from_linear(layer) if fp8 else MXLinear.from_linear(layer, recipe)
        else:
            new = Hand(layer, recipe, shared=layer.is_transposed)
        setattr(hand.get_submodule(path), child, new)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    got = trained(model)
    stayed = [name for (name, before), after in zip(start.items(), got, strict=True) if torch.equal(before, after)]
    assert stayed == frozen
    assert all(map(torch.equal, got, trained(hand)))


def test_a_saved_model_loads_into_plain_transformers_bit_for_bit(tmp_path):
    for family in FAMILIES | DENSE:
        model = model_of(family, torch.bfloat16)
        report = convert(model, "fp8_128")
        assert {f"model.layers.{LAYERS - 1}.self_attn.o_proj", *experts_of(model)} <= report.swapped.keys()
        model.save_pretrained(tmp_path)
        assert "mxspec" not in (tmp_path / "config.json").read_text()
        kind = type(plain(family))
        loaded, info = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.config._experts_implementation != "mxspec"
        assert not any(hasattr(layer, "recipe") for layer in loaded.modules())
        state, expected = loaded.state_dict(), plain(family).state_dict()
        assert list(state) == list(model.state_dict()) == list(expected)
        for name, value in state.items():
            assert torch.equal(value.to(DEVICE), expected[name].bfloat16()), name
        assert convert(loaded, "fp8_128").swapped == report.swapped


def test_layers_that_are_left_and_the_models_config_stay_as_they_are():
    model, before = model_of("qwen3_moe"), model_of("qwen3_moe")
    kept, *others = experts_of(model)
    written = model.config.to_dict()
    report = convert(model, "fp8_128", filter_fn=lambda layer, name: name in others)
    assert list(report.swapped) == others
    first, second = (experts_of(model)[name] for name in (kept, *others))
    assert first.config is model.config
    assert (model.config.to_dict(), model.config._experts_implementation) == (
        written, before.config._experts_implementation,
    )  # fmt: skip
    assert type(first) is type(experts_of(before)[kept])
    call = routed()
    assert all(map(torch.equal, step(first, *call).values(), step(experts_of(before)[kept], *call).values()))
    expected = step(second, *call)
    model.set_experts_implementation("eager")  # as `generate` sets another one for a while
    assert all(map(torch.equal, step(second, *call).values(), expected.values()))
    assert isinstance(second, type(first))


def test_another_recipe_and_a_recipe_that_cannot_run():
    model, call = model_of("gpt_oss"), routed()
    experts = model.model.layers[1].mlp.experts
    convert(model, "bf16")
    once = step(experts, *call)
    kind, config = type(experts), experts.config
    convert(model, "mxfp8_rceil")
    assert (experts.recipe, type(experts), experts.config) == (RECIPES["mxfp8_rceil"], kind, config)
    assert sqnr_db(step(experts, *call)["out"], once["out"]) < 35
    convert(model, "bf16")
    assert all(map(torch.equal, step(experts, *call).values(), once.values()))
    narrow = dict(FAMILIES["gpt_oss"][1], intermediate_size=80)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**COMMON, **narrow))
    before = type(model.model.layers[0].mlp.experts)
    report = convert(model, "mxfp8_rceil")
    assert report.left["model.layers.0.mlp.experts"] == (
        "GptOssExperts: intermediate_size = 80 must be a multiple of 32. Use a PyTorch layer, or pad the model."
    )
    assert type(model.model.layers[0].mlp.experts) is before
    assert "model.layers.0.mlp.experts" in convert(model, "fp8_128").swapped


def test_what_does_not_go_through_the_interface_is_left_with_the_reason():
    parent = type(layer_of("mixtral"))

    class OwnForward(parent):
        def forward(self, *args):
            return args[0]

    def left(layer):
        report = convert(nn.ModuleDict({"experts": layer}), "mxfp8_rceil")
        assert not report.swapped
        return report.left["experts"]

    layer = layer_of("mixtral")
    layer.__class__ = OwnForward
    assert "OwnForward has its own forward, which does not call transformers' experts interface" in left(layer)
    layer = layer_of("mixtral")
    layer.forward = lambda *args: args[0]
    assert "its own forward" in left(layer)
    assert "parameters have dtype torch.float16" in left(layer_of("mixtral").half())
    layer = layer_of("mixtral")
    layer.gate_up_proj = None
    assert "MixtralExperts: gate_up_proj must be a plain parameter of three dimensions" in left(layer)
    layer = layer_of("mixtral")
    parametrize.register_parametrization(layer, "down_proj", nn.Identity())
    assert "Convert a model before it is sharded, quantized or parametrized" in left(layer)
    assert layer(*routed()).shape == (21, H)
    model = model_of("mixtral")
    convert(nn.ModuleDict({"experts": layer_of("mixtral")}), "bf16")  # the first one registers the function
    model.set_experts_implementation("mxspec")
    with pytest.raises(TypeError, match=r"'mxspec' has no recipe. Call mxspec.nn.convert"):
        model(torch.ones(1, 3, dtype=torch.int64, device=DEVICE))


def test_wrong_arguments_are_named():
    layer, (x, index, weights) = converted(layer_of("olmoe"), "fp8_128"), routed()
    with pytest.raises(ValueError, match=r"OlmoeExperts: input has shape \(21, 64\); needs \(..., 128\)"):
        layer(x[:, :64], index, weights)
    with pytest.raises(TypeError, match=r"OlmoeExperts: input has dtype torch\.float16"):
        layer(x.half(), index, weights)
    with pytest.raises(TypeError, match="OlmoeExperts: top_k_index is a list"):
        layer(x, index.tolist(), weights)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_tokens_and_the_experts_of_another_device_add_nothing(family):
    layer = converted(layer_of(family), "mxfp8_rceil")
    nothing = step(layer, *routed(0))
    assert nothing["out"].shape == nothing["x"].shape == (0, H)
    assert all(not nothing[name].any() for name, _ in layer.named_parameters())
    x, index, weights = routed()
    here = index != 2
    alone = step(layer, x, torch.where(here, index, E), weights.detach().masked_fill(~here, 0).requires_grad_())
    with torch.no_grad():  # the same, with an expert 2 that returns zeros
        layer.down_proj[2] = 0
        if layer.has_bias:
            layer.down_proj_bias[2] = 0
    expected = step(layer, x, index, weights)
    for name in ("out", "x", "weights"):
        assert torch.equal(alone[name], expected[name]), name
    assert all(not alone[name][2].any() for name, _ in layer.named_parameters())


def test_a_token_is_the_same_beside_other_tokens_and_padding_changes_no_other():
    layer, (x, index, weights) = converted(layer_of("mixtral"), "mxfp8_rceil"), routed(40)
    with torch.no_grad():
        out = layer(x, index, weights)
        assert torch.equal(layer(x[:7], index[:7], weights[:7]), out[:7])
        x[30:] = torch.nan  # as padding may hold anything
        assert torch.equal(layer(x, index, weights)[:30], out[:30])


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_frozen_weights_and_autocast(family, recipe):
    layer, call = converted(layer_of(family), recipe), routed()
    everything = step(layer, *call)
    layer.requires_grad_(False)
    frozen = step(layer, *call)
    assert all(frozen[name] is None for name, _ in layer.named_parameters())
    assert all(torch.equal(frozen[name], everything[name]) for name in ("out", "x", "weights"))
    layer.down_proj.requires_grad_()
    assert torch.equal(step(layer, *call)["down_proj"], everything["down_proj"])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        under = layer(*call)
    assert under.dtype == torch.float32  # that of the tokens, as transformers' own experts return
    x, index, weights = call
    layer.bfloat16()
    assert layer(x.bfloat16(), index, weights).dtype == torch.bfloat16  # some routers compute in float32
    assert sqnr_db(under.detach(), everything["out"]) >= 20
    assert not torch.equal(under, everything["out"])


class Lora(nn.Module):
    """A Linear with a trained difference of rank 4, as PEFT adds it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.base, weight = linear, linear.weight
        self.a = nn.Linear(weight.shape[1], 4, bias=False, device=weight.device, dtype=weight.dtype)
        self.b = nn.Linear(4, weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_lora_with_frozen_experts_and_gradient_checkpointing():
    model = model_of("qwen3_moe")
    convert(model, "mxfp8_rceil")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    ids = torch.randint(3, VOCAB, (2, 9), device=DEVICE)

    def gradients():
        model.zero_grad()
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    once = gradients()
    assert len(once) == 2 * LAYERS * 2 // 2
    assert all(grad.any() for grad in once)
    model.gradient_checkpointing_enable()
    assert all(map(torch.equal, gradients(), once))


class AddLora(nn.Module):
    """The parametrization of a weight `(E, N, K)` by itself and a trained difference of rank 2."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        torch.manual_seed(4)
        self.a = nn.Parameter(0.1 * torch.randn(experts, 2, columns, device=weight.device))
        self.b = nn.Parameter(0.1 * torch.randn(experts, rows, 2, device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def test_lora_of_experts_as_a_parametrization_after_convert():
    plain_layer, call = layer_of("qwen3_moe").requires_grad_(False), routed()
    layer = converted(plain_layer, "fp8_128")
    before = type(layer)
    results = []
    for each in (plain_layer, layer):
        parametrize.register_parametrization(each, "gate_up_proj", AddLora(each.gate_up_proj))
        results.append(step(each, *call))
    for name, expected in results[0].items():
        assert (expected is None) == (results[1][name] is None)
        assert expected is None or sqnr_db(results[1][name], expected) >= 18, name
    assert sum(value is not None for value in results[1].values()) == 5  # the output, two inputs, a and b
    parametrize.remove_parametrizations(layer, "gate_up_proj")
    assert type(layer) is before


def test_cache_weights_holds_the_codes_of_experts():
    model = model_of("gpt_oss")
    convert(model, "mxfp8_rceil")
    experts, call = model.model.layers[0].mlp.experts, routed()
    once = step(experts, *call)
    with cache_weights(model):
        assert all(map(torch.equal, step(experts, *call).values(), once.values()))
        with pytest.raises(RuntimeError, match="cache_weights holds"):
            convert(model, "bf16")
        assert copy.deepcopy(experts)._cached is None
    with pytest.raises(RuntimeError, match="a weight has changed"), cache_weights(model), torch.no_grad():
        experts.down_proj.mul_(2)


def test_copies_and_pickles_are_converted_too():
    model, call = model_of("deepseek_v3"), routed()
    convert(model, "fp8_128")
    experts = model.model.layers[1].mlp.experts
    expected = step(experts, *call)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        layer = other.model.layers[1].mlp.experts
        assert type(layer) is type(experts)
        assert layer.recipe == experts.recipe
        assert layer.config is not other.config
        assert all(map(torch.equal, step(layer, *call).values(), expected.values()))


@pytest.mark.parametrize(("family", "fused"), [("mixtral", "swiglu"), ("gpt_oss", "clamped_swiglu")])
def test_experts_compile_to_one_graph_of_the_same_ops(family, fused):
    layer, call = converted(layer_of(family, torch.bfloat16), "fp8_128"), routed(dtype=torch.bfloat16)
    expected, graphs = step(layer, *call), AotEagerAndRecordGraphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for name, value in step(compiled, *call).items():
        assert sqnr_db(value.float(), expected[name.removeprefix("_orig_mod.")].float()) >= 45, name
    (graph,) = graphs.fw_graphs
    assert f"mxspec.{fused}_fp8_quantize_rowcol_groups" in graph.code


def test_the_operations_of_the_report_are_those_of_the_experts_that_a_token_meets():
    from mxspec.integrations.transformers import experts_per_token

    for family in FAMILIES:
        layer = layer_of(family)
        assert experts_per_token(layer) == TOP
        report = convert(model := nn.ModuleDict({"moe": layer, "dense": nn.Linear(H, H, bias=False)}), "mxfp8_rceil")
        assert report.share_of_flops == 1
        report = convert(model, "bf16", lambda layer, name: name == "moe")
        dense, experts = H * H, TOP * 3 * H * INNER
        assert report.share_of_flops == dense / (dense + experts)
        assert convert(model, "bf16").share_of_flops == 0
    layer.config = SimpleNamespace()
    assert experts_per_token(layer) is None
    assert convert(model, "bf16").share_of_flops is None


def test_the_report_of_a_whole_model_counts_its_matmuls_and_parameters():
    model = model_of("mixtral")
    report = convert(model, "fp8_128")
    low = LAYERS * (4 * H * H + TOP * 3 * H * INNER)
    assert report.share_of_flops == low / (low + LAYERS * E * H + VOCAB * H)  # not the routers and the head
    weights = LAYERS * (4 * H * H + E * 3 * H * INNER)
    assert report.share_of_parameters == weights / sum(parameter.numel() for parameter in model.parameters())
    assert report.left.keys() >= {"lm_head", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"}


def test_importing_mxspec_imports_no_transformers():
    code = "import mxspec.integrations.transformers, mxspec.nn, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=plain_environment())


FOLDER = Path(os.environ.get("MXSPEC_TRITONS") or ROOT / ".venv")
OTHER = "5.17.0"


@pytest.mark.turns(3)
@pytest.mark.skipif(transformers.__version__ == OTHER, reason="this run is the one with the other version")
def test_another_version_of_transformers():
    folder = FOLDER / f"transformers-{OTHER}"
    if not folder.exists():
        pytest.skip(f"no transformers in {folder} (MXSPEC_TRITONS)")
    some = "(three_steps and mxfp8) or plain_transformers or with_the_reason or pickles or other_experts"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, __file__]
    path = os.pathsep.join([str(folder), str(ROOT)])
    run = subprocess.run(
        command, env=plain_environment() | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_watch_counts_a_weight_along_k_for_the_forward_however_it_is_stored(family):
    """Three elements of a weight lie in one block along K, where two underflow, and in three blocks along N."""
    layer = converted(layer_of(family), "mxfp8_rceil")
    with torch.no_grad():
        weight = layer.down_proj.zero_()
        weight = weight if layer.is_transposed else weight.mT  # (E, K, N)
        weight[0, :3, 0] = torch.tensor([448, 2.0**-10, -(2.0**-10)])
    with watch(layer) as seen:
        step(layer, *routed())
    rows = {row.matmul: row for row in seen.rows() if (row.weight, row.tensor) == ("down_proj", "weight")}
    assert (rows["forward"].underflowed, rows["dgrad"].underflowed) == (2, 0)
    blocks = weight.numel() // 32
    assert (rows["forward"].zero_blocks, rows["dgrad"].zero_blocks) == (blocks - 1, blocks - 3)
    assert {row.weight for row in seen.rows()} == {"gate_up_proj", "down_proj"}
