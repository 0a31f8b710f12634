"""clamped_swiglu_fp8_quantize_rowcol_groups in Helion: the tiles of `tiles/fp8_rowcol_groups.py`.

Gate and up alternate in memory, and a thread loads each of them alone.
"""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.tiles.fp8_rowcol_groups import rowcol_groups

PTX = (r"st\.global\.v2\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32")


def clamped_swiglu_fp8_quantize_rowcol_groups(
    gate_up: Tensor, bias: Tensor, offs: Tensor, *, scale_format: str = "fp32", check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rowcol_groups("clamped", gate_up, offs, scale_format, bias=bias)
