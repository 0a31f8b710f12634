"""swiglu in Triton: the kernel of `tiles/swiglu.py`."""

from __future__ import annotations

from torch import Tensor

from mxspec.triton_kernels.tiles.swiglu import elementwise

RANK = {(9, 0): 1, (10, 0): 1}  # Blackwell: compiled, not run
PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return elementwise(gate, up, None)
