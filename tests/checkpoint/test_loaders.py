"""transformers loads every pair of family and model that it reads without a complaint, and with the right bits.

The expected weights come from `oracle.py`, which does not use mxspec.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mxspec.checkpoint import convert, verify
from tests.checkpoint import loading, oracle
from tests.helpers import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from safetensors.torch import load_file  # noqa: E402

OLDER = ROOT / ".venv" / "transformers-5.17.0"
DENSE, MOE = "llama", "qwen3_moe"
# model, family, scales, rule
PAIRS = [
    (DENSE, "fp8_block", "fp32", "contract"),
    (DENSE, "fp8_block", "fp32", "deepseek"),
    (DENSE, "fp8_block", "ue8m0", "contract"),
    (DENSE, "mxfp8", "ue8m0", "contract"),
    (DENSE, "ct_fp8_block", "fp32", "compressed_tensors"),
    (DENSE, "ct_fp8_block", "ue8m0", "contract"),
    (DENSE, "ct_mxfp8", "ue8m0", "contract"),
    (DENSE, "ct_mxfp6", "ue8m0", "contract"),
    (DENSE, "ct_mxfp4", "ue8m0", "contract"),
    (DENSE, "ct_nvfp4", "e4m3", "contract"),
    (MOE, "fp8_block", "fp32", "contract"),
    (MOE, "fp8_block", "ue8m0", "contract"),
    (MOE, "mxfp8", "ue8m0", "contract"),
    ("gpt_oss", "gptoss_mxfp4", "ue8m0", "contract"),
]
NEWER_ONLY = [(DENSE, "ct_fp8_block", "fp32", "contract")]  # 5.17 rounds fp32 scales to bfloat16, and convert says so


def test_the_guide_publishes_the_pairs_that_are_tested():
    page = (ROOT / "docs" / "guides" / "checkpoints.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| (fp32|ue8m0|e4m3) \| (\w+) \| ([\d., ]+) \|$", page, re.MULTILINE)
    assert [tuple(row[:4]) for row in rows if row[4] == "5.17, 5.23"] == PAIRS
    assert [tuple(row[:4]) for row in rows if row[4] == "5.23"] == NEWER_ONLY
    assert transformers.__version__.rpartition(".")[0] in ("5.17", "5.23")


def name_of(pair):
    return "-".join(pair)


def config_of(model):
    common = {
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    }
    if model == DENSE:
        return transformers.LlamaConfig(intermediate_size=384, **common)
    experts = {"num_experts_per_tok": 2, **common}
    if model == MOE:
        return transformers.Qwen3MoeConfig(
            intermediate_size=256, moe_intermediate_size=128, num_experts=4, mlp_only_layers=[], **experts
        )
    return transformers.GptOssConfig(
        intermediate_size=256, num_local_experts=4, layer_types=["full_attention"], **experts
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The plain models, and each pair as `convert` writes it."""
    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for model in (DENSE, MOE, "gpt_oss"):
        made = transformers.AutoModelForCausalLM.from_config(config_of(model), dtype=torch.bfloat16)
        made.save_pretrained(root / model)
    for model, family, scales, rule in PAIRS + NEWER_ONLY:
        pair = (model, family, scales, rule)
        convert(root / model, root / name_of(pair), to=family, scales=scales, rule=rule)
    return root


@pytest.mark.parametrize("pair", PAIRS + NEWER_ONLY, ids=name_of)
def test_transformers_loads_what_was_meant(written, pair):
    model, family, scales, rule = pair
    if pair in NEWER_ONLY and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 rounds these scales to bfloat16")
    if family.startswith("ct_"):
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    keys, weights = loading.load(written / name_of(pair))
    assert keys == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    want = oracle.weights(load_file(written / model / "model.safetensors"), family, scales, rule)
    assert weights.keys() == want.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert weight.view(torch.int16).equal(want[name].view(torch.int16)), name


@pytest.mark.turns(3)
def test_transformers_5_17_loads_the_same_in_one_process(written):
    if not OLDER.is_dir():
        pytest.skip("transformers 5.17.0 is not installed beside the other version")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    path = os.pathsep.join(map(str, (OLDER, ROOT)))
    command = [sys.executable, str(Path(loading.__file__)), *(str(written / name_of(pair)) for pair in PAIRS)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["version"] == "5.17.0"
    for pair in PAIRS:
        model, family, scales, rule = pair
        loaded = found["loaded"][str(written / name_of(pair))]
        assert not any(loaded["keys"].values()), (pair, loaded["keys"])
        want = oracle.weights(load_file(written / model / "model.safetensors"), family, scales, rule)
        extra = loaded["weights"].keys() - want.keys()
        ends = (".weight_scale", ".weight_global_scale")
        assert all(family.startswith("ct_") and name.endswith(ends) for name in extra), pair
        for name, weight in want.items():
            assert loaded["weights"][name] == loading.digest(weight), (pair, name)


def test_a_wrong_byte_shows(written, tmp_path):
    """The comparison can fail: one scale byte more is another weight."""
    pair = (DENSE, "mxfp8", "ue8m0", "contract")
    source = written / name_of(pair)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    data = bytearray((source / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    at = 8 + size + header["model.layers.0.mlp.up_proj.weight_scale_inv"]["data_offsets"][0]
    data[at] += 1
    (tmp_path / "model.safetensors").write_bytes(data)
    _, weights = loading.load(tmp_path)
    want = oracle.weights(load_file(written / DENSE / "model.safetensors"), "mxfp8")
    wrong = [name for name, weight in weights.items() if not weight.equal(want[name])]
    assert wrong == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(("model", "family"), [(MOE, "mxfp8"), ("gpt_oss", "gptoss_mxfp4")])
def test_verify_knows_the_fused_experts_of_a_live_model(written, tmp_path, model, family):
    live = transformers.AutoModelForCausalLM.from_pretrained(written / model, dtype=torch.bfloat16)
    source = written / name_of((model, family, "ue8m0", "contract"))
    verdict = verify(source, live)
    assert verdict.ok
    assert "contract" in verdict.rules
    assert {f.status for f in verdict.findings if ".experts." in f.name and not f.name.endswith("bias")} == {
        "made by a rule"
    }
    convert(source, tmp_path / "bf16", to="bf16")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    assert {f.status for f in verify(source, read).findings} == {"equal"}
    with torch.no_grad():
        live.model.layers[0].mlp.experts.down_proj[2, 3, 5] += 1
    (wrong,) = [f for f in verify(source, live).findings if f.status == "differs"]
    assert ".experts." in wrong.name
    assert "2" in wrong.name.split("experts.")[1]
