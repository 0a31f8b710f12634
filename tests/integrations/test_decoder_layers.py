"""benchmarks/decoder_layers.py on a tiny model: each output is compared, and the stored run names all parts."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers import DEVICE, ROOT, module_of

pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")
RECIPES = ("bf16", "fp8_128", "mxfp8_rceil", "fp8_128, weights quantized again")


@pytest.fixture
def layers(monkeypatch):
    found = module_of(ROOT / "benchmarks" / "decoder_layers.py")
    monkeypatch.setattr(found, "PACE", found.Pace(0, 1, 1, rounds=1))
    return found


@pytest.mark.turns(3)
def test_it_times_every_step_and_stores_the_run(layers, capsys, tmp_path):
    stored = tmp_path / "run.json"
    layers.main(["--model", "tiny", "--json", str(stored)])
    run = json.loads(stored.read_text())
    assert run["command"] == "python benchmarks/decoder_layers.py --model tiny"
    steps = [row["step"] for row in run["rows"] if "step" in row]
    theirs = ["transformers, grouped_mm", "transformers, eager", "without experts"]
    assert steps == [*theirs, *(f"mxspec, {recipe}" for recipe in RECIPES)]
    assert [row["part"] for row in run["rows"] if "part" in row] == ["output head and loss", "AdamW"]
    assert all(row["us"] > 0 and row["tokens"] == 64 for row in run["rows"])
    out = capsys.readouterr().out
    assert "fp8_128: 20 swapped to fp8_128, 6 left" in out
    assert "bound if the experts took no time: " in out


def test_each_output_is_compared_with_the_routing_of_bfloat16(layers, monkeypatch):
    steps, _ = layers.contenders_of(layers.tiny(), torch.device(DEVICE))
    choices = []
    with steps["transformers, grouped_mm"].routed(choices):
        expected = steps["transformers, grouped_mm"]()
    assert len(choices) == layers.LAYERS
    step = steps["mxspec, fp8_128"]
    with step.routed(choices):
        replayed = step()
    assert layers.sqnr_db(replayed, expected) > 20
    others = [tuple(t.roll(1, 0) for t in choice) for choice in choices]  # the choices of other tokens
    with step.routed(others):
        assert layers.sqnr_db(step(), expected) < 20

    monkeypatch.setattr(layers, "MIN_SQNR_DB", 60)
    with pytest.raises(AssertionError, match=r"mxspec, fp8_128: the output has 2\d\.\d dB; needs 60"):
        layers.measure("tiny", torch.device(DEVICE), layers.PACE)
