"""The command `checkpoint`: its exit codes and what it prints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec.__main__ import main


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}_proj.weight": torch.randn(128, 256, generator=generator).bfloat16() for name in ("q", "k")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_convert_and_verify(plain, tmp_path, capsys):
    out = str(tmp_path / "q")
    assert main(["checkpoint", "convert", str(plain), out, "--to", "fp8_block", "--rule", "deepseek"]) == 0
    said = capsys.readouterr().out
    assert "4 tensors: 4 quantized" in said
    assert "warning vLLM and SGLang quantize fp32 scales again" in said
    assert main(["checkpoint", "verify", out, str(plain)]) == 0
    assert capsys.readouterr().out.strip() == "2 made by a rule; the rule: deepgemm, deepseek"
    assert main(["checkpoint", "verify", out, out, "--as-loaded", "vllm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["rules"].count("vllm_requant") == 1
    assert main(["checkpoint", "verify", str(plain), out]) == 1
    assert "to ask which rule made B from A, exchange them" in capsys.readouterr().out


def test_an_error_names_the_folder_and_shards_without_an_index_are_a_problem(plain, tmp_path, capsys):
    save_file({"norm.weight": torch.ones(4)}, plain / "model-2.safetensors")
    assert main(["checkpoint", "inspect", str(plain)]) == 1
    assert "model.safetensors.index.json: is missing; loaders need it for several files" in capsys.readouterr().out
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes()[:-1])
    assert main(["checkpoint", "verify", str(plain), str(cut)]) == 2
    assert f"{cut}: model.safetensors: " in capsys.readouterr().err


def test_a_difference_is_exit_code_1_and_names_the_block(plain, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(plain / "model.safetensors")
    tensors["k_proj.weight"][100, 200] = 1.0
    save_file(tensors, other / "model.safetensors")
    assert main(["checkpoint", "verify", str(other), str(plain)]) == 1
    said = capsys.readouterr().out
    assert "k_proj: differs in block (0, 1), element (100, 200): A 0x3f80 (1) and B 0x" in said
    assert said.endswith("1 equal, 1 differs\n")


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (["convert", "{plain}", "{plain}", "--to", "mxfp8"], "is the source; needs a directory elsewhere"),
        (["convert", "{plain}", "{out}", "--to", "mxfp8", "--rule", "deepseek"], "does not quantize to mxfp8"),
        (["convert", "{out}", "{plain}", "--to", "mxfp8"], "is not a directory"),
        (["verify", "{plain}", "{out}"], "does not exist; needs a directory or a safetensors file"),
        (["convert", "{plain}", "{out}", "--to", "fp4"], "invalid choice: 'fp4'"),
        (["convert", "{plain}", "{out}", "--to", "mxfp8", "--workers", "0"], "'0' is not a number of threads"),
    ],
)
def test_what_cannot_be_carried_out_is_exit_code_2(plain, tmp_path, capsys, rest, words):
    places = {"plain": plain, "out": tmp_path / "out"}
    try:
        code = main(["checkpoint", *(part.format(**places) for part in rest)])
    except SystemExit as stop:  # argparse refuses in this way
        code = stop.code
    assert code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
