"""GroupedExperts: its three grouped matmuls with each recipe, and its weights under cache_weights."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec.check import default_device, sqnr_db
from mxspec.nn import RECIPES, GroupedExperts, cache_weights, fp8_grouped_mm, mx_grouped_mm
from mxspec.nn._formats import FP8Blocks
from tests.helpers import ROOT, module_of

DEVICE = default_device()
K, N = 128, 256  # dim and hidden_dim
FORMATS = ["mxfp8_rceil", "fp8_128"]
QUANTIZERS = {  # the ops that quantize weights, tokens along the features, and tokens along the tokens
    "mxfp8_rceil": ["mx_quantize_rowcol", "mx_quantize_groups", "mx_quantize_groups"],
    "fp8_128": ["fp8_quantize_128x128", "fp8_quantize_1x128", "fp8_quantize_rowcol_groups"],
}
SWIGLU, GRADIENT = "swiglu_fp8_quantize_rowcol_groups", "swiglu_backward_fp8_quantize_rowcol_groups"


def experts(recipe="mxfp8_rceil") -> GroupedExperts:
    torch.manual_seed(3)
    return GroupedExperts(3, K, N, recipe, device=DEVICE)


def tokens(sizes=(33, 0, 30), rest=4, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes) + rest, K, device=DEVICE, dtype=dtype, requires_grad=True)
    return x, torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)


def trained(module, x, offs):
    x.grad = None
    module.zero_grad()
    out = module(x, offs)
    torch.manual_seed(1)  # of nvfp4's backward
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8_rceil_wgrad_bf16", "fp8_128", "bf16"])
def test_experts_are_two_grouped_matmuls_and_swiglu(recipe, dtype):
    module, (x, offs) = experts(recipe), tokens(dtype=dtype)
    got = trained(module, x, offs)
    grouped_mm = fp8_grouped_mm if recipe == "fp8_128" else mx_grouped_mm

    def by_hand(x, offs):
        gate, up = grouped_mm(x, module.w_gate_up, offs, recipe).chunk(2, -1)
        return grouped_mm(silu(gate) * up, module.w_down, offs, recipe)

    module.forward = by_hand
    assert all(map(torch.equal, got, trained(module, x, offs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
def test_one_weight_for_gate_and_up_changes_the_rounding_of_the_tokens_gradient_alone(recipe, dtype):
    """With two weights, the gradients of the tokens through each are rounded, added, and rounded once more."""
    module, (x, offs) = experts(recipe), tokens(dtype=dtype)
    out, grad_x, *grads = trained(module, x, offs)
    grouped_mm = fp8_grouped_mm if recipe == "fp8_128" else mx_grouped_mm
    halves = [w.detach().clone().requires_grad_() for w in (module.w_gate, module.w_up)]

    def apart(x, offs):
        gate, up = (grouped_mm(x, w, offs, recipe) for w in halves)
        return grouped_mm(silu(gate) * up, module.w_down, offs, recipe)

    module.forward = apart
    other, other_grad_x, _, grad_down = trained(module, x, offs)
    assert torch.equal(out, other)
    assert torch.equal(grads[0], torch.cat([w.grad for w in halves], 1))
    assert torch.equal(grads[1], grad_down)
    assert sqnr_db(grad_x, other_grad_x.float()) >= (40 if dtype == torch.bfloat16 else 100)


def test_experts_are_swiglu():
    module, (x, offs) = experts("bf16").requires_grad_(False), tokens()
    x, first, out = x.detach(), 0, torch.zeros_like(x)
    for e, end in enumerate(offs.tolist()):
        t, rows = x[first:end], slice(first, end)
        out[rows] = (silu(t @ module.w_gate[e].T) * (t @ module.w_up[e].T)) @ module.w_down[e].T
        first = end
    assert sqnr_db(module(x, offs), out) >= 40
    for recipe in FORMATS:
        assert sqnr_db(experts(recipe)(x, offs).detach(), out) >= 22  # the noise of three matmuls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", FORMATS)
def test_what_is_quantized_and_that_weights_are_held(recipe, dtype, monkeypatch):
    module, (x, offs) = experts(recipe), tokens(dtype=dtype)
    once, ran = trained(module, x, offs), []
    weights, rows, columns = QUANTIZERS[recipe]
    for name in {weights, rows, columns, SWIGLU, GRADIENT}:
        op = getattr(mxspec, name)
        monkeypatch.setattr(mxspec, name, lambda *a, op=op, name=name, **kw: ran.append(name) or op(*a, **kw))
    fused = recipe == "fp8_128" and dtype == torch.bfloat16
    x.grad = None  # the gradients in `once` stay
    module.zero_grad()
    module(x, offs).sum().backward()
    if fused:
        assert ran == [weights] * 2 + [columns, SWIGLU, columns, GRADIENT]
    elif recipe == "fp8_128":
        assert ran == [weights] * 2 + [columns] * 4
    else:
        assert ran == [weights] * 2 + [rows, columns] * 4
    with cache_weights(module):
        ran.clear()
        assert all(map(torch.equal, trained(module, x, offs), once))
        assert weights not in ran
    with pytest.raises(RuntimeError, match="a weight has changed"), cache_weights(module), torch.no_grad():
        module.w_up.mul_(2)
    ran.clear()
    module.requires_grad_(False)(x, offs)
    assert ran == [weights] * 2 + [rows] + ([SWIGLU] if fused else [rows])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", ["x", "w_gate_up", "w_down", "x and w_gate_up", "weights"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(recipe, frozen):
    module, (x, offs) = experts(recipe), tokens(dtype=torch.bfloat16)
    everything = trained(module, x, offs)
    names = {"weights": ["w_gate_up", "w_down"]}.get(frozen, frozen.split(" and "))
    x.requires_grad_("x" not in names)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)
    for name, before, now in zip(
        ("out", "x", "w_gate_up", "w_down"), everything, trained(module, x, offs), strict=True
    ):
        assert (now is None) == (name in names)
        assert now is None or torch.equal(before, now), name


def test_a_state_dict_with_two_weights_loads():
    module, other = experts(), GroupedExperts(3, K, N, device=DEVICE)
    state = {"w_gate": module.w_gate.clone(), "w_up": module.w_up.clone(), "w_down": module.w_down.clone()}
    outer = torch.nn.ModuleDict({"experts": other})
    outer.load_state_dict({f"experts.{name}": value for name, value in state.items()})
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    with pytest.raises(RuntimeError, match=r'Missing key.*"w_gate_up"[\s\S]*Unexpected key.*"w_up"'):
        other.load_state_dict({name: state[name] for name in ("w_up", "w_down")})
    with pytest.raises(AttributeError, match="w_gate"):
        other.w_gate = module.w_up


def test_another_recipe_may_be_set_but_not_while_codes_are_held():
    module, (x, offs) = experts("bf16"), tokens()
    module.set_recipe("fp8_128")
    assert module.recipe == RECIPES["fp8_128"]
    assert torch.equal(module(x, offs), experts("fp8_128")(x, offs))
    with cache_weights(module), pytest.raises(RuntimeError, match="GroupedExperts: cache_weights holds the codes"):
        module.set_recipe("mxfp8_rceil")
    narrow = GroupedExperts(2, 128, 80, recipe="fp8_128")
    with pytest.raises(ValueError, match="GroupedExperts: hidden_dim = 80 must be a multiple of 32"):
        narrow.set_recipe("mxfp8_rceil")
    assert narrow.recipe == RECIPES["fp8_128"]
    with cache_weights(experts("bf16")):  # has no codes to hold
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [*FORMATS, "bf16"])
def test_experts_compiled_and_checkpointed_give_the_same_bits(recipe, dtype):
    torch._dynamo.reset()
    module, (x, offs) = experts(recipe), tokens(dtype=dtype)
    once = trained(module, x, offs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, trained(compiled, x, offs), once))
    whole = module.forward
    module.forward = lambda x, offs: checkpoint(whole, x, offs, use_reentrant=False)
    assert all(map(torch.equal, trained(module, x, offs), once))


def test_experts_state_and_what_they_refuse():
    module = experts()
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == {
        "w_gate_up": (3, 2 * N, K),
        "w_down": (3, K, N),
    }
    for arguments, error, words in (
        ((0, K, N), ValueError, "num_experts = 0"),
        ((2.0, K, N), ValueError, "num_experts = 2.0; needs"),
        ((3, 40, N), ValueError, "dim = 40 must be a multiple of 32"),
        ((3, K, 40), ValueError, "hidden_dim = 40 must be a multiple of 32"),
        ((3, K, 104, "fp8_128"), ValueError, "GroupedExperts: hidden_dim = 104 must be a multiple of 16"),
        ((3, K, N, "fp8"), ValueError, "GroupedExperts: unknown recipe 'fp8'"),
        ((3, K, N, "bf16", None, torch.float16), TypeError, "parameters have dtype torch.float16"),
    ):
        with pytest.raises(error, match=words):
            GroupedExperts(*arguments)
    x, offs = tokens()
    with pytest.raises(ValueError, match=r"input has shape \(1, 67, 128\); needs \(M, 128\)"):
        module(x[None], offs)
    with pytest.raises(ValueError, match="needs \\(3,\\) for 3 experts"):
        module(x, offs[:2])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_for_the_device(recipe):
    module, (x, offs) = experts(recipe), tokens()
    expected = trained(module, x, offs)  # the first run compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = trained(module, x, offs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, expected))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_in_a_cuda_graph_it_trains_on_other_tokens_and_groups(recipe):
    module, (x, offs) = experts(recipe), tokens()
    expected = trained(module, x, offs)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        trained(module, x, offs)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = trained(module, x, offs)
    others, (y, other_offs) = offs.clone(), tokens((1, 60, 2))
    with torch.no_grad():  # write other tokens and other groups into the same memory
        x.copy_(y)
        offs.copy_(other_offs)
    torch.manual_seed(1)  # a graph keeps no seed: it draws from the generator as it is at the replay
    graph.replay()
    got = [t.clone() for t in captured]
    assert not torch.equal(got[0], expected[0])
    assert all(map(torch.equal, got, trained(module, x, offs)))
    offs.copy_(others)


def test_its_benchmark_compares_before_it_times_and_names_what_ran(capsys, monkeypatch):
    benchmark = module_of(ROOT / "benchmarks" / "experts.py")
    paces, recipe, shape = (benchmark.Pace(0, 1, 1, rounds=1),) * 2, RECIPES["fp8_128"], "40x256x128x2"

    monkeypatch.setattr(benchmark, "torchao", lambda recipe: benchmark.bf16)
    result = benchmark.measure("grouped linear", recipe, shape, DEVICE, paces)
    assert result.times_as_fast.keys() == {"bf16", "torchao"}
    assert result.quantizing > 0
    out = capsys.readouterr().out
    for line in (
        "fp8_quantize_128x128 2x256x128 -> 2x256x128",
        "fp8_quantize_rowcol_groups 40x128 -> 40x128",
        "fp8_quantize_rowcol_groups 40x256 -> 40x256",
        "fp8_grouped_gemm 40x256 -> 40x128",
        "fp8_grouped_gemm_wgrad 256x384 -> 2x256x128",
    ):
        assert f"{line} " in out
    assert benchmark.matmul_flops("fp8_grouped_gemm 40x256 -> 40x128", 40) == 2 * 40 * 256 * 128
    assert benchmark.matmul_flops("fp8_grouped_gemm_wgrad 512x384 -> 2x512x128", 40) == 2 * 40 * 512 * 128

    monkeypatch.setattr(benchmark, "torchao", lambda recipe: lambda x, w, offs: 2 * benchmark.bf16(x, w, offs))
    result = benchmark.measure("SwiGLU experts", recipe, shape, DEVICE, paces, ragged=False)
    assert result.times_as_fast.keys() == {"bf16", "mxspec in bf16"}
    out = capsys.readouterr().out
    assert "torchao is not in the race: AssertionError: y: " in out
    (row,) = (line for line in out.splitlines() if "fp8_quantize_rowcol_groups 40x128" in line)
    assert row.split("│")[2].strip() == "2"  # the tokens, and the gradient of the output

    monkeypatch.setitem(benchmark.MIN_SQNR_DB, "grouped linear", 60)
    with pytest.raises(AssertionError, match=r"y: 2\d\.\d dB against bfloat16; needs 60"):
        benchmark.measure("grouped linear", recipe, shape, DEVICE, paces)


@pytest.mark.turns(3)
def test_its_benchmark_of_models_compares_every_step_and_stores_it(capsys, monkeypatch, tmp_path):
    benchmark = module_of(ROOT / "benchmarks" / "experts.py")
    monkeypatch.setattr(benchmark, "MODELS", {"tiny": (300, 256, 128, 4)})
    pace, stored = benchmark.Pace(0, 1, 1, rounds=1), tmp_path / "run.json"
    benchmark.measure_models(["tiny"], DEVICE, stored, pace)
    rows = {row["contender"]: row for row in json.loads(stored.read_text())["rows"]}
    kept = ", weights' codes kept"
    again = "fp8_128, weights quantized again"
    assert list(rows) == ["PyTorch bf16", "bf16", "fp8_128", "mxfp8", f"fp8_128{kept}", f"mxfp8{kept}", again]
    assert rows["PyTorch bf16"]["times PyTorch bf16"] == 1
    saved = {what: row["saved bytes"] for what, row in rows.items()}
    # x, 300 x 256 in bfloat16; gate, up, silu(gate) and their product, 300 x 128; and the four ends
    assert saved["PyTorch bf16"] == 300 * 256 * 2 + 4 * 300 * 128 * 2 + 4 * 4
    weights = 4 * 3 * 128 * 256
    assert saved["fp8_128"] == saved[f"fp8_128{kept}"] == saved[again] + weights + weights // 128**2 * 4
    assert "swiglu_backward_fp8_quantize_rowcol_groups 300x256 -> 300x256" in capsys.readouterr().out

    with monkeypatch.context() as patch:
        codes = FP8Blocks.one_way
        patch.setattr(FP8Blocks, "one_way", lambda *args: (codes(*args)[0], 2 * codes(*args)[1]))
        patch.setitem(benchmark.MIN_SQNR_DB, "SwiGLU experts", -100)
        with pytest.raises(AssertionError, match="tiny: quantizing the weights again gives other values"):
            benchmark.measure_models(["tiny"], DEVICE, None, pace)

    monkeypatch.setattr(benchmark, "bf16", lambda x, w, offs: 2 * torch.nn.functional.grouped_mm(x, w.mT, offs=offs))
    with pytest.raises(AssertionError, match="dB against bfloat16"):
        benchmark.measure_models(["tiny"], DEVICE, None, pace)


@pytest.mark.turns(3)
def test_its_benchmark_of_gpt_oss_converts_the_layer_of_transformers(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    benchmark = module_of(ROOT / "benchmarks" / "experts.py")
    monkeypatch.setattr(benchmark, "MODELS", {"gpt-oss-tiny": (400, 128, 160, 8)})
    pace, stored = benchmark.Pace(0, 1, 1, rounds=1), tmp_path / "run.json"
    benchmark.measure_models(["gpt-oss-tiny"], DEVICE, stored, pace)
    rows = {row["contender"]: row for row in json.loads(stored.read_text())["rows"]}
    assert list(rows) == ["PyTorch bf16", "bf16", "fp8_128", "mxfp8", "fp8_128, weights' codes kept"]
    out = capsys.readouterr().out
    assert "clamped_swiglu_fp8_quantize_rowcol_groups 400x320 -> 400x160" in out
    assert "clamped_swiglu_backward_fp8_quantize_rowcol_groups 400x320 -> 400x320" in out
