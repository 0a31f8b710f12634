"""Few bfloat16 tokens by weights in codes on Hopper, in Gluon. The matmuls run while codes become bf16.

A program has 64 or 128 rows of weights, 64 for each warpgroup, and a tile of tokens. TMA fills a ring of stages, each
with STEP columns of K of the codes and of the tokens. A stage has one or two PARTS. While the tensor cores multiply a
part, the same warps turn the codes of the next part into bf16 registers: see `formats.py`. Plain Triton does not
compile this order: it waits for each instruction of the tensor cores.

Only two parts are in registers: one is multiplied, and one is turned. So with two parts in a stage, a program needs
fewer registers than with one part of the same stage, and a processor holds more programs. But the tensor cores wait
after each part. If there are too few programs to fill that time, one part is faster.

With few tokens, the number of instructions limits the kernel. So the number of the stage is counted, because a division
takes more instructions. A register holds the factors of two blocks: see `formats.py`.

A weight is read once for each tile of tokens, as a code, and no value of it passes through memory. A processor holds
several programs. So there are no persistent programs, and no warps with roles of their own.

The scales of two parts are loaded two parts ahead, into registers.

For tokens of experts, a plan in memory says which tokens a tile has: see `../scheduler.py`.

A sum is taken over steps of 16 columns of K in ascending order, as in `../mx/gemm.py` and `../nvfp4/gemm.py`. So the
bits of a token depend neither on the number of tokens nor on the tile. `Format` says at which sizes of numbers NVFP4
is an exception.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxspec.triton_kernels.hopper.marks import mark
from mxspec.triton_kernels.hopper.names import Value, aggregate, async_load, barrier
from mxspec.triton_kernels.hopper.weights.formats import Format, of_words, units_of, values


@aggregate
class Ring:
    """The stages: tokens `(STAGES, BLOCK_M, STEP)`, codes `(STAGES, BLOCK_N, units)`, and a barrier for each.

    A unit is a byte, or a pair of bytes if the even columns of tokens come first.
    """

    x_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    top: Value
    row: Value
    STAGES: gl.constexpr
    PARTS: gl.constexpr

    @gluon.jit
    def fill(self, stage, step, there):
        """Let TMA read a step of K into a stage. Past K, TMA reads zeros."""
        bar = self.full.index(stage)
        STEP: gl.constexpr = self.x.shape[2]
        UNITS: gl.constexpr = self.w.shape[2]
        BYTES: gl.constexpr = self.w.shape[1] * UNITS * self.w.dtype.primitive_bitwidth // 8
        mbarrier.expect(bar, BYTES + 2 * STEP * self.x.shape[1], pred=there)
        async_load(self.x_desc, [self.top, step * STEP], bar, self.x.index(stage), pred=there)
        async_load(self.w_desc, [self.row, step * UNITS], bar, self.w.index(stage), pred=there)

    @gluon.jit
    def after(self, step, stage, phase):
        """The next step, its stage, and the phase of the stage's barrier."""
        last = stage == self.STAGES - 1
        return step + 1, gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)

    @gluon.jit
    def wait(self, stage, phase):
        mbarrier.wait(self.full.index(stage), phase)

    @gluon.jit
    def tokens(self, stage, PART: gl.constexpr):
        """The tokens of a part of a stage, `(STEP / PARTS, BLOCK_M)`."""
        COLUMNS: gl.constexpr = self.x.shape[2] // self.PARTS
        return self.x.index(stage).slice(PART * COLUMNS, COLUMNS, dim=1).permute((1, 0))

    @gluon.jit
    def codes(self, stage, PART: gl.constexpr):
        """The codes of a part of a stage, `(BLOCK_N, units)`."""
        UNITS: gl.constexpr = self.w.shape[2] // self.PARTS
        return self.w.index(stage).slice(PART * UNITS, UNITS, dim=1)


@aggregate
class Scales:
    """The scale bytes of the rows in memory: pointers to the first of each row, to units of SIZE bytes."""

    at: gl.tensor
    there: gl.tensor
    stride: Value  # from a tile of 4 columns of scales to the next if BLOCKED, else from a unit to the next
    count: Value  # of units in a row
    SCALES: gl.constexpr
    WORDS: gl.constexpr  # words of 4 bytes of a part
    SIZE: gl.constexpr
    BLOCKED: gl.constexpr

    @gluon.jit
    def load(self, part):
        """The words of a part of K for each row. `part` counts parts. Past K, the bytes are 0."""
        UNITS: gl.constexpr = 4 // self.SIZE
        units: gl.constexpr = of_words(self.SCALES, self.at.shape[0], self.WORDS, UNITS)
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, units))
        at, there = gl.convert_layout(self.at, rows), gl.convert_layout(self.there, rows)
        at, there = gl.expand_dims(gl.expand_dims(at, 1), 2), gl.expand_dims(gl.expand_dims(there, 1), 2)
        word = gl.arange(0, self.WORDS, gl.SliceLayout(0, gl.SliceLayout(2, units)))
        word = gl.expand_dims(gl.expand_dims(word, 0), 2)
        i = gl.arange(0, UNITS, gl.SliceLayout(0, gl.SliceLayout(1, units)))
        i = gl.expand_dims(gl.expand_dims(i, 0), 1)
        unit = word * UNITS + i
        # `MOST_COLUMNS` keeps these places below 2^31, but for units that any stride may separate.
        if self.BLOCKED:
            at += part * self.WORDS * self.stride
            place = word * self.stride + i
        elif self.SIZE > 1:
            at += part * (self.WORDS * UNITS)
            place = unit
        else:
            at += gl.to_tensor(part).to(gl.int64) * (self.WORDS * UNITS) * self.stride
            place = unit.to(gl.int64) * self.stride
        found = gl.load(at + place, mask=there & (unit < self.count - part * (self.WORDS * UNITS)), other=0)
        return gl.sum(found.to(gl.int32) << (i * (8 * self.SIZE)), 2)


@gluon.jit
def _part(of_part, acc, ring, scale, now, steps, PART: gl.constexpr, operand: gl.constexpr, format):
    """Multiply a part. Meanwhile, turn the codes of the next part, whose scales are `scale`.

    `now` is the step, its stage and the phase of the stage. PART counts the parts of the stage, from 0. After the last
    part of a stage, fill the stage again.
    """
    step, stage, phase = now
    LAST: gl.constexpr = PART == ring.PARTS - 1
    running = warpgroup_mma(of_part, ring.tokens(stage, PART), acc, is_async=True)
    then = now
    if LAST:
        then = ring.after(step, stage, phase)
        ring.wait(then[1], then[2])
    next = values(ring.codes(then[1], 0 if LAST else PART + 1), scale, operand, format, False)
    acc, of_part = warpgroup_mma_wait(0, deps=[running, of_part])
    if LAST:
        barrier()  # every warp has read the stage
        ring.fill(stage, step + ring.STAGES, step + ring.STAGES < steps)
    return next, acc, then


@gluon.jit
def _sums(ring, scales, steps, parts, acc, operand: gl.constexpr, ODD: gl.constexpr, format):
    """The sums of a tile, `(BLOCK_N, BLOCK_M)`, over one or more parts. A step is a stage."""
    PARTS: gl.constexpr = ring.PARTS
    begin, one, other = scales.load(0), scales.load(1), scales.load(2)
    for step in gl.static_range(ring.STAGES):
        ring.fill(step, step, step < steps)
    now = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    ring.wait(0, 0)
    of_part = values(ring.codes(0, 0), begin, operand, format, False)
    last = parts - 1
    for part in range(0, last // 2 * 2, 2):
        later, latest = scales.load(part + 3), scales.load(part + 4)
        of_part, acc, now = _part(of_part, acc, ring, one, now, steps, 0, operand, format)
        of_part, acc, now = _part(of_part, acc, ring, other, now, steps, PARTS - 1, operand, format)
        one, other = later, latest
    if not ODD:
        of_part, acc, now = _part(of_part, acc, ring, one, now, steps, 0, operand, format)
    return warpgroup_mma(of_part, ring.tokens(now[1], 0 if ODD else PARTS - 1), acc, is_async=False)


@gluon.jit
def _exact_sums(ring, scales, steps, begin, acc, operand: gl.constexpr, format):
    """`_sums` under every scale, one step after the other. `begin` counts the fills before."""
    PARTS: gl.constexpr = ring.PARTS
    for step in range(steps):
        count = begin + step
        stage = count % ring.STAGES
        barrier()
        ring.fill(stage, step, True)
        ring.wait(stage, count // ring.STAGES & 1)
        for part in gl.static_range(PARTS):
            of_part = values(ring.codes(stage, part), scales.load(PARTS * step + part), operand, format, True)
            acc = warpgroup_mma(of_part, ring.tokens(stage, part), acc, is_async=False)
    return acc


@gluon.jit
def weights_sm90(
    x_desc, w_desc, scale, stride_e, stride_r, stride_c, out, out_stride, numbers, plan, rows_apart, marks, M, N, K,
    CODES: gl.constexpr, SCALES: gl.constexpr, BLOCK: gl.constexpr, SHIFT: gl.constexpr, UP: gl.constexpr,
    BLOCKED: gl.constexpr, SIZE: gl.constexpr, EVEN_FIRST: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """The kernel reads SIZE bytes of scales at once: 4, 2 or 1. Their strides count units of SIZE bytes.

    `stride_r` is the stride of a row, or of a row of tiles if BLOCKED.

    Each sum is multiplied by UP, and by the tensor scales if `numbers` has them: those of a, their stride, those of b,
    and their stride. For tokens of experts, `rows_apart` is the number of rows from one expert's weights to the next.
    The sums of fp8 codes that are not finite are marked, 64 columns of the output at a time. ODD: whether K has an odd
    number of parts.
    """
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    STEP: gl.constexpr = x_desc.block_shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    format = Format(CODES, SCALES, BLOCK, SHIFT, EVEN_FIRST)
    n_tiles = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0) // n_tiles
    left, top, end, expert = gl.program_id(0) % n_tiles * BLOCK_N, tile * BLOCK_M, M, 0
    steps = gl.cdiv(K, STEP)
    if plan is not None:
        expert, top, end = gl.load(plan + 4 * tile), gl.load(plan + 4 * tile + 1), gl.load(plan + 4 * tile + 2)
        if top >= end:
            return
        if expert < 0:  # tokens of no expert
            of_tile: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [gl.num_warps(), 1], [0, 1])
            m = gl.expand_dims(top + gl.arange(0, BLOCK_M, gl.SliceLayout(0, of_tile)), 0)
            n = gl.expand_dims(left + gl.arange(0, BLOCK_N, gl.SliceLayout(1, of_tile)), 1)
            zeros = gl.zeros([BLOCK_N, BLOCK_M], out.dtype.element_ty, of_tile)
            gl.store(out + m.to(gl.int64) * out_stride + n, zeros, mask=(m < end) & (n < N))
            return
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    barrier()
    ring = Ring(
        x_desc, w_desc,
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, STEP], x_desc.layout),
        gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, units_of(CODES, STEP, EVEN_FIRST)], w_desc.layout),
        full, top, expert * rows_apart + left, STAGES, PARTS,
    )  # fmt: skip
    gl.static_assert(STEP % (4 * BLOCK * PARTS) == 0, "a part has whole words of 4 scale bytes")
    WORDS: gl.constexpr = STEP // (4 * BLOCK * PARTS)
    n = left + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, of_words(SCALES, BLOCK_N, WORDS, 4))))
    of_row = n.to(gl.int64) * stride_r
    if BLOCKED:
        of_row = (n // 128).to(gl.int64) * stride_r + (n % 32 * 4 + n % 128 // 32) * (4 // SIZE)
    scale += gl.to_tensor(expert).to(gl.int64) * stride_e
    scales = Scales(scale + of_row, n < N, stride_c, K // (SIZE * BLOCK), SCALES, WORDS, SIZE, BLOCKED)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[BLOCK_N // 16, 1], instr_shape=[16, BLOCK_M, 16]
    )  # fmt: skip
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    # The assemblers of CUDA 12.8 and 13.3 take sums that begin with a constant 0 for 0 also after the matmuls. Then
    # they leave out the checks below. They do not know that this number is 0.
    zeros = gl.full([BLOCK_N, BLOCK_M], (K >> 31).to(gl.float32), gl.float32, mma)
    acc = _sums(ring, scales, steps, gl.cdiv(K, STEP // PARTS), zeros, operand, ODD, format)
    m = gl.expand_dims(top + gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout)), 0)
    number = 1.0
    if SCALES == "e4m3":
        number = gl.load(numbers[0] + expert * numbers[1]) * gl.load(numbers[2] + expert * numbers[3])
    elif CODES == "e2m1":
        # A scale byte from 133 on makes Inf or NaN of every weight of its block, and so of the sum. The weights of a
        # finite sum are exact already, so the second pass gives this sum again.
        bits = acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF
        if gl.max(gl.max(bits, 1), 0) >= 0x7F800000:
            acc = _exact_sums(ring, scales, steps, steps, zeros, operand, format)
    else:  # tokens of other tiles are other tiles' to mark, and those past the last are any numbers
        bits = gl.where((m < end).broadcast_to(acc.shape), acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        if gl.max(gl.max(bits, 1), 0) >= 0x7F800000:
            of_tokens = top // 128 if plan is None else gl.load(plan + 4 * tile + 3)
            for part in gl.static_range(BLOCK_N // 64):
                mark(marks, of_tokens, left // 64 + part)
    at_n = gl.expand_dims(left + gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout)), 1)
    at = out + m.to(gl.int64) * out_stride + at_n
    gl.store(at, (acc * UP * number).to(out.dtype.element_ty), mask=(m < end) & (at_n < N))
