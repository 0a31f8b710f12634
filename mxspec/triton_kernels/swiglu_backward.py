"""swiglu_backward in Triton: the kernel of `tiles/swiglu.py`, which reads each element once."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.tiles.swiglu import elementwise

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> Tensor:
    return elementwise(gate, up, dh)
