"""mx_quantize_rowcol_groups in Helion: the tiles of `tiles/mx_rowcol_groups.py`. Each token is read once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.helion_kernels.common import numerics
from mxspec.helion_kernels.tiles.mx_rowcol_groups import PTX as PTX
from mxspec.helion_kernels.tiles.mx_rowcol_groups import rowcol_groups

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run; rates: benchmarks/results/decisions.md


def supports(x: Tensor, offs: Tensor, *, elem_dtype: torch.dtype | str = torch.float8_e4m3fn, **_: Any) -> str | None:
    return numerics.takes_fp8(elem_dtype)


def mx_quantize_rowcol_groups(
    x: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rowcol_groups("tokens", x, offs, pad_to, elem_dtype, scaling, scale_layout)
