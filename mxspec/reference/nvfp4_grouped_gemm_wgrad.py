"""nvfp4_grouped_gemm_wgrad: the gradient of each expert's weights, from NVFP4 operands with blocks along the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import each_group, group_of_tokens, round_up
from mxspec.reference.common.matmul import MIN_SQNR_DB, check_layout, check_scale, from_blocked_k_groups
from mxspec.reference.common.numerics import round_once
from mxspec.reference.common.nvfp4_matmul import CODES, check_major, check_operands, per_byte, values
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import spec


def check_args(
    dy: Tensor,
    dy_scale: Tensor | None,
    dy_tensor_scale: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    x_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "nvfp4_grouped_gemm_wgrad"
    checks.dense(op, "dy", dy)
    checks.offsets(op, "offs", offs, ("dy", dy))
    E = offs.shape[0]
    first, second = ("dy", dy, dy_scale, dy_tensor_scale), ("x", x, x_scale, x_tensor_scale)
    check_operands(op, first, second, ranks=(2, 2), tensor_scales=(E,))
    M, K, unit = dy.shape[0] * per_byte(dy), x.shape[1], NVFP4_BLOCK_SIZE if CODES in (dy.dtype, x.dtype) else 1
    checks.shape(op, "x", x, (M // per_byte(x), K), f"for dy {tuple(dy.shape)} and M = {M}")
    checks.multiple(op, "M", M, unit, quantized=True)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    C = M // NVFP4_BLOCK_SIZE
    for name, t, scale, _ in (first, second):
        check_major(op, name, t, 0, "column-major")
        if scale is not None:
            rows = t.shape[1]
            blocked = round_up(rows, 128), C + 4 * E
            check_scale(op, f"{name}_scale", scale, (rows, C), blocked, scale_layout, t)
    checks.fits_int32(op, f"the padded rows of {E} groups", M + 128 * E)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", M, unit)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    # counts all M rows, because the host does not read offs
    flops=lambda args, outputs: 2 * args[0].numel() * per_byte(args[0]) * args[3].shape[1],
)
def nvfp4_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor | None,
    dy_tensor_scale: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    x_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    """Sum `dy^T x` over the tokens of each group: the gradient of each expert's weights, from NVFP4 operands.

    `out[e, n, k] = out_dtype(T[e] * sum of d[m, n] * v[m, k] over offs[e-1] <= m < offs[e])`, where
    `T[e] = fl(dy_tensor_scale[e] * x_tensor_scale[e])` is one fp32 product. If dy holds codes, then
    `d[m, n] = dy[m, n] * dy_scale[n, m // 16]`. If dy holds values, then `d[m, n] = dy[m, n]`, and dy_scale is None.
    The same holds for v and x.

    Args:
        dy: codes `(M/2, N)` float4_e2m1fn_x2, column-major: `stride(0) = 1`, as `nvfp4_quantize(..., axis=-2)` gives
            them. A byte holds two tokens, the first in the low nibble. Or values `(M, N)` bfloat16, with a stride of 1
            in either dimension. The tokens of each group lie together. M is a multiple of 16 if dy or x holds codes;
            otherwise M is free. N and K are free.
        dy_scale: float8_e4m3fn, one scale for each block of 16 tokens, or None for values. Plain: `(N, M/16)`, any
            strides. Blocked: `(Np, M/16 + 4*E)` with `Np = 128*ceil(N/128)`, contiguous, as `to_blocked_k_groups` gives
            it under `offs / 16`.
        dy_tensor_scale: `(E,)` float32 on dy's device, any strides: one number for the tokens of each group.
        x: codes `(M/2, K)` or values `(M, K)`, as dy. One operand may be codes and the other values.
        x_scale, x_tensor_scale: as those of dy, with K in place of N.
        offs: `(E,)` int32 on dy's device: the exclusive end of each group. It is a multiple of 16 if dy or x holds
            codes, and of any alignment otherwise. The ends never decrease, and the last is at most M.
        out_dtype: torch.float32 or torch.bfloat16.
        scale_layout: `blocked` or `plain`, for both scales.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not as above. False
            waits for nothing; such an offs then gives values without meaning, but no access outside the operands and
            the result.

    Returns:
        `(E, N, K)` of out_dtype, contiguous. A group without tokens gives `0 * T[e]`: zeros, if T[e] is finite. Tokens
        from the last end on never count, whatever the operands hold there. Rounding and the judgement of kernels are as
        for `nvfp4_gemm`. In the kernels in Triton and Helion, no bit of an expert's gradient depends on the tokens of
        other experts.

    Special values: as for `nvfp4_gemm`, within a group: a NaN reaches only the gradient of its own expert.

    Raises:
        TypeError: an operand, a scale, a tensor scale, offs or out_dtype has a dtype that is not listed above; codes
            have no scale; or values have one.
        ValueError: an operand has a rank or strides that are not as above; the sizes of dy and x do not fit; M is not a
            multiple of 16; scale_layout is not in the list above; a scale or a tensor scale has a shape that does not
            fit; a blocked scale is not contiguous; the tensors are on two devices; there would be 2^31 padded rows or
            more; or, with check_offs, offs is not as above.

    Example:
        >>> dy, x = torch.full((3, 1), 2.0).bfloat16(), torch.tensor([[1.0, -3.0]]).bfloat16().expand(3, 2).contiguous()
        >>> offs, of_groups = torch.tensor([1, 1, 3], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.5])
        >>> nvfp4_grouped_gemm_wgrad(dy, None, of_groups, x, None, of_groups, offs).tolist()
        [[[2.0, -6.0]], [[0.0, 0.0]], [[1.0, -3.0]]]

    Source: as `nvfp4_gemm`; PyTorch, `torch.nn.functional.grouped_mm` and `scaled_grouped_mm` with 2-D operands.
    """
    check_args(
        dy, dy_scale, dy_tensor_scale, x, x_scale, x_tensor_scale, offs,
        out_dtype=out_dtype, scale_layout=scale_layout, check_offs=check_offs,
    )  # fmt: skip
    M, N, K, E = dy.shape[0] * per_byte(dy), dy.shape[1], x.shape[1], offs.shape[0]
    if scale_layout == "blocked":
        ends, C = offs // NVFP4_BLOCK_SIZE, M // NVFP4_BLOCK_SIZE
        dy_scale, x_scale = (
            None if s is None else from_blocked_k_groups(s, ends, rows, C) for s, rows in ((dy_scale, N), (x_scale, K))
        )
    left, right = values(dy.mT, dy_scale), values(x.mT, x_scale)  # (N, M), (K, M)
    group, T = group_of_tokens(offs, M), (dy_tensor_scale * x_tensor_scale).double()  # one rounding to fp32
    out = torch.empty(E, N, K, dtype=out_dtype, device=dy.device)
    for e in each_group(offs):  # masks the operands and not the products, because 0 * NaN is NaN
        own_dy, own_x = (torch.where(group == e, t, 0.0) for t in (left, right))
        out[e] = round_once(own_dy @ own_x.t() * T[e], out_dtype)
    return out
