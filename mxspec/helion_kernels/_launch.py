"""How every Helion kernel here is run: a fixed configuration, dynamic shapes, an index wide enough for its strides."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import helion
import torch
from torch import Tensor

Capability = tuple[int, int]
TRITON_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _kernel(body: Callable[..., None], config: helion.Config, index_dtype: torch.dtype) -> Any:
    # Dynamic shapes: one compilation serves every size. A config that is given is never tuned.
    return helion.kernel(body, config=config, static_shapes=False, index_dtype=index_dtype)


def _extent(t: Tensor) -> int:
    """One more than the largest offset into t, or its number of elements if that is more (an expanded tensor)."""
    return max(t.numel(), 1 + sum((n - 1) * abs(s) for n, s in zip(t.shape, t.stride(), strict=True)))


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
    wide = max(map(_extent, tensors)) >= 2**31
    kernel = _kernel(body, config, torch.int64 if wide else torch.int32)
    if TRITON_INTERPRET:
        from mxspec.helion_kernels._interpret import run_generated

        run_generated(kernel, config, args)
    else:
        kernel(*args)
