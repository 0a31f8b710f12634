"""The requirements of PyTorch's MX matmuls, `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# The limit of PyTorch's grouped kernel: one block of threads computes the addresses of all groups, with one thread for
# each group.
MAX_GROUPS = 1024


@functools.cache
def absent(name: str, device: torch.device) -> str | None:
    """Why this torch, on this device, has no such matmul, or None."""
    if torch.version.cuda is None:
        return f"needs a torch built with CUDA, not {torch.__version__}"
    if not hasattr(torch.nn.functional, name):
        return f"needs torch.nn.functional.{name}, which torch {torch.__version__} lacks"
    capability = torch.cuda.get_device_capability(device)
    if capability != (10, 0):
        return f"has MX scales on compute capability 10.0 only, not {'.'.join(map(str, capability))}"
    return None


def operands_reason(
    scale_layout: str, operands: tuple[tuple[str, Tensor], ...], scales: tuple[tuple[str, Tensor], ...]
) -> str | None:
    """Why the operands do not fit, or None.

    The caller passes operands with K as their last dimension. Blocked scales are contiguous already.
    """
    if scale_layout != "blocked":
        return "reads blocked scales, not plain ones"
    for name, t in operands:
        if t.dtype != torch.float8_e4m3fn:
            return f"multiplies float8_e4m3fn only, and {name} is {str(t.dtype)[6:]}"
        if not t.numel():
            return "takes no empty matrices"
        if not t.is_contiguous():
            return f"needs {name} without gaps between its rows, not with strides {t.stride()}"
    for name, t in (*operands, *scales):
        if t.data_ptr() % 16:
            return f"needs {name} to begin at a multiple of 16 bytes"
    return None


def multiple_of_16(name: str, size: int) -> str | None:
    return f"needs {name} in multiples of 16, not {name} = {size}" if size % 16 else None


def groups_reason(groups: int, out_dtype: torch.dtype) -> str | None:
    if out_dtype != torch.bfloat16:
        return f"gives grouped results as bfloat16 only, not as {str(out_dtype)[6:]}"
    return f"takes at most {MAX_GROUPS} groups, not {groups}" if groups > MAX_GROUPS else None


def recipe(a_scale: Tensor, b_scale: Tensor) -> dict[str, Any]:
    """The arguments that say how both operands are scaled."""
    from torch.nn.functional import ScalingType, SwizzleType

    blocks, tiles = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return {
        "scale_a": a_scale, "scale_recipe_a": blocks, "swizzle_a": tiles,
        "scale_b": b_scale, "scale_recipe_b": blocks, "swizzle_b": tiles,
    }  # fmt: skip
