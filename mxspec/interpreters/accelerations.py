"""Faster versions of the interpreters' slow functions. They compute the same bits.

Triton's interpreter (3.6 to 3.9) repeats work that a compiler does once:

- It calls the combine function of a reduction or a scan once for each element. Helion's reductions always have such a
  function.
- It computes whether integers overflow. Only its debug mode uses the result.
- It replaces the functions of `triton.language` at every call of a device function. Once for each launch is enough.
- It builds its table of numpy's types at every use.
- It describes the shape of every value anew.

Helion's interpreter has one slow function: products of FP8.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mxspec.formats import FP8_DTYPES


def accelerate(interpreter: Any) -> None:
    """Replace the slow functions of `triton.runtime.interpreter`."""
    triton_generic_reduce = interpreter.ReduceOps.generic_reduce
    triton_generic_scan = interpreter.ScanOps.generic_scan
    # `replaced` holds the modules that the current launch has patched.
    triton_patch_lang, replaced = interpreter._patch_lang, set[ModuleType]()
    triton_np_dtype, numpy_types = interpreter._get_np_dtype, dict[str, np.dtype]()

    def generic_reduce(self: Any, input: tuple[Any, ...]) -> Any:
        """Combine neighbours along the axis, all pairs at once, until one value is left. Sizes are powers of two."""
        if self.axis is None or len(input) != 1:
            return triton_generic_reduce(self, input)
        values, dtype = np.moveaxis(input[0].handle.data, self.axis, -1), input[0].dtype
        while values.shape[-1] > 1:
            pairs = self.to_tensor(values[..., ::2], dtype), self.to_tensor(values[..., 1::2], dtype)
            values = self.combine_fn.fn(*pairs).handle.data
        out = np.moveaxis(values, -1, self.axis)
        return [self.to_tensor(out if self.keep_dims else out.squeeze(self.axis), dtype)]

    def generic_scan(self: Any, input: tuple[Any, ...]) -> Any:
        """Combine each element with the element 1 before it, then 2 before it, then 4, and so on.

        Each step does all elements at once. This is right because the function is associative.
        """
        if len(input) != 1:
            return triton_generic_scan(self, input)
        values, dtype = np.moveaxis(input[0].handle.data, self.axis, -1), input[0].dtype
        lane, step = np.arange(values.shape[-1]), 1
        while step < len(lane):
            before = self.to_tensor(np.roll(values, step, -1), dtype)
            combined = self.combine_fn.fn(before, self.to_tensor(values, dtype)).handle.data
            values, step = np.where(lane < step, values, combined), 2 * step
        return [self.to_tensor(np.moveaxis(values, -1, self.axis), dtype)]

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_lang(fn: Any) -> Any:
        """Replace the language that a kernel or a device function sees, unless this launch has done so already."""
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

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:  # a type does not change after it is made
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
    # Overflow checks compute the operands of assertions that the interpreter then ignores. They take a large part of
    # its time (benchmarks/results/decisions.md).
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__ = block_type_init
    core.tensor.__init__ = tensor_init
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan


def multiply_fp8_as_fp32() -> None:
    """Let Helion's eager `hl.dot` of FP8 multiply fp32 copies: torch._scaled_mm on a CPU is a slow loop."""
    import helion.language as hl

    dot: Any = hl.dot
    helion_dot = dot._ref_fn

    def ref_dot(mat1: Any, mat2: Any, acc: Any = None, out_dtype: Any = None) -> Any:
        if out_dtype is not torch.float32 or not {mat1.dtype, mat2.dtype} <= set(FP8_DTYPES):
            return helion_dot(mat1, mat2, acc, out_dtype)
        product = mat1.float() @ mat2.float()
        return product if acc is None else acc + product

    dot._ref_fn = ref_dot
