"""The producers of Hopper's MX matmuls: one warp loads tiles with TMA, two warps compute the factors of a's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mxspec.triton_kernels.hopper.names import Value, aggregate, async_load
from mxspec.triton_kernels.hopper.rows import load_rows


@aggregate
class Tiles:
    """The shared memory of the stages, 64 columns of K each: codes of a, values of b, factors of the rows of a.

    TMA fills the first COLUMNS rows of a tile of b. For token groups along N, a row of an expert's matrix of a lies
    `rows_apart` rows below the same row of the expert before.
    """

    a: gl.shared_memory_descriptor  # (NUM_STAGES, 128, 64), codes
    b: gl.shared_memory_descriptor  # (NUM_STAGES, BLOCK_N, 64), bf16
    factors: gl.shared_memory_descriptor  # (NUM_STAGES, 128, 2), bf16 as integers: one factor for each block of 32
    rows_apart: Value
    COLUMNS: gl.constexpr


@aggregate
class Scales:
    """The scale bytes of a in memory, plain with strides or BLOCKED. A factor is 2^(byte - 127 + SHIFT).

    The loads of AHEAD steps of bytes are in flight while a warp waits for a stage. CHUNK offs are read at once.
    """

    a: gl.tensor
    stride_e: Value
    stride_m: Value
    stride_k: Value
    num_columns: Value
    BLOCKED: gl.constexpr
    CHUNK: gl.constexpr
    SHIFT: gl.constexpr
    AHEAD: gl.constexpr


@gluon.jit
def block_of(scheduler, block):
    """`get_block` with the part of K in columns, from units of 32."""
    expert, m_block_idx, n_block_idx, row, row_end, begin, end = scheduler.get_block(block, (-1, 0, 0, 0))
    return expert, m_block_idx, n_block_idx, row, row_end, begin * 32, end * 32


@gluon.jit
def load(a_desc, b_desc, tiles, pipeline, scheduler):
    """The load warp."""
    BLOCK_N: gl.constexpr = tiles.b.shape[1]
    i = 0
    for block in range(gl.program_id(0), scheduler.num_blocks, gl.num_programs(0)):
        expert, _, n_block_idx, row, _, begin, end = block_of(scheduler, block)
        column, _ = scheduler.columns(n_block_idx, BLOCK_N)
        if scheduler.GROUPED == "N":
            row += expert * tiles.rows_apart
        for k in range(begin, end, 64):
            stage = pipeline.wait_empty(i)
            bar = pipeline.full.index(stage)
            mbarrier.expect(bar, (128 + 2 * tiles.COLUMNS) * 64)
            async_load(a_desc, [row, k], bar, tiles.a.index(stage))
            load_rows(b_desc, column, k, bar, tiles.b.index(stage), tiles.COLUMNS)
            i += 1
    pipeline.fill_one_more(i)


@gluon.jit
def _offset(c, stride_k, BLOCKED: gl.constexpr):
    return c // 4 * 512 + c % 4 if BLOCKED else c.to(gl.int64) * stride_k


@gluon.jit
def _blocks_before(expert, offs, stride, CHUNK: gl.constexpr, layout: gl.constexpr):
    """The number of blocks of 128 tokens in the groups before an expert. Each group is padded by itself."""
    g = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    before = 0
    for i in range(0, expert, CHUNK):
        begin = gl.load(offs + (i + g - 1) * stride, mask=(i + g > 0) & (i + g < expert), other=0)
        end = gl.load(offs + (i + g) * stride, mask=i + g < expert, other=0)
        before += gl.sum((end - begin + 127) // 128, 0)
    return before


@gluon.jit
def scale(scales, tiles, pipeline, scheduler):
    """The scale warps: they read the scales of a and store a factor for each block of 32 codes."""
    BLOCKED: gl.constexpr = scales.BLOCKED
    AHEAD: gl.constexpr = scales.AHEAD
    C = scales.num_columns
    i = 0
    layout: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [2, 1], [1, 0])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    for block in range(gl.program_id(0), scheduler.num_blocks, gl.num_programs(0)):
        expert, m_block_idx, _, row, row_end, begin, end = block_of(scheduler, block)
        there = (row + rows < row_end)[:, None]
        first, columns = begin // 32, gl.minimum(end // 32, C)
        of_matrix = scales.a
        if scheduler.GROUPED == "N":
            of_matrix += expert.to(gl.int64) * scales.stride_e
        if BLOCKED:  # a row of output tiles is a row of scale tiles
            of_rows = of_matrix + (rows % 32 * 16 + rows // 32 * 4)[:, None]
            if scheduler.GROUPED == "K":  # the tiles of an expert are stored together, row by row
                before = _blocks_before(expert, scheduler.offs, scheduler.offs_stride, scales.CHUNK, layout)
                across = gl.cdiv(end - begin, 128)
                of_rows += (before.to(gl.int64) * scheduler.m_blocks + m_block_idx.to(gl.int64) * across) * 512
                in_memory = C // 4 + scheduler.num_blocks // (scheduler.m_blocks * scheduler.n_blocks)
                columns = gl.where((before >= 0) & (before <= in_memory - across), columns - first, 0)
                first = 0
            else:
                of_rows += m_block_idx.to(gl.int64) * (gl.cdiv(C, 4) * 512)
        else:
            of_rows = of_matrix + ((row + rows).to(gl.int64) * scales.stride_m)[:, None]
        c = first + gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :]
        # The loops over AHEAD are unrolled and the tuples are renamed, so that no byte moves from one register to
        # another between steps.
        bytes = ()
        for _ in gl.static_range(AHEAD):
            at = of_rows + _offset(c, scales.stride_k, BLOCKED)
            bytes = bytes + (gl.load(at, mask=there & (c < columns), other=0),)
            c += 2
        for k in range(begin, end, 64 * AHEAD):
            next = ()
            for j in gl.static_range(AHEAD):
                at = of_rows + _offset(c, scales.stride_k, BLOCKED)
                next = next + (gl.load(at, mask=there & (c < columns), other=0),)
                c += 2
                if k + 64 * j < end:
                    stage = pipeline.wait_empty(i)
                    # The factor as bf16. It is infinite for the scale NaN, and if it is past the range of bf16.
                    factor = gl.minimum(bytes[j].to(gl.int32) + scales.SHIFT, 255) << 7
                    tiles.factors.index(stage).store(factor.to(gl.int16))
                    mbarrier.arrive(pipeline.full.index(stage), count=1)
                    i += 1
            bytes = next
    pipeline.fill_one_more(i)
