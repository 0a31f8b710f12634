"""mx_grouped_mm and GroupedExperts: products and gradients group by group, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec.check import default_device, sqnr_db
from mxspec.nn import RECIPES, GroupedExperts, cache_weights, grouped_mm, mx_grouped_mm
from mxspec.nn.recipe import recipe_of

DEVICE = default_device()
K, N = 64, 96
GROUPED = [name for name in RECIPES if name != "fp8_128"]
E5M2 = replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2)
SIZES = {  # tokens of each expert, and rows of none
    "ragged, and one without tokens": ([33, 0, 67, 1], 0),
    "rows of no group": ([5, 40, 0], 11),
    "all to one": ([0, 0, 70], 0),
    "one token": ([0, 1], 0),
}


def operands(sizes, rest, x_dtype=torch.float32, w_dtype=torch.float32):
    torch.manual_seed(0)
    M, E = sum(sizes) + rest, len(sizes)
    x = torch.randn(M, K, device=DEVICE, dtype=x_dtype, requires_grad=True)
    w = torch.randn(E, N, K, device=DEVICE, dtype=w_dtype, requires_grad=True)
    dy = (torch.randn(M, N, device=DEVICE) * torch.linspace(0.01, 3, N, device=DEVICE)).to(x_dtype)
    return x, w, torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32), dy


def step(fn, x, w, offs, dy, *recipe):
    x.grad = w.grad = None
    out = fn(x, w, offs, *recipe)
    out.backward(dy)
    return [out.detach(), x.grad, w.grad]


def read_back(values: torch.Tensor, axis: int, recipe, dtype=torch.float8_e4m3fn) -> torch.Tensor:
    """What values are once quantized, in fp64; blocks along the tokens filled with zeros. Or in bfloat16."""
    if recipe.format == "bf16":
        return values.bfloat16().double()
    rows = values.shape[-2]
    padded = nn.functional.pad(values, (0, 0, 0, -rows % 32 if axis == -2 else 0))
    codes = mxspec.mx_quantize(padded, axis=axis, elem_dtype=dtype, scaling=recipe.scaling, backend="reference")
    read = mxspec.mx_dequantize(*codes, axis=axis, out_dtype=torch.float32, backend="reference")
    return read[..., :rows, :].double()


def dequantized_step(x, w, offs, dy, recipe):
    """What the matmuls are to give, expert by expert: products, in fp64, of operands that were read back."""
    x, w, recipe = x.detach(), w.detach(), recipe_of(recipe, "the test")
    out, grad_x, grad_w = (torch.zeros_like(t, dtype=torch.float64) for t in (dy, x, w))
    first = 0
    for e, end in enumerate(offs.tolist()):
        rows = slice(first, end)
        first = end
        out[rows] = read_back(x[rows], -1, recipe) @ read_back(w[e], -1, recipe).mT
        grad_x[rows] = read_back(dy[rows], -1, recipe, recipe.grad_dtype) @ read_back(w[e], -2, recipe)
        if recipe.wgrad_bf16:
            grad_w[e] = dy[rows].bfloat16().double().mT @ x[rows].bfloat16().double()
        else:
            grad_w[e] = read_back(dy[rows], -2, recipe, recipe.grad_dtype).mT @ read_back(x[rows], -2, recipe)
    return [out, grad_x, grad_w]


@pytest.mark.parametrize("groups", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", [*GROUPED, E5M2], ids=str)
def test_the_products_are_those_of_the_dequantized_operands(groups, recipe):
    call = operands(*groups)
    found = recipe_of(recipe, "the test")
    got = step(mx_grouped_mm, *call, recipe)
    for i, (g, expected) in enumerate(zip(got, dequantized_step(*call, recipe), strict=True)):
        assert g.dtype == torch.float32
        assert sqnr_db(g, expected) >= (48 if found.format == "bf16" or (i == 2 and found.wgrad_bf16) else 70)


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "bf16"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_bfloat16_and_its_masters(recipe, dtypes):
    call = operands([33, 0, 67, 1], 3, *dtypes)
    got = step(mx_grouped_mm, *call, recipe)
    assert [t.dtype for t in got] == [dtypes[0], dtypes[0], dtypes[1]]
    for g, expected in zip(got, dequantized_step(*call, recipe), strict=True):
        assert sqnr_db(g, expected) >= 48  # rounded to bfloat16 once


@pytest.mark.parametrize("recipe", [name for name in GROUPED if name != "bf16"])
def test_near_bfloat16(recipe):
    call = operands([80, 0, 150], 0)
    bf16 = step(mx_grouped_mm, *call, "bf16")
    for got, expected, least in zip(step(mx_grouped_mm, *call, recipe), bf16, (27, 25, 24), strict=True):
        assert sqnr_db(got, expected) >= least


@pytest.mark.parametrize("recipe", GROUPED)
def test_what_belongs_to_no_group_is_not_read_and_is_zero(recipe):
    x, w, offs, dy = operands([5, 40, 0], 11)
    before = step(mx_grouped_mm, x, w, offs, dy, recipe)
    with torch.no_grad():
        x[45:], dy[45:], w[2] = torch.nan, torch.nan, torch.nan
    after = step(mx_grouped_mm, x, w, offs, dy, recipe)
    for got, expected in zip(after, before, strict=True):
        assert torch.equal(got, expected)
    assert not after[0][45:].any()
    assert not after[1][45:].any()
    assert not after[2][2].any()


@pytest.mark.parametrize("recipe", GROUPED)
def test_no_tokens_at_all(recipe):
    out, grad_x, grad_w = step(mx_grouped_mm, *operands([0, 0], 0), recipe)
    assert (out.shape, grad_x.shape) == ((0, N), (0, K))
    assert grad_w.shape == (2, N, K)
    assert not grad_w.any()


def test_only_the_gradients_that_are_needed(monkeypatch):
    x, w, offs, dy = operands([33, 30], 0)
    ran = []
    for name in ("mx_quantize_groups", "mx_quantize_rowcol", "mx_grouped_gemm", "mx_grouped_gemm_wgrad"):
        op = getattr(mxspec, name)
        monkeypatch.setattr(
            mxspec, name, lambda *a, op=op, name=name, **kw: ran.append((name, kw.get("axis"))) or op(*a, **kw)
        )
    rows, columns, gemm = ("mx_quantize_groups", -1), ("mx_quantize_groups", -2), ("mx_grouped_gemm", None)
    weights, wgrad = ("mx_quantize_rowcol", None), ("mx_grouped_gemm_wgrad", None)
    mx_grouped_mm(x.detach(), w, offs).backward(dy)
    assert ran == [weights, rows, columns, gemm, columns, wgrad]
    ran.clear()
    mx_grouped_mm(x, w.detach(), offs).backward(dy)
    assert ran == [weights, rows, gemm, rows, gemm]
    assert w.grad is not None


@pytest.mark.parametrize("recipe", ["mxfp8_rceil_wgrad_bf16", "bf16"])  # the experts below are of mxfp8_rceil
def test_compiled_whole_it_gives_the_same_bits(recipe):
    torch._dynamo.reset()
    call = operands([33, 0, 67, 1], 3)
    compiled = torch.compile(mx_grouped_mm, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled, *call, recipe), step(mx_grouped_mm, *call, recipe)))


def test_autocast_casts_the_tokens():
    x, w, offs, _ = operands([33, 30], 0)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = mx_grouped_mm(x, w, offs)
    assert torch.equal(out, mx_grouped_mm(x.bfloat16(), w, offs))
    out.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, w, o: (x, w, o, "fp8_128"), ValueError, "mx_grouped_mm: there is no grouped matmul of fp8_128 yet"),
        (lambda x, w, o: (x, w, o, "mxfp4"), ValueError, "unknown recipe 'mxfp4'"),
        (lambda x, w, o: (x[:, :32], w, o), ValueError, r"input has shape \(63, 32\); needs \(..., 64\)"),
        (lambda x, w, o: (x[None], w, o), ValueError, r"x has shape \(1, 63, 64\).*needs \(M, K\) and \(E, N, K\)"),
        (lambda x, w, o: (x, w[0], o), ValueError, r"w \(96, 64\); needs"),
        (lambda x, w, o: (x, w[:, :40], o), ValueError, "N = 40 is no multiple of 32"),
        (lambda x, w, o: (x[:, :40], w[..., :40], o), ValueError, "K = 40 is no multiple of 32"),
        (lambda x, w, o: (x, w, o[:1]), ValueError, r"offs has shape \(1,\); needs \(2,\) for 2 experts"),
        (lambda x, w, o: (x, w[:0], o[:0]), ValueError, "for 0 experts"),
        (lambda x, w, o: (x, w, o.long()), TypeError, "offs has dtype torch.int64; needs torch.int32"),
        (lambda x, w, o: (x, w, o.to("meta")), ValueError, "offs is on meta"),
        (lambda x, w, o: (x.half(), w, o), TypeError, "input has dtype torch.float16"),
        (lambda x, w, o: (x, w.half(), o), TypeError, "parameters of torch.float16"),
    ],
)
def test_what_it_does_not_take(change, error, words):
    x, w, offs, _ = operands([33, 30], 0)
    with pytest.raises(error, match=words):
        mx_grouped_mm(*change(x, w, offs))


# --- GroupedExperts ---------------------------------------------------------------------------------------------


def experts(recipe="mxfp8_rceil") -> GroupedExperts:
    torch.manual_seed(3)
    return GroupedExperts(3, K, N, recipe, device=DEVICE)


def tokens(sizes=(33, 0, 30), rest=4):
    x, _, offs, _ = operands(list(sizes), rest)
    return x, offs


def trained(module, x, offs):
    x.grad = None
    module.zero_grad()
    out = module(x, offs)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", ["mxfp8_rceil_wgrad_bf16", "bf16"])
def test_experts_are_three_grouped_matmuls(recipe):
    module, (x, offs) = experts(recipe), tokens()
    got = trained(module, x, offs)

    def by_hand(x, offs):
        gate, up = (mx_grouped_mm(x, w, offs, recipe) for w in (module.w_gate, module.w_up))
        return mx_grouped_mm(silu(gate) * up, module.w_down, offs, recipe)

    module.forward = by_hand
    assert all(map(torch.equal, got, trained(module, x, offs)))


def test_experts_are_swiglu():
    module, (x, offs) = experts("bf16").requires_grad_(False), tokens()
    x, first, out = x.detach(), 0, torch.zeros_like(x)
    for e, end in enumerate(offs.tolist()):
        t, rows = x[first:end], slice(first, end)
        out[rows] = (silu(t @ module.w_gate[e].T) * (t @ module.w_up[e].T)) @ module.w_down[e].T
        first = end
    assert sqnr_db(module(x, offs), out) >= 40
    assert sqnr_db(experts()(x, offs).detach(), out) >= 22  # three matmuls' noise


def test_gate_and_up_read_the_same_codes_and_weights_are_held(monkeypatch):
    module, (x, offs) = experts(), tokens()
    once, ran = trained(module, x, offs), []
    for name in ("mx_quantize_groups", "mx_quantize_rowcol"):
        op = getattr(mxspec, name)
        monkeypatch.setattr(mxspec, name, lambda *a, op=op, name=name, **kw: ran.append(name) or op(*a, **kw))
    module(x, offs)
    assert ran == ["mx_quantize_rowcol"] * 3 + ["mx_quantize_groups"] * 4
    with cache_weights(module):
        ran.clear()
        assert all(map(torch.equal, trained(module, x, offs), once))
        assert "mx_quantize_rowcol" not in ran
    with pytest.raises(RuntimeError, match="a weight has changed"), cache_weights(module), torch.no_grad():
        module.w_up.mul_(2)
    with cache_weights(experts("bf16")):
        pass
    ran.clear()
    module.requires_grad_(False)(x, offs)
    assert ran == ["mx_quantize_rowcol"] * 3 + ["mx_quantize_groups"] * 2


def test_experts_compiled_and_checkpointed_give_the_same_bits():
    torch._dynamo.reset()
    module, (x, offs) = experts(), tokens()
    once = trained(module, x, offs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, trained(compiled, x, offs), once))
    whole = module.forward
    module.forward = lambda x, offs: checkpoint(whole, x, offs, use_reentrant=False)
    assert all(map(torch.equal, trained(module, x, offs), once))


def test_experts_state_and_what_they_refuse():
    module = experts()
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == {
        "w_gate": (3, N, K),
        "w_up": (3, N, K),
        "w_down": (3, K, N),
    }
    for arguments, error, words in (
        ((0, K, N), ValueError, "num_experts = 0"),
        ((3, 40, N), ValueError, "dim = 40 is no multiple of 32"),
        ((3, K, 40), ValueError, "hidden_dim = 40 is no multiple of 32"),
        ((3, K, N, "fp8_128"), ValueError, "GroupedExperts: there is no grouped matmul of fp8_128 yet"),
        ((3, K, N, "bf16", None, torch.float16), TypeError, "parameters of torch.float16"),
    ):
        with pytest.raises(error, match=words):
            GroupedExperts(*arguments)
    x, offs = tokens()
    with pytest.raises(ValueError, match=r"input has shape \(1, 67, 64\); needs \(M, 64\)"):
        module(x[None], offs)
    with pytest.raises(ValueError, match="needs \\(3,\\) for 3 experts"):
        module(x, offs[:2])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("recipe", GROUPED)
def test_captured_in_a_cuda_graph_nothing_waits_for_the_device(recipe):
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
    with torch.no_grad():  # other tokens and other groups in the same memory
        x.copy_(y)
        offs.copy_(other_offs)
    graph.replay()
    got = [t.clone() for t in captured]
    assert not torch.equal(got[0], expected[0])
    assert all(map(torch.equal, got, trained(module, x, offs)))
    offs.copy_(others)


def test_bfloat16s_grouped_matmul_leaves_no_garbage(monkeypatch):
    """PyTorch leaves rows of no group, and experts without tokens, as they were allocated."""
    monkeypatch.setattr(
        grouped_mm,
        "grouped_mm",
        lambda a, b, offs: torch.full((*b.shape[:-2], a.shape[-2], b.shape[-1]), 7.0).squeeze(0),
    )
    offs = torch.tensor([3, 3], dtype=torch.int32)
    out = grouped_mm._by_experts(torch.ones(5, K), torch.ones(1, K, N), offs)
    assert out[:, 0].tolist() == [7, 7, 7, 0, 0]
    monkeypatch.setattr(grouped_mm, "grouped_mm", lambda a, b, offs: torch.full((2, N, K), 7.0))
    wgrad = grouped_mm._wgrad_bf16(torch.ones(5, N), torch.ones(5, K), offs)
    assert wgrad[:, 0, 0].tolist() == [7, 0]
