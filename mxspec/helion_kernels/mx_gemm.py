"""mx_gemm in Helion: on Hopper a matmul of bf16 values (tiles/mx_by_memory.py), on Blackwell a matmul of the codes.

Weights in e2m1 are read as codes on both, because codes of four bits need the fewest bytes. A code times its scale and
2^-4 is exactly a bf16 number, under every scale. So the weights become bf16 in registers. They are the first operand of
the tensor cores, as in Triton. For FP8 and e2m1 tokens, another kernel first writes the tokens' bf16 values.
"""

from __future__ import annotations

import os

import helion
import helion.language as hl
import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import E2M1, MX_BLOCK_SIZE, element
from mxspec.helion_kernels.common.blocked import blocked_shape
from mxspec.helion_kernels.common.launch import Configs, config, flat, launch
from mxspec.helion_kernels.common.numerics import e2m1_pairs, scale_value
from mxspec.helion_kernels.fp8_gemm import options
from mxspec.helion_kernels.tiles import mx_by_memory, mx_matmul
from mxspec.helion_kernels.tiles.mx_by_memory import FIRST_FLAG, TILES, bf16_values, mend, tile_of
from mxspec.helion_kernels.tiles.mx_matmul import (
    multiplied,
    scale_arguments,
    scale_place,
    step_for,
)

# Rates: benchmarks/results/decisions.md. Blackwell: compiled, not run.
RANK = {(9, 0): 2, (10, 0): 2}
BATCH_INVARIANT = True
_REF = os.environ.get("HELION_INTERPRET") == "1"  # ref mode cuts the last tile short
PTX = {"sm90": (mx_by_memory.PTX,), "sm100": (rf"{mx_matmul.PTX['sm100'][0]}|tcgen05\.mma.*\.kind::f16",)}
# Programs run down eight tiles of M, then along N, so that programs that run at the same time share rows of a and b.
_SCALED = config([128, 128], 8, num_stages=4, l2_groupings=[8])
CONFIGS = {name: {(9, 0): of_hopper, (10, 0): _SCALED} for name, of_hopper in TILES.items()}


def _weights(tokens: int, num_stages: int) -> Configs:
    """For b in e2m1 and up to so many tokens in bfloat16. TMA reads the tokens, and is slow for rows past the last."""
    tma = options(["pointer", "pointer", "tensor_descriptor", "pointer"])  # the codes, their scales, a, the output
    tile = {"block_sizes": [64, tokens], "num_warps": 4, "loop_orders": [[0, 1]]}
    config = helion.Config(**{**tma, **tile, "num_stages": num_stages})
    return {(9, 0): config, (10, 0): config}


WEIGHTS = {16: _weights(16, 5), 32: _weights(32, 4), 64: _weights(64, 3), 128: _weights(128, 3)}


def _of_values(x: Tensor, w: Tensor, out: Tensor) -> None:
    for m, n in hl.tile(out.size()):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(x.size(1)):
            acc = hl.dot(x[m, k], w[n, k].t(), acc=acc)
        out[m, n] = acc.to(out.dtype)


def _mx_gemm(
    a: Tensor, a_scale: Tensor, a_stride_r: int, a_stride_c: int,
    b: Tensor, b_scale: Tensor, b_stride_r: int, b_stride_c: int,
    col_tiles: int, out: Tensor, blocked: hl.constexpr, step: hl.constexpr,
) -> None:  # fmt: skip
    for m, n in hl.tile(out.size()):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=step):
            c = (k.id * (step // 32) + hl.arange(step // 32)).unsqueeze(0)
            of_a = scale_place(m.index.unsqueeze(1), c, a_stride_r, a_stride_c, col_tiles, blocked)
            of_b = scale_place(n.index.unsqueeze(1), c, b_stride_r, b_stride_c, col_tiles, blocked)
            there = c * 32 < a.size(1)
            acc = multiplied(
                acc, a[m, k], hl.load(a_scale, [of_a], extra_mask=there),
                b[n, k], hl.load(b_scale, [of_b], extra_mask=there), step,
            )  # fmt: skip
        out[m, n] = acc.to(out.dtype)


def padded(x: Tensor, columns: int) -> Tensor:
    """x with zeros up to a whole step. In compiled code, masks put zeros there."""
    return pad(x, (0, columns - x.shape[1])) if _REF else x


def weights(pairs: Tensor, scale: Tensor, blocks: int) -> Tensor:
    """2^-4 times the weights of `blocks` blocks, `(N, 32 * blocks)` bf16, from e2m1 pairs and scale bytes.

    Under every scale, 2^-4 times the smallest and the largest weight are bf16 numbers.
    """
    N = pairs.shape[0]
    even, odd = e2m1_pairs(pairs)
    of_pair = scale_value(scale).unsqueeze(-1).expand(N, blocks, 16).reshape(N, blocks * 16)
    even, odd = (even * 2.0**122 * of_pair).to(torch.bfloat16), (odd * 2.0**122 * of_pair).to(torch.bfloat16)
    return hl.join(even, odd).reshape(N, blocks * 32)


def _by_weights(
    a: Tensor, b: Tensor, b_stride: int, b_scale: Tensor, b_stride_r: int, b_stride_c: int,
    C: int, col_tiles: int, out: Tensor, blocked: hl.constexpr, blocks: hl.constexpr,
) -> None:  # fmt: skip
    for n, m in hl.tile([out.size(1), out.size(0)]):
        acc = hl.zeros([n, m], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=blocks * 32):
            # b is flat, because a step of K is half as many bytes.
            col, c = n.index.unsqueeze(1), (k.id * blocks + hl.arange(blocks)).unsqueeze(0)
            byte = (k.id * (blocks * 16) + hl.arange(blocks * 16)).unsqueeze(0)
            pairs = hl.load(b, [col * b_stride + byte], extra_mask=byte < C * 16)
            place = scale_place(col, c, b_stride_r, b_stride_c, col_tiles, blocked)
            w = weights(pairs, hl.load(b_scale, [place], extra_mask=c < C), blocks)
            acc = hl.dot(w, padded(a[m, k], blocks * 32).t(), acc=acc)
        out[m, n] = (acc * 16.0).to(out.dtype).t()


def blocks_of_step(b: Tensor, few: bool) -> int:
    """The blocks of 32 columns that a step multiplies.

    Rows that begin anywhere are read byte by byte. With eight blocks, their addresses would be in local memory.
    """
    return 8 if few and all(stride % 16 == 0 for stride in (*b.stride()[:-1], b.data_ptr())) else 4


def _by_e2m1(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, out: Tensor, C: int, blocked: bool
) -> None:  # fmt: skip
    (M, N), x, flags = out.shape, a, None
    if a_scale is not None:
        flags = torch.zeros(FIRST_FLAG + M + N, dtype=torch.int32, device=a.device)
        x = bf16_values(a, a_scale, blocked, flags, FIRST_FLAG, "a")
    configs = WEIGHTS[min((tokens for tokens in WEIGHTS if tokens >= M), default=max(WEIGHTS))]
    blocks = blocks_of_step(b, max(WEIGHTS) >= M)
    launch(
        _by_weights, configs, x, flat(b.view(torch.uint8)), b.stride(0), *scale_arguments(b_scale, blocked),
        C, blocked_shape(1, C)[1], out, blocked, blocks,
    )  # fmt: skip
    if flags is not None and a_scale is not None:
        mend(a, a_scale, b, b_scale, out, blocked, flags)


def mx_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    M, N, K, blocked = a.shape[0], b.shape[0], b.shape[1] * element(b.dtype).per_byte, scale_layout == "blocked"
    C = K // 32
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if not K:
        return out.zero_()
    if b.dtype == E2M1.dtype:
        _by_e2m1(a, a_scale, b, b_scale, out, C, blocked)
        return out
    assert a_scale is not None  # only bfloat16 has no scales
    configs = CONFIGS[tile_of(out)]
    if step_for(a.device) != MX_BLOCK_SIZE:
        launch(
            _mx_gemm, configs, a, *scale_arguments(a_scale, blocked), b, *scale_arguments(b_scale, blocked),
            blocked_shape(1, C)[1], out, blocked, step_for(a.device),
        )  # fmt: skip
        return out
    flags = torch.zeros(FIRST_FLAG + M + N, dtype=torch.int32, device=a.device)
    x = bf16_values(a, a_scale, blocked, flags, FIRST_FLAG, "a")
    w = bf16_values(b, b_scale, blocked, flags, FIRST_FLAG + M, "b")
    launch(_of_values, configs, x, w, out)
    mend(a, a_scale, b, b_scale, out, blocked, flags)
    return out
