"""SwiGLU on Helion tiles: `silu(gate) * up`. `reference/common/swiglu.py` defines it."""

from __future__ import annotations

import os

import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.numerics import widened

# Ref mode runs no Triton source. It computes the sigmoid in fp64 instead, as the reference does.
_REF = os.environ.get("HELION_INTERPRET") == "1"

# Silu, rounded to bfloat16, needs only an approximation of two units in the last place: a test tries every gate. Below
# -87.25, the sigmoid is below the smallest normal number, and counts as 0.
_SILU = """
@triton.jit
def swiglu_silu(x):
    s = 1.0 / (1.0 + tl.exp2(x * -1.4426950216293335))
    return x * tl.where(x < -87.25, 0.0, s)
"""


def _silu(gate: Tensor) -> Tensor:
    """`gate * sigmoid(gate)` in fp32. Rounded to bfloat16, it is right for every gate."""
    if not _REF:
        return hl.triton_kernel(_SILU, args=(gate,), output_like=gate)
    s = (1.0 / (1.0 + torch.exp(-gate.double()))).float()
    return gate * torch.where(s < torch.finfo(torch.float32).tiny, 0.0, s)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of bfloat16. Silu and the product are each rounded to bfloat16."""
    silu = _silu(widened(gate)).to(torch.bfloat16)
    return (widened(silu) * widened(up)).to(torch.bfloat16)
