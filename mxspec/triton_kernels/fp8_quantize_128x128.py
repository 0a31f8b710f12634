"""fp8_quantize_128x128 in Triton: a program owns one block and reads it once, even if the transpose is written too.

If w itself is the transpose of a row-major tensor, the kernel of the transpose writes its codes. This kernel turns a
tile of codes in shared memory by 16-byte words. The plain kernel would turn the tile by pairs of bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, fp32_bits
from mxspec.triton_kernels.common import launch
from mxspec.triton_kernels.common.fp8_numerics import factors
from mxspec.triton_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.triton_kernels.common.runs import load16, store16

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
# "with transpose": a warp is LANES by 32 / LANES threads. A thread has 16 rows by 8 columns, so a warp has 16 * LANES
# rows by 256 / LANES columns. The race of these configurations: benchmarks/results/decisions.md.
_HOPPER = {
    "plain": {"num_warps": 4},
    "with transpose": {"LANES": 4, "num_warps": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def supports(w: Tensor, **_: Any) -> str | None:
    if w.ndim == 3 and w.shape[0] > 65535:
        return f"takes up to 65535 experts, the limit of its grid; w has {w.shape[0]}"
    if max(w.shape[-2:]) > 65535 * FP8_BLOCK_SIZE:
        return f"takes N and K up to {65535 * FP8_BLOCK_SIZE}, the limit of its grid; w is {tuple(w.shape)}"
    return None


@triton.jit(do_not_specialize=["eps_bits"])
def _square(
    w, qdata, scale,
    N, K, stride_e, stride_n, stride_k, eps_bits,
    POW2: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    c, b, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n0, k0, n, k = b.to(tl.int64) * 128, c.to(tl.int64) * 128, tl.arange(0, 128), tl.arange(0, 128)
    inside = (n0 + n < N)[:, None] | EVEN
    if TAIL:  # the last block of a row is shorter
        inside = inside & (k < K - c * 128)[None, :]
    if WIDE:  # the products with strides are above 2^31
        n, k = n.to(tl.int64), k.to(tl.int64)
    w += e * stride_e + n0 * stride_n + k0 * stride_k
    values = widened(tl.load(w + (n[:, None] * stride_n + k[None, :] * stride_k), mask=inside, other=0))
    s, back = factors(tl.max(magnitude_bits(values)), eps_bits, POW2)
    qdata += (e * N + n0) * K + k0
    tl.store(qdata + (n[:, None] * K + k[None, :]), saturating_cast(values * s, qdata.dtype.element_ty), mask=inside)
    tl.store(scale + (e * tl.num_programs(1) + b) * tl.num_programs(0) + c, back)


@triton.jit(do_not_specialize=["eps_bits"])
def _square_and_transpose(
    w, qdata, scale, qdata_t, scale_t,
    N, K, stride_e, stride_n, stride_k, eps_bits,
    POW2: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, BOTH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    # BOTH: write the codes and their transpose. Otherwise, write the transpose alone.
    # A thread has 16 rows by 8 columns. It loads 16 bytes of a row, stores 8 bytes of a row, and stores 16 bytes of a
    # column. Neighbouring threads have neighbouring columns first, then neighbouring rows.
    ACROSS: tl.constexpr = 32 // LANES
    c, b, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n0, k0 = b.to(tl.int64) * 128, c.to(tl.int64) * 128
    thread, warp = tl.arange(0, ACROSS)[:, None, None, None], tl.arange(0, 16 // ACROSS)[None, None, :, None]
    k = (thread + warp * ACROSS)[:, :, :, :, None] * 8 + tl.arange(0, 8)  # (ACROSS, 1, 16 // ACROSS, 1, 8)
    thread, warp = tl.arange(0, LANES)[None, :, None, None], tl.arange(0, 8 // LANES)[None, None, None, :]
    n = (thread + warp * LANES)[:, :, :, :, None] * 16  # (1, LANES, 1, 8 // LANES, 1)
    inside = ((n0 + n < N) & (k0 + k < K)) | EVEN
    # WHOLE: N is a multiple of 16, so that a thread has all of its 16 rows or none.
    left = None if WHOLE else N - n0 - n
    if WIDE:  # the products with strides are above 2^31, also those in load16
        n, k, stride_n = n.to(tl.int64), k.to(tl.int64), tl.cast(stride_n, tl.int64)
    w += e * stride_e + n0 * stride_n + k0 * stride_k
    wide = widened(load16(w + (n * stride_n + k * stride_k), stride_n, inside, left))
    s, back = factors(tl.max(magnitude_bits(wide)), eps_bits, POW2)
    wide *= s
    if BOTH:
        store16(qdata + (e * N + n0) * K + k0 + (n * K + k), K, wide, inside, left)
    q = saturating_cast(wide, qdata_t.dtype.element_ty).reshape(ACROSS, LANES, 16 // ACROSS, 8 // LANES, 8, 16)
    row = tl.arange(0, 16)
    inside = inside[:, :, :, :, :, None] & ((n0 + n[:, :, :, :, :, None] + row < N) | WHOLE)
    tl.store(qdata_t + (e * K + k0) * N + n0 + ((k * N + n)[:, :, :, :, :, None] + row), q, mask=inside)
    if BOTH:
        tl.store(scale + (e * tl.num_programs(1) + b) * tl.num_programs(0) + c, back)
    tl.store(scale_t + (e * tl.num_programs(0) + c) * tl.num_programs(1) + b, back)


def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    def outputs(N: int, K: int) -> tuple[Tensor, Tensor]:
        blocks = (-(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE))
        return w.new_empty((*lead, N, K), dtype=torch.float8_e4m3fn), w.new_empty((*lead, *blocks), dtype=torch.float32)

    *lead, N, K = w.shape
    result: tuple[Tensor, ...] = outputs(N, K)
    if with_transpose:
        result += outputs(K, N)
    written = result
    turned = w.stride(-1) != 1 and w.stride(-2) == 1
    if turned:  # the tensor in memory is the transpose, so the two halves of the result change places
        w, N, K, written = w.mT, K, N, (*result[2:], *result[:2])
        if not with_transpose:
            written = (*result, *result)  # the kernel writes only the second half
    transposes = with_transpose or turned
    chosen = launch.for_device(CONFIGS, w.device)["with transpose" if transposes else "plain"]
    if w.numel():
        E, stride_e = (w.shape[0], w.stride(0)) if lead else (1, 0)
        row_blocks, col_blocks = -(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE)
        even = N % FP8_BLOCK_SIZE == 0 == K % FP8_BLOCK_SIZE
        wide = FP8_BLOCK_SIZE * max(*w.stride()[-2:], K, N * transposes) >= 2**31
        tail = {"TAIL": K % FP8_BLOCK_SIZE != 0}
        more = {"WHOLE": N % 16 == 0, "BOTH": with_transpose} if transposes else tail
        (_square_and_transpose if transposes else _square)[col_blocks, row_blocks, E](
            w, *written, N, K, stride_e, *w.stride()[-2:], fp32_bits(eps), scale_format == "pow2", even, wide, **chosen,
            **more, **launch.UNFUSED,
        )  # fmt: skip
    return result
