"""fp8_quantize_128x128 in Helion: a program owns one block and reads it once, even if the transpose is written too."""

from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE, fp32_bits
from mxspec.helion_kernels.common.fp8_numerics import factors
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid
from mxspec.helion_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.helion_kernels.common.runs import dimension, load_run, store_run


class Tile(NamedTuple):
    # The threads of a warp along the rows, of 16 rows each. 0 leaves the layout to Triton.
    lanes: int
    num_warps: int


_HOPPER = {"plain": Tile(0, 4), "with transpose": Tile(8, 4)}
TILES = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # as in Triton
RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def _plain(
    w: Tensor, stride_e: int, stride_n: int, stride_k: int, N: int, K: int,
    qdata: Tensor, scale: Tensor, eps_bits: int, pow2: bool, even: bool, tail: bool, e: int, b: int, c: int,
) -> None:  # fmt: skip
    n, k = b * 128 + dimension(128, 0, 2), c * 128 + dimension(128, 1, 2)
    inside = None if even else ((n < N) & (k < K)).expand(128, 128) if tail else (n < N).expand(128, 128)
    wide = widened(hl.load(w, [e * stride_e + n * stride_n + k * stride_k], extra_mask=inside))
    s, back = factors(magnitude_bits(wide).reshape(1, 128 * 128).amax(-1), eps_bits, pow2)
    hl.store(qdata, [(e * N + n) * K + k], saturating_cast(wide * s.unsqueeze(-1), E4M3FN), extra_mask=inside)
    hl.store(scale, [(e * ((N + 127) // 128) + b) * ((K + 127) // 128) + c + hl.arange(1)], back)


def _with_transpose(
    w: Tensor, stride_e: int, stride_n: int, stride_k: int, N: int, K: int,
    qdata: Tensor, scale: Tensor, qdata_t: Tensor, scale_t: Tensor,
    eps_bits: int, pow2: bool, even: bool, whole: bool, lanes: int, e: int, b: int, c: int,
) -> None:  # fmt: skip
    """A thread has 16 rows by 8 columns.

    It loads 16 bytes of a row, and stores 8 bytes of a row and 16 bytes of a column.
    """
    across = 32 // lanes
    k = dimension(across, 0, 5) * 8 + dimension(16 // across, 2, 5) * (8 * across) + dimension(8, 4, 5)
    n = dimension(lanes, 1, 5) * 16 + dimension(8 // lanes, 3, 5) * (16 * lanes)
    n, k = b * 128 + n, c * 128 + k  # (across, lanes, 16 // across, 8 // lanes, 8)
    inside = None if even else (n < N) & (k < K)
    # whole: N is a multiple of 16, so that a thread has all of its 16 rows or none.
    left = None if whole else N - n
    wide = widened(load_run(w, n, stride_n, e * stride_e + k * stride_k, inside, 16, left=left))
    s, back = factors(magnitude_bits(wide).reshape(1, 128 * 128).amax(-1), eps_bits, pow2)
    wide = wide.reshape(across, lanes, 16 // across, 8 // lanes, 8, 16) * s
    halves = wide.reshape(across, lanes, 16 // across, 8 // lanes, 8, 2, 2, 2, 2)
    store_run(qdata, (e * N + n) * K + k, K, halves, inside, 16, left)
    row = n.unsqueeze(-1) + dimension(16, 5, 6)
    owned = None if even else ((row < N) & (k < K).unsqueeze(-1)).expand(wide.shape)
    hl.store(qdata_t, [(e * K + k).unsqueeze(-1) * N + row], saturating_cast(wide, E4M3FN), extra_mask=owned)
    row_blocks, col_blocks = (N + 127) // 128, (K + 127) // 128
    hl.store(scale, [(e * row_blocks + b) * col_blocks + c + hl.arange(1)], back)
    hl.store(scale_t, [(e * col_blocks + c) * row_blocks + b + hl.arange(1)], back)


def _squares(
    w: Tensor, stride_e: int, stride_n: int, stride_k: int, E: int, N: int, K: int,
    qdata: Tensor, scale: Tensor, qdata_t: Tensor, scale_t: Tensor, eps_bits: int,
    pow2: hl.constexpr, even: hl.constexpr, tail: hl.constexpr, whole: hl.constexpr, lanes: hl.constexpr,
) -> None:  # fmt: skip
    for e, b, c in hl.grid([E, (N + 127) // 128, (K + 127) // 128]):
        if lanes:
            _with_transpose(
                w, stride_e, stride_n, stride_k, N, K, qdata, scale, qdata_t, scale_t,
                eps_bits, pow2, even, whole, lanes, e, b, c,
            )  # fmt: skip
        else:
            _plain(w, stride_e, stride_n, stride_k, N, K, qdata, scale, eps_bits, pow2, even, tail, e, b, c)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    def outputs(N: int, K: int) -> tuple[Tensor, Tensor]:
        blocks = (-(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE))
        return w.new_empty((*lead, N, K), dtype=torch.float8_e4m3fn), w.new_empty((*lead, *blocks), dtype=torch.float32)

    *lead, N, K = w.shape
    result: tuple[Tensor, ...] = outputs(N, K)
    written = (*result, *result)
    if with_transpose:
        result = written = (*result, *outputs(K, N))
        # The tensor in memory is the transpose, so the two halves of the result change places.
        if w.stride(-1) != 1 and w.stride(-2) == 1:
            w, N, K, written = w.mT, K, N, (*result[2:], *result[:2])
    if w.numel():
        E, stride_e = (w.shape[0], w.stride(0)) if lead else (1, 0)
        lanes, num_warps = for_device(TILES, w.device)["with transpose" if with_transpose else "plain"]
        # A grid of three dimensions needs no divisions to find a program's place, but two of its dimensions hold at
        # most 65535.
        pid_type = "xyz" if max(E, -(-N // FP8_BLOCK_SIZE)) < 65536 else "flat"
        even = N % FP8_BLOCK_SIZE == 0 == K % FP8_BLOCK_SIZE
        launch(
            _squares, {(9, 0): on_grid(3, num_warps, pid_type)}, flat(w), stride_e, *w.stride()[-2:], E, N, K,
            *(t.view(-1) for t in written), fp32_bits(eps), scale_format == "pow2", even,
            K % FP8_BLOCK_SIZE != 0, N % 16 == 0, lanes,
        )  # fmt: skip
    return result
