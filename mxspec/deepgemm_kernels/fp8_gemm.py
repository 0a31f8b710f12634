"""fp8_gemm in DeepGEMM: 1x128 by 128x128 to bfloat16, 1x128 by 1x128 to fp32.

Nothing is copied: what lies otherwise than DeepGEMM reads it is refused, and the reason says how it should lie. As
`fp8_quantize_1x128(..., scale_major="mn")` and `fp8_quantize_128x128` give them, operands fit if M is a multiple of 4.
The kernel for fp32 adds to its output and does nothing else, so that zeros are written first.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE

PTX = "no: DeepGEMM compiles its kernels itself, at their first use"
INTERPRETABLE = "no: DeepGEMM has no kernels for a CPU"


@functools.cache
def _library() -> Any:
    """The package, or a text that says why it cannot be used; builds of one version differ in what they have."""
    try:
        library = importlib.import_module("deep_gemm")
    except Exception as error:  # without a CUDA toolkit it raises whatever its build raises
        return f"needs the package deep_gemm, which cannot be imported: {type(error).__name__}: {error}"
    return library if hasattr(library, "fp8_gemm_nt") else "needs fp8_gemm_nt, which this build of deep_gemm lacks"


@functools.cache
def _absent(device: torch.device) -> str | None:
    if isinstance(library := _library(), str):
        return library
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):  # on Blackwell it rounds scales to powers of two
        return f"keeps fp32 scales on compute capability 9.0 only, not {'.'.join(map(str, capability))}"
    return None


def _layout_reason(name: str, t: Tensor, strides: tuple[int, int]) -> str | None:
    """Why DeepGEMM would copy a matrix, or cannot read it; the stride along a dimension of 1 means nothing."""
    if any(n > 1 and got != needed for n, got, needed in zip(t.shape, t.stride(), strides, strict=True)):
        return f"needs {name} with strides {strides}, not {t.stride()}"
    return f"needs {name} to begin at a multiple of 16 bytes" if t.data_ptr() % 16 else None


def _mn_major(rows: int) -> tuple[int, int]:
    """Strides of scales that TMA reads: a column begins at a multiple of 16 bytes."""
    return 1, rows + -rows % 4


def supports(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    if reason := _absent(a.device):
        return reason
    (M, K), N = a.shape, b.shape[0]
    if not M * N * K:
        return "takes no empty matrices"
    if M == 1:  # sgl-deep-gemm 0.1.2 wants to view their bytes, and raises
        return "does not read the scales of a single row"
    by_row = b_scale.shape[0] == N
    gives = torch.float32 if by_row else torch.bfloat16
    if out_dtype != gives:
        return f"does 1x128 by {'1x128' if by_row else '128x128'} to {gives}, not to {out_dtype}"
    if by_row and M <= 32:  # its tile of 16 or 32 rows does not compile
        return f"does 1x128 by 1x128 for more than 32 rows, not M = {M}"
    multiple = 16 // out_dtype.itemsize
    if N % multiple:  # TMA writes rows that begin at multiples of 16 bytes
        return f"needs N in multiples of {multiple} for {out_dtype}, not N = {N}"
    of_b = _mn_major(N) if by_row else (K // FP8_BLOCK_SIZE, 1)
    layouts = ("a", a, (K, 1)), ("b", b, (K, 1)), ("a_scale", a_scale, _mn_major(M)), ("b_scale", b_scale, of_b)
    return next(filter(None, (_layout_reason(*layout) for layout in layouts)), None)


def add_1x128(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """Add the product of 1x128 by 1x128 to an fp32 matrix; along dimensions of 1, strides as DeepGEMM expects them."""
    a_scale, b_scale = (s.as_strided(s.shape, _mn_major(s.shape[0])) for s in (a_scale, b_scale))
    _library().fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, FP8_BLOCK_SIZE))


def fp8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    M, N = a.shape[0], b.shape[0]
    if b_scale.shape[0] == N:
        out = torch.zeros((M, N), dtype=out_dtype, device=a.device)
        add_1x128(out, a, a_scale, b, b_scale)
    else:
        out = torch.empty((M, N), dtype=out_dtype, device=a.device)
        a_scale = a_scale.as_strided(a_scale.shape, _mn_major(M))  # along dimensions of 1, strides as it expects them
        b_scale = b_scale.as_strided(b_scale.shape, (b_scale.shape[1], 1))
        _library().fp8_gemm_nt((a, a_scale), (b, b_scale), out, recipe=(1, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE))
    return out
