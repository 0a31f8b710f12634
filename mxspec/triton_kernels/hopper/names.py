"""Gluon as the kernels here use it: what its releases call by different names, and its layouts, made once."""

from __future__ import annotations

import functools
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

shared_layout = functools.cache(gl.NVMMASharedLayout)  # by swizzle in bytes and bits an element; one takes microseconds

# Triton 3.9 keeps the old names of these two, and refuses whoever calls them.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def _async_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


# TMA's store that adds, which older releases compile and have no name for.
async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add
