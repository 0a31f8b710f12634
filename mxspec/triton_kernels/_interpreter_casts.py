"""Float casts for Triton's CPU interpreter that round as the hardware does.

The interpreter's own conversion (triton 3.6 to 3.9) loses the carry of a rounding (fp32 31.4 becomes the e4m3 16),
breaks ties away from even, and widens bfloat16 subnormals, Inf and NaN wrongly. torch's casts are right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}

_triton_convert_float = interpreter._convert_float


def _convert_float(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    from_dtype, to_dtype = _TORCH.get(str(source)), _TORCH.get(str(target))
    if from_dtype is None or to_dtype is None:
        return _triton_convert_float(values, source, target, rounding_mode)
    x = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(from_dtype).to(torch.float32)
    if to_dtype in _FP8_MAX:  # cvt.rn.satfinite saturates, Inf included, and keeps NaN; clamp does the same
        x = x.clamp(-_FP8_MAX[to_dtype], _FP8_MAX[to_dtype])
    out = x.to(to_dtype).view(torch.uint8).numpy()
    return out.view(_NUMPY[to_dtype.itemsize]).reshape(values.shape)


def install() -> None:
    """Replace the interpreter's conversion; for every Triton kernel of the process."""
    interpreter._convert_float = _convert_float
