"""Gluon's names that differ between releases of Triton, and the decorator of argument bundles.

A file with a bundle must not have `from __future__ import annotations`: the fields' types are read when the class is
made.
"""

import functools
from typing import Any, TypeVar, cast, dataclass_transform

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, base_value

from mxspec.triton_kernels.common.tile_order import swizzle as triton_swizzle

T = TypeVar("T")
shared_layout = functools.cache(gl.NVMMASharedLayout)  # by swizzle in bytes and bits an element; one takes microseconds
swizzle = gluon.jit(triton_swizzle.fn)

# A number or a pointer of a launch. Triton makes a constant of the number 1 and of None.
Value = gl.tensor | gl.constexpr

# Triton 3.9 keeps the old names of these two, and refuses whoever calls them.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@dataclass_transform()
def aggregate(cls: type[T]) -> type[T]:
    """A bundle of values with the fields that its class names, built from them in that order.

    Triton 3.6 and 3.7 have aggregates that need a constructor; later releases would write the same.
    """
    names = tuple(cls.__annotations__)

    def build(self: Any, *values: Any, **named: Any) -> None:
        for name, value in {**dict(zip(names, values, strict=False)), **named}.items():
            setattr(self, name, value if isinstance(value, base_value | gl.constexpr) else gl.constexpr(value))

    build.__triton_builtin__ = True  # type: ignore[attr-defined]  # it is Python's, and no part of a kernel's source
    cls.__init__ = build  # type: ignore[misc]
    return cast(type[T], _aggregate(cls))


@builtin
def _async_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


# TMA's store that adds, which older releases compile and have no name for.
async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add
