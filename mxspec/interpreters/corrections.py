"""Corrections of the wrong bits that Triton's interpreter computes.

The following was found in Triton 3.6 to 3.9, in `triton/runtime/interpreter.py`:

- Its float conversion loses the carry of a rounding: the fp32 31.4 becomes the e4m3 16.
- Its float conversion breaks ties away from even, and widens bfloat16 subnormals, Inf and NaN wrongly.
- Its matmul multiplies the bits of bfloat16 numbers as integers.
- Its fused multiply-add rounds twice.
- Before Triton 3.8, its minimum and maximum of a NaN and a number are NaN. On a GPU they are the number.
- Its comparisons return the type of the operands. Triton 3.9 then refuses a comparison of two numbers as a mask.
- Triton 3.6 uses an array of one element as a number, which numpy 2.4 refuses.
- It computes with numpy. Numpy warns about Inf and NaN, and a GPU does not.

One conversion is wrong on a GPU, too: of e5m2 to bfloat16. Triton compiles it to a product with 2^112, so Inf and NaN
become finite numbers. The correction gives these numbers. So a kernel that converts in one step fails here as it does
on a GPU. By way of fp32 or fp16, the conversion is right.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from mxspec.formats import E4M3FN, E5M2

_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_FP8_MAX = {fmt.dtype: fmt.max for fmt in (E4M3FN, E5M2)}
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def correct(interpreter: Any) -> None:
    """Replace the functions of `triton.runtime.interpreter` that compute wrong bits."""
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"(triton\.runtime\.interpreter|mxspec\.interpreters\.operators)$"
    )
    triton_convert_float = interpreter._convert_float
    triton_patch_lang_tensor = interpreter._patch_lang_tensor
    triton_create_dot = interpreter.InterpreterBuilder.create_dot

    def convert_float(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        from_dtype, to_dtype = _TORCH.get(str(source)), _TORCH.get(str(target))
        if from_dtype is None or to_dtype is None:
            return triton_convert_float(values, source, target, rounding_mode)
        bits = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8))
        if (from_dtype, to_dtype) == (E5M2.dtype, torch.bfloat16):
            x = _as_compiled(bits)
        else:
            x = bits.view(from_dtype).to(torch.float32)
        # cvt.rn.satfinite saturates, also Inf, and keeps NaN. A clamp does the same.
        if to_dtype in _FP8_MAX:
            x = x.clamp(-_FP8_MAX[to_dtype], _FP8_MAX[to_dtype])
        out = x.to(to_dtype).view(torch.uint8).numpy()
        return out.view(_NUMPY[to_dtype.itemsize]).reshape(values.shape)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        fp32 = interpreter.tl.float32

        def widened(x: Any) -> Any:
            if x.dtype.scalar != interpreter.tl.bfloat16:
                return x
            return interpreter.TensorHandle(convert_float(x.data, x.dtype.scalar, fp32, None).view(np.float32), fp32)

        return triton_create_dot(self, widened(a), widened(b), acc, input_precision, max_num_imprecise_acc)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        values = fused_multiply_add(x.data, y.data, z.data) if x.data.dtype == np.float32 else x.data * y.data + z.data
        return interpreter.TensorHandle(values, z.dtype.scalar)

    def create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def comparing(create: Any) -> Any:
        def compare(self: Any, lhs: Any, rhs: Any) -> Any:
            return interpreter.TensorHandle(create(self, lhs, rhs).data, interpreter.tl.int1)

        return compare

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        triton_patch_lang_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_fma = create_fma
    interpreter.InterpreterBuilder.create_minnumf = create_minnumf
    interpreter.InterpreterBuilder.create_maxnumf = create_maxnumf
    for name, create in vars(interpreter.InterpreterBuilder).copy().items():
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(interpreter.InterpreterBuilder, name, comparing(create))


def _as_compiled(code: torch.Tensor) -> torch.Tensor:
    """The numbers that a compiled kernel makes of e5m2 codes as bfloat16: Inf is 65536, and NaN is larger."""
    code = code.to(torch.int16)
    return (((code & 0x7F) << 5) | (code & 0x80) << 8).view(torch.bfloat16).to(torch.float32) * 2.0**112


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """`x * y + z` of fp32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, that is, to the neighbour whose last bit is set.
    That bit stands for all that was lost, so only the rounding to fp32 changes the result.
    """
    with np.errstate(all="ignore"):
        product, z = x.astype(np.float64) * y, z.astype(np.float64)
        total = product + z
        narrow = total.astype(np.float32)
        # The rounding to float64 matters only if it moved the sum onto a tie of fp32. On a tie, only the first of the
        # 29 bits that fp32 lacks is set. A subnormal fp32 number lacks more bits, so it is always rounded to odd.
        on_a_tie = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
        unsure = on_a_tie | ((np.abs(total) < 2.0**-126) & (total != 0))
        if not unsure.any():
            return narrow
        total, product, z = (np.broadcast_to(t, narrow.shape)[unsure] for t in (total, product, z))
        part = total - product
        lost = (product - (total - part)) + (z - part)
        bits = total.view(np.int64)
        even = (lost != 0) & np.isfinite(lost) & (bits & 1 == 0)
        odd = bits + np.where(even, np.where((lost > 0) == (total > 0), 1, -1), 0)
        narrow[unsure] = odd.view(np.float64)
        return narrow
