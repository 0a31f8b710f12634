"""Few bfloat16 tokens by weights in codes on Hopper, in Gluon. The matmuls run while codes become bf16.

A program has 64 or 128 rows of weights, 64 for each warpgroup, and a tile of tokens. TMA fills a ring of stages, each
with 128 or 256 columns of K of the codes and of the tokens. While the tensor cores multiply a stage, the same warps
turn the codes of the next stage into bf16 registers: see `formats.py`. Plain Triton does not compile this order: it
waits for each instruction of the tensor cores.

A weight is read once for each tile of tokens, as a code, and no value of it passes through memory. A processor holds
several programs. So there are no persistent programs, and no warps with roles of their own.

The scales of two stages are loaded one pair of stages ahead, into registers.

For tokens of experts, a plan in memory says which tokens a tile has: see `../scheduler.py`.

A sum is taken over steps of 16 columns of K in ascending order, as in `../mx/gemm.py` and `../nvfp4/gemm.py`. So the
bits of a token depend neither on the number of tokens nor on the tile.
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
from mxspec.triton_kernels.hopper.weights.formats import Format, bytes_of, of_words, values


@aggregate
class Ring:
    """The stages: tokens `(STAGES, BLOCK_M, STEP)`, codes `(STAGES, BLOCK_N, bytes)`, and a barrier for each."""

    x_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    top: Value
    row: Value
    STAGES: gl.constexpr

    @gluon.jit
    def fill(self, step, count, there):
        """Let TMA read a step of K. `count` counts the fills of the program. Past K, TMA reads zeros."""
        stage = count % self.STAGES
        bar = self.full.index(stage)
        STEP: gl.constexpr = self.x.shape[2]
        BYTES: gl.constexpr = self.w.shape[2]
        mbarrier.expect(bar, self.w.shape[1] * BYTES + 2 * STEP * self.x.shape[1], pred=there)
        async_load(self.x_desc, [self.top, step * STEP], bar, self.x.index(stage), pred=there)
        async_load(self.w_desc, [self.row, step * BYTES], bar, self.w.index(stage), pred=there)

    @gluon.jit
    def wait(self, count):
        mbarrier.wait(self.full.index(count % self.STAGES), count // self.STAGES & 1)


@aggregate
class Scales:
    """The scale bytes of the rows in memory: pointers to the first of each row. WORDS: to words of 4 bytes."""

    at: gl.tensor
    there: gl.tensor
    stride: Value  # from a word to the next; of plain bytes, from a byte to the next
    count: Value  # of words or bytes in a row
    OF_STEP: gl.constexpr  # words
    WORDS: gl.constexpr
    BLOCKED: gl.constexpr

    @gluon.jit
    def load(self, step):
        """The words of a step of K for each row. Past K, the bytes are 0."""
        layout: gl.constexpr = self.at.type.layout.parent
        word = step * self.OF_STEP + gl.arange(0, self.OF_STEP, gl.SliceLayout(0, layout))
        at, there, word = gl.expand_dims(self.at, 1), gl.expand_dims(self.there, 1), gl.expand_dims(word, 0)
        if self.WORDS:
            return gl.load(at + word.to(gl.int64) * self.stride, mask=there & (word < self.count), other=0)
        else:
            i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout.parent)))
            i = gl.expand_dims(gl.expand_dims(i, 0), 1)
            word = gl.expand_dims(word, 2)
            byte = word * 4 + i
            place = word.to(gl.int64) * self.stride + i if self.BLOCKED else byte.to(gl.int64) * self.stride
            there = gl.expand_dims(there, 2) & (byte < self.count)
            found = gl.load(gl.expand_dims(at, 2) + place, mask=there, other=0)
            return gl.sum(found.to(gl.int32) << (i * 8), 2)


@gluon.jit
def _step(of_step, acc, ring, scale, step, steps, operand: gl.constexpr, format):
    """Multiply a step. Meanwhile, turn the codes of the next step. Then fill the stage that is free."""
    tokens = ring.x.index(step % ring.STAGES).permute((1, 0))
    running = warpgroup_mma(of_step, tokens, acc, is_async=True)
    ring.wait(step + 1)
    next = values(ring.w.index((step + 1) % ring.STAGES), scale, operand, format, False)
    acc, of_step = warpgroup_mma_wait(0, deps=[running, of_step])
    barrier()  # every warp has read the stage
    ring.fill(step + ring.STAGES, step + ring.STAGES, step + ring.STAGES <= steps)
    return next, acc


@gluon.jit
def _sums(ring, scales, steps, acc, operand: gl.constexpr, format):
    """The sums of a tile, `(BLOCK_N, BLOCK_M)`, over an even number of steps.

    One more step is filled and turned, whose codes are past K.
    """
    first = scales.load(0)
    one, other = scales.load(1), scales.load(2)
    for step in gl.static_range(ring.STAGES):
        ring.fill(step, step, step <= steps)
    ring.wait(0)
    of_step = values(ring.w.index(0), first, operand, format, False)
    for step in range(0, steps, 2):
        later, last = scales.load(step + 3), scales.load(step + 4)
        of_step, acc = _step(of_step, acc, ring, one, step, steps, operand, format)
        of_step, acc = _step(of_step, acc, ring, other, step + 1, steps, operand, format)
        one, other = later, last
    return acc


@gluon.jit
def _exact_sums(ring, scales, steps, begin, acc, operand: gl.constexpr, format):
    """`_sums` under every scale, one step after the other. `begin` counts the fills before."""
    for step in range(steps):
        count = begin + step
        barrier()
        ring.fill(step, count, True)
        ring.wait(count)
        of_step = values(ring.w.index(count % ring.STAGES), scales.load(step), operand, format, True)
        tokens = ring.x.index(count % ring.STAGES).permute((1, 0))
        acc = warpgroup_mma(of_step, tokens, acc, is_async=False)
    return acc


@gluon.jit
def weights_sm90(
    x_desc, w_desc, scale, stride_e, stride_r, stride_c, out, out_stride, numbers, plan, rows_apart, marks, M, N, K,
    CODES: gl.constexpr, SCALES: gl.constexpr, BLOCK: gl.constexpr, SHIFT: gl.constexpr, UP: gl.constexpr,
    BLOCKED: gl.constexpr, WORDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scales are bytes, or words of 4 bytes if WORDS. Their strides count these.

    `stride_r` is the stride of a row, or of a row of tiles if BLOCKED.

    `numbers` are the tensor scales of a, their stride, those of b, and their stride. If there are none, each sum is
    multiplied by UP. For tokens of experts, `rows_apart` is the number of rows from one expert's weights to the next.
    The sums of fp8 codes that are not finite are marked, 64 columns of the output at a time.
    """
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    STEP: gl.constexpr = x_desc.block_shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    format = Format(CODES, SCALES, BLOCK, SHIFT)
    n_tiles = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0) // n_tiles
    left, top, end, expert = gl.program_id(0) % n_tiles * BLOCK_N, tile * BLOCK_M, M, 0
    steps = gl.cdiv(K, 2 * STEP) * 2
    if plan is not None:
        expert, top, end = gl.load(plan + 4 * tile), gl.load(plan + 4 * tile + 1), gl.load(plan + 4 * tile + 2)
        if top >= end:
            return
        steps = gl.where(expert < 0, 0, steps)  # tokens of no expert
        expert = gl.maximum(expert, 0)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    barrier()
    ring = Ring(
        x_desc, w_desc,
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, STEP], x_desc.layout),
        gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, bytes_of(CODES, STEP)], w_desc.layout),
        full, top, expert * rows_apart + left, STAGES,
    )  # fmt: skip
    SIZE: gl.constexpr = 4 if WORDS else 1  # bytes
    OF_STEP: gl.constexpr = STEP // (4 * BLOCK)
    by_word: gl.constexpr = of_words(SCALES, BLOCK_N, OF_STEP)
    n = left + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, by_word)))
    of_row = n.to(gl.int64) * stride_r
    if BLOCKED:
        of_row = (n // 128).to(gl.int64) * stride_r + (n % 32 * 4 + n % 128 // 32) * (4 // SIZE)
    scale += gl.to_tensor(expert).to(gl.int64) * stride_e
    scales = Scales(scale + of_row, n < N, stride_c, K // (SIZE * BLOCK), OF_STEP, WORDS, BLOCKED)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[BLOCK_N // 16, 1], instr_shape=[16, BLOCK_M, 16]
    )  # fmt: skip
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    acc = _sums(ring, scales, steps, zeros, operand, format)
    m = gl.expand_dims(top + gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout)), 0)
    number = UP
    if SCALES == "e4m3":
        number = gl.load(numbers[0] + expert * numbers[1]) * gl.load(numbers[2] + expert * numbers[3])
        if plan is not None:
            number = gl.where(steps > 0, number, 0.0)
    elif CODES == "e2m1":
        is_finite = (acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        if gl.max(gl.max((is_finite == 0).to(gl.int32), 1), 0) != 0:
            again = _exact_sums(ring, scales, steps, steps + 1, zeros, operand, format)
            acc = gl.where(is_finite, acc, again)
    else:  # tokens of other tiles are other tiles' to mark, and those past the last are any numbers
        bits = gl.where((m < end).broadcast_to(acc.shape), acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        if gl.max(gl.max(bits, 1), 0) >= 0x7F800000:
            of_tokens = top // 128 if plan is None else gl.load(plan + 4 * tile + 3)
            for part in gl.static_range(BLOCK_N // 64):
                mark(marks, of_tokens, left // 64 + part)
    at_n = gl.expand_dims(left + gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout)), 1)
    at = out + m.to(gl.int64) * out_stride + at_n
    gl.store(at, (acc * number).to(out.dtype.element_ty), mask=(m < end) & (at_n < N))
