"""nvfp4_quantize_groups: pad token groups, quantize each as a matrix to NVFP4, and lay out its scales, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import padded_rows
from mxspec.reference.common.numerics import saturating_cast
from mxspec.reference.common.nvfp4_numerics import blocks_of, magnitude, scales_and_quotients, tensor_scale
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor,
    offs: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    pad_to: int = 128,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "nvfp4_quantize_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.choice(op, "axis", axis, (-1, -2))
    if axis == -1:
        checks.multiple(op, "K", x.shape[1], NVFP4_BLOCK_SIZE)
    checks.offsets(op, "offs", offs, ("x", x))
    checks.positive(op, "pad_to", pad_to)
    if pad_to % 128:
        raise ValueError(f"{op}: pad_to = {pad_to}; needs a multiple of 128, the rows of a tile of scales")
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    G = offs.shape[0]
    checks.fits_int32(op, f"the padded rows of {G} groups", padded_rows(x.shape[0], G, pad_to) + 128 * G)
    if tensor_amax is not None:
        checks.tensor_dtype(op, "tensor_amax", tensor_amax, (torch.float32,))
        checks.same_device(op, ("x", x), ("tensor_amax", tensor_amax))
        checks.shape(op, "tensor_amax", tensor_amax, (G,), f"for {G} groups: one number for each")
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", x.shape[0])


@spec(check_args=check_args, flops=per_element(3))
def nvfp4_quantize_groups(
    x: Tensor,
    offs: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    pad_to: int = 128,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to NVFP4 for a grouped matmul: each group is a matrix with its own tensor scale.

    The bytes equal three steps: `pad_token_groups(x, offs, pad_to)`, then `nvfp4_quantize` of each padded group with
    1x16 blocks along `axis`, then, for blocked scales, the tiling of each group. For axis -1 the tiling is
    `to_blocked_m_groups` under `end`: an operand of the forward pass and of dgrad. For axis -2 it is
    `to_blocked_k_groups` under `end / 16`: an operand of wgrad, whose matmul sums along the tokens.

    Args:
        x: `(M, K)`, the tokens of each group together; bfloat16, float16 or float32; any strides. For axis -1, K must
            be a multiple of 16.
        offs: `(G,)` int32 on x's device: the exclusive end of each group. The ends never decrease, and the last is at
            most M. Rows from the last end on belong to no group and are dropped.
        tensor_amax: `(G,)` float32 on x's device, the magnitude A of each group; any stride. None computes it from x,
            which costs one more read of x; a group without tokens then has A = 0.
        axis: -1 for 1x16 blocks along K, -2 for 16x1 blocks along the tokens, padding included.
        pad_to: the multiple of rows that each group is padded to; itself a multiple of 128.
        scale_layout: `blocked` or `plain`.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives bytes without meaning, but no access outside x and the
            results.

    Returns:
        `(qdata, scale, tensor_scale, start, end)`. Below, `R` is the smallest multiple of pad_to that is at least
        `M + G*pad_to`.

        - qdata: float4_e2m1fn_x2; `(R, K/2)`, contiguous, for axis -1; `(R/2, K)` with strides `(1, R/2)` for axis -2.
          Codes of padding are 0, except in a block or a group of NaN, where they are 7.
        - scale: float8_e4m3fn. Blocked: `(R + 128*G, Cp)` with `Cp = 4*ceil(K/64)` for axis -1; the bytes of group g
          begin at byte `start[g] * Cp`. `(Kp, R/16 + 4*G)` with `Kp = 128*ceil(K/128)` for axis -2; the bytes of group
          g begin at byte `start[g]/16 * Kp`. Plain: `(R, K/16)` for axis -1 and `(K, R/16)` for axis -2. Bytes of
          blocks without a token are 0, except in a group of NaN, where they are 0x7F.
        - tensor_scale: `(G,)` float32: T of each group.
        - start, end: `(G,)` int32. Group g and its padding take the rows from `start[g]` up to, but without, `end[g]`.
          A grouped matmul of qdata takes `end` as its offs.

    Special values: as for `nvfp4_quantize`. Padding never changes a scale, because a zero is never larger than the
        tokens of its block. A group whose A is NaN, Inf or negative is a group of NaN.

    Raises:
        TypeError: x, offs or tensor_amax has a dtype that is not listed above, or pad_to is not an integer.
        ValueError: a rank, a shape, a device, axis, pad_to or scale_layout is not as above; K is not a multiple of 16
            for axis -1; there would be 2^31 padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 16)
        >>> offs = torch.tensor([1, 3], dtype=torch.int32)
        >>> qdata, scale, tensor_scale, start, end = nvfp4_quantize_groups(x, offs)
        >>> qdata.shape, scale.shape, start.tolist(), end.tolist()
        (torch.Size([384, 8]), torch.Size([640, 4]), [0, 128], [128, 256])
        >>> (tensor_scale * 2688).tolist(), scale[[0, 128], 0].tolist(), scale[128].tolist()
        ([1.0, 4.0], [448.0, 224.0], [224.0, 0.0, 0.0, 0.0])

    Source: as for `nvfp4_quantize`; PyTorch, `torch.nn.functional.scaled_grouped_mm`, for the layout that it reads.
    """
    check_args(
        x, offs, tensor_amax, axis=axis, pad_to=pad_to, scale_layout=scale_layout, check_offs=check_offs
    )  # fmt: skip
    padded, start, end = pad_token_groups(x, offs, pad_to)
    row = torch.arange(padded.shape[0], dtype=torch.int32, device=x.device)
    group = torch.searchsorted(end, row, right=True)  # the rows past the last group count as one more group
    G = offs.shape[0]
    A = largest_of_groups(padded, group, G) if tensor_amax is None else magnitude(tensor_amax)
    A_of_row = torch.cat([A, A.new_zeros(1)])[group]
    blocks = blocks_of(padded.mT if axis == -2 else padded)  # (R, K/16, 16), or (K, R/16, 16)
    b = blocks.abs().amax(-1)
    A_of_block = A_of_row[::NVFP4_BLOCK_SIZE] if axis == -2 else A_of_row[:, None]
    scale, y = scales_and_quotients(blocks, b, A_of_block)
    qdata = saturating_cast(y, E2M1).flatten(-2)
    if scale_layout == "blocked":
        rearrange: Any = to_blocked_m_groups if axis == -1 else to_blocked_k_groups
        scale, _ = rearrange(scale, end if axis == -1 else end // NVFP4_BLOCK_SIZE)
    return qdata.mT if axis == -2 else qdata, scale, tensor_scale(A), start, end


def largest_of_groups(padded: Tensor, group: Tensor, G: int) -> Tensor:
    """A of each group: NaN if one of its elements is NaN or Inf. As integers, bits have the order of magnitudes."""
    bits = padded.to(torch.float32).abs().view(torch.int32)
    of_row = bits.amax(1) if padded.shape[1] else group.new_zeros(len(group), dtype=torch.int32)
    largest = of_row.new_zeros(G + 1).scatter_reduce(0, group, of_row, "amax")
    return magnitude(largest[:G].view(torch.float32))
