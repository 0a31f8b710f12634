"""FlashInfer's NVFP4 quantizer, as an interval: its reciprocals are approximate, so its last bits depend on the GPU.

This is the CUDA kernel of `fp4_quantize` for bfloat16 and float16 with one global scale, as FlashInfer builds it by
default. Four other kernels have other rules: the one that FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH chooses, which divides
as TransformerEngine does, the one of FLASHINFER_NVFP4_4OVER6, the one with a scale for each row, and the one in CuTe
DSL. The source was read at fb28d72 (August 2026). Nothing here was run on a GPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE, NVFP4_LARGEST
from mxspec.reference.common import checks
from mxspec.reference.common.numerics import unpacked
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.nvfp4_quantize import check_call
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.rules import _nvfp4

NAME = "FlashInfer"
RECORDED: dict[str, dict[str, dict[str, str]]] = {}
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LOW, _HIGH = 0, 1


def nvfp4_scales(
    x: Tensor, tensor_amax: Tensor | None = None, *, axis: int = -1, scale_layout: str = "plain"
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest scale that FlashInfer may write for each block of 16.

    FlashInfer computes `fl(G * fl(b * r(6)))`, where b is the largest magnitude of a block and r is the instruction
    `rcp.approx.ftz.f32`. Its result is within one unit in the last place of the reciprocal. A subnormal number counts
    as 0, before and after each operation. The caller gives G. FlashInfer's tests write `2688.0 / A`. torch computes
    this as `fl(fl(1/A) * 2688)`. A matrix of zeros has G = Inf, and scales of NaN. If b / 6 may be flushed beside a G
    of Inf, the scale is NaN or 448. The first tensor then has the NaN.

    Args:
        x: `(M, K)` or `(E, N, K)`, bfloat16 or float16, any strides; the size along axis is a multiple of 16.
        tensor_amax: fp32, of no dimension or `(E,)`: A, the largest magnitude of each matrix. None reads it from x.
        axis: the dimension of a block, -1 or -2.
        scale_layout: `plain` or `blocked`.

    Returns:
        Two tensors of the shape and dtype of the scale of `nvfp4_quantize`. Where they are equal, the byte is certain.

    Raises:
        TypeError: x is not bfloat16 or float16, or tensor_amax is not float32.
        ValueError: x or tensor_amax has an Inf or a NaN, or a shape that `nvfp4_quantize` refuses; axis or scale_layout
            has another value; the tensors are on two devices, or have no values.

    Example:
        >>> from mxspec import rules
        >>> x = torch.full((1, 16), 0.006317138671875, dtype=torch.bfloat16)
        >>> [scale.view(torch.uint8).item() for scale in rules.flashinfer.nvfp4_scales(x, torch.tensor(1.078125))]
        [66, 67]

    Source: FlashInfer, csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh (`cvt_warp_fp16_to_fp4`), fb28d72;
        PTX ISA 9.0, `rcp` (the error of one unit in the last place).
    """
    _check("nvfp4_scales", x, tensor_amax, axis, scale_layout)
    low, high = (_quantized(x, tensor_amax, axis, scale_layout, end)[1] for end in (_LOW, _HIGH))
    return low, high


def nvfp4_allows(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    tensor_amax: Tensor | None = None,
    *,
    axis: int = -1,
    scale_layout: str = "plain",
) -> Tensor:
    """Whether FlashInfer may have written these codes and this scale, for each block of 16.

    The scale must be one of `nvfp4_scales`. Under a scale s a code is `x * r(fl(s * r(G)))`, rounded to the nearest
    even; in a block of zeros it is `x * 0`. Under a scale of 0 the factor is Inf: a number becomes 6 with its sign, and
    0 becomes 6, because the conversion of a NaN gives 6. Near the ties of e2m1, exact rules give other codes: of normal
    numbers in bfloat16, those of `nvfp4_quantize` differ in about one block of a thousand.

    Args:
        x, tensor_amax, axis: as for `nvfp4_scales`.
        qdata, scale: the outputs to judge, of the shapes and dtypes that `nvfp4_quantize` gives, or uint8. FlashInfer
            returns swizzled scales in two dimensions; flatten them.
        scale_layout: the layout of scale, `plain` or `blocked`.

    Returns:
        bool, `(M, K/16)` or `(E, N, K/16)`; along axis -2 `(K, M/16)` or `(E, K, N/16)`, as the plain scale.

    Raises:
        TypeError: qdata or scale has another dtype; and as for `nvfp4_scales`.
        ValueError: qdata or scale has another shape or is on another device; and as for `nvfp4_scales`.

    Example:
        >>> from mxspec import nvfp4_quantize, rules
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 64, dtype=torch.bfloat16)
        >>> qdata, scale, _ = nvfp4_quantize(x)
        >>> rules.flashinfer.nvfp4_allows(x, qdata, scale).all().item()
        True

    Source: as for `nvfp4_scales`; PTX ISA 9.0, `cvt` (NaN to e2m1).
    """
    op = "nvfp4_allows"
    _check(op, x, tensor_amax, axis, scale_layout)
    checks.tensor_dtype(op, "qdata", qdata, (torch.float4_e2m1fn_x2, torch.uint8))
    checks.tensor_dtype(op, "scale", scale, (torch.float8_e4m3fn, torch.uint8))
    checks.same_device(op, ("x", x), ("qdata", qdata))
    checks.same_device(op, ("x", x), ("scale", scale))
    lead, (R, C) = x.shape[:-2], x.mT.shape[-2:] if axis == -2 else x.shape[-2:]
    columns = C // NVFP4_BLOCK_SIZE
    if scale_layout == "blocked":
        checks.shape(op, "scale", scale, (*lead, blocked_bytes(R, columns)), "tiles of 128x4 scales")
        scale = from_blocked(scale, R, columns)
    checks.shape(op, "scale", scale, (*lead, R, columns), "a scale for each 16 elements")
    checks.shape(op, "qdata", qdata, (*lead, C // 2, R) if axis == -2 else (*lead, R, C // 2), "two codes in a byte")

    low, high = (_quantized(x, tensor_amax, axis, "plain", end)[1].view(torch.uint8) for end in (_LOW, _HIGH))
    byte = scale.view(torch.uint8)
    # Positive e4m3fn numbers have the order of their bytes. Only one end may be NaN.
    right = ((low <= byte) & (byte <= high)) | (byte == low) | (byte == high)
    s = torch.where(right, byte, low).view(torch.float8_e4m3fn).float()
    ends = [_quantized(x, tensor_amax, axis, "plain", end, s)[0] for end in (_LOW, _HIGH)]
    stored = (t.mT if axis == -2 else t for t in (*ends, qdata))
    smallest, largest, code = (unpacked(t, E2M1).unflatten(-1, (-1, NVFP4_BLOCK_SIZE)) for t in stored)
    between = (smallest & 7 <= code & 7) & (code & 7 <= largest & 7) & (code >> 3 == smallest >> 3)
    # A zero keeps its sign, or it becomes 6 where the factor may be Inf.
    zero = _flushed((x.mT if axis == -2 else x).float()).unflatten(-1, (-1, NVFP4_BLOCK_SIZE)) == 0
    return right & torch.where(zero, (code == smallest) | (code == largest), between).all(-1)


def _check(op: str, x: Tensor, tensor_amax: Tensor | None, axis: int, scale_layout: str) -> None:
    checks.tensor_dtype(op, "x", x, (torch.bfloat16, torch.float16))
    check_call(op, x, tensor_amax, axis, "1x16", scale_layout)
    _nvfp4.needs_values(op, x, NAME)
    if not all(t is None or t.isfinite().all() for t in (x, tensor_amax)):
        raise ValueError(f"{op}: {NAME} has no stated result for an Inf or a NaN; needs finite numbers")


def _quantized(
    x: Tensor, tensor_amax: Tensor | None, axis: int, scale_layout: str, end: int, s: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales at one end of the interval. With a scale s, the codes are those under s."""
    rule = functools.partial(_nvfp4_rule, end=end, given=s)
    return _nvfp4.quantize(x, tensor_amax, axis, "1x16", scale_layout, rule, NAME, nan_as=E2M1.max)


def _nvfp4_rule(
    blocks: Tensor, b: Tensor, A: Tensor, *, end: int, given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    G, b = A.float().reciprocal() * NVFP4_LARGEST, _flushed(b.float())
    s = _product(G, _product(b, _reciprocal(torch.full_like(G, E2M1.max), end), end), end)
    stored = _nvfp4.rounded_scale(s) if given is None else given
    other = _HIGH if end == _LOW else _LOW  # a smaller factor needs a larger divisor
    factor = torch.where(b == 0, 0.0, _reciprocal(_product(stored, _reciprocal(G, other), other), end))
    return _product(_flushed(blocks.float()), factor.unsqueeze(-1), end), s, _reciprocal(G, end)


def _flushed(x: Tensor) -> Tensor:
    """x, with 0 of the same sign in place of a subnormal number: FlashInfer compiles with `-use_fast_math`."""
    return torch.where(x.abs() < _SMALLEST_NORMAL, x * 0.0, x)


def _product(x: Tensor, y: Tensor, end: int) -> Tensor:
    """The rounded product. A GPU may flush it before it rounds, as the low end does, or after, as the high end does."""
    exact = x.double() * y.double()
    return torch.where((exact if end == _LOW else exact.float()).abs() < _SMALLEST_NORMAL, x * y * 0.0, exact.float())


def _reciprocal(x: Tensor, end: int) -> Tensor:
    """The smallest or the largest fp32 number within one unit in the last place of 1/x, for an x of at least 0."""
    exact = _flushed(x).double().reciprocal()
    unit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 24)
    bound = torch.where(exact.isfinite() & (exact > 0), exact - unit if end == _LOW else exact + unit, exact)
    rounded = bound.float()
    outside = rounded.double() < bound if end == _LOW else rounded.double() > bound
    step = torch.nextafter(rounded, torch.full_like(rounded, torch.inf if end == _LOW else -torch.inf))
    return _flushed(torch.where(outside, step, rounded))
