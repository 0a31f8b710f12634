"""Put the columns of tokens into the order in which `gemm.py` reads weights in pairs of bytes: see `formats.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxspec.triton_kernels.common.groups import chunk
from mxspec.triton_kernels.common.launch import UNFUSED
from mxspec.triton_kernels.hopper.plan import tiles_of, write_plan

TOKENS = {"ROWS": 8, "WORDS": 256, "num_warps": 4}  # a program has ROWS rows of WORDS words of two numbers


@triton.jit
def tokens_even_first(
    x, stride_r, out, R, K, plan, tiles, offs, offs_stride, G, CHUNK: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write bfloat16 tokens. In each 16 columns, the even ones come before the odd ones. Also write the plan."""
    if plan is not None:
        if tl.program_id(1) == 0:
            write_plan(plan, tiles, offs, offs_stride, G, R, CHUNK, TILE)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first, end = tl.program_id(1) * WORDS, K // 2
    word, pair = first + tl.arange(0, WORDS), tl.arange(0, WORDS // 2)
    x, out = x.to(tl.pointer_type(tl.int32)), out.to(tl.pointer_type(tl.int32))
    there = (r < R)[:, None]
    found = tl.load(x + (r * (stride_r // 2))[:, None] + word[None, :], mask=there & (word < end)[None, :], other=0)
    one, next = tl.split(found.reshape(ROWS, WORDS // 2, 2))
    # The four even words of 16 columns, and after them the four odd words.
    at = out + (r * end)[:, None] + (first + pair // 4 * 8 + pair % 4)[None, :]
    there &= (pair < (end - first) // 2)[None, :]
    tl.store(at, (one & 0xFFFF) | (next << 16), mask=there)
    tl.store(at + 4, ((one >> 16) & 0xFFFF) | (next & -0x10000), mask=there)


def even_first(x: Tensor, offs: Tensor | None = None, tile: int = 0) -> tuple[Tensor, Tensor | None]:
    """Tokens in the order of `tokens_even_first`, and with `offs` the plan for tiles of `tile` tokens."""
    (R, K), plan, tiles = x.shape, None, 0
    if offs is not None:
        tiles = tiles_of(R, offs.shape[0], tile)
        plan = offs.new_empty(tiles, 4)
    out = torch.empty((R, K), dtype=torch.bfloat16, device=x.device)
    groups = (None, 0, 0, 0) if offs is None else (offs, offs.stride(0), offs.shape[0], chunk(offs.shape[0]))
    programs = max(-(-R // TOKENS["ROWS"]), tiles), -(-K // (2 * TOKENS["WORDS"]))
    tokens_even_first[programs](
        x, x.stride(0), out, R, K, plan, tiles, *groups, tile, **TOKENS, **UNFUSED,
    )  # fmt: skip
    return out, plan
