"""Experts of transformers with weights in MXFP4: they compute what the dequantized model computes, and are saved."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import mxspec
from mxspec import checkpoint
from mxspec.check import default_device, sqnr_db
from mxspec.checkpoint import CheckpointError
from mxspec.nn import convert, quantize_weights
from tests.helpers import ROOT, module_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")
DEVICE = default_device()
COMMON = {
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "GptOss": {"intermediate_size": 64, "num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 4},
}
EXPERTS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def config_of(family: str):
    return getattr(transformers, f"{family}Config")(**COMMON, **FAMILIES[family])


def model_of(family: str) -> nn.Module:
    """A tiny model in bfloat16 whose experts' weights are MXFP4 numbers, as after gpt-oss is loaded."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family)).to(DEVICE, torch.bfloat16).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "experts" in key:
                parameter.normal_(std=0.1)
                if parameter.ndim == 3:
                    stored = parameter.mT if family == "GptOss" else parameter
                    stored.copy_(mxspec.mx_dequantize(*mxspec.mx_quantize(stored.contiguous(), elem_dtype="e2m1")))
    return model


IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_it_computes_and_generates_what_the_dequantized_model_does(family):
    model = model_of(family)
    held = copy.deepcopy(model)
    report = quantize_weights(held)
    assert list(report.held) == EXPERTS
    assert not report.left
    assert str(report).splitlines()[1].endswith(f"experts: {family}Experts, every value is kept")
    assert sqnr_db(held(IDS).logits, model(IDS).logits) > 40  # the sums have another order
    assert "weights in MXFP4, tokens in bfloat16" in repr(held)
    for copied in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(copied(IDS).logits, held(IDS).logits)
    of = {name: m.generate(IDS, max_new_tokens=4, do_sample=False) for name, m in (("bf16", model), ("fp4", held))}
    assert of["fp4"].shape == of["bf16"].shape


@torch.no_grad()
def test_an_expert_of_another_device_adds_nothing():
    layer = model_of("GptOss").model.layers[0].mlp.experts
    x, index = torch.randn(6, 128, device=DEVICE).bfloat16(), torch.tensor([[0, 3], [4, 1]] * 3, device=DEVICE)
    weights = torch.rand(6, 2, device=DEVICE).bfloat16()
    quantize_weights(layer)
    alone = torch.stack([layer(x[i : i + 1], index[i : i + 1], weights[i : i + 1])[0] for i in range(6)])
    assert torch.equal(layer(x, index, weights), alone)
    only = weights.clone()
    only[1::2, 0] = 0
    elsewhere = layer(x, torch.where(index == 4, 0, index), only)
    assert torch.equal(layer(x, index, weights), elsewhere)


@torch.no_grad()
def test_gpt_oss_is_saved_as_its_own_checkpoints_are_and_loads_without_bfloat16_weights(tmp_path: Path):
    """The tensors of the file are those that transformers and vLLM read: `_blocks` and `_scales`."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from safetensors.torch import load_file

    model = model_of("GptOss")
    held = copy.deepcopy(model)
    quantize_weights(held)
    held.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors[f"{EXPERTS[0]}.gate_up_proj_blocks"].shape == (4, 128, 4, 16)
    assert tensors[f"{EXPERTS[0]}.down_proj_scales"].shape == (4, 128, 2)

    # transformers dequantizes it: the package `kernels` is not installed
    loaded = transformers.GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(DEVICE)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert list(quantize_weights(loaded).held) == EXPERTS
    assert all(torch.equal(t, held.state_dict()[name]) for name, t in loaded.state_dict().items())

    with accelerate.init_empty_weights(include_buffers=False):
        empty = transformers.GptOssForCausalLM(config_of("GptOss"))
    assert set(quantize_weights(empty).held.values()) == {"GptOssExperts, empty on the meta device"}
    empty.load_state_dict(tensors, assign=True)
    assert torch.equal(empty.to(DEVICE).eval()(IDS).logits, loaded(IDS).logits)


def test_what_cannot_hold_them_is_left():
    rounded = model_of("Qwen3Moe")
    with torch.no_grad():
        rounded.model.layers[0].mlp.experts.down_proj.normal_()
    report = quantize_weights(rounded)
    assert list(report.held) == EXPERTS[1:]
    assert "of its 98304 weights" in report.left[EXPERTS[0]]
    assert report.notes[0].endswith("because not all of its experts hold MXFP4; store the state_dict")
    assert "no loader reads MXFP4 experts of qwen3_moe" in str(quantize_weights(rounded, allow_lossy=True))
    assert not hasattr(rounded.config, "quantization_config"), "only gpt-oss has such a checkpoint"
    half = model_of("GptOss")
    quantize_weights(half, lambda layer, name: name == EXPERTS[0])
    assert not hasattr(half.config, "quantization_config"), "a part of the experts is no checkpoint of gpt-oss"
    trained = model_of("GptOss")
    plain = copy.deepcopy(trained)
    convert(trained, "mxfp8_rceil", lambda layer, name: name in EXPERTS)
    assert list(quantize_weights(trained).held) == EXPERTS, "a recipe ends where serving begins"
    assert not hasattr(trained.model.layers[0].mlp.experts, "recipe")
    quantize_weights(plain)
    with torch.no_grad():
        assert torch.equal(trained(IDS).logits, plain(IDS).logits)
    moved = model_of("GptOss")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.hooks.add_hook_to_module(moved.model.layers[0].mlp.experts, accelerate.hooks.ModelHook())
    assert quantize_weights(moved).left == {
        EXPERTS[0]: "a hook of accelerate moves its weights; load the model onto one device"
    }
    held = model_of("GptOss")
    quantize_weights(held)
    assert convert(held, "mxfp8_rceil").left[EXPERTS[0]] == "it holds its weights in MXFP4, for inference"
    assert quantize_weights(held).left == dict.fromkeys(EXPERTS, "it holds MXFP4 already")


def test_a_model_inside_of_a_module_or_quantized_layer_by_layer_is_saved_too(tmp_path: Path):
    inside = nn.ModuleDict({"model": model_of("GptOss")})
    assert not quantize_weights(inside).notes
    assert inside["model"].config.quantization_config["quant_method"] == "mxfp4"
    model = model_of("GptOss")
    for layer in model.model.layers:
        (note,) = quantize_weights(layer).notes
        assert "call quantize_weights of the whole model before save_pretrained" in note
    report = quantize_weights(model)
    assert str(report).startswith("0 experts layers changed to MXFP4")
    assert (list(report.left), report.notes) == (EXPERTS, [])
    assert model.config.quantization_config["quant_method"] == "mxfp4"


def test_a_model_of_the_same_config_is_saved_as_before():
    config = config_of("GptOss")
    held, plain = (transformers.GptOssForCausalLM(config).bfloat16() for _ in range(2))
    quantize_weights(held, allow_lossy=True)
    assert held.config.quantization_config["quant_method"] == "mxfp4"
    assert held.model.config is held.config
    assert held.model.layers[0].self_attn.config is held.config
    assert not hasattr(plain.config, "quantization_config")
    assert plain.config is plain.model.config is config


def test_a_folder_of_another_model_is_refused_by_convert(tmp_path: Path):
    """The plain weights of gpt-oss's experts are transposed, and those of other models are not."""
    model = model_of("Qwen3Moe")
    quantize_weights(model)
    model.save_pretrained(tmp_path / "held")
    with pytest.raises(CheckpointError, match="but the model_type is 'qwen3_moe', and its own may lie otherwise"):
        checkpoint.convert(tmp_path / "held", tmp_path / "bf16", to="bf16")
    assert checkpoint.inspect(tmp_path / "held").loaders["vLLM"] == "reads wrong"


def test_wrong_arguments_and_a_backward_are_refused():
    model = model_of("GptOss")
    quantize_weights(model)
    layer = model.model.layers[0].mlp.experts
    x, index = torch.zeros(3, 128, device=DEVICE).bfloat16(), torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(3, 2, device=DEVICE).bfloat16()
    with pytest.raises(TypeError, match=r"MXFP4 weights need tokens in torch\.bfloat16"):
        layer(x.float(), index, weights)
    with pytest.raises(TypeError, match=r"top_k_index has dtype torch\.float32; needs integers"):
        layer(x, index.float(), weights)
    with pytest.raises(ValueError, match=r"top_k_weights has shape \(2, 2\); needs \(3, 2\)"):
        layer(x, index, weights[1:])
    with pytest.raises(RuntimeError, match="GptOssExperts: the layer holds its weights in MXFP4, for inference"):
        model(IDS, labels=IDS).loss.backward()


def test_its_benchmark_compares_and_stores_the_figures_of_the_guide(tmp_path: Path, monkeypatch):
    benchmark = module_of(ROOT / "benchmarks" / "weight_only.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a GPU, it takes minutes
    monkeypatch.setattr(benchmark, "PACE", benchmark.Pace(0, 1, 1, rounds=1))
    benchmark.main(["--json", str(tmp_path / "run.json")])
    (row,) = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert list(row["times"]) == ["transformers bf16", "mxspec bf16", "mxspec MXFP4"]
    monkeypatch.setattr(benchmark, "sqnr_db", lambda *both: 39.0)
    with pytest.raises(AssertionError, match=r"transformers bf16, 4 tokens: 39\.0 dB; needs 40"):
        benchmark.main([])
    stored = json.loads((ROOT / "benchmarks/results/weight_only/h200-2026-11-29-gpt-oss-120b.json").read_text())
    guide = (ROOT / "docs" / "guides" / "checkpoints.md").read_text()
    for row in stored["rows"]:
        ours, theirs = row["times"]["mxspec MXFP4"], row["times"]["transformers bf16"]
        cells = [f"{of['us']:.0f}, {of['call_us']:.0f}" for of in (ours, theirs)]
        ratios = ", ".join(f"{theirs[key] / ours[key]:.2f}" for key in ("us", "call_us"))
        assert f"\n| {row['tokens']} | {cells[0]} | {cells[1]} | {ratios} |\n" in guide
