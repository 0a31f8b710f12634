"""bfloat16 by MXFP4 weights on Hopper, in Gluon: `tiles/mx_weights.py`, with matmuls that run while codes are turned.

A program has 64 or 128 rows of weights, 64 for each warpgroup. TMA fills a ring of stages, each with 128 or 256 columns
of K of the codes and of the tokens. While the tensor cores multiply a stage, the same warps turn the codes of the next
stage into bf16 registers. Plain Triton does not compile this order: it waits for each instruction of the tensor cores.

The scales of two stages are loaded one pair of stages ahead, into registers.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxspec.triton_kernels.hopper.names import Value, aggregate, async_load, barrier

_DECODED = gl.constexpr(
    "{ .reg .b32 t, s; mul.lo.u32 t, $2, 0x40040; mul.lo.u32 s, $2, 0x1001000; and.b32 s, s, 0x80008000;"
    " lop3.b32 t, t, 0x01C001C0, s, 0xEA; mul.rn.bf16x2 t, t, $3; mov.b32 {$0, $1}, t; }"
)
_DECODED_TWICE = gl.constexpr(
    "{ .reg .b32 t, s; mul.lo.u32 t, $2, 0x40040; mul.lo.u32 s, $2, 0x1001000; and.b32 s, s, 0x80008000;"
    " lop3.b32 t, t, 0x01C001C0, s, 0xEA; mov.b32 s, 0x7E807E80; mul.rn.bf16x2 t, t, s; mul.rn.bf16x2 t, t, $3;"
    " mov.b32 {$0, $1}, t; }"
)


@gluon.constexpr_function
def _layout(row: list[list[int]], thread: list[list[int]], shape: list[int]) -> Any:
    """The layout of the tensor cores' first operand.

    `row` and `thread` are the bases of the registers and of the threads of a row. 16 rows belong to one warp. A thread
    has two of them, 8 rows apart.
    """

    def down(rows: int) -> list[int]:
        return [rows, *[0] * (len(shape) - 1)]

    warps = [down(rows) for rows in (16, 32, 64) if rows < shape[0]]
    return gl.DistributedLinearLayout(
        [*row, down(8)] if len(shape) == 3 else [down(8), *row], [*thread, down(1), down(2), down(4)], warps, [], shape
    )


@gluon.constexpr_function
def _of_codes(BLOCK_N: int, STEP: int) -> Any:
    """Bytes `(BLOCK_N, STEP / 2)`: a thread has the bytes of its own pairs of columns of the tensor cores' operand."""
    return _layout([[0, n] for n in (4, 8, 16, 32, 64) if n < STEP // 2], [[0, 1], [0, 2]], [BLOCK_N, STEP // 2])


@gluon.constexpr_function
def _of_blocks(BLOCK_N: int, STEP: int) -> Any:
    """The same bytes as `(BLOCK_N, STEP / 32, 16)`: one row for each block."""
    row = [[0, 0, 4], [0, 0, 8], *([0, n, 0] for n in (1, 2, 4) if n < STEP // 32)]
    return _layout(row, [[0, 0, 1], [0, 0, 2]], [BLOCK_N, STEP // 32, 16])


@gluon.constexpr_function
def _of_words(BLOCK_N: int, STEP: int) -> Any:
    """Scale bytes `(BLOCK_N, STEP / 128, 4)`. Four threads have the same."""
    row = [[0, 0, 1], [0, 0, 2], *([0, n, 0] for n in (1,) if n < STEP // 128)]
    return _layout(row, [[0, 0, 0], [0, 0, 0]], [BLOCK_N, STEP // 128, 4])


@aggregate
class Ring:
    """The stages: tokens `(STAGES, BLOCK_M, STEP)`, codes `(STAGES, BLOCK_N, STEP / 2)`, and a barrier for each."""

    x_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    top: Value
    left: Value
    STAGES: gl.constexpr

    @gluon.jit
    def fill(self, step, count, there):
        """Let TMA read a step of K. `count` counts the fills of the program. Past K, TMA reads zeros."""
        stage = count % self.STAGES
        bar = self.full.index(stage)
        STEP: gl.constexpr = self.x.shape[2]
        mbarrier.expect(bar, self.w.shape[1] * (STEP // 2) + 2 * STEP * self.x.shape[1], pred=there)
        async_load(self.x_desc, [self.top, step * STEP], bar, self.x.index(stage), pred=there)
        async_load(self.w_desc, [self.left, step * (STEP // 2)], bar, self.w.index(stage), pred=there)

    @gluon.jit
    def wait(self, count):
        mbarrier.wait(self.full.index(count % self.STAGES), count // self.STAGES & 1)


@aggregate
class Scales:
    """The scale bytes of the rows in memory, as words of 4 bytes: pointers to the first word of each row."""

    at: gl.tensor
    there: gl.tensor
    step: Value  # from the scales of 128 columns to the next
    words: Value  # in a row
    OF_STEP: gl.constexpr  # words

    @gluon.jit
    def load(self, step):
        """The words of a step of K for each row. Past K, the bytes are 0."""
        layout: gl.constexpr = self.at.type.layout.parent
        word = step * self.OF_STEP + gl.arange(0, self.OF_STEP, gl.SliceLayout(0, layout))
        at = gl.expand_dims(self.at, 1) + gl.expand_dims(word.to(gl.int64) * self.step, 0)
        there = gl.expand_dims(self.there, 1) & gl.expand_dims(word < self.words, 0)
        return gl.load(at, mask=there, other=0)


@gluon.jit
def _values(codes, words, operand: gl.constexpr, TWICE: gl.constexpr):
    """The values of the weights of a stage, in the registers in which the tensor cores read them.

    A thread reads the bytes of its own pairs of columns. So no exchange between threads is needed.
    """
    BLOCK_N: gl.constexpr = codes.shape[0]
    STEP: gl.constexpr = 2 * codes.shape[1]
    read: gl.constexpr = _of_codes(BLOCK_N, STEP)
    by_block: gl.constexpr = _of_blocks(BLOCK_N, STEP)
    by_word: gl.constexpr = words.type.layout.parent
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_word)))
    shift = gl.expand_dims(gl.expand_dims(number, 0), 1) * 8
    byte = ((gl.expand_dims(words, 2) >> shift) & 255).reshape([BLOCK_N, STEP // 32])
    if TWICE:  # 2^(byte - 131), up to 2^-127 subnormal
        factor = gl.where(byte < 5, 4 << byte, (byte - 4) << 7)
        factor = gl.where(byte == 255, 0x7FC0, factor) * 0x10001
    else:  # 2^(byte - 5), or Inf from byte 133 on
        factor = gl.minimum(byte, 133) * 0x800080 + 0x3D003D00
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(2, by_block)), 2)
    factor = gl.convert_layout(factor.broadcast_to(BLOCK_N, STEP // 32, 16).reshape([BLOCK_N, STEP // 2]), read)
    text: gl.constexpr = _DECODED_TWICE if TWICE else _DECODED
    even, odd = gl.inline_asm_elementwise(
        text, "=h,=h,r,r", [codes.load(read).to(gl.int32), factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(even, odd).reshape([BLOCK_N, STEP]), operand, assert_trivial=True)


@gluon.jit
def _step(values, acc, ring, scale, step, steps, operand: gl.constexpr):
    """Multiply a step. Meanwhile, turn the codes of the next step. Then fill the stage that is free."""
    tokens = ring.x.index(step % ring.STAGES).permute((1, 0))
    running = warpgroup_mma(values, tokens, acc, is_async=True)
    ring.wait(step + 1)
    next = _values(ring.w.index((step + 1) % ring.STAGES), scale, operand, False)
    acc, values = warpgroup_mma_wait(0, deps=[running, values])
    barrier()  # every warp has read the stage
    ring.fill(step + ring.STAGES, step + ring.STAGES, step + ring.STAGES <= steps)
    return next, acc


@gluon.jit
def _sums(ring, scales, steps, acc, operand: gl.constexpr):
    """The sums of a tile, `(BLOCK_N, BLOCK_M)`, over an even number of steps.

    One more step is filled and turned, whose codes are past K.
    """
    first = scales.load(0)
    one, other = scales.load(1), scales.load(2)
    for step in gl.static_range(ring.STAGES):
        ring.fill(step, step, step <= steps)
    ring.wait(0)
    values = _values(ring.w.index(0), first, operand, False)
    for step in range(0, steps, 2):
        later, last = scales.load(step + 3), scales.load(step + 4)
        values, acc = _step(values, acc, ring, one, step, steps, operand)
        values, acc = _step(values, acc, ring, other, step + 1, steps, operand)
        one, other = later, last
    return acc


@gluon.jit
def _exact_sums(ring, scales, steps, begin, acc, operand: gl.constexpr):
    """`_sums` under every scale, one step after the other. `begin` counts the fills before."""
    for step in range(steps):
        count = begin + step
        barrier()
        ring.fill(step, count, True)
        ring.wait(count)
        values = _values(ring.w.index(count % ring.STAGES), scales.load(step), operand, True)
        tokens = ring.x.index(count % ring.STAGES).permute((1, 0))
        acc = warpgroup_mma(values, tokens, acc, is_async=False)
    return acc


@gluon.jit
def mx_weights_sm90(
    x_desc, w_desc, scale, stride_r, stride_w, out, out_stride, M, N, K,
    UP: gl.constexpr, BLOCKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scales are words of 4 bytes. `stride_r` is the stride of a row, or of a row of tiles if BLOCKED."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    STEP: gl.constexpr = x_desc.block_shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    n_tiles = gl.cdiv(N, BLOCK_N)
    left, top = gl.program_id(0) % n_tiles * BLOCK_N, gl.program_id(0) // n_tiles * BLOCK_M
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    barrier()
    ring = Ring(
        x_desc, w_desc,
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, STEP], x_desc.layout),
        gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, STEP // 2], w_desc.layout),
        full, top, left, STAGES,
    )  # fmt: skip
    by_word: gl.constexpr = _of_words(BLOCK_N, STEP)
    n = left + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, by_word)))
    of_row = (n // 128).to(gl.int64) * stride_r + (n % 32 * 4 + n % 128 // 32) if BLOCKED else n.to(gl.int64) * stride_r
    scales = Scales(scale + of_row, n < N, stride_w, K // 128, STEP // 128)
    steps = gl.cdiv(K, 2 * STEP) * 2
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[BLOCK_N // 16, 1], instr_shape=[16, BLOCK_M, 16]
    )  # fmt: skip
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    acc = _sums(ring, scales, steps, zeros, operand)
    is_finite = (acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    if gl.max(gl.max((is_finite == 0).to(gl.int32), 1), 0) != 0:
        again = _exact_sums(ring, scales, steps, steps + 1, zeros, operand)
        acc = gl.where(is_finite, acc, again)
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    at_n = gl.expand_dims(left + gl.arange(0, BLOCK_N, rows), 1)
    m = gl.expand_dims(top + gl.arange(0, BLOCK_M, columns), 0)
    at = out + m.to(gl.int64) * out_stride + at_n
    gl.store(at, (acc * UP).to(out.dtype.element_ty), mask=(m < M) & (at_n < N))
