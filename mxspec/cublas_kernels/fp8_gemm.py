"""fp8_gemm in cuBLAS, through `torch.nn.functional.scaled_mm`.

This backend never copies an operand. If cuBLAS cannot read the layout of an operand, `supports` refuses the call and
names the layout that it needs.

The results of `fp8_quantize_1x128(..., scale_major="mn")` and `fp8_quantize_128x128` fit if M is a multiple of 4, N a
multiple of 16, and K a multiple of 128. For 128x128 blocks, K must be a multiple of 512, because cuBLAS reads a row of
their scales in steps of four.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE

PTX = "no: cuBLAS comes compiled"
INTERPRETABLE = "no: cuBLAS has no kernels for a CPU"


@functools.cache
def _absent(device: torch.device) -> str | None:
    """Why this torch, on this device, has no such matmul, or None."""
    if torch.version.cuda is None:
        return f"needs a torch built with CUDA, not {torch.__version__}"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"needs torch.nn.functional.scaled_mm, which torch {torch.__version__} lacks"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"has blocks of 128 on compute capability 9.0 only, not {'.'.join(map(str, capability))}"
    return None


def _layout_reason(name: str, t: Tensor, strides: tuple[int, int]) -> str | None:
    """Why cuBLAS cannot read a matrix in its layout, or None. A stride along a dimension of 1 has no meaning."""
    if any(n > 1 and got != needed for n, got, needed in zip(t.shape, t.stride(), strides, strict=True)):
        return f"needs {name} with strides {strides}, not {t.stride()}"
    return f"needs {name} to begin at a multiple of 16 bytes" if t.data_ptr() % 16 else None


def supports(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    if reason := _absent(a.device):
        return reason
    (M, K), N = a.shape, b.shape[0]
    if not M * N * K:
        return "takes no empty matrices"
    for name, size, multiple in (("M", M, 4), ("N", N, 16)):
        if size % multiple:
            return f"needs {name} in multiples of {multiple}, not {name} = {size}"
    if b_scale.shape[0] == N:
        # PyTorch's check takes ceil(K/128) scales. cuBLAS itself is closed source, and no test has run it on them.
        if K % FP8_BLOCK_SIZE:
            return f"is not tested on a shorter last block: needs K in multiples of 128, not K = {K}"
        of_b = (1, N)
    elif K % (4 * FP8_BLOCK_SIZE):
        return f"reads 128x128 scales in steps of four K-blocks: needs K in multiples of 512, not K = {K}"
    else:
        of_b = (K // FP8_BLOCK_SIZE, 1)
    layouts = ("a", a, (K, 1)), ("b", b, (K, 1)), ("a_scale", a_scale, (1, M)), ("b_scale", b_scale, of_b)
    return next(filter(None, (_layout_reason(*layout) for layout in layouts)), None)


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    (M, K), N = a.shape, b.shape[0]
    rows = ScalingType.BlockWise1x128
    # torch checks every stride, even along dimensions of 1.
    a_scale = a_scale.as_strided(a_scale.shape, (1, M))
    if b_scale.shape[0] == N:
        recipe, of_b = rows, b_scale.as_strided(b_scale.shape, (1, N))
    else:
        recipe, of_b = ScalingType.BlockWise128x128, b_scale.as_strided(b_scale.shape, (K // FP8_BLOCK_SIZE, 1)).t()
    return scaled_mm(a, b.t(), a_scale, rows, of_b, recipe, output_dtype=out_dtype)
