"""The example that trains a mixture of experts of transformers runs, and its comparisons can fail."""

from __future__ import annotations

import pytest
import torch

from mxspec.nn import convert
from tests.helpers import ROOT, module_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")


@pytest.fixture
def example():
    return module_of(ROOT / "examples" / "finetune_hf_moe.py")


@pytest.mark.turns(3)
def test_a_model_of_transformers_trains_by_recipes_as_in_bfloat16(example, capsys, tmp_path, monkeypatch):
    train, outcomes, picture = example.train, {}, tmp_path / "losses.png"
    monkeypatch.setattr(example, "train", lambda name, *rest: outcomes.setdefault(name, train(name, *rest)))
    assert example.main(["--device", "cpu", "--steps", "8", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.count("│") == 7]
    assert rows == ["bf16", "mxspec bf16", "fp8_128", "mxfp8_rceil"]
    assert "Not run: a GPU" in out
    assert out.count("the operands that lose most") == 2
    assert "Not run: pretrained weights" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    bf16, unquantized = outcomes.pop("bf16"), outcomes.pop("mxspec bf16")
    assert bf16.report is bf16.watched is None
    assert unquantized.watched is None
    assert unquantized.report.swapped
    assert bf16.losses[-1] < 0.95 * bf16.losses[0]
    for outcome in outcomes.values():
        assert {f"model.layers.{i}.mlp.experts" for i in range(2)} <= set(outcome.report.swapped)
        assert "lm_head" in outcome.report.left
        assert outcome.watched.row_count == example.WORST
        assert outcome.losses != bf16.losses
        assert abs(outcome.last / bf16.last - 1) < 0.02
    with pytest.raises(SystemExit):
        example.main(["--steps", "0"])
    assert "needs at least 1 each" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example.main(["--seeds", "0"])
    assert "'seeds': 0}; needs at least 1 each" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "recipe"), [("qwen3-30b-a3b", "fp8_128"), ("gpt-oss-20b", "mxfp8_rceil")])
def test_the_experts_of_the_real_widths_convert(example, name, recipe):
    model = example.MODELS[name]()
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    report = convert(net, recipe)
    assert {f"model.layers.{i}.mlp.experts" for i in range(example.LAYERS)} <= set(report.swapped)
    assert any(model.whole in line for line in example.not_run(model, "cuda"))
    assert not any("GPU" in line for line in example.not_run(model, "cuda"))
