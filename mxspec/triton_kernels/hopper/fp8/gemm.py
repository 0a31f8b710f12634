"""FP8 matmuls on Hopper, in Gluon: persistent programs of one or two math warpgroups, a load warp and two scale warps.

The kernel is a ring of shared-memory stages. Each stage holds a block of K, which has 128 columns: a tile of `a`, a
tile of `b`, and their scales. A stage of `_multiply_few` holds two blocks.

- The load warp fills the tiles with TMA: `load` in `producers.py`.
- The scale warps read the scales (any strides) and store them for the rows and columns of the tile: `scale` in
  `producers.py`.
- Each math warpgroup multiplies 64 or 128 rows on the tensor cores. Tensor cores keep only about 14 bits of a sum, so
  after each block the warpgroup scales the partial sum and adds it to an fp32 accumulator.

The math warpgroups run one of three functions. All sum K in the same order, so a row has the same bits in each.

- `_multiply_wide`: two warpgroups, 64 rows and 160 to 256 columns each, if 128 columns of b share a scale. Large
  outputs. A tile has a left part of 128 columns and a right part of 32, 64 or 128. With tiles of several widths, the
  last wave of an output is nearly full at one of them.
- `_multiply`: one or two warpgroups, 64 or 128 rows each. It is the only one that takes a scale for each column.
- `_multiply_few`: one warpgroup, 64 rows, two blocks of K at a time. Small outputs, where the waits for a stage and the
  two barriers of an arrival would take as long as the matmul.

Two mbarriers guard each stage: `full` (the tiles and scales have arrived) and `empty` (all math warpgroups have read
them). `../pipeline.py` has them.

Two math warpgroups take turns: one adds its partial sum while the matmul of the other runs. `TURNS` is 0 (no turns), 1
(for the first half of a tile, as in `_multiply_wide`) or 2 (for both halves). The tensor cores idle while a warpgroup
computes the address of its next stage after its turn has come. So the loops count stages one by one. The division for a
phase comes while a matmul runs.

`../scheduler.py` says which block of the output comes next. The load warp and the scale warps find the token group of
their next block from the group of their last block, so nothing is planned beforehand, and any `offs` works. They search
while the tensor cores multiply the stages before. The math warpgroups do not search: each stage says which group it
belongs to. The blocks of rows without an expert are the last. They have no stage, and `_write_rest` writes their zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mxspec.triton_kernels.hopper.fp8.producers import Scales, Tiles, load, scale
from mxspec.triton_kernels.hopper.names import barrier
from mxspec.triton_kernels.hopper.pipeline import make_pipeline
from mxspec.triton_kernels.hopper.scheduler import Scheduler
from mxspec.triton_kernels.hopper.warpgroup import Output, my_turn, promote, your_turn


@gluon.jit
def _is_expert(tiles, scheduler, stage):
    """Whether the next block has an expert, and so blocks of K. Its first one is in `stage`, which is full."""
    if scheduler.GROUPED == "M":
        return tiles.group_of(stage)[0] < scheduler.num_experts
    else:
        return True


@gluon.jit
def _place(tiles, scheduler, block, before):
    """`get_block` of a block whose last block of K is in the stage `before`."""
    group = (-1, 0, 0, 0)
    if scheduler.GROUPED == "M":
        group = tiles.group_of(before)
    return scheduler.get_block(block, group)


@gluon.jit
def _write_rest(out, tiles, scheduler, block, stage, first: gl.constexpr, ROWS: gl.constexpr, buffer: gl.constexpr):
    """Write zeros to the rows of no expert: the program's blocks from `block` on. `stage` has their group."""
    RIGHT: gl.constexpr = tiles.RIGHT
    LEFT: gl.constexpr = tiles.b.shape[1] // (2 if RIGHT else 1)
    WIDTH: gl.constexpr = min(LEFT, 128)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    right_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, RIGHT or WIDTH, 32]
    )
    if scheduler.GROUPED == "M":
        tma.store_wait(0)  # the last tile may have an odd number of parts, so the next one would have its buffer
        group = tiles.group_of(stage)
        while block < scheduler.num_blocks:
            group, _ = scheduler.get_next_group(block, group, scheduler.ends_after(group[0]))
            expert, _, n_block_idx, row, end, _, _ = scheduler.get_block(block, group)
            column, right_column = tiles.columns(n_block_idx)
            for rows in gl.static_range(first, first + ROWS, 64):
                for columns in gl.static_range(0, LEFT, WIDTH):
                    zeros = gl.zeros([64, WIDTH], gl.float32, mma)
                    out.write_rows(0, row + rows, end, column + columns, zeros, buffer)
                if RIGHT:
                    zeros = gl.zeros([64, RIGHT], gl.float32, right_mma)
                    out.write_rows(0, row + rows, end, right_column, zeros, buffer)
            block = scheduler.next_block(block, expert)


@gluon.jit
def _multiply(
    out, tiles, pipeline, scheduler,
    WARPGROUP: gl.constexpr, HALVES: gl.constexpr, TURNS: gl.constexpr, VECTOR: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = tiles.b.shape[1]
    GROUPED: gl.constexpr = scheduler.GROUPED
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    per_row: gl.constexpr = gl.SliceLayout(1, mma)
    per_column: gl.constexpr = gl.SliceLayout(0, mma)
    first: gl.constexpr = WARPGROUP * HALVES * 64
    second: gl.constexpr = first + (HALVES - 1) * 64
    own_buffer: gl.constexpr = WARPGROUP * out.BUFFERS
    if WARPGROUP == 1:
        your_turn(WARPGROUP, TURNS)

    i, before, stage = 0, pipeline.NUM_STAGES - 1, 0
    partial = gl.zeros([64, BLOCK_N], gl.float32, mma)
    pipeline.wait_full(0, 0)
    if not ONCE:
        s_upper = tiles.row_scales.index(0).slice(first, 64).load(per_row)
        s_lower = tiles.row_scales.index(0).slice(second, 64).load(per_row)
    barrier()
    block, is_expert = gl.program_id(0), _is_expert(tiles, scheduler, stage)
    while (block < scheduler.num_blocks) & is_expert:
        upper = gl.zeros([64, BLOCK_N], gl.float32, mma)
        lower = gl.zeros([64, BLOCK_N], gl.float32, mma)
        k_blocks = scheduler.K
        if GROUPED == "K":
            k_begin, k_end = scheduler.k_range(block // (scheduler.m_blocks * scheduler.n_blocks))
            k_blocks = k_end - k_begin
        for _ in range(k_blocks):
            a, b, after = tiles.a.index(stage), tiles.b.index(stage).permute((1, 0)), pipeline.after(stage)
            # `use_acc=False` ignores the accumulator, so pass the previous partial sum: a fresh zero tile would cost
            # register moves.
            my_turn(WARPGROUP, TURNS)
            running = warpgroup_mma(a.slice(first, 64), b, partial, use_acc=False, is_async=True)
            your_turn(WARPGROUP, TURNS)
            # An arrival takes two barriers of the warpgroup, before it and after it. Both barriers are free here,
            # because the matmul is running.
            mbarrier.arrive(pipeline.empty.index(before), count=1)
            barrier()
            s_column = 0.0
            if ONCE:
                s_upper = tiles.row_scales.index(stage).slice(first, 64).load(per_row)
                s_column = tiles.column_scales.index(stage).load(per_column)
            if HALVES == 2:
                partial = warpgroup_mma_wait(0, deps=[running])
                if VECTOR and not ONCE:
                    s_column = tiles.column_scales.index(stage).load(per_column)
                upper = promote(partial, s_upper, s_column, upper, VECTOR)
                my_turn(WARPGROUP, TURNS == 2)
                running = warpgroup_mma(a.slice(second, 64), b, partial, use_acc=False, is_async=True)
                your_turn(WARPGROUP, TURNS == 2)
            # Waiting for the next stage here is also free: the matmul is still running.
            pipeline.wait_full(i + 1, after)
            if ONCE:
                s_lower = tiles.row_scales.index(stage).slice(second, 64).load(per_row)
            else:
                next_upper = tiles.row_scales.index(after).slice(first, 64).load(per_row)
                next_lower = tiles.row_scales.index(after).slice(second, 64).load(per_row)
            partial = warpgroup_mma_wait(0, deps=[running])
            if VECTOR and not ONCE:
                s_column = tiles.column_scales.index(stage).load(per_column)
            if HALVES == 2:
                lower = promote(partial, s_lower, s_column, lower, VECTOR)
            else:
                upper = promote(partial, s_upper, s_column, upper, VECTOR)
            if not ONCE:
                s_upper, s_lower = next_upper, next_lower
            i, before, stage = i + 1, stage, after
        is_expert = _is_expert(tiles, scheduler, stage)
        # The block's place is computed only now, because registers are scarce in the loop.
        expert, _, n_block_idx, row, end, _, _ = _place(tiles, scheduler, block, before)
        row, column, next_buffer = row + first, n_block_idx * BLOCK_N, own_buffer + out.chunks(upper) % out.BUFFERS
        if GROUPED == "":
            out.write(row, column, upper, own_buffer)
            if HALVES == 2:
                out.write(row + 64, column, lower, next_buffer)
        else:
            above = 0
            if GROUPED == "K":  # the experts' matrices lie one below the other
                above = expert * scheduler.M
                if out.ACCUMULATE:  # do not add an empty sum: it would turn an output of -0 into +0
                    end *= k_blocks > 0
            out.write_rows(above, row, end, column, upper, own_buffer)
            if HALVES == 2:
                out.write_rows(above, row + 64, end, column, lower, next_buffer)
        block = scheduler.next_block(block, expert)
    _write_rest(out, tiles, scheduler, block, stage, first, HALVES * 64, own_buffer)
    tma.store_wait(0)
    if WARPGROUP == 0:
        my_turn(WARPGROUP, TURNS)


@gluon.jit
def _issue_part(tiles, stage, partial, PART: gl.constexpr, WARPGROUP: gl.constexpr):
    """Begin to multiply 64 rows by a part of a stage, of which 0 is the left one.

    The product gets the registers of `partial`, the last product of a part of this width.
    """
    a = tiles.a.index(stage).slice(WARPGROUP * 64, 64)
    b = tiles.b.index(stage).slice(PART * 128, partial.shape[1]).permute((1, 0))
    my_turn(WARPGROUP, PART == 0)  # the remarks in `_multiply` hold here too
    running = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
    your_turn(WARPGROUP, PART == 0)
    return running


@gluon.jit
def _end_stage(
    running, partial, left, right, s_left, s_right, tiles, pipeline, i, before, stage, WARPGROUP: gl.constexpr
):
    """Everything of a stage but the issue of its left part. Returns the state for the next stage.

    `partial` is the last product of the right part. If both parts are equal, it is the last product of either, and its
    registers are those of `running`.
    """
    SHARED: gl.constexpr = tiles.RIGHT == 128
    per_left: gl.constexpr = s_left.type.layout
    per_right: gl.constexpr = s_right.type.layout
    after = pipeline.after(stage)
    mbarrier.arrive(pipeline.empty.index(before), count=1)
    barrier()
    of_left = warpgroup_mma_wait(0, deps=[running])
    left = promote(of_left, s_left, 0.0, left, False)
    running = _issue_part(tiles, stage, of_left if SHARED else partial, 1, WARPGROUP)
    pipeline.wait_full(i + 1, after)
    next_left, next_right = tiles.part_factors(after, WARPGROUP * 64, per_left, per_right)
    partial = warpgroup_mma_wait(0, deps=[running])
    right = promote(partial, s_right, 0.0, right, False)
    return partial if SHARED else of_left, partial, left, right, next_left, next_right, i + 1, stage, after


@gluon.jit
def _stages_wide(
    of_left, partial, left, right, s_left, s_right, tiles, pipeline, i, before, stage, K, WARPGROUP: gl.constexpr
):
    """Multiply K stages, at least one.

    The loop begins after the issue of a left part and ends with the issue of the next one. The assembler then computes
    the addresses of the next stage while a matmul runs.
    """
    running = _issue_part(tiles, stage, of_left, 0, WARPGROUP)
    for _ in range(K - 1):
        of_left, partial, left, right, s_left, s_right, i, before, stage = _end_stage(
            running, partial, left, right, s_left, s_right, tiles, pipeline, i, before, stage, WARPGROUP
        )
        running = _issue_part(tiles, stage, of_left, 0, WARPGROUP)
    return _end_stage(running, partial, left, right, s_left, s_right, tiles, pipeline, i, before, stage, WARPGROUP)


@gluon.jit
def _multiply_wide(out, tiles, pipeline, scheduler, WARPGROUP: gl.constexpr, GUARDED: gl.constexpr):
    """`_multiply` for 64 rows and a left part of 128 columns, beside a right part of 32, 64 or 128.

    A tile has half the rows of a tile of 256 x 128, so a token group that ends inside a tile wastes fewer rows.

    GUARDED puts the loop behind a condition that is always true. Some assemblers order its instructions better then.
    """
    RIGHT: gl.constexpr = tiles.RIGHT
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    right_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, RIGHT, 32]
    )
    WIDTH: gl.constexpr = out.desc.block_shape[1]
    first: gl.constexpr = WARPGROUP * 64
    own_buffer: gl.constexpr = WARPGROUP * out.BUFFERS
    if WARPGROUP == 1:
        your_turn(WARPGROUP, 1)

    i, before, stage = 0, pipeline.NUM_STAGES - 1, 0
    of_left = gl.zeros([64, 128], gl.float32, mma)
    partial = of_left if RIGHT == 128 else gl.zeros([64, RIGHT], gl.float32, right_mma)
    pipeline.wait_full(0, 0)
    s_left, s_right = tiles.part_factors(0, first, gl.SliceLayout(1, mma), gl.SliceLayout(1, right_mma))
    barrier()
    block, is_expert = gl.program_id(0), _is_expert(tiles, scheduler, stage)
    while (block < scheduler.num_blocks) & is_expert:
        left = gl.zeros([64, 128], gl.float32, mma)
        right = gl.zeros([64, RIGHT], gl.float32, right_mma)
        if (scheduler.K if GUARDED else 1) > 0:
            of_left, partial, left, right, s_left, s_right, i, before, stage = _stages_wide(
                of_left, partial, left, right, s_left, s_right, tiles, pipeline, i, before, stage, scheduler.K,
                WARPGROUP,
            )  # fmt: skip
        is_expert = _is_expert(tiles, scheduler, stage)
        expert, _, n_block_idx, row, end, _, _ = _place(tiles, scheduler, block, before)
        row, next_buffer = row + first, own_buffer + out.chunks(left) % out.BUFFERS
        # Two buffers take turns. After an odd number of parts, the next tile begins with the buffer that was last used.
        if (128 + RIGHT) // WIDTH % out.BUFFERS:
            tma.store_wait(0)
        # Each column is computed where it is needed. Computed together, they change the order of the instructions.
        if scheduler.GROUPED == "":
            out.write(row, tiles.columns(n_block_idx)[0], left, own_buffer)
            out.write(row, tiles.columns(n_block_idx)[1], right, next_buffer)
        else:
            out.write_rows(0, row, end, tiles.columns(n_block_idx)[0], left, own_buffer)
            out.write_rows(0, row, end, tiles.columns(n_block_idx)[1], right, next_buffer)
        block = scheduler.next_block(block, expert)
    _write_rest(out, tiles, scheduler, block, stage, first, 64, own_buffer)
    tma.store_wait(0)
    if WARPGROUP == 0:
        my_turn(WARPGROUP, 1)


@gluon.jit
def _issue(tiles, stage, partial):
    """Begin to multiply a stage. `partial` is the sum whose registers take the product."""
    b = tiles.b.index(stage).permute((1, 0))
    return warpgroup_mma(tiles.a.index(stage), b, partial, use_acc=False, is_async=True)


@gluon.jit
def _multiply_few(out, tiles, pipeline, scheduler):
    """`_multiply` for 64 rows by one warpgroup: it takes two blocks of K at a time.

    The tensor cores multiply the second block while the warpgroup adds the sum of the first.
    """
    BLOCK_N: gl.constexpr = tiles.b.shape[1]
    GROUPED: gl.constexpr = scheduler.GROUPED
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    per_row: gl.constexpr = gl.SliceLayout(1, mma)
    i, before, stage = 0, pipeline.NUM_STAGES - 1, 0
    even = gl.zeros([64, BLOCK_N], gl.float32, mma)
    odd = gl.zeros([64, BLOCK_N], gl.float32, mma)
    pipeline.wait_full(0, 0)
    barrier()
    block, is_expert = gl.program_id(0), _is_expert(tiles, scheduler, stage)
    while (block < scheduler.num_blocks) & is_expert:
        acc = gl.zeros([64, BLOCK_N], gl.float32, mma)
        for _ in range(scheduler.K // 2):
            running = _issue(tiles, 2 * stage, even)
            running_after = _issue(tiles, 2 * stage + 1, odd)
            mbarrier.arrive(pipeline.empty.index(before), count=1)
            barrier()
            s_even = tiles.row_scales.index(2 * stage).load(per_row)
            s_odd = tiles.row_scales.index(2 * stage + 1).load(per_row)
            even = warpgroup_mma_wait(1, deps=[running])
            acc = promote(even, s_even, 0.0, acc, False)
            before, stage = stage, pipeline.after(stage)
            pipeline.wait_full(i + 1, stage)
            odd = warpgroup_mma_wait(0, deps=[running_after])
            acc = promote(odd, s_odd, 0.0, acc, False)
            i += 1
        for _ in range(scheduler.K % 2):
            running = _issue(tiles, 2 * stage, even)
            mbarrier.arrive(pipeline.empty.index(before), count=1)
            barrier()
            s_even = tiles.row_scales.index(2 * stage).load(per_row)
            before, stage = stage, pipeline.after(stage)
            pipeline.wait_full(i + 1, stage)
            even = warpgroup_mma_wait(0, deps=[running])
            acc = promote(even, s_even, 0.0, acc, False)
            i += 1
        is_expert = _is_expert(tiles, scheduler, stage)
        expert, _, n_block_idx, row, end, _, _ = _place(tiles, scheduler, block, before)
        if GROUPED == "":
            out.write(row, n_block_idx * BLOCK_N, acc, 0)
        else:
            out.write_rows(0, row, end, n_block_idx * BLOCK_N, acc, 0)
        block = scheduler.next_block(block, expert)
    _write_rest(out, tiles, scheduler, block, stage, 0, 64, 0)
    tma.store_wait(0)


@gluon.jit
def _prefetch_descriptors():
    """Fetch the descriptors of a, b and out while the barriers are being made.

    The first load waits for its descriptor otherwise. This saves 0.1 to 0.3 us a call. Triton passes a descriptor as
    five parameters, and the first holds it, so the three are the parameters 0, 5 and 10.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p prefetch.param.tensormap [fp8_gemm_sm90_param_0]; @p prefetch.param.tensormap [fp8_gemm_sm90_param_5]; "
        "@p prefetch.param.tensormap [fp8_gemm_sm90_param_10]; mov.u32 $0, 0; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fp8_gemm_sm90(
    a, b, out_desc, out, scales, blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, NUM_STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, GROUPED: gl.constexpr, TURNS: gl.constexpr, VECTOR: gl.constexpr, ONCE: gl.constexpr,
    BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, AHEAD: gl.constexpr, ACCUMULATE: gl.constexpr,
    OF_STAGE: gl.constexpr, GUARDED: gl.constexpr, APART: gl.constexpr, RIGHT: gl.constexpr, ROWS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """`out` is a pointer and the stride of its rows.

    `scales` and `blocks` hold the first fields of `Scales` and `Scheduler`, in order.

    With RIGHT, a tile has two parts along N. The left part is half of BLOCK_N, and the right part is RIGHT columns.

    With APART, a stage holds the scales of a and of b, not their products. They take less room, which the output gets.

    ROWS is how many rows of a tile of a are read. It is less than BLOCK_M if a has fewer rows than a tile.
    """
    if GROUPED != "K":
        _prefetch_descriptors()
    HALVES: gl.constexpr = BLOCK_M // (64 * WARPGROUPS)
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = Tiles(
        gl.allocate_shared_memory(gl.float8e4nv, [NUM_STAGES * OF_STAGE, BLOCK_M, 128], codes),
        gl.allocate_shared_memory(gl.float8e4nv, [NUM_STAGES * OF_STAGE, BLOCK_N, 128], codes),
        gl.allocate_shared_memory(
            gl.float32, [NUM_STAGES * OF_STAGE, BLOCK_M * (2 if RIGHT and not APART else 1)], flat
        ),
        gl.allocate_shared_memory(gl.float32, [NUM_STAGES, BLOCK_N if VECTOR else 4], flat),
        gl.allocate_shared_memory(gl.int32, [NUM_STAGES, 4], flat),
        OF_STAGE,
        RIGHT,
        ROWS,
    )
    WIDTH: gl.constexpr = out_desc.block_shape[1]
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS * BUFFERS, 64, WIDTH], out_desc.layout)
    of_tiles = Scales(*scales, VECTOR, AHEAD)
    scheduler = Scheduler(*blocks, BLOCK_M, SWIZZLE, GROUPED, K_UNIT=128, OVERLAP=OVERLAP)
    output = Output(out_desc, *out, scheduler.N, out_tiles, BUFFERS, ACCUMULATE)
    pipeline = make_pipeline(NUM_STAGES, 2, WARPGROUPS)  # two producers: the load warp and the pair of scale warps
    # Write each tuple where it is passed. A tuple that has a name, or that is concatenated, loses its constants.
    if RIGHT:
        gl.warp_specialize(
            [
                (_multiply_wide, (output, tiles, pipeline, scheduler, 0, GUARDED)),
                (_multiply_wide, (output, tiles, pipeline, scheduler, 1, GUARDED)),
                (load, (a, b, tiles, pipeline, scheduler)),
                (scale, (of_tiles, tiles, pipeline, scheduler)),
            ],
            [4, 1, 2],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (output, tiles, pipeline, scheduler, 0, HALVES, TURNS, VECTOR, ONCE)),
                (_multiply, (output, tiles, pipeline, scheduler, 1, HALVES, TURNS, VECTOR, ONCE)),
                (load, (a, b, tiles, pipeline, scheduler)),
                (scale, (of_tiles, tiles, pipeline, scheduler)),
            ],
            [4, 1, 2],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )
    elif OF_STAGE == 2:
        gl.warp_specialize(
            [
                (_multiply_few, (output, tiles, pipeline, scheduler)),
                (load, (a, b, tiles, pipeline, scheduler)),
                (scale, (of_tiles, tiles, pipeline, scheduler)),
            ],
            [1, 2],
            [64, 64],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (output, tiles, pipeline, scheduler, 0, HALVES, TURNS, VECTOR, ONCE)),
                (load, (a, b, tiles, pipeline, scheduler)),
                (scale, (of_tiles, tiles, pipeline, scheduler)),
            ],
            [1, 2],
            [64, 64],
        )
