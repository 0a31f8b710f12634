"""`convert` on many families of transformers: each parameter either runs in low precision or is named with a reason.

The models lie on the meta device. They have the sizes of transformers' default configs and few layers.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mxspec.nn import conversion, convert

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")

LAYERS = 4  # qwen3_next has attention in one layer of four
DENSE = ("gemma3_text", "glm4", "llama", "mamba", "qwen3")
EXPERTS = (  # their experts run through transformers' experts interface
    "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_moe", "qwen3_next",
)  # fmt: skip
OTHER_EXPERTS = ("jetmoe", "llama4_text")
SIZES = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "minimax_m3_vl_text": {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]},
}


def model_of(family: str, layers: int = LAYERS) -> nn.Module:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = transformers.CONFIG_MAPPING[family](num_hidden_layers=layers, pad_token_id=0, **SIZES.get(family, {}))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "no adapter"])
@pytest.mark.parametrize("family", [*DENSE, *EXPERTS, *OTHER_EXPERTS])
def test_each_parameter_is_converted_or_named_with_a_reason(family, adapter, recipe, monkeypatch):
    if not adapter:
        monkeypatch.setattr(conversion, "integration_of", lambda layer: None)
    model = model_of(family)
    before = dict(model.named_parameters(remove_duplicate=False))
    report = convert(model, recipe)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)

    low = set()  # the weights of the layers that the report calls swapped
    for name in report.swapped:
        assert model.get_submodule(name).recipe.format == ("fp8_128" if recipe == "fp8_128" else "mxfp8")
        low |= {
            parameter
            for key, parameter in model.get_submodule(name).named_parameters(recurse=False)
            if parameter.ndim > 1 and "bias" not in key
        }
    for name, parameter in after.items():
        parts = name.split(".")
        above = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        reasons = [report.left[each] for each in above & report.left.keys()]
        if parameter in low:
            assert not reasons or not above.isdisjoint(report.swapped), name  # a tied weight may be in both
        elif parameter.ndim > 1:
            assert len(reasons) == 1, name
            assert reasons[0], name
    every = {parameter: parameter.numel() for parameter in after.values()}
    assert report.share_of_parameters == sum(every[parameter] for parameter in low) / sum(every.values())
    assert report.share_of_flops is not None
    assert bool(low) == (report.share_of_flops > 0)
    assert report.share_of_flops < 1

    head = next(name for name, layer in model.named_modules() if layer is model.get_output_embeddings())
    assert report.left[head].startswith("it is the output head")
    embedding = next(name for name, parameter in before.items() if parameter is model.get_input_embeddings().weight)
    assert report.left[embedding] == "an embedding is a lookup and no matmul"
    routers = {name.removesuffix(".weight") for name, why in report.left.items() if why.startswith("it is a router")}
    layers_with_experts = {".".join(name.split(".")[:3]) for name, parameter in after.items() if "experts" in name}
    if family in DENSE:
        assert not routers
    else:
        assert {".".join(name.split(".")[:3]) for name in routers} == layers_with_experts
        assert all(name.rpartition(".")[2] in ("gate", "router", "layer") for name in routers)
    converted = {name for name in report.swapped if name.endswith("experts")}
    if not adapter or family not in EXPERTS:
        assert not converted
    else:
        refused = {name for name, why in report.left.items() if name.endswith("experts") and "a multiple of" in why}
        assert len(converted | refused) == len(layers_with_experts)
        assert not refused


@pytest.mark.parametrize("family", ["deepseek_v3", "llama", "qwen3_moe"])
def test_the_text_of_the_report_is_as_long_for_many_layers_as_for_few(family):
    few, many = (str(convert(model_of(family, layers), "mxfp8_rceil")) for layers in (5, 9))
    assert "{0..4}" in few
    assert few.replace("..4}", "..8}").splitlines()[2:] == many.splitlines()[2:]
