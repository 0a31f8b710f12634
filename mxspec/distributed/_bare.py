"""Tensors that have the shape and dtype of other tensors, and only bytes: codes with their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EPS = 1e-12  # the default of the FP8 quantizers, with which the codes are made


class Bare(Tensor):
    """A tensor with a shape, strides and a dtype, and no memory of its own. Subclasses hold the bytes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def like(cls: Any, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
