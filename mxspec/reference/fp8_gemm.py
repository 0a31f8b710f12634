"""fp8_gemm: a matmul of FP8 operands that carry fp32 scales in blocks of 128."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._fp8_numerics import square_values, values
from mxspec.reference._numerics import round_once
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.fp8_quantize_128x128 import fp8_quantize_128x128
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.spec import Case, Shapes, normal, spec, these

# Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, so that kernels move it to fp32 every 128 of K:
# emulated, that is 78 dB, and 62 dB once it has changed the rounding of some outputs to bfloat16. Operands that are
# themselves rounded to bfloat16 give 50 dB, one of 4096 scales wrong by a factor of two 36 dB. The cases' values are of
# one size along K: where a few large ones make up every sum, those 14 bits are 68 dB, and a kernel has no part in it.
MIN_SQNR_DB = {torch.float32: 70.0, torch.bfloat16: 55.0}


def check_operands(op: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    operands = ("a", a), ("a_scale", a_scale), ("b", b), ("b_scale", b_scale)
    for (name, tensor), dtype in zip(operands, 2 * (torch.float8_e4m3fn, torch.float32), strict=True):
        _checks.tensor_dtype(op, name, tensor, (dtype,))
        _checks.rank(op, name, tensor, (2,))
        _checks.same_device(op, ("a", a), (name, tensor))
    (M, K), N = a.shape, b.shape[0]
    _checks.shape(op, "b", b, (N, K), f"for a {(M, K)}")
    _checks.multiple(op, "K", K, FP8_BLOCK_SIZE)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.stride(1) != 1 and K > 1:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; needs K-major rows, that is stride(1) = 1")
    C = K // FP8_BLOCK_SIZE
    _checks.shape(op, "a_scale", a_scale, (M, C), f"(1x128 blocks) for a {(M, K)}")
    square = (-(-N // FP8_BLOCK_SIZE), C)
    if tuple(b_scale.shape) != square:
        _checks.shape(op, "b_scale", b_scale, (N, C), f"(1x128 blocks) or {square} (128x128) for b {(N, K)}")


def check_args(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> None:
    check_operands("fp8_gemm", a, a_scale, b, b_scale)
    _checks.choice("fp8_gemm", "out_dtype", out_dtype, OUT_DTYPES, TypeError)


def codes(rows: int, K: int, seed: int = 0) -> Tensor:
    """Normal e4m3fn codes, none of them NaN."""
    return (normal(rows, K, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def scales(rows: int, cols: int, spread: int = 3, major: str = "k", seed: int = 1) -> Tensor:
    """Scales of any mantissa within 2^-spread .. 2^spread, K-major or MN-major."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint((127 - spread) << 23, (127 + spread) << 23, (rows, cols), generator=generator)  # of fp32
    values = bits.to(torch.int32).view(torch.float32)
    return values if major == "k" else values.t().contiguous().t()


def operands(M: int, N: int, K: int, rows: int = FP8_BLOCK_SIZE, spread: int = 3, major: str = "k") -> Any:
    """The four of a call; `rows` is how many rows of b share a scale: 128 or 1."""
    C = K // FP8_BLOCK_SIZE
    a_scale = scales(M, C, spread, major)
    return codes(M, K), a_scale, codes(N, K, seed=2), scales(-(-N // rows), C, spread, major, seed=3)


# What leaves fp32's range, in one block of each operand.
OUT_OF_RANGE = {
    "an Inf scale": torch.inf,
    "a scale of -Inf": -torch.inf,
    "the largest scale": torch.finfo().max,
    "a product of scales past fp32": 2.0**70,
}


def as_quantized() -> Any:
    a, a_scale, b, _ = operands(132, 272, 1024, major="mn")
    return a, a_scale, b, scales(3, 8, seed=3)


def refused() -> Iterator[tuple[str, tuple[Tensor, ...], type[Exception], str]]:
    """Operands that no matmul of these takes."""
    a, a_scale, b, b_scale = operands(6, 200, 256)
    yield "fp16 codes", (a.half(), a_scale, b, b_scale), TypeError, "a has dtype torch.float16; needs torch.float8"
    yield "e5m2 codes", (a, a_scale, b.view(torch.float8_e5m2), b_scale), TypeError, "b has dtype torch.float8_e5m2"
    yield "bf16 scale", (a, a_scale.bfloat16(), b, b_scale), TypeError, "a_scale has dtype torch.bfloat16"
    yield "b not K-major", (a, a_scale, b.t().contiguous().t(), b_scale), ValueError, "b has strides (1, 200); needs"
    yield "a not K-major", (a.t().contiguous().t(), a_scale, b, b_scale), ValueError, "a has strides (1, 6); needs"
    yield "K = 200", (a[:, :200], a_scale, b[:, :200], b_scale), ValueError, "K = 200"
    yield "another K", (a, a_scale, b[:, :128], b_scale), ValueError, "b has shape (200, 128); needs (200, 256)"
    yield "a_scale of 128x128", (a, a_scale[:1], b, b_scale), ValueError, "needs (6, 2) (1x128 blocks)"
    yield "b_scale of neither", (a, a_scale, b, b_scale[:1]), ValueError, "needs (200, 2) (1x128 blocks) or (2, 2)"
    yield "mixed devices", (a, a_scale, b, b_scale.to("meta")), ValueError, "needs one device"


def cases() -> Iterator[Case]:
    for out_dtype in OUT_DTYPES:
        for rows, name in ((128, "1x128 by 128x128"), (1, "1x128 by 1x128")):
            for major in ("k", "mn"):
                for M, N, K in [(64, 128, 256), (300, 264, 384)]:
                    made = partial(operands, M, N, K, rows, major=major)
                    named = f"{M}x{N}x{K}, {name}, {major}-major scales, {str(out_dtype)[6:]}"
                    yield Case(named, made, {"out_dtype": out_dtype})
    for out_dtype in OUT_DTYPES:  # as `fp8_quantize_1x128(..., scale_major="mn")` and `fp8_quantize_128x128` give them
        yield Case(f"as quantized, {str(out_dtype)[6:]}", as_quantized, {"out_dtype": out_dtype})
    yield Case("K = 128", partial(operands, 128, 256, 128), flags={"edge"})
    yield Case("one row", partial(operands, 1, 256, 640), flags={"edge"})
    yield Case("one row, MN-major", partial(operands, 1, 256, 640, 1, major="mn"), flags={"edge"})
    yield Case("one column", partial(operands, 64, 1, 256), flags={"edge"})
    yield Case("few rows and a long K", partial(operands, 16, 136, 4096, major="mn"))
    yield Case("64 rows and a long K", partial(operands, 64, 128, 4096), {"out_dtype": torch.float32})
    yield Case("100 rows and a long K", partial(operands, 100, 128, 4096, 1))
    yield Case("ragged against every tile", partial(operands, 257, 131, 256), {"out_dtype": torch.float32})
    yield Case("scales of 2^-40 to 2^40", partial(operands, 64, 256, 512, spread=40), flags={"edge"})
    yield Case("scales of 2^-40 to 2^40, 1x128", partial(operands, 64, 256, 512, 1, spread=40), flags={"edge"})
    a, a_scale, b, b_scale = operands(64, 256, 384)
    zero, nan = a.clone(), a_scale.clone()
    zero[3, 128:256], nan[5, 1] = 0, torch.nan
    yield Case("a block of zeros", these(zero, a_scale, b, b_scale), flags={"edge"})
    yield Case("a scale of 0", these(a, 0 * a_scale, b, b_scale), flags={"edge"})
    yield Case("a NaN scale: its row", these(a, nan, b, b_scale), flags={"edge"})
    nan = b_scale.clone()
    nan[1, 2] = torch.nan
    yield Case("a NaN scale: its 128 columns", these(a, a_scale, b, nan), flags={"edge"})
    for name, value in OUT_OF_RANGE.items():
        for of_b in (False, True):
            given = [a, a_scale.clone(), b, b_scale.clone()]
            given[3 if of_b else 1][1, 2] = value
            if name == "a product of scales past fp32":
                given[1 if of_b else 3][:, 2] = value
            yield Case(f"{name}, in {'b' if of_b else 'a'}_scale", these(*given), flags={"edge"})
    yield Case("sums past fp32", these(a, a_scale * 2.0**100, b, b_scale * 2.0**24), flags={"edge"})
    yield Case("no rows", these(a[:0], a_scale[:0], b, b_scale), flags={"edge"})
    yield Case("no columns", these(a, a_scale, b[:0], b_scale[:0]), flags={"edge"})
    yield Case("K = 0: sums of nothing", these(a[:, :0], a_scale[:, :0], b[:, :0], b_scale[:, :0]), flags={"edge"})
    for name, args, error, match in refused():
        yield Case(name, these(*args), raises=error, match=match)
    fp16 = {"out_dtype": torch.float16}
    yield Case("fp16 out", these(a, a_scale, b, b_scale), fp16, raises=TypeError, match="out_dtype = torch.float16")


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The matmul in fp64."""
    of_rows = b_scale.shape[0] == b.shape[0]
    w = values(b, b_scale) if of_rows else square_values(b, b_scale)  # (N, K)
    return values(a, a_scale) @ w.t()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def bf16(rows: int, K: int) -> Tensor:
        return torch.randn(rows, K, dtype=torch.bfloat16)

    def forward(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        return *fp8_quantize_1x128(bf16(M, K), scale_major="mn"), *fp8_quantize_128x128(bf16(N, K))

    def wgrad(M: int, N: int, K: int) -> tuple[Tensor, ...]:
        quantize = partial(fp8_quantize_1x128, scale_major="mn")
        return *quantize(bf16(M, K)), *quantize(bf16(N, K))

    for M, N, K in shapes.linear:
        yield Case(f"{M}x{N}x{K}", partial(forward, M, N, K))
    for M, N, K in shapes.wgrad:
        yield Case(f"{M}x{N}x{K}, 1x128 by 1x128, fp32", partial(wgrad, M, N, K), {"out_dtype": torch.float32})


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[0] * args[0].shape[1],
    bench_cases=bench_cases,
)
def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply FP8 matrices with scales in blocks of 128.

    `out[m, n] = out_dtype(sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n', k // 128])`, where n' is
    `n // 128` for 128x128 blocks (forward, dgrad) and n for 1x128 blocks (wgrad): the granularity of b is read from
    the shape of its scale. Where both shapes are the same (one row) both mean the same.

    Args:
        a: `(M, K)` float8_e4m3fn, K-major: `stride(1) = 1`; K a multiple of 128. M and N are free.
        a_scale: `(M, K/128)` float32, 1x128 blocks; any strides. Kernels are fastest on MN-major scales, strides
            `(1, M)` with M a multiple of 4, as `fp8_quantize_1x128(..., scale_major="mn")` gives them.
        b: `(N, K)` float8_e4m3fn, K-major.
        b_scale: float32, any strides: `(ceil(N/128), K/128)` for 128x128 blocks, `(N, K/128)` for 1x128.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        `(M, N)` of out_dtype, contiguous. Products and sums are fp64 and are rounded once, so that the result depends
        on no order of sums. A kernel sums in fp32 and is judged by its SQNR: 70 dB for fp32, 55 dB for bfloat16; it
        gives the same bits at every call.

    Special values: a NaN code or scale makes its whole row or column of the output NaN, or for a 128x128 scale 128
        columns; with K = 0 the output is 0. An Inf scale makes outputs that are not finite: Inf of either sign or NaN,
        which of them is not specified, since a kernel scales a block's sum and the reference each product. A kernel
        multiplies the two scales of a block in fp32, and sums in fp32. So a product of two scales must be a normal
        number of fp32, or 0, and where the magnitudes of an output's products add up to 2^127 or more, its sum or
        anything that is not finite is right.

    Raises:
        TypeError: the dtype of an operand or of a scale, or out_dtype.
        ValueError: rank, K, an operand that is not K-major, scales whose shape fits no granularity, or two devices.

    Example:
        >>> a = torch.full((1, 256), 1.5).to(torch.float8_e4m3fn)
        >>> b = torch.full((2, 256), 2.0).to(torch.float8_e4m3fn)
        >>> a_scale = torch.tensor([[0.5, 1.0]])  # 128 * 3 * (0.5 + 1) * 1
        >>> fp8_gemm(a, a_scale, b, torch.ones(1, 2)).tolist()
        [[576.0, 576.0]]
        >>> fp8_gemm(a, a_scale, b, torch.tensor([[1.0, 1.0], [0.0, 2.0]])).tolist()  # a scale for each row of b
        [[576.0, 768.0]]

    Source: DeepSeek-V3 technical report, section 3.3.2.
    """
    check_args(a, a_scale, b, b_scale, out_dtype=out_dtype)
    return round_once(product(a, a_scale, b, b_scale), out_dtype)
