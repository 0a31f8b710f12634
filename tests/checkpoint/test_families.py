"""The names, dtypes and shapes of each family, as its own writers store them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mxspec.checkpoint import inspect

E4M3, E8M0, U8, I8, F32, BF16 = (
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.float32,
    torch.bfloat16,
)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CT, MODELOPT, TORCHAO = ({"quant_method": name} for name in ("compressed-tensors", "modelopt", "torchao"))

# name: (quantization_config, tensors, family, shape in elements, block, direction)
STORED = {
    "DeepSeek-V3": (
        FP8,
        {"m.weight": (E4M3, (576, 256)), "m.weight_scale_inv": (F32, (5, 2))},
        "fp8_block",
        (576, 256),
        (128, 128),
        "multiplier",
    ),
    "Qwen3": (
        FP8,
        {"m.weight": (E4M3, (128, 256)), "m.weight_scale_inv": (BF16, (1, 2))},
        "fp8_block",
        (128, 256),
        (128, 128),
        "multiplier",
    ),
    "DeepSeek-V4": (
        FP8,
        {"m.weight": (E4M3, (256, 256)), "m.scale": (E8M0, (2, 2))},
        "deepseek_v4",
        (256, 256),
        (128, 128),
        "multiplier",
    ),
    "DeepSeek-V4 experts": (
        FP8,
        {"m.weight": (I8, (64, 64)), "m.scale": (E8M0, (64, 4))},
        "deepseek_v4_fp4",
        (64, 128),
        (1, 32),
        "multiplier",
    ),
    "DeepSeek-V4.1": (
        {"quant_method": "fp8"},
        {"m.weight": (E4M3, (64, 128)), "m.scale": (E8M0, (2, 4))},
        "deepseek_v4_32x32",
        (64, 128),
        (32, 32),
        "multiplier",
    ),
    "MiniMax-M3": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        {"m.weight": (E4M3, (64, 128)), "m.weight_scale_inv": (U8, (64, 4))},
        "mxfp8",
        (64, 128),
        (1, 32),
        "multiplier",
    ),
    "compressed-tensors FP8_BLOCK": (
        CT,
        {"m.weight": (E4M3, (130, 128)), "m.weight_scale": (BF16, (2, 1))},
        "ct_fp8_block",
        (130, 128),
        (128, 128),
        "multiplier",
    ),
    "compressed-tensors MXFP6": (
        CT,
        {"m.weight_packed": (U8, (64, 96)), "m.weight_scale": (U8, (64, 4))},
        "ct_mxfp6",
        (64, 128),
        (1, 32),
        "multiplier",
    ),
    "compressed-tensors NVFP4": (
        CT,
        {
            "m.weight_packed": (U8, (64, 64)),
            "m.weight_scale": (E4M3, (64, 8)),
            "m.weight_global_scale": (F32, (1,)),
            "m.input_global_scale": (F32, (1,)),
        },
        "ct_nvfp4",
        (64, 128),
        (1, 16),
        "divisor",
    ),
    "ModelOpt NVFP4": (
        MODELOPT,
        {
            "m.weight": (U8, (64, 64)),
            "m.weight_scale": (E4M3, (64, 8)),
            "m.weight_scale_2": (F32, ()),
            "m.input_scale": (F32, ()),
        },
        "modelopt_nvfp4",
        (64, 128),
        (1, 16),
        "multiplier",
    ),
    "ModelOpt MXFP8": (
        MODELOPT,
        {"m.weight": (E4M3, (64, 128)), "m.weight_scale": (U8, (64, 4))},
        "modelopt_mxfp8",
        (64, 128),
        (1, 32),
        "multiplier",
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4"},
        {"e.gate_up_proj_blocks": (U8, (2, 64, 4, 16)), "e.gate_up_proj_scales": (U8, (2, 64, 4))},
        "gptoss_mxfp4",
        (2, 64, 128),
        (1, 32),
        "multiplier",
    ),
    "gpt-oss by OpenAI": (
        {"quant_method": "mxfp4"},
        {"mlp1_weight.blocks": (U8, (2, 64, 4, 16)), "mlp1_weight.scales": (U8, (2, 64, 4))},
        "gptoss_mxfp4",
        (2, 64, 128),
        (1, 32),
        "multiplier",
    ),
    "torchao MXFP8": (
        TORCHAO,
        {"m._weight_qdata": (E4M3, (64, 128)), "m._weight_scale": (E8M0, (64, 4))},
        "torchao_mxfp8",
        (64, 128),
        (1, 32),
        "multiplier",
    ),
}


def written(folder, tensors, config):
    """The tensors, whose bytes are those of ones in their dtypes, or 0x22."""
    made = {}
    for name, (dtype, shape) in tensors.items():
        scale = "scale" in name
        if dtype in (U8, I8):
            made[name] = torch.full(shape, 118 if scale else 0x22, dtype=dtype)
        else:
            made[name] = torch.full(shape, 2.0**-7 if scale else 1.0).to(dtype)
        if name.endswith("weight_global_scale"):
            made[name] = torch.full(shape, 2.0**7)
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", STORED)
def test_a_family_is_recognised_as_its_writers_store_it(tmp_path, name):
    config, tensors, family, shape, block, direction = STORED[name]
    model = "gpt_oss" if family == "gptoss_mxfp4" else "other"
    written(tmp_path, tensors, {"model_type": model, "quantization_config": config})
    found = inspect(tmp_path)
    (group,) = found.groups
    assert (group.family.name, group.shape, group.family.block, group.family.direction) == (
        family,
        shape,
        block,
        direction,
    )
    assert [problem for problem in found.problems if problem.kind != "scale without codes"] == []


def test_the_configuration_decides_between_equal_names(tmp_path):
    tensors = {"m.weight": (E4M3, (64, 128)), "m.weight_scale": (U8, (64, 4))}
    for method, family in (("compressed-tensors", "ct_mxfp8"), ("modelopt", "modelopt_mxfp8")):
        written(tmp_path, tensors, {"quantization_config": {"quant_method": method}})
        assert [group.family.name for group in inspect(tmp_path).groups] == [family]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8"}}')
    assert [group.family.name for group in inspect(tmp_path).groups] == ["modelopt_mxfp8"]


def test_one_scale_for_a_tensor_or_a_row_is_no_defect(tmp_path):
    tensors = {
        "a.weight": (E4M3, (64, 128)),
        "a.weight_scale": (F32, ()),
        "b.weight": (E4M3, (64, 128)),
        "b.weight_scale": (BF16, (64, 1)),
    }
    written(tmp_path, tensors, {})
    assert inspect(tmp_path).problems == []


def test_parameters_that_are_named_as_scales_are_no_defect(tmp_path):
    written(tmp_path, {"norm.scale": (BF16, (64,)), "router.per_expert_scales": (BF16, (8,))}, {})
    assert inspect(tmp_path).problems == []


@pytest.mark.parametrize(
    ("config", "loader"),
    [
        ({"quantization_config": {**FP8, "expert_dtype": "fp4"}}, "transformers 5.17"),
        ({"quantization_config": FP8, "expert_dtype": "fp4"}, "transformers 5.23"),
    ],
)
def test_each_release_reads_expert_dtype_at_another_place(tmp_path, config, loader):
    written(tmp_path, STORED["DeepSeek-V4 experts"][1], config)
    traps = [trap for trap in inspect(tmp_path).traps if "expert_dtype" in trap.message]
    assert [trap.loaders for trap in traps] == [(loader,)]


@pytest.mark.parametrize(("name", "model"), [("DeepSeek-V3", "gpt_oss"), ("gpt-oss", "llama")])
def test_a_family_that_no_loader_reads_for_the_model_is_a_problem(tmp_path, name, model):
    config, tensors, *_ = STORED[name]
    written(tmp_path, tensors, {"model_type": model, "quantization_config": config})
    assert "no loader" in {problem.kind for problem in inspect(tmp_path).problems}
