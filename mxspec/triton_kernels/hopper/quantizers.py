"""What the Gluon quantizers of token groups in both directions can read."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.triton_kernels.common.launch import capability
from mxspec.triton_kernels.hopper import releases


def reads(features: int, *tensors: Tensor | None) -> bool:
    """Whether a Gluon quantizer can run: the GPU is a Hopper, and rows of bfloat16 begin at multiples of 16 bytes.

    The plain tiles take widths that are no multiple of 32.
    """
    x = tensors[0]
    if x is None or x.device.type == "cpu" or capability(x.device) != (9, 0) or releases.refusal() or not x.numel():
        return False
    if features % 32:  # Triton knows that a stride is a multiple of 16 words of two values, or knows nothing about it
        return False
    return all(
        t is None
        or (
            t.dtype == torch.bfloat16
            and t.stride(1) == 1
            and t.stride(0) % 8 == 0
            and t.data_ptr() % 16 == 0
            and 0 < t.stride(0) < 2**23  # offsets in a tile have 32 bits
            and max(t.shape) < 2**23
        )
        for t in tensors
    )
