"""clamped_swiglu_backward_fp8_quantize_rowcol_groups in Helion: the tiles of `tiles/fp8_rowcol_groups.py`.

Gate and up alternate in memory. A thread loads 4 of each with one access, and their gradients stay in registers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxspec.helion_kernels.tiles.fp8_rowcol_groups import PTX as PTX
from mxspec.helion_kernels.tiles.fp8_rowcol_groups import rowcol_groups


def supports(gate_up: Tensor, bias: Tensor, dh: Tensor, *_: Any, **__: Any) -> str | None:
    # With other strides, the arithmetic and the addresses need more registers than a thread has.
    if gate_up.stride(1) == dh.stride(1) == 1:
        return None
    return "needs contiguous rows: stride 1 along the last dimension of gate_up and dh"


def clamped_swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Tensor, bias: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rowcol_groups("clamped gradient", gate_up, offs, scale_format, dh=dh, bias=bias)
