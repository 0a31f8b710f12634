"""FlashInfer's NVFP4 quantizer, as an interval: its reciprocals are approximate, so its last bits depend on the GPU.

The source was read at fb28d72 (August 2026). Nothing here was run on a GPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE, NVFP4_LARGEST
from mxspec.reference.common import checks
from mxspec.reference.common.numerics import unpacked
from mxspec.reference.from_blocked import from_blocked
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
    this as `fl(fl(1/A) * 2688)`.

    Args:
        x: `(M, K)` or `(E, N, K)`, bfloat16 or float16, any strides; the size along axis is a multiple of 16.
        tensor_amax: fp32, of no dimension or `(E,)`: A, the largest magnitude of each matrix. None reads it from x.
        axis: the dimension of a block, -1 or -2.
        scale_layout: `plain` or `blocked`.

    Returns:
        Two tensors of the shape and dtype of the scale of `nvfp4_quantize`. Where they are equal, the byte is certain.

    Raises:
        NotImplementedError: x is float32, which FlashInfer does not take.
        ValueError: x or tensor_amax has an Inf or a NaN; and as for `nvfp4_quantize`.
        TypeError: as for `nvfp4_quantize`.

    Example:
        >>> from mxspec import rules
        >>> x = torch.full((1, 16), 0.006317138671875, dtype=torch.bfloat16)
        >>> [scale.view(torch.uint8).item() for scale in rules.flashinfer.nvfp4_scales(x, torch.tensor(1.078125))]
        [66, 67]

    Source: FlashInfer, csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh (`cvt_warp_fp16_to_fp4`), fb28d72;
        PTX ISA 9.0, `rcp` (the error of one unit in the last place).
    """
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
    0 becomes 6, because the conversion of a NaN gives 6.

    Args:
        x, tensor_amax, axis: as for `nvfp4_scales`.
        qdata, scale: the outputs to judge; of the shapes and dtypes that `nvfp4_quantize` gives. uint8 is taken too.
        scale_layout: the layout of scale, `plain` or `blocked`.

    Returns:
        bool, `(M, K/16)` or `(E, N, K/16)`; along axis -2 `(K, M/16)` or `(E, K, N/16)`, as the plain scale.

    Raises:
        ValueError: qdata or scale has another shape; and as for `nvfp4_scales`.
        TypeError, NotImplementedError: as for `nvfp4_scales`.

    Example:
        >>> from mxspec import nvfp4_quantize, rules
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 64, dtype=torch.bfloat16)
        >>> qdata, scale, _ = nvfp4_quantize(x)
        >>> rules.flashinfer.nvfp4_allows(x, qdata, scale).all().item()
        True

    Source: as for `nvfp4_scales`; PTX ISA 9.0, `cvt` (NaN to e2m1).
    """
    low, high = (t.view(torch.uint8) for t in nvfp4_scales(x, tensor_amax, axis=axis))
    if scale_layout == "blocked":
        checks.rank("nvfp4_allows", "scale", scale, (low.dim() - 1,))
        scale = from_blocked(scale, *low.shape[-2:])
    checks.shape("nvfp4_allows", "scale", scale, tuple(low.shape), "a scale for each 16 elements")
    byte = scale.view(torch.uint8)
    right = (low <= byte) & (byte <= high)  # positive e4m3fn numbers have the order of their bytes
    s = torch.where(right, byte, low).view(torch.float8_e4m3fn).float()
    ends = [_quantized(x, tensor_amax, axis, "plain", end, s)[0] for end in (_LOW, _HIGH)]
    checks.shape("nvfp4_allows", "qdata", qdata, tuple(ends[0].shape), "two codes in a byte")
    stored = (t.mT if axis == -2 else t for t in (*ends, qdata))
    smallest, largest, code = (unpacked(t, E2M1).unflatten(-1, (-1, NVFP4_BLOCK_SIZE)) for t in stored)
    right_codes = (smallest & 7 <= code & 7) & (code & 7 <= largest & 7) & (code >> 3 == smallest >> 3)
    return right & right_codes.all(-1)


def _quantized(
    x: Tensor, tensor_amax: Tensor | None, axis: int, scale_layout: str, end: int, s: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales at one end of the interval. With a scale s, the codes are those under s."""
    if x.dtype == torch.float32:
        raise NotImplementedError(f"nvfp4_quantize: {NAME} has no float32; needs bfloat16 or float16")
    rule = functools.partial(_rule, end=end, given=s)
    return _nvfp4.quantize(x, tensor_amax, axis, "1x16", scale_layout, rule, NAME, nan_as=E2M1.max)


def _rule(blocks: Tensor, b: Tensor, A: Tensor, *, end: int, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if not (blocks.isfinite().all() and A.isfinite().all()):
        raise ValueError(f"nvfp4_quantize: {NAME} has no stated result for an Inf or a NaN; needs finite numbers")
    G, b = A.float().reciprocal() * NVFP4_LARGEST, _flushed(b.float())
    s = _flushed(G * _flushed(b * _reciprocal(torch.full_like(G, E2M1.max), end)))
    stored = _nvfp4.rounded_scale(s) if given is None else given
    # A smaller factor needs a larger divisor.
    divisor = _flushed(stored * _reciprocal(G, _HIGH if end == _LOW else _LOW))
    factor = torch.where(b == 0, 0.0, _reciprocal(divisor, end))
    return _flushed(_flushed(blocks.float()) * factor.unsqueeze(-1)), s, _reciprocal(G, end)


def _flushed(x: Tensor) -> Tensor:
    """x, with 0 of the same sign in place of a subnormal number: FlashInfer compiles with `-use_fast_math`."""
    return torch.where(x.abs() < _SMALLEST_NORMAL, x * 0.0, x)


def _reciprocal(x: Tensor, end: int) -> Tensor:
    """The smallest or the largest fp32 number within one unit in the last place of 1/x, for an x of at least 0."""
    exact = _flushed(x).double().reciprocal()
    unit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 24)
    bound = torch.where(exact.isfinite() & (exact > 0), exact - unit if end == _LOW else exact + unit, exact)
    rounded = bound.float()
    outside = rounded.double() < bound if end == _LOW else rounded.double() > bound
    step = torch.nextafter(rounded, torch.full_like(rounded, torch.inf if end == _LOW else -torch.inf))
    return _flushed(torch.where(outside, step, rounded))
