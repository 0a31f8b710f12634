"""mx_quantize_groups: token groups padded, quantized and their scales laid out for a grouped matmul, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE, SCALINGS
from mxspec.reference.common import checks
from mxspec.reference.common.groups import padded_rows
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.spec import per_element, spec

ELEM_CHOICES = (*FP8_DTYPES, "e4m3fn", "e5m2")


def check_args(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_quantize_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.offsets(op, "offs", offs, ("x", x))
    checks.choice(op, "axis", axis, (-1, -2))
    checks.positive(op, "pad_to", pad_to)
    if pad_to % 128:
        raise ValueError(f"{op}: pad_to = {pad_to}; needs a multiple of 128, the rows of a tile of scales")
    checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    checks.choice(op, "scaling", scaling, SCALINGS)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    if axis == -1:
        checks.multiple(op, "K", x.shape[1], MX_BLOCK_SIZE)
    rows = padded_rows(x.shape[0], offs.shape[0], pad_to) + 128 * offs.shape[0]
    checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", x.shape[0])


@spec(check_args=check_args, flops=per_element(2))
def mx_quantize_groups(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to MX as a grouped matmul wants them: padded, with each group's scales tiled by itself.

    Byte for byte `pad_token_groups(x, offs, pad_to)`, then `mx_quantize` along `axis`, then for blocked scales
    `to_blocked_m_groups` under `end` for axis -1, the operand of the forward pass and of dgrad, or
    `to_blocked_k_groups` under `end / 32` for axis -2, an operand of wgrad, whose matmul runs along the tokens.

    Args:
        x: `(M, K)`, the tokens of each group together; bfloat16, float16 or float32; any strides. K is a multiple of
            32 for axis -1.
        offs: `(G,)` int32 on x's device, the exclusive end of each group. Never decreasing, the last at most M; rows
            from there on belong to no group and are dropped.
        axis: -1 for 1x32 blocks along K, -2 for 32x1 blocks along the tokens, padding included.
        pad_to: rows, a multiple of 128.
        elem_dtype, scaling: as for `mx_quantize`.
        scale_layout: `blocked` or `plain`.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order. Without it
            nothing waits; an offs out of order gives bytes that mean nothing, and no access outside x and the results.

    Returns:
        `(qdata, scale, start, end)`. With `R` the multiple of pad_to at or above `M + G*pad_to`: qdata `(R, K)`,
        elem_dtype, contiguous for axis -1 and column-major, strides `(1, R)`, for axis -2. scale: float8_e8m0fnu;
        blocked, `(R + 128*G, Cp)` with `Cp = 4*ceil(K/128)` for axis -1, and `(Kp, R/32 + 4*G)` with
        `Kp = 128*ceil(K/128)` for axis -2, in both of which the bytes of group g begin at `start[g] * Cp`; plain,
        `(R, K/32)` and `(K, R/32)`. start, end: `(G,)` int32, the rows of qdata at which a group begins, and ends with
        its padding. Codes of padding are 0, except beside a NaN or an Inf in a block along the tokens; scale bytes of
        blocks without a token are 0.

    Special values: as for `mx_quantize`. Padding never changes a scale: it is never larger than what stands
        beside it. It is quantized as zeros are, so that a NaN in its block makes it NaN.

    Raises:
        TypeError: the dtype of x or offs, elem_dtype; pad_to is no integer.
        ValueError: a rank, a device, axis, pad_to, scaling, scale_layout, K for axis -1, 2^31 padded rows or more;
            with check_offs, offs.

    Example:
        >>> x = torch.full((3, 32), 2.0)
        >>> qdata, scale, start, end = mx_quantize_groups(x, torch.tensor([1, 3], dtype=torch.int32))
        >>> qdata.shape, scale.shape, start.tolist(), end.tolist()
        (torch.Size([384, 32]), torch.Size([640, 4]), [0, 128], [128, 256])
        >>> qdata[[0, 1, 128, 129, 130], 0].float().tolist()
        [256.0, 0.0, 256.0, 256.0, 0.0]

    Source: OCP MX v1.0, section 6.3; PyTorch, `torch.nn.functional.scaled_grouped_mm`, for what it reads.
    """
    check_args(
        x, offs, axis=axis, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout,
        check_offs=check_offs,
    )  # fmt: skip
    padded, start, end = pad_token_groups(x, offs, pad_to)
    qdata, scale = mx_quantize(padded, axis=axis, elem_dtype=elem_dtype, scaling=scaling)
    if scale_layout == "blocked":
        rearrange: Any = to_blocked_m_groups if axis == -1 else to_blocked_k_groups
        scale, _ = rearrange(scale, end if axis == -1 else end // MX_BLOCK_SIZE)
    return qdata, scale, start, end
