"""`save`: the bytes of a file are the codes that a layer's forward multiplies."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import mxspec
from mxspec import checkpoint, dispatch
from mxspec.checkpoint import CheckpointError, Problem, convert, inspect, save, verify
from mxspec.checkpoint import save as save_function
from mxspec.nn import RECIPES, Float8BlockwiseLinear, GroupedExperts, MXLinear, NVFP4Linear, Recipe, cache_weights
from mxspec.nn import convert as convert_layers

FAMILIES = {
    "fp8_128": ("fp8_block", "ct_fp8_block"),
    "mxfp8": ("mxfp8", "ct_mxfp8", "modelopt_mxfp8"),
}
SCALE = {"fp8_block": "weight_scale_inv", "mxfp8": "weight_scale_inv"}  # the others: weight_scale
RECIPES_AND_FAMILIES = [
    (recipe, to)
    for recipe in ("fp8_128", "fp8_128_pow2", "mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_wgrad_bf16")
    for to in FAMILIES[RECIPES[recipe].format]
]


def quantized(w, recipe):
    """Codes and scales of `(N, K)` as bytes, by the reference of the op that quantizes one direction."""
    if recipe.format == "fp8_128":
        codes, scale = dispatch.reference("fp8_quantize_128x128")(w, scale_format=recipe.scale_format)
        return codes.view(torch.uint8), scale
    codes, scale = dispatch.reference("mx_quantize")(w, elem_dtype=torch.float8_e4m3fn, scaling=recipe.scaling)
    return codes.view(torch.uint8), scale.view(torch.uint8)


class Model(nn.Module):
    """A Linear with a bias, experts, a tensor of each plain kind, and a layer that stays plain."""

    def __init__(self, recipe, dtype=torch.bfloat16):
        super().__init__()
        self.q_proj = nn.Linear(256, 384, dtype=dtype)
        self.head = nn.Linear(256, 10, bias=False, dtype=torch.float32)
        self.norm = nn.LayerNorm(256, dtype=torch.float32)
        self.experts = GroupedExperts(3, 256, 128, recipe, dtype=dtype)
        self.register_buffer("steps", torch.tensor(7))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            self.q_proj.weight[:128, :128] = 0
            self.q_proj.weight[130, 200:232] *= 2.0**-20
        convert_layers(self, recipe, lambda layer, name: name != "head")


def wanted(model, recipe, scale):
    """The bytes of all tensors of the file, by hand."""
    w = {"q_proj": model.q_proj.weight}
    for i in range(3):
        w[f"experts.{i}.gate_proj"] = model.experts.w_gate_up[i, :128]
        w[f"experts.{i}.up_proj"] = model.experts.w_gate_up[i, 128:]
        w[f"experts.{i}.down_proj"] = model.experts.w_down[i]
    found = {}
    for name, weight in w.items():
        found[f"{name}.weight"], found[f"{name}.{scale}"] = quantized(weight.detach(), recipe)
    for name in ("q_proj.bias", "head.weight", "norm.weight", "norm.bias", "steps"):
        found[name] = model.state_dict()[name]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("recipe", "to"), RECIPES_AND_FAMILIES)
def test_the_bytes_are_those_of_the_ops_reference(tmp_path, recipe, to, dtype):
    model, recipe = Model(RECIPES[recipe], dtype), RECIPES[recipe]
    manifest = save(model, tmp_path / "out", to=to)
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = wanted(model, recipe, SCALE.get(to, "weight_scale"))
    assert found.keys() == want.keys() == manifest["tensors"].keys()
    for name, x in found.items():
        codes = x.dtype == torch.float8_e4m3fn
        assert (x.view(torch.uint8) if codes else x).equal(want[name]), name
        assert codes or x.dtype == want[name].dtype, name
    assert manifest["tensors"]["experts.1.up_proj.weight"]["from"] == ["experts.w_gate_up"]
    assert manifest["tensors"]["head.weight"]["how"] == "copied"
    of_fp8 = "contract, scale_format pow2" if recipe.scale_format == "pow2" else "contract"
    rule = of_fp8 if recipe.format == "fp8_128" else f"contract, scaling {recipe.scaling}"
    assert manifest["tensors"]["q_proj.weight"]["rule"] == rule
    assert json.loads((tmp_path / "out" / "mxspec_manifest.json").read_text()) == manifest
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["config.json", "model.safetensors", "mxspec_manifest.json"]
        + (["hf_quant_config.json"] if to == "modelopt_mxfp8" else [])
    )


def test_the_forward_multiplies_the_saved_bytes(tmp_path):
    """Bits of the layer's output, from the file and the reference's matmul."""
    model, x = Model("fp8_128"), torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    save(model, tmp_path, to="fp8_block")
    found = load_file(tmp_path / "model.safetensors")
    with mxspec.use_backend("reference"):
        q, s = mxspec.fp8_quantize_1x128(x)
        want = mxspec.fp8_gemm(q, s, found["q_proj.weight"], found["q_proj.weight_scale_inv"]) + found["q_proj.bias"]
        assert model.q_proj(x).equal(want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("recipe", "to"), RECIPES_AND_FAMILIES)
def test_a_model_on_a_gpu_has_the_same_bytes(tmp_path, recipe, to):
    digests = []
    for device in ("cpu", "cuda"):
        manifest = save(Model(RECIPES[recipe]).to(device), tmp_path / device, to=to)
        digests.append({name: tensor["sha256"] for name, tensor in manifest["tensors"].items()})
    assert digests[0] == digests[1]


def test_layers_of_one_format_may_have_different_scalings(tmp_path):
    first, second = MXLinear(64, 32, recipe="mxfp8_floor"), MXLinear(64, 32)
    manifest = save(nn.Sequential(first, second), tmp_path, to="mxfp8")
    assert [manifest["tensors"][f"{i}.weight"]["rule"] for i in (0, 1)] == [
        "contract, scaling floor",
        "contract, scaling rceil",
    ]
    found = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate((first, second)):
        assert found[f"{i}.weight"].view(torch.uint8).equal(quantized(layer.weight.detach(), layer.recipe)[0])
    assert manifest["format"] == "mxfp8"


def test_inside_cache_weights_the_held_codes_are_saved(tmp_path):
    model = Model("mxfp8_rceil")
    save(model, tmp_path / "before", to="mxfp8")
    with cache_weights(model):
        model.q_proj.weight.data.mul_(3)  # a write that PyTorch does not count
        save(model, tmp_path / "held", to="mxfp8")
    save(model, tmp_path / "after", to="mxfp8")
    before, held, after = (load_file(tmp_path / n / "model.safetensors") for n in ("before", "held", "after"))
    name = "q_proj.weight"
    assert before[name].view(torch.uint8).equal(held[name].view(torch.uint8))
    assert not before[name].view(torch.uint8).equal(after[name].view(torch.uint8))
    with cache_weights(model):
        with torch.no_grad():
            model.q_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="a weight has changed"):
            save(model, tmp_path / "stale", to="mxfp8")
        assert not (tmp_path / "stale").exists()
        with torch.no_grad():
            model.q_proj.weight.mul_(0.5)
        model.q_proj._cached_from = model.q_proj._state()  # the block may end


@pytest.mark.parametrize(("recipe", "to"), RECIPES_AND_FAMILIES)
def test_verify_agrees_until_a_weight_changes(tmp_path, recipe, to):
    model = Model(RECIPES[recipe])
    save(model, tmp_path, to=to)
    for verdict in (verify(model, tmp_path), verify(tmp_path, model)):
        assert verdict.ok
        assert {finding.status for finding in verdict.findings} == {"equal"}
        assert len(verdict.findings) == 1 + 9 + 5
    with torch.no_grad():
        model.experts.w_gate_up[2, 130, 7] += 1
    (wrong,) = [f for f in verify(model, tmp_path).findings if f.status != "equal"]
    assert (wrong.name, wrong.status) == ("experts.2.up_proj", "differs")
    assert not verify(tmp_path, model).ok


def test_verify_still_names_the_rule_that_made_a_file_of_a_live_layers_weight(tmp_path):
    model = Model("fp8_128")
    plain = {"q_proj.weight": model.q_proj.weight.detach(), "q_proj.bias": model.q_proj.bias.detach()}
    (tmp_path / "plain").mkdir()
    from safetensors.torch import save_file

    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain" / "config.json").write_text("{}")
    convert(tmp_path / "plain", tmp_path / "deepseek", to="fp8_block", rule="deepseek")
    found = {f.name: f for f in verify(tmp_path / "deepseek", model).findings}
    assert found["q_proj"].status == "made by a rule"
    assert "deepseek" in found["q_proj"].rules
    convert(tmp_path / "plain", tmp_path / "contract", to="fp8_block")
    assert {f.name: f.status for f in verify(model, tmp_path / "contract").findings}["q_proj"] == "equal"
    assert {f.name: f.status for f in verify(model, tmp_path / "plain").findings}["q_proj"] == "equal"


def test_inspect_finds_no_problem(tmp_path):
    for recipe, to in RECIPES_AND_FAMILIES:
        save(Model(RECIPES[recipe]), tmp_path / f"{recipe}-{to}", to=to)
        found = inspect(tmp_path / f"{recipe}-{to}")
        assert found.problems == list[Problem]()
        assert {group.family.name for group in found.groups} == {to}


def test_the_configuration_excludes_what_stays_plain(tmp_path):
    model = Model("fp8_128")
    model.other = GroupedExperts(2, 256, 128, "bf16", dtype=torch.bfloat16)
    save(model, tmp_path / "a", to="fp8_block")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    experts = [f"other.{i}.{name}" for i in range(2) for name in ("down_proj", "gate_proj", "up_proj")]
    assert config == {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["head", "other", *experts],
        }
    }
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert found["other.1.up_proj.weight"].equal(model.other.w_up[1])
    assert found["other.1.up_proj.weight"].dtype == torch.bfloat16
    convert_layers(model, "mxfp8_rceil", lambda layer, name: name == "experts")
    model.q_proj = nn.Linear(256, 384)
    save(model, tmp_path / "b", to="modelopt_mxfp8")
    config = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())
    assert config["quantization"]["exclude_modules"] == ["head", "other", *experts, "q_proj"]
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_shards_hold_the_same_bytes_and_the_index_names_them(tmp_path):
    model = Model("fp8_128")
    whole = save(model, tmp_path / "whole", to="fp8_block")
    seen = []
    parts = save(model, tmp_path / "parts", to="fp8_block", shard_bytes=100_000, progress=lambda s: seen.extend(s) or s)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert seen == sorted(set(index["weight_map"].values()))
    assert len(seen) > 3
    assert seen[0] == f"model-00001-of-{len(seen):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for x in load_file(tmp_path / "whole" / "model.safetensors").values()
    )
    for name, shard in index["weight_map"].items():
        assert parts["tensors"][name]["sha256"] == whole["tensors"][name]["sha256"]
        assert parts["tensors"][name]["shard"] == shard
    sizes = [(tmp_path / "parts" / shard).stat().st_size for shard in seen]
    assert all(size < 110_000 for size in sizes)
    assert verify(tmp_path / "parts", tmp_path / "whole").ok
    single = save(MXLinear(64, 32), tmp_path / "one", to="mxfp8", shard_bytes=1)
    assert len({entry["shard"] for entry in single["tensors"].values()}) == 2


def test_another_family_is_written_by_convert_and_keeps_the_values(tmp_path):
    save(Model("mxfp8_rceil"), tmp_path / "a", to="mxfp8")
    save(Model("mxfp8_rceil"), tmp_path / "b", to="ct_mxfp8")
    convert(tmp_path / "a", tmp_path / "c", to="ct_mxfp8")
    b, c = (load_file(tmp_path / n / "model.safetensors") for n in "bc")
    assert b.keys() == c.keys()
    assert all(b[name].view(-1).view(torch.uint8).equal(c[name].view(-1).view(torch.uint8)) for name in b)


def test_an_error_leaves_no_file(tmp_path, monkeypatch):
    model = Model("fp8_128")
    with torch.no_grad():
        model.experts.w_down[1, 3, 3] = torch.nan
    for shard_bytes in (10**9, 10**5):
        with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.weight.* hold a NaN or an Inf"):
            save(model, tmp_path / "new" / "nan", to="fp8_block", shard_bytes=shard_bytes)
        assert not (tmp_path / "new" / "nan").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        save(model, tmp_path / "empty", to="fp8_block")
    assert not list((tmp_path / "empty").iterdir())

    def full(*args):
        if len(list((tmp_path / "full").glob("*.safetensors"))) == 2:
            (tmp_path / "full" / "other").touch()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = r"save: .*No space left on device; the files that were written to .* are removed"
    with pytest.raises(OSError, match=message):
        save(Model("fp8_128"), tmp_path / "full", to="fp8_block", shard_bytes=10**5)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["other"]


def test_the_manifest_comes_last_and_config_json_has_the_quantization_at_once(tmp_path, monkeypatch):
    renamed, rename = [], os.replace

    def noted(source, target):
        renamed.append(target.name)
        rename(source, target)
        if target.name == "config.json":
            assert "quantization_config" in json.loads(target.read_text())

    monkeypatch.setattr(os, "replace", noted)
    save(Model("fp8_128"), tmp_path, to="fp8_block", shard_bytes=200_000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert renamed == [*shards, "config.json", "model.safetensors.index.json", "mxspec_manifest.json"]


def test_a_directory_that_holds_files_is_refused(tmp_path):
    model = MXLinear(64, 32)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty, it holds notes; needs a new directory"):
        save(model, tmp_path / "a", to="mxfp8")
    with pytest.raises(CheckpointError, match="is a file; needs a new directory"):
        save(model, tmp_path / "a" / "notes", to="mxfp8")
    assert (tmp_path / "a" / "notes").read_text() == "mine"
    save(model, tmp_path / "b", to="mxfp8")
    with pytest.raises(CheckpointError, match=r"is not empty, it holds config\.json"):
        save(model, tmp_path / "b", to="mxfp8")


@pytest.mark.parametrize(
    ("recipe", "to"),
    [("fp8_128", "mxfp8"), ("fp8_128", "bf16"), ("mxfp8_rceil", "fp8_block"), ("mxfp8_rceil", "ct_mxfp4")],
)
def test_a_family_of_another_format_is_refused(tmp_path, recipe, to):
    fit = ", ".join(FAMILIES[RECIPES[recipe].format])
    with pytest.raises(ValueError, match=rf"which {to} does not store; it needs {fit}\. To write {to}, save one"):
        save(Model(recipe), tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match="the model is a dict"):
        save({}, tmp_path / "out", to="mxfp8")
    with pytest.raises(ValueError, match="no family is named 'fp8'; there are bf16, fp8_block"):
        save(MXLinear(64, 32), tmp_path / "out", to="fp8")
    for size in (0, -1, 1e9, None):
        with pytest.raises(ValueError, match="shard_bytes"):
            save(MXLinear(64, 32), tmp_path / "out", to="mxfp8", shard_bytes=size)
    assert checkpoint.save is save_function
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_saved_get_an_error_that_says_what_to_do(tmp_path):
    linear, out = MXLinear(64, 32), tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"computes with codes: none was converted, .* Call mxspec\.nn\.convert"):
        save(nn.Linear(64, 32), out, to="mxfp8")
    with pytest.raises(CheckpointError, match=r"no layer of the model computes with codes: .* the recipe bf16"):
        save(GroupedExperts(2, 64, 64, "bf16"), out, to="mxfp8")
    of_nvfp4 = nn.Sequential(NVFP4Linear(64, 32))
    with pytest.raises(
        CheckpointError, match=r"'0' has the recipe nvfp4\. .* Write a plain checkpoint\. .* other values"
    ):
        save(of_nvfp4, out, to="ct_nvfp4")
    mixed = nn.Sequential(linear, Float8BlockwiseLinear(128, 128))
    with pytest.raises(CheckpointError, match=r"'0' has mxfp8, '1' has fp8_128. A checkpoint has one: convert all"):
        save(mixed, out, to="mxfp8")
    with pytest.raises(CheckpointError, match=r"0\.weight is on the meta device and has no values. Load the weights"):
        save(nn.Sequential(MXLinear(64, 32, device="meta")), out, to="mxfp8")
    with pytest.raises(CheckpointError, match=r"the model is wrapped by torch\.compile. Pass the model"):
        save(torch.compile(nn.Sequential(linear)), out, to="mxfp8")
    with pytest.raises(CheckpointError, match=r"the module '0' is wrapped by torch\.compile"):
        save(nn.Sequential(torch.compile(linear)), out, to="mxfp8")
    embedding = nn.Embedding(32, 64)
    head = MXLinear(64, 32)
    head.weight = embedding.weight
    with pytest.raises(CheckpointError, match=r"1\.weight is quantized and 0\.weight is plain, and they are one param"):
        save(nn.Sequential(embedding, head), out, to="mxfp8")

    parametrized = nn.Sequential(MXLinear(64, 32))
    parametrize.register_parametrization(parametrized[0], "weight", nn.Identity())
    with pytest.raises(CheckpointError, match=r"0\.weight is no parameter, so it is parametrized. Call torch\.nn"):
        save(parametrized, out, to="mxfp8")
    adapter = type("LoraModel", (nn.Sequential,), {"__module__": "peft.tuners.lora.model"})
    with pytest.raises(CheckpointError, match=r"0 is a module of peft. Merge the adapters first \(merge_and_unload\)"):
        save(nn.Sequential(adapter(linear)), out, to="mxfp8")

    class WithState(nn.Sequential):
        def get_extra_state(self):
            return {"step": 1}

    with pytest.raises(CheckpointError, match="_extra_state: the state dict holds a dict; needs tensors"):
        save(WithState(linear), out, to="mxfp8")
    linear.register_buffer("z", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"z has dtype torch\.complex128, which safetensors has not"):
        save(linear, out, to="mxfp8")
    assert not out.exists()


def test_a_sharded_model_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = nn.Sequential(Float8BlockwiseLinear(128, 128))
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(
            CheckpointError, match=r"wrapped by fully_shard.*get_model_state_dict.*save the copy on one"
        ):
            save(model, tmp_path / "out", to="fp8_block")
        tensors = nn.Sequential(model[0])
        with pytest.raises(CheckpointError, match="wrapped by a DTensor of its parameters"):
            save(tensors, tmp_path / "out", to="fp8_block")
    finally:
        torch.distributed.destroy_process_group()
    assert not (tmp_path / "out").exists()


def test_one_layer_in_two_places_is_written_under_both_names(tmp_path):
    layer = MXLinear(64, 64, bias=False, recipe=replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2))
    save(nn.Sequential(layer, layer), tmp_path, to="mxfp8")
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == [f"{i}.{name}" for i in (0, 1) for name in ("weight", "weight_scale_inv")]
    assert found["0.weight"].view(torch.uint8).equal(quantized(layer.weight.detach(), Recipe())[0])
