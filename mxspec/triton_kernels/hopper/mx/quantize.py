"""The launch of the Gluon kernel of `both_ways.py`: MX codes of token groups in both directions on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxspec.formats import E5M2, element, exponent_rule
from mxspec.triton_kernels.common.groups import chunk, padded_rows
from mxspec.triton_kernels.common.launch import UNFUSED, grid
from mxspec.triton_kernels.hopper import quantizers, releases
from mxspec.triton_kernels.tiles.fp8_both_ways import GRADIENT, SWIGLU, Results
from mxspec.triton_kernels.tiles.mx_both_ways import allocated

if releases.refusal() is None:
    from mxspec.triton_kernels.hopper.mx.both_ways import mx_both_ways_sm90, places_of_blocks

# The registers of a thread for each kind of values, so that three or two programs fit on a multiprocessor. Under later
# releases a thread would spill under these limits.
REGISTERS: dict[int, int] = {0: 80, 1: 80, 2: 128} if releases.release() == "3.6" else {}


def reads(features: int, offs: Tensor, pad_to: int, *tensors: Tensor) -> bool:
    """Whether the Gluon kernel can run. The plain tiles take any other tensors."""
    rows = padded_rows(tensors[0].shape[0], offs.shape[0], pad_to)
    return quantizers.reads(features, *tensors) and rows < 2**24  # offsets in a tile have 32 bits


def both_ways(
    values: int, x: Tensor, dh: Tensor | None, offs: Tensor, pad_to: int, elem_dtype: torch.dtype | str, scaling: str,
    scale_layout: str,
) -> Results:  # fmt: skip
    """Launch, for what `reads` accepts. The arguments are those of `tiles.mx_both_ways.both_ways`."""
    M, G, fmt, blocked = x.shape[0], offs.shape[0], element(elem_dtype), scale_layout == "blocked"
    K = x.shape[1] // 2 if values == SWIGLU.value else x.shape[1]
    results = allocated(x, offs, K, pad_to, fmt.dtype, blocked)
    q_row, s_row, q_col, s_col, start, end = results
    blocks = q_row.shape[0] // 128
    scaled = blocks + G if blocked else blocks
    places = grid(1, scaled)
    table = offs.new_empty((places[1] * places[2], 4))
    places_of_blocks[(len(table),)](
        table, start, end, offs, offs.stride(0), M, G, blocks, scaled, pad_to, chunk(G), num_warps=4, **UNFUSED
    )
    # An aligned program computes a tile of both gradients. If the halves end inside a tile, it computes one tile.
    half = x.shape[1] // 2
    apart = values == GRADIENT.value and half % 128 != 0
    across = half if values == GRADIENT.value and not apart else K
    emax, added, _ = exponent_rule(fmt, scaling, x.dtype)
    # With plain scales, the gradient spills under a limit. A program of one gradient needs none.
    limited = values != GRADIENT.value or (blocked and not apart)
    options: dict[str, Any] = {"num_warps": 8, "maxnreg": REGISTERS.get(values) if limited else None, **UNFUSED}
    mx_both_ways_sm90[grid(-(-across // 128), scaled)](
        x.view(torch.int32), x.stride(0) // 2,
        *((None, 0) if dh is None else (dh.view(torch.int32), dh.stride(0) // 2)),
        q_row.view(torch.int16), s_row.view(torch.int8), q_col.mT.view(torch.int8), s_col.view(torch.int8), table,
        blocks, K, half, (added >> 16) * 0x10001, (emax << 7) * 0x10001,
        values, fmt is E5M2, blocked, K % 128 != 0, apart, **options,
    )  # fmt: skip
    return results
