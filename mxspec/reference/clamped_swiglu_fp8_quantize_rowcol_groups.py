"""clamped_swiglu_fp8_quantize_rowcol_groups: gpt-oss's activation of token groups, quantized in both directions."""

from __future__ import annotations

from torch import Tensor

from mxspec.reference.common.clamped_swiglu import check_operands, clamped_swiglu, with_bias
from mxspec.reference.fp8_quantize_rowcol_groups import fp8_quantize_rowcol_groups
from mxspec.spec import per_element, spec


def check_args(
    gate_up: Tensor, bias: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> None:
    check_operands("clamped_swiglu_fp8_quantize_rowcol_groups", gate_up, bias, offs, scale_format, check_offs)


@spec(
    check_args=check_args,
    flops=per_element(10),  # for each output: two sums, three limits, a sigmoid, two products, and the quantizers'
)
def clamped_swiglu_fp8_quantize_rowcol_groups(
    gate_up: Tensor, bias: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `h = glu(min(gate, 7)) * (max(-7, min(up, 7)) + 1)` in bfloat16, and quantize h in both directions.

    This is the activation of gpt-oss. Gate and up alternate in the columns of gate_up. First each row gets the bias of
    its group: `gate_up + bias`, rounded to bfloat16. `glu(x) = x * sigmoid(1.702 x)`, with these roundings: the real
    number `s = 1 / (1 + e^(-1.702 x))` to fp32, where an s below 2^-126 is 0; `x * s` to fp32, and then to bfloat16.
    `up + 1` and h are each rounded to bfloat16. h is quantized as `fp8_quantize_rowcol_groups` does.

    PyTorch's eager kernels also round `1.702 x` and the sigmoid to bfloat16. So this h is nearer to the real number.

    Args:
        gate_up: `(M, 2I)` bfloat16, I a multiple of 16; any strides. The even columns are the gate, the odd columns are
            up. The tokens of each group lie together.
        bias: `(G, 2I)` bfloat16 on gate_up's device, a row for each group, with the columns of gate_up; any strides.
        offs, scale_format, check_offs: as for `fp8_quantize_rowcol_groups`. eps is 1e-12. Rows from `offs[-1]` on get
            no bias.

    Returns:
        `(q_row, s_row, q_col, s_col, start, end)` of `h`, `(M, I)`, as `fp8_quantize_rowcol_groups` returns them.

    Special values: NaN stays NaN in every step. A gate of Inf counts as 7, and an up of Inf or -Inf as 7 or -7. A gate
        of -Inf is NaN, because it is `-Inf * 0`. A NaN in h makes the block of 128 in its row NaN, and the block of 128
        in its column. A finite gate from -51.5 down gives a zero.

    Raises:
        TypeError: gate_up or bias is not bfloat16, or offs is not int32.
        ValueError: a rank, a shape, a device, 2I or scale_format is not as above; there would be 2^31 padded rows or
            more; or, with check_offs, offs is not in order.

    Example:
        >>> gate_up, bias = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(1, 32, dtype=torch.bfloat16)
        >>> gate_up[0, 0], bias[0, 1] = 20.0, 9.0  # the gate counts as 7, and up as 7
        >>> q_row, s_row, *_ = clamped_swiglu_fp8_quantize_rowcol_groups(gate_up, bias, torch.tensor([1]).int())
        >>> q_row.shape, q_row[0, 0].item(), s_row[0, 0].item()  # 448 * 0.125 is 7 * (7 + 1)
        (torch.Size([1, 16]), 448.0, 0.125)

    Source: openai/gpt-oss, `swiglu` of gpt_oss/torch/model.py; transformers, `GptOssExperts._apply_gate`.
    """
    check_args(gate_up, bias, offs, scale_format=scale_format, check_offs=check_offs)
    h = clamped_swiglu(*with_bias(gate_up, bias, offs))
    return fp8_quantize_rowcol_groups(h, offs, scale_format=scale_format)
