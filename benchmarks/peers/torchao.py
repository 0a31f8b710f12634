"""torchao's quantizers and matmuls, compiled and in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, element

from ._common import adapter, is_1x128, major, need, tma_scales, version_of

LIBRARY = "torchao"


def version() -> str:
    return version_of("torchao")


@functools.lru_cache(maxsize=1)
def _compiled(fn: Callable[..., Any], *key: Any) -> Callable[..., Any]:
    """torch.compile for one call, anew for each shape and option.

    Code for a dynamic number of rows is slower (see benchmarks/results/decisions.md). Older compiled code is dropped,
    because otherwise every call would check the guards of all shapes.
    """
    torch._dynamo.reset()
    return torch.compile(fn, dynamic=False, fullgraph=True)


def _large(x: Tensor) -> Tensor:
    """A matrix of all rows of x. Small calls are left out, because each shape costs a slow compilation."""
    need(x.is_contiguous(), "takes row-major inputs only")
    need(x.numel() >= 2**22, "compiled for each shape, so here from 2^22 elements on")
    return x.view(-1, x.shape[-1])


_TUNED: set[Any] = set()


def _tuned(kernel: Any, call: Callable[[], Any]) -> Any:
    """Call an autotuned Triton kernel.

    torchao's kernels race up to 45 configurations anew for every K. Here the first tuning races all of them, after they
    were compiled in threads. Later tunings race only the best four configurations of the first.
    """
    if kernel in _TUNED:
        return call()
    _compile_in_threads(kernel, call)
    result = call()
    timings: dict[Any, list[float]] = getattr(kernel, "configs_timings", {})
    kernel.configs = sorted(timings, key=timings.__getitem__)[:4] or kernel.configs
    _TUNED.add(kernel)
    return result


def _compile_in_threads(kernel: Any, call: Callable[[], Any]) -> None:
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return  # the tuning then compiles the configurations one after the other
    kernel.run = lambda *args, warmup, **kwargs: kernel.warmup(*args, **kwargs)
    try:
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool):
            call()
    finally:
        del kernel.run  # restore the method of the class


def _to_mx(x: Tensor, axis: int, elem_dtype: torch.dtype, mode: Any, blocked: bool) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    if axis == -2:  # torchao's benchmarks/mx_formats/cast_bench.py does the same for "dim1"
        x = x.t().contiguous()
    scale, qdata = to_mx(x, elem_dtype, MX_BLOCK_SIZE, mode, is_swizzled_scales=blocked)
    return qdata.t() if axis == -2 else qdata, scale


def _quantize_1x128(kernel: str, x: Tensor, scale_format: str, scale_major: str, eps: float) -> tuple[Tensor, Tensor]:
    from torchao.prototype.blockwise_fp8_training import kernels

    need(scale_major == "mn", "writes MN-major scales only")
    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(x.is_contiguous() and x.shape[-1] % FP8_BLOCK_SIZE == 0, "takes row-major inputs, K a multiple of 128")
    return _tuned(getattr(kernels, f"{kernel}_kernel"), functools.partial(getattr(kernels, kernel), x))


@adapter("mx_quantize", "torchao compiled")
def mx_quantize_compiled(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    blocked = scale_layout == "blocked"
    need(scaling != "even", "to_mx does not compile with EVEN")
    need(x.dtype != torch.float16, "to_mx takes bfloat16 and float32 only")
    need(axis == -1 or x.ndim == 2, "to_mx has blocks along the last dimension only; transposed here for 2-D")
    need(x.ndim == 2 or not blocked or x.shape[-2] % 128 == 0, "tiles the scales of all experts as one matrix")
    options = element(elem_dtype).dtype, ScaleCalculationMode(scaling), blocked
    qdata, scale = _compiled(_to_mx, x.shape, axis, *options)(_large(x), axis, *options)
    scale = scale.view(*x.shape[:-2], *((-1,) if blocked else (-1, scale.shape[-1])))
    return qdata.view(x.shape) if axis == -1 else qdata, scale


@adapter("mx_quantize", "torchao Triton")
def mx_quantize_triton(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats import kernels

    need(major(x.device) >= 10, "torchao defines its MX Triton kernels from compute capability 10.0 on")
    need(x.dtype == torch.bfloat16 and x.is_contiguous(), "takes row-major bfloat16 only")
    need(element(elem_dtype).dtype == torch.float8_e4m3fn, "writes e4m3fn only")
    need(scaling in ("floor", "rceil"), "has floor and rceil only")
    need(scale_layout == "plain", "writes plain scales only")
    if axis == -1:
        return kernels.triton_to_mxfp8_dim0(x, MX_BLOCK_SIZE, scaling)
    need(x.ndim == 2 and x.shape[0] % 128 == 0 == x.shape[1] % 128, "takes 2-D multiples of 128 only along axis -2")
    return kernels.triton_to_mxfp8_dim1(x, MX_BLOCK_SIZE, scaling)


@adapter("mx_dequantize", "torchao compiled")
def mx_dequantize_compiled(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
    elem_dtype: torch.dtype | str | None = None,
) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    need(elem_dtype in (None, qdata.dtype), "to_dtype reads the element format from qdata")
    need((axis, scale_layout) == (-1, "plain"), "to_dtype gives row-major outputs for axis -1 and plain scales only")
    call = _compiled(to_dtype, qdata.shape, qdata.dtype, out_dtype)
    out = call(_large(qdata), scale.view(-1, scale.shape[-1]), qdata.dtype, MX_BLOCK_SIZE, out_dtype)
    return out.view(qdata.shape)


@adapter("mx_dequantize", "torchao Triton")
def mx_dequantize_triton(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
    elem_dtype: torch.dtype | str | None = None,
) -> Tensor:
    from torchao.prototype.mx_formats import kernels

    need(elem_dtype in (None, qdata.dtype), "reads the element format from qdata")
    need((axis, scale_layout) == (-1, "plain"), "takes axis -1 and plain scales only")
    need(qdata.dtype == torch.float8_e4m3fn and qdata.ndim == 2, "takes 2-D e4m3fn only")
    need(qdata.is_contiguous() and scale.is_contiguous(), "takes row-major inputs only")
    call = functools.partial(kernels.triton_mxfp8_dequant_dim0, qdata, scale.view(torch.uint8), out_dtype)
    return _tuned(kernels._dequant_mxfp8_kernel, call)


@adapter("to_blocked", "torchao compiled")
def to_blocked_compiled(scale: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.utils import to_blocked

    need(scale.ndim == 2 or scale.shape[1] % 128 == 0, "tiles the scales of all experts as one matrix")
    blocked = _compiled(to_blocked, scale.shape)(_large(scale.view(torch.uint8))).view(scale.dtype)
    return blocked if scale.ndim == 2 else blocked.view(scale.shape[0], -1)


@adapter("to_blocked", "torchao Triton")
def to_blocked_triton(scale: Tensor) -> Tensor:
    from torchao.prototype.moe_training.kernels.mxfp8.quant import triton_mx_block_rearrange_per_group_3d
    from torchao.prototype.mx_formats.kernels import triton_mx_block_rearrange

    if scale.ndim == 2:
        return triton_mx_block_rearrange(scale).view(-1)
    return triton_mx_block_rearrange_per_group_3d(scale).view(scale.shape[0], -1)


@adapter("fp8_quantize_1x128", "torchao lhs")
def fp8_quantize_1x128_lhs(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    need(axis == -1, "quantizes along axis -1")
    return _quantize_1x128("triton_fp8_blockwise_act_quant_lhs", x, scale_format, scale_major, eps)


@adapter("fp8_quantize_1x128", "torchao rhs")
def fp8_quantize_1x128_rhs(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    need(axis == -2, "quantizes along axis -2")
    qdata, scale = _quantize_1x128("triton_fp8_blockwise_act_quant_rhs", x, scale_format, scale_major, eps)
    return qdata, scale.t()


@adapter("fp8_quantize_1x128", "torchao transposed lhs")
def fp8_quantize_1x128_transposed_lhs(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    need(axis == -2, "quantizes along axis -2")
    qdata, scale = _quantize_1x128("triton_fp8_blockwise_act_quant_transposed_lhs", x, scale_format, scale_major, eps)
    return qdata.t(), scale


@adapter("fp8_quantize_128x128", "torchao")
def fp8_quantize_128x128(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, Tensor]:
    from torchao.prototype.blockwise_fp8_training import kernels

    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(not with_transpose, "gives one of a matrix and its transpose")
    need(w.is_contiguous() and w.shape[-2] % FP8_BLOCK_SIZE == 0, "takes row-major inputs, N a multiple of 128")
    need(w.numel() < 2**31, "counts elements in 32 bits, and from 2^31 on writes outside of its outputs")
    # The kernel's output for the transposed matrix is column-major. Its transpose is the contract's row-major output.
    call = functools.partial(kernels.triton_fp8_blockwise_weight_quant_transposed_rhs, w.view(-1, w.shape[-1]))
    qdata, scale = _tuned(kernels.triton_fp8_blockwise_weight_quant_transposed_rhs_kernel, call)
    return qdata.t().view(w.shape), scale.t().view(*w.shape[:-2], -1, scale.shape[0])


@adapter("fp8_gemm", "torchao", prepare=tma_scales)
def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    from torchao.prototype.blockwise_fp8_training import kernels

    need(not is_1x128(b, b_scale), "is adapted for 1x128 by 128x128")
    need(a.shape[0] % 256 == 0 == b.shape[0] % 256, "reads scales past the end unless M and N are multiples of 256")
    operands = a, b.t(), a_scale, b_scale.t()
    call = functools.partial(kernels.triton_fp8_gemm_1x128_128x128, *operands, out_dtype=out_dtype)
    return _tuned(kernels.triton_fp8_gemm_1x128_128x128_kernel, call)
