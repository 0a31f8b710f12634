"""mx_grouped_gemm: multiply the tokens of each expert by the expert's own weights, in MX formats."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import each_group_with_tokens, group_of_tokens, round_up
from mxspec.reference.common.matmul import (
    MIN_SQNR_DB,
    check_layout,
    check_operands,
    check_scale,
    check_unit_stride,
    elements_of_row,
    from_blocked_m_groups,
    values,
)
from mxspec.reference.common.numerics import round_once
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import spec


def check_args(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_grouped_gemm"
    K, stored, of_a = check_operands(op, a, a_scale, b, b_scale, ranks=(2, 3))
    checks.offsets(op, "offs", offs, ("a", a))
    M, (E, N, _) = a.shape[0], b.shape
    checks.shape(op, "b", b, (E, N, stored), of_a)
    checks.shape(op, "offs", offs, (E,), f"for {E} experts of b")
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    check_layout(op, scale_layout)
    check_unit_stride(op, "a", a, 1, "K-major rows")
    check_unit_stride(op, "b", b, 2, "K-major rows")
    C = K // MX_BLOCK_SIZE
    if a_scale is not None:
        check_scale(op, "a_scale", a_scale, (M, C), (M + 128 * E, round_up(C, 4)), scale_layout, a)
    check_scale(op, "b_scale", b_scale, (E, N, C), (E, blocked_bytes(N, C)), scale_layout, b)
    checks.fits_int32(op, f"the padded rows of {E} groups", M + 128 * E)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", M)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    # counts all M rows, because the host does not read offs
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[1] * elements_of_row(args[0]),
)
def mx_grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, MXFP8 or MXFP4, with blocks of 32 along K.

    Tokens in bfloat16 meet MXFP4 weights only.

    `out[m] = mx_gemm(a[m], b[g])`, where g is the group of row m: `offs[g-1] <= m < offs[g]`. Rows that belong to no
    group are 0. dgrad, the gradient of the tokens, is the same op: it multiplies dy by w quantized along N, whose
    `qdata.mT` is a K-major `(E, K, N)`.

    Args:
        a: `(M, K)` float8_e4m3fn or float8_e5m2, the tokens of each group together, K-major: `stride(1) = 1`. K is a
            multiple of 32; M and N are free. If b is float4_e2m1fn_x2, a may also be bfloat16, or `(M, K/2)`
            float4_e2m1fn_x2.
        a_scale: float8_e8m0fnu. Plain: `(M, K/32)`, any strides. Blocked: `(M + 128*E, Cp)` with `Cp = 4*ceil(K/128)`,
            contiguous, as `to_blocked_m_groups` gives it under offs, and as `mx_quantize_groups` gives it for
            `offs = end`. None if a is bfloat16.
        b: `(E, N, K)` float8_e4m3fn or float8_e5m2, or `(E, N, K/2)` float4_e2m1fn_x2, each matrix K-major:
            `stride(2) = 1`. Its dtype may differ from a's. A float4_e2m1fn_x2 byte holds two elements along K, the
            first in the low nibble.
        b_scale: float8_e8m0fnu. Plain: `(E, N, K/32)`, any strides. Blocked: `to_blocked` of the plain scale,
            contiguous.
        offs: `(E,)` int32 on a's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M.
        out_dtype: torch.bfloat16 or torch.float32.
        scale_layout: `blocked` or `plain`, for both scales.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives values without meaning, but no access outside the
            operands and the result.

    Returns:
        `(M, N)` of out_dtype, contiguous. Rows from the last end on are 0, whatever a and a_scale hold there. Rounding,
        the judgement of kernels and batch invariance are as for `mx_gemm`: the place of a row in its group, and the
        place of the group, do not change its bits.

    Special values: as for `mx_gemm`, within a group: a NaN in an expert's weights reaches only the tokens of that
        expert.

    Raises:
        TypeError: an operand, a scale, offs or out_dtype has a dtype that is not listed above; a is bfloat16 and has a
            scale; or a or b holds codes and has none.
        ValueError: an operand has a rank that is not listed above or is not K-major; the sizes E or K do not fit; K is
            not a multiple of 32; scale_layout is not in the list above; a scale has a shape that does not fit; a
            blocked scale is not contiguous; the tensors are on two devices; there would be 2^31 padded rows or more;
            or, with check_offs, offs is not in order.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 32).to(torch.float8_e4m3fn)
        >>> b = torch.tensor([1.0, 0.5])[:, None, None].expand(2, 1, 32).to(torch.float8_e4m3fn)
        >>> one = torch.tensor(127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        >>> offs = torch.tensor([1, 2], dtype=torch.int32)
        >>> mx_grouped_gemm(a, one.expand(3, 1), b, one.expand(2, 1, 1), offs, scale_layout="plain").tolist()
        [[32.0], [32.0], [0.0]]
        >>> w = torch.full((2, 1, 16), 0x52, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 2 is 1.0, 5 is 3.0
        >>> tokens = torch.ones(3, 32, dtype=torch.bfloat16)
        >>> mx_grouped_gemm(tokens, None, w, one.expand(2, 1, 1), offs, scale_layout="plain").tolist()  # 16 * 4
        [[64.0], [64.0], [0.0]]

    Source: OCP MX v1.0, section 6.2; PyTorch, `torch.nn.functional.scaled_grouped_mm`.
    """
    check_args(
        a, a_scale, b, b_scale, offs, out_dtype=out_dtype, scale_layout=scale_layout, check_offs=check_offs
    )  # fmt: skip
    M, N, C = a.shape[0], b.shape[1], elements_of_row(a) // MX_BLOCK_SIZE
    if scale_layout == "blocked":
        a_scale = None if a_scale is None else from_blocked_m_groups(a_scale, offs, M, C)
        b_scale = from_blocked(b_scale, N, C)
    x, group = a.double() if a_scale is None else values(a, a_scale), group_of_tokens(offs, M)[:, None]
    product = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    # each expert multiplies all tokens: on a GPU, the host does not know which of them are its own
    for e in each_group_with_tokens(offs, group):
        product = torch.where(group == e, x @ values(b[e], b_scale[e]).t(), product)
    return round_once(product, out_dtype)
