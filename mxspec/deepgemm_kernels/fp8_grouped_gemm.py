"""fp8_grouped_gemm in DeepGEMM. The groups must be whole blocks of 128 rows, and the caller says so with `alignment`.

The device computes the expert of each block of rows (`grouped_layout`), so no call waits for the device. This backend
never copies an operand. If DeepGEMM cannot read the layout of an operand, `supports` refuses the call and names the
layout that it needs. The results of `fp8_quantize_1x128(..., scale_major="mn")` and `fp8_quantize_128x128` fit
if M is a multiple of 4. The last block of K may be shorter, as in `fp8_gemm` (not run).
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

__all__ = ["INTERPRETABLE", "PTX", "fp8_grouped_gemm", "grouped_layout", "supports"]


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> str | None:
    if reason := absent(a.device, "m_grouped_fp8_gemm_nt_contiguous"):
        return reason
    (M, K), (E, N, _) = a.shape, b.shape
    if not M * N * K * E:
        return "takes no empty matrices"
    if alignment % FP8_BLOCK_SIZE:
        return f"takes groups of whole 128-row blocks: needs alignment in multiples of 128, not alignment = {alignment}"
    if M == 1:  # sgl-deep-gemm 0.1.2 views the bytes of the scales, and raises
        return "does not read the scales of a single row"
    if out_dtype != torch.bfloat16:
        return f"gives torch.bfloat16, not {out_dtype}"
    if N % 8:  # TMA writes rows that begin at multiples of 16 bytes
        return f"needs N in multiples of 8, not N = {N}"
    return layout_reason(
        ("a", a, (K, 1)),
        ("b", b, row_major(b.shape)),
        ("a_scale", a_scale, mn_major(M)),
        ("b_scale", b_scale, row_major(b_scale.shape)),
    )


def grouped_layout(offs: Tensor, M: int) -> Tensor:
    """The expert of each row, int32, and -1 from `offs[-1]` on. A block of 128 rows has the expert of its first row."""
    first_rows = torch.arange(0, M, FP8_BLOCK_SIZE, dtype=torch.int32, device=offs.device)
    expert = torch.searchsorted(offs, first_rows, right=True, out_int32=True)
    expert = torch.where(expert < offs.shape[0], expert, -1)
    # Allocate memory for the whole last block: DeepGEMM reads the expert of the block's row 64, even if that row does
    # not exist.
    return expert.repeat_interleave(FP8_BLOCK_SIZE, output_size=FP8_BLOCK_SIZE * len(expert))[:M]


def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    M, N = a.shape[0], b.shape[1]
    # Rows of expert -1 become zeros: DeepGEMM writes empty sums there.
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    library().m_grouped_fp8_gemm_nt_contiguous(
        (a, given(a_scale, mn_major(M))),
        (b, given(b_scale, row_major(b_scale.shape))),
        out,
        grouped_layout(offs, M),
        recipe=(1, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE),
    )
    return out
