"""fp8_quantize_rowcol_groups: quantize tokens along the features and along the tokens; a kernel reads them once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.reference.common import checks
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.fp8_quantize_k_groups import fp8_quantize_k_groups
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> None:
    op = "fp8_quantize_rowcol_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.fp8_size(op, "D", x.shape[1])
    checks.eps(op, eps)
    checks.fp8_groups(op, ("x", x), offs, scale_format, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(4),  # a maximum and a multiply, twice
)
def fp8_quantize_rowcol_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to e4m3fn in both directions: along the features, and along the tokens of each group.

    `(q_row, s_row) = fp8_quantize_1x128(x, scale_major="mn")`, and
    `(q_col, s_col, start, end) = fp8_quantize_k_groups(x, offs)`, with the options of this call. Training uses the
    tokens of an expert in two matmuls: the forward multiplies along the features, and the gradient of the expert's
    weight along the tokens.

    Args:
        x: `(M, D)`, the tokens of each group together; D a multiple of 16; bfloat16, float16 or float32; any strides.
            If D is no multiple of 128, the last block of a row is shorter.
        offs: `(G,)` int32 on x's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M. Rows from `offs[-1]` on belong to no group.
        scale_format, eps: as for `fp8_quantize_1x128`, in both directions.
        check_offs: as for `fp8_quantize_k_groups`.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)`. Below, `R` is the smallest multiple of 128 that is at least
        `M + G*128`.

        - q_row: `(M, D)` float8_e4m3fn, row-major: the codes of all rows, also of rows without a group.
        - s_row: `(M, ceil(D/128))` float32, MN-major (strides `(1, M)`).
        - q_col: `(D, R)` float8_e4m3fn, contiguous: as `qdata` of `fp8_quantize_k_groups`, each group a matrix of its
          own and the codes after the last group 0.
        - s_col: `(D, R/128)` float32, MN-major (strides `(1, D)`); 0 from column `end[-1] / 128` on.
        - start, end: `(G,)` int32. Group g and its padding take the tokens `start[g] .. end[g]` of q_col.

    Special values: as for `fp8_quantize_1x128` in each direction on its own. A NaN or an Inf makes the block of 128 in
        its row NaN, and the block of 128 in its column.

    Raises:
        TypeError: x or offs has a dtype that is not listed above, or eps is not a number.
        ValueError: a rank, a device, D, scale_format or eps is not as above; there would be 2^31 padded rows or more;
            or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.zeros(3, 128)
        >>> x[:, 0] = torch.tensor([448.0, 224.0, -896.0])
        >>> q_row, s_row, q_col, s_col, start, end = fp8_quantize_rowcol_groups(x, torch.tensor([2, 3]).int())
        >>> q_row[:, 0].float().tolist(), s_row[:, 0].tolist()
        ([448.0, 448.0, -448.0], [1.0, 0.5, 2.0])
        >>> q_col.flatten()[:2].float().tolist(), s_col[0].tolist(), start.tolist(), end.tolist()
        ([448.0, 224.0], [1.0, 2.0, 0.0], [0, 128], [128, 256])

    Source: DeepSeek-V3 technical report, section 3.3.2; the two ops that it consists of.
    """
    check_args(x, offs, scale_format=scale_format, eps=eps, check_offs=check_offs)
    options: dict[str, Any] = {"scale_format": scale_format, "eps": eps}
    return *fp8_quantize_1x128(x, scale_major="mn", **options), *fp8_quantize_k_groups(x, offs, **options)
