"""How each family of checkpoints names and stores a quantized weight, and the weights of a checkpoint by family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxspec.checkpoint.headers import Header
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE

SQUARE, ROW, SMALL = (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE), (1, MX_BLOCK_SIZE), (MX_BLOCK_SIZE, MX_BLOCK_SIZE)
NV_ROW = (1, 16)  # NVFP4's block
FLOATS, BYTES = ("F32", "BF16", "F16"), ("U8", "F8_E8M0")
BITS_OF = {"e4m3": 8, "e2m3": 6, "e2m1": 4}


@dataclass(frozen=True)
class Family:
    """How a family stores a weight.

    Attributes:
        name: the family.
        method: `quant_method` of the configuration.
        codes, scale: the suffix after the module's name, for the tensor of codes and for the tensor of scales.
        stored, scale_stored: the dtypes of safetensors that these tensors have.
        block: the rows and columns that share a scale.
        element: the format of a code.
        second: the suffix after the module's name, in the name of the scale of a whole tensor; empty if there is none.
        direction: `multiplier` or `divisor`: how the scale is used. If the family has `second`, how `second` is used.
    """

    name: str
    method: str
    codes: str
    stored: tuple[str, ...]
    scale: str
    scale_stored: tuple[str, ...]
    block: tuple[int, int] = ROW
    element: str = "e4m3"
    second: str = ""
    direction: str = "multiplier"


_FP8, _CT, _W, _INV = ("F8_E4M3",), "compressed-tensors", ".weight", ".weight_scale_inv"
_S, _U8, _P = ".weight_scale", ("U8",), ".weight_packed"

# Source: DeepSeek-V3 README_WEIGHTS.md; transformers 5.23.0 finegrained_fp8.py; compressed-tensors 0.20.0;
# nvidia-modelopt 0.47.0; torchao 0.18.0; openai/gpt-oss
FAMILIES = (
    Family("fp8_block", "fp8", _W, _FP8, _INV, (*FLOATS, *BYTES), SQUARE),
    Family("mxfp8", "mxfp8", _W, _FP8, _INV, BYTES),
    Family("mxfp8_32x32", "mxfp8", _W, _FP8, _INV, BYTES, SMALL),
    Family("deepseek_v4", "fp8", _W, _FP8, ".scale", (*FLOATS, *BYTES), SQUARE),
    Family("deepseek_v4_32x32", "fp8", _W, _FP8, ".scale", BYTES, SMALL),
    Family("deepseek_v4_fp4", "fp8", _W, ("I8", "U8"), ".scale", BYTES, element="e2m1"),
    Family("ct_fp8_block", _CT, _W, _FP8, _S, FLOATS, SQUARE),
    Family("ct_mxfp8", _CT, _W, _FP8, _S, _U8),
    Family("ct_mxfp4", _CT, _P, _U8, _S, _U8, element="e2m1"),
    Family("ct_mxfp6", _CT, _P, _U8, _S, _U8, element="e2m3"),
    Family("ct_nvfp4", _CT, _P, _U8, _S, _FP8, NV_ROW, "e2m1", ".weight_global_scale", "divisor"),
    Family("gptoss_mxfp4", "mxfp4", "_blocks", _U8, "_scales", _U8, element="e2m1"),
    Family("gptoss_mxfp4", "mxfp4", ".blocks", _U8, ".scales", _U8, element="e2m1"),
    Family("modelopt_mxfp8", "modelopt", _W, _FP8, _S, _U8),
    Family("modelopt_mxfp4", "modelopt", _W, _U8, _S, _U8, element="e2m1"),
    Family("modelopt_nvfp4", "modelopt", _W, _U8, _S, _FP8, NV_ROW, "e2m1", ".weight_scale_2"),
    Family("torchao_mxfp8", "torchao", "._weight_qdata", _FP8, "._weight_scale", BYTES),
    Family("torchao_mxfp4", "torchao", "._weight_qdata", (*_U8, "F4"), "._weight_scale", BYTES, element="e2m1"),
    Family(
        "torchao_nvfp4",
        "torchao",
        "._weight_qdata",
        (*_U8, "F4"),
        "._weight_scale",
        _FP8,
        NV_ROW,
        "e2m1",
        "._weight_per_tensor_scale",
    ),
)
SCALES = tuple(dict.fromkeys(family.scale for family in FAMILIES))
CODES = tuple(dict.fromkeys(family.codes for family in FAMILIES))


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight of a checkpoint.

    Attributes:
        module: the name without the family's suffix.
        family: how it is stored.
        codes, scale, second: the names of its tensors; `second` is None if the family has none, or if it is missing.
        shape: `(N, K)` in elements, with the experts of a fused weight before them.
        grid: the shape of the tensor of scales.
    """

    module: str
    family: Family
    codes: str
    scale: str
    second: str | None
    shape: tuple[int, ...]
    grid: tuple[int, ...]


def method(config: Mapping[str, Any] | None, hf_quant_config: Mapping[str, Any] | None) -> str | None:
    """`quant_method` of config.json; `modelopt` if the configuration is ModelOpt's file; None if there is neither."""
    said = quantization(config).get("quant_method")
    return said if isinstance(said, str) else "modelopt" if hf_quant_config is not None else None


def quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`quantization_config` of config.json, empty if there is none."""
    said = (config or {}).get("quantization_config")
    return said if isinstance(said, dict) else {}


def weights(tensors: Mapping[str, Header], quant_method: str | None) -> Iterator[QuantizedWeight]:
    """The quantized weights that a family explains: its names, dtypes and shapes.

    If several families store the same names and dtypes, the configuration decides. Without a configuration, the first
    of these families in `FAMILIES` is taken.

    Args:
        tensors: the headers, by name.
        quant_method: the result of `method`.
    """
    for name, header in tensors.items():
        fits = [weight for family in FAMILIES if (weight := _weight(tensors, name, header, family))]
        fits.sort(key=lambda weight: weight.family.method != quant_method)
        if fits:
            yield fits[0]


def elements(header: Header, family: Family) -> tuple[int, ...] | None:
    """The shape of a tensor of codes in elements; None if a row is not a whole number of elements."""
    if not header.shape:
        return None
    *lead, last = header.shape
    if family.codes in ("_blocks", ".blocks"):
        return (*lead[:-1], lead[-1] * last * 2) if lead and last * 2 == family.block[1] else None
    bits = last * (4 if header.stored == "F4" else 8)
    K, rest = divmod(last, 1) if header.stored == "F4" else divmod(bits, BITS_OF[family.element])
    return None if rest or not lead else (*lead, K)


def grid_of(shape: tuple[int, ...], family: Family) -> tuple[int, ...]:
    """The shape that the tensor of scales needs."""
    *lead, N, K = shape
    height, width = family.block
    return (*lead, -(-N // height), -(-K // width))


def _weight(tensors: Mapping[str, Header], name: str, header: Header, family: Family) -> QuantizedWeight | None:
    if not name.endswith(family.codes) or header.stored not in family.stored:
        return None
    module = name.removesuffix(family.codes)
    scale = tensors.get(module + family.scale)
    shape = elements(header, family)
    if (
        scale is None
        or scale.stored not in family.scale_stored
        or shape is None
        or scale.shape != grid_of(shape, family)
    ):
        return None
    second = module + family.second if family.second and module + family.second in tensors else None
    return QuantizedWeight(module, family, name, module + family.scale, second, shape, scale.shape)
