"""`serve`: FP8 checkpoints generate on mxspec's matmuls, and transformers gets its own kernels back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import make_dataclass
from pathlib import Path

import pytest
import torch

import mxspec
from mxspec import use_backend
from mxspec.check import sqnr_db
from mxspec.checkpoint import convert, save
from mxspec.integrations import _transformers_serving as ours
from mxspec.integrations.transformers import serve
from mxspec.nn import convert as convert_layers
from tests.helpers import ROOT
from tests.integrations import serving

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")
pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers needs for FP8")
theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")

OLDER = ROOT / ".venv" / "transformers-5.17.0"
MIN_SQNR_DB = 25.0  # the activations are quantized, and the dequantized model's are not
COMMON = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
LINEARS = {"llama": 2 * 7, "qwen3_moe": 2 * 4}
EXPERTS = {"llama": 0, "qwen3_moe": 2 * 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """FP8 checkpoints of tiny models: with fp32 scales, and with powers of two."""
    root = tmp_path_factory.mktemp("served")
    configs = {
        "llama": transformers.LlamaConfig(intermediate_size=384, attention_bias=True, **COMMON),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[], **COMMON
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    parameter.normal_(std=0.1)
        model.save_pretrained(root / name)
        for scales in ("fp32", "ue8m0"):
            convert(root / name, root / f"{name}-{scales}", to="fp8_block", scales=scales)
    return root


def check(found, model):
    assert found["sqnr_db"] >= MIN_SQNR_DB
    assert found["fp8_weights"] == LINEARS[model] + EXPERTS[model]
    each = {"fp8_quantize_1x128": LINEARS[model] + EXPERTS[model], "fp8_gemm": LINEARS[model]}
    each |= {"fp8_grouped_gemm": EXPERTS[model]} if EXPERTS[model] else {}
    assert found["calls"] == each
    assert found["tokens"] == len(serving.PROMPT[0]) + serving.TOKENS
    assert found["calls_of_generate"] == {name: count * serving.TOKENS for name, count in each.items()}


@pytest.mark.parametrize("scales", ["fp32", "ue8m0"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_an_fp8_checkpoint_generates_on_our_ops(checkpoints, model, scales):
    with use_backend("reference"):
        check(serving.report(str(checkpoints / f"{model}-{scales}")), model)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_saved_model_is_served_with_the_bits_of_the_trained_one(checkpoints, tmp_path, model):
    trained = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / model, dtype=torch.bfloat16)
    convert_layers(trained, "fp8_128")
    save(trained, tmp_path / "saved", to="fp8_block")
    served, prompt = serving.load(str(tmp_path / "saved"), dequantize=False), torch.tensor(serving.PROMPT)
    with use_backend("reference"), serve():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert served(prompt).logits.equal(trained(prompt).logits)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_every_way_to_run_the_experts_gives_the_same_logits(checkpoints, experts):
    found = serving.report(str(checkpoints / "qwen3_moe-fp32"), experts)
    if experts == "eager":
        assert found["calls"]["fp8_gemm"] > LINEARS["qwen3_moe"]
    else:
        check(found, "qwen3_moe")
    assert found["sqnr_db"] == serving.report(str(checkpoints / "qwen3_moe-fp32"))["sqnr_db"]


@pytest.mark.turns(3)
def test_transformers_5_17_has_the_private_name_and_generates(checkpoints):
    if not OLDER.is_dir():
        pytest.skip("transformers 5.17.0 is not installed beside the other version")
    names = [f"{model}-{scales}" for model in LINEARS for scales in ("fp32", "ue8m0")]
    command = [sys.executable, str(Path(serving.__file__)), *(str(checkpoints / name) for name in names)]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, (OLDER, ROOT))), "HF_HUB_OFFLINE": "1",
        "MXSPEC_BACKEND": "reference",
    }  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["version"] == "5.17.0"
    for name in names:
        check(found["served"][str(checkpoints / name)], name.partition("-")[0])


def test_the_guide_and_the_docstring_name_the_versions_that_are_tested():
    assert ours.TESTED == ("5.17.0", "5.23.0")
    assert "5.17.0 and 5.23.0" in (serve.__doc__ or "")
    assert "transformers 5.23 and\n5.17" in (ROOT / "docs" / "guides" / "checkpoints.md").read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: transformers has no FP8 layers on a CPU")
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_an_fp8_checkpoint_generates_on_a_gpu(checkpoints, model):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("transformers dequantizes FP8 checkpoints on this GPU")
    found = serving.report(str(checkpoints / f"{model}-fp32"), device="cuda")
    assert found["sqnr_db"] >= MIN_SQNR_DB
    assert found["calls"]["fp8_gemm"] == LINEARS[model]
    assert found["calls"].get("fp8_grouped_gemm", 0) == EXPERTS[model]
    assert found["calls_of_generate"]["fp8_gemm"] == LINEARS[model] * serving.TOKENS
    assert found["calls_of_generate"].get("fp8_grouped_gemm", 0) == EXPERTS[model] * serving.TOKENS


def is_ours():
    return getattr(theirs._FINEGRAINED_FP8, "matmul", None) is ours.matmul_2d


def test_undo_gives_everything_back(monkeypatch):
    monkeypatch.setenv(ours.WITHOUT_DEEPGEMM, "0")
    before = object()
    monkeypatch.setattr(theirs, "_FINEGRAINED_FP8", before)
    handle = serve()
    assert is_ours()
    assert theirs.load_finegrained_fp8_kernel() is theirs._FINEGRAINED_FP8
    assert os.environ[ours.WITHOUT_DEEPGEMM] == "1"
    handle.undo()
    handle.undo()
    assert theirs._FINEGRAINED_FP8 is before
    assert os.environ[ours.WITHOUT_DEEPGEMM] == "0"
    monkeypatch.delenv(ours.WITHOUT_DEEPGEMM)
    with serve():
        assert is_ours()
    assert ours.WITHOUT_DEEPGEMM not in os.environ
    assert theirs._FINEGRAINED_FP8 is before


def test_the_last_handle_ends_it():
    first, second = serve(), serve()
    matmuls = theirs._FINEGRAINED_FP8
    first.undo()
    first.undo()
    assert theirs._FINEGRAINED_FP8 is matmuls
    with pytest.raises(KeyError), second:
        raise KeyError
    assert theirs._FINEGRAINED_FP8 is None


def test_threads_may_serve_at_once():
    def run():
        for _ in range(200):
            with serve():
                wrong.extend([None] * (not is_ours()))

    wrong: list[None] = []
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert theirs._FINEGRAINED_FP8 is None
    assert ours.WITHOUT_DEEPGEMM not in os.environ


def test_undo_leaves_what_someone_else_put_there(monkeypatch):
    monkeypatch.setattr(theirs, "_FINEGRAINED_FP8", None)
    other = theirs.FineGrainedFP8(len, len, len)
    with serve():
        theirs._FINEGRAINED_FP8 = other
    assert theirs._FINEGRAINED_FP8 is other


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_FINEGRAINED_FP8", None),
        ("load_finegrained_fp8_kernel", None),
        ("FineGrainedFP8", None),
        ("FineGrainedFP8", make_dataclass("FineGrainedFP8", ["matmul", "batched_matmul"])),
    ],
)
def test_another_release_of_transformers_is_refused(monkeypatch, name, value):
    if value is None:
        monkeypatch.delattr(theirs, name)
    else:
        monkeypatch.setattr(theirs, name, value)
    with pytest.raises(
        RuntimeError, match=rf"transformers {re.escape(transformers.__version__)} does not keep .* 5\.17\.0 or 5\.23\.0"
    ):
        serve()
    assert not ours._open
    assert ours.WITHOUT_DEEPGEMM not in os.environ


def test_a_release_without_the_module_is_refused(monkeypatch):
    import transformers.integrations

    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", None)
    monkeypatch.delattr(transformers.integrations, "finegrained_fp8")
    with pytest.raises(RuntimeError, match=r"cannot be imported.*5\.17\.0 or 5\.23\.0"):
        serve()


def weights(E, N, K, generator):
    codes = torch.randn(E, N, K, generator=generator).to(torch.float8_e4m3fn)
    return codes, torch.rand(E, -(-N // 128), -(-K // 128), generator=generator) + 0.5


@pytest.mark.parametrize("K", [256, 208])  # 208: the last block has 80 columns
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_three_matmuls_agree(dtype, K):
    """Bits: a row times the weights of its expert, whichever matmul computes it."""
    generator = torch.Generator().manual_seed(1)
    w, scale = weights(3, 200, K, generator)
    ids = torch.tensor([2, 0, 2, 3, 1, 0, 7])  # 3 and 7 are experts of another device
    x = torch.randn(7, K, generator=generator).to(dtype)
    one = [
        ours.matmul_2d(row[None], w[i], scale[i], [128, 128]) if i < 3 else None
        for row, i in zip(x, ids.tolist(), strict=True)
    ]
    many = ours.matmul_batched(x, w, scale, expert_ids=ids, block_size=[128, 128])
    assert many.dtype == dtype
    assert many.shape == (7, 200)
    for row, want in zip(many, one, strict=True):
        assert row.equal(torch.zeros(200, dtype=dtype) if want is None else want[0])
    order = ids.argsort(stable=True)
    offsets = torch.tensor([2, 3, 5], dtype=torch.int32)
    grouped = ours.matmul_grouped(x[order], w, scale, offsets=offsets, tokens_per_expert=None, block_size=(128, 128))
    assert grouped.equal(many[order])
    values = mxspec.fp8_dequantize(w[2], scale[2], out_dtype=torch.float32)
    assert sqnr_db(many[0].float(), values @ x[0].float()) > 25  # the activations are quantized
    wide = ours.matmul_2d(x.view(1, 7, K), w[0], scale[0], (128, 128), torch.float32)
    assert wide.shape == (1, 7, 200)
    assert wide.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_are_read_as_numbers(dtype):
    generator = torch.Generator().manual_seed(2)
    w, _ = weights(1, 128, 128, generator)
    x = torch.randn(4, 128, generator=generator).bfloat16()
    scale = torch.full((1, 1), 0.25)
    assert ours.matmul_2d(x, w[0], scale.to(dtype), (128, 128)).equal(ours.matmul_2d(x, w[0], scale, (128, 128)))


def test_a_layer_that_is_not_served_raises():
    x, w, scale = torch.zeros(2, 128), torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    served = "mxspec serves FP8 weights in blocks of 128 x 128 with dynamic activations"
    for size in (None, (128, 128), [1, 32], (64, 64)):
        codes = w if size != (128, 128) else w.view(torch.int8)
        with pytest.raises(ValueError, match=served):
            ours.matmul_2d(x, codes, scale, size)
    with pytest.raises(ValueError, match="activation_scheme is static"):
        ours.matmul_2d(x, w, scale, (128, 128), activation_scale=torch.ones(()))
    with pytest.raises(ValueError, match="must be a multiple of 16"):
        ours.matmul_2d(x[:, :72], w[:, :72], scale, (128, 128))
    with pytest.raises(TypeError, match="scales have dtype"):
        ours.matmul_grouped(x, w[None], scale[None].to(torch.uint8), torch.tensor([2]), None, (128, 128))


def test_the_backend_of_each_call_is_the_users():
    x, w, scale = torch.zeros(2, 128), torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    with use_backend("cublas"), pytest.raises(ValueError, match="backend 'cublas' has no kernel"):
        ours.matmul_2d(x, w, scale, (128, 128))
