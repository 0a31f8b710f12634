"""The examples run, and what they compare can fail."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def char_model():
    spec = importlib.util.spec_from_file_location("train_char_model", EXAMPLES / "train_char_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_character_model_trains_in_fp8_as_in_bfloat16(char_model, capsys, monkeypatch):
    arguments = ["--steps", "30", "--batch", "128", "--device", "cpu"]
    assert char_model.main(arguments) == 0
    characters = char_model.text()
    assert len(characters) > 400_000
    assert int(characters.max()) < char_model.CHARACTERS
    outcome = char_model.train(char_model.Float8BlockwiseLinear, characters, 30, 128)
    assert outcome.last < 0.7 * outcome.first
    monkeypatch.setattr(char_model, "WITHIN", 1e-9)
    monkeypatch.setattr(char_model, "text", lambda: characters)
    assert char_model.main([*arguments, "--steps", "3"]) == 1
    assert "apart; needs 0%" in capsys.readouterr().out
