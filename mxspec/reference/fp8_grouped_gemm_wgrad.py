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
    checks.multiple(op, "R", R, FP8_BLOCK_SIZE)
    C = R // FP8_BLOCK_SIZE
    checks.shape(op, "dy_scale", dy_scale, (N, C), f"(128 tokens a block) for dy {(N, R)}")
    checks.shape(op, "x_scale", x_scale, (K, C), f"(128 tokens a block) for x {(K, R)}")
    for name, flat in (("dy", dy), ("x", x)):
        if not flat.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {flat.stride()}; needs it contiguous, for it is read as flat")
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
    """`(D, R)` in fp64, every feature of every token, from the flat codes of groups."""
    D, R = flat.shape
    tokens = flat.view(torch.uint8).flatten()[flat_places(offs, D, R)].view(flat.dtype)
    return values(tokens, scale)


def products(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each group which tokens are its own, and the product in fp64."""
    left, right = group_values(dy, dy_scale, offs), group_values(x, x_scale, offs)  # (N, R), (K, R)
    group = group_of_tokens(offs, dy.shape[1])
    for e in each_group(offs):  # operands are masked, not products: 0 * NaN is NaN
        own_dy, own_x = (torch.where(group == e, t, 0.0) for t in (left, right))
        yield group == e, own_dy @ own_x.t()


@spec(
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].numel() * args[2].shape[0],  # all R: offs is not read
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
    t < offs[e])`, where the codes `[n, t]` and `[k, t]` lie as `fp8_quantize_k_groups` places them: those of a group
    are a row-major matrix of its own.

    Args:
        dy: `(N, R)` float8_e4m3fn, contiguous, as `fp8_quantize_k_groups` gives it, read as flat: its shape says N and
            how many codes there are, and offs says where each lies. R is a multiple of 128, the same for x. N and K
            are free.
        dy_scale: `(N, R/128)` float32, any strides.
        x: `(K, R)` float8_e4m3fn, contiguous, read as flat.
        x_scale: `(K, R/128)` float32, any strides.
        offs: `(E,)` int32 on dy's device, the exclusive end of each group, multiples of 128: the quantizer's `end`.
            Never decreasing, the last at most R.
        out_dtype: torch.float32 or torch.bfloat16.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order or not of
            multiples of 128. Without it nothing waits; such an offs gives values that mean nothing, and no access
            outside the operands and the result.

    Returns:
        `(E, N, K)` of out_dtype, contiguous; zeros for a group without tokens. What lies past the last group never
        counts. Rounding and how a kernel is judged: as for `fp8_gemm`.

    Special values: as for `fp8_gemm`, within a group: a NaN reaches the gradient of its own expert only.

    Raises:
        TypeError: the dtype of an operand, of a scale or of offs; out_dtype.
        ValueError: a rank, R, an operand that is not contiguous, a scale of another shape, two devices, 2^31 rows or
            more; with check_offs, offs.

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
