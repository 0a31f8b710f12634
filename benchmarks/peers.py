"""Other libraries' kernels behind mxspec's contracts, for `python -m mxspec bench --peers`.

An adapter has its op's signature and gives the op's outputs, as views of what the library wrote and without a kernel
of its own; where the op changes an argument in place, so does it. What a library wants laid out in another way
beforehand is done by the adapter's `prepare`, which is not timed. Nothing here is imported by mxspec; each adapter
imports its library when it is called.

Read with torch 2.11 and CUDA 13 on an H200: `pip install --no-deps torchao==0.18.0 sgl-deep-gemm==0.1.2
apache-tvm-ffi==0.1.9 fbgemm-gpu-genai==1.6.0`. The adapters of TransformerEngine, and what needs Blackwell, follow the
libraries' sources and were not run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, element
from mxspec.reference.common.groups import padded_rows, round_up
from mxspec.reference.common.matmul import from_blocked_k_groups, from_blocked_m_groups
from mxspec.reference.fp8_dequantize import fp8_dequantize
from mxspec.reference.fp8_grouped_gemm_wgrad import group_values

ADAPTERS: dict[str, dict[str, Callable[..., Any]]] = {}  # op -> label, which begins with the library's name -> adapter


class Unsupported(Exception):
    """The library does not do this call, on this GPU or at all; the message is the reason."""


def adapter(
    op: str, label: str, prepare: Callable[..., tuple[Any, ...]] | None = None, waits: bool = False
) -> Callable[..., Any]:
    """Register an adapter; `prepare` takes the op's arguments and gives those that the adapter is called with.

    One that `waits` reads values on the host, so that it cannot be captured into a CUDA graph.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        if prepare:
            fn.prepare = prepare  # type: ignore[attr-defined]
        fn.waits = waits  # type: ignore[attr-defined]
        ADAPTERS.setdefault(op, {})[label] = fn
        return fn

    return register


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Unsupported(what)


@functools.cache
def major(device: torch.device) -> int:
    """The GPU's generation: 9 for Hopper, 10 for Blackwell; 0 for what is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


# --- the libraries ----------------------------------------------------------------------------------------------


def _version(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:  # a missing .so, or no CUDA toolkit: each library has its own way to say so
        raise ImportError(f"{module} is installed and does not load: {type(error).__name__}: {error}") from error
    return str(importlib.import_module(module.partition(".")[0]).__version__)


def _cublas() -> str:
    if torch.version.cuda is None:
        raise ImportError(f"torch {torch.__version__} is built without CUDA")
    try:
        return importlib.metadata.version("nvidia-cublas")
    except importlib.metadata.PackageNotFoundError:
        return f"CUDA {torch.version.cuda}'s"


LIBRARIES: dict[str, Callable[[], str]] = {
    "torch": lambda: torch.__version__,
    "mxspec": lambda: mxspec.__version__,
    "torchao": functools.partial(_version, "torchao"),
    "cuBLAS": _cublas,
    "DeepGEMM": functools.partial(_version, "deep_gemm"),
    "FBGEMM": functools.partial(_version, "fbgemm_gpu"),
    "TransformerEngine": functools.partial(_version, "transformer_engine.pytorch"),
}


# --- what keeps compiling and tuning within a minute ------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _compiled(fn: Callable[..., Any], *key: Any) -> Callable[..., Any]:
    """torch.compile for one call: anew for each shape and option, since a size left open makes slower code.

    On an H200 blocked scales of 8192 x 2048 take 28.3 us with the rows left open and 20.6 us without. What was compiled
    before is dropped, or every call would walk through the guards of all shapes.
    """
    torch._dynamo.reset()
    return torch.compile(fn, dynamic=False, fullgraph=True)


def _large(x: Tensor) -> Tensor:
    """A matrix of all of x's rows. A compilation takes more than a second, so small calls are left out."""
    need(x.is_contiguous(), "takes row-major inputs only")
    need(x.numel() >= 2**22, "compiled for each shape, so here from 2^22 elements on")
    return x.view(-1, x.shape[-1])


_TUNED: set[Any] = set()


def _tuned(kernel: Any, call: Callable[[], Any]) -> Any:
    """Call an autotuned Triton kernel.

    torchao's kernels race up to 45 configurations anew for every K. Here the first tuning is the library's own, its
    configurations compiled in threads beforehand; later ones race the best four of it.
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
        return  # tuning then compiles them one after the other
    kernel.run = lambda *args, warmup, **kwargs: kernel.warmup(*args, **kwargs)
    try:
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool):
            call()
    finally:
        del kernel.run  # the class's method again


# --- MX ---------------------------------------------------------------------------------------------------------


@adapter("mx_quantize", "torchao compiled")
def _(
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


def _to_mx(x: Tensor, axis: int, elem_dtype: torch.dtype, mode: Any, blocked: bool) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    if axis == -2:  # as torchao's benchmarks/mx_formats/cast_bench.py does for "dim1"
        x = x.t().contiguous()
    scale, qdata = to_mx(x, elem_dtype, MX_BLOCK_SIZE, mode, is_swizzled_scales=blocked)
    return qdata.t() if axis == -2 else qdata, scale


@adapter("mx_quantize", "torchao Triton")
def _(
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


@adapter("mx_quantize", "TransformerEngine")
def _(
    x: Tensor,
    *,
    axis: int = -1,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    need(major(x.device) >= 10, "its MXFP8 needs compute capability 10.0")
    need((axis, scaling, scale_layout) == (-1, "rceil", "plain"), "fits axis -1, rceil, plain scales only")
    need(element(elem_dtype).dtype == torch.float8_e4m3fn and x.ndim == 2, "fits 2-D and e4m3fn only")
    need(x.shape[0] % 128 == 0 == x.shape[1] % 128, "pads its plain scales to 128 x 4")
    out = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)(x)
    return out._rowwise_data.view(torch.float8_e4m3fn), out._rowwise_scale_inv.view(torch.float8_e8m0fnu)


@adapter("mx_dequantize", "torchao compiled")
def _(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    need((axis, scale_layout) == (-1, "plain"), "to_dtype gives row-major outputs for axis -1 and plain scales only")
    call = _compiled(to_dtype, qdata.shape, qdata.dtype, out_dtype)
    out = call(_large(qdata), scale.view(-1, scale.shape[-1]), qdata.dtype, MX_BLOCK_SIZE, out_dtype)
    return out.view(qdata.shape)


@adapter("mx_dequantize", "torchao Triton")
def _(
    qdata: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    from torchao.prototype.mx_formats import kernels

    need((axis, scale_layout) == (-1, "plain"), "takes axis -1 and plain scales only")
    need(qdata.dtype == torch.float8_e4m3fn and qdata.ndim == 2, "takes 2-D e4m3fn only")
    need(qdata.is_contiguous() and scale.is_contiguous(), "takes row-major inputs only")
    call = functools.partial(kernels.triton_mxfp8_dequant_dim0, qdata, scale.view(torch.uint8), out_dtype)
    return _tuned(kernels._dequant_mxfp8_kernel, call)


@adapter("to_blocked", "torchao compiled")
def _(scale: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.utils import to_blocked

    need(scale.ndim == 2 or scale.shape[1] % 128 == 0, "tiles the scales of all experts as one matrix")
    blocked = _compiled(to_blocked, scale.shape)(_large(scale.view(torch.uint8))).view(scale.dtype)
    return blocked if scale.ndim == 2 else blocked.view(scale.shape[0], -1)


@adapter("to_blocked", "torchao Triton")
def _(scale: Tensor) -> Tensor:
    from torchao.prototype.moe_training.kernels.mxfp8.quant import triton_mx_block_rearrange_per_group_3d
    from torchao.prototype.mx_formats.kernels import triton_mx_block_rearrange

    if scale.ndim == 2:
        return triton_mx_block_rearrange(scale).view(-1)
    return triton_mx_block_rearrange_per_group_3d(scale).view(scale.shape[0], -1)


# --- FP8 in blocks of 128 ---------------------------------------------------------------------------------------


def _torchao_1x128(kernel: str, x: Tensor, scale_format: str, scale_major: str, eps: float) -> tuple[Tensor, Tensor]:
    from torchao.prototype.blockwise_fp8_training import kernels

    need(scale_major == "mn", "writes MN-major scales only")
    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(x.is_contiguous() and x.shape[-1] % FP8_BLOCK_SIZE == 0, "takes row-major inputs, K a multiple of 128")
    return _tuned(getattr(kernels, f"{kernel}_kernel"), functools.partial(getattr(kernels, kernel), x))


@adapter("fp8_quantize_1x128", "torchao lhs")
def _(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    need(axis == -1, "quantizes along axis -1")
    return _torchao_1x128("triton_fp8_blockwise_act_quant_lhs", x, scale_format, scale_major, eps)


@adapter("fp8_quantize_1x128", "torchao rhs")
def _(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    need(axis == -2, "quantizes along axis -2")
    qdata, scale = _torchao_1x128("triton_fp8_blockwise_act_quant_rhs", x, scale_format, scale_major, eps)
    return qdata, scale.t()


@adapter("fp8_quantize_1x128", "torchao transposed lhs")
def _(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    need(axis == -2, "quantizes along axis -2")
    qdata, scale = _torchao_1x128("triton_fp8_blockwise_act_quant_transposed_lhs", x, scale_format, scale_major, eps)
    return qdata.t(), scale


@adapter("fp8_quantize_1x128", "FBGEMM")
def _(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_group

    need(axis == -1, "quantizes along axis -1")
    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(x.is_contiguous(), "takes row-major inputs only")
    qdata, scale = quantize_fp8_group(x, group_size=FP8_BLOCK_SIZE, k_major=scale_major == "k")
    return qdata, scale if scale_major == "k" else scale.t()


@adapter("fp8_quantize_1x128", "TransformerEngine")
def _(
    x: Tensor, *, axis: int = -1, scale_format: str = "fp32", scale_major: str = "k", eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    need((axis, scale_major) == (-1, "mn"), "gives 1x128 blocks along axis -1 with MN-major scales")
    need(x.shape[0] % 4 == 0, "pads its MN-major scales to 4 rows")
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=eps,
        force_pow_2_scales=scale_format == "pow2",
        block_scaling_dim=1,
    )
    out = quantizer(x)
    return out._rowwise_data.view(torch.float8_e4m3fn), out._rowwise_scale_inv.t()


@adapter("fp8_quantize_128x128", "torchao")
def _(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, Tensor]:
    from torchao.prototype.blockwise_fp8_training import kernels

    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(not with_transpose, "gives one of a matrix and its transpose")
    need(w.is_contiguous() and w.shape[-2] % FP8_BLOCK_SIZE == 0, "takes row-major inputs, N a multiple of 128")
    # The transpose of its column-major output for the transpose is the row-major one that the contract states.
    call = functools.partial(kernels.triton_fp8_blockwise_weight_quant_transposed_rhs, w.view(-1, w.shape[-1]))
    qdata, scale = _tuned(kernels.triton_fp8_blockwise_weight_quant_transposed_rhs_kernel, call)
    return qdata.t().view(w.shape), scale.t().view(*w.shape[:-2], -1, scale.shape[0])


@adapter("fp8_quantize_128x128", "FBGEMM")
def _(
    w: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, with_transpose: bool = False
) -> tuple[Tensor, Tensor]:
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_block

    need((scale_format, eps) == ("fp32", 1e-12), "has fp32 scales and eps 1e-12 only")
    need(not with_transpose, "gives no transpose")
    need(w.is_contiguous(), "takes row-major inputs only")
    need(w.ndim == 2 or w.shape[-2] % FP8_BLOCK_SIZE == 0, "has blocks that span two experts")
    qdata, scale = quantize_fp8_block(w, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)
    return qdata, scale.view(*w.shape[:-2], -1, scale.shape[-1])


# --- FP8 matmuls -----------------------------------------------------------------------------------------------


def _mn_major(scale: Tensor, multiple: int = 1) -> Tensor:
    """The same scales with strides `(1, rows)`, rows rounded up to a multiple."""
    rows, cols = scale.shape
    padded = -(-rows // multiple) * multiple
    return torch.empty_strided((rows, cols), (1, padded), dtype=scale.dtype, device=scale.device).copy_(scale)


def _is_1x128(b: Tensor, b_scale: Tensor) -> bool:
    return b_scale.shape[0] == b.shape[0]


def _in_bf16(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return fp8_dequantize(a, a_scale), a_scale, fp8_dequantize(b, b_scale), b_scale


@adapter("fp8_gemm", "cuBLAS bf16", prepare=_in_bf16)  # what FP8 has to beat; it differs, at 50 dB
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch.mm(a, b.t())


def _cublas_scales(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    if _is_1x128(b, b_scale):
        return a, _mn_major(a_scale), b, _mn_major(b_scale)
    # cuBLAS reads a column of 128x128 scales in whole steps of 16 bytes: K-blocks padded to four
    return a, _mn_major(a_scale), b, torch.nn.functional.pad(b_scale, (0, -b_scale.shape[1] % 4))


@adapter("fp8_gemm", "cuBLAS fp8", prepare=_cublas_scales)
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    need(major(a.device) == 9, "has scales in blocks of 128 on Hopper only")
    recipe, of_b = ScalingType.BlockWise1x128, b_scale  # 1x128: (N, K/128), as those of a
    if not _is_1x128(b, b_scale):
        recipe, of_b = ScalingType.BlockWise128x128, b_scale.t()  # 128x128: (K/128, N/128)
    try:
        return scaled_mm(a, b.t(), a_scale, ScalingType.BlockWise1x128, of_b, recipe, output_dtype=out_dtype)
    except RuntimeError as error:
        need("CUBLAS_STATUS_NOT_SUPPORTED" not in str(error), f"has no kernel for M = {a.shape[0]}")
        raise


def _deep_gemm_scales(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    of_b = _mn_major(b_scale, multiple=4) if _is_1x128(b, b_scale) else b_scale.contiguous()
    return a, _mn_major(a_scale, multiple=4), b, of_b  # TMA: rows of 16 bytes


@adapter("fp8_gemm", "DeepGEMM", prepare=_deep_gemm_scales)
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    import deep_gemm

    need(hasattr(deep_gemm, "fp8_gemm_nt"), "has no fp8_gemm_nt in this build")
    need(major(a.device) == 9, "rounds fp32 scales to powers of two except on Hopper")
    if _is_1x128(b, b_scale):
        need(out_dtype == torch.float32, "does 1x128 by 1x128 to fp32")
        out = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)  # which it adds to, and cannot but add to
        deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, FP8_BLOCK_SIZE))
        return out
    need(out_dtype == torch.bfloat16, "does 1x128 by 128x128 to bfloat16")
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
    return out


@adapter("fp8_gemm_", "DeepGEMM", prepare=lambda acc, *operands: (acc, *_deep_gemm_scales(*operands)))
def _(acc: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    import deep_gemm

    need(hasattr(deep_gemm, "fp8_gemm_nt"), "has no fp8_gemm_nt in this build")
    need(major(a.device) == 9, "rounds fp32 scales to powers of two except on Hopper")
    need(_is_1x128(b, b_scale), "adds in place with 1x128 by 1x128 only")
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), acc, c=acc, recipe=(1, 1, FP8_BLOCK_SIZE))


def deep_gemm_onto_anything(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """DeepGEMM's 1x128 by 1x128 without the zeros that it adds to: what its kernel takes, and a wrong output."""
    import deep_gemm

    out = a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, FP8_BLOCK_SIZE))
    return out


@adapter("fp8_gemm", "torchao", prepare=_deep_gemm_scales)
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    from torchao.prototype.blockwise_fp8_training import kernels

    need(not _is_1x128(b, b_scale), "is adapted for 1x128 by 128x128")
    need(a.shape[0] % 256 == 0 == b.shape[0] % 256, "reads scales past the end unless M and N are multiples of 256")
    operands = a, b.t(), a_scale, b_scale.t()
    call = functools.partial(kernels.triton_fp8_gemm_1x128_128x128, *operands, out_dtype=out_dtype)
    return _tuned(kernels.triton_fp8_gemm_1x128_128x128_kernel, call)


def _fbgemm_scales(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return a, a_scale.t().contiguous(), b, b_scale.t().contiguous()  # (K/128, M), (K/128, N/128)


@adapter("fp8_gemm", "FBGEMM", prepare=_fbgemm_scales)
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401  # it defines the operators

    need(hasattr(torch.ops.fbgemm, "f8f8bf16_groupwise"), "has no f8f8bf16_groupwise in this build")
    need(out_dtype == torch.bfloat16 and not _is_1x128(b, b_scale), "does 1x128 by 128x128 to bfloat16")
    need(b.shape[0] % FP8_BLOCK_SIZE == 0, "takes N in multiples of 128")
    return torch.ops.fbgemm.f8f8bf16_groupwise(a, b, a_scale, b_scale)


def _fp8_groups_in_bf16(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    return *_in_bf16(a, a_scale, b, b_scale), offs


@adapter("fp8_grouped_gemm", "torch bf16", prepare=_fp8_groups_in_bf16)
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(a, b.mT, offs=offs)


def _deep_gemm_groups(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    from mxspec.deepgemm_kernels.fp8_grouped_gemm import grouped_layout

    return a, _mn_major(a_scale, multiple=4), b, b_scale.contiguous(), grouped_layout(offs, a.shape[0])


@adapter("fp8_grouped_gemm", "DeepGEMM", prepare=_deep_gemm_groups)  # in place of offs, the expert of each row
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    import deep_gemm

    need(hasattr(deep_gemm, "m_grouped_fp8_gemm_nt_contiguous"), "has no m-grouped matmul in this build")
    need(major(a.device) == 9, "rounds fp32 scales to powers of two except on Hopper")
    need(alignment % FP8_BLOCK_SIZE == 0, "takes groups in whole blocks of 128 rows")
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, offs)
    return out


def _fp8_tokens_in_bf16(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    def rows(flat: Tensor, scale: Tensor) -> Tensor:  # as they were before they were quantized along the tokens
        return group_values(flat, scale, offs).bfloat16().t().contiguous()

    return rows(dy, dy_scale), dy_scale, rows(x, x_scale), x_scale, offs


@adapter("fp8_grouped_gemm_wgrad", "torch bf16", prepare=_fp8_tokens_in_bf16)
def _(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    check_offs: bool = False,
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(dy.t(), x, offs=offs)


# --- MX matmuls ------------------------------------------------------------------------------------------------


def _unrounded(values: Tensor) -> Tensor:
    """Values that would have become the same codes. Those of the codes themselves, whose low bits are 0, take less
    power, so that bfloat16 multiplies them up to 10% faster than what it would be given."""
    return values * (1 + (torch.rand_like(values) - 0.5) / 16)  # e4m3: half a step is 1/32 of a value, or more


def _mx_in_bf16(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, scale_layout: str = "plain", **options: Any
) -> tuple[Tensor, ...]:
    a, b = (_unrounded(mxspec.mx_dequantize(*t, scale_layout=scale_layout)) for t in ((a, a_scale), (b, b_scale)))
    return a, a_scale, b, b_scale


@adapter("mx_gemm", "cuBLAS bf16", prepare=_mx_in_bf16)
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch.mm(a, b.t())


@adapter("mx_gemm", "mxspec by dot_scaled")
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "plain",
) -> Tensor:
    from mxspec.triton_kernels.tiles.mx_matmul import mx_tiles  # the kernel that Blackwell gets

    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    mx_tiles(a, a_scale, b, b_scale, out, scale_layout, SCALED=True, BLOCK_N=128)
    return out


def _groups_in_bf16(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, scale_layout: str = "blocked", **o: Any
) -> tuple[Tensor, ...]:
    if scale_layout == "blocked":
        a_scale = from_blocked_m_groups(a_scale, offs, a.shape[0], a.shape[1] // MX_BLOCK_SIZE)
    weights = _unrounded(mxspec.mx_dequantize(b, b_scale, scale_layout=scale_layout))
    return _unrounded(mxspec.mx_dequantize(a, a_scale)), a_scale, weights, b_scale, offs


@adapter("mx_grouped_gemm", "torch bf16", prepare=_groups_in_bf16)
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(a, b.mT, offs=offs)


def _tokens_in_bf16(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, *, scale_layout: str = "blocked", **o: Any
) -> tuple[Tensor, ...]:
    def values(t: Tensor, scale: Tensor) -> Tensor:
        if scale_layout == "blocked":
            blocks = t.shape[0] // MX_BLOCK_SIZE
            scale = from_blocked_k_groups(scale, offs // MX_BLOCK_SIZE, t.shape[1], blocks)
        return _unrounded(mxspec.mx_dequantize(t, scale, axis=-2))

    return values(dy, dy_scale), dy_scale, values(x, x_scale), x_scale, offs


@adapter("mx_grouped_gemm_wgrad", "torch bf16", prepare=_tokens_in_bf16)
def _(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Tensor:
    need(out_dtype == torch.bfloat16, "gives bfloat16")
    return torch._grouped_mm(dy.t(), x, offs=offs)


# --- token groups -----------------------------------------------------------------------------------------------


@adapter("pad_token_groups", "torch index_copy_", waits=True)
def _torch_pad(x: Tensor, offs: Tensor, alignment: int, *, check_offs: bool = False) -> Any:
    """What one writes first: the sizes read on the host."""
    ends = offs.tolist()
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    padded = [round_up(n, alignment) for n in sizes]
    start = [sum(padded[:g]) for g in range(len(padded))]
    rows = padded_rows(x.shape[0], len(ends), alignment)
    index = torch.cat([torch.arange(s, s + n, device=x.device) for s, n in zip(start, sizes, strict=True)])
    out = x.new_zeros(rows, x.shape[1]).index_copy_(0, index, x[: len(index)])
    return out, offs.new_tensor(start), offs.new_tensor([s + n for s, n in zip(start, padded, strict=True)])


@adapter("mx_quantize_groups", "mxspec in three ops")
def _three_ops(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> Any:
    need(scale_layout == "blocked", "three ops are timed with blocked scales")
    padded, start, end = mxspec.pad_token_groups(x, offs, pad_to)
    qdata, scale = mxspec.mx_quantize(padded, axis=axis, elem_dtype=elem_dtype, scaling=scaling)
    if axis == -1:
        return qdata, mxspec.to_blocked_m_groups(scale, end)[0], start, end
    return qdata, mxspec.to_blocked_k_groups(scale, end // MX_BLOCK_SIZE)[0], start, end
