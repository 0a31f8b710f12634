"""fp8_grouped_gemm_wgrad: the gradient of each expert's weights, from FP8 operands with blocks along the tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.fp8_numerics import values
from mxspec.reference.common.groups import each_group, flat_places, group_of_tokens
from mxspec.reference.common.numerics import round_once
from mxspec.reference.fp8_gemm import MIN_SQNR_DB
from mxspec.reference.fp8_grouped_gemm import check_operands
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import spec


def check_groups(
    op: str, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, check_offs: bool
) -> None:
    check_operands(op, ("dy", dy, dy_scale, 2), ("x", x, x_scale, 2))
    checks.offsets(op, "offs", offs, ("dy", dy))
    (N, R), K = dy.shape, x.shape[0]
    checks.shape(op, "x", x, (K, R), f"for dy {(N, R)}")
    checks.multiple(op, "R", R, FP8_BLOCK_SIZE, quantized=True)
    C = R // FP8_BLOCK_SIZE
    checks.shape(op, "dy_scale", dy_scale, (N, C), f"(128 tokens a block) for dy {(N, R)}")
    checks.shape(op, "x_scale", x_scale, (K, C), f"(128 tokens a block) for x {(K, R)}")
    for name, flat in (("dy", dy), ("x", x)):
        if not flat.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {flat.stride()}; needs a contiguous tensor: it is read as flat")
    checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", R)
    if checks.flag(op, "check_offs", check_offs):
        checks.offs_in_order(op, offs, "R", R, FP8_BLOCK_SIZE)


def check_args(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> None:
    op = "fp8_grouped_gemm_wgrad"
    check_groups(op, dy, dy_scale, x, x_scale, offs, check_offs)
    checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)


def group_values(flat: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """Return `(D, R)` in fp64: every feature of every token, from codes that lie group by group."""
    D, R = flat.shape
    tokens = flat.view(torch.uint8).flatten()[flat_places(offs, D, R)].view(flat.dtype)
    return values(tokens, scale)


def products(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each group, the mask of its tokens and its product in fp64."""
    left, right = group_values(dy, dy_scale, offs), group_values(x, x_scale, offs)  # (N, R), (K, R)
    group = group_of_tokens(offs, dy.shape[1])
    for e in each_group(offs):  # masks the operands and not the products, because 0 * NaN is NaN
        own_dy, own_x = (torch.where(group == e, t, 0.0) for t in (left, right))
        yield group == e, own_dy @ own_x.t()


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    # counts all R tokens, because the host does not read offs
    flops=lambda args, outputs: 2 * args[0].numel() * args[2].shape[0],
)
def fp8_grouped_gemm_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> Tensor:
    """Sum `dy^T x` over the tokens of each group: the gradient of each expert's weights, from FP8 operands.

    `out[e, n, k] = out_dtype(sum of dy[n, t] * dy_scale[n, t // 128] * x[k, t] * x_scale[k, t // 128] over offs[e-1] <=
    t < offs[e])`. The codes `[n, t]` and `[k, t]` lie where `fp8_quantize_k_groups` places them: the codes of each
    group form their own row-major matrix.

    Args:
        dy: `(N, R)` float8_e4m3fn, contiguous, as `fp8_quantize_k_groups` gives it. The op reads it as a flat array:
            the shape gives N and the number of codes, and offs gives the place of each code. R is a multiple of 128,
            the same for x. N and K are free.
        dy_scale: `(N, R/128)` float32, any strides.
        x: `(K, R)` float8_e4m3fn, contiguous, read as a flat array.
        x_scale: `(K, R/128)` float32, any strides.
        offs: `(E,)` int32 on dy's device: the exclusive end of each group, a multiple of 128; the `end` that the
            quantizer gives. The ends never decrease, and the last is at most R.
        out_dtype: torch.float32 or torch.bfloat16.
        check_offs: True reads offs on the host, which waits for the device, and raises if offs is not in order or an
            end is not a multiple of 128. False waits for nothing; such an offs then gives values without meaning, but
            no access outside the operands and the result.

    Returns:
        `(E, N, K)` of out_dtype, contiguous. A group without tokens gives zeros. Codes and scales after the last group
        never count. Rounding and the judgement of kernels are as for `fp8_gemm`. In the kernels in Triton and Helion,
        no bit of an expert's gradient depends on the tokens of other experts.

    Special values: as for `fp8_gemm`, within a group: a NaN reaches only the gradient of its own expert.

    Raises:
        TypeError: an operand, a scale, offs or out_dtype has a dtype that is not listed above.
        ValueError: an operand has a rank that is not listed above or is not contiguous; the sizes of dy and x do not
            fit; R is not a multiple of 128; a scale has a shape that does not fit; the tensors are on two devices;
            there are 2^31 rows or more; or, with check_offs, offs is not as above.

    Example:
        >>> dy = torch.full((1, 256), 2.0).to(torch.float8_e4m3fn)  # one feature
        >>> x = torch.tensor([1.0, -3.0, 0.5, 4.0]).repeat_interleave(128).view(2, 256).to(torch.float8_e4m3fn)  # two
        >>> offs = torch.tensor([128, 128, 256], dtype=torch.int32)
        >>> fp8_grouped_gemm_wgrad(dy, torch.tensor([[1.0, 2.0]]), x, torch.ones(2, 2), offs).tolist()
        [[[256.0, -768.0]], [[0.0, 0.0]], [[256.0, 2048.0]]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `k_grouped_fp8_gemm_nt_contiguous`.
    """
    check_args(dy, dy_scale, x, x_scale, offs, out_dtype=out_dtype, check_offs=check_offs)
    out = torch.empty(offs.shape[0], dy.shape[0], x.shape[0], dtype=out_dtype, device=dy.device)
    for e, (_, product) in enumerate(products(dy, dy_scale, x, x_scale, offs)):
        out[e] = round_once(product, out_dtype)
    return out
