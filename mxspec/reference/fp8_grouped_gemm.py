"""fp8_grouped_gemm: multiply the tokens of each expert by its weights, FP8 with scales in blocks of 128."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import blocks_of, square_values, values
from mxspec.reference.common.groups import each_group_with_tokens, group_of_tokens
from mxspec.reference.common.numerics import round_once
from mxspec.reference.fp8_gemm import MIN_SQNR_DB
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import spec


def check_operands(op: str, *operands: tuple[str, Tensor, Tensor, int]) -> None:
    """Check dtypes, ranks and devices. Each operand is given as its name, codes, scale, and the rank of both."""
    first = operands[0][:2]
    for name, of_codes, scale, rank in operands:
        of_scale = f"{name}_scale"
        for each, tensor, dtype in ((name, of_codes, torch.float8_e4m3fn), (of_scale, scale, torch.float32)):
            checks.tensor_dtype(op, each, tensor, (dtype,))
            checks.rank(op, each, tensor, (rank,))
            checks.same_device(op, first, (each, tensor))


def check_args(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> None:
    op = "fp8_grouped_gemm"
    check_operands(op, ("a", a, a_scale, 2), ("b", b, b_scale, 3))
    checks.offsets(op, "offs", offs, ("a", a))
    (M, K), (E, N, _) = a.shape, b.shape
    checks.shape(op, "b", b, (E, N, K), f"for a {(M, K)}")
    checks.shape(op, "offs", offs, (E,), f"for {E} experts of b")
    checks.fp8_size(op, "K", K)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    checks.positive(op, "alignment", alignment)
    for name, operand in (("a", a), ("b", b)):
        if K > 1 and operand.stride(-1) != 1:
            last = operand.ndim - 1
            raise ValueError(f"{op}: {name} has strides {operand.stride()}; needs K-major rows: stride({last}) = 1")
    C = blocks_of(K)
    checks.shape(op, "a_scale", a_scale, (M, C), f"(1x128 blocks) for a {(M, K)}")
    checks.shape(op, "b_scale", b_scale, (E, blocks_of(N), C), f"(128x128 blocks) for b {(E, N, K)}")
    checks.fits_int32(op, f"the padded rows of {E} groups", M + FP8_BLOCK_SIZE * E)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", M, alignment)


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    # counts all M rows, because the host does not read offs
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[1] * args[0].shape[1],
)
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
    """Multiply the tokens of each group by the weights of its expert, FP8 with scales in blocks of 128.

    `out[m] = fp8_gemm(a[m], b[g])`, where g is the group of row m: `offs[g-1] <= m < offs[g]`. Rows that belong to no
    group are 0. dgrad, the gradient of the tokens, is the same op: it multiplies dy by the transpose `(E, K, N)` that
    `fp8_quantize_128x128(w, with_transpose=True)` gives.

    Args:
        a: `(M, K)` float8_e4m3fn, the tokens of each group together, K-major: `stride(1) = 1`. K is a multiple of 16;
            M and N are free. If K is no multiple of 128, the last block along K is shorter.
        a_scale: `(M, ceil(K/128))` float32, 1x128 blocks; any strides. The fastest strides are as for `fp8_gemm`.
        b: `(E, N, K)` float8_e4m3fn, each matrix K-major: `stride(2) = 1`.
        b_scale: `(E, ceil(N/128), ceil(K/128))` float32, 128x128 blocks; any strides.
        offs: `(E,)` int32 on a's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M.
        out_dtype: torch.bfloat16 or torch.float32.
        alignment: the caller's promise that every end in offs is a multiple of this number. A backend that needs whole
            blocks of rows, such as DeepGEMM, takes the call only with that promise. If the promise is broken, such a
            backend gives values without meaning. Triton's kernel is faster with a promise of 128, and gives the same
            bits with any promise.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order or an
            end is not a multiple of alignment. False waits for nothing; an offs out of order then gives values without
            meaning, but no access outside the operands and the result.

    Returns:
        `(M, N)` of out_dtype, contiguous. Rows from the last end on are 0, whatever a and a_scale hold there. Rounding,
        the judgement of kernels and batch invariance are as for `fp8_gemm`: the place of a row in its group, and the
        place of the group, do not change its bits.

    Special values: as for `fp8_gemm`, within a group: a NaN in an expert's weights reaches only the tokens of that
        expert.

    Raises:
        TypeError: an operand, a scale, offs or out_dtype has a dtype that is not listed above.
        ValueError: an operand has a rank that is not listed above or is not K-major; the sizes E or K do not fit; K is
            not a multiple of 16; a scale has a shape that does not fit; alignment is below 1; the tensors are on two
            devices; there would be 2^31 padded rows or more; or, with check_offs, offs is not as above.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 128).to(torch.float8_e4m3fn)
        >>> b = torch.tensor([1.0, 0.5])[:, None, None].expand(2, 1, 128).to(torch.float8_e4m3fn)
        >>> offs = torch.tensor([1, 2], dtype=torch.int32)
        >>> fp8_grouped_gemm(a, torch.ones(3, 1), b, torch.tensor([[[1.0]], [[3.0]]]), offs).tolist()
        [[128.0], [384.0], [0.0]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `m_grouped_fp8_gemm_nt_contiguous`.
    """
    check_args(a, a_scale, b, b_scale, offs, out_dtype=out_dtype, alignment=alignment, check_offs=check_offs)
    M, N = a.shape[0], b.shape[1]
    x, group = values(a, a_scale), group_of_tokens(offs, M)[:, None]
    product = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    # each expert multiplies all tokens: on a GPU, the host does not know which of them are its own
    for e in each_group_with_tokens(offs, group):
        product = torch.where(group == e, x @ square_values(b[e], b_scale[e]).t(), product)
    return round_once(product, out_dtype)
