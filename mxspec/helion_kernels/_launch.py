"""How every Helion kernel here is run: a fixed configuration, dynamic shapes, an index wide enough for its strides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import helion
import torch
from torch import Tensor

Capability = tuple[int, int]


@functools.cache
def _kernel(body: Callable[..., None], config: helion.Config, index_dtype: torch.dtype) -> Any:
    # Dynamic shapes: one compilation serves every size. A config that is given is never tuned.
    return helion.kernel(body, config=config, static_shapes=False, index_dtype=index_dtype)


def extent(t: Tensor) -> int:
    """How many elements of storage lie between the first and the last of t, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def launch(body: Callable[..., None], configs: Mapping[Capability, helion.Config], *args: Any, config: Any) -> None:
    """Run `body(*args)` with `config`, or with the one that `configs` has for the device.

    Helion chooses its index type by the number of elements. A view with long strides has few and still
    reaches past 2^31, so the choice is made here.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    device = tensors[0].device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if config is None:
        config = configs.get(capability, configs[(9, 0)])
    wide = max(max(extent(t), t.numel()) for t in tensors) >= 2**31
    _kernel(body, config, torch.int64 if wide else torch.int32)(*args)
