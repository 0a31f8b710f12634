"""Corrections to Triton's CPU interpreter, for every kernel that runs in it: TRITON_INTERPRET=1.

Its float conversion (triton 3.6 to 3.9) loses the carry of a rounding (fp32 31.4 becomes the e4m3 16), breaks ties away
from even, and widens bfloat16 subnormals, Inf and NaN wrongly; torch's casts are right. Its fused multiply-add rounds
twice. Its comparisons keep the operands' type, and triton 3.9 refuses one of numbers as a mask. And it calls the own
combine function of a reduction or a scan, which Helion's always have, once an element: minutes for a few thousand. And
it computes whether integers overflow, in order to assert what only its debug mode asserts. And it looks through
`triton.language` for what to replace at every call of a device function, where once a launch is enough, builds its
table of numpy's types at every use, and describes the shape of every value anew, as a compiler may, which sees an
instruction once. And numpy, on which it computes, warns of Inf and NaN, of which a GPU says nothing.

Of Helion's, HELION_INTERPRET=1, only the time is corrected that it takes to multiply FP8.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mxspec.formats import E4M3FN, E5M2, FP8_DTYPES

_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_FP8_MAX = {fmt.dtype: fmt.max for fmt in (E4M3FN, E5M2)}
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def install() -> None:
    """Correct the interpreter where this process uses it; a kernel folder calls this when it is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if getattr(interpreter, "corrected_by_mxspec", False):
        return
    interpreter.corrected_by_mxspec = True
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    triton_convert_float = interpreter._convert_float
    triton_generic_reduce = interpreter.ReduceOps.generic_reduce
    triton_generic_scan = interpreter.ScanOps.generic_scan
    triton_patch_lang, replaced = interpreter._patch_lang, set[ModuleType]()  # replaced: by the launch under way
    triton_np_dtype, numpy_types = interpreter._get_np_dtype, dict[str, np.dtype]()

    def convert_float(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        from_dtype, to_dtype = _TORCH.get(str(source)), _TORCH.get(str(target))
        if from_dtype is None or to_dtype is None:
            return triton_convert_float(values, source, target, rounding_mode)
        x = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(from_dtype).to(torch.float32)
        if to_dtype in _FP8_MAX:  # cvt.rn.satfinite saturates, Inf included, and keeps NaN; clamp does the same
            x = x.clamp(-_FP8_MAX[to_dtype], _FP8_MAX[to_dtype])
        out = x.to(to_dtype).view(torch.uint8).numpy()
        return out.view(_NUMPY[to_dtype.itemsize]).reshape(values.shape)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        values = fused_multiply_add(x.data, y.data, z.data) if x.data.dtype == np.float32 else x.data * y.data + z.data
        return interpreter.TensorHandle(values, z.dtype.scalar)

    def comparing(create: Any) -> Any:
        def compare(self: Any, lhs: Any, rhs: Any) -> Any:
            return interpreter.TensorHandle(create(self, lhs, rhs).data, interpreter.tl.int1)

        return compare

    def generic_reduce(self: Any, input: tuple[Any, ...]) -> Any:
        """Combine neighbours along the axis, all pairs at once, until one is left: sizes are powers of two."""
        if self.axis is None or len(input) != 1:
            return triton_generic_reduce(self, input)
        values, dtype = np.moveaxis(input[0].handle.data, self.axis, -1), input[0].dtype
        while values.shape[-1] > 1:
            pairs = self.to_tensor(values[..., ::2], dtype), self.to_tensor(values[..., 1::2], dtype)
            values = self.combine_fn.fn(*pairs).handle.data
        out = np.moveaxis(values, -1, self.axis)
        return [self.to_tensor(out if self.keep_dims else out.squeeze(self.axis), dtype)]

    def generic_scan(self: Any, input: tuple[Any, ...]) -> Any:
        """Combine all elements at once with those 1, 2, 4, ... before them, which such a function allows."""
        if len(input) != 1:
            return triton_generic_scan(self, input)
        values, dtype = np.moveaxis(input[0].handle.data, self.axis, -1), input[0].dtype
        lane, step = np.arange(values.shape[-1]), 1
        while step < len(lane):
            before = self.to_tensor(np.roll(values, step, -1), dtype)
            combined = self.combine_fn.fn(before, self.to_tensor(values, dtype)).handle.data
            values, step = np.where(lane < step, values, combined), 2 * step
        return [self.to_tensor(np.moveaxis(values, -1, self.axis), dtype)]

    def number_of(tensor: Any) -> int:
        """Triton 3.6 takes an array of one element for a number, which numpy 2.4 refuses."""
        return int(tensor.handle.data.item())

    class Scope(interpreter._LangPatchScope):
        def set_attr(self, obj: object, name: str, value: object) -> None:
            super().set_attr(obj, name, number_of if name == "__index__" else value)

        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_lang(fn: Any) -> Any:
        """Replace the language where a kernel or a device function sees it, unless this launch has done so."""
        languages = {m for m in fn.__globals__.values() if m is interpreter.tl or m is interpreter.tl.core}
        if languages and languages <= replaced:
            return Scope()
        replaced.update(languages)
        return triton_patch_lang(fn)

    def np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = triton_np_dtype(scalar)
        return numpy_types[scalar.name]

    core = interpreter.tl.core
    triton_block_type_init, block_types = core.block_type.__init__, dict[Any, dict[str, Any]]()
    triton_tensor_init, tensor_shapes = core.tensor.__init__, dict[Any, dict[str, Any]]()

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:  # nothing changes a type once it is made
        key = str(element_ty), *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in block_types:
            triton_block_type_init(self, element_ty, shape)
            block_types[key] = vars(self)
        vars(self).update(block_types[key])

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensor_shapes:
            triton_tensor_init(self, handle, type)
            tensor_shapes[type.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        vars(self).update(tensor_shapes[type.name], handle=handle)

    options = interpreter.interpreter_builder.options
    if not options.debug:  # the operands of assertions that nobody hears are half of the interpreter's time
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._convert_float = convert_float
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__ = block_type_init
    core.tensor.__init__ = tensor_init
    interpreter.InterpreterBuilder.create_fma = create_fma
    for name, create in vars(interpreter.InterpreterBuilder).copy().items():
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(interpreter.InterpreterBuilder, name, comparing(create))
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan


def multiply_fp8_as_fp32() -> None:
    """Let Helion's eager `hl.dot` of FP8 take fp32 copies: torch._scaled_mm on a CPU is a loop of 75 ms for a tile."""
    import helion.language as hl

    dot: Any = hl.dot
    helion_dot = dot._ref_fn

    def ref_dot(mat1: Any, mat2: Any, acc: Any = None, out_dtype: Any = None) -> Any:
        if out_dtype is not torch.float32 or not {mat1.dtype, mat2.dtype} <= set(FP8_DTYPES):
            return helion_dot(mat1, mat2, acc, out_dtype)
        product = mat1.float() @ mat2.float()
        return product if acc is None else acc + product

    dot._ref_fn = ref_dot


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """`x * y + z` of fp32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, towards the neighbour whose last bit is set: that
    bit then stands for all that was lost, and the rounding to fp32 is the only one.
    """
    with np.errstate(all="ignore"):
        product, z = x.astype(np.float64) * y, z.astype(np.float64)
        total = product + z
        part = total - product
        lost = (product - (total - part)) + (z - part)
        bits = np.ascontiguousarray(total).view(np.int64)
        even = (lost != 0) & np.isfinite(lost) & (bits & 1 == 0)
        odd = bits + np.where(even, np.where((lost > 0) == (total > 0), 1, -1), 0)
        return odd.view(np.float64).astype(np.float32)
