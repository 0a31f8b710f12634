"""fp8_grouped_gemm_wgrad in Helion: each program sums the tokens of one group, in fp32 every 128 of them."""

from __future__ import annotations

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels._launch import Configs, flat, launch
from mxspec.helion_kernels.fp8_gemm import PTX as PTX
from mxspec.helion_kernels.fp8_gemm import options


def configs(indexing: list[str]) -> Configs:
    """The configurations, for these accesses to memory: tiles as of `fp8_gemm`, 1x128 by 1x128."""
    of_one_group = {"loop_orders": [[1, 2, 0]], **options(indexing)}  # programs that run at a time share its operands
    large = helion.Config(block_sizes=[128, 128], num_warps=8, **of_one_group)
    low = helion.Config(block_sizes=[64, 128], num_warps=4, **of_one_group)
    return {(9, 0): large, (10, 0): low}


# Not run on a GPU yet, so without a rank. TMA reads no rows whose distance is another for each group, as of the codes.
_READ = 6 * ["pointer"]
CONFIGS = {False: configs([*_READ, "tensor_descriptor"]), True: configs([*_READ, *2 * ["tensor_descriptor"]])}


def _wgrad(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, out: Tensor,
    R: int, offs: Tensor, stride_offs: int, accumulate: hl.constexpr,
) -> None:  # fmt: skip
    for e, n, k in hl.tile(out.size(), block_size=[1, None, None]):
        N, K = out.size(1), out.size(2)
        group = e.id + hl.arange(1)
        first = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0).sum(0)
        stop = hl.load(offs, [group * stride_offs]).sum(0)
        # Shifted, so that Triton knows of multiples of 128 that they are.
        first, stop = torch.where(first > 0, first >> 7 << 7, 0), torch.where(stop < R, stop >> 7 << 7, R)
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
        _wgrad, CONFIGS[accumulate], flat(dy), dy_scale, flat(x), x_scale, out,
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
