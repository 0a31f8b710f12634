"""verify: equal values, the rule that made them, or the first block that differs."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mxspec import rules
from mxspec.checkpoint import convert, verify
from mxspec.checkpoint.sides import weights


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.q_proj = nn.Linear(256, 200, dtype=torch.bfloat16)
        self.o_proj = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(256, dtype=torch.bfloat16)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def plain(model, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def statuses(verdict):
    return {f.name: f.status for f in verdict.findings}


def test_a_checkpoint_equals_itself_and_its_other_names(plain, tmp_path):
    assert verify(plain, plain).ok
    convert(plain, tmp_path / "mx", to="mxfp8")
    convert(tmp_path / "mx", tmp_path / "ct", to="ct_mxfp8")
    verdict = verify(tmp_path / "mx", tmp_path / "ct")
    assert verdict.ok
    assert str(verdict) == "5 equal"
    convert(tmp_path / "mx", tmp_path / "bf16", to="bf16")
    assert str(verify(tmp_path / "mx", tmp_path / "bf16")) == "5 equal"


@pytest.mark.parametrize(
    ("family", "scales", "rule", "named"),
    [
        ("fp8_block", "fp32", "contract", ("contract", "te", "te_reference", "torchao")),
        ("fp8_block", "fp32", "deepseek", ("deepgemm", "deepseek")),
        ("fp8_block", "fp32", "transformers", ("transformers",)),
        ("ct_fp8_block", "fp32", "compressed_tensors", ("compressed_tensors",)),
        ("mxfp8", "ue8m0", "compressed_tensors", ("compressed_tensors",)),
        ("ct_mxfp4", "ue8m0", "modelopt", ("modelopt",)),
    ],
)
def test_the_rule_is_named(plain, tmp_path, family, scales, rule, named):
    convert(plain, tmp_path / "q", to=family, scales=scales, rule=rule)
    verdict = verify(tmp_path / "q", plain)
    assert verdict.rules == named
    assert verdict.ok
    assert statuses(verdict)["norm"] == "equal"
    assert statuses(verdict)["q_proj"] == "made by a rule"


def test_a_live_module(model, plain, tmp_path):
    assert verify(model, plain).ok
    convert(plain, tmp_path / "q", to="fp8_block", rule="deepseek")
    assert verify(tmp_path / "q", model).rules == ("deepgemm", "deepseek")
    with torch.no_grad():
        model.o_proj.weight[5, 200] *= 1.5
    verdict = verify(model, plain)
    assert not verdict.ok
    (wrong,) = [f for f in verdict.findings if f.status != "equal"]
    assert (wrong.name, wrong.status) == ("o_proj", "differs")
    assert "element (5, 200): A 0x" in wrong.detail
    (wrong,) = [f for f in verify(tmp_path / "q", model).findings if f.status == "differs"]
    assert wrong.name == "o_proj"
    with pytest.raises(ValueError, match="as_loaded changes a directory"):
        verify(model, plain, as_loaded="vllm")


def test_one_wrong_byte_is_named_by_its_block(plain, tmp_path):
    convert(plain, tmp_path / "q", to="mxfp8")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    tensors["q_proj.weight_scale_inv"][130, 3] += 1
    save_file(tensors, path)
    verdict = verify(tmp_path / "q", plain)
    (wrong,) = [f for f in verdict.findings if f.status == "differs"]
    assert wrong.name == "q_proj"
    convert(plain, tmp_path / "right", to="mxfp8")
    (wrong,) = [f for f in verify(tmp_path / "q", tmp_path / "right").findings if f.status == "differs"]
    assert wrong.detail.startswith("in block (130, 3), element (130, 96): A 0x")
    assert not verdict.ok


@pytest.mark.parametrize("swap", ["scales of two tensors", "nibbles"])
def test_what_a_file_alone_cannot_show(plain, tmp_path, swap):
    convert(plain, tmp_path / "q", to="ct_mxfp4")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    if swap == "nibbles":
        codes = tensors["o_proj.weight_packed"]
        tensors["o_proj.weight_packed"] = codes >> 4 | codes << 4
    else:
        rows = tensors["o_proj.weight_scale"].clone()
        tensors["o_proj.weight_scale"] = tensors["q_proj.weight_scale"][:128].clone()
        tensors["q_proj.weight_scale"][:128] = rows
    save_file(tensors, path)
    found = statuses(verify(tmp_path / "q", plain))
    assert found["o_proj"] == "differs"
    assert (found["q_proj"] == "differs") == (swap != "nibbles")


def test_as_an_engine_loads_it(plain, tmp_path):
    convert(plain, tmp_path / "q", to="fp8_block", rule="deepseek")
    convert(plain, tmp_path / "powers", to="fp8_block", rule="deepseek", scales="ue8m0")
    assert statuses(verify(tmp_path / "q", tmp_path / "q", as_loaded="vllm"))["o_proj"] == "made by a rule"
    assert verify(tmp_path / "q", tmp_path / "q", as_loaded="vllm").rules[-1] == "vllm_requant"
    assert "vllm_requant through bfloat16" in verify(tmp_path / "q", tmp_path / "q", as_loaded="sglang").rules
    assert str(verify(tmp_path / "powers", tmp_path / "powers", as_loaded="vllm")) == "5 equal"
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    codes, scale = rules.vllm_requant.requantize(tensors["o_proj.weight"], tensors["o_proj.weight_scale_inv"])
    (tmp_path / "served").mkdir()
    served = {**tensors, "o_proj.weight": codes, "o_proj.weight_scale_inv": scale}
    save_file(served, tmp_path / "served" / "model.safetensors")
    assert statuses(verify(tmp_path / "q", tmp_path / "served", as_loaded="vllm"))["o_proj"] == "equal"
    convert(plain, tmp_path / "bf16q", to="fp8_block", rule="deepseek")
    convert(tmp_path / "bf16q", tmp_path / "bf16", to="bf16")
    found = {f.name: f for f in verify(tmp_path / "q", tmp_path / "bf16", as_loaded="transformers").findings}
    assert found["o_proj"].status == "equal"
    assert found["q_proj"].status == "differs"  # 200 rows are read as two blocks of 100


def test_missing_tensors_and_other_shapes(plain, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(plain / "model.safetensors")
    del tensors["norm.bias"]
    tensors["o_proj.weight"] = tensors["o_proj.weight"][:64].clone()
    save_file(tensors, other / "model.safetensors")
    found = {f.name: f for f in verify(plain, other).findings}
    assert (found["norm.bias"].status, found["norm.bias"].detail) == ("missing", "in B")
    assert found["o_proj"].detail == "in shape: A is (128, 256), B is (64, 256)"
    with pytest.raises(ValueError, match="as_loaded is 'trt'; needs vllm, sglang, transformers"):
        verify(plain, other, as_loaded="trt")


def test_a_nan_byte_is_no_number_for_an_engine_either(plain, tmp_path):
    convert(plain, tmp_path / "q", to="fp8_block", scales="ue8m0")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    scale = tensors["o_proj.weight_scale_inv"]
    tensors["o_proj.weight_scale_inv"] = torch.full(scale.shape, 120, dtype=torch.uint8)
    tensors["o_proj.weight_scale_inv"][0, 1] = 255
    (tmp_path / "nan").mkdir()
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    served = weights(tmp_path / "nan", "vllm")["o_proj"].rows(slice(0, 128))
    assert served[:, 128:].isnan().all()
    assert served[:, :128].abs().max() == tensors["o_proj.weight"][:, :128].float().abs().max() * 2.0**-7
