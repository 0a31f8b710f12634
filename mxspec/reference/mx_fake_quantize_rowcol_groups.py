"""mx_fake_quantize_rowcol_groups: the values of MX codes in both directions; a kernel writes no code and no scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import MX_BLOCK_SIZE, SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.common.groups import padded_rows
from mxspec.reference.mx_dequantize import mx_dequantize
from mxspec.reference.mx_quantize import mx_quantize
from mxspec.reference.mx_quantize_groups import ELEM_CHOICES
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.unpad_token_groups import unpad_token_groups
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor,
    offs: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    check_offs: bool = False,
) -> None:
    op = "mx_fake_quantize_rowcol_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.multiple(op, "K", x.shape[1], MX_BLOCK_SIZE)
    checks.offsets(op, "offs", offs, ("x", x))
    checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    checks.choice(op, "scaling", scaling, SCALINGS)
    # 128, so that a kernel may hold up to 128 tokens of a group
    checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", padded_rows(x.shape[0], offs.shape[0], 128))
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", x.shape[0])


@spec(
    check_args=check_args,
    flops=per_element(4),  # a maximum and a multiply, twice
)
def mx_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize token groups to MX in both directions, and return the bfloat16 values that the codes represent.

    `rows = mx_dequantize(*mx_quantize(x))`: 1x32 blocks along K. In `columns`, each group is quantized by itself in
    32x1 blocks along its tokens, and read back by `mx_dequantize`. The first block of a group begins at the group's
    first token. The last block may be shorter. A GPU without MX tensor cores trains in MXFP8 with these values: the
    forward and dgrad multiply `rows`, the gradient of a weight multiplies `columns`.

    Args:
        x: `(M, K)`, the tokens of each group together; K a multiple of 32; bfloat16, float16 or float32; any strides.
        offs: `(G,)` int32 on x's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M. Rows from `offs[-1]` on belong to no group.
        elem_dtype: torch.float8_e4m3fn, torch.float8_e5m2, "e4m3fn" or "e5m2".
        scaling: `rceil`, `floor`, `ceil` or `even`, as for `mx_quantize`.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives values without meaning, but no access outside x and the
            results.

    Returns:
        `(rows, columns)`, both `(M, K)` bfloat16, contiguous. Rows without a group are values in `rows` and 0 in
        `columns`.

    Special values: as for `mx_quantize` and `mx_dequantize`, in each direction on its own. A NaN or an Inf makes its
        block of 32 along the row NaN, and its block along the column. Each value of at least 2^-126 is exact in
        bfloat16. Smaller values are rounded to multiples of 2^-133, the smallest bfloat16 number. A value of 2^128 or
        more becomes Inf.

    Raises:
        TypeError: x, offs or elem_dtype has a dtype that is not listed above.
        ValueError: a rank, a device, K or scaling is not as above; there would be 2^31 rows or more if each group were
            padded to a multiple of 128; or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.zeros(3, 32)
        >>> x[0, :2], x[1, 0] = torch.tensor([448.0, 1.03]), 0.37
        >>> rows, columns = mx_fake_quantize_rowcol_groups(x, torch.tensor([1, 3], dtype=torch.int32))
        >>> rows[0, :2].tolist(), columns[0, :2].tolist()
        ([448.0, 1.0], [448.0, 1.0])
        >>> rows[1, 0].item(), columns[1, 0].item()
        (0.375, 0.375)

    Source: OCP MX v1.0, sections 5.1 and 6.3; PyTorch, `torch.fake_quantize_per_channel_affine`, for the name.
    """
    check_args(x, offs, elem_dtype=elem_dtype, scaling=scaling, check_offs=check_offs)
    options: dict[str, Any] = {"elem_dtype": elem_dtype, "scaling": scaling}
    rows = mx_dequantize(*mx_quantize(x, axis=-1, **options))
    padded, start, _ = pad_token_groups(x, offs, MX_BLOCK_SIZE)
    columns = mx_dequantize(*mx_quantize(padded, axis=-2, **options), axis=-2)
    return rows, unpad_token_groups(columns, offs, start, x.shape[0])
