"""bfloat16 by MXFP4 weights in plain Triton: the weights are read as 4 bits and become bf16 in registers.

The weights are the first operand of the tensor cores, which read it from registers. So their values never pass through
shared memory. With few tokens the memory of the GPU sets the limit, and then the number of instructions for a weight. A
byte holds two codes, and becomes two bf16 numbers in one register:

- A multiplication copies the bits of both codes to the places of bf16's exponent and mantissa, another one the signs.
  Read as bf16, the code is now its value times 2^-126, also if it is subnormal: see `_pairs`.
- One product with the scale makes it the weight, times 2^-4. The factor 2^-4 lets both the smallest weight, 0.5 times
  2^-127, and the largest, 6 times 2^127, be bf16 numbers. The sums are multiplied by 2^4.

The factor of this one product is a bf16 number up to the scale byte 132, a scale of 32. Weights have smaller scales.
For a larger scale the factor is Inf, so the sums are not finite, and the program computes them again with two products
for a weight. Those are exact for every byte. Byte 255 gives NaN there.

So every weight is exactly its value, and a sum is taken over steps of 16 columns of K in ascending order, as
`hopper/nvfp4/gemm.py` does it. The bits of a row depend neither on the number of rows nor on the tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mxspec.triton_kernels.common.launch import FUSED, for_device
from mxspec.triton_kernels.hopper.plan import plan_of

# By the largest number of rows of a. On Blackwell no GPU has run these tiles.
_HOPPER = {
    16: {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4},
    32: {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4},
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    128: {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}
_BY_POINTERS = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
UNSHIFT = 16.0
DECODED = tl.constexpr(
    "{ .reg .b32 t, s; mul.lo.u32 t, $2, 0x40040; mul.lo.u32 s, $2, 0x1001000; and.b32 s, s, 0x80008000;"
    " lop3.b32 t, t, 0x01C001C0, s, 0xEA; mul.rn.bf16x2 t, t, $3; mov.b32 {$0, $1}, t; }"
)
DECODED_TWICE = tl.constexpr(
    "{ .reg .b32 t, s; mul.lo.u32 t, $2, 0x40040; mul.lo.u32 s, $2, 0x1001000; and.b32 s, s, 0x80008000;"
    " lop3.b32 t, t, 0x01C001C0, s, 0xEA; mov.b32 s, 0x7E807E80; mul.rn.bf16x2 t, t, s; mul.rn.bf16x2 t, t, $3;"
    " mov.b32 {$0, $1}, t; }"
)


@triton.jit
def _half(bits, factor, TWICE: tl.constexpr):
    """The bf16 number in the upper half of int32, times the factor in the upper half of another."""
    value = (bits & -0x10000).to(tl.float32, bitcast=True)
    if TWICE:
        value *= 8.507059173023462e37  # 2^126
    return (value * (factor & -0x10000).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def _pairs(byte, factor, TWICE: tl.constexpr, ASM: tl.constexpr):
    """Both weights of bytes, int32. `factor` has the factor of both in its halves, as bf16.

    The three low bits of a code, two of exponent and one of mantissa, become the bits 8 to 6 of a bf16. Its value is
    the code's value times 2^-126: for an exponent of 0, both are subnormal. TWICE first multiplies by 2^126.
    """
    if ASM:
        text: tl.constexpr = DECODED_TWICE if TWICE else DECODED
        return tl.inline_asm_elementwise(
            text, "=h,=h,r,r", [byte, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    else:
        bits = (byte * 0x40040 & 0x01C001C0) | ((byte << 24 | (byte & 15) << 12) & -0x7FFF8000)
        return _half(bits << 16, factor, TWICE), _half(bits, factor, TWICE)


@triton.jit
def _factor(byte, TWICE: tl.constexpr):
    """The factor of a scale byte, in both halves: 2^(byte - 131) if TWICE, else 2^(byte - 5), or Inf from 133 on."""
    if TWICE:
        bits = tl.where(byte < 5, 4 << byte, (byte - 4) << 7)  # up to 2^-127 it is subnormal
        return tl.where(byte == 255, 0x7FC0, bits) * 0x10001
    else:
        return tl.minimum(byte, 133) * 0x800080 + 0x3D003D00  # 122 is in the exponent fields


@triton.jit
def _plus_step(
    acc, first, x, x_stride, w, w_stride, scale, scale_stride_c, top, left, M, N, K,
    WHOLE: tl.constexpr, TWICE: tl.constexpr, ASM: tl.constexpr, DESCRIBED: tl.constexpr, BLOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the products of BLOCK_K columns. WHOLE: none of them is past K. Without masks along K, loads are wide."""
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    in_m, in_n = (m < M)[:, None], (n < N)[:, None]
    k, pair, c = first + tl.arange(0, BLOCK_K), first // 2 + tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
    if DESCRIBED:
        tokens, codes = x.load([top, first]), w.load([left, first // 2])
    else:
        in_x = in_m & (k >= 0)[None, :] if WHOLE else in_m & (k < K)[None, :]
        in_w = in_n & (pair >= 0)[None, :] if WHOLE else in_n & (pair < K // 2)[None, :]
        tokens = tl.load(x + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=in_x, other=0.0)
        codes = tl.load(w + n.to(tl.int64)[:, None] * w_stride + pair[None, :], mask=in_w, other=0)
    if BLOCKED:
        scale += first // 128 * 512 + first % 128 // 32
        offset = c // 4 * 512 + c % 4
    else:
        scale += tl.cast(first // 32, tl.int64) * scale_stride_c
        offset = c.to(tl.int64) * scale_stride_c
    in_scale = in_n & (c >= 0)[None, :] if WHOLE else in_n & (first // 32 + c < K // 32)[None, :]
    byte = tl.load(scale[:, None] + offset[None, :], mask=in_scale, other=0).to(tl.int32)
    factor = tl.broadcast_to(_factor(byte, TWICE)[:, :, None], (BLOCK_N, BLOCK_K // 32, 16))
    even, odd = _pairs(codes.to(tl.int32), factor.reshape(BLOCK_N, BLOCK_K // 2), TWICE, ASM)
    values = tl.join(even, odd).reshape(BLOCK_N, BLOCK_K)
    return tl.dot(values, tokens.T, acc)


@triton.jit
def _sums(
    x, x_stride, w, w_stride, scale, scale_stride_c, top, left, M, N, K,
    TAIL: tl.constexpr, TWICE: tl.constexpr, ASM: tl.constexpr, DESCRIBED: tl.constexpr, BLOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of a tile, `(BLOCK_N, BLOCK_M)`. `scale` are pointers to the first scales of its rows of w."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    whole = K // BLOCK_K * BLOCK_K
    for first in tl.range(0, whole, BLOCK_K, num_stages=STAGES):
        acc = _plus_step(
            acc, first, x, x_stride, w, w_stride, scale, scale_stride_c, top, left, M, N, K,
            True, TWICE, ASM, DESCRIBED, BLOCKED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if TAIL:
        acc = _plus_step(
            acc, whole, x, x_stride, w, w_stride, scale, scale_stride_c, top, left, M, N, K,
            False, TWICE, ASM, DESCRIBED, BLOCKED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit
def _is_finite(x, ASM: tl.constexpr):
    """In assembly, as floats. ptxas takes the bits of these sums, read as an integer, for those of the initial zero."""
    if ASM:
        text: tl.constexpr = (
            "{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, 0f7F800000; selp.b32 $0, 1, 0, p; }"
        )
        return tl.inline_asm_elementwise(text, "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (tl.abs(x) < float("inf")).to(tl.int32)


@triton.jit
def _mx_weights(
    x, x_stride, w, w_stride_e, w_stride, scale, scale_stride_e, scale_stride_r, scale_stride_c, out, out_stride,
    plan, M, N, K,
    UP: tl.constexpr, TAIL: tl.constexpr, ASM: tl.constexpr, DESCRIBED: tl.constexpr, BLOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(N, BLOCK_N)
    tile, left = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles * BLOCK_N
    top = tile * BLOCK_M
    if plan is not None:  # M becomes the end of a group's tokens. Tokens of no group get sums of nothing
        group = tl.load(plan + 4 * tile)
        top, M = tl.load(plan + 4 * tile + 1), tl.load(plan + 4 * tile + 2)
        if top >= M:
            return
        expert = tl.maximum(group, 0).to(tl.int64)
        w, scale = w + expert * w_stride_e, scale + expert * scale_stride_e
        K = tl.where(group < 0, 0, K)
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    if BLOCKED:  # scale_stride_r is the stride of a row of tiles
        scale += (n // 128).to(tl.int64) * scale_stride_r + (n % 32 * 16 + n % 128 // 32 * 4)
    else:
        scale += n.to(tl.int64) * scale_stride_r
    acc = _sums(
        x, x_stride, w, w_stride, scale, scale_stride_c, top, left, M, N, K,
        TAIL, False, ASM, DESCRIBED, BLOCKED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    is_finite = _is_finite(acc, ASM)
    if tl.min(tl.min(is_finite, 1), 0) == 0:
        again = _sums(
            x, x_stride, w, w_stride, scale, scale_stride_c, top, left, M, N, K,
            TAIL, True, ASM, DESCRIBED, BLOCKED, BLOCK_M, BLOCK_N, BLOCK_K, 1,
        )  # fmt: skip
        acc = tl.where(is_finite != 0, acc, again)
    at = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(at, (acc * UP).to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def config_for(M: int, device: torch.device) -> dict[str, Any]:
    """The tile for a number of rows."""
    configs = for_device(CONFIGS, device)
    return configs[min((rows for rows in configs if rows >= M), default=max(configs))]


def _described(t: Tensor) -> bool:
    """Whether TMA reads a matrix: its rows begin at multiples of 16 bytes, and do not share memory."""
    step = t.stride(0) * t.element_size()
    return t.data_ptr() % 16 == 0 and step % 16 == 0 and t.stride(0) >= t.shape[1]


def mx_weights(
    x: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, scale_layout: str, up: float = 1.0,
    *, offs: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Multiply x, `(M, K)` bfloat16, by e2m1 codes `(N, K/2)` with their scales, and by `up`, into `out`, contiguous.

    With `offs`, the codes are those of experts, `(E, N, K/2)`. K is not 0. `options` override fields of the tile.
    Returns the compiled kernel.
    """
    (M, K), N, blocked = x.shape, b.shape[-2], scale_layout == "blocked"
    codes = b.view(torch.uint8)
    described = offs is None and _described(x) and _described(codes)
    # Without TMA, pointers take registers. So few tokens and few columns of K are loaded at a time.
    config = {**config_for(M, x.device), **({} if described else _BY_POINTERS), **options}
    tile = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    x_at: Any = x
    w_at: Any = codes
    if described:
        x_at = TensorDescriptor(x, [M, K], [x.stride(0), 1], [tile[0], tile[2]])
        w_at = TensorDescriptor(codes, [N, K // 2], [codes.stride(0), 1], [tile[1], tile[2] // 2])
    of_b = (512 * -(-K // 128), 1) if blocked else b_scale.stride()[-2:]
    plan, of_experts = (None, (0, 0)) if offs is None else (plan_of(offs, M, tile[0]), (b.stride(0), b_scale.stride(0)))
    tiles = -(-M // tile[0]) if plan is None else plan.shape[0]
    return _mx_weights[(-(-N // tile[1]) * tiles,)](
        x_at, x.stride(0), w_at, of_experts[0], codes.stride(-2), b_scale.view(torch.uint8), of_experts[1], *of_b,
        out, N, plan, M, N, K,
        UP=up * UNSHIFT, TAIL=K % tile[2] != 0, ASM=x.device.type != "cpu", DESCRIBED=described, BLOCKED=blocked,
        BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2], STAGES=config["num_stages"],
        num_warps=config["num_warps"], num_stages=config["num_stages"], **FUSED,
    )  # fmt: skip
