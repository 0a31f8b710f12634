"""fp8_quantize_128x128: FP8 weights, one fp32 scale for a square of 128 x 128 elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import E4M3FN, FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._fp8_numerics import SCALE_FORMATS, quantization_scale
from mxspec.reference._numerics import saturating_cast
from mxspec.spec import Case, Shapes, given, per_element, random_bits, random_normal, spec, these


def check_args(w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False) -> None:
    op = "fp8_quantize_128x128"
    _checks.tensor_dtype(op, "w", w, _checks.FLOAT_DTYPES)
    _checks.rank(op, "w", w, (2, 3))
    _checks.choice(op, "scale_format", scale_format, SCALE_FORMATS)
    _checks.eps(op, eps)
    _checks.boolean(op, "with_transpose", with_transpose)
    _checks.multiple(op, "K", w.shape[-1], FP8_BLOCK_SIZE)


def cases() -> Iterator[Case]:
    for dtype in _checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            name = f"128x256, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, given(random_normal, 128, 256, dtype=dtype), {"scale_format": scale_format})
    for shape in [(1, 128), (127, 128), (129, 384), (300, 256), (2, 128, 128), (3, 130, 256)]:
        yield Case("x".join(map(str, shape)), given(random_normal, *shape))
    yield Case("experts, partial, pow2", given(random_normal, 2, 130, 256), {"scale_format": "pow2"})
    yield Case("larger eps", given(torch.full, (130, 128), 1e-6), {"eps": 1e-4})
    yield Case("random bit patterns", given(random_bits, 256, 256, dtype=torch.bfloat16), flags={"edge"})
    nan = torch.zeros(200, 256)
    nan[150, 200], nan[10, 10] = torch.nan, torch.inf
    yield Case("NaN and Inf in two of four blocks", these(nan), flags={"edge"})
    yield Case("zeros", given(torch.zeros, 130, 128), flags={"edge"})
    yield Case("no rows", given(torch.zeros, 0, 256), flags={"edge"})
    yield Case("no experts", given(torch.zeros, 0, 130, 128), flags={"edge"})
    with_transpose: dict[str, Any] = {"with_transpose": True}
    for dtype, scale_format in zip(_checks.FLOAT_DTYPES, (*SCALE_FORMATS, SCALE_FORMATS[0]), strict=True):
        name = f"with transpose, 256x384, {str(dtype)[6:]}, {scale_format}"
        kw = {**with_transpose, "scale_format": scale_format}
        yield Case(name, given(random_normal, 256, 384, dtype=dtype), kw)
    for shape in [(1, 128), (130, 256), (576, 128), (2, 128, 256), (3, 133, 128)]:
        flags = {"edge"} if shape[-2] % 16 else set()  # the rows of the transpose are not aligned to 16 bytes
        name = f"with transpose, {'x'.join(map(str, shape))}"
        yield Case(name, given(random_normal, *shape), with_transpose, flags=flags)
    for kw, prefix in ((with_transpose, "with transpose, "), ({}, "")):
        yield Case(f"{prefix}transposed input", lambda: (random_normal(256, 144).mT,), kw)
        yield Case(f"{prefix}every second column", lambda: (random_normal(130, 512)[:, ::2],), kw)
        large = these(random_normal(1, 2048).expand(2**20 + 130, 2048))
        yield Case(f"{prefix}2^31 elements and more", large, kw, flags={"large"})
    bits = given(random_bits, 200, 256, dtype=torch.bfloat16)
    yield Case("with transpose, random bit patterns", bits, with_transpose, flags={"edge"})
    yield Case("with transpose, NaN and Inf in two of four blocks", these(nan), with_transpose, flags={"edge"})
    yield Case("with transpose, no rows", given(torch.zeros, 0, 256), with_transpose, flags={"edge"})
    yield Case("with transpose, no experts", given(torch.zeros, 0, 130, 128), with_transpose, flags={"edge"})
    refused: list[tuple[str, Tensor, dict[str, Any], type[Exception], str]] = [
        ("K = 100", torch.zeros(128, 100), {}, ValueError, "K = 100"),
        ("1-D", torch.zeros(128), {}, ValueError, "2-D or 3-D"),
        ("int8", torch.zeros(128, 128, dtype=torch.int8), {}, TypeError, "int8"),
        ("unknown scale format", torch.zeros(128, 128), {"scale_format": "e8m0"}, ValueError, "'e8m0'"),
        ("with_transpose as text", torch.zeros(128, 128), {"with_transpose": "no"}, TypeError, "with_transpose = 'no'"),
        ("sparse", torch.zeros(128, 128).to_sparse(), {}, ValueError, "torch.sparse_coo"),
    ]
    for name, w, options, error, match in refused:
        yield Case(name, these(w), options, raises=error, match=match)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    for shape in (*dict.fromkeys((N, K) for _, N, K in shapes.linear), *shapes.experts):
        name, w = "x".join(map(str, shape)), given(torch.randn, *shape, dtype=torch.bfloat16)
        yield Case(name, w)
        if len(shape) == 2:
            yield Case(f"{name}, with transpose", w, {"with_transpose": True})


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    peer_rules="blk",
    bench_cases=bench_cases,
)
def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, ...]:
    """Quantize to e4m3fn with one scale for each 128x128 block.

    The arithmetic of `fp8_quantize_1x128`, with amax over a square. The square makes the transpose of the result
    the result of the transpose, so that one quantized weight serves the forward and the backward pass.

    Args:
        w: `(N, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides; K a multiple of 128. The last
            block along N may be partial: amax is over the rows that exist.
        scale_format: `fp32`, or `pow2`, where the factor `448 / amax` is rounded down to a power of two.
        eps: the smallest amax, as fp32.
        with_transpose: also give the transpose of both, which a kernel writes from the same read.

    Returns:
        `(qdata, scale)`, or `(qdata, scale, qdata_t, scale_t)`. qdata: w's shape, float8_e4m3fn, contiguous. scale:
        `(..., ceil(N/128), K/128)` float32, contiguous, the factor back. qdata_t: `(..., K, N)`, and scale_t:
        `(..., K/128, ceil(N/128))`, the same numbers transposed, contiguous.

    Special values: as for `fp8_quantize_1x128`: zeros give scale 2.23214294e-15, NaN or Inf a block of NaN.

    Raises:
        TypeError: the dtype of w, or with_transpose.
        ValueError: rank, scale_format, eps, or a K that is not a multiple of 128.

    Example:
        >>> w = torch.zeros(130, 128)
        >>> w[0, 0], w[129, 5] = 896.0, -224.0
        >>> qdata, scale = fp8_quantize_128x128(w)
        >>> qdata[[0, 129], [0, 5]].float().tolist(), scale.tolist()
        ([448.0, -448.0], [[2.0], [0.5]])
        >>> *_, qdata_t, scale_t = fp8_quantize_128x128(w, with_transpose=True)
        >>> qdata_t[[0, 5], [0, 129]].float().tolist(), scale_t.tolist()
        ([448.0, -448.0], [[2.0, 0.5]])

    Source: DeepSeek-V3 technical report, section 3.3.2 (block-wise 128x128).
    """
    check_args(w, scale_format=scale_format, eps=eps, with_transpose=with_transpose)
    *lead, N, K = w.shape
    row_blocks = -(-N // FP8_BLOCK_SIZE)
    padded = pad(w.to(torch.float32), (0, 0, 0, row_blocks * FP8_BLOCK_SIZE - N))  # zeros change no amax
    blocks = padded.reshape(*lead, row_blocks, FP8_BLOCK_SIZE, K // FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)

    s = quantization_scale(blocks.abs().amax((-3, -1)), scale_format, eps)  # (..., ceil(N/128), K/128)
    scaled = blocks * s.unsqueeze(-1).unsqueeze(-3)
    qdata = saturating_cast(scaled, E4M3FN).reshape(*lead, row_blocks * FP8_BLOCK_SIZE, K)[..., :N, :].contiguous()
    outputs: tuple[Tensor, ...] = qdata, s.reciprocal()
    if with_transpose:  # clones: outputs share no memory, also where contiguous() would make no copy
        outputs += tuple(t.mT.clone(memory_format=torch.contiguous_format) for t in outputs)
    return outputs
