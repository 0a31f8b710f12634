"""Run Helion kernels with a fixed configuration, dynamic shapes, and indices wide enough for the strides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import helion
import torch
from torch import Tensor

T = TypeVar("T")
MAX_TILE = 2**16  # no kernel has a tile with more rows or columns
Configs = Mapping[tuple[int, int], helion.Config]


def config(block_sizes: list[int], num_warps: int, **options: Any) -> helion.Config:
    """A configuration whose programs run along the last dimension first, as memory does.

    Helion's own order is the opposite.
    """
    order = [list(range(len(block_sizes)))[::-1]] if len(block_sizes) > 1 else []
    return helion.Config(block_sizes=block_sizes, num_warps=num_warps, loop_orders=order, **options)


@functools.cache
def on_grid(dims: int, num_warps: int, pid_type: str = "flat") -> helion.Config:
    """A configuration for an `hl.grid` of `dims` dimensions. It has no block sizes."""
    order = [list(range(dims))[::-1]] if dims > 1 else []
    return helion.Config(block_sizes=[], num_warps=num_warps, loop_orders=order, pid_type=pid_type)


@functools.cache
def _kernel(body: Callable[..., None], config: helion.Config, index_dtype: torch.dtype, role: str) -> Any:
    # Dynamic shapes: one compilation serves every size. Helion does not tune a kernel with a given config.
    return helion.kernel(body, config=config, static_shapes=False, index_dtype=index_dtype)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type != "cpu" else (9, 0)


def for_device(table: Mapping[tuple[int, int], T], device: torch.device) -> T:
    """The entry of a table for a device's compute capability. A device without an entry gets Hopper's."""
    return table.get(_capability(device), table[(9, 0)])


def extent(t: Tensor) -> int:
    """The number of elements of storage from the first element of t to the last, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def flat(t: Tensor) -> Tensor:
    """The storage between the first and the last element of t, in one dimension, for a kernel that takes strides.

    An empty tensor gives one element, which every mask excludes: ref mode clamps an index before it masks.
    """
    return t.as_strided((extent(t),), (1,)) if t.numel() else t.new_empty(1)


def launch(body: Callable[..., None], configs: Configs, *args: Any, role: str = "") -> None:
    """Run `body(*args)` with the configuration for the device.

    A Helion kernel checks only its last call quickly. An op that runs a body twice in a call gives each run a role, and
    each role has a kernel of its own.

    Helion chooses its index type by the number of elements. A view with long strides may have few elements and still
    reach past 2^31, so this function chooses the index type.

    The last tile may end past the last element, by less than MAX_TILE. Its indices must not wrap around to negative
    numbers, because a mask `index < size` would let these through.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    wide = max(max(extent(t), t.numel()) for t in tensors) >= 2**31 - MAX_TILE
    _kernel(body, for_device(configs, tensors[0].device), torch.int64 if wide else torch.int32, role)(*args)
