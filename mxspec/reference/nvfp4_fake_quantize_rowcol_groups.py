"""nvfp4_fake_quantize_rowcol_groups: the values of NVFP4 codes in both directions; a kernel writes no code."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.groups import group_of_tokens, padded_rows
from mxspec.reference.common.nvfp4_numerics import magnitude, tensor_scale
from mxspec.reference.common.philox import bytes_of_blocks
from mxspec.reference.hadamard_16 import check_signs, hadamard_16
from mxspec.reference.nvfp4_dequantize import nvfp4_dequantize
from mxspec.reference.nvfp4_quantize import nvfp4_quantize
from mxspec.reference.nvfp4_quantize_stochastic import nvfp4_quantize_stochastic
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.unpad_token_groups import unpad_token_groups
from mxspec.spec import per_element, spec


def check_args(
    x: Tensor,
    offs: Tensor,
    random: Tensor | None = None,
    *,
    signs: int | None = None,
    check_offs: bool = False,
) -> None:
    op = "nvfp4_fake_quantize_rowcol_groups"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2,))
    checks.multiple(op, "K", x.shape[1], NVFP4_BLOCK_SIZE)
    checks.offsets(op, "offs", offs, ("x", x))
    if random is not None:
        checks.tensor_dtype(op, "random", random, (torch.int64,))
        checks.shape(op, "random", random, (2,), "for a seed and an offset")
        checks.same_device(op, ("x", x), ("random", random))
    if signs is not None:
        check_signs(op, signs, ", or None for no transform")
    checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", padded_rows(x.shape[0], offs.shape[0], 16))
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "M", x.shape[0])


@spec(
    check_args=check_args,
    flops=per_element(6),  # a maximum, a multiply and a divide, twice
)
def nvfp4_fake_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    random: Tensor | None = None,
    *,
    signs: int | None = None,
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to NVFP4 in both directions, and return the values `q * s` of the codes in bfloat16.

    Each group is a matrix of its own, with its own tensor scale in each direction. `rows` has the values of
    `nvfp4_quantize(group)`, in 1x16 blocks along K. For `columns`, each group is padded with zeros to a multiple of 16
    tokens. With `signs`, it is then transformed by `hadamard_16(group, axis=-2, signs=signs)`. `columns` has the values
    of the result in 16x1 blocks along the tokens. A matmul multiplies its sum by the tensor scales of both operands. A
    GPU without FP4 tensor cores trains in NVFP4 with these values: the forward and dgrad multiply `rows`, the gradient
    of a weight multiplies `columns`. It sums over the tokens, so two equal transforms cancel.

    Args:
        x: `(M, K)`, the tokens of each group together; K a multiple of 16; bfloat16, float16 or float32; any strides.
        offs: `(G,)` int32 on x's device: the exclusive end of each group, of any alignment. The ends never decrease,
            and the last is at most M. Rows from `offs[-1]` on belong to no group.
        random: None rounds codes to nearest even. An int64 `(2,)` on x's device, seed and offset, rounds them
            stochastically in both directions, as `nvfp4_quantize_stochastic` does by the bytes of Philox. Let r be the
            row of a token in the padded groups. The element `(r, k)` takes byte `r % 16` of the block
            `n = r // 16 * K + k`. The rows count from `offset`, the columns from `offset + 1`.
        signs: None for no transform, or the signs of `hadamard_16` as a mask of 16 bits. The sums of the transform are
            rounded to x's dtype before they are quantized.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order. False
            waits for nothing; an offs out of order then gives values without meaning, but no access outside x and the
            results.

    Returns:
        `(rows, row_scale, columns, column_scale, start, end)`.

        - rows: `(M, K)` bfloat16, contiguous. Rows without a group are 0.
        - columns: `(R, K)` bfloat16, contiguous, with `R = 16 * ceil((M + 16 * G) / 16)`. Group g has the rows
          `start[g]` to `end[g]`. Rows from `end[-1]` on are 0. A matmul along the tokens takes `end` as its offs.
        - row_scale, column_scale: `(G,)` float32, the tensor scales: the largest magnitude of the group divided by
          2688, before the transform for rows, after it for columns. 0 for a group without tokens.
        - start, end: `(G,)` int32, the first row of each padded group, and the row after its last.

        The values have 6 significant bits at most, so bfloat16 holds them exactly.

    Special values: as for `nvfp4_quantize` and `nvfp4_dequantize` with a tensor scale of 1. A NaN or an Inf of a group
        makes both of its tensor scales NaN, and all its values in both directions. The transform may make numbers of
        float16 four times as large: if one overflows, the column scale and the columns of the group are NaN.

    Raises:
        TypeError: x, offs, random or signs has a type that is not listed above.
        ValueError: a rank, a shape, a device or K is not as above; signs does not fit in 16 bits; there would be 2^31
            padded rows or more; or, with check_offs, offs is not in order.

    Example:
        >>> x = torch.zeros(3, 16)
        >>> x[0, :3], x[1, 0] = torch.tensor([5.25, 2.0, -0.2]), 10.5
        >>> offs = torch.tensor([1, 3], dtype=torch.int32)
        >>> rows, row_scale, columns, column_scale, start, end = nvfp4_fake_quantize_rowcol_groups(x, offs)
        >>> rows[0, :3].tolist(), columns[0, :3].tolist()  # the codes of a row share the scale 448
        ([2688.0, 896.0, -0.0], [2688.0, 1056.0, -108.0])
        >>> (row_scale * 512).tolist(), end.tolist()
        ([1.0, 2.0], [16, 32])

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149): the transform of the operands of
        the weight's gradient, stochastic rounding of gradients, and the three levels of the format.
    """
    check_args(x, offs, random, signs=signs, check_offs=check_offs)
    (M, K), G = x.shape, offs.shape[0]
    padded, start, end = pad_token_groups(x, offs, NVFP4_BLOCK_SIZE)
    R = padded.shape[0]
    blocks = padded.unflatten(0, (R // 16, 16))  # (R/16, 16, K), each a matrix that belongs to one group
    group = group_of_tokens(end, R)[::16].to(torch.int64)  # (R/16,); G after the last group
    turned = blocks if signs is None else hadamard_16(blocks, axis=-2, signs=signs)

    def quantized(blocks: Tensor, axis: int, stream: int) -> tuple[Tensor, Tensor]:
        """The values of the blocks, and the tensor scale of each group."""
        bits = blocks.to(torch.float32).abs().flatten(1).view(torch.int32)  # in the order of the magnitudes; NaN last
        largest = bits.amax(1) if K else bits.new_zeros(R // 16)
        amax = bits.new_zeros(G + 1).scatter_reduce(0, group, largest, "amax").view(torch.float32)
        if random is None:
            codes, scale, _ = nvfp4_quantize(blocks, amax[group], axis=axis)
        else:
            state = random + torch.arange(2, device=x.device) * stream
            byte = bytes_of_blocks(state, (R // 16, K)).mT.to(torch.uint8)  # (R/16, 16, K)
            codes, scale, _ = nvfp4_quantize_stochastic(blocks, byte, amax[group], axis=axis)
        one = torch.ones_like(largest, dtype=torch.float32)
        values = nvfp4_dequantize(codes, scale, one, axis=axis).flatten(0, 1)
        return values, tensor_scale(magnitude(amax[:G]))

    rows, row_scale = quantized(blocks, -1, 0)
    columns, column_scale = quantized(turned, -2, 1)
    columns.unflatten(0, (R // 16, 16)).masked_fill_((group == G)[:, None, None], 0)  # a transform of zeros may be -0
    return unpad_token_groups(rows, offs, start, M), row_scale, columns, column_scale, start, end
