"""fp8_quantize_1x128: FP8 activations, one fp32 scale for 128 elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._fp8_numerics import SCALE_FORMATS, quantization_scale
from mxspec.reference._numerics import saturating_cast
from mxspec.spec import Case, Shapes, given, normal, per_element, random_bits, random_normal, spec, these

SCALE_MAJORS = ("k", "mn")


def check_args(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> None:
    op = "fp8_quantize_1x128"
    _checks.tensor_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.rank(op, "x", x, (2,))
    _checks.choice(op, "axis", axis, (-1, -2))
    _checks.choice(op, "scale_format", scale_format, SCALE_FORMATS)
    _checks.choice(op, "scale_major", scale_major, SCALE_MAJORS)
    _checks.eps(op, eps)
    _checks.multiple(op, "K" if axis == -1 else "M", x.shape[axis], FP8_BLOCK_SIZE)


def cases() -> Iterator[Case]:
    for dtype in _checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            name = f"random bit patterns, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, given(random_bits, 64, 256, dtype=dtype), {"scale_format": scale_format})
    for axis in (-1, -2):
        for major in SCALE_MAJORS:
            name = f"128x384, axis {axis}, {major}-major scale"
            yield Case(name, given(random_normal, 128, 384), {"axis": axis, "scale_major": major})
    for scale_format in SCALE_FORMATS:
        for dtype in _checks.FLOAT_DTYPES:
            options = {"axis": -2, "scale_format": scale_format, "scale_major": "mn"}
            name = f"axis -2, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, given(random_normal, 256, 96, dtype=dtype), options)
    yield Case("one row", given(random_normal, 1, 128), {"scale_major": "mn"})
    yield Case("ragged rows", given(random_normal, 77, 640))
    yield Case("ragged columns", given(random_normal, 256, 77), {"axis": -2}, flags={"edge"})
    for axis in (-1, -2):
        kw: dict[str, Any] = {"axis": axis, "scale_major": "mn"}
        yield Case(f"ragged against every tile, axis {axis}", given(random_normal, 384, 1408), kw)
        yield Case(f"transposed input, axis {axis}", lambda: (random_normal(128, 256).mT,), kw)
        yield Case(f"every second row, axis {axis}", lambda: (random_normal(256, 128)[::2],), {"axis": axis})
        yield Case(f"every second column, axis {axis}", lambda: (random_normal(128, 512)[:, ::2],), kw)
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048))
        yield Case(f"2^31 elements and more, axis {axis}, mn-major", large, kw, flags={"large"})
    yield Case("2^31 elements and more", large, flags={"large"})
    yield Case("odd K, axis -2", given(random_normal, 128, 333), {"axis": -2}, flags={"edge"})
    yield Case("larger eps", lambda: (random_normal(4, 128) * 2**-30,), {"eps": 1e-4})
    yield Case("zeros, bf16", given(torch.zeros, 2, 128, dtype=torch.bfloat16), flags={"edge"})
    yield Case("zeros, fp32", lambda: (-torch.zeros(2, 128),), {"scale_format": "pow2"}, flags={"edge"})
    yield Case("amax below eps", given(torch.full, (1, 128), 1e-13), flags={"edge"})
    yield Case("fp32 max", given(torch.full, (1, 128), torch.finfo().max), flags={"edge"})
    yield Case(
        "negated view", lambda: (torch.complex(normal(4, 128), normal(4, 128, seed=1)).conj().imag,), flags={"edge"}
    )
    for axis in (-1, -2):
        yield Case(f"no rows, axis {axis}", given(torch.zeros, 0, 256), {"axis": axis}, flags={"edge"})
        yield Case(f"no columns, axis {axis}", given(torch.zeros, 128, 0), {"axis": axis}, flags={"edge"})
    ok = torch.zeros(128, 128)
    refused: list[tuple[str, Tensor, dict[str, Any], type[Exception], str]] = [
        ("K = 100", torch.zeros(4, 100), {}, ValueError, "K = 100"),
        ("M = 100", torch.zeros(100, 4), {"axis": -2}, ValueError, "M = 100"),
        ("3-D", torch.zeros(1, 4, 128), {}, ValueError, "2-D"),
        ("float64", ok.double(), {}, TypeError, "float64"),
        ("unknown scale format", ok, {"scale_format": "ue8m0"}, ValueError, "'ue8m0'"),
        ("unknown major", ok, {"scale_major": "m"}, ValueError, "'m'"),
        ("eps 0", ok, {"eps": 0.0}, ValueError, "eps = 0.0"),
        ("eps whose factor overflows", ok, {"eps": 1e-36}, ValueError, "eps = 1e-36"),
        ("eps inf", ok, {"eps": float("inf")}, ValueError, "eps = inf"),
        ("eps as text", ok, {"eps": "1"}, TypeError, "eps = '1'"),
        ("sparse", torch.zeros(128, 128).to_sparse(), {}, ValueError, "torch.sparse_coo"),
    ]
    for name, x, options, error, match in refused:
        yield Case(name, these(x), options, raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for M, K in (shape for shape in shapes.matrices if shape[0] >= 128):
        x = given(torch.randn, M, K, dtype=torch.bfloat16)
        yield Case(f"{M}x{K}, axis -1, k-major", x)
        yield Case(f"{M}x{K}, axis -1, mn-major", x, {"scale_major": "mn"})  # what DeepGEMM and cuBLAS want
        if M % FP8_BLOCK_SIZE == 0:  # not for a few tokens, which only the forward pass has
            yield Case(f"{M}x{K}, axis -2, mn-major", x, {"axis": -2, "scale_major": "mn"})


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    peer_rules="blk",
    bench_cases=bench_cases,
)
def fp8_quantize_1x128(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3fn with one scale for 128 elements along `axis`.

    `s = 448 / max(amax, eps)` rounded once to fp32, `q = e4m3fn(clamp(fp32(x) * s, -448, 448))`, and the stored
    scale is the factor back, `fp32(1 / s)`.

    Args:
        x: `(M, K)`; bfloat16, float16 or float32; any strides.
        axis: -1 for 1x128 blocks (K a multiple of 128), -2 for 128x1 blocks (M a multiple of 128).
        scale_format: `fp32`, or `pow2`, where s is rounded down to a power of two.
        scale_major: the scale's strides: `k`, row-major; `mn`, column-major, as DeepGEMM wants them.
        eps: the smallest amax, 1e-35 to 1e35; rounded to fp32.

    Returns:
        `(qdata, scale)`. qdata: `(M, K)` float8_e4m3fn, row-major for axis -1, column-major (strides `(1, M)`)
        for axis -2. scale: float32, `(M, K/128)` for axis -1, `(K, M/128)`, that of the transpose, for axis -2.

    Special values: a block of zeros has elements 0 and scale 2.23214294e-15 (`eps / 448`); a NaN or an Inf makes
        its block's scale and elements NaN.

    Raises:
        TypeError: the dtype of x.
        ValueError: rank, axis, scale_format, scale_major, eps, or a size that is not a multiple of 128.

    Example:
        >>> x = torch.zeros(1, 128)
        >>> x[0, :2] = torch.tensor([896.0, -3.0])
        >>> qdata, scale = fp8_quantize_1x128(x)
        >>> qdata[0, :2].float().tolist(), scale.tolist()
        ([448.0, -1.5], [[2.0]])

    Source: DeepSeek-V3 technical report, section 3.3.2 (tile-wise 1x128); torchao, prototype/blockwise_fp8_training.
    """
    check_args(x, axis=axis, scale_format=scale_format, scale_major=scale_major, eps=eps)
    if axis == -2:
        x = x.mT  # from here the blocks lie along the last dimension
    x = x.contiguous().to(torch.float32)
    blocks = x.unflatten(-1, (x.shape[-1] // FP8_BLOCK_SIZE, FP8_BLOCK_SIZE))  # (M, K/128, 128)

    s = quantization_scale(blocks.abs().amax(-1), scale_format, eps)  # (M, K/128)
    qdata = saturating_cast(blocks * s.unsqueeze(-1), E4M3FN).flatten(-2)  # (M, K)

    scale = s.reciprocal()
    if scale_major == "mn":
        scale = scale.mT.contiguous().mT
    return qdata.mT if axis == -2 else qdata, scale
