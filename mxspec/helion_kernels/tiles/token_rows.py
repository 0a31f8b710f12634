"""One kernel pads, places and unpads token groups. For each row of the output, it finds the row of x to copy.

The loop is an `hl.grid`, so that a program has its rows whole. Ref mode then runs the programs one by one, and so tests
the masks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import helion
import helion.language as hl
import torch
from torch import Tensor

from mxspec.formats import INT_OF_BYTES
from mxspec.helion_kernels.common.groups import at_or_before, chunk, padded_ends, passed, token_at, tokens_of
from mxspec.helion_kernels.common.launch import flat, for_device, launch, on_grid


class Part(NamedTuple):
    rows: int  # rows of a program
    bytes: int  # bytes of each row, at most
    num_warps: int


# A thread moves two 16-byte words; four are slower (benchmarks/tune.py, benchmarks/results/decisions.md).
_HOPPER = Part(4, 2048, 8)
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}


def _move_rows(
    x: Tensor, stride_m: int, stride_k: int, rows_in: int, out: Tensor, rows_out: int, K: int, col_programs: int,
    offs: Tensor, stride_offs: int, G: int, start: Tensor, stride_start: int, end: Tensor,
    how: hl.constexpr, alignment: hl.constexpr, even: hl.constexpr,
    chunk: hl.constexpr, rows: hl.constexpr, cols: hl.constexpr,
) -> None:  # fmt: skip
    for row_program, col_program in hl.grid([(rows_out + rows - 1) // rows, col_programs]):
        k = (col_program * cols + hl.arange(cols)).unsqueeze(0)
        row = row_program * rows + hl.arange(rows)
        # The row of x for each row of the output, and whether it exists in the group.
        if how == "pad":  # `rows` divides the alignment, so that all rows of a program belong to one group
            row0 = row_program * rows + hl.arange(1)
            group, begin = row0 * 0, row0 * 0
            before = hl.zeros([], dtype=torch.int32)
            for i in range(0, G, chunk):
                g, begins, ends, before = padded_ends(offs, stride_offs, G, before, i, alignment, chunk)
                group, begin = passed(group, begin, row0, g, ends, G)
                if row_program + col_program == 0:
                    hl.store(start, [g], begins, extra_mask=g < G)
                    hl.store(end, [g], ends, extra_mask=g < G)
            first, stop = tokens_of(group, offs, stride_offs, G)
            source = first + row - begin
            there = source < stop
        elif how == "place":
            source = row * 0 - 1
            for i in range(0, G, chunk):
                source = torch.maximum(source, token_at(offs, stride_offs, start, stride_start, G, i, chunk, row))
            there = source >= 0
        else:
            count = row * 0
            for i in range(0, G, chunk):
                count = count + at_or_before(offs, stride_offs, G, i, chunk, row)
            token = hl.load(offs, [(count - 1) * stride_offs], extra_mask=count > 0)
            source = hl.load(start, [count * stride_start], extra_mask=count < G) + row - token
            there = count < G
        there = there & (source >= 0) & (source < rows_in)  # also if offs is out of order
        values = hl.load(x, [source.unsqueeze(1) * stride_m + k * stride_k], extra_mask=there.unsqueeze(1) & (k < K))
        owned = None if even else (row < rows_out).unsqueeze(1) & (k < K)
        hl.store(out, [row.unsqueeze(1) * K + k], values, extra_mask=owned)


def supports(x: Tensor, rows_out: int) -> str | None:
    chosen = for_device(CONFIGS, x.device)
    programs = rows_out * -(-x.shape[1] * x.element_size() // chosen.bytes)
    return None if programs < 2**31 else f"takes under 2^31 programs, the limit of its grid; this call needs {programs}"


def move_rows(
    how: str, x: Tensor, offs: Tensor, start: Tensor, end: Tensor, rows_out: int, alignment: int = 1
) -> Tensor:
    """Copy rows of x. `how` is `pad`, which writes `start` and `end`, or `place` or `unpad`, which read `start`."""
    rows_in, K = x.shape
    out = x.new_empty((rows_out, K))
    most, width, num_warps = for_device(CONFIGS, x.device)
    cols = min(helion.next_power_of_2(max(1, K)), width // x.element_size())
    rows = math.gcd(most, alignment) if how == "pad" else most
    col_programs = max(1, -(-K // cols))  # at least 1: without columns, a program still writes start and end
    num_warps = max(1, min(num_warps, rows * cols * x.element_size() // 512))  # 16 bytes a thread
    if rows_out and (K or how == "pad"):
        bits, G = INT_OF_BYTES[x.element_size()], offs.shape[0]
        launch(
            _move_rows, {(9, 0): on_grid(2, num_warps)}, flat(x.view(bits)), *x.stride(), rows_in,
            flat(out.view(bits)), rows_out, K, col_programs, flat(offs), offs.stride(0), G,
            flat(start), start.stride(0), flat(end), how, alignment, rows_out % rows == 0 and K % cols == 0,
            chunk(G), rows, cols,
        )  # fmt: skip
    return out
