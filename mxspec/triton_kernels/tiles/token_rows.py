"""One kernel pads, places and unpads token groups. For each row of the output, it finds the row of x to copy."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from mxspec.formats import INT_OF_BYTES
from mxspec.triton_kernels.common.groups import chunk, group_of
from mxspec.triton_kernels.common.launch import UNFUSED, for_device

# A program moves ROWS rows, and up to BYTES bytes of each. A thread moves two 16-byte words; four are slower
# (benchmarks/tune.py, benchmarks/results/decisions.md).
_HOPPER = {"ROWS": 4, "BYTES": 2048, "num_warps": 8}
CONFIGS = {(9, 0): _HOPPER, (10, 0): _HOPPER}


@triton.jit
def _ended_before(row, ends, stride, G, CHUNK: tl.constexpr):
    """The number of ends that are at or before each row (N,)."""
    count = row * 0
    for i in range(0, G, CHUNK):
        g = i + tl.arange(0, CHUNK)
        end = tl.load(ends + g * stride, mask=g < G, other=2147483647)
        count += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    return count


@triton.jit
def _token_at(row, offs, stride_offs, start, stride_start, G, CHUNK: tl.constexpr):
    """The token of each row (N,), or -1 if there is none. Groups may be in any order.

    If groups share a row, the last token counts.

    The program reads three numbers of every group. To count the starts at or before a row would take one number of each
    group, but would need starts in order, and more loads after the count.
    """
    token = row * 0 - 1
    for i in range(0, G, CHUNK):
        g = i + tl.arange(0, CHUNK)
        first = tl.load(offs + (g - 1) * stride_offs, mask=(g > 0) & (g < G), other=0)
        stop = tl.load(offs + g * stride_offs, mask=g < G, other=0)
        place = row[:, None] - tl.load(start + g * stride_start, mask=g < G, other=0)[None, :]  # within the group
        here = (place >= 0) & (place < (stop - first)[None, :])
        token = tl.maximum(token, tl.max(tl.where(here, first[None, :] + place, -1), 1))
    return token


@triton.jit
def _move_rows(
    x, out, start, end, offs,
    rows_in, rows_out, K, G, stride_m, stride_k, stride_offs, stride_start, col_programs,
    HOW: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0) // col_programs * ROWS
    k0, k = tl.program_id(0) % col_programs * COLS, tl.arange(0, COLS)
    row = row0 + tl.arange(0, ROWS)
    # Find the row of x for each row of the output. Rows at or past `limit` do not exist.
    if HOW == "pad":  # ROWS divides the alignment, so that all ROWS rows belong to one group
        writes = tl.program_id(0) == 0
        _, first, limit, begin = group_of(row0, offs, stride_offs, G, start, end, writes, ALIGN, CHUNK)
        source = first + row - begin
    elif HOW == "place":
        source = _token_at(row, offs, stride_offs, start, stride_start, G, CHUNK)
        limit = rows_in
    else:
        g = _ended_before(row, offs, stride_offs, G, CHUNK)
        first = tl.load(offs + (g - 1) * stride_offs, mask=g > 0, other=0)
        source = tl.load(start + g * stride_start, mask=g < G, other=0) + row - first
        limit = tl.where(g < G, rows_in, 0)
    there = (source >= 0) & (source < tl.minimum(limit, rows_in))  # also if offs or start are out of order
    # The pointers move to the first column, so that a thread does not keep an address for each of its elements.
    x += k0.to(tl.int64) * stride_k
    values = tl.load(
        x + (source.to(tl.int64) * stride_m)[:, None] + (k.to(tl.int64) * stride_k)[None, :],
        mask=there[:, None] & (k0 + k < K)[None, :], other=0,
    )  # fmt: skip
    place = (row.to(tl.int64) * K)[:, None] + k[None, :]
    tl.store(out + k0 + place, values, mask=(row < rows_out)[:, None] & (k0 + k < K)[None, :])


def supports(x: Tensor, rows_out: int) -> str | None:
    chosen = for_device(CONFIGS, x.device)
    programs = rows_out * -(-x.shape[1] * x.element_size() // chosen["BYTES"])
    return None if programs < 2**31 else f"takes under 2^31 programs, the limit of its grid; this call needs {programs}"


def move_rows(
    how: str, x: Tensor, offs: Tensor, start: Tensor, end: Tensor, rows_out: int, alignment: int = 1
) -> Tensor:
    """Copy rows of x. `how` is `pad`, which writes `start` and `end`, or `place` or `unpad`, which read `start`."""
    rows_in, K = x.shape
    out = x.new_empty((rows_out, K))
    chosen = for_device(CONFIGS, x.device)
    cols = min(triton.next_power_of_2(max(1, K)), chosen["BYTES"] // x.element_size())
    rows = math.gcd(chosen["ROWS"], alignment) if how == "pad" else chosen["ROWS"]
    col_programs = max(1, -(-K // cols))  # at least one: with no columns, start and end are still written
    num_warps = max(1, min(chosen["num_warps"], rows * cols * x.element_size() // 512))  # 16 bytes a thread
    if rows_out and (K or how == "pad"):
        bits = INT_OF_BYTES[x.element_size()]
        _move_rows[(-(-rows_out // rows) * col_programs,)](
            x.view(bits), out.view(bits), start, end, offs, rows_in, rows_out, K, offs.shape[0],
            *x.stride(), offs.stride(0), start.stride(0), col_programs,
            how, alignment, chunk(offs.shape[0]), rows, cols, num_warps=num_warps, **UNFUSED,
        )  # fmt: skip
    return out
