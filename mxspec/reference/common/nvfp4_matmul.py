"""Code that the NVFP4 matmuls share: argument checks, and the values of operands. An operand is codes or values."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E2M1, NVFP4_BLOCK_SIZE
from mxspec.reference.common import checks
from mxspec.reference.common.matmul import check_unit_stride
from mxspec.reference.common.numerics import widened

CODES, VALUES = torch.float4_e2m1fn_x2, torch.bfloat16
Operand = tuple[str, Tensor, "Tensor | None", Tensor]  # the name, codes or values, the scale, and the tensor scale


def per_byte(t: Tensor) -> int:
    """How many elements an element of the tensor holds: 2 codes, or 1 value."""
    return 2 if t.dtype == CODES else 1


def check_operands(op: str, *operands: Operand, ranks: tuple[int, int], tensor_scales: tuple[int, ...]) -> None:
    """Check dtypes, ranks, devices and the shape of the tensor scales."""
    first = operands[0][:2]
    for (name, t, scale, tensor_scale), rank in zip(operands, ranks, strict=True):
        checks.tensor_dtype(op, name, t, (CODES, VALUES))
        checks.rank(op, name, t, (rank,))
        checks.same_device(op, first, (name, t))
        if t.dtype == CODES:
            if scale is None:
                raise TypeError(f"{op}: {name}_scale is None; needs a tensor, because {name} holds codes")
            checks.tensor_dtype(op, f"{name}_scale", scale, (torch.float8_e4m3fn,))
            checks.same_device(op, first, (f"{name}_scale", scale))
        elif scale is not None:
            raise TypeError(f"{op}: {name}_scale is a {type(scale).__name__}; needs None, because {name} holds values")
        checks.tensor_dtype(op, f"{name}_tensor_scale", tensor_scale, (torch.float32,))
        checks.same_device(op, first, (f"{name}_tensor_scale", tensor_scale))
        because = "for a tensor scale: " + ("one number for each group" if tensor_scales else "one number")
        checks.shape(op, f"{name}_tensor_scale", tensor_scale, tensor_scales, because)


def check_major(op: str, name: str, t: Tensor, dim: int, what: str) -> None:
    """Codes are contiguous along `dim`. Values are contiguous along either dimension of a matrix."""
    if t.dtype == CODES:
        check_unit_stride(op, name, t, dim, what)
    elif 1 not in t.stride()[-2:] and min(t.shape[-2:]) > 1:
        raise ValueError(f"{op}: {name} has strides {t.stride()}; needs values with a stride of 1 in either dimension")


def values(t: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of an operand, exact in fp64. Codes have blocks of 16 along the last dimension."""
    if scale is None:
        return t.double()
    blocks = widened(t, E2M1).double().unflatten(-1, (scale.shape[-1], NVFP4_BLOCK_SIZE))  # (..., K/16, 16)
    return (blocks * scale.double().unsqueeze(-1)).flatten(-2)
