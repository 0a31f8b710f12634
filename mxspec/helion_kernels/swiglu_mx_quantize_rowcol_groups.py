"""swiglu_mx_quantize_rowcol_groups in Helion: the tiles of `tiles/mx_rowcol_groups.py`.

The product stays in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.helion_kernels.tiles.mx_rowcol_groups import PTX as PTX
from mxspec.helion_kernels.tiles.mx_rowcol_groups import rowcol_groups

RANK = {(9, 0): 2, (10, 0): 2}  # Blackwell: compiled, not run; rates: benchmarks/results/decisions.md


def supports(gate_up: Tensor, offs: Tensor, **_: Any) -> str | None:
    # With other strides, the arithmetic of SwiGLU and the addresses need more registers than a thread has.
    if gate_up.stride(1) == 1:
        return None
    return "needs contiguous rows: stride 1 along the last dimension of gate_up"


def swiglu_mx_quantize_rowcol_groups(
    gate_up: Tensor,
    offs: Tensor,
    *,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rowcol_groups("swiglu", gate_up, offs, pad_to, elem_dtype, scaling, scale_layout)
