"""`save` of converted models of transformers: both releases load them, with the values of the layers' codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mxspec.checkpoint import CheckpointError, convert, inspect, live, save, verify
from mxspec.nn import convert as convert_layers
from tests.checkpoint import loading, oracle, saving
from tests.helpers import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from safetensors.torch import load_file  # noqa: E402

OLDER = ROOT / ".venv" / "transformers-5.17.0"
NO_KEYS = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
BOTH = [
    ("llama", "fp8_128", "fp8_block"),
    ("llama", "mxfp8_rceil", "mxfp8"),
    ("llama", "mxfp8_rceil", "ct_mxfp8"),
    ("qwen3_moe", "fp8_128", "fp8_block"),
    ("qwen3_moe", "mxfp8_rceil", "mxfp8"),
]
NEWER_ONLY = [("llama", "fp8_128", "ct_fp8_block")]  # 5.17 rounds fp32 scales to bfloat16, and save says so
COMMON = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
CONFIGS = {
    "llama": lambda **more: transformers.LlamaConfig(intermediate_size=384, attention_bias=True, **COMMON | more),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(intermediate_size=256, **COMMON | MOE | more),
    "mixtral": lambda **more: transformers.MixtralConfig(intermediate_size=128, num_local_experts=4, **COMMON | more),
    "granitemoe": lambda **more: transformers.GraniteMoeConfig(
        intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, **COMMON | more
    ),
    "gpt_oss": lambda **more: transformers.GptOssConfig(intermediate_size=256, num_local_experts=4, **COMMON | more),
}


def model_of(name, **more):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](**more), dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.normal_(1, 0.1)
    return model


def name_of(case):
    return "-".join(case)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Plain models, and each converted model as `save` writes it; and the manifests."""
    root, manifests = tmp_path_factory.mktemp("saved"), {}
    for model in ("llama", "qwen3_moe"):
        model_of(model).save_pretrained(root / model)
    for case in BOTH + NEWER_ONLY:
        model, recipe, family = case
        manifests[case] = saving.saved(root / model, recipe, family, root / name_of(case))
    return root, manifests


def expected(root, case):
    """The weights that a loader must see, without mxspec."""
    model, _, family = case
    return oracle.weights(load_file(root / model / "model.safetensors"), family)


@pytest.mark.parametrize("case", BOTH + NEWER_ONLY, ids=name_of)
def test_transformers_loads_the_values_of_the_layers_codes(written, case):
    root, manifests = written
    if case[2].startswith("ct_"):
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    keys, weights = loading.load(root / name_of(case))
    assert keys == NO_KEYS
    want = expected(root, case)
    assert weights.keys() == want.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert weight.view(torch.int16).equal(want[name].view(torch.int16)), name
    model, _ = manifests[case]
    assert {name: x.shape for name, x in model.named_parameters()} == {name: x.shape for name, x in weights.items()}


def run(program, *arguments):
    if not OLDER.is_dir():
        pytest.skip("transformers 5.17.0 is not installed beside the other version")
    path = os.pathsep.join(map(str, (OLDER, ROOT)))
    done = subprocess.run(
        [sys.executable, str(Path(program.__file__)), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == "5.17.0"
    return found


@pytest.mark.turns(3)
def test_transformers_5_17_loads_the_same(written):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    root, _ = written
    loaded = run(loading, *(root / name_of(case) for case in BOTH))["loaded"]
    for case in BOTH:
        found = loaded[str(root / name_of(case))]
        assert not any(found["keys"].values()), (case, found["keys"])
        for name, weight in expected(root, case).items():
            assert found["weights"][name] == loading.digest(weight), (case, name)


@pytest.mark.turns(3)
def test_save_under_transformers_5_17_writes_the_same_tensors(written, tmp_path):
    root, manifests = written
    case = ("qwen3_moe", "fp8_128", "fp8_block")
    found = run(saving, root / case[0], case[1], case[2], tmp_path / "out")
    assert found["tensors"] == manifests[case][1]["tensors"]
    assert loading.load(tmp_path / "out")[0] == NO_KEYS


@pytest.mark.parametrize("case", BOTH + NEWER_ONLY, ids=name_of)
def test_verify_and_inspect_agree(written, case):
    root, manifests = written
    model, manifest = manifests[case]
    for verdict in (verify(model, root / name_of(case)), verify(root / name_of(case), model)):
        assert {finding.status for finding in verdict.findings} == {"equal"}
    against_plain = verify(root / name_of(case), root / case[0])
    assert against_plain.ok
    assert "contract" in against_plain.rules
    assert inspect(root / name_of(case)).problems == []
    said = ["vLLM and SGLang quantize fp32 scales again"] if case[1] == "fp8_128" else []
    said += ["transformers 5.17 rounds fp32 scales"] if case[2] == "ct_fp8_block" else []
    assert len(manifest["warnings"]) == len(said)
    assert all(warning.startswith(start) for warning, start in zip(manifest["warnings"], said, strict=True))


def test_convert_writes_the_same_files_of_a_plain_checkpoint(written, tmp_path):
    """The rule of the layers is the rule `contract` of `convert`."""
    root, manifests = written
    for case in BOTH:
        made = convert(root / case[0], tmp_path / name_of(case), to=case[2])
        saved = manifests[case][1]
        digests = [{n: t["sha256"] for n, t in m["tensors"].items()} for m in (made, saved)]
        assert digests[0] == digests[1]
        configs = [json.loads((d / name_of(case) / "config.json").read_text()) for d in (tmp_path, root)]
        assert configs[0] == configs[1]


def test_the_models_own_files_are_written_and_the_model_stays(tmp_path):
    model = model_of("qwen3_moe")
    model.generation_config.max_new_tokens = 7
    convert_layers(model, "fp8_128")
    before = model.config.to_dict()
    save(model, tmp_path / "saved", to="fp8_block")
    assert model.config.to_dict() == before
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "mxspec_manifest.json",
    ]
    model.save_pretrained(tmp_path / "plain")
    saved, plain = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("saved", "plain"))
    quantization = saved.pop("quantization_config")
    assert saved == plain
    layers = {f"model.layers.1.mlp.{name}" for name in ("gate",)}
    assert set(quantization["modules_to_not_convert"]) == {"lm_head", "model.embed_tokens", *layers}
    saved, plain = (json.loads((tmp_path / d / "generation_config.json").read_text()) for d in ("saved", "plain"))
    assert saved == plain
    assert saved["max_new_tokens"] == 7


VARIANTS = {  # the model, changes of its config, the recipe, the layers, included layers, the family
    "linears": ("qwen3_moe", {}, "fp8_128", "self_attn", [], "fp8_block"),
    "experts": ("qwen3_moe", {}, "mxfp8_rceil", "experts", [], "mxfp8"),
    "head": ("llama", {"tie_word_embeddings": False}, "fp8_128", "", ["lm_head"], "fp8_block"),
    "tied": ("llama", {"tie_word_embeddings": True}, "mxfp8_rceil", "", [], "mxfp8"),
    "mixtral": ("mixtral", {}, "fp8_128", "", [], "fp8_block"),
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """Models of which some layers are converted: the model, its directory and the manifest."""
    root, found = tmp_path_factory.mktemp("variants"), {}
    for name, (kind, more, recipe, part, include, family) in VARIANTS.items():
        model = model_of(kind, **more)
        convert_layers(model, recipe, lambda layer, path, part=part: part in path, include=include)
        found[name] = model, root / name, save(model, root / name, to=family, shard_bytes=10**6)
    return found


def excluded(directory):
    config = json.loads((directory / "config.json").read_text())
    return config["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_loads_and_agrees(variants, variant):
    model, directory, manifest = variants[variant]
    keys, weights = loading.load(directory)
    assert keys == NO_KEYS
    assert verify(model, directory).ok
    assert inspect(directory).problems == []
    state = model.state_dict()
    low = {part.source for part in live.parts(model) if part.layer is not None}
    mx = manifest["to"] == "mxfp8"
    for name, x in weights.items():
        of_one = (lambda e: oracle.mx(e, 448)) if mx else oracle.fp8_128
        want = state[name]
        if name in low:
            want = torch.stack([of_one(e) for e in want]) if want.ndim == 3 else of_one(want)
        assert x.equal(want), name


@pytest.mark.turns(3)
def test_transformers_5_17_loads_each_variant_the_same(variants):
    loaded = run(loading, *(directory for _, directory, _ in variants.values()))["loaded"]
    for _, directory, _ in variants.values():
        found = loaded[str(directory)]
        assert not any(found["keys"].values()), directory
        assert found["weights"] == {name: loading.digest(x) for name, x in loading.load(directory)[1].items()}


def test_plain_experts_and_plain_linears_are_excluded(variants):
    experts = "model.layers.1.mlp.experts"
    linears, of_experts = (excluded(variants[name][1]) for name in ("linears", "experts"))
    assert {experts, f"{experts}.3.up_proj", "model.layers.0.mlp.up_proj"} <= set(linears)
    assert not [name for name in linears if "self_attn" in name]
    assert "model.layers.1.self_attn.q_proj" in of_experts
    assert not [name for name in of_experts if "experts" in name]


def test_a_quantized_output_head_is_not_excluded(variants):
    assert excluded(variants["head"][1]) == ["model.embed_tokens"]


def test_a_tied_head_is_written_once_and_a_quantized_one_is_refused(variants, tmp_path):
    assert "lm_head.weight" not in variants["tied"][2]["tensors"]
    model = model_of("llama", tie_word_embeddings=True)
    convert_layers(model, "mxfp8_rceil", include=["lm_head"])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is quantized and model\.embed_tokens\.weight is plain"):
        save(model, tmp_path / "head", to="mxfp8")


def test_mixtral_has_the_names_of_its_files(variants):
    _, directory, manifest = variants["mixtral"]
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale_inv" in manifest["tensors"]
    assert (directory / "model.safetensors.index.json").exists()


def test_a_float32_model_is_quantized_from_float32(tmp_path):
    model = model_of("llama").float()
    model.model.norm.bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2.0**-12)
    convert_layers(model, "fp8_128")
    manifest = save(model, tmp_path, to="fp8_block")
    dtypes = {name: entry["dtype"] for name, entry in manifest["tensors"].items()}
    assert dtypes["model.norm.weight"] == "BF16"
    assert dtypes["model.layers.0.input_layernorm.weight"] == "F32"
    assert dtypes["model.layers.0.self_attn.q_proj.bias"] == "F32"
    found = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    x = model.model.layers[0].self_attn.q_proj.weight.detach()
    amax = x.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3))
    scaled = x * (448 / amax).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert found.view(torch.uint8).equal(scaled.to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_model_that_was_loaded_from_fp8_is_saved_without_quantizing_twice(written, tmp_path):
    root, manifests = written
    case = ("qwen3_moe", "fp8_128", "fp8_block")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        root / name_of(case), dtype=torch.bfloat16, **loading.dequantizing(root / name_of(case))
    )
    convert_layers(model, "mxfp8_rceil")
    manifest = save(model, tmp_path / "out", to="mxfp8")
    assert {n for n in manifest["tensors"] if "scale" not in n} == {
        n for n in manifests[case][1]["tensors"] if "scale" not in n
    }
    assert verify(model, tmp_path / "out").ok
    want = oracle.mx(model.model.layers[1].mlp.experts.gate_up_proj[2, :128].detach(), 448)
    keys, weights = loading.load(tmp_path / "out")
    assert keys == NO_KEYS
    assert weights["model.layers.1.mlp.experts.gate_up_proj"][2, :128].equal(want)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp8"


def test_models_whose_experts_no_file_can_hold_are_refused(tmp_path):
    gpt_oss = model_of("gpt_oss")
    convert_layers(gpt_oss, "mxfp8_rceil")
    with pytest.raises(CheckpointError, match="save: mxfp8 of gpt_oss: transformers loads the raw codes"):
        save(gpt_oss, tmp_path / "out", to="mxfp8")
    granite = model_of("granitemoe")
    convert_layers(granite, "mxfp8_rceil")
    with pytest.raises(
        CheckpointError, match=r"experts of Granite.*Leave them out of mxspec\.nn\.convert by filter_fn"
    ):
        save(granite, tmp_path / "out", to="mxfp8")
    assert not (tmp_path / "out").exists()


def test_rows_that_transformers_reorders_are_refused(monkeypatch):
    from mxspec.integrations import _transformers_files as library

    model = model_of("llama")
    convert_layers(model, "fp8_128")
    named = library.named_as_files
    monkeypatch.setattr(library, "named_as_files", lambda m, s: {n: x.flip(0) for n, x in named(m, s).items()})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: transformers changes the order of its rows in files"):
        live.parts(model)

    def fails(model, state):
        raise RuntimeError("no shape fits")

    monkeypatch.setattr(library, "named_as_files", fails)
    with pytest.raises(CheckpointError, match="does not name the tensors of LlamaForCausalLM: no shape fits"):
        live.parts(model)


def test_a_tensor_that_begins_inside_a_block_is_refused(monkeypatch, tmp_path):
    """As of a family whose files have one tensor where the model has two, or the reverse."""
    from mxspec.integrations import _transformers_files as library

    named = library.named_as_files

    def cut(model, state):
        found = named(model, state)
        whole = found.pop("model.layers.0.mlp.up_proj.weight", None)
        halves = {} if whole is None else {"a.weight": whole[:at], "b.weight": whole[at:]}
        return found | halves

    monkeypatch.setattr(library, "named_as_files", cut)
    for recipe, to, at, fits in (
        ("fp8_128", "fp8_block", 192, False),
        ("fp8_128", "fp8_block", 256, True),
        ("mxfp8_rceil", "mxfp8", 192, True),
    ):
        model = model_of("llama")
        convert_layers(model, recipe)
        if not fits:
            with pytest.raises(
                CheckpointError, match=r"b\.weight is cut from model\.layers\.0\.mlp\.up_proj\.weight inside"
            ):
                save(model, tmp_path / "out", to=to)
            assert verify(model, model).ok
            continue
        save(model, tmp_path / f"{recipe}", to=to)
        assert verify(model, tmp_path / f"{recipe}").ok
        found = load_file(tmp_path / f"{recipe}" / "model.safetensors")
        of_one = oracle.fp8_128 if recipe == "fp8_128" else lambda x: oracle.mx(x, 448)
        want = of_one(model.model.layers[0].mlp.up_proj.weight.detach())
        height = 128 if recipe == "fp8_128" else 1
        for name, rows in (("a", slice(0, at)), ("b", slice(at, None))):
            q, s = found[f"{name}.weight"].float(), found[f"{name}.weight_scale_inv"]
            s = s.view(torch.float8_e8m0fnu).float() if s.dtype == torch.uint8 else s
            values = q * s.repeat_interleave(height, 0).repeat_interleave(q.shape[1] // s.shape[1], 1)
            assert values.bfloat16().equal(want[rows])


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_next"],
)
def test_the_tensors_of_a_file_are_those_of_save_pretrained(family):
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers.CONFIG_MAPPING[family](num_hidden_layers=2, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    convert_layers(model, "mxfp8_rceil")
    state = live.library_of(model).without_ties(model, model.state_dict())
    want = {name: x.shape for name, x in revert_weight_conversion(model, state).items()}
    assert {part.name: part.x.shape for part in live.parts(model)} == want
