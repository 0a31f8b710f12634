"""Recipes with save_weight_codes=False: the forward saves the weight itself, and dgrad quantizes it. Same bits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm, silu
from torch.utils.checkpoint import CheckpointError, checkpoint

import mxspec
from mxspec import dispatch
from mxspec.check import default_device
from mxspec.checkpoint.live import codes_of
from mxspec.nn import (
    RECIPES,
    Float8BlockwiseLinear,
    GroupedExperts,
    MXLinear,
    _formats,
    cache_weights,
    fp8_grouped_mm,
    mx_grouped_mm,
    watch,
)
from tests.helpers import ends

DEVICE = default_device()
K, N, E = 128, 96, 3
BF16 = torch.bfloat16
# test_nvfp4.py has nvfp4
LOW = {name: recipe for name, recipe in RECIPES.items() if recipe.format not in ("bf16", "nvfp4")}
LOW["mxfp8_rceil, e5m2 gradients"] = replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2)
each_recipe = pytest.mark.parametrize("recipe", LOW.values(), ids=LOW)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)


class Grouped(nn.Module):
    """A module that calls a function for grouped matmuls. Its weight may lie transposed in memory."""

    def __init__(self, recipe, dtype, transposed):
        super().__init__()
        self.recipe, self.fn = recipe, fp8_grouped_mm if recipe.format == "fp8_128" else mx_grouped_mm
        self.transposed = transposed
        self.w = nn.Parameter(torch.randn(E, *((K, N) if transposed else (N, K)), device=DEVICE, dtype=dtype) / 11)

    def forward(self, x, offs):
        return self.fn(x, self.w.mT if self.transposed else self.w, offs, self.recipe)


class Transposed(GroupedExperts):
    """Experts that store their weights `(E, K, N)`, as some models of transformers do."""

    is_transposed = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for name in self.weight_names:
            setattr(self, name, nn.Parameter(getattr(self, name).detach().mT.contiguous()))


def linear(recipe, dtype):
    kind = Float8BlockwiseLinear if recipe.format == "fp8_128" else MXLinear
    return kind(K, N, device=DEVICE, dtype=dtype, recipe=recipe)


MAKE = {
    "Linear": linear,
    "grouped_mm": lambda recipe, dtype: Grouped(recipe, dtype, False),
    "grouped_mm, transposed weight": lambda recipe, dtype: Grouped(recipe, dtype, True),
    "GroupedExperts": lambda recipe, dtype: GroupedExperts(E, K, N, recipe, DEVICE, dtype),
    "transposed experts": lambda recipe, dtype: Transposed(E, K, N, recipe, DEVICE, dtype),
}
each_layer = pytest.mark.parametrize("made", MAKE)


def layer(made, recipe, dtype=BF16, saves_codes=False):
    torch.manual_seed(3)
    return MAKE[made](replace(recipe, save_weight_codes=saves_codes), dtype)


def arguments(module, dtype=BF16, M=157):  # enough tokens for MXFP8 by values
    torch.manual_seed(0)
    x = torch.randn(M, K, device=DEVICE, dtype=dtype, requires_grad=True)
    return (x,) if isinstance(module, nn.Linear) else (x, ends(33, 33, M - 4).to(DEVICE))


def trained(module, x, *offs, run=None):
    x.grad = None
    module.zero_grad()
    out = (module if run is None else run)(x, *offs)
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def same(got, expected):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def saved(call):
    """The tensors that a forward saves for its backward, without the index of the backend, which always lives."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        call()
    return [t for t in kept.values() if t.ndim]


def bytes_of(tensors, module):
    """The bytes of tensors, without the module's parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    return sum(t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().data_ptr() not in own)


@pytest.fixture(params=[False, True], ids=["codes", "values"])
def by_values(request, monkeypatch, made, recipe):
    """Whether MXFP8 of token groups multiplies bf16 values, as on Hopper."""
    if request.param and (made == "Linear" or recipe.format != "mxfp8" or recipe.wgrad_bf16):
        pytest.skip("multiplies codes on every GPU")
    monkeypatch.setattr(_formats, "_is_hopper", lambda device: request.param)
    return request.param


@pytest.mark.turns(3)
@each_dtype
@each_recipe
@each_layer
def test_the_bits_are_the_same(made, recipe, dtype, by_values):
    module, other = (layer(made, recipe, dtype, saves_codes) for saves_codes in (True, False))
    x = arguments(module, dtype)
    assert same(trained(other, *x), trained(module, *x))
    parameters = list(zip(module.parameters(), other.parameters(), strict=True))
    for frozen in range(len(parameters) + 1):  # no gradient for x, then none for each parameter
        x[0].requires_grad_(frozen > 0)
        for i, pair in enumerate(parameters):
            for p in pair:
                p.requires_grad_(i != frozen - 1)
        assert same(trained(other, *x), trained(module, *x)), frozen


@pytest.mark.turns(6)
@each_recipe
@pytest.mark.parametrize("made", ["Linear", "GroupedExperts", "transposed experts"])
def test_compiled_and_checkpointed_too(made, recipe, by_values):
    torch._dynamo.reset()
    module = layer(made, recipe)
    x = arguments(module)
    once = trained(layer(made, recipe, saves_codes=True), *x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert same(trained(module, *x, run=compiled), once)
    for reentrant in (False, True):
        assert same(trained(module, *x, run=lambda *a: checkpoint(module, *a, use_reentrant=reentrant)), once)  # noqa: B023


@each_recipe
@each_layer
def test_the_weight_itself_is_saved_if_dgrad_needs_it(made, recipe, by_values):
    module = layer(made, recipe)
    x = arguments(module, M=512)
    weights = {p.data_ptr() for p in module.parameters() if p.ndim > 1}
    kept = saved(lambda: module(*x))
    assert weights <= {t.data_ptr() for t in kept}  # no copy
    codes = saved(lambda: layer(made, recipe, saves_codes=True)(*x))
    assert len(codes) > len(kept) - len(weights)
    own = sum(p.numel() for p in module.parameters() if p.ndim > 1)
    assert bytes_of(codes, module) - bytes_of(kept, module) >= own  # one byte a weight and the scales, or two bytes
    x[0].requires_grad_(False)
    assert weights - {t.data_ptr() for t in saved(lambda: module(*x))}  # the first weight's codes are not needed
    module.requires_grad_(False)
    assert saved(lambda: module(*x)) == []


def pytorchs(module, x, *offs):
    """PyTorch's layer in bfloat16 with the same weights."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, module.weight, module.bias)
    if isinstance(module, Grouped):
        return grouped_mm(x, module.w if module.transposed else module.w.mT, offs=offs[0])
    first, second = (w if module.is_transposed else w.mT for w in module._weights())
    gate, up = grouped_mm(x, first, offs=offs[0]).chunk(2, -1)
    return grouped_mm(silu(gate) * up, second, offs=offs[0])


@each_recipe
@each_layer
def test_no_more_bytes_are_saved_than_by_bfloat16(made, recipe, by_values):
    module = layer(made, recipe)
    x = arguments(module, M=2048)  # many, because codes along the tokens are padded to whole blocks
    ours, theirs = (bytes_of(saved(call), module) for call in (lambda: module(*x), lambda: pytorchs(module, *x)))
    assert ours <= theirs
    codes = layer(made, recipe, saves_codes=True)
    assert bytes_of(saved(lambda: codes(*x)), codes) > ours


@pytest.mark.turns(3)
@each_recipe
@pytest.mark.parametrize("made", ["Linear", "GroupedExperts"])
def test_a_compiled_graph_quantizes_the_saved_weight_in_its_backward(made, recipe, by_values):
    """torch.compile would save the codes if quantizing the weight needed nothing of the backward."""
    torch._dynamo.reset()
    module = layer(made, recipe)
    x = arguments(module, M=2048)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(*x)
    kept = saved(lambda: compiled(*x))
    assert {p.data_ptr() for p in module.parameters() if p.ndim > 1} <= {t.data_ptr() for t in kept}
    assert bytes_of(kept, module) <= bytes_of(saved(lambda: pytorchs(module, *x)), module)


@pytest.mark.turns(6)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", _formats._OF_KIND)
def test_the_operator_of_compiled_graphs(kind, turned):
    w = torch.randn(E, N, K, device=DEVICE, dtype=BF16)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    rules = "floor" if "mxfp8" in kind else "rceil", "pow2" if "fp8_128" in kind else "fp32"
    arguments = w, w.new_empty(1), kind, *rules, turned
    torch.library.opcheck(torch.ops.mxspec_nn.quantize_after.default, arguments, test_utils=tests)


@each_layer
def test_a_weight_that_changes_before_the_backward_is_refused_as_by_nn_linear(made):
    module = layer(made, RECIPES["fp8_128"])
    loss = module(*arguments(module)).sum()
    with torch.no_grad():
        next(module.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@each_recipe
@pytest.mark.parametrize("made", ["Linear", "GroupedExperts"])
def test_held_codes_are_saved_and_no_weight_is(made, recipe, by_values):
    module = layer(made, recipe)
    x = arguments(module)
    once = trained(module, *x)
    weights = {p.data_ptr() for p in module.parameters()}
    with cache_weights(module):
        assert same(trained(module, *x), once)
        kept = {t.untyped_storage().data_ptr() for t in saved(lambda: module(*x))}
        held = {t.untyped_storage().data_ptr() for weight in module._cached for t in weight[2:] if t is not None}
        assert held <= kept
        assert not weights & kept


def test_a_checkpoint_that_begins_in_the_block_and_ends_outside_raises():
    module = layer("Linear", RECIPES["fp8_128"])
    x = arguments(module)
    with cache_weights(module):
        out = checkpoint(module, *x, use_reentrant=False)
    with pytest.raises(CheckpointError):
        out.sum().backward()


RAN = {  # the ops that quantize the weights: both directions at once, then the forward's and dgrad's alone
    ("mxfp8_rceil", False): (["mx_quantize_rowcol"], ["mx_quantize -1"], ["mx_quantize -2"]),
    ("mxfp8_rceil", True): (
        ["mx_fake_quantize_rowcol_groups"],
        ["mx_quantize -1", "mx_dequantize -1"],
        ["mx_quantize -2", "mx_dequantize -2"],
    ),
    ("fp8_128", False): (["fp8_quantize_128x128"],) * 3,
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "values"), RAN, ids=lambda v: str(v))
def test_each_direction_is_quantized_where_it_is_needed(recipe, values, monkeypatch):
    monkeypatch.setattr(_formats, "_is_hopper", lambda device: values)
    ran, both, forward, backward = [], *RAN[recipe, values]

    def record(op, run):
        def recorded(first, *args, **kw):
            if first.ndim == 3 or first.shape[0] in (E * 2 * N, E * K):
                ran.append(f"{op} {kw['axis']}" if "axis" in kw else op)
            return run(first, *args, **kw)

        return recorded

    for op in dispatch.ops():
        monkeypatch.setattr(mxspec, op, record(op, getattr(mxspec, op)))
    module = layer("GroupedExperts", LOW[recipe])
    x = arguments(module)
    out = module(*x)
    quantizers = {re.sub(" .*", "", op) for op in both + forward + backward}
    assert [op for op in ran if op.split()[0] in quantizers] == forward * 2
    ran.clear()
    out.sum().backward()
    assert [op for op in ran if op.split()[0] in quantizers] == backward * 2
    ran.clear()
    with torch.no_grad():
        module(*x)
    assert [op for op in ran if op.split()[0] in quantizers] == forward * 2
    ran.clear()
    with cache_weights(module):
        trained(module, *x)
    assert [op for op in ran if op.split()[0] in quantizers] == both * 2


@each_recipe
@pytest.mark.parametrize("made", ["Linear", "GroupedExperts", "transposed experts"])
def test_a_checkpoint_has_the_same_codes(made, recipe):
    for got, expected in zip(*(codes_of(layer(made, recipe, saves_codes=s)) for s in (False, True)), strict=True):
        assert got.codes.view(torch.uint8).equal(expected.codes.view(torch.uint8))
        assert got.scale.equal(expected.scale)


def test_a_watch_counts_the_same():
    rows = []
    for saves_codes in (True, False):
        model = nn.Sequential(layer("Linear", RECIPES["mxfp8_rceil"], saves_codes=saves_codes))
        (x,) = arguments(model[0])
        with watch(model) as seen:
            model(x).square().sum().backward()
        rows.append(seen.rows())
    assert rows[0] == rows[1]


def test_a_linear_of_another_format_is_refused():
    with pytest.raises(ValueError, match=r"the recipe's format is mxfp8; needs fp8_128\. Use MXLinear instead"):
        Float8BlockwiseLinear(K, N, recipe="mxfp8_rceil")
    with pytest.raises(ValueError, match=r"the recipe's format is bf16; needs fp8_128\. Use nn\.Linear instead"):
        Float8BlockwiseLinear.from_linear(nn.Linear(K, N), recipe="bf16")
    recipe = replace(RECIPES["fp8_128"], save_weight_codes=False)
    assert "save_weight_codes=False" in repr(Float8BlockwiseLinear(K, N, recipe=recipe))
