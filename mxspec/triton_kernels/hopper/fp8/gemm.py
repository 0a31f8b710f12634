"""FP8 matmuls on Hopper, in Gluon: persistent programs of math warpgroups, a warp that loads and two that scale.

A stage of shared memory holds 128 of K: a tile of a, one of b, and their scales. One warp fills the tiles by TMA; one
reads the scales, whatever their strides, and writes what a row of the tile is to be multiplied by. Each math warpgroup
multiplies its 64 or 128 rows on the tensor cores, whose sums keep about 14 bits, and adds them, scaled, to fp32
accumulators. A barrier per stage says that it is full, another that the math warpgroups are done with it.

What a stage is used for is counted by `i`, blocks of K since the program began, over all its tiles: every warp counts
for itself, stage `i % STAGES`, phase `i // STAGES % 2`.

GROUPS says what `offs` divides. "M": rows of a, the tokens of each expert, whose rows of b lie one matrix below the
other. "K": the dimension that is summed over, the tokens of each expert, each a matrix of its own in a and in b. A warp
finds the group of its next tile from that of its last, so that nothing is planned beforehand and any offs will do.
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

from mxspec.triton_kernels.hopper.fp8.producers import load, scale
from mxspec.triton_kernels.hopper.names import barrier
from mxspec.triton_kernels.hopper.scheduler import blocks_of_group, geometry, next_group
from mxspec.triton_kernels.hopper.warpgroup import my_turn, promote, write, write_rows, your_turn


@gluon.jit
def _multiply(
    out_desc, out, out_stride, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, VECTOR: gl.constexpr, ONCE: gl.constexpr,
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
    barrier()
    at = (-1, 0, 0, 0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        upper = gl.zeros([64, BLOCK_N], gl.float32, mma)
        lower = gl.zeros([64, BLOCK_N], gl.float32, mma)
        if GROUPS == "M":
            at = next_group(tile, at, offs, offs_stride, G, M, N_tiles, BLOCK_M)
        blocks = K_blocks
        if GROUPS == "M":
            blocks = K_blocks * (at[0] < G)
        if GROUPS == "K":
            _begin, blocks = blocks_of_group(tile // (M_tiles * N_tiles), offs, offs_stride, K_blocks)
        for _ in range(blocks):
            stage, before, after = i % STAGES, (i + STAGES - 1) % STAGES, (i + 1) % STAGES
            a, b = a_tiles.index(stage), b_tiles.index(stage).permute((1, 0))

            # The last partial sum goes in as the accumulator that is not used: fresh zeros would be moves.
            my_turn(WARPGROUP, TURNS)
            running = warpgroup_mma(a.slice(first, 64), b, partial, use_acc=False, is_async=True)
            your_turn(WARPGROUP, TURNS)
            # An arrival is a barrier of the warpgroup before and one after, which here cost nothing: a matmul runs.
            mbarrier.arrive(empty.index(before), count=1)
            barrier()
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
        # Only now, since registers are scarce in the loop.
        group, row, end, n, _begin, _blocks = geometry(
            tile, at, offs, offs_stride, G, M, M_tiles, N_tiles, K_blocks, BLOCK_M, GROUP, GROUPS
        )
        row, column, next_buffer = row + first, n * BLOCK_N, own_buffer + CHUNKS % BUFFERS
        if GROUPS == "":
            write(out_desc, out_tiles, row, column, upper, own_buffer, BUFFERS, CHUNKS, ACCUMULATE)
            if HALVES == 2:
                write(out_desc, out_tiles, row + 64, column, lower, next_buffer, BUFFERS, CHUNKS, ACCUMULATE)
        else:
            above = 0
            if GROUPS == "K":  # the groups' matrices lie one below the other
                above = group * M
                if ACCUMULATE:  # nothing is not added: it would make -0 of the output +0
                    end *= blocks > 0
            write_rows(
                out_desc, out, out_stride, out_tiles, above, row, end, column, N, upper, own_buffer,
                BUFFERS, CHUNKS, ACCUMULATE,
            )  # fmt: skip
            if HALVES == 2:
                write_rows(
                    out_desc, out, out_stride, out_tiles, above, row + 64, end, column, N, lower, next_buffer,
                    BUFFERS, CHUNKS, ACCUMULATE,
                )  # fmt: skip
    tma.store_wait(0)
    if WARPGROUP == 0:
        my_turn(WARPGROUP, TURNS)


@gluon.jit
def fp8_gemm_sm90(
    a, b, out_desc, out, out_stride, a_scale, a_stride_m, a_stride_k, b_scale, b_stride_e, b_stride_n, b_stride_k,
    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, TURNS: gl.constexpr, VECTOR: gl.constexpr, ONCE: gl.constexpr, BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr, AHEAD: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = BLOCK_M // (64 * WARPGROUPS)
    CHUNKS: gl.constexpr = BLOCK_N // out_desc.block_shape[1]
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    a_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, 128], codes)
    b_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 128], codes)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    column_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N if VECTOR else 4], flat)
    out_tiles = gl.allocate_shared_memory(
        out_desc.dtype, [WARPGROUPS * BUFFERS, 64, out_desc.block_shape[1]], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # the warp that loads and those that scale
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    for stage in gl.static_range(STAGES - 1):  # all but the last are free; that one is when block 0 runs
        mbarrier.arrive(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    # Each tuple stands where it is passed: one that has a name, or is put together, keeps no constants.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    out_desc, out, out_stride, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
                    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    0, BLOCK_M, BLOCK_N, HALVES, STAGES, GROUP, GROUPS, TURNS, VECTOR, ONCE, BUFFERS,
                    CHUNKS, ACCUMULATE,
                )),
                (_multiply, (
                    out_desc, out, out_stride, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
                    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    1, BLOCK_M, BLOCK_N, HALVES, STAGES, GROUP, GROUPS, TURNS, VECTOR, ONCE, BUFFERS,
                    CHUNKS, ACCUMULATE,
                )),
                (load, (
                    a, b, a_tiles, b_tiles, full, empty, offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS,
                )),
                (scale, (
                    a_scale, a_stride_m, a_stride_k, b_scale, b_stride_e, b_stride_n, b_stride_k,
                    row_scales, column_scales, full, empty,
                    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS, VECTOR, AHEAD,
                )),
            ],
            [4, 1, 2],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out_desc, out, out_stride, a_tiles, b_tiles, row_scales, column_scales, out_tiles, full, empty,
                    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    0, BLOCK_M, BLOCK_N, HALVES, STAGES, GROUP, GROUPS, TURNS, VECTOR, ONCE, BUFFERS,
                    CHUNKS, ACCUMULATE,
                )),
                (load, (
                    a, b, a_tiles, b_tiles, full, empty, offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS,
                )),
                (scale, (
                    a_scale, a_stride_m, a_stride_k, b_scale, b_stride_e, b_stride_n, b_stride_k,
                    row_scales, column_scales, full, empty,
                    offs, offs_stride, G, tiles, M, N, M_tiles, N_tiles, K_blocks,
                    BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS, VECTOR, AHEAD,
                )),
            ],
            [1, 2],
            [64, 64],
        )  # fmt: skip
