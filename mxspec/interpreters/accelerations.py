"""Faster versions of the interpreters' slow functions. They compute the same bits.

Triton's interpreter (3.6 to 3.9) repeats work that a compiler does once:

- It calls the combine function of a reduction or a scan once for each element. Helion's reductions always have such a
  function.
- It computes whether integers overflow. Only its debug mode uses the result.
- It replaces the functions of `triton.language` at every call of a device function. Once for each launch is enough. To
  find these functions, once for each process is enough.
- It builds its table of numpy's types at every use.
- It describes the shape of every value anew.
- It finds the common type and shape of two operands anew, also if both have the same type and shape.
- It makes the tensor of a constant anew.

Helion's interpreter has two slow functions: products of FP8, and the search for two stores to one place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
    seen_by, replacements = dict[Any, frozenset[ModuleType]](), dict[Any, list[tuple[Any, str, Any]]]()
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
        if fn not in seen_by:
            modules = fn.__globals__.values()
            seen_by[fn] = frozenset(m for m in modules if m is interpreter.tl or m is interpreter.tl.core)
        languages = seen_by[fn]
        if languages and languages <= replaced:
            return Scope()
        known = languages, frozenset(replaced)
        replaced.update(languages)
        if known not in replacements:
            scope = triton_patch_lang(fn)
            replacements[known] = [(place, name, vars(place)[name]) for place, name, _ in scope._changes]
            return scope
        scope = Scope()
        for change in replacements[known]:
            scope.set_attr(*change)
        return scope

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Replace a function of the language by a function that passes the interpreter's semantics to it."""
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, call)

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

    semantic, handle_of = interpreter.interpreter_semantic, interpreter.TensorHandle
    triton_common, constants = semantic.binary_op_type_checking_impl, dict[Any, tuple[Any, Any]]()
    forms = dict[Any, list[tuple[Any, np.ndarray] | None]]()

    def common(left: Any, right: Any, *rules: bool, **more: bool) -> tuple[Any, Any]:
        """Two operands with one type and one shape.

        The first call with given types is Triton's. Later calls only broadcast, if the types of the elements agree.
        """
        if more or type(left) is not core.tensor:
            return triton_common(left, right, *rules, **more)
        if type(right) is core.tensor:
            key: Any = (left.type.name, right.type.name, rules)
            if key in forms:
                to_left, to_right = forms[key]
                return broadcast(left, to_left), broadcast(right, to_right)
            found, given = triton_common(left, right, *rules), (left, right)
            if all(after.type.scalar == before.type.scalar for after, before in zip(found, given, strict=True)):
                forms[key] = [
                    None
                    if after is before
                    else (after.type, np.broadcast_to(np.empty(1, after.handle.data.dtype), after.handle.data.shape))
                    for after, before in zip(found, given, strict=True)
                ]
            return found
        if type(right) is int or (type(right) is float and right):  # 0.0 equals -0.0, so it is no key
            key = (left.type.name, right, type(right), rules)
            if key in constants:
                values, of = constants[key]
                return left, core.tensor(handle_of(values, of.scalar), of)
            found = triton_common(left, right, *rules)
            if found[0] is left:
                found[1].handle.data.flags.writeable = False
                constants[key] = found[1].handle.data, found[1].type
            return found
        return triton_common(left, right, *rules)

    def broadcast(t: Any, form: tuple[Any, np.ndarray] | None) -> Any:
        """The tensor with the type of an earlier result, and with the shape and numpy's type of its values."""
        if form is None:
            return t
        values = np.broadcast_to(t.handle.data, form[1].shape).astype(form[1].dtype, copy=False)
        return core.tensor(handle_of(values, t.handle.dtype.scalar), form[0])

    triton_broadcast = semantic.broadcast_impl_value

    def broadcast_value(left: Any, right: Any) -> tuple[Any, Any]:
        """Two operands with one shape. Two blocks that have the same shape already are returned as they are."""
        if left.type.is_block() and right.type.is_block() and left.handle.data.shape == right.handle.data.shape:
            return left, right
        return triton_broadcast(left, right)

    options = interpreter.interpreter_builder.options
    # Overflow checks compute the operands of assertions that the interpreter then ignores. They take a large part of
    # its time (benchmarks/results/decisions.md).
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_lang
    interpreter._patch_attr = patch_attr
    semantic.binary_op_type_checking_impl = common
    semantic.broadcast_impl_value = broadcast_value
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__ = block_type_init
    core.tensor.__init__ = tensor_init
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan


def multiply_as_fp32() -> None:
    """Let Helion's eager `hl.dot` of FP8 and of bfloat16 multiply fp32 copies.

    On a CPU, torch._scaled_mm is a slow loop, and torch.mm has no bfloat16 product with fp32 sums.
    """
    import helion.language as hl

    dot: Any = hl.dot
    helion_dot = dot._ref_fn

    def ref_dot(mat1: Any, mat2: Any, acc: Any = None, out_dtype: Any = None) -> Any:
        dtypes = {mat1.dtype, mat2.dtype}
        to_fp32 = torch.float32 in (out_dtype, None if acc is None else acc.dtype)
        if not to_fp32 or not (dtypes <= set(FP8_DTYPES) or dtypes == {torch.bfloat16}):
            return helion_dot(mat1, mat2, acc, out_dtype)
        product = mat1.float() @ mat2.float()
        return product if acc is None else acc + product

    dot._ref_fn = ref_dot


_unique = torch.Tensor.unique


@functools.wraps(_unique)
def distinct_rows(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.unique`. Rows of indices become numbers first: torch's sort of rows takes most of the time of a store."""
    if args or kwargs != {"dim": 0} or self.dtype != torch.int64 or self.ndim != 2 or not self.numel():
        return _unique(self, *args, **kwargs)
    sizes = [int(size) for size in self.amax(0) + 1]
    if int(self.min()) < 0 or math.prod(sizes) >= 2**63:
        return _unique(self, dim=0)
    places = self[:, 0]
    for column, size in enumerate(sizes[1:], 1):
        places = places * size + self[:, column]
    return torch.stack(torch.unravel_index(_unique(places), sizes), 1)
