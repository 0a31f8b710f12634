"""FP8 matmuls with the names and arguments of transformers' kernels `finegrained-fp8`, and the switch to them.

transformers 5.17.0 and 5.23.0 keep the three matmuls in `transformers.integrations.finegrained_fp8._FINEGRAINED_FP8`,
a `FineGrainedFP8`. While this variable is None, the first call of an FP8 layer asks for the package `kernels` (5.17.0:
0.16, 5.23.0: 0.18.2 up to 0.19) and downloads the kernels. With a value, it asks for nothing. Both names are private.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Self

import torch
from torch import Tensor

import mxspec
from mxspec.nn.routing import routing

TESTED = ("5.17.0", "5.23.0")
MATMULS = ("matmul", "batched_matmul", "grouped_matmul")
WITHOUT_DEEPGEMM = "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"  # "1": an FP8 Linear does not try DeepGEMM first
K_MULTIPLE = 16  # what `fp8_gemm` takes
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class Serving:
    """What `serve` returns. `undo()`, or the end of a with-block, gives transformers its own kernels back."""

    def undo(self) -> None:
        """Give transformers what it had before `serve`, once no other handle is open. A second call does nothing."""
        with _lock:
            if self in _open:
                _open.remove(self)
                if not _open:
                    _give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


_lock = threading.Lock()
_open: list[Serving] = []  # the handles that are not undone
_before: list[Any] = []  # what transformers had: its matmuls, and the environment variable


def install() -> Serving:
    with _lock:
        if not _open:
            _take_over()
        _open.append(Serving())
        return _open[-1]


def _take_over() -> None:
    import transformers

    module = _their_module()
    kind: Any = getattr(module, "FineGrainedFP8", None)
    names = tuple(field.name for field in fields(kind)) if isinstance(kind, type) and is_dataclass(kind) else ()
    if (
        names != MATMULS
        or not hasattr(module, "_FINEGRAINED_FP8")
        or not hasattr(module, "load_finegrained_fp8_kernel")
    ):
        raise RuntimeError(
            f"serve: transformers {transformers.__version__} does not keep its FP8 matmuls in "
            f"transformers.integrations.finegrained_fp8._FINEGRAINED_FP8, a FineGrainedFP8({', '.join(MATMULS)}). This "
            f"is private in transformers. Use transformers {' or '.join(TESTED)}."
        )
    _before[:] = module._FINEGRAINED_FP8, os.environ.get(WITHOUT_DEEPGEMM)
    module._FINEGRAINED_FP8 = kind(matmul_2d, matmul_batched, matmul_grouped)
    os.environ[WITHOUT_DEEPGEMM] = "1"


def _give_back() -> None:
    module, (matmuls, variable) = _their_module(), _before
    if getattr(module._FINEGRAINED_FP8, "matmul", None) is matmul_2d:  # else someone has replaced ours
        module._FINEGRAINED_FP8 = matmuls
    if variable is None:
        os.environ.pop(WITHOUT_DEEPGEMM, None)
    else:
        os.environ[WITHOUT_DEEPGEMM] = variable
    _before.clear()


def _their_module() -> Any:
    try:
        from transformers.integrations import finegrained_fp8
    except ImportError as error:
        raise RuntimeError(
            f"serve: transformers.integrations.finegrained_fp8 cannot be imported: {error}. "
            f"Use transformers {' or '.join(TESTED)}."
        ) from error
    return finegrained_fp8


def matmul_2d(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    *,
    activation_scale: Tensor | None = None,
) -> Tensor:
    """`A @ B^T` of `(..., K)` and `(N, K)` codes with 128x128 scales: an FP8 Linear without its bias."""
    scale = _checked("FP8 Linear", A, B, Bs, block_size, activation_scale)
    codes, a_scale = mxspec.fp8_quantize_1x128(A.reshape(-1, A.shape[-1]), scale_major="mn")
    out = mxspec.fp8_gemm(codes, a_scale, B, scale, out_dtype=_out_dtype(A))
    return out.to(output_dtype or A.dtype).view(*A.shape[:-1], B.shape[0])


def matmul_batched(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    block_size: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`A[s] @ B[expert_ids[s]]^T` of `(S, K)` and `(E, N, K)`. An id from E on gives zeros.

    The rows are sorted by expert, so that each weight is read once for all of its rows.
    """
    pairs = routing(expert_ids[:, None], B.shape[0])
    out = matmul_grouped(pairs.gather(A), B, Bs, pairs.offs, None, block_size, output_dtype)
    return out.index_select(0, pairs.places)


def matmul_grouped(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor | None = None,
    block_size: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The rows of each expert times its weights: `(S, K)` and `(E, N, K)`. `offsets` has the experts' exclusive ends.

    Rows after the last end are zeros.
    """
    scale = _checked("FP8 experts", A, B, Bs, block_size, None)
    codes, a_scale = mxspec.fp8_quantize_1x128(A, scale_major="mn")
    out = mxspec.fp8_grouped_gemm(codes, a_scale, B, scale, offsets.int(), out_dtype=_out_dtype(A))
    return out.to(output_dtype or A.dtype)


def _out_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the product: bfloat16 for bfloat16, and float32 for the dtypes with more bits."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def _checked(
    name: str, x: Tensor, w: Tensor, scale: Tensor, block_size: Sequence[int] | None, activation_scale: Tensor | None
) -> Tensor:
    """The scales of the weight in float32. Raises if mxspec's FP8 matmuls do not compute this layer."""
    size = None if block_size is None else tuple(block_size)
    served = "mxspec serves FP8 weights in blocks of 128 x 128 with dynamic activations"
    if w.dtype != torch.float8_e4m3fn or size != (128, 128):
        raise ValueError(f"{name}: weights {w.dtype} {tuple(w.shape)} with block_size {size}; {served}")
    if activation_scale is not None:
        raise ValueError(f"{name}: activation_scheme is static; {served}")
    if w.shape[-1] % K_MULTIPLE:
        raise ValueError(
            f"{name}: weights {tuple(w.shape)}; the last dimension must be a multiple of {K_MULTIPLE}. Load the "
            "model with FineGrainedFP8Config(dequantize=True)."
        )
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name}: scales have dtype {scale.dtype}; needs {', '.join(map(str, SCALE_DTYPES))}")
    return scale.float()
