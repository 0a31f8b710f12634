"""nvfp4_grouped_gemm: multiply the tokens of each expert by the expert's own weights, in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import each_group_with_tokens, group_of_tokens, round_up
from mxspec.reference.common.matmul import MIN_SQNR_DB, check_layout, check_scale, from_blocked_m_groups
from mxspec.reference.common.numerics import round_once
from mxspec.reference.common.nvfp4_matmul import CODES, check_major, check_operands, per_byte, values
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import spec


def check_args(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "nvfp4_grouped_gemm"
    checks.dense(op, "a", a)
    checks.offsets(op, "offs", offs, ("a", a))
    E = offs.shape[0]
    checks.dense(op, "b", b)
    if b.ndim == 3:
        checks.shape(op, "offs", offs, (b.shape[0],), f"for {b.shape[0]} experts of b")
    first, second = ("a", a, a_scale, a_tensor_scale), ("b", b, b_scale, b_tensor_scale)
    check_operands(op, first, second, ranks=(2, 3), tensor_scales=(E,))
    (M, _), N, K = a.shape, b.shape[1], a.shape[1] * per_byte(a)
    checks.shape(op, "b", b, (E, N, K // per_byte(b)), f"for a {tuple(a.shape)}, {E} groups and K = {K}")
    if CODES in (a.dtype, b.dtype):
        checks.multiple(op, "K", K, NVFP4_BLOCK_SIZE, quantized=True)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    check_major(op, "a", a, 1, "K-major rows")
    check_major(op, "b", b, 2, "K-major rows")
    C = K // NVFP4_BLOCK_SIZE
    if a_scale is not None:
        check_scale(op, "a_scale", a_scale, (M, C), (M + 128 * E, round_up(C, 4)), scale_layout, a)
    if b_scale is not None:
        check_scale(op, "b_scale", b_scale, (E, N, C), (E, blocked_bytes(N, C)), scale_layout, b)
    checks.fits_int32(op, f"the padded rows of {E} groups", M + 128 * E)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", M)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    # counts all M rows, because the host does not read offs
    flops=lambda args, outputs: 2 * args[0].numel() * per_byte(args[0]) * args[3].shape[1],
)
def nvfp4_grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, in NVFP4 with blocks of 16 along K.

    `out[m] = nvfp4_gemm(a[m], b[g])`, where g is the group of row m: `offs[g-1] <= m < offs[g]`. Each group has its own
    tensor scales. Rows that belong to no group are 0. dgrad, the gradient of the tokens, is the same op: it multiplies
    dy by w quantized along N; for values in 16x16 blocks that is `w.mT`, `(E, K, N)`.

    Args:
        a: codes `(M, K/2)` float4_e2m1fn_x2, K-major: `stride(1) = 1`; or values `(M, K)` bfloat16, with a stride of 1
            in either dimension; the tokens of each group together. K is a multiple of 16 if a or b holds codes. M and N
            are free.
        a_scale: float8_e4m3fn, or None for values. Plain: `(M, K/16)`, any strides. Blocked: `(M + 128*E, Cp)` with
            `Cp = 4*ceil(K/64)`, contiguous, as `to_blocked_m_groups` gives it under offs.
        a_tensor_scale: `(E,)` float32 on a's device, any strides: one number for the tokens of each group.
        b: codes `(E, N, K/2)`, each matrix K-major: `stride(2) = 1`; or values `(E, N, K)`, with a stride of 1 along N
            or K.
        b_scale: float8_e4m3fn, or None for values. Plain: `(E, N, K/16)`, any strides. Blocked: `to_blocked` of the
            plain scale, contiguous.
        b_tensor_scale: as a_tensor_scale: one number for each expert.
        offs: `(E,)` int32 on a's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M. For codes of `nvfp4_quantize_groups` these are its `end`.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `blocked` or `plain`, for both scales.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives values without meaning, but no access outside the
            operands and the result.

    Returns:
        `(M, N)` of out_dtype, contiguous. Rows from the last end on are 0, whatever the operands hold there. Rounding,
        the judgement of kernels and batch invariance are as for `nvfp4_gemm`: the place of a row in its group, and the
        place of the group, do not change its bits.

    Special values: as for `nvfp4_gemm`, within a group: a NaN in an expert's weights or in its tensor scale reaches
        only the tokens of that expert.

    Raises:
        TypeError: an operand, a scale, a tensor scale, offs or out_dtype has a dtype that is not listed above; codes
            have no scale; or values have one.
        ValueError: an operand has a rank or strides that are not as above; the sizes E or K do not fit; K is not a
            multiple of 16; scale_layout is not in the list above; a scale or a tensor scale has a shape that does not
            fit; a blocked scale is not contiguous; the tensors are on two devices; there would be 2^31 padded rows or
            more; or, with check_offs, offs is not in order.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 4.0]).bfloat16()[:, None].expand(3, 16).contiguous()
        >>> b = torch.tensor([1.0, 0.5]).bfloat16()[:, None, None].expand(2, 1, 16).contiguous()
        >>> of_groups, offs = torch.tensor([1.0, 0.25]), torch.tensor([1, 2], dtype=torch.int32)
        >>> nvfp4_grouped_gemm(a, None, of_groups, b, None, torch.ones(2), offs).tolist()
        [[16.0], [4.0], [0.0]]

    Source: as `nvfp4_gemm`; PyTorch, `torch.nn.functional.grouped_mm` and `scaled_grouped_mm`.
    """
    check_args(
        a, a_scale, a_tensor_scale, b, b_scale, b_tensor_scale, offs,
        out_dtype=out_dtype, scale_layout=scale_layout, check_offs=check_offs,
    )  # fmt: skip
    (M, _), N, C = a.shape, b.shape[1], a.shape[1] * per_byte(a) // NVFP4_BLOCK_SIZE
    if scale_layout == "blocked":
        if a_scale is not None:
            a_scale = from_blocked_m_groups(a_scale, offs, M, C)
        if b_scale is not None:
            b_scale = from_blocked(b_scale, N, C)
    x, group = values(a, a_scale), group_of_tokens(offs, M)[:, None]
    T = (a_tensor_scale * b_tensor_scale).double()  # one rounding to fp32
    product = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    # each expert multiplies all tokens: on a GPU, the host does not know which of them are its own
    for e in each_group_with_tokens(offs, group):
        w = values(b[e], None if b_scale is None else b_scale[e])
        product = torch.where(group == e, x @ w.t() * T[e], product)
    return round_once(product, out_dtype)
