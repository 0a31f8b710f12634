"""What Hopper's FP8 matmuls are fed by: a warp that loads tiles by TMA, and two that write down the tiles' scales.

`gemm.py` says what stages and groups are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mxspec.triton_kernels.hopper.names import async_load
from mxspec.triton_kernels.hopper.scheduler import blocks_of_group, geometry, next_group, place


@gluon.jit
def _load_tile(
    a_desc, b_desc, a_tiles, b_tiles, full, empty, i, row, b_row, blocks,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # Of few rows only those are read, and what the tile's others hold is multiplied for nothing.
    ROWS: gl.constexpr = a_desc.block_shape[0]
    for k in range(blocks):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), i // STAGES & 1)
        bar = full.index(stage)
        mbarrier.expect(bar, (ROWS + BLOCK_N) * 128)
        async_load(a_desc, [row, k * 128], bar, a_tiles.index(stage).slice(0, ROWS))
        async_load(b_desc, [b_row, k * 128], bar, b_tiles.index(stage))
        i += 1
    return i


@gluon.jit
def _load_group(
    group, a, b, a_tiles, b_tiles, full, empty, offs, offs_stride, M, N, M_tiles, N_tiles, K_blocks, i, last,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The tiles of a group, which is a matrix of its own in a and in b, by descriptors of its own.

    They are written where those of the group before last are, whose last block was loaded before block `last`.
    """
    begin, blocks = blocks_of_group(group, offs, offs_stride, K_blocks)
    of_group = M_tiles * N_tiles
    programs = gl.num_programs(0)
    own = gl.program_id(0) + gl.cdiv(gl.maximum(group * of_group - gl.program_id(0), 0), programs) * programs
    if (blocks > 0) & (own < (group + 1) * of_group):
        if (last > 0) & (i - last < STAGES):  # it may still be on its way
            mbarrier.wait(full.index((last - 1) % STAGES), (last - 1) // STAGES & 1)
        width = blocks * 128
        a_desc = tma.make_tensor_descriptor(
            a + begin.to(gl.int64) * 128 * M, [M, width], [width, 1], [BLOCK_M, 128], a_tiles.layout
        )
        b_desc = tma.make_tensor_descriptor(
            b + begin.to(gl.int64) * 128 * N, [N, width], [width, 1], [BLOCK_N, 128], b_tiles.layout
        )
        for tile in range(own, (group + 1) * of_group, programs):
            m, n = place(tile - group * of_group, M_tiles, N_tiles, GROUP)
            i = _load_tile(
                a_desc, b_desc, a_tiles, b_tiles, full, empty, i, m * BLOCK_M, n * BLOCK_N, blocks, BLOCK_N, STAGES
            )
        last = i
    return i, last


@gluon.jit
def load(
    a, b, a_tiles, b_tiles, full, empty, offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    i = 0
    if GROUPS == "K":  # a and b are the codes themselves; while one pair of descriptors is written, the other is read
        even, odd = 0, 0
        for group in range(0, G, 2):
            i, even = _load_group(
                group, a, b, a_tiles, b_tiles, full, empty, offs, offs_stride, M, N, M_tiles, N_tiles, K_blocks,
                i, even, BLOCK_M, BLOCK_N, STAGES, GROUP,
            )  # fmt: skip
            if group + 1 < G:
                i, odd = _load_group(
                    group + 1, a, b, a_tiles, b_tiles, full, empty, offs, offs_stride, M, N, M_tiles, N_tiles,
                    K_blocks, i, odd, BLOCK_M, BLOCK_N, STAGES, GROUP,
                )  # fmt: skip
    else:
        at = (-1, 0, 0, 0)
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            if GROUPS == "M":
                at = next_group(tile, at, offs, offs_stride, G, M, N_tiles, BLOCK_M)
            group, row, _, n, _, blocks = geometry(
                tile, at, offs, offs_stride, G, M, M_tiles, N_tiles, K_blocks, BLOCK_M, GROUP, GROUPS
            )
            b_row = n * BLOCK_N
            if GROUPS == "M":
                b_row += group * N
            i = _load_tile(a, b, a_tiles, b_tiles, full, empty, i, row, b_row, blocks, BLOCK_N, STAGES)
    # The math warpgroups look one block ahead, after the last one too.
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), i // STAGES & 1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def scale(
    a_scale, a_stride_m, a_stride_k, b_scale, b_stride_e, b_stride_n, b_stride_k, row_scales, column_scales,
    full, empty, offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, VECTOR: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    i = 0
    rows = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 64], [32], [2], [0]))
    columns = gl.arange(0, BLOCK_N, gl.BlockedLayout([max(BLOCK_N // 64, 1)], [32], [2], [0]))
    at = (-1, 0, 0, 0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if GROUPS == "M":
            at = next_group(tile, at, offs, offs_stride, G, M, N_tiles, BLOCK_M)
        group, row, end, n, begin, blocks = geometry(
            tile, at, offs, offs_stride, G, M, M_tiles, N_tiles, K_blocks, BLOCK_M, GROUP, GROUPS
        )
        a_there = rows < end - row
        a_at = a_scale + (row + rows).to(gl.int64) * a_stride_m
        if VECTOR:  # a scale for each row of b
            b_there = columns < N - n * BLOCK_N
            b_at = b_scale + (n * BLOCK_N + columns).to(gl.int64) * b_stride_n
        else:  # one for its 128 rows
            b_there = True
            b_at = b_scale + (n * BLOCK_N // 128).to(gl.int64) * b_stride_n
        if GROUPS == "M":
            b_at += group.to(gl.int64) * b_stride_e
        if GROUPS == "K":
            a_at += begin.to(gl.int64) * a_stride_k
            b_at += begin.to(gl.int64) * b_stride_k
        # AHEAD blocks' are on their way while a block's wait for a stage; none has a register that is handed on.
        of_a, of_b = (), ()
        for j in gl.static_range(AHEAD):
            of_a = of_a + (gl.load(a_at + j * a_stride_k, mask=a_there & (j < blocks), other=0.0),)
            of_b = of_b + (gl.load(b_at + j * b_stride_k, mask=b_there & (j < blocks), other=0.0),)
        for first in range(0, blocks, AHEAD):
            next_a, next_b = (), ()
            for j in gl.static_range(AHEAD):
                k = first + j
                more = k + AHEAD < blocks
                next_a = next_a + (gl.load(a_at + AHEAD * a_stride_k, mask=a_there & more, other=0.0),)
                next_b = next_b + (gl.load(b_at + AHEAD * b_stride_k, mask=b_there & more, other=0.0),)
                a_at += a_stride_k
                b_at += b_stride_k
                if k < blocks:
                    stage = i % STAGES
                    mbarrier.wait(empty.index(stage), i // STAGES & 1)
                    if VECTOR:
                        row_scales.index(stage).store(of_a[j])
                        column_scales.index(stage).store(of_b[j])
                    else:
                        row_scales.index(stage).store(of_a[j] * of_b[j])
                    mbarrier.arrive(full.index(stage), count=1)
                    i += 1
            of_a, of_b = next_a, next_b
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), i // STAGES & 1)
    mbarrier.arrive(full.index(stage), count=1)
