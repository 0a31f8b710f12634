"""mx_grouped_gemm_wgrad: the gradient of each expert's weights, from MX operands with blocks along the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import each_group, group_of_tokens, round_up
from mxspec.reference.common.matmul import (
    MIN_SQNR_DB,
    check_dtypes,
    check_layout,
    check_scale,
    check_unit_stride,
    from_blocked_k_groups,
    values,
)
from mxspec.reference.common.numerics import round_once
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import spec


def check_args(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_grouped_gemm_wgrad"
    check_dtypes(op, ("dy", dy, dy_scale, 2), ("x", x, x_scale, 2))
    checks.offsets(op, "offs", offs, ("dy", dy))
    (M, _), K, E = dy.shape, x.shape[1], offs.shape[0]
    checks.shape(op, "x", x, (M, K), f"for dy {tuple(dy.shape)}")
    checks.multiple(op, "M", M, MX_BLOCK_SIZE, quantized=True)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    C = M // MX_BLOCK_SIZE
    for name, operand, scale in (("dy", dy, dy_scale), ("x", x, x_scale)):
        check_unit_stride(op, name, operand, 0, "column-major")
        rows = operand.shape[1]
        blocked = round_up(rows, 128), C + 4 * E
        check_scale(op, f"{name}_scale", scale, (rows, C), blocked, scale_layout, operand)
    checks.fits_int32(op, f"the padded rows of {E} groups", M + 128 * E)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", M, MX_BLOCK_SIZE)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    # counts all M rows, because the host does not read offs
    flops=lambda args, outputs: 2 * args[0].numel() * args[2].shape[1],
)
def mx_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    """Sum `dy^T x` over the tokens of each group: the gradient of each expert's weights, from MXFP8 operands.

    `out[e, n, k] = out_dtype(sum of dy[m, n] * 2^(dy_scale[n, m // 32] - 127) * x[m, k] * 2^(x_scale[k, m // 32] - 127)
    over offs[e-1] <= m < offs[e])`; the formula takes the scales as bytes.

    Args:
        dy: `(M, N)` float8_e4m3fn or float8_e5m2, the tokens of each group together, column-major: `stride(0) = 1`, as
            `mx_quantize_groups(..., axis=-2)` gives it. M is a multiple of 32; N and K are free.
        dy_scale: float8_e8m0fnu, one scale per block of 32 tokens. Plain: `(N, M/32)`, any strides. Blocked:
            `(Np, M/32 + 4*E)` with `Np = 128*ceil(N/128)`, contiguous, as `to_blocked_k_groups` gives it under
            `offs / 32`, and as `mx_quantize_groups` gives it for `offs = end`.
        x: `(M, K)` float8_e4m3fn or float8_e5m2, column-major. Its dtype may differ from dy's.
        x_scale: as dy_scale, with K in place of N.
        offs: `(E,)` int32 on dy's device: the exclusive end of each group, a multiple of 32. The ends never decrease,
            and the last is at most M.
        out_dtype: torch.float32 or torch.bfloat16.
        scale_layout: `blocked` or `plain`, for both scales.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order or an
            end is not a multiple of 32. False waits for nothing; such an offs then gives values without meaning, but no
            access outside the operands and the result.

    Returns:
        `(E, N, K)` of out_dtype, contiguous. A group without tokens gives zeros. Tokens from the last end on never
        count, whatever codes and scales hold there. Rounding and the judgement of kernels are as for `mx_gemm`. In the
        kernels in Triton and Helion, no bit of an expert's gradient depends on the tokens of other experts.

    Special values: as for `mx_gemm`, within a group: a NaN reaches only the gradient of its own expert.

    Raises:
        TypeError: an operand, a scale, offs or out_dtype has a dtype that is not listed above.
        ValueError: an operand has a rank that is not listed above or is not column-major; the sizes of dy and x do not
            fit; M is not a multiple of 32; scale_layout is not in the list above; a scale has a shape that does not
            fit; a blocked scale is not contiguous; the tensors are on two devices; there would be 2^31 padded rows or
            more; or, with check_offs, offs is not as above.

    Example:
        >>> dy = torch.full((1, 64), 2.0).to(torch.float8_e4m3fn).mT
        >>> x = torch.tensor([[1.0] * 64, [-3.0] * 64]).to(torch.float8_e4m3fn).mT
        >>> dy_scale = torch.tensor([[127, 128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> x_scale = torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> offs = torch.tensor([32, 32, 64], dtype=torch.int32)
        >>> mx_grouped_gemm_wgrad(dy, dy_scale, x, x_scale, offs, scale_layout="plain").tolist()
        [[[64.0, -192.0]], [[0.0, 0.0]], [[128.0, -384.0]]]

    Source: OCP MX v1.0, section 6.2; PyTorch, `torch.nn.functional.scaled_grouped_mm` with 2-D operands.
    """
    check_args(
        dy, dy_scale, x, x_scale, offs, out_dtype=out_dtype, scale_layout=scale_layout, check_offs=check_offs
    )  # fmt: skip
    (M, N), K, E = dy.shape, x.shape[1], offs.shape[0]
    if scale_layout == "blocked":
        blocks = offs // MX_BLOCK_SIZE, M // MX_BLOCK_SIZE
        dy_scale, x_scale = (
            from_blocked_k_groups(s, blocks[0], rows, blocks[1]) for s, rows in ((dy_scale, N), (x_scale, K))
        )
    left, right = values(dy.mT, dy_scale), values(x.mT, x_scale)  # (N, M), (K, M)
    group = group_of_tokens(offs, M)
    out = torch.empty(E, N, K, dtype=out_dtype, device=dy.device)
    for e in each_group(offs):  # masks the operands and not the products, because 0 * NaN is NaN
        own_dy, own_x = (torch.where(group == e, t, 0.0) for t in (left, right))
        out[e] = round_once(own_dy @ own_x.t(), out_dtype)
    return out
