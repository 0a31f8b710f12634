"""The examples run, and their comparisons can fail."""

import pytest
import torch

from tests.helpers import ROOT, module_of


def example(name):
    return module_of(ROOT / "examples" / f"{name}.py")


@pytest.fixture
def char_model():
    return example("train_char_model")


@pytest.mark.turns(6)
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


@pytest.fixture
def moe(monkeypatch):
    module = example("train_moe")
    for name, size in {"WIDTH": 16, "DIM": 128, "HIDDEN": 128, "LAYERS": 1, "EXPERTS": 4}.items():
        monkeypatch.setattr(module, name, size)
    return module


def test_a_mixture_of_experts_trains_by_each_recipe_as_in_bfloat16(moe, capsys, tmp_path, monkeypatch):
    recipes, picture, outcomes, train = ["mxfp8_rceil", "fp8_128"], tmp_path / "losses.png", {}, moe.train
    monkeypatch.setattr(moe, "train", lambda name, *rest: outcomes.setdefault(name, train(name, *rest)))
    arguments = ["--steps", "10", "--batch", "64", "--device", "cpu", "--plot", str(picture)]
    assert moe.main([*arguments, "--recipes", *recipes]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.count("│") == 6] == ["bf16", *recipes]
    assert "{2,5}: Float8BlockwiseLinear" in out
    assert "3.experts: GroupedExperts of mxfp8" in out
    assert "3.experts: GroupedExperts of fp8_128" in out
    assert "3.router: left, it is a router" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    bf16 = outcomes["bf16"]
    assert bf16.last < 0.95 * bf16.losses[0]
    for name in recipes:
        assert outcomes[name].losses != bf16.losses
        assert abs(outcomes[name].last / bf16.last - 1) < 0.02


def test_the_last_layers_stay_bfloat16(moe, capsys):
    arguments = ["--steps", "2", "--batch", "64", "--device", "cpu", "--recipes", "nvfp4", "mxfp8_rceil"]
    assert moe.main([*arguments, "--layers", "3", "--bf16-layers", "2"]) == 0
    nvfp4, mxfp8 = capsys.readouterr().out.partition("mxfp8_rceil: ")[::2]
    for report, linears in ((nvfp4, "left, filter_fn"), (mxfp8, "MXLinear")):
        assert "3.experts: GroupedExperts of" in report
        assert "{4,5}.experts: left, filter_fn" in report
        assert f"{{2,7}}: {linears}" in report
    for layers, bf16 in ((0, 0), (2, 3), (2, -1)):
        with pytest.raises(SystemExit):
            moe.main([*arguments, "--layers", str(layers), "--bf16-layers", str(bf16)])
        assert f"--layers {layers} --bf16-layers {bf16}; needs" in capsys.readouterr().err


def test_the_last_steps_of_nvfp4_are_bfloat16(moe, capsys, monkeypatch):
    outcomes, train = {}, moe.train
    monkeypatch.setattr(moe, "train", lambda name, *rest: outcomes.setdefault(name, train(name, *rest)))
    arguments = ["--steps", "4", "--batch", "64", "--device", "cpu", "--recipes", "nvfp4_nearest", "mxfp8_rceil"]
    losses = {}
    for end in ("0", "0.5", "1"):
        outcomes.clear()
        assert moe.main([*arguments, "--bf16-end", end]) == 0
        losses[end] = {name: outcome.losses for name, outcome in outcomes.items()}
        said = capsys.readouterr().out
        steps = {"0": None, "0.5": "the last 2 of 4 steps in bfloat16", "1": "the last 4 of 4 steps in bfloat16"}[end]
        assert said.count("steps in bfloat16") == (steps is not None)
        assert steps is None or steps in said
    none, half, all_ = (each["nvfp4_nearest"] for each in losses.values())
    # A step's loss comes before its update: the third loss is the first one that a forward in bfloat16 gives.
    assert half[:2] == none[:2]
    assert half[2] != none[2]
    assert all_ == losses["1"]["bf16"]
    assert losses["0"]["mxfp8_rceil"] == losses["1"]["mxfp8_rceil"]
    with pytest.raises(SystemExit):
        moe.main([*arguments, "--bf16-end", "18"])
    assert "--bf16-end 18.0; needs a share of 0 to 1" in capsys.readouterr().err


def test_the_mixture_is_that_of_each_token_by_itself(moe):
    torch.manual_seed(0)
    layer = moe.Mixture().requires_grad_(False)
    x = torch.randn(40, moe.DIM)
    out, by_itself = layer(x), x.clone()
    tokens = layer.norm(x)
    weight, expert = layer.router(tokens).softmax(-1).topk(moe.TOP)
    experts = layer.experts
    for t in range(len(x)):
        for w, e in zip(weight[t], expert[t], strict=True):
            gate, up = experts.w_gate[e] @ tokens[t], experts.w_up[e] @ tokens[t]
            by_itself[t] += w * (experts.w_down[e] @ (torch.nn.functional.silu(gate) * up))
    assert len(expert.unique()) > 2
    torch.testing.assert_close(out, by_itself, rtol=0, atol=0.01)
