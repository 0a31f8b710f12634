"""Turn 64 rows of MX codes into bf16 in registers: each code is multiplied by the scale of its block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The four constants of an element format. A code lies in the upper byte of 16 bits.
# - The first constant shifts the code to the place of the bits of a bf16.
# - The second masks those bits.
# - The third is a factor that turns this bf16 number into the code's value.
# - The fourth is a factor under which finite codes stay finite. Inf and NaN, which are ordinary numbers until then,
#   overflow.
# A constant has the same 16 bits twice, for two values at a time. The factors of E4M3 are 2^120 and 1.125 * 2^119, and
# both factors of E5M2 are 2^112.
E4M3 = gl.constexpr((4, 0x07F007F0, 0x7B807B80, 0x7B107B10))
E5M2 = gl.constexpr((3, 0x0FE00FE0, 0x77807780, 0x77807780))


@gluon.jit
def values(codes, factors, first: gl.constexpr, FORMAT: gl.constexpr):
    """64 rows of a stage in bf16, in the order of K in which the values of b are stored.

    An instruction of the tensor cores sums 16 consecutive columns. A thread reads 4 consecutive codes of each 16
    columns of a row. Their order inside the 16 columns differs from the order of the tensor cores' operand. That is
    correct, because b has the same order, and the sum of an instruction does not depend on it. So a thread already
    holds the codes that the tensor cores expect in it, and no exchange between threads is needed. The instructions sum
    the columns in ascending order, as those of cuBLAS do: see `by_memory.py`.
    """
    rows: gl.constexpr = [[16, 0], [32, 0]]
    read: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], rows, [], [64, 64]
    )
    by_block: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 1, 0], [8, 0, 0]],
        [[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 32],
    )  # fmt: skip
    x = codes.slice(first, 64).load(read)
    half = factors.slice(first, 64).load(gl.SliceLayout(2, by_block)).to(gl.int32)
    factor = gl.expand_dims(half | half << 16, 2).broadcast_to(64, 2, 32).reshape([64, 64])
    return in_order(decoded(x, gl.convert_layout(factor, read), FORMAT))


@gluon.jit
def in_order(x):
    """Values in the order of K in which their threads hold them, as `values` says."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    # (step of 16, thread of four, half, pair) becomes (step, half, thread, pair)
    x = x.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return x.reshape([ROWS, COLUMNS])


@gluon.jit
def decoded(x, factor, FORMAT: gl.constexpr):
    """The product of codes and factors in bf16. A factor is an integer that holds a bf16 number in both halves."""
    SHIFT: gl.constexpr = FORMAT[0]
    BITS: gl.constexpr = FORMAT[1]
    VALUE: gl.constexpr = FORMAT[2]
    LIMIT: gl.constexpr = FORMAT[3]
    layout: gl.constexpr = x.type.layout
    shift, bits = gl.full(x.shape, SHIFT, gl.int32, layout), gl.full(x.shape, BITS, gl.int32, layout)
    value, limit = gl.full(x.shape, VALUE, gl.int32, layout), gl.full(x.shape, LIMIT, gl.int32, layout)
    # Infinity times 0 is NaN, so the last instruction turns a value that `limit` made infinite into NaN.
    return gl.inline_asm_elementwise(
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
        "=r,=r,r" + ",r" * 20, [x, factor, shift, bits, value, limit],
        dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip
