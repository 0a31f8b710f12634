"""The layers' errors for arguments of a wrong type, dtype or layout, or on another device."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mxspec.nn import (
    RECIPES,
    Float8BlockwiseLinear,
    GroupedExperts,
    MXLinear,
    NVFP4Linear,
    convert,
    fp8_grouped_mm,
    mx_grouped_mm,
    nvfp4_grouped_mm,
)

W = 128
OFFS = torch.tensor([1, 3], dtype=torch.int32)


def x() -> torch.Tensor:
    return torch.ones(3, W)


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_on_another_device_than_the_tokens(recipe):
    words = "GroupedExperts: w_gate_up is on meta, but the input is on cpu; needs one device"
    with pytest.raises(ValueError, match=words):
        GroupedExperts(2, W, W, recipe, device="meta")(x(), OFFS)
    experts = GroupedExperts(2, W, W, recipe)
    for name in ("w_gate_up", "w_down"):
        weight = getattr(experts, name)
        setattr(experts, name, nn.Parameter(weight.to("meta")))
        with pytest.raises(
            ValueError, match=f"GroupedExperts: {name} is on meta, but the input is on cpu; needs one device"
        ):
            experts(x(), OFFS)
        setattr(experts, name, weight)
    with pytest.raises(ValueError, match="GroupedExperts: offs is on cpu, but the input is on meta; needs one device"):
        experts(x().to("meta"), OFFS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_a_function_on_another_device_than_the_tokens(recipe):
    functions = (mx_grouped_mm, "mxfp8"), (fp8_grouped_mm, "fp8_128"), (nvfp4_grouped_mm, "nvfp4")
    for fn, format in functions:
        if RECIPES[recipe].format in (format, "bf16"):
            words = f"{fn.__name__}: w is on meta, but the input is on cpu; needs one device"
            with pytest.raises(ValueError, match=words):
                fn(x(), torch.ones(2, W, W, device="meta"), OFFS, recipe)


@pytest.mark.parametrize("kind", [MXLinear, Float8BlockwiseLinear, NVFP4Linear])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_linears_parameters_on_another_device_than_the_input(kind, name):
    layer = kind(W, W)
    setattr(layer, name, nn.Parameter(getattr(layer, name).to("meta")))
    words = f"{kind.__name__}: {name} is on meta, but the input is on cpu; needs one device"
    with pytest.raises(ValueError, match=words):
        layer(x())


@pytest.mark.parametrize("name", ["w_gate_up", "w_down"])
def test_one_of_the_experts_weights_of_another_dtype(name):
    experts = GroupedExperts(2, W, W, "bf16")
    setattr(experts, name, nn.Parameter(getattr(experts, name).half()))
    with pytest.raises(
        TypeError, match=r"GroupedExperts: parameters have dtype torch\.float16; needs torch\.bfloat16 or"
    ):
        experts(x(), OFFS)


@pytest.mark.parametrize(
    "layer", [MXLinear(W, W), Float8BlockwiseLinear(W, W), NVFP4Linear(W, W)], ids=lambda m: type(m).__name__
)
def test_an_input_that_is_not_dense(layer):
    name = type(layer).__name__
    with pytest.raises(ValueError, match=rf"{name}: input is torch\.sparse_coo; needs a dense tensor"):
        layer(x().to_sparse())
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(ValueError, match=f"{name}: input is nested; needs a dense tensor"):
            layer(torch.nested.nested_tensor([x(), x()[:1]], layout=layout))


CALLS = {
    "MXLinear: input is a list; needs a tensor": lambda: MXLinear(W, W)([[1.0] * W]),
    "Float8BlockwiseLinear: input is a NoneType; needs a tensor": lambda: Float8BlockwiseLinear(W, W)(None),
    "GroupedExperts: x is a list; needs a tensor": lambda: GroupedExperts(2, W, W)([1.0], OFFS),
    "GroupedExperts: offs is a list; needs a tensor": lambda: GroupedExperts(2, W, W)(x(), [1, 3]),
    "mx_grouped_mm: w is a list; needs a tensor": lambda: mx_grouped_mm(x(), [torch.ones(W, W)] * 2, OFFS),
    "mx_grouped_mm: x is a NoneType; needs a tensor": lambda: mx_grouped_mm(None, torch.ones(2, W, W), OFFS),
    "fp8_grouped_mm: offs is a tuple; needs a tensor": lambda: fp8_grouped_mm(x(), torch.ones(2, W, W), (1, 3)),
    "nvfp4_grouped_mm: offs is a tuple; needs a tensor": lambda: nvfp4_grouped_mm(x(), torch.ones(2, W, W), (1, 3)),
    "NVFP4Linear: recipe is a list; needs": lambda: NVFP4Linear(W, W, recipe=["nvfp4"]),
    "MXLinear: recipe is a list; needs a Recipe or one of mxfp8_rceil, ": lambda: MXLinear(W, W, recipe=["bf16"]),
    "Float8BlockwiseLinear: recipe is a list; needs": lambda: Float8BlockwiseLinear(W, W, recipe=["fp8_128"]),
    "GroupedExperts: recipe is a dict; needs": lambda: GroupedExperts(2, W, W, recipe={}),
    "GroupedExperts: recipe is a NoneType; needs": lambda: GroupedExperts(2, W, W).set_recipe(None),
    "mx_grouped_mm: recipe is a list; needs": lambda: mx_grouped_mm(x(), torch.ones(2, W, W), OFFS, []),
    "convert: recipe is a list; needs": lambda: convert(nn.Sequential(), ["mxfp8_rceil"]),
    "convert: the model is a list; needs an nn.Module": lambda: convert([nn.Linear(W, W)], "mxfp8_rceil"),
    "convert: filter_fn is a str; needs a function of a layer and its name": lambda: convert(
        nn.Sequential(), "mxfp8_rceil", "0"
    ),
    "MXLinear: from_linear got a Conv1d; needs an nn.Linear": lambda: MXLinear.from_linear(nn.Conv1d(W, W, 1)),
    "Float8BlockwiseLinear: from_linear got a NoneType; needs": lambda: Float8BlockwiseLinear.from_linear(None),
    "MXLinear: in_features = '128'; needs an int": lambda: MXLinear("128", W),
    "MXLinear: out_features = None; needs an int": lambda: MXLinear(W, None),
    "Float8BlockwiseLinear: in_features = 128.0; needs an int": lambda: Float8BlockwiseLinear(128.0, W),
    "GroupedExperts: hidden_dim = [128]; needs an int": lambda: GroupedExperts(2, W, [W]),
}


@pytest.mark.parametrize("words", CALLS)
def test_a_wrong_type_is_a_type_error_of_ours(words):
    with pytest.raises(TypeError, match=re.escape(words)):
        CALLS[words]()


def test_a_linear_whose_weight_has_other_features_than_it_says():
    linear = nn.Linear(W, W)
    linear.weight = nn.Parameter(torch.ones(W, 64))
    words = r"MXLinear: the Linear's weight has shape \(128, 64\), but its features say \(128, 128\)"
    with pytest.raises(ValueError, match=words):
        MXLinear.from_linear(linear)
    assert "its features say" in convert(nn.Sequential(linear), "mxfp8_rceil").left["0"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_to_float16_is_named(recipe):
    """The message says what was cast to what, and which autocast is needed."""
    functions = {"mxfp8": mx_grouped_mm, "fp8_128": fp8_grouped_mm, "nvfp4": nvfp4_grouped_mm, "bf16": mx_grouped_mm}
    linears = {"mxfp8": MXLinear, "fp8_128": Float8BlockwiseLinear, "nvfp4": NVFP4Linear}
    function, linear = functions[RECIPES[recipe].format], linears.get(RECIPES[recipe].format)
    experts, w = GroupedExperts(2, W, W, recipe), torch.ones(2, W, W)
    calls = {
        "GroupedExperts": lambda t: experts(t, OFFS),
        function.__name__: lambda t: function(t, w, OFFS, recipe),
    }
    if linear is not None:
        calls[linear.__name__] = linear(W, W, recipe=recipe)
    for name, call in calls.items():
        for dtype in (torch.float32, torch.bfloat16):
            words = re.escape(
                f"{name}: torch.autocast casts the input from {dtype} to torch.float16; needs an autocast to "
                "torch.bfloat16: torch.autocast('cpu', dtype=torch.bfloat16)"
            )
            with torch.autocast("cpu", torch.float16), pytest.raises(TypeError, match=words):
                call(x().to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            assert call(x()).dtype == torch.bfloat16


def test_a_function_without_experts():
    for function in (mx_grouped_mm, fp8_grouped_mm, nvfp4_grouped_mm):
        with pytest.raises(ValueError, match=f"{function.__name__}: w has 0 experts; needs at least 1"):
            function(x(), torch.ones(0, W, W), OFFS[:0])
