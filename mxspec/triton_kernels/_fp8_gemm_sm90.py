"""fp8_gemm on Hopper, in Gluon: persistent programs of math warpgroups, a warp that loads and a warp that scales.

A stage of shared memory holds 128 of K: a tile of a, one of b, and their scales. One warp fills the tiles by TMA; one
reads the scales, whatever their strides, and writes what a row of the tile is to be multiplied by. Each math warpgroup
multiplies its 64 or 128 rows on the tensor cores, whose sums keep about 14 bits, and adds them, scaled, to fp32
accumulators. A barrier per stage says that it is full, another that the math warpgroups are done with it.

What a stage is used for is counted by `i`, blocks of K since the program began, over all its tiles: every warp counts
for itself, stage `i % STAGES`, phase `i // STAGES % 2`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxspec.triton_kernels._math_warpgroup_sm90 import my_turn, promote, write, your_turn

# As it is called since Triton 3.7, and before.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _place(tile, M_tiles, N_tiles, GROUP: gl.constexpr):
    """Tiles run down GROUP tiles of M, then along N: what runs at a time shares rows of a and of b in the L2."""
    of_group = GROUP * N_tiles
    first = tile // of_group * GROUP
    rows = gl.minimum(M_tiles - first, GROUP)
    inside = tile % of_group
    return first + inside % rows, inside // rows


@gluon.jit
def _load(
    a_desc, b_desc, a_tiles, b_tiles, full, empty, M_tiles, N_tiles, K_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    # Of few rows only those are read, and what the tile's others hold is multiplied for nothing.
    ROWS: gl.constexpr = a_desc.block_shape[0]
    i = 0
    for tile in range(gl.program_id(0), M_tiles * N_tiles, gl.num_programs(0)):
        m, n = _place(tile, M_tiles, N_tiles, GROUP)
        for k in range(K_blocks):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), i // STAGES & 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (ROWS + BLOCK_N) * 128)
            tma.async_copy_global_to_shared(a_desc, [m * BLOCK_M, k * 128], bar, a_tiles.index(stage).slice(0, ROWS))
            tma.async_copy_global_to_shared(b_desc, [n * BLOCK_N, k * 128], bar, b_tiles.index(stage))
            i += 1
    # The math warpgroups look one block ahead, after the last one too.
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), i // STAGES & 1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _scale(
    a_scale, a_stride_m, a_stride_k, b_scale, b_stride_n, b_stride_k, row_scales, column_scales, full, empty,
    M, N, M_tiles, N_tiles, K_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    VECTOR: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    i = 0
    rows = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 64], [32], [2], [0]))
    columns = gl.arange(0, BLOCK_N, gl.BlockedLayout([max(BLOCK_N // 64, 1)], [32], [2], [0]))
    for tile in range(gl.program_id(0), M_tiles * N_tiles, gl.num_programs(0)):
        m, n = _place(tile, M_tiles, N_tiles, GROUP)
        a_there = rows < M - m * BLOCK_M
        a_at = a_scale + (m * BLOCK_M + rows).to(gl.int64) * a_stride_m
        if VECTOR:  # a scale for each row of b
            b_there = columns < N - n * BLOCK_N
            b_at = b_scale + (n * BLOCK_N + columns).to(gl.int64) * b_stride_n
        else:  # one for its 128 rows
            b_there = True
            b_at = b_scale + (n * BLOCK_N // 128).to(gl.int64) * b_stride_n
        # AHEAD blocks' are on their way while a block's wait for a stage; none has a register that is handed on.
        of_a, of_b = (), ()
        for j in gl.static_range(AHEAD):
            of_a = of_a + (gl.load(a_at + j * a_stride_k, mask=a_there & (j < K_blocks), other=0.0),)
            of_b = of_b + (gl.load(b_at + j * b_stride_k, mask=b_there & (j < K_blocks), other=0.0),)
        for first in range(0, K_blocks, AHEAD):
            next_a, next_b = (), ()
            for j in gl.static_range(AHEAD):
                k = first + j
                more = k + AHEAD < K_blocks
                next_a = next_a + (gl.load(a_at + AHEAD * a_stride_k, mask=a_there & more, other=0.0),)
                next_b = next_b + (gl.load(b_at + AHEAD * b_stride_k, mask=b_there & more, other=0.0),)
                a_at += a_stride_k
                b_at += b_stride_k
                if k < K_blocks:
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


@gluon.jit
def _multiply(
    out_desc, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty, M_tiles, N_tiles, K_blocks,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, TURNS: gl.constexpr, VECTOR: gl.constexpr, ONCE: gl.constexpr,
    BUFFERS: gl.constexpr, CHUNKS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    per_row: gl.constexpr = gl.SliceLayout(1, mma)
    per_column: gl.constexpr = gl.SliceLayout(0, mma)
    first: gl.constexpr = WARPGROUP * HALVES * 64
    own_buffer: gl.constexpr = WARPGROUP * BUFFERS
    if WARPGROUP == 1:
        your_turn(WARPGROUP, TURNS)

    i = 0
    partial = gl.zeros([64, BLOCK_N], gl.float32, mma)
    mbarrier.wait(full.index(0), 0)
    if not ONCE:
        s_upper = row_scales.index(0).slice(first, 64).load(per_row)
        s_lower = row_scales.index(0).slice(first + (HALVES - 1) * 64, 64).load(per_row)
    _barrier()
    for tile in range(gl.program_id(0), M_tiles * N_tiles, gl.num_programs(0)):
        upper = gl.zeros([64, BLOCK_N], gl.float32, mma)
        lower = gl.zeros([64, BLOCK_N], gl.float32, mma)
        for _ in range(K_blocks):
            stage, before, after = i % STAGES, (i + STAGES - 1) % STAGES, (i + 1) % STAGES
            a, b = a_tiles.index(stage), b_tiles.index(stage).permute((1, 0))

            # The last partial sum goes in as the accumulator that is not used: fresh zeros would be moves.
            my_turn(WARPGROUP, TURNS)
            running = warpgroup_mma(a.slice(first, 64), b, partial, use_acc=False, is_async=True)
            your_turn(WARPGROUP, TURNS)
            # An arrival is a barrier of the warpgroup before and one after, which here cost nothing: a matmul runs.
            mbarrier.arrive(empty.index(before), count=1)
            _barrier()
            s_column = 0.0
            if ONCE:
                s_upper = row_scales.index(stage).slice(first, 64).load(per_row)
                s_column = column_scales.index(stage).load(per_column)
            if HALVES == 2:
                partial = warpgroup_mma_wait(0, deps=[running])
                if VECTOR and not ONCE:
                    s_column = column_scales.index(stage).load(per_column)
                upper = promote(partial, s_upper, s_column, upper, VECTOR)
                my_turn(WARPGROUP, TURNS == 2)
                running = warpgroup_mma(a.slice(first + 64, 64), b, partial, use_acc=False, is_async=True)
                your_turn(WARPGROUP, TURNS == 2)
            # Nor does a look at the next block.
            mbarrier.wait(full.index(after), (i + 1) // STAGES & 1)
            if ONCE:
                s_lower = row_scales.index(stage).slice(first + (HALVES - 1) * 64, 64).load(per_row)
            else:
                next_upper = row_scales.index(after).slice(first, 64).load(per_row)
                next_lower = row_scales.index(after).slice(first + (HALVES - 1) * 64, 64).load(per_row)
            partial = warpgroup_mma_wait(0, deps=[running])
            if VECTOR and not ONCE:
                s_column = column_scales.index(stage).load(per_column)
            if HALVES == 2:
                lower = promote(partial, s_lower, s_column, lower, VECTOR)
            else:
                upper = promote(partial, s_upper, s_column, upper, VECTOR)
            if not ONCE:
                s_upper, s_lower = next_upper, next_lower
            i += 1
        m, n = _place(tile, M_tiles, N_tiles, GROUP)  # only now, since registers are scarce in the loop
        row, column = m * BLOCK_M + first, n * BLOCK_N
        write(out_desc, out_tiles, row, column, upper, own_buffer, BUFFERS, CHUNKS, ACCUMULATE)
        if HALVES == 2:
            next_buffer = own_buffer + CHUNKS % BUFFERS
            write(out_desc, out_tiles, row + 64, column, lower, next_buffer, BUFFERS, CHUNKS, ACCUMULATE)
    tma.store_wait(0)
    if WARPGROUP == 0:
        my_turn(WARPGROUP, TURNS)


@gluon.jit
def fp8_gemm_sm90(
    a_desc, b_desc, out_desc, a_scale, a_stride_m, a_stride_k, b_scale, b_stride_n, b_stride_k, M, N, K_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr, VECTOR: gl.constexpr, ONCE: gl.constexpr, BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr, AHEAD: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = BLOCK_M // (64 * WARPGROUPS)
    CHUNKS: gl.constexpr = BLOCK_N // out_desc.block_shape[1]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, 128], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, 128], b_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    column_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N if VECTOR else 4], flat)
    out_tiles = gl.allocate_shared_memory(
        out_desc.dtype, [WARPGROUPS * BUFFERS, 64, out_desc.block_shape[1]], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # the warp that loads and the one that scales
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    for stage in gl.static_range(
        STAGES - 1
    ):  # all but the last are free; that one is when block 0 runs, like any other
        mbarrier.arrive(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    M_tiles, N_tiles = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    # Each tuple stands where it is passed: one that has a name, or is put together, keeps no constants.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    out_desc, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
                    M_tiles, N_tiles, K_blocks,
                    0, BLOCK_M, BLOCK_N, HALVES, STAGES, GROUP, TURNS, VECTOR, ONCE, BUFFERS,
                    CHUNKS, ACCUMULATE,
                )),
                (_multiply, (
                    out_desc, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
                    M_tiles, N_tiles, K_blocks,
                    1, BLOCK_M, BLOCK_N, HALVES, STAGES, GROUP, TURNS, VECTOR, ONCE, BUFFERS,
                    CHUNKS, ACCUMULATE,
                )),
                (_load, (
                    a_desc, b_desc, a_tiles, b_tiles, full, empty, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP,
                )),
                (_scale, (
                    a_scale, a_stride_m, a_stride_k, b_scale, b_stride_n, b_stride_k, row_scales, column_scales,
                    full, empty, M, N, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP, VECTOR, AHEAD,
                )),
            ],
            [4, 1, 2],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out_desc, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
                    M_tiles, N_tiles, K_blocks,
                    0, BLOCK_M, BLOCK_N, HALVES, STAGES, GROUP, TURNS, VECTOR, ONCE, BUFFERS,
                    CHUNKS, ACCUMULATE,
                )),
                (_load, (
                    a_desc, b_desc, a_tiles, b_tiles, full, empty, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP,
                )),
                (_scale, (
                    a_scale, a_stride_m, a_stride_k, b_scale, b_stride_n, b_stride_k, row_scales, column_scales,
                    full, empty, M, N, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP, VECTOR, AHEAD,
                )),
            ],
            [1, 2],
            [56, 56],
        )  # fmt: skip
