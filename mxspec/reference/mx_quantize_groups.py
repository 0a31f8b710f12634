"""mx_quantize_groups: pad token groups, quantize them and lay out their scales for a grouped matmul, in one pass."""

from __future__ import annotations

from collections.abc import Collection
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

ELEM_CHOICES = (*FP8_DTYPES, "e4m3fn", "e5m2")  # for ops that do not take e2m1
WITH_E2M1 = (*ELEM_CHOICES, torch.float4_e2m1fn_x2, "e2m1")


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
    checks.choice(op, "axis", axis, (-1, -2))
    if axis == -1:
        checks.multiple(op, "K", x.shape[1], MX_BLOCK_SIZE)
    check_groups(op, ("x", x), offs, pad_to, elem_dtype, scaling, scale_layout, check_offs, WITH_E2M1)


def check_groups(
    op: str, named: tuple[str, Tensor], offs: Tensor, pad_to: int, elem_dtype: torch.dtype | str, scaling: str,
    scale_layout: str, check_offs: bool, elements: Collection[Any] = ELEM_CHOICES,
) -> None:  # fmt: skip
    """Check offs and the options of an op that quantizes the tokens of a named tensor to one of some formats."""
    _, x = named
    checks.offsets(op, "offs", offs, named)
    checks.positive(op, "pad_to", pad_to)
    if pad_to % 128:
        raise ValueError(f"{op}: pad_to = {pad_to}; needs a multiple of 128, the rows of a tile of scales")
    checks.choice(op, "elem_dtype", elem_dtype, elements, TypeError)
    checks.choice(op, "scaling", scaling, SCALINGS)
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
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
    """Quantize token groups to MX for a grouped matmul: pad each group, and give each group its own scale tiles.

    The bytes equal three steps: `pad_token_groups(x, offs, pad_to)`, then `mx_quantize` along `axis`, then, for blocked
    scales, the tiling of each group. For axis -1 the tiling is `to_blocked_m_groups` under `end`: an operand of the
    forward pass and of dgrad. For axis -2 it is `to_blocked_k_groups` under `end / 32`: an operand of wgrad, whose
    matmul sums along the tokens.

    Args:
        x: `(M, K)`, the tokens of each group together; bfloat16, float16 or float32; any strides. For axis -1, K must
            be a multiple of 32.
        offs: `(G,)` int32 on x's device: the exclusive end of each group. The ends never decrease, and the last is at
            most M. Rows from the last end on belong to no group and are dropped.
        axis: -1 for 1x32 blocks along K, -2 for 32x1 blocks along the tokens, padding included.
        pad_to: the multiple of rows that each group is padded to; itself a multiple of 128.
        elem_dtype, scaling: as for `mx_quantize`.
        scale_layout: `blocked` or `plain`.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives bytes without meaning, but no access outside x and the
            results.

    Returns:
        `(qdata, scale, start, end)`. Below, `R` is the smallest multiple of pad_to that is at least `M + G*pad_to`.

        - qdata: `(R, K)`, elem_dtype; contiguous for axis -1, column-major with strides `(1, R)` for axis -2. Codes of
          padding are 0. For axis -2, padding in the same block as a NaN or an Inf is NaN.
        - qdata in e2m1: two neighbours along `axis` share a byte, as `mx_quantize` packs them. The shape is `(R, K/2)`
          for axis -1, and `(R/2, K)` with strides `(1, R/2)` for axis -2. Padding in the same block as a NaN or an Inf
          has the code 7. Group g begins at row `start[g]` or, for axis -2, at row `start[g] / 2`.
        - scale: float8_e8m0fnu. Blocked: `(R + 128*G, Cp)` with `Cp = 4*ceil(K/128)` for axis -1, and
          `(Kp, R/32 + 4*G)` with `Kp = 128*ceil(K/128)` for axis -2; in both, the bytes of group g begin at byte
          `start[g] * Cp`. Plain: `(R, K/32)` for axis -1 and `(K, R/32)` for axis -2. Bytes of blocks without a token
          are 0.
        - start, end: `(G,)` int32. Group g and its padding take the rows of qdata from `start[g]` up to, but without,
          `end[g]`.

    Special values: as for `mx_quantize`. Padding never changes a scale, because a zero is never larger than the tokens
        of its block. Padding is quantized like any zero: a NaN in its block makes it NaN.

    Raises:
        TypeError: x, offs or elem_dtype has a dtype that is not listed above, or pad_to is not an integer.
        ValueError: a rank, a device, axis, pad_to, scaling or scale_layout is not as above; K is not a multiple of 32
            for axis -1; there would be 2^31 padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.full((3, 32), 2.0)
        >>> qdata, scale, start, end = mx_quantize_groups(x, torch.tensor([1, 3], dtype=torch.int32))
        >>> qdata.shape, scale.shape, start.tolist(), end.tolist()
        (torch.Size([384, 32]), torch.Size([640, 4]), [0, 128], [128, 256])
        >>> qdata[[0, 1, 128, 129, 130], 0].float().tolist()
        [256.0, 0.0, 256.0, 256.0, 0.0]

    Source: OCP MX v1.0, section 6.3; PyTorch, `torch.nn.functional.scaled_grouped_mm`, for the layout that it reads.
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
