"""`quantize_weights`: which values experts keep in MXFP4, what they compute, and what is left."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize

import mxspec
from mxspec.check import default_device
from mxspec.checkpoint import CheckpointError, save, verify
from mxspec.formats import SCALINGS
from mxspec.nn import GroupedExperts, cache_weights, convert, quantize_weights, watch
from mxspec.nn.weight_only import mxfp4_of

DEVICE = default_device()
E, DIM, HIDDEN = 3, 64, 96


def every_mxfp4_block() -> torch.Tensor:
    """Weights of two experts. Each block has one magnitude of e2m1 as its largest, at one of many scales."""
    scales = torch.tensor([0, 1, 2, 64, 126, 127, 128, 200, 250], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    rows = []
    for largest in range(1, 8):
        block = torch.where((codes & 7) > largest, codes & 8, codes).repeat(2)
        rows += [(block, scale) for scale in scales]
    elements = torch.stack([block for block, _ in rows])
    packed = (elements[:, ::2] | elements[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    scale = torch.stack([scale for _, scale in rows])[:, None].view(torch.float8_e8m0fnu)
    values = mxspec.mx_dequantize(packed, scale, out_dtype=torch.float32, backend="reference")
    return values.expand(2, -1, -1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_mxfp4_numbers_keep_their_values_unless_the_rule_raises_their_scale(scaling, transposed):
    weight = every_mxfp4_block().to(DEVICE)
    if transposed:
        weight = weight.mT.contiguous().mT
    blocks, scales, changed, special = mxfp4_of(weight, scaling)
    back = mxspec.mx_dequantize(
        blocks.flatten(-2).view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu), out_dtype=torch.float32
    )
    assert (changed > 0) == (scaling == "ceil")
    assert special == 0
    assert int((back != weight).sum()) == changed
    if not changed:
        assert torch.equal(back.signbit(), weight.signbit())  # minus zero is a number of e2m1, too


def experts(dtype: torch.dtype = torch.bfloat16) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(E, DIM, HIDDEN, dtype=dtype, device=DEVICE)


def of_mxfp4_numbers() -> GroupedExperts:
    layer = experts()
    with torch.no_grad():
        for w in (layer.w_gate_up, layer.w_down):
            w.copy_(mxspec.mx_dequantize(*mxspec.mx_quantize(w, elem_dtype="e2m1")))
    return layer


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(20, DIM, dtype=torch.bfloat16, device=DEVICE)
    return x, torch.tensor([4, 4, 17], dtype=torch.int32, device=DEVICE)


def test_the_layer_computes_what_the_ops_compute():
    layer, (x, offs) = of_mxfp4_numbers(), tokens()
    w_gate_up, w_down = layer.w_gate_up.detach(), layer.w_down.detach()
    report = quantize_weights(layer)
    assert report.held == {"": "WeightOnlyGroupedExperts, every value is kept"}
    assert report.bytes_before == 2 * (w_gate_up.numel() + w_down.numel())
    assert report.bytes_after * 32 == report.bytes_before / 2 * 17  # 4.25 bits for a weight
    assert not list(layer.parameters())
    assert not hasattr(layer, "recipe")
    with torch.no_grad():
        out = layer(x, offs)
    of = [mxspec.mx_quantize(w, elem_dtype="e2m1") for w in (w_gate_up, w_down)]
    gate_up = mxspec.mx_grouped_gemm(x, None, *of[0], offs, scale_layout="plain")
    hidden = mxspec.swiglu(*gate_up.chunk(2, -1))
    assert torch.equal(out, mxspec.mx_grouped_gemm(hidden, None, *of[1], offs, scale_layout="plain"))
    assert not out[17:].any()
    assert torch.equal(layer(x, offs), out), "with gradients enabled, the bits are the same"


def test_copies_pickles_and_state_dicts_have_the_codes():
    layer, (x, offs) = of_mxfp4_numbers(), tokens()
    quantize_weights(layer)
    with torch.no_grad():
        out = layer(x, offs)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(copied(x, offs), out)
        with torch.device("meta"):
            empty = GroupedExperts(E, DIM, HIDDEN, dtype=torch.bfloat16)
        assert quantize_weights(empty).held == {"": "WeightOnlyGroupedExperts, empty on the meta device"}
        empty.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(empty(x, offs), out)
    assert {name: (tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()} == {
        "w_gate_up_blocks": ((E, 2 * HIDDEN, DIM // 32, 16), torch.uint8),
        "w_gate_up_scales": ((E, 2 * HIDDEN, DIM // 32), torch.uint8),
        "w_down_blocks": ((E, DIM, HIDDEN // 32, 16), torch.uint8),
        "w_down_scales": ((E, DIM, HIDDEN // 32), torch.uint8),
    }


def test_it_compiles_without_a_break():
    layer, (x, offs) = of_mxfp4_numbers(), tokens()
    quantize_weights(layer)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, offs), layer(x, offs))


def test_other_weights_are_left_unless_they_may_be_rounded():
    model = nn.ModuleDict({"experts": experts()})
    before = copy.deepcopy(model)
    report = quantize_weights(model)
    assert not report.held
    words = r"\d+ of its 55296 weights \(\d+\.\d%\) would change; allow_lossy=True rounds them"
    assert re.fullmatch(words, report.left["experts"])
    assert all(torch.equal(*both) for both in zip(model.parameters(), before.parameters(), strict=True))
    report = quantize_weights(model, allow_lossy=True)
    assert re.search(r"experts: WeightOnlyGroupedExperts, \d+ of 55296 values changed$", str(report))
    assert quantize_weights(model).left == {"experts": "it holds MXFP4 already"}
    nan = of_mxfp4_numbers()
    with torch.no_grad():
        nan.w_down[1, 2, 3] = torch.nan
    words = "1 of them NaN or Inf, which make their blocks NaN"
    assert quantize_weights(nan).left[""].startswith(f"32 of its 55296 weights (0.1%) would change, {words}")
    assert words in quantize_weights(nan, allow_lossy=True).held[""]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_through_the_codes_names_the_layer(compiled):
    layer, (x, offs) = of_mxfp4_numbers(), tokens()
    quantize_weights(layer)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out = run(x.requires_grad_(), offs)
    assert torch.equal(out, layer(x.detach(), offs))
    with pytest.raises(RuntimeError, match="holds its weights in MXFP4, for inference, so it has no gradient"):
        out.sum().backward()


def test_what_is_left_has_a_reason():
    def only(layer: nn.Module, **options) -> str:
        (reason,) = quantize_weights(layer, allow_lossy=True, **options).left.values()
        return reason

    assert only(experts(), filter_fn=lambda layer, name: False) == "filter_fn returned false"
    narrow = GroupedExperts(2, 48, 64, "bf16", dtype=torch.bfloat16)
    assert only(narrow) == "w_gate_up has a width of 48; MXFP4 needs a multiple of 32"
    assert "parameters have dtype torch.float16" in only(experts().half())

    class Mine(GroupedExperts):
        pass

    assert only(Mine(2, 64, 64)) == "it is a Mine, and not a plain GroupedExperts"
    patched = experts()
    patched.forward = lambda x, offs: x
    assert only(patched) == "it has its own forward"
    parametrized = experts()
    parametrize.register_parametrization(parametrized, "w_down", nn.Identity())
    assert "its weights are parametrized" in only(parametrized)
    half = experts()
    half.w_down = nn.Parameter(half.w_down.to("meta"))
    assert only(half) == "a part of its weights is on the meta device; load all of them, or none"

    class StackedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 32, 32))

    assert only(StackedExperts()) == "quantize_weights does not know how StackedExperts computes"
    two = nn.ModuleDict({"a": experts(), "b": experts()})
    two["b"].w_down = two["a"].w_down
    assert quantize_weights(two, allow_lossy=True).left == dict.fromkeys(
        "ab", "one parameter is a.w_down and b.w_down; give each layer its own"
    )
    assert "no experts were found" in str(quantize_weights(nn.Linear(32, 32)))
    layer = experts()
    with cache_weights(layer):
        assert "cache_weights holds codes" in only(layer)


def test_a_filter_that_raises_changes_nothing():
    model = nn.ModuleDict({"a": of_mxfp4_numbers(), "b": of_mxfp4_numbers()})
    with pytest.raises(KeyError):
        quantize_weights(model, lambda layer, name: {"a": True}[name])
    with pytest.raises(TypeError, match="positional argument"):
        quantize_weights(model, lambda layer: True)
    assert all(type(layer) is GroupedExperts for layer in model.values())


def test_a_state_dict_is_loaded_by_its_bits():
    layer, (x, offs) = of_mxfp4_numbers(), tokens()
    quantize_weights(layer)
    out = layer(x, offs)
    views = {"blocks": torch.float4_e2m1fn_x2, "scales": torch.float8_e8m0fnu}
    state = {name: t.clone().view(views[name.rpartition("_")[2]]) for name, t in layer.state_dict().items()}
    for name in ("w_gate_up_scales", "w_down_blocks"):
        getattr(layer, name).zero_()
    layer.load_state_dict(state)
    assert torch.equal(layer(x, offs), out)
    with pytest.raises(TypeError, match=r"w_down_scales has dtype torch.float32; needs codes in torch\.uint8"):
        layer.load_state_dict({**state, "w_down_scales": torch.zeros(E, DIM, HIDDEN // 32)})


def test_tokens_of_any_strides_and_float32_weights_that_run_in_bfloat16():
    layer, (x, offs) = of_mxfp4_numbers().float(), tokens()
    assert quantize_weights(layer).held[""].endswith("every value is kept; run the model in bfloat16")
    assert torch.equal(layer(x.mT.contiguous().mT, offs), layer(x, offs))


def test_watch_and_save_say_that_the_layer_holds_mxfp4(tmp_path):
    model = nn.ModuleDict({"experts": of_mxfp4_numbers()})
    quantize_weights(model)
    with watch(model) as seen:
        model["experts"](*tokens())
    assert "holds its weights in MXFP4" in seen.unwatched()["experts"]
    with pytest.raises(CheckpointError, match=r"save: experts holds its weights in MXFP4 \(quantize_weights\)"):
        save(model, tmp_path / "new", to="mxfp8")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"verify: experts holds its weights in MXFP4"):
        verify(model, tmp_path)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize_weights(torch.ones(2)), TypeError, "the model is a Tensor; needs an nn.Module"),
        (lambda: quantize_weights(experts(), "all"), TypeError, "filter_fn is a str; needs a function"),
        (lambda: quantize_weights(experts(), scaling="up"), ValueError, "scaling = 'up'; needs one of"),
        (lambda: quantize_weights(experts(), allow_lossy="no"), TypeError, "allow_lossy = 'no'; needs a bool"),
        (lambda: quantize_weights(torch.compile(experts())), RuntimeError, "already wrapped by torch.compile"),
    ],
)
def test_wrong_arguments_are_refused(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, offs: (x.half(), offs), TypeError, "float16; MXFP4 weights need tokens in torch.bfloat16"),
        (lambda x, offs: (x.float(), offs), TypeError, "input has dtype torch.float32; MXFP4 weights need tokens in"),
        (lambda x, offs: (x[:, 1:], offs), ValueError, f"input has shape (20, {DIM - 1}); needs"),
        (lambda x, offs: (x[None], offs), ValueError, f"needs (M, {DIM})"),
        (lambda x, offs: (x, offs.long()), TypeError, "offs has dtype torch.int64"),
        (lambda x, offs: (x, offs[1:]), ValueError, "offs has shape (2,)"),
        (lambda x, offs: (x.tolist(), offs), TypeError, "x is a list; needs a tensor"),
        (lambda x, offs: (x.to("meta"), offs), ValueError, "needs one device"),
    ],
)
def test_wrong_tokens_are_refused(change, error, words):
    layer = of_mxfp4_numbers()
    quantize_weights(layer)
    with pytest.raises(error, match=re.escape(words)):
        layer(*change(*tokens()))


def test_under_autocast_float32_tokens_become_bfloat16():
    layer, (x, offs) = of_mxfp4_numbers(), tokens()
    quantize_weights(layer)
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(layer(x.float(), offs), layer(x, offs))


def test_convert_leaves_what_holds_mxfp4():
    model = nn.ModuleDict({"experts": of_mxfp4_numbers(), "head": nn.Linear(64, 64)})
    quantize_weights(model)
    before = copy.deepcopy(model["experts"].state_dict())
    assert list(convert(model, "mxfp8_rceil").swapped) == ["head"]
    assert all(torch.equal(before[name], t) for name, t in model["experts"].state_dict().items())
