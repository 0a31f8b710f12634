"""bfloat16 by MXFP4 weights on Hopper, in Gluon: `tiles/mx_weights.py`, with matmuls that run while codes are turned.

A program has 64 rows of weights. TMA fills a ring of stages, each with 256 columns of K of the codes and of the tokens.
While the tensor cores multiply a stage, the same warps turn the codes of the next stage into bf16 registers. Plain
Triton does not compile this order: it waits for each instruction of the tensor cores.

The scales of two stages are loaded one pair of stages ahead, into registers.
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


@aggregate
class Ring:
    """The stages: tokens `(STAGES, BLOCK_M, 256)`, codes `(STAGES, 64, 128)`, and a barrier for each."""

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
        mbarrier.expect(bar, 64 * 128 + 2 * 256 * self.x.shape[1], pred=there)
        async_load(self.x_desc, [self.top, step * 256], bar, self.x.index(stage), pred=there)
        async_load(self.w_desc, [self.left, step * 128], bar, self.w.index(stage), pred=there)

    @gluon.jit
    def wait(self, count):
        mbarrier.wait(self.full.index(count % self.STAGES), count // self.STAGES & 1)


@aggregate
class Scales:
    """The scale bytes of the 64 rows in memory, as words of 4 bytes: pointers to the first word of each row."""

    at: gl.tensor
    there: gl.tensor
    step: Value  # from the scales of 128 columns to the next
    words: Value  # in a row

    @gluon.jit
    def load(self, step):
        """Two words for each row: the scale bytes of 256 columns. Past K, the bytes are 0."""
        layout: gl.constexpr = self.at.type.layout.parent
        word = step * 2 + gl.arange(0, 2, gl.SliceLayout(0, layout))
        at = gl.expand_dims(self.at, 1) + gl.expand_dims(word.to(gl.int64) * self.step, 0)
        there = gl.expand_dims(self.there, 1) & gl.expand_dims(word < self.words, 0)
        return gl.load(at, mask=there, other=0)


@gluon.jit
def _values(codes, words, operand: gl.constexpr, TWICE: gl.constexpr):
    """The values of 64 rows of a stage, in the registers in which the tensor cores read them.

    A thread reads the bytes of its own pairs of columns. So no exchange between threads is needed.
    """
    read: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )  # fmt: skip
    by_block: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0], [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 8, 16],
    )  # fmt: skip
    by_word: gl.constexpr = words.type.layout.parent
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_word)))
    shift = gl.expand_dims(gl.expand_dims(number, 0), 1) * 8
    byte = ((gl.expand_dims(words, 2) >> shift) & 255).reshape([64, 8])
    if TWICE:  # 2^(byte - 131), up to 2^-127 subnormal
        factor = gl.where(byte < 5, 4 << byte, (byte - 4) << 7)
        factor = gl.where(byte == 255, 0x7FC0, factor) * 0x10001
    else:  # 2^(byte - 5), or Inf from byte 133 on
        factor = gl.minimum(byte, 133) * 0x800080 + 0x3D003D00
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(2, by_block)), 2)
    factor = gl.convert_layout(factor.broadcast_to(64, 8, 16).reshape([64, 128]), read)
    text: gl.constexpr = _DECODED_TWICE if TWICE else _DECODED
    even, odd = gl.inline_asm_elementwise(
        text, "=h,=h,r,r", [codes.load(read).to(gl.int32), factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(even, odd).reshape([64, 256]), operand, assert_trivial=True)


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
    """The sums of a tile, `(64, BLOCK_M)`, over an even number of steps.

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
    n_tiles = gl.cdiv(N, 64)
    left, top = gl.program_id(0) % n_tiles * 64, gl.program_id(0) // n_tiles * BLOCK_M
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    barrier()
    ring = Ring(
        x_desc, w_desc,
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 256], x_desc.layout),
        gl.allocate_shared_memory(w_desc.dtype, [STAGES, 64, 128], w_desc.layout),
        full, top, left, STAGES,
    )  # fmt: skip
    by_word: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [8, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 4],
    )  # fmt: skip
    n = left + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, by_word)))
    of_row = (n // 128).to(gl.int64) * stride_r + (n % 32 * 4 + n % 128 // 32) if BLOCKED else n.to(gl.int64) * stride_r
    scales = Scales(scale + of_row, n < N, stride_w, K // 128)
    steps = gl.cdiv(K, 512) * 2
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zeros = gl.zeros([64, BLOCK_M], gl.float32, mma)
    acc = _sums(ring, scales, steps, zeros, operand)
    is_finite = (acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    if gl.max(gl.max((is_finite == 0).to(gl.int32), 1), 0) != 0:
        again = _exact_sums(ring, scales, steps, steps + 1, zeros, operand)
        acc = gl.where(is_finite, acc, again)
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    at_n = gl.expand_dims(left + gl.arange(0, 64, rows), 1)
    m = gl.expand_dims(top + gl.arange(0, BLOCK_M, columns), 0)
    at = out + m.to(gl.int64) * out_stride + at_n
    gl.store(at, (acc * UP).to(out.dtype.element_ty), mask=(m < M) & (at_n < N))
