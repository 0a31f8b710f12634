"""The layouts in which kernels read scales: conversion from and to plain scales, and pictures.

`convert` moves scales from any layout to any other. `scale_at` says which scale lies at each place of memory. `draw`
and `listing` show a layout. A layout is one entry of `LAYOUTS`: a function from plain scales and a function back.
Everything else calls these two functions. `print(explain())` shows the table of all layouts:

>>> print(explain("deepgemm_packed"))
deepgemm_packed
  who     DeepGEMM on Blackwell; four UE8M0 bytes in an int32
  shape   (R, Cp/4) int32, strides (1, Rp); Rp = 4*ceil(R/4), Cp = 4*ceil(C/4)
  offset  c // 4 * 4 * Rp + 4 * r + c % 4
  holds   float8_e8m0fnu, uint8; of float32 powers of two and NaN
  padding 0
  loses   nothing
  source  DeepGEMM csrc/jit_kernels/impls/smxx_layout.hpp, get_mn_major_tma_aligned_packed_ue8m0_tensor
"""

from mxspec.layouts._convert import convert, scale_at
from mxspec.layouts._draw import draw, listing
from mxspec.layouts._table import LAYOUTS, Layout, explain

__all__ = ["LAYOUTS", "Layout", "convert", "draw", "explain", "listing", "scale_at"]
