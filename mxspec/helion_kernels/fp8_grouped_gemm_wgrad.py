"""fp8_grouped_gemm_wgrad in Helion: each program sums the tokens of one group, in fp32 every 128 of them."""

from __future__ import annotations

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import flat, launch
from mxspec.helion_kernels.fp8_gemm import PTX as PTX
from mxspec.helion_kernels.fp8_gemm import options

# H200, 32768 tokens of 8 experts, N 2048, K 7168: 467 TFLOP/s to fp32, 547 to bf16. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
# TMA has the output, asked for by one word as in fp8_grouped_gemm; it reads no codes, whose rows are another distance
# apart in each group. Programs that run at a time share a group's operands.
_OPTIONS = {"num_warps": 8, "loop_orders": [[1, 2, 0]], **options("tensor_descriptor")}
_LARGE, _LOW = (helion.Config(block_sizes=[rows, 128], **_OPTIONS) for rows in (128, 64))
CONFIGS = {(9, 0): _LARGE, (10, 0): _LOW}  # on Blackwell 128 rows need more registers than there are


def _wgrad(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, out: Tensor,
    R: int, offs: Tensor, stride_offs: int, accumulate: hl.constexpr,
) -> None:  # fmt: skip
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        N, K = out.size(1), out.size(2)
        group = e.id + hl.arange(1)
        first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0).sum(0)
        stop = hl.load(offs, [group * stride_offs]).sum(0)
        # Both inside of the operands: whether a loop has a next step is asked ahead, and must not overflow. Shifted, so
        # that Triton knows of multiples of 128 that they are.
        first, stop = torch.clamp(first, 0, R) >> 7 << 7, torch.clamp(stop, 0, R) >> 7 << 7
        acc = hl.zeros([n, k], dtype=torch.float32)
        for t in hl.tile(first, stop, block_size=128):
            # The codes of a group are row-major, as wide as it has tokens, one group after the other.
            token = (t.index - first).unsqueeze(0)
            of_n = hl.load(dy, [first * N + n.index.unsqueeze(1) * (stop - first) + token])
            of_k = hl.load(x, [first * K + k.index.unsqueeze(1) * (stop - first) + token])
            # Tensor cores keep about 14 bits of a sum, so it is moved to fp32 every 128 tokens.
            partial = hl.dot(of_n, of_k.t(), out_dtype=torch.float32)
            acc = acc + partial * (dy_scale[n, t.id][:, None] * x_scale[k, t.id][None, :])
        if not accumulate:
            out[e.begin, n, k] = acc.to(out.dtype)
        elif stop > first:  # a sum of nothing is +0, which would turn a -0 into +0
            out[e.begin, n, k] = out[e.begin, n, k] + acc


def sum_tokens(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, out: Tensor, accumulate: bool
) -> None:
    """The sums of each group, written to a matrix of its own or added to it."""
    launch(
        _wgrad, CONFIGS, flat(dy), dy_scale, flat(x), x_scale, out,
        dy.shape[1], flat(offs), offs.stride(0), accumulate,
    )  # fmt: skip


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
    (N, R), K, E = dy.shape, x.shape[0], offs.shape[0]
    out = torch.empty((E, N, K), dtype=out_dtype, device=dy.device)
    if not out.numel():
        return out
    if not R:
        return out.zero_()
    sum_tokens(dy, dy_scale, x, x_scale, offs, out, accumulate=False)
    return out
