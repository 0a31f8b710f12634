"""fp8_grouped_gemm_wgrad in Helion: each program sums the tokens of one group. Each 128 tokens are added in fp32."""

from __future__ import annotations

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import flat, launch
from mxspec.helion_kernels.fp8_gemm import PTX as PTX
from mxspec.helion_kernels.fp8_gemm import options

# Rates on an H200: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
# TMA writes the output. As in fp8_grouped_gemm, the configuration names it once for all accesses. TMA does not read the
# codes, because the distance between their rows differs from group to group. Programs that run at the same time share
# the operands of a group.
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
        # Both must be within the operands: the loop tests in advance whether there is a next step, and that must not
        # overflow. The shifts tell Triton that both are multiples of 128.
        first, stop = torch.clamp(first, 0, R) >> 7 << 7, torch.clamp(stop, 0, R) >> 7 << 7
        acc = hl.zeros([n, k], dtype=torch.float32)
        for t in hl.tile(first, stop, block_size=128):
            # The codes of a group are row-major and as wide as the group has tokens. The groups follow one another.
            token = (t.index - first).unsqueeze(0)
            of_n = hl.load(dy, [first * N + n.index.unsqueeze(1) * (stop - first) + token])
            of_k = hl.load(x, [first * K + k.index.unsqueeze(1) * (stop - first) + token])
            # Tensor cores keep only about 14 bits of a sum, so each 128 tokens are added in fp32.
            partial = hl.dot(of_n, of_k.t(), out_dtype=torch.float32)
            acc = acc + partial * (dy_scale[n, t.id][:, None] * x_scale[k, t.id][None, :])
        if not accumulate:
            out[e.begin, n, k] = acc.to(out.dtype)
        elif stop > first:  # do not add an empty sum: it would turn an output of -0 into +0
            out[e.begin, n, k] = out[e.begin, n, k] + acc


def sum_tokens(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, out: Tensor, accumulate: bool
) -> None:
    """Write the sums of each group to the group's matrix in `out`, or add them to the matrix."""
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
