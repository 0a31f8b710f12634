"""fp8_gemm in DeepGEMM: 1x128 by 128x128 to bfloat16, and 1x128 by 1x128 to fp32.

This backend never copies an operand. If DeepGEMM cannot read the layout of an operand, `supports` refuses the call and
names the layout that it needs. The results of `fp8_quantize_1x128(..., scale_major="mn")` and `fp8_quantize_128x128`
fit if M is a multiple of 4. The kernel for fp32 can only add to its output, so this backend writes zeros first.

The last block of K may be shorter (not run): DeepGEMM's TMA descriptors have the real K, and its kernels count
`ceil_div(shape_k, 128)` blocks (sm90_fp8_gemm_1d1d.cuh, sm90_fp8_gemm_1d2d.cuh).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.deepgemm_kernels._library import (
    INTERPRETABLE,
    PTX,
    absent,
    given,
    layout_reason,
    library,
    mn_major,
    row_major,
)
from mxspec.formats import FP8_BLOCK_SIZE

__all__ = ["INTERPRETABLE", "PTX", "add_1x128", "fp8_gemm", "supports"]


def supports(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    if reason := absent(a.device, "fp8_gemm_nt"):
        return reason
    (M, K), N = a.shape, b.shape[0]
    if not M * N * K:
        return "takes no empty matrices"
    if M == 1:  # sgl-deep-gemm 0.1.2 views the bytes of the scales, and raises
        return "does not read the scales of a single row"
    by_row = b_scale.shape[0] == N
    gives = torch.float32 if by_row else torch.bfloat16
    if out_dtype != gives:
        return f"does 1x128 by {'1x128' if by_row else '128x128'} to {gives}, not to {out_dtype}"
    if by_row and M <= 32:  # the tile of 16 or 32 rows does not compile
        return f"does 1x128 by 1x128 for more than 32 rows, not M = {M}"
    multiple = 16 // out_dtype.itemsize
    if N % multiple:  # TMA writes rows that begin at multiples of 16 bytes
        return f"needs N in multiples of {multiple} for {out_dtype}, not N = {N}"
    of_b = mn_major(N) if by_row else row_major(b_scale.shape)
    return layout_reason(
        ("a", a, (K, 1)), ("b", b, (K, 1)), ("a_scale", a_scale, mn_major(M)), ("b_scale", b_scale, of_b)
    )


def add_1x128(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """Add the product of 1x128 by 1x128 to an fp32 matrix."""
    a_scale, b_scale = (given(s, mn_major(s.shape[0])) for s in (a_scale, b_scale))
    library().fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, FP8_BLOCK_SIZE))


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    M, N = a.shape[0], b.shape[0]
    if b_scale.shape[0] == N:
        out = torch.zeros((M, N), dtype=out_dtype, device=a.device)
        add_1x128(out, a, a_scale, b, b_scale)
    else:
        out = torch.empty((M, N), dtype=out_dtype, device=a.device)
        a_scale, b_scale = given(a_scale, mn_major(M)), given(b_scale, row_major(b_scale.shape))
        library().fp8_gemm_nt((a, a_scale), (b, b_scale), out, recipe=(1, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE))
    return out
