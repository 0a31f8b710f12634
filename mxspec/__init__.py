"""mxspec: low-precision block formats, as a specification that runs.

Each op below is a readable PyTorch reference (`mxspec/reference/<op>.py`) behind a switch. The switch can run a kernel
instead. A kernel gives the same bits as the reference; the kernel of a matmul gives its sums with a stated accuracy. A
backend is a set of such implementations. Choose a backend with `set_backend`, `with use_backend(...)`, the argument
`backend=` of a call, or the environment variable MXSPEC_BACKEND.
"""

import importlib as _importlib
import pkgutil as _pkgutil
from typing import TYPE_CHECKING as _TYPE_CHECKING

from mxspec import dispatch as _dispatch
from mxspec.dispatch import current_backend, explain, set_backend, use_backend
from mxspec.reference.clamped_swiglu_backward_fp8_quantize_rowcol_groups import (
    clamped_swiglu_backward_fp8_quantize_rowcol_groups,
)
from mxspec.reference.clamped_swiglu_fp8_quantize_rowcol_groups import clamped_swiglu_fp8_quantize_rowcol_groups
from mxspec.reference.fp8_dequantize import fp8_dequantize
from mxspec.reference.fp8_gemm import fp8_gemm
from mxspec.reference.fp8_gemm_ import fp8_gemm_
from mxspec.reference.fp8_grouped_gemm import fp8_grouped_gemm
from mxspec.reference.fp8_grouped_gemm_wgrad import fp8_grouped_gemm_wgrad
from mxspec.reference.fp8_grouped_gemm_wgrad_ import fp8_grouped_gemm_wgrad_
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.fp8_quantize_128x128 import fp8_quantize_128x128
from mxspec.reference.fp8_quantize_k_groups import fp8_quantize_k_groups
from mxspec.reference.fp8_quantize_rowcol_groups import fp8_quantize_rowcol_groups
from mxspec.reference.fp8_requantize_k_groups import fp8_requantize_k_groups
from mxspec.reference.fp8_transpose_128x128 import fp8_transpose_128x128
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.hadamard_16 import hadamard_16
from mxspec.reference.mx_dequantize import mx_dequantize
from mxspec.reference.mx_fake_quantize_rowcol_groups import mx_fake_quantize_rowcol_groups
from mxspec.reference.mx_gemm import mx_gemm
from mxspec.reference.mx_grouped_gemm import mx_grouped_gemm
from mxspec.reference.mx_grouped_gemm_wgrad import mx_grouped_gemm_wgrad
from mxspec.reference.mx_quantize import mx_quantize
from mxspec.reference.mx_quantize_groups import mx_quantize_groups
from mxspec.reference.mx_quantize_rowcol import mx_quantize_rowcol
from mxspec.reference.mx_quantize_rowcol_groups import mx_quantize_rowcol_groups
from mxspec.reference.mx_requantize_groups import mx_requantize_groups
from mxspec.reference.nvfp4_dequantize import nvfp4_dequantize
from mxspec.reference.nvfp4_fake_quantize import nvfp4_fake_quantize
from mxspec.reference.nvfp4_fake_quantize_rowcol_groups import nvfp4_fake_quantize_rowcol_groups
from mxspec.reference.nvfp4_gemm import nvfp4_gemm
from mxspec.reference.nvfp4_grouped_gemm import nvfp4_grouped_gemm
from mxspec.reference.nvfp4_grouped_gemm_wgrad import nvfp4_grouped_gemm_wgrad
from mxspec.reference.nvfp4_quantize import nvfp4_quantize
from mxspec.reference.nvfp4_quantize_groups import nvfp4_quantize_groups
from mxspec.reference.nvfp4_quantize_stochastic import nvfp4_quantize_stochastic
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.place_token_groups import place_token_groups
from mxspec.reference.swiglu import swiglu
from mxspec.reference.swiglu_backward import swiglu_backward
from mxspec.reference.swiglu_backward_fp8_quantize_rowcol_groups import swiglu_backward_fp8_quantize_rowcol_groups
from mxspec.reference.swiglu_backward_mx_quantize_rowcol_groups import swiglu_backward_mx_quantize_rowcol_groups
from mxspec.reference.swiglu_fp8_quantize_rowcol_groups import swiglu_fp8_quantize_rowcol_groups
from mxspec.reference.swiglu_mx_quantize_rowcol_groups import swiglu_mx_quantize_rowcol_groups
from mxspec.reference.to_blocked import to_blocked
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.reference.unpad_token_groups import unpad_token_groups
from mxspec.reference.zero_unused_ import zero_unused_

__version__ = "0.2.0"

# Every reference imported above becomes the public op of its name: the same call, behind the switch.
globals().update({name: _dispatch.op(globals()[name]) for name in _dispatch.ops()})


if not _TYPE_CHECKING:  # a type checker would take any name for a module

    def __getattr__(name):
        """Import `mxspec.nn`, `mxspec.layouts` or any other module when it is first named."""
        if name in __dir__() and not name.startswith("_"):
            return _importlib.import_module(f"mxspec.{name}")
        raise AttributeError(f"module 'mxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(module.name for module in _pkgutil.iter_modules(__path__))})


__all__ = [
    "clamped_swiglu_backward_fp8_quantize_rowcol_groups",
    "clamped_swiglu_fp8_quantize_rowcol_groups",
    "current_backend",
    "explain",
    "fp8_dequantize",
    "fp8_gemm",
    "fp8_gemm_",
    "fp8_grouped_gemm",
    "fp8_grouped_gemm_wgrad",
    "fp8_grouped_gemm_wgrad_",
    "fp8_quantize_1x128",
    "fp8_quantize_128x128",
    "fp8_quantize_k_groups",
    "fp8_quantize_rowcol_groups",
    "fp8_requantize_k_groups",
    "fp8_transpose_128x128",
    "from_blocked",
    "hadamard_16",
    "mx_dequantize",
    "mx_fake_quantize_rowcol_groups",
    "mx_gemm",
    "mx_grouped_gemm",
    "mx_grouped_gemm_wgrad",
    "mx_quantize",
    "mx_quantize_groups",
    "mx_quantize_rowcol",
    "mx_quantize_rowcol_groups",
    "mx_requantize_groups",
    "nvfp4_dequantize",
    "nvfp4_fake_quantize",
    "nvfp4_fake_quantize_rowcol_groups",
    "nvfp4_gemm",
    "nvfp4_grouped_gemm",
    "nvfp4_grouped_gemm_wgrad",
    "nvfp4_quantize",
    "nvfp4_quantize_groups",
    "nvfp4_quantize_stochastic",
    "pad_token_groups",
    "place_token_groups",
    "set_backend",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_fp8_quantize_rowcol_groups",
    "swiglu_backward_mx_quantize_rowcol_groups",
    "swiglu_fp8_quantize_rowcol_groups",
    "swiglu_mx_quantize_rowcol_groups",
    "to_blocked",
    "to_blocked_k_groups",
    "to_blocked_m_groups",
    "unpad_token_groups",
    "use_backend",
    "zero_unused_",
]
