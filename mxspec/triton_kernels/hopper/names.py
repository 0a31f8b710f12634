"""Gluon's names that differ between Triton releases, and the decorator of argument bundles.

A file with a bundle must not have `from __future__ import annotations`: Triton reads the types of the fields when the
class is made.
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
# The layout for a swizzle in bytes and an element size in bits. It is cached, because to make it takes microseconds.
shared_layout = functools.cache(gl.NVMMASharedLayout)
swizzle = gluon.jit(triton_swizzle.fn)

# A number or a pointer of a launch. Triton turns the number 1 and None into constants.
Value = gl.tensor | gl.constexpr

# Triton 3.9 keeps the old names of the next two functions, but the old functions raise when they are called.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@dataclass_transform()
def aggregate(cls: type[T]) -> type[T]:
    """A bundle of values. Its constructor takes the fields that the class names, in that order.

    The aggregates of Triton 3.6 and 3.7 need a written constructor. Later releases would generate the same constructor.
    """
    names = tuple(cls.__annotations__)

    def build(self: Any, *values: Any, **named: Any) -> None:
        for name, value in {**dict(zip(names, values, strict=False)), **named}.items():
            setattr(self, name, value if isinstance(value, base_value | gl.constexpr) else gl.constexpr(value))

    build.__triton_builtin__ = True  # type: ignore[attr-defined]  # Python's function, not a kernel's source
    cls.__init__ = build  # type: ignore[misc]
    return cast(type[T], _aggregate(cls))


@builtin
def _async_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


# TMA's store that adds. Older releases can compile it, but have no name for it.
async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add
