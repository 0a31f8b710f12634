"""The families that `convert` writes: the tensors of a weight, and the configuration that loaders want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SQUARE = "fp8_128x128"


@dataclass(frozen=True)
class Target:
    """A family to write.

    Attributes:
        scheme: the scheme of its weights, a name in `schemes.SCHEMES`; None for plain bfloat16.
        codes, scale: the names of the two tensors, with `{}` for the module.
        method: `quant_method` of the configuration.
        packed: uint8 codes are stored in 16 bytes for each block, and weights are transposed: gpt-oss's experts.
        tensor_scale, input_scale: the names of NVFP4's tensor scales, of the weight and of the activations.
        divides: whether these tensor scales are divisors, of the shape `(1,)`. Otherwise they are `()` multipliers.
    """

    scheme: str | None
    codes: str = "{}.weight"
    scale: str = "{}.weight_scale_inv"
    method: str = ""
    packed: bool = False
    tensor_scale: str = ""
    input_scale: str = ""
    divides: bool = False


TARGETS = {
    "bf16": Target(None),
    "fp8_block": Target(SQUARE, method="fp8"),
    "mxfp8": Target("mxfp8", method="mxfp8"),
    "ct_fp8_block": Target(SQUARE, scale="{}.weight_scale", method="compressed-tensors"),
    "ct_mxfp8": Target("mxfp8", scale="{}.weight_scale", method="compressed-tensors"),
    "ct_mxfp4": Target("mxfp4", "{}.weight_packed", "{}.weight_scale", "compressed-tensors"),
    "ct_mxfp6": Target("mxfp6", "{}.weight_packed", "{}.weight_scale", "compressed-tensors"),
    "gptoss_mxfp4": Target("mxfp4", "{}_blocks", "{}_scales", "mxfp4", packed=True),
    "modelopt_mxfp8": Target("mxfp8", scale="{}.weight_scale", method="modelopt"),
    "modelopt_mxfp4": Target("mxfp4", scale="{}.weight_scale", method="modelopt"),
    "ct_nvfp4": Target(
        "nvfp4",
        "{}.weight_packed",
        "{}.weight_scale",
        "compressed-tensors",
        tensor_scale="{}.weight_global_scale",
        input_scale="{}.input_global_scale",
        divides=True,
    ),
    "modelopt_nvfp4": Target(
        "nvfp4",
        scale="{}.weight_scale",
        method="modelopt",
        tensor_scale="{}.weight_scale_2",
        input_scale="{}.input_scale",
    ),
}


def quantization_config(
    family: str, plain: Sequence[str], scales: str, input_scales: bool = False
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json, as the family's loaders read it.

    Args:
        family: a name in `TARGETS`.
        plain: the modules whose weights are not quantized.
        scales: `fp32`, `ue8m0` or `e4m3`.
        input_scales: whether NVFP4 weights have tensor scales of their activations, which then are NVFP4 too.

    Returns:
        A dictionary; None for bf16, and for modelopt_mxfp8 and modelopt_mxfp4, whose configuration is a file of its
        own. modelopt_nvfp4 has both, as ModelOpt writes it.

    Example:
        >>> quantization_config("gptoss_mxfp4", ["lm_head"], "ue8m0")
        {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}

    Source: configurations of DeepSeek-V3, MiniMax-M3 and gpt-oss; compressed-tensors 0.20.0, `QuantizationConfig`;
        nvidia-modelopt 0.47.0, torch/export/convert_hf_config.py.
    """
    target = TARGETS[family]
    if family == "modelopt_nvfp4":
        fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {**({"input_activations": fp4} if input_scales else {}), "weights": fp4, "targets": ["Linear"]}
        algo = "NVFP4" if input_scales else "W4A16_NVFP4"
        said = {"config_groups": {"group_0": group}, "ignore": list(plain), "quant_algo": algo}
        return {**said, "quant_method": "modelopt"}
    if target.method in ("", "modelopt"):
        return None
    if target.method == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(plain)}
    if target.method == "compressed-tensors":
        return _compressed_tensors(family, plain, input_scales)
    config: dict[str, Any] = {"quant_method": target.method, "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["weight_block_size"] = [128, 128] if target.scheme == SQUARE else [1, 32]
    if target.scheme != SQUARE or scales == "ue8m0":
        config["scale_fmt"] = "ue8m0"
    return {**config, "modules_to_not_convert": list(plain)}


def _compressed_tensors(family: str, plain: Sequence[str], input_scales: bool) -> dict[str, Any]:
    """`QuantizationConfig.model_dump` for the presets FP8_BLOCK, MXFP8, MXFP6A16, MXFP4A16, NVFP4A16, NVFP4."""
    bits = {"ct_mxfp4": 4, "ct_nvfp4": 4, "ct_mxfp6": 6}.get(family, 8)
    group: dict[str, Any] = {"num_bits": bits, "type": "float", "symmetric": True}
    if family == "ct_fp8_block":
        weights = {**group, "group_size": None, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
        inputs: dict[str, Any] | None = {**group, "group_size": 128, "strategy": "group", "dynamic": True}
        form = "float-quantized"
    elif family == "ct_nvfp4":
        nv = {**group, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        weights = {**nv, "dynamic": False}
        inputs = {**nv, "dynamic": "local", "observer": "static_minmax"} if input_scales else None
        form = "nvfp4-pack-quantized"
    else:
        mx = {**group, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
        weights, inputs = {**mx, "dynamic": False}, {**mx, "dynamic": True}
        form = "mxfp8-quantized"
        if bits < 8:
            inputs, form = None, f"mxfp{bits}-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(plain),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": form,
            }
        },
    }


def hf_quant_config(
    family: str, plain: Sequence[str], version: str, input_scales: bool = False
) -> dict[str, Any] | None:
    """The file `hf_quant_config.json` of ModelOpt's families; None for other families.

    Source: nvidia-modelopt 0.47.0, torch/export/quant_utils.py (`process_layer_quant_config`), model_config.py.
    """
    if TARGETS[family].method != "modelopt":
        return None
    algo: dict[str, Any] = {"quant_algo": "MXFP8", "group_size": 32}
    if family == "modelopt_mxfp4":
        algo = {"quant_algo": "mxfp4"}
    if family == "modelopt_nvfp4":
        algo = {"quant_algo": "NVFP4" if input_scales else "W4A16_NVFP4", "group_size": 16}
    quantization = {**algo, "kv_cache_quant_algo": None, "exclude_modules": sorted(plain)}
    return {"producer": {"name": "mxspec", "version": version}, "quantization": quantization}


def scale_dtype(family: str, exact_in_bf16: bool) -> torch.dtype:
    """The dtype of the scales in the file. compressed-tensors stores scales of FP8 blocks in bfloat16 if it can."""
    if TARGETS[family].scheme != SQUARE:
        return torch.float8_e4m3fn if TARGETS[family].scheme == "nvfp4" else torch.uint8
    return torch.bfloat16 if family == "ct_fp8_block" and exact_in_bf16 else torch.float32
