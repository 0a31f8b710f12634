"""swiglu_backward in Helion: the kernel of `tiles/swiglu.py`."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.tiles.swiglu import elementwise

PTX = (r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32")


def swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> Tensor:
    return elementwise(gate, up, dh)
