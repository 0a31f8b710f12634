"""mx_requantize_groups in Helion: the tiles of mx_quantize_groups, which read codes and scale bytes of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.helion_kernels.mx_quantize_groups import groups

# An H100 has run the timed shapes, and not all cases, so it has no rank. The kernel is slower than Triton's, and a call
# takes the host longer.
PTX = (
    r"ld\.global\.v2\.b32",
    r"st\.global\.v4\.b32",
    r"cvt\.rn\.f16x2\.e[45]m[32]x2",
    r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32",
    r"mul\.(rn\.)?f32",  # without .ftz, which would lose the subnormals
)


def mx_requantize_groups(
    qdata: Tensor,
    scale: Tensor,
    offs: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return groups(
        qdata.view(torch.uint8), offs, -2, pad_to, elem_dtype, scaling, scale_layout, scale.view(torch.uint8),
        element(qdata.dtype).name, dtype == torch.bfloat16,
    )  # fmt: skip
