"""fp8_quantize_k_groups: pad token groups and quantize them along the tokens, each group as its own matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import first_tokens, flat_places
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> None:
    op = "fp8_quantize_k_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.eps(op, eps)
    checks.fp8_groups(op, ("x", x), offs, scale_format, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
)
def fp8_quantize_k_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to e4m3fn along the tokens: the operands of the gradient of each expert's weights.

    The op applies `pad_token_groups(x, offs, 128)`, then `fp8_quantize_1x128` along the tokens, then transposes the
    codes of each group on its own. With `w = end[g] - start[g]`, code d of the group's token t lies at
    `D * start[g] + d * w + t` of the flat codes: each group is a row-major `(D, w)`, and the groups follow one another.
    The scale of that code is `scale[d, (start[g] + t) // 128]`.

    Args:
        x: `(M, D)`, the tokens of each group together; bfloat16, float16 or float32; any strides.
        offs: `(G,)` int32 on x's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M. Rows from the last end on belong to no group and are dropped.
        scale_format, eps: as for `fp8_quantize_1x128`.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives bytes without meaning, but no access outside x and the
            results.

    Returns:
        `(qdata, scale, start, end)`. Below, `R` is the smallest multiple of 128 that is at least `M + G*128`.

        - qdata: `(D, R)` float8_e4m3fn, contiguous. Its shape only gives the number of codes. With `end[G-1]` for the
          last end, the first `D * end[G-1]` codes hold the groups, and the rest are 0. Codes of padding are 0, but
          padding in the same block as a NaN or an Inf is NaN.
        - scale: `(D, R/128)` float32, MN-major (strides `(1, D)`), as DeepGEMM needs it; 0 from column `end[G-1] / 128`
          on.
        - start, end: `(G,)` int32. Group g and its padding take the rows from `start[g]` up to, but without, `end[g]`;
          an empty group takes none.

    Special values: as for `fp8_quantize_1x128`. Padding never changes a scale, because a zero is never larger than the
        tokens of its block. Padding is quantized like any zero: a NaN in its block makes it NaN.

    Raises:
        TypeError: x or offs has a dtype that is not listed above, or eps is not a number.
        ValueError: a rank, a device, scale_format or eps is not as above; there would be 2^31 padded rows or more; or,
            with check_offs, offs is not in order.

    Example:
        >>> x = torch.tensor([[448.0, 1.0], [224.0, 2.0], [-896.0, 0.0]])
        >>> qdata, scale, start, end = fp8_quantize_k_groups(x, torch.tensor([2, 3], dtype=torch.int32))
        >>> qdata.shape, scale.shape, start.tolist(), end.tolist()
        (torch.Size([2, 384]), torch.Size([2, 3]), [0, 128], [128, 256])
        >>> first, second = qdata.flatten()[: 2 * 256].float().view(2, 2, 128)
        >>> first[:, :3].tolist(), second[:, :3].tolist()
        ([[448.0, 224.0, 0.0], [224.0, 448.0, 0.0]], [[-448.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> scale[0].tolist(), scale.stride()
        ([1.0, 2.0, 0.0], (1, 2))

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `k_grouped_fp8_gemm_nt_contiguous`, for the codes.
    """
    check_args(x, offs, scale_format=scale_format, eps=eps, check_offs=check_offs)
    padded, start, end = pad_token_groups(x, offs, FP8_BLOCK_SIZE)  # (R, D)
    options: dict[str, Any] = {"scale_format": scale_format, "scale_major": "mn", "eps": eps}
    codes, scale = fp8_quantize_1x128(padded, axis=-2, **options)  # (R, D), (D, R/128)
    R, D = padded.shape

    qdata = torch.zeros(D, R, dtype=torch.uint8, device=x.device)
    qdata.view(-1)[flat_places(end, D, R)] = codes.mT.view(torch.uint8)

    unused = torch.arange(0, R, FP8_BLOCK_SIZE, device=x.device) >= first_tokens(end)[-1]
    scale.masked_fill_(unused, 0.0)
    return qdata.view(torch.float8_e4m3fn), scale, start, end
