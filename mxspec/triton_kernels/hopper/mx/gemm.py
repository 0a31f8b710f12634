"""MX matmuls on Hopper, in Gluon: bf16 tensor cores, one operand's codes turned into bf16 in registers on their way.

Hopper multiplies no MX codes, and sums of fp8 products would have to leave the tensor cores every 32 of K. But a code
times a power of two is a bf16 number, and bf16 products are summed in fp32. b has been turned into bf16 beforehand
(`_mx_values_sm90.py`); of a, the larger operand, a stage of shared memory holds the codes, and each of two math
warpgroups turns its 64 rows of a block of 64 into bf16 while the tensor cores multiply the other warpgroup's.

a's values are multiplied by 2^A_SHIFT, b's by 2^B_SHIFT, so that the smallest product of a code and a scale is still a
bf16 number, and the sums by the reciprocal. What has no bf16 number is made infinite: NaN and Inf codes, the scale NaN,
products past bf16's range. A tile whose sums are not all finite is marked, and another kernel does it over.

Programs are persistent: two math warpgroups, a warp that loads tiles by TMA, two that fetch a's scales. What a stage is
used for is counted by `i`, blocks of K since the program began, over all its tiles: every warp counts for itself, stage
`i % STAGES`, phase `i // STAGES % 2`.
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

from mxspec.triton_kernels.hopper.names import async_load, barrier
from mxspec.triton_kernels.hopper.scheduler import place as tile_place
from mxspec.triton_kernels.hopper.warpgroup import write, write_turned

# For an element format: how a code, in the upper byte of 16 bits, is moved to where bf16 has its bits, which of them
# these are, the factor that makes this number the code's, and one with which all finite codes stay finite and Inf and
# NaN, which are numbers to bf16, do not. The factors as a pair of bf16: 2^120, 1.125 * 2^119; 2^112, 2^112.
E4M3 = gl.constexpr((4, 0x07F007F0, 0x7B807B80, 0x7B107B10))
E5M2 = gl.constexpr((3, 0x0FE00FE0, 0x77807780, 0x77807780))


@gluon.jit
def _geometry(tile, plan, plan_stride, M, M_tiles, N_tiles, K, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Of a tile: its row and column among tiles, its first row and the end of its group's, its group and part of K."""
    if GROUPS == "M":  # the plan says it for each row of tiles
        m, n = tile_place(tile, M_tiles, N_tiles, GROUP)
        group, row, end = gl.load(plan + 3 * m), gl.load(plan + 3 * m + 1), gl.load(plan + 3 * m + 2)
        return m, n, row, end, group, 0, K * (group >= 0)
    elif GROUPS == "K":  # the plan is offs
        of_group = M_tiles * N_tiles
        group = tile // of_group
        m, n = tile_place(tile % of_group, M_tiles, N_tiles, GROUP)
        begin = gl.load(plan + (group - 1) * plan_stride, mask=group > 0, other=0)
        end = gl.minimum(gl.load(plan + group * plan_stride), K)
        return m, n, m * 128, M, group, gl.maximum(begin, 0), end
    else:
        m, n = tile_place(tile, M_tiles, N_tiles, GROUP)
        return m, n, m * 128, M, 0, 0, K


@gluon.jit
def _load(
    a_desc, b_desc, a_tiles, b_tiles, full, empty, plan, plan_stride, tiles, M, M_tiles, N, N_tiles, K,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, n, row, _, group, begin, end = _geometry(tile, plan, plan_stride, M, M_tiles, N_tiles, K, GROUP, GROUPS)
        b_row = n * BLOCK_N
        if GROUPS == "M":  # the experts' matrices lie one below the other
            b_row += group * N
        for k in range(begin, end, 64):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), i // STAGES & 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 128 * 64 + 2 * BLOCK_N * 64)
            async_load(a_desc, [row, k], bar, a_tiles.index(stage))
            async_load(b_desc, [b_row, k], bar, b_tiles.index(stage))
            i += 1
    # The math warpgroups look one block ahead, after the last one too.
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), i // STAGES & 1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _offset(c, stride_k, BLOCKED: gl.constexpr):
    return c // 4 * 512 + c % 4 if BLOCKED else c.to(gl.int64) * stride_k


@gluon.jit
def _tiles_before(group, offs, stride, CHUNK: gl.constexpr, layout: gl.constexpr):
    """How many tiles of 128 tokens the groups before one have, each padded by itself."""
    g = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    before = 0
    for i in range(0, group, CHUNK):
        begin = gl.load(offs + (i + g - 1) * stride, mask=(i + g > 0) & (i + g < group), other=0)
        end = gl.load(offs + (i + g) * stride, mask=i + g < group, other=0)
        before += gl.sum((end - begin + 127) // 128, 0)
    return before


@gluon.jit
def _scale(
    scale, stride_m, stride_k, factors, full, empty, plan, plan_stride, tiles, M, M_tiles, N_tiles, K, C,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCKED: gl.constexpr, CHUNK: gl.constexpr,
    SHIFT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    i = 0
    layout: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [2, 1], [1, 0])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        place = _geometry(tile, plan, plan_stride, M, M_tiles, N_tiles, K, GROUP, GROUPS)
        m, _, row, row_end, group, begin, end = place
        there = (row + rows < row_end)[:, None]
        first, blocks = begin // 32, gl.minimum(end // 32, C)
        if BLOCKED:  # a row of tiles is a row of the scales' tiles, in token groups too
            of_rows = scale + (rows % 32 * 16 + rows // 32 * 4)[:, None]
            if GROUPS == "K":  # a group's tiles are together, row by row
                before = _tiles_before(group, plan, plan_stride, CHUNK, layout)
                across = gl.cdiv(end - begin, 128)
                of_rows += (before.to(gl.int64) * M_tiles + m.to(gl.int64) * across) * 512
                blocks = gl.where((before + across) * 4 <= C + 4 * tiles // (M_tiles * N_tiles), blocks - first, 0)
                first = 0
            else:
                of_rows += m.to(gl.int64) * (gl.cdiv(C, 4) * 512)
        else:
            of_rows = scale + ((row + rows).to(gl.int64) * stride_m)[:, None]
        c = first + gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :]
        # AHEAD steps' are on their way while a step's wait for a stage; none has a register that is handed on.
        bytes = ()
        for _ in gl.static_range(AHEAD):
            bytes = bytes + (gl.load(of_rows + _offset(c, stride_k, BLOCKED), mask=there & (c < blocks), other=0),)
            c += 2
        for k in range(begin, end, 64 * AHEAD):
            next = ()
            for j in gl.static_range(AHEAD):
                next = next + (gl.load(of_rows + _offset(c, stride_k, BLOCKED), mask=there & (c < blocks), other=0),)
                c += 2
                if k + 64 * j < end:
                    stage = i % STAGES
                    mbarrier.wait(empty.index(stage), i // STAGES & 1)
                    # 2^(byte - 127 + SHIFT) as bf16; infinite where it has none, and for NaN.
                    factor = gl.minimum(bytes[j].to(gl.int32) + SHIFT, 255) << 7
                    factors.index(stage).store(factor.to(gl.int16))
                    mbarrier.arrive(full.index(stage), count=1)
                    i += 1
            bytes = next
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), i // STAGES & 1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _values(codes, factors, first: gl.constexpr, SPAN: gl.constexpr, FORMAT: gl.constexpr):
    """64 rows of a stage in bf16, in the order of K in which b's values lie.

    A thread reads consecutive codes, 16 of a row, or 8 of each block of 32. In which order K is summed does not matter
    as long as b has the same: what a thread has read is then what the tensor cores want of it.
    """
    rows: gl.constexpr = [[16, 0], [32, 0]]
    if SPAN == 64:
        read: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], rows, [], [64, 64]
        )
        by_block: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
            [[0, 0, 16], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 2, 32],
        )  # fmt: skip
    else:
        read: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], rows, [], [64, 64]
        )
        by_block: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [8, 0, 0]],
            [[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 2, 32],
        )  # fmt: skip
    x = codes.slice(first, 64).load(read)
    half = factors.slice(first, 64).load(gl.SliceLayout(2, by_block)).to(gl.int32)
    factor = gl.expand_dims(half | half << 16, 2).broadcast_to(64, 2, 32).reshape([64, 64])
    SHIFT: gl.constexpr = FORMAT[0]
    BITS: gl.constexpr = FORMAT[1]
    VALUE: gl.constexpr = FORMAT[2]
    LIMIT: gl.constexpr = FORMAT[3]
    shift, bits = gl.full([64, 64], SHIFT, gl.int32, read), gl.full([64, 64], BITS, gl.int32, read)
    value, limit = gl.full([64, 64], VALUE, gl.int32, read), gl.full([64, 64], LIMIT, gl.int32, read)
    # Infinity times 0 is NaN: so ends what `limit` made infinite.
    x = gl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, zero;
        mov.b32 zero, 0;
        prmt.b32 x, $2, 0, 0x1404;
        shr.b32 y, x, $7;
        and.b32 y, y, $11;
        lop3.b32 x, x, 0x80008000, y, 0xEA;
        mul.rn.bf16x2 x, x, $15;
        mul.rn.bf16x2 y, x, $19;
        mul.rn.bf16x2 x, x, $3;
        fma.rn.bf16x2 $0, y, zero, x;
        prmt.b32 x, $2, 0, 0x3424;
        shr.b32 y, x, $7;
        and.b32 y, y, $11;
        lop3.b32 x, x, 0x80008000, y, 0xEA;
        mul.rn.bf16x2 x, x, $15;
        mul.rn.bf16x2 y, x, $19;
        mul.rn.bf16x2 x, x, $3;
        fma.rn.bf16x2 $1, y, zero, x;
        }""",
        "=r,=r,r" + ",r" * 20, [x, gl.convert_layout(factor, read), shift, bits, value, limit],
        dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip
    if SPAN == 64:  # (thread of four, step of 16, half, pair) becomes (step, half, thread, pair)
        return x.reshape([64, 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([64, 64])
    else:
        return x.reshape([64, 2, 4, 2, 2, 2]).permute([0, 1, 3, 4, 2, 5]).reshape([64, 64])


@gluon.jit
def _multiply(
    out_desc, out, a_tiles, b_tiles, factors, out_tiles, full, empty, marks, plan, plan_stride,
    tiles, M, M_tiles, N, N_tiles, K,
    WARPGROUP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, SPAN: gl.constexpr,
    FORMAT: gl.constexpr, CHUNKS: gl.constexpr, TURNED: gl.constexpr, UNSHIFT: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    first: gl.constexpr = WARPGROUP * 64
    i = 0
    mbarrier.wait(full.index(0), 0)
    values = _values(a_tiles.index(0), factors.index(0), first, SPAN, FORMAT)
    barrier()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        place = _geometry(tile, plan, plan_stride, M, M_tiles, N_tiles, K, GROUP, GROUPS)
        m, n, row, row_end, group, begin, end = place
        acc = gl.zeros([64, BLOCK_N], gl.float32, mma)
        whole = end
        if GROUPS == "K":  # a group's last 32 tokens may be half a block, of which the other half is another group's
            whole = end - (end - begin) % 64
        for _ in range(begin, whole, 64):
            stage, before, after = i % STAGES, (i + STAGES - 1) % STAGES, (i + 1) % STAGES
            a = gl.convert_layout(values, operand)
            running = warpgroup_mma(a, b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            # An arrival is a barrier of the warpgroup before and one after, which here cost nothing: a matmul runs.
            mbarrier.arrive(empty.index(before), count=1)
            barrier()
            mbarrier.wait(full.index(after), (i + 1) // STAGES & 1)
            acc, a = warpgroup_mma_wait(0, deps=[running, a])
            values = _values(a_tiles.index(after), factors.index(after), first, SPAN, FORMAT)
            i += 1
        if GROUPS == "K":
            if whole < end:
                stage, before, after = i % STAGES, (i + STAGES - 1) % STAGES, (i + 1) % STAGES
                half, _rest = values.reshape([64, 2, 32]).permute([0, 2, 1]).split()
                a = gl.convert_layout(half, operand)
                b = b_tiles.index(stage).slice(0, 32, dim=1).permute((1, 0))
                running = warpgroup_mma(a, b, acc, is_async=True)
                mbarrier.arrive(empty.index(before), count=1)
                barrier()
                mbarrier.wait(full.index(after), (i + 1) // STAGES & 1)
                acc, a = warpgroup_mma_wait(0, deps=[running, a])
                values = _values(a_tiles.index(after), factors.index(after), first, SPAN, FORMAT)
                i += 1
        magnitude = acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF
        if GROUPS == "M":  # past the group's rows and its expert's columns is what others are to be judged by
            r = row + first + gl.arange(0, 64, gl.SliceLayout(1, mma))
            c = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
            magnitude = gl.where((r < row_end)[:, None] & (c < N)[None, :], magnitude, 0)
        if gl.max(gl.max(magnitude, 1), 0) >= 0x7F800000:
            if GROUPS == "K":
                m += group * M_tiles
            mark = marks + 1 + 2 * gl.atomic_add(marks, 1)
            gl.store(mark, m)
            gl.store(mark + 1, n)
        acc *= UNSHIFT
        column = n * BLOCK_N
        if TURNED:  # the output's rows are b's; of K-groups' matrices each has whole tiles of them
            if GROUPS == "K":
                column += group * N
            write_turned(out_desc, out_tiles, row + first, column, acc, WARPGROUP, CHUNKS)
        else:
            at = row + first
            if GROUPS == "K":
                at += group * M
            if GROUPS == "" or row + first + 64 <= row_end:
                write(out_desc, out_tiles, at, column, acc, WARPGROUP, 1, CHUNKS, False)
            else:  # the rows that follow are another group's
                r, c = gl.arange(0, 64, gl.SliceLayout(1, mma)), column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
                target = out + ((at + r).to(gl.int64) * N)[:, None] + c[None, :]
                there = (row + first + r < row_end)[:, None] & (c < N)[None, :]
                gl.store(target, acc.to(out.dtype.element_ty), mask=there)
    tma.store_wait(0)


@gluon.jit
def mx_gemm_sm90(
    a_desc, b_desc, out_desc, out, a_scale, a_stride_m, a_stride_k, marks, plan, plan_stride,
    tiles, M, M_tiles, N, N_tiles, K, C,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCKED: gl.constexpr, CHUNK: gl.constexpr,
    SPAN: gl.constexpr, FORMAT: gl.constexpr, TURNED: gl.constexpr, A_SHIFT: gl.constexpr, UNSHIFT: gl.constexpr,
    AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    CHUNKS: gl.constexpr = BLOCK_N // out_desc.block_shape[0 if TURNED else 1]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 64], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, 64], b_desc.layout)
    factors = gl.allocate_shared_memory(gl.int16, [STAGES, 128, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    out_tiles = gl.allocate_shared_memory(
        out_desc.dtype, [2, out_desc.block_shape[0], out_desc.block_shape[1]], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # the warp that loads and those that fetch scales
        mbarrier.init(empty.index(stage), count=2)  # the math warpgroups
    for stage in gl.static_range(STAGES - 1):  # all but the last are free; that one is when block 0 runs
        mbarrier.arrive(empty.index(stage), count=2)
    fence_async_shared()
    # Each tuple stands where it is passed: one that has a name, or is put together, keeps no constants.
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, out, a_tiles, b_tiles, factors, out_tiles, full, empty, marks, plan, plan_stride,
                tiles, M, M_tiles, N, N_tiles, K,
                0, STAGES, GROUP, GROUPS, SPAN, FORMAT, CHUNKS, TURNED, UNSHIFT,
            )),
            (_multiply, (
                out_desc, out, a_tiles, b_tiles, factors, out_tiles, full, empty, marks, plan, plan_stride,
                tiles, M, M_tiles, N, N_tiles, K,
                1, STAGES, GROUP, GROUPS, SPAN, FORMAT, CHUNKS, TURNED, UNSHIFT,
            )),
            (_load, (
                a_desc, b_desc, a_tiles, b_tiles, full, empty, plan, plan_stride, tiles, M, M_tiles, N, N_tiles, K,
                STAGES, GROUP, GROUPS,
            )),
            (_scale, (
                a_scale, a_stride_m, a_stride_k, factors, full, empty, plan, plan_stride,
                tiles, M, M_tiles, N_tiles, K, C,
                STAGES, GROUP, GROUPS, BLOCKED, CHUNK, A_SHIFT, AHEAD,
            )),
        ],
        [4, 1, 2],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
