"""The producers of Hopper's FP8 matmuls: one warp loads tiles with TMA, two warps store the scales of the tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mxspec.triton_kernels.hopper.names import Value, aggregate, async_load, swizzle
from mxspec.triton_kernels.hopper.rows import load_rows


@aggregate
class Tiles:
    """The shared memory of the stages: the codes of blocks of K, and the scales of their rows and columns.

    A block of K has 128 columns. A stage holds OF_STAGE blocks: 1 or 2.

    A tile with RIGHT has two parts: a left part of half of b's rows here, and a right part of RIGHT rows. A part is in
    128 columns of the output that share a scale of b. Without RIGHT, it is 0.

    TMA fills the first ROWS rows of a tile of a.
    """

    a: gl.shared_memory_descriptor  # (NUM_STAGES * OF_STAGE, BLOCK_M, 128)
    b: gl.shared_memory_descriptor  # (NUM_STAGES * OF_STAGE, BLOCK_N, 128)
    row_scales: gl.shared_memory_descriptor  # (NUM_STAGES * OF_STAGE, BLOCK_M), or BLOCK_M for each half of b's columns
    column_scales: gl.shared_memory_descriptor  # (NUM_STAGES, BLOCK_N) with VECTOR; otherwise (NUM_STAGES, 4)
    groups: gl.shared_memory_descriptor  # (NUM_STAGES, 4): the token group of each stage, as the scheduler describes it
    OF_STAGE: gl.constexpr
    RIGHT: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def columns(self, n_block_idx):
        """The first column of a tile, and of its right part.

        Two equal parts are neighbours. Otherwise several tiles share a run of columns: first come their left parts,
        then their right parts.
        """
        BLOCK_N: gl.constexpr = self.b.shape[1]
        LEFT: gl.constexpr = BLOCK_N // 2
        if self.RIGHT == 0 or self.RIGHT == LEFT:
            return n_block_idx * BLOCK_N, n_block_idx * BLOCK_N + LEFT
        else:
            TOGETHER: gl.constexpr = LEFT // self.RIGHT
            number = n_block_idx % TOGETHER
            begin = n_block_idx // TOGETHER * ((TOGETHER + 1) * LEFT)
            return begin + number * LEFT, begin + TOGETHER * LEFT + number * self.RIGHT

    @gluon.jit
    def part_factors(self, stage, first: gl.constexpr, of_left: gl.constexpr, of_right: gl.constexpr):
        """What the sums of 64 rows are multiplied by, in the left part and in the right part, in these layouts."""
        BLOCK_M: gl.constexpr = self.a.shape[1]
        of_rows = self.row_scales.index(stage)
        if self.row_scales.shape[1] == BLOCK_M:
            one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            left, of_b = of_rows.slice(first, 64).load(of_left), self.column_scales.index(stage)
            right = left if of_right == of_left else of_rows.slice(first, 64).load(of_right)
            return left * gl.sum(of_b.slice(0, 1).load(one), 0), right * gl.sum(of_b.slice(1, 1).load(one), 0)
        else:
            return of_rows.slice(first, 64).load(of_left), of_rows.slice(BLOCK_M + first, 64).load(of_right)

    @gluon.jit
    def group_of(self, stage):
        """The token group of a full stage. A math warpgroup reads it, because a search would delay its next tile."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        group = ()
        for field in gl.static_range(4):
            group = group + (gl.sum(self.groups.index(stage).slice(field, 1).load(one), 0),)
        return group


@aggregate
class Scales:
    """The scales in memory. With VECTOR each row of b has its own scale; without it 128 rows share a scale.

    The loads of AHEAD blocks of scales are in flight while a warp waits for a stage.
    """

    a: gl.tensor
    a_stride_m: Value
    a_stride_k: Value
    b: gl.tensor
    b_stride_e: Value
    b_stride_n: Value
    b_stride_k: Value
    VECTOR: gl.constexpr
    AHEAD: gl.constexpr


@gluon.jit
def _load_block(a_desc, b_desc, tiles, pipeline, i, row, b_row, right_row, blocks):
    OF_STAGE: gl.constexpr = tiles.OF_STAGE
    # A box is the whole tile of b, or as much of a left part as the right part has.
    BOX: gl.constexpr = b_desc.block_shape[0]
    LEFT: gl.constexpr = tiles.b.shape[1] // (2 if BOX == tiles.RIGHT else 1)
    for first in range(0, blocks, OF_STAGE):
        stage = pipeline.wait_empty(i)
        bar = pipeline.full.index(stage)
        mbarrier.expect(bar, OF_STAGE * (tiles.ROWS + LEFT + (BOX if BOX == tiles.RIGHT else 0)) * 128)
        for j in gl.static_range(OF_STAGE):
            k, at = first + j, stage * OF_STAGE + j
            load_rows(a_desc, row, k * 128, bar, tiles.a.index(at), tiles.ROWS)
            for left in gl.static_range(0, LEFT, BOX):
                async_load(b_desc, [b_row + left, k * 128], bar, tiles.b.index(at).slice(left, BOX))
            if BOX == tiles.RIGHT:
                async_load(b_desc, [right_row, k * 128], bar, tiles.b.index(at).slice(LEFT, BOX))
        i += 1
    return i


@gluon.jit
def _load_expert(expert, a, b, tiles, pipeline, scheduler, i, last):
    """Load the blocks of one expert.

    The expert's part of a and its part of b are separate matrices, with separate descriptors.

    There are two pairs of descriptors, for even and for odd experts. So the new descriptors overwrite the descriptors
    of an earlier expert, not of the previous expert. `last - 1` is the last block of K that used the old descriptors.
    """
    BLOCK_M: gl.constexpr = tiles.a.shape[1]
    BLOCK_N: gl.constexpr = tiles.b.shape[1]
    begin, end = scheduler.k_range(expert)
    blocks = end - begin
    of_expert = scheduler.m_blocks * scheduler.n_blocks
    programs = gl.num_programs(0)
    own = gl.program_id(0) + gl.cdiv(gl.maximum(expert * of_expert - gl.program_id(0), 0), programs) * programs
    if (blocks > 0) & (own < (expert + 1) * of_expert):
        if (last > 0) & (i - last < pipeline.NUM_STAGES):  # that block may still be in flight
            pipeline.wait_full(last - 1, (last - 1) % pipeline.NUM_STAGES)
        width = blocks * 128
        a_desc = tma.make_tensor_descriptor(
            a + begin.to(gl.int64) * 128 * scheduler.M, [scheduler.M, width], [width, 1], [BLOCK_M, 128], tiles.a.layout
        )
        b_desc = tma.make_tensor_descriptor(
            b + begin.to(gl.int64) * 128 * scheduler.N, [scheduler.N, width], [width, 1], [BLOCK_N, 128], tiles.b.layout
        )
        for block in range(own, (expert + 1) * of_expert, programs):
            m_block_idx, n_block_idx = swizzle(
                block - expert * of_expert, scheduler.m_blocks, scheduler.n_blocks, scheduler.SWIZZLE
            )
            row, column = m_block_idx * BLOCK_M, n_block_idx * BLOCK_N
            i = _load_block(a_desc, b_desc, tiles, pipeline, i, row, column, column, blocks)
        last = i
    return i, last


@gluon.jit
def load(a, b, tiles, pipeline, scheduler):
    """The load warp. With GROUPED "K", a and b are pointers to the codes; otherwise they are descriptors."""
    i = 0
    if scheduler.GROUPED == "K":  # two pairs of descriptors: one is written while the other is read
        even, odd = 0, 0
        for expert in range(0, scheduler.num_experts, 2):
            i, even = _load_expert(expert, a, b, tiles, pipeline, scheduler, i, even)
            if expert + 1 < scheduler.num_experts:
                i, odd = _load_expert(expert + 1, a, b, tiles, pipeline, scheduler, i, odd)
    else:
        group, ends = (-1, 0, 0, 0), scheduler.ends_after(-1)
        block = gl.program_id(0)
        while block < scheduler.num_blocks:
            group, ends = scheduler.get_next_group(block, group, ends)
            expert, _, n_block_idx, row, _, _, blocks = scheduler.get_block(block, group)
            b_row, right_row = tiles.columns(n_block_idx)
            if scheduler.GROUPED == "M":
                b_row += expert * scheduler.N
                right_row += expert * scheduler.N
            i = _load_block(a, b, tiles, pipeline, i, row, b_row, right_row, blocks)
            block = scheduler.next_block(block, expert)
    pipeline.fill_one_more(i)


@gluon.jit
def _store_scales(tiles, at, of_a, of_b, right, VECTOR: gl.constexpr):
    """Store the scales of a block of K. `of_b` and `right` are the scales of b's left and right part."""
    BLOCK_M: gl.constexpr = tiles.a.shape[1]
    if VECTOR:
        tiles.row_scales.index(at).store(of_a)
        tiles.column_scales.index(at).store(of_b)
    elif tiles.RIGHT and tiles.row_scales.shape[1] == BLOCK_M:
        column = gl.arange(0, 4, gl.BlockedLayout([1], [32], [2], [0]))
        tiles.row_scales.index(at).store(of_a)
        tiles.column_scales.index(at).store(gl.where(column == 0, of_b, right))
    elif tiles.RIGHT:
        tiles.row_scales.index(at).slice(0, BLOCK_M).store(of_a * of_b)
        tiles.row_scales.index(at).slice(BLOCK_M, BLOCK_M).store(of_a * right)
    else:
        tiles.row_scales.index(at).store(of_a * of_b)


@gluon.jit
def scale(scales, tiles, pipeline, scheduler):
    """The scale warps: they read the scales, with any strides, and store them for the rows and columns of a stage.

    Without VECTOR, they store one factor per row, the product of both scales, for each part of the tile. With VECTOR,
    or if the kernel has APART, they store the scales of the rows and of the columns apart.
    """
    BLOCK_M: gl.constexpr = tiles.a.shape[1]
    BLOCK_N: gl.constexpr = tiles.b.shape[1]
    AHEAD: gl.constexpr = scales.AHEAD
    RIGHT: gl.constexpr = tiles.RIGHT
    a_stride_k, b_stride_k = scales.a_stride_k, scales.b_stride_k
    i = 0
    rows = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 64], [32], [2], [0]))
    columns = gl.arange(0, BLOCK_N, gl.BlockedLayout([max(BLOCK_N // 64, 1)], [32], [2], [0]))
    field = gl.arange(0, 4, gl.BlockedLayout([1], [32], [2], [0]))
    group, ends, described, ended = (-1, 0, 0, 0), scheduler.ends_after(-1), field, False
    block = gl.program_id(0)
    while block < scheduler.num_blocks:
        group, ends = scheduler.get_next_group(block, group, ends)
        expert, _, n_block_idx, row, end, k_begin, k_end = scheduler.get_block(block, group)
        blocks = k_end - k_begin
        if scheduler.GROUPED == "M":  # rows of no expert have no stage: all share the one after the last
            found = gl.where(
                field < 2, gl.where(field == 0, group[0], group[1]), gl.where(field == 2, group[2], group[3])
            )
            described = gl.where(ended, described, found)
            ended |= expert >= scheduler.num_experts
        a_there = rows < end - row
        a_at = scales.a + (row + rows).to(gl.int64) * scales.a_stride_m
        if scales.VECTOR:
            b_there = columns < scheduler.N - n_block_idx * BLOCK_N
            b_at = scales.b + (n_block_idx * BLOCK_N + columns).to(gl.int64) * scales.b_stride_n
        else:
            b_there = True
            left_column, right_column = tiles.columns(n_block_idx)
            b_at = scales.b + (left_column // 128).to(gl.int64) * scales.b_stride_n
        if RIGHT:
            right_there, to_right = right_column < scheduler.N, scales.b_stride_n
            if 2 * RIGHT < BLOCK_N:
                to_right = (right_column // 128 - left_column // 128).to(gl.int64) * scales.b_stride_n
        if scheduler.GROUPED == "M":
            b_at += expert.to(gl.int64) * scales.b_stride_e
        if scheduler.GROUPED == "K":
            a_at += k_begin.to(gl.int64) * a_stride_k
            b_at += k_begin.to(gl.int64) * b_stride_k
        # The loops over AHEAD are unrolled and the tuples are renamed, so that no scale moves from one register to
        # another between steps.
        of_a, of_b, of_right = (), (), ()
        for j in gl.static_range(AHEAD):
            of_a = of_a + (gl.load(a_at + j * a_stride_k, mask=a_there & (j < blocks), other=0.0),)
            of_b = of_b + (gl.load(b_at + j * b_stride_k, mask=b_there & (j < blocks), other=0.0),)
            if RIGHT:
                of_right = of_right + (
                    gl.load(b_at + to_right + j * b_stride_k, mask=right_there & (j < blocks), other=0.0),
                )
        for first in range(0, blocks, AHEAD):
            next_a, next_b, next_right = (), (), ()
            for j in gl.static_range(AHEAD):
                k = first + j
                more = k + AHEAD < blocks
                next_a = next_a + (gl.load(a_at + AHEAD * a_stride_k, mask=a_there & more, other=0.0),)
                next_b = next_b + (gl.load(b_at + AHEAD * b_stride_k, mask=b_there & more, other=0.0),)
                if RIGHT:
                    next_right = next_right + (
                        gl.load(b_at + to_right + AHEAD * b_stride_k, mask=right_there & more, other=0.0),
                    )
                a_at += a_stride_k
                b_at += b_stride_k
                if j % tiles.OF_STAGE == 0:
                    if k < blocks:
                        stage = pipeline.wait_empty(i)
                        for of in gl.static_range(tiles.OF_STAGE):
                            at, right = stage * tiles.OF_STAGE + of, of_right[j + of] if RIGHT else 0.0
                            _store_scales(tiles, at, of_a[j + of], of_b[j + of], right, scales.VECTOR)
                        if scheduler.GROUPED == "M":
                            tiles.groups.index(stage).store(described)
                        mbarrier.arrive(pipeline.full.index(stage), count=1)
                        i += 1
            of_a, of_b, of_right = next_a, next_b, next_right
        block = scheduler.next_block(block, expert)
    stage = pipeline.wait_empty(i)  # as `fill_one_more`, with a group
    if scheduler.GROUPED == "M":
        tiles.groups.index(stage).store(described)
    mbarrier.arrive(pipeline.full.index(stage), count=1)
