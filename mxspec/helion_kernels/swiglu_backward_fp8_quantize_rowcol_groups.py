"""swiglu_backward_fp8_quantize_rowcol_groups in Helion: the tiles of `tiles/fp8_rowcol_groups.py`.

A program reads a block of gate, of up and of dh. It writes the codes of a block of d_gate and of d_up.
"""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.tiles.fp8_rowcol_groups import PTX as PTX
from mxspec.helion_kernels.tiles.fp8_rowcol_groups import rowcol_groups


def swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Tensor, dh: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rowcol_groups("gradient", gate_up, offs, scale_format, dh=dh)
