"""fp8_quantize_rowcol_groups in Helion: the tiles of `tiles/fp8_rowcol_groups.py`. Each token is read once."""

from __future__ import annotations

from torch import Tensor

from mxspec.helion_kernels.tiles.fp8_rowcol_groups import PTX as PTX
from mxspec.helion_kernels.tiles.fp8_rowcol_groups import rowcol_groups


def fp8_quantize_rowcol_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rowcol_groups("tokens", x, offs, scale_format, eps)
