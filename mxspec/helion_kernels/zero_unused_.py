"""zero_unused_ in Helion. Usually there is nothing to zero: each program then reads one or two ends and stops."""

from __future__ import annotations

from typing import NamedTuple

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid

PTX = (r"st\.global\.v4\.b32",)


class Part(NamedTuple):
    programs: int  # the number of programs for all matrices together
    elements: int  # the number of elements that a program writes at a time
    num_warps: int


_HOPPER = Part(1024, 4096, 4)
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}


def _zero(
    x: Tensor, stride_g: int, stride_m: int, M: int, K: int, offs: Tensor, stride_offs: int, G: int,
    matrices: int, programs: int, of_groups: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for g, program in hl.grid([matrices, programs]):
        if of_groups:
            group = g + hl.arange(1)
            begin = hl.load(offs, [(group - 1) * stride_offs], extra_mask=group > 0)
            first = torch.where(hl.load(offs, [group * stride_offs]) <= begin, 0, M).sum(0)
        else:
            last = G - 1 + hl.arange(1)
            first = hl.load(offs, [last * stride_offs], extra_mask=last >= 0).sum(0).to(torch.int64)
            first = torch.where(first < 0, 0, torch.where(first < M, first, M))
        # Each program owns a run of the unused rows.
        run = (M - first + programs - 1) // programs
        row0 = first + program * run
        stop = torch.where(row0 + run < M, row0 + run, M)
        for m in hl.tile(torch.where(row0 < M, row0, M), stop, block_size=rows):
            for k in hl.tile(0, K, block_size=cols):
                place = g * stride_g + m.index.unsqueeze(1) * stride_m + k.index.unsqueeze(0)
                there = (m.index < stop).unsqueeze(1) & (k.index < K).unsqueeze(0)
                hl.store(x, [place], hl.zeros([m, k], dtype=x.dtype), extra_mask=there)


def zero_unused_(x: Tensor, offs: Tensor) -> None:
    if not x.numel():
        return
    matrices, (M, K) = x.shape[0] if x.ndim == 3 else 1, x.shape[-2:]
    most, elements, num_warps = for_device(CONFIGS, x.device)
    cols = min(helion.next_power_of_2(K), 2048)
    rows = elements // cols
    programs = max(1, min(most // matrices, -(-M // rows)))
    launch(
        _zero, {(9, 0): on_grid(2, num_warps)}, flat(x), x.stride(0), x.stride(-2), M, K,
        flat(offs), offs.stride(0), offs.shape[0], matrices, programs, x.ndim == 3, rows, cols,
    )  # fmt: skip
