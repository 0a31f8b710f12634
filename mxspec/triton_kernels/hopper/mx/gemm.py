"""MX matmuls on Hopper, in Gluon, on bf16 tensor cores: the codes of one operand become bf16 in registers.

Hopper cannot multiply MX codes, and sums of fp8 products would have to leave the tensor cores every 32 columns of K.
But a code times a power of two is a bf16 number, and the tensor cores sum bf16 products in fp32.

- b, as a rule the smaller operand, becomes bf16 before this kernel starts: `values.py`.
- a, as a rule the larger operand, is loaded as codes. A stage of shared memory holds 64 columns of K of 128 rows.
  For token groups along N, a is the weights of the experts: each weight is read once, as a code.
- Each of two math warpgroups turns its 64 rows of a stage into bf16 registers (`conversion.py`) while the tensor cores
  multiply for the other warpgroup.
- A load warp fills the tiles with TMA, and two scale warps read the scales of a: `producers.py`.

The values of a are multiplied by 2^A_SHIFT and those of b by 2^B_SHIFT, so that the smallest product of a code and a
scale is still a bf16 number. The sums are multiplied by the reciprocal. A value that is no finite bf16 number becomes
Inf or NaN: NaN and Inf codes, the scale NaN, and products past the range of bf16. If a sum of a tile is not finite, the
kernel marks the tile, and another kernel computes this sum again. For token groups along N, a and b have each other's
place in that kernel. So a mark is then the plan's number of the tile of tokens, and the number of the 64 rows of a.

`../scheduler.py` says which block of the output comes next. `../pipeline.py` has the barriers by which warps hand
stages to each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mxspec.triton_kernels.hopper.marks import mark
from mxspec.triton_kernels.hopper.mx.conversion import values
from mxspec.triton_kernels.hopper.mx.producers import Scales, Tiles, block_of, load, scale
from mxspec.triton_kernels.hopper.names import barrier
from mxspec.triton_kernels.hopper.pipeline import make_pipeline
from mxspec.triton_kernels.hopper.scheduler import Scheduler
from mxspec.triton_kernels.hopper.warpgroup import Output, parts


@gluon.jit
def _step(a, acc, b, tiles, pipeline, i, before, stage, first: gl.constexpr, FORMAT: gl.constexpr):
    """Multiply a block of K. Meanwhile wait for the next block, then turn its codes into bf16."""
    after = pipeline.after(stage)
    running = warpgroup_mma(a, b, acc, is_async=True)
    # An arrival is a barrier of the warpgroup before it and one after it. Both are free here: the matmul is running.
    mbarrier.arrive(pipeline.empty.index(before), count=1)
    barrier()
    pipeline.wait_full(i + 1, after)
    acc, a = warpgroup_mma_wait(0, deps=[running, a])
    return acc, values(tiles.a.index(after), tiles.factors.index(after), first, FORMAT), i + 1, stage, after


@gluon.jit
def _largest(acc, column, end, MASKED: gl.constexpr):
    """The bits of the largest magnitude among the sums, as an integer. Inf and NaN have larger bits than finite sums.

    MASKED ignores the columns from `end` on. They belong to another group, which checks them, or to no group. What is
    not read of a tile of b may be anything.
    """
    WIDTH: gl.constexpr = min(acc.shape[1], 64)
    pieces = parts(acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF, WIDTH)
    largest = gl.zeros_like(pieces[0])
    for i in gl.static_range(acc.shape[1] // WIDTH):  # part by part, because the masks of all need too many registers
        part = pieces[i]
        if MASKED:
            c = column + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, part.type.layout))
            part = gl.where((c < end)[None, :].broadcast_to(part.shape), part, 0)
        largest = gl.maximum(largest, part)
    return gl.max(gl.max(largest, 1), 0)


@gluon.jit
def _multiply(
    out, tiles, pipeline, scheduler, marks,
    WARPGROUP: gl.constexpr, FORMAT: gl.constexpr, TURNED: gl.constexpr, UNSHIFT: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = tiles.b.shape[1]
    GROUPED: gl.constexpr = scheduler.GROUPED
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    first: gl.constexpr = WARPGROUP * 64
    i, before, stage = 0, pipeline.NUM_STAGES - 1, 0
    mbarrier.wait(pipeline.full.index(0), 0)
    next = values(tiles.a.index(0), tiles.factors.index(0), first, FORMAT)
    barrier()
    for block in range(gl.program_id(0), scheduler.num_blocks, gl.num_programs(0)):
        expert, m_block_idx, n_block_idx, row, row_end, begin, end = block_of(scheduler, block)
        acc = gl.zeros([64, BLOCK_N], gl.float32, mma)
        whole = end
        # The number of an expert's tokens may be an odd multiple of 32. The last block of 64 columns is then half the
        # expert's, and its other half belongs to the next expert.
        if GROUPED == "K":
            whole = end - (end - begin) % 64
        for _ in range(begin, whole, 64):
            a, b = gl.convert_layout(next, operand), tiles.b.index(stage).permute((1, 0))
            acc, next, i, before, stage = _step(a, acc, b, tiles, pipeline, i, before, stage, first, FORMAT)
        if GROUPED == "K":
            if whole < end:
                half, _rest = next.reshape([64, 2, 32]).permute([0, 2, 1]).split()
                a = gl.convert_layout(half, operand)
                b = tiles.b.index(stage).slice(0, 32, dim=1).permute((1, 0))
                acc, next, i, before, stage = _step(a, acc, b, tiles, pipeline, i, before, stage, first, FORMAT)
        # The columns are read only now, because registers are scarce in the loop.
        column, column_end = scheduler.columns(n_block_idx, BLOCK_N)
        if _largest(acc, column, column_end, GROUPED == "N" or tiles.COLUMNS < BLOCK_N) >= 0x7F800000:
            if GROUPED == "N":
                tile_of_tokens = gl.load(scheduler.offs + 4 * n_block_idx + 3)
                for tile in gl.static_range((BLOCK_N + 127) // 128):  # those of 128 tokens each
                    mark(marks, tile_of_tokens + tile, 2 * m_block_idx + WARPGROUP)
            elif GROUPED == "K":
                mark(marks, expert * scheduler.m_blocks + m_block_idx, n_block_idx)
            else:
                mark(marks, m_block_idx, n_block_idx)
        acc *= UNSHIFT
        if GROUPED == "N":
            out.write_turned_columns(row + first, column, column_end, acc, WARPGROUP)
        elif TURNED:  # the rows of the output are those of b, and the matrix of each expert has whole blocks of them
            if GROUPED == "K":
                column += expert * scheduler.N
            out.write_turned(row + first, column, acc, WARPGROUP)
        elif GROUPED == "":
            out.write(row + first, column, acc, WARPGROUP)
        else:  # the experts' matrices lie one below the other
            above = expert * scheduler.M
            row += first
            if row + 64 <= row_end:
                out.write(above + row, column, acc, WARPGROUP)
            else:  # Triton 3.6 does not compile a second `if` around these stores if M is 1
                tma.store_wait(0)
                out.write_part(above, row, row_end, column, acc, WARPGROUP)
    tma.store_wait(0)


@gluon.jit
def mx_gemm_sm90(
    a_desc, b_desc, out_desc, out, scales, blocks, marks, rows_apart,
    NUM_STAGES: gl.constexpr, SWIZZLE: gl.constexpr, GROUPED: gl.constexpr, BLOCKED: gl.constexpr, CHUNK: gl.constexpr,
    FORMAT: gl.constexpr, TURNED: gl.constexpr, A_SHIFT: gl.constexpr, UNSHIFT: gl.constexpr,
    AHEAD: gl.constexpr, REGISTERS: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """`scales` and `blocks` hold the first fields of `Scales` and `Scheduler`, in order.

    `rows_apart` and COLUMNS are for `Tiles`.
    """
    tiles = Tiles(
        gl.allocate_shared_memory(a_desc.dtype, [NUM_STAGES, 128, 64], a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [NUM_STAGES, BLOCK_N, 64], b_desc.layout),
        gl.allocate_shared_memory(gl.int16, [NUM_STAGES, 128, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        rows_apart,
        COLUMNS,
    )
    out_tiles = gl.allocate_shared_memory(
        out_desc.dtype, [2, out_desc.block_shape[0], out_desc.block_shape[1]], out_desc.layout
    )
    a_scales = Scales(*scales, BLOCKED, CHUNK, A_SHIFT, AHEAD)
    scheduler = Scheduler(*blocks, 128, SWIZZLE, GROUPED, K_UNIT=32, OVERLAP=False)
    width = scheduler.M if GROUPED == "N" else scheduler.N
    output = Output(out_desc, out, width, width, out_tiles, BUFFERS=1, ACCUMULATE=False)
    pipeline = make_pipeline(NUM_STAGES, 2, 2)  # two producers: the load warp and the pair of scale warps
    # Write each tuple where it is passed. A tuple that has a name, or that is concatenated, loses its constants.
    gl.warp_specialize(
        [
            (_multiply, (output, tiles, pipeline, scheduler, marks, 0, FORMAT, TURNED, UNSHIFT)),
            (_multiply, (output, tiles, pipeline, scheduler, marks, 1, FORMAT, TURNED, UNSHIFT)),
            (load, (a_desc, b_desc, tiles, pipeline, scheduler)),
            (scale, (a_scales, tiles, pipeline, scheduler)),
        ],
        [4, 1, 2],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )
