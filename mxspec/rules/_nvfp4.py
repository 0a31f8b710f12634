"""Code that the NVFP4 rules share: blocks of 16 in the contract's layouts, with a peer's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mxspec.formats import E2M1, E4M3FN, NVFP4_BLOCK_SIZE
from mxspec.reference.common.numerics import saturating_cast
from mxspec.reference.nvfp4_quantize import check_args
from mxspec.reference.to_blocked import to_blocked

# A rule takes blocks `(..., R, C/16, 16)` and the largest magnitude of each block `(..., R, C/16)`, both in the dtype
# of x, and the largest magnitude of each matrix `(..., 1, 1)`. The last is fp32 if the call gave it, otherwise it has
# the dtype of x. The rule returns, all in fp32, the numbers that the casts to e2m1 and to e4m3fn get, and the
# multiplier of each matrix.
Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@torch.no_grad()
def quantize(
    x: Tensor,
    tensor_amax: Tensor | None,
    axis: int,
    block: str,
    scale_layout: str,
    rule: Rule,
    peer: str,
    *,
    squares: bool = False,
    nan_as: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`nvfp4_quantize` with a peer's rule, in the contract's layouts.

    `squares` says whether the peer has 16x16 blocks. `nan_as` is the number as which the peer's cast to e2m1 reads a
    NaN. None says that the result depends on the machine; such a call is refused.
    """
    check_args(x, tensor_amax, axis=axis, block=block, scale_layout=scale_layout)
    needs_values("nvfp4_quantize", x, peer)
    if block == "16x16" and not squares:
        raise NotImplementedError(f"nvfp4_quantize: {peer} has no block = '16x16'; needs '1x16'")
    if axis == -2:
        x = x.mT
    x = x.contiguous()
    *lead, R, C = x.shape
    blocks = x.reshape(*lead, R, C // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE)
    b = blocks.abs().amax(-1)  # NaN if an element is
    if tensor_amax is not None:
        A = tensor_amax + 0.0  # -0 counts as 0
        if (A < 0).any():
            raise ValueError(f"nvfp4_quantize: {peer} has no rule for a negative tensor_amax; needs 0 or more")
    else:
        A = b.flatten(-2).amax(-1) if b.numel() else x.new_zeros(lead)
    if block == "16x16":
        b = b.unflatten(-2, (R // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE)).amax(-2).repeat_interleave(NVFP4_BLOCK_SIZE, -2)
    y, s, multiplier = rule(blocks, b, A[..., None, None])
    if nan_as is None and y.isnan().any():
        raise ValueError(
            f"nvfp4_quantize: {peer} casts a NaN to e2m1, and its code depends on the machine; needs an x and "
            "a tensor_amax whose quotients are no NaN"
        )
    qdata = saturating_cast(torch.where(y.isnan(), nan_as or 0.0, y), E2M1).flatten(-2)
    scale = saturating_cast(torch.where(s.isnan(), torch.nan, s), E4M3FN)  # each peer's record has the NaN 0x7F
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    return qdata.mT if axis == -2 else qdata, scale, multiplier.reshape(lead)


def needs_values(op: str, x: Tensor, peer: str) -> None:
    if x.is_meta or isinstance(x, FakeTensor):
        raise ValueError(f"{op}: the rule of {peer} reads values, and x has none: it is on meta, or fake")


def rounded_scale(s: Tensor) -> Tensor:
    """The value of a scale after the cast to e4m3fn, fp32."""
    return saturating_cast(s, E4M3FN).to(torch.float32)
