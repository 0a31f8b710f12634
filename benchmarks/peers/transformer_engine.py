"""TransformerEngine's quantizers. They follow the library's source and were not run."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import element

from ._common import adapter, major, need, version_of

LIBRARY = "TransformerEngine"


def version() -> str:
    return version_of("transformer_engine.pytorch")


@adapter("mx_quantize", "TransformerEngine")
def mx_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    need(major(x.device) >= 10, "its MXFP8 needs compute capability 10.0")
    need((axis, scaling, scale_layout) == (-1, "rceil", "plain"), "fits axis -1, rceil, plain scales only")
    need(element(elem_dtype).dtype == torch.float8_e4m3fn and x.ndim == 2, "fits 2-D and e4m3fn only")
    need(x.shape[0] % 128 == 0 == x.shape[1] % 128, "pads its plain scales to 128 x 4")
    out = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)(x)
    return out._rowwise_data.view(torch.float8_e4m3fn), out._rowwise_scale_inv.view(torch.float8_e8m0fnu)


@adapter("fp8_quantize_1x128", "TransformerEngine")
def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    need((axis, scale_major) == (-1, "mn"), "gives 1x128 blocks along axis -1 with MN-major scales")
    need(x.shape[0] % 4 == 0, "pads its MN-major scales to 4 rows")
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=eps,
        force_pow_2_scales=scale_format == "pow2",
        block_scaling_dim=1,
    )
    out = quantizer(x)
    return out._rowwise_data.view(torch.float8_e4m3fn), out._rowwise_scale_inv.t()
