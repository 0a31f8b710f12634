"""vLLM and SGLang at load: FP8 weights with fp32 scales are read and quantized again, with powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.reference.common.numerics import divided
from mxspec.reference.fp8_dequantize import fp8_dequantize
from mxspec.rules import _fp8

NAME = "vLLM's requantizing loader"
RECORDED: dict[str, dict[str, dict[str, str]]] = {}  # the loader quantizes codes; the recorded blocks are numbers
EPS = 1e-4  # `amax.clamp(1e-4)`


def requantize(qdata: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Read 128x128 blocks and quantize them again, with scales that are powers of two.

    An element is `q * scale`, rounded to dtype. The new scale of a block is `2^ceil(log2(max(amax, 1e-4) / 448))`, with
    log2 in fp32, and the elements are multiplied by its reciprocal.

    Args:
        qdata: `(N, K)` or `(E, N, K)` float8_e4m3fn; K a multiple of 16.
        scale: `(..., ceil(N/128), ceil(K/128))` float32.
        dtype: torch.float32 is vLLM's rule. SGLang reads to torch.bfloat16 first, which rounds once more.

    Returns:
        `(qdata, scale)` as the engine multiplies with them: the shapes and dtypes of the arguments.

    Special values: a NaN makes its block's scale and elements NaN.

    Raises:
        TypeError, ValueError: as `mxspec.fp8_dequantize`, for operands that it does not take.

    Example:
        >>> qdata = torch.full((1, 128), 448.0).to(torch.float8_e4m3fn)
        >>> codes, scale = requantize(qdata, torch.tensor([[1.5]]))
        >>> codes[0, 0].item(), scale.item()
        (320.0, 2.0)

    Source: vLLM, model_executor/layers/quantization/utils/fp8_utils.py (`requant_weight_ue8m0_inplace`) and
        utils/deep_gemm.py (`per_block_cast_to_fp8`); SGLang, srt/layers/quantization/fp8_utils.py
        (`requant_weight_ue8m0`).
    """
    return quantize(fp8_dequantize(qdata, scale, out_dtype=dtype))


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """The second half of `requantize`, from the values `(N, K)` or `(E, N, K)` that were read.

    Source: as for `requantize`.
    """
    codes, scale = _fp8.quantize_128x128(values, "pow2", EPS, False, _factor)
    return codes, scale


def _factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    amax = blocks.abs().float().amax(dims, keepdim=True).clamp(min=eps)
    stored = divided(amax, E4M3FN.max)
    if scale_format == "pow2":
        stored = stored.log2().ceil().exp2()
    return stored.reciprocal(), stored
