"""NVFP4 matmuls on Hopper, in Gluon: a matmul of bfloat16 values that multiplies each sum by the tensor scales.

`mx_gemm` by e2m1 weights calls it, too, with a number of the launch in place of the tensor scales.

A persistent program computes blocks of 128 rows of the output, or of 64 if there are few rows. The kernel is a ring of
shared-memory stages, and each stage holds 64 columns of K of both operands.

- A load warp fills the stages with TMA: `load`.
- Each of one or two math warpgroups multiplies 64 rows on the tensor cores, which sum in fp32. A matmul is always
  waiting while another runs. After the last block of K, a warpgroup multiplies its sums by the product of the tensor
  scales and writes them.

An operand may be contiguous along K, or TURNED: contiguous along its rows. TMA then loads its transpose, and the tensor
cores read that.

For K-groups, each group is a matrix of its own for TMA. So TMA fills the tokens past the end of a group with zeros, and
a group may begin and end at any token. The load warp makes a pair of descriptors for each group.

`../scheduler.py` says which block of the output comes next. `../pipeline.py` has the barriers by which warps hand
stages to each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mxspec.triton_kernels.hopper.names import Value, aggregate, async_load, barrier, swizzle
from mxspec.triton_kernels.hopper.pipeline import make_pipeline
from mxspec.triton_kernels.hopper.rows import load_rows
from mxspec.triton_kernels.hopper.scheduler import Scheduler
from mxspec.triton_kernels.hopper.warpgroup import Output


@aggregate
class Tiles:
    """The shared memory of the stages: values of a and of b.

    a: (NUM_STAGES, BLOCK_M, 64). TURNED: (WARPGROUPS * NUM_STAGES, 64, 64), the transposed rows of each warpgroup.
    b: (NUM_STAGES, BLOCK_N, 64). TURNED: (NUM_STAGES, 64, BLOCK_N).

    TMA fills the first ROWS rows of a tile of a, unless a is TURNED.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    A_TURNED: gl.constexpr
    B_TURNED: gl.constexpr
    BLOCK_N: gl.constexpr
    WARPGROUPS: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def rows(self, stage, WARPGROUP: gl.constexpr):
        """The 64 rows of a that a warpgroup multiplies."""
        if self.A_TURNED:
            return self.a.index(self.WARPGROUPS * stage + WARPGROUP).permute((1, 0))
        else:
            return self.a.index(stage).slice(WARPGROUP * 64, 64)

    @gluon.jit
    def columns(self, stage):
        """(64, BLOCK_N), the transpose of the rows of b."""
        return self.b.index(stage) if self.B_TURNED else self.b.index(stage).permute((1, 0))


@aggregate
class Numbers:
    """The tensor scales of a and b: one for each expert, or one. Without them, UP is in their place."""

    a: Value
    a_stride: Value
    b: Value
    b_stride: Value
    UP: gl.constexpr

    @gluon.jit
    def product(self, expert, there):
        """The product of both. Rows of no group have no tensor scale and give 0."""
        if self.UP is None:
            of_a = gl.load(self.a + expert * self.a_stride, mask=there, other=0.0)
            return of_a * gl.load(self.b + expert * self.b_stride, mask=there, other=0.0)
        else:
            return self.UP


@gluon.jit
def _multiply(out, tiles, pipeline, scheduler, numbers, WARPGROUP: gl.constexpr, UNIT: gl.constexpr):
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    GROUPED: gl.constexpr = scheduler.GROUPED
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    buffer: gl.constexpr = WARPGROUP * out.BUFFERS
    i, before, stage = 0, pipeline.NUM_STAGES - 1, 0
    group, ends = (-1, 0, 0, 0), scheduler.ends_after(-1)
    block = gl.program_id(0)
    while block < scheduler.num_blocks:
        group, ends = scheduler.get_next_group(block, group, ends)
        expert, _, n_block_idx, row, row_end, begin, end = scheduler.get_block(block, group)
        number = numbers.product(expert, expert < scheduler.num_experts)
        acc = gl.zeros([64, BLOCK_N], gl.float32, mma)
        for _ in range(begin // UNIT * UNIT, end // UNIT * UNIT, 64):
            pipeline.wait_full(i, stage)
            acc = warpgroup_mma(tiles.rows(stage, WARPGROUP), tiles.columns(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The matmul of the stage before is done. An arrival is a barrier of the warpgroup before it and one after
            # it. Both are free here: the matmul of this stage is running.
            mbarrier.arrive(pipeline.empty.index(before), count=1)
            barrier()
            i, before, stage = i + 1, stage, pipeline.after(stage)
        acc = warpgroup_mma_wait(0, deps=[acc])
        acc *= number
        above, column = 0, n_block_idx * BLOCK_N
        if GROUPED == "K":  # the experts' matrices lie one below the other
            above = expert * scheduler.M
        row += WARPGROUP * 64
        if BLOCK_N == 256:  # in halves, each in two parts that take turns in shared memory
            left, right = acc.reshape([64, 2, 128]).permute([0, 2, 1]).split()
            if GROUPED == "":
                out.write(row, column, left, buffer)
                out.write(row, column + 128, right, buffer)
            else:
                out.write_rows(above, row, row_end, column, left, buffer)
                out.write_rows(above, row, row_end, column + 128, right, buffer)
        elif GROUPED == "":
            out.write(row, column, acc, buffer)
        else:
            out.write_rows(above, row, row_end, column, acc, buffer)
        block = scheduler.next_block(block, expert)
    tma.store_wait(0)


@gluon.jit
def _load_block(a_desc, b_desc, tiles, pipeline, i, row, b_row, k, b_k):
    """Load 64 columns of K. `b_k` is the row of the transpose of b that holds column k."""
    stage = pipeline.wait_empty(i)
    bar = pipeline.full.index(stage)
    mbarrier.expect(bar, (tiles.ROWS + tiles.BLOCK_N) * 128)
    if tiles.A_TURNED:
        for half in gl.static_range(tiles.WARPGROUPS):
            async_load(a_desc, [k, row + 64 * half], bar, tiles.a.index(tiles.WARPGROUPS * stage + half))
    else:
        load_rows(a_desc, row, k, bar, tiles.a.index(stage), tiles.ROWS)
    if tiles.B_TURNED:
        async_load(b_desc, [b_k, b_row], bar, tiles.b.index(stage))
    else:
        async_load(b_desc, [b_row, k], bar, tiles.b.index(stage))
    return i + 1


@gluon.jit
def _of_group(pointer, stride, begin, rows, tokens, tiles, TURNED: gl.constexpr):
    """A descriptor of the tokens of one group of an operand."""
    DOWN: gl.constexpr = tiles.shape[1]
    ALONG: gl.constexpr = tiles.shape[2]
    if TURNED:
        first = pointer + begin.to(gl.int64) * stride
        return tma.make_tensor_descriptor(first, [tokens, rows], [stride, 1], [DOWN, ALONG], tiles.layout)
    else:
        first = pointer + begin.to(gl.int64)
        return tma.make_tensor_descriptor(first, [rows, tokens], [stride, 1], [DOWN, ALONG], tiles.layout)


@gluon.jit
def _load_expert(expert, a, b, tiles, pipeline, scheduler, i, last, UNIT: gl.constexpr):
    """Load the blocks of one expert. `a` and `b` are a pointer and a stride.

    There are two pairs of descriptors, for even and for odd experts. So the new descriptors overwrite the descriptors
    of an earlier expert, not of the previous expert. `last - 1` is the last block of K that used the old descriptors.
    """
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    begin, end = scheduler.k_range(expert)
    begin, end = begin // UNIT * UNIT, end // UNIT * UNIT
    tokens = end - begin
    of_expert = scheduler.m_blocks * scheduler.n_blocks
    programs = gl.num_programs(0)
    own = gl.program_id(0) + gl.cdiv(gl.maximum(expert * of_expert - gl.program_id(0), 0), programs) * programs
    if (tokens > 0) & (own < (expert + 1) * of_expert):
        if (last > 0) & (i - last < pipeline.NUM_STAGES):  # that block may still be in flight
            pipeline.wait_full(last - 1, (last - 1) % pipeline.NUM_STAGES)
        a_desc = _of_group(a[0], a[1], begin, scheduler.M, tokens, tiles.a, tiles.A_TURNED)
        b_desc = _of_group(b[0], b[1], begin, scheduler.N, tokens, tiles.b, tiles.B_TURNED)
        for block in range(own, (expert + 1) * of_expert, programs):
            m_block_idx, n_block_idx = swizzle(
                block - expert * of_expert, scheduler.m_blocks, scheduler.n_blocks, scheduler.SWIZZLE
            )
            for k in range(0, tokens, 64):
                row, column = m_block_idx * scheduler.BLOCK_M, n_block_idx * BLOCK_N
                i = _load_block(a_desc, b_desc, tiles, pipeline, i, row, column, k, k)
        last = i
    return i, last


@gluon.jit
def load(a, b, tiles, pipeline, scheduler, UNIT: gl.constexpr):
    """The load warp. With GROUPED "K", a and b are pointers and strides; otherwise they are descriptors."""
    i = 0
    if scheduler.GROUPED == "K":  # two pairs of descriptors: one is written while the other is read
        even, odd = 0, 0
        for expert in range(0, scheduler.num_experts, 2):
            i, even = _load_expert(expert, a, b, tiles, pipeline, scheduler, i, even, UNIT)
            if expert + 1 < scheduler.num_experts:
                i, odd = _load_expert(expert + 1, a, b, tiles, pipeline, scheduler, i, odd, UNIT)
    else:
        group, ends = (-1, 0, 0, 0), scheduler.ends_after(-1)
        block = gl.program_id(0)
        while block < scheduler.num_blocks:
            group, ends = scheduler.get_next_group(block, group, ends)
            expert, _, n_block_idx, row, _, begin, end = scheduler.get_block(block, group)
            b_row, b_k = n_block_idx * tiles.BLOCK_N, 0
            if scheduler.GROUPED == "M":  # the experts' matrices lie one below the other
                if tiles.B_TURNED:
                    b_k = expert * scheduler.K
                else:
                    b_row += expert * scheduler.N
            for k in range(begin, end, 64):
                i = _load_block(a, b, tiles, pipeline, i, row, b_row, k, b_k + k)
            block = scheduler.next_block(block, expert)


@gluon.jit
def nvfp4_gemm_sm90(
    a, b, out_desc, out, numbers, blocks,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, GROUPED: gl.constexpr, UNIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    SWIZZLE: gl.constexpr, REGISTERS: gl.constexpr, ROWS: gl.constexpr,
    OVERLAP: gl.constexpr, UP: gl.constexpr = None,
):  # fmt: skip
    """`numbers` and `blocks` hold the fields of `Numbers` and the first fields of `Scheduler`, in order.

    A group of K begins at a multiple of UNIT.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    of_b: gl.constexpr = gl.NVMMASharedLayout(min(2 * BLOCK_N, 128) if B_TURNED else 128, 16)
    WARPGROUPS: gl.constexpr = BLOCK_M // 64
    tiles = Tiles(
        gl.allocate_shared_memory(
            gl.bfloat16, [WARPGROUPS * NUM_STAGES, 64, 64] if A_TURNED else [NUM_STAGES, BLOCK_M, 64], layout
        ),
        gl.allocate_shared_memory(
            gl.bfloat16, [NUM_STAGES, 64, BLOCK_N] if B_TURNED else [NUM_STAGES, BLOCK_N, 64], of_b
        ),
        A_TURNED, B_TURNED, BLOCK_N, WARPGROUPS, ROWS,
    )  # fmt: skip
    WIDTH: gl.constexpr = out_desc.block_shape[1]
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS * BUFFERS, 64, WIDTH], out_desc.layout)
    scheduler = Scheduler(*blocks, BLOCK_M, SWIZZLE, GROUPED, K_UNIT=1, OVERLAP=OVERLAP)
    output = Output(out_desc, out, scheduler.N, scheduler.N, out_tiles, BUFFERS, ACCUMULATE=False)
    of_groups = Numbers(*numbers, UP)
    pipeline = make_pipeline(NUM_STAGES, 1, WARPGROUPS)
    # Write each tuple where it is passed. A tuple that has a name, or that is concatenated, loses its constants.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (output, tiles, pipeline, scheduler, of_groups, 0, UNIT)),
                (_multiply, (output, tiles, pipeline, scheduler, of_groups, 1, UNIT)),
                (load, (a, b, tiles, pipeline, scheduler, UNIT)),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (output, tiles, pipeline, scheduler, of_groups, 0, UNIT)),
                (load, (a, b, tiles, pipeline, scheduler, UNIT)),
            ],
            [1],
            [64],
        )
