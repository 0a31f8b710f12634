"""Turn codes of weights into bf16, in the registers in which the tensor cores read their first operand.

A thread reads the codes that the tensor cores expect in it, so no exchange between threads is needed. Rows of e2m1 have
two codes in a byte, and the tensor cores' order of K. Rows of fp8 codes have the order of `../mx/conversion.py`.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxspec.triton_kernels.hopper.mx.conversion import E4M3, E5M2, decoded, in_order
from mxspec.triton_kernels.hopper.names import aggregate
from mxspec.triton_kernels.tiles.mx_weights import DECODED, DECODED_TWICE

# An e4m3 scale becomes a bf16 number, twice in 32 bits. The last two instructions make NaN of its NaN, as in
# `../mx/conversion.py`.
_OF_E4M3 = gl.constexpr(
    "{ .reg .b32 t, s, zero; mov.b32 zero, 0; mul.lo.u32 t, $1, 0x100010; mul.lo.u32 s, $1, 0x1000100;"
    " and.b32 s, s, 0x80008000; lop3.b32 t, t, 0x07F007F0, s, 0xEA; mov.b32 s, 0x7B807B80; mul.rn.bf16x2 t, t, s;"
    " mov.b32 s, 0x7B107B10; mul.rn.bf16x2 s, t, s; fma.rn.bf16x2 $0, s, zero, t; }"
)


@aggregate
class Format:
    """CODES: `e2m1`, `e4m3` or `e5m2`. SCALES: `e8m0` or `e4m3`. BLOCK: the columns of K that a scale byte is for.

    The values of fp8 codes are multiplied by 2^SHIFT. Those of e2m1 codes are multiplied by 2^-4 if the scales are
    e8m0: see `tiles/mx_weights.py`.
    """

    CODES: gl.constexpr
    SCALES: gl.constexpr
    BLOCK: gl.constexpr
    SHIFT: gl.constexpr


@gluon.constexpr_function
def bytes_of(CODES: str, columns: int) -> int:
    """The bytes of a number of codes."""
    return columns // 2 if CODES == "e2m1" else columns


@gluon.constexpr_function
def _layout(row: list[list[int]], thread: list[list[int]], shape: list[int]) -> Any:
    """The layout of the tensor cores' first operand.

    `row` and `thread` are the bases of the registers and of the threads of a row. 16 rows belong to one warp. A thread
    has two of them, 8 rows apart.
    """

    def down(rows: int) -> list[int]:
        return [rows, *[0] * (len(shape) - 1)]

    warps = [down(rows) for rows in (16, 32, 64) if rows < shape[0]]
    return gl.DistributedLinearLayout([*row, down(8)], [*thread, down(1), down(2), down(4)], warps, [], shape)


@gluon.constexpr_function
def _of_codes(CODES: str, ROWS: int, BYTES: int) -> Any:
    """The bytes of rows: a thread has the bytes of its own columns of the tensor cores' operand."""
    if CODES == "e2m1":
        return _layout([[0, n] for n in (4, 8, 16, 32, 64) if n < BYTES], [[0, 1], [0, 2]], [ROWS, BYTES])
    return _layout([[0, n] for n in (1, 2, 16, 32, 64, 128) if n < BYTES], [[0, 4], [0, 8]], [ROWS, BYTES])


@gluon.constexpr_function
def _of_blocks(CODES: str, ROWS: int, BYTES: int, BLOCK: int) -> Any:
    """The same bytes as `(ROWS, BYTES / BLOCK, BLOCK)`: one row for each block of BLOCK bytes."""
    inside = (4, 8, 16) if CODES == "e2m1" else (1, 2, 16)
    row = [*([0, 0, n] for n in inside if n < BLOCK), *([0, n, 0] for n in (1, 2, 4, 8) if n * BLOCK < BYTES)]
    of_thread = (1, 2) if CODES == "e2m1" else (4, 8)
    return _layout(row, [[0, 0, n] for n in of_thread], [ROWS, BYTES // BLOCK, BLOCK])


@gluon.constexpr_function
def of_words(SCALES: str, ROWS: int, WORDS: int) -> Any:
    """Scale bytes `(ROWS, WORDS, 4)`. Four threads have the same e8m0 bytes. They share out the words of e4m3 bytes."""
    shared = [n for n in (1, 2) if n < WORDS] if SCALES == "e4m3" else []
    own = [n for n in (1, 2, 4) if n < WORDS and n not in shared]
    row = [[0, 0, 1], [0, 0, 2], *([0, n, 0] for n in own)]
    return _layout(row, [*([0, n, 0] for n in shared), *[[0, 0, 0]] * (2 - len(shared))], [ROWS, WORDS, 4])


@gluon.jit
def _factors(byte, SCALES: gl.constexpr, SHIFT: gl.constexpr, EXACT: gl.constexpr, CODES: gl.constexpr):
    """The factor of each scale byte as a bf16 number, twice in 32 bits."""
    if SCALES == "e4m3":
        return gl.inline_asm_elementwise(_OF_E4M3, "=r,r", [byte], dtype=gl.int32, is_pure=True, pack=1)
    elif CODES != "e2m1":  # 2^(byte - 127 + SHIFT), or Inf past the range and for NaN
        return gl.minimum(byte + SHIFT, 255) * 0x800080
    elif EXACT:  # 2^(byte - 131), up to 2^-127 subnormal
        bits = gl.where(byte < 5, 4 << byte, (byte - 4) << 7)
        return gl.where(byte == 255, 0x7FC0, bits) * 0x10001
    else:  # 2^(byte - 5), or Inf from byte 133 on
        return gl.minimum(byte, 133) * 0x800080 + 0x3D003D00


@gluon.jit
def values(codes, words, operand: gl.constexpr, format, EXACT: gl.constexpr):
    """The values of the codes of a stage. `words` has the bytes of their scales, four in each.

    EXACT: for every scale byte of e2m1. If not, scale bytes from 133 on give Inf or NaN in place of a value other than
    0. An e4m3 scale needs no EXACT.
    """
    CODES: gl.constexpr = format.CODES
    ROWS: gl.constexpr = codes.shape[0]
    BYTES: gl.constexpr = codes.shape[1]
    BLOCK: gl.constexpr = bytes_of(CODES, format.BLOCK)
    COLUMNS: gl.constexpr = BYTES * format.BLOCK // BLOCK
    read: gl.constexpr = _of_codes(CODES, ROWS, BYTES)
    by_block: gl.constexpr = _of_blocks(CODES, ROWS, BYTES, BLOCK)
    by_word: gl.constexpr = words.type.layout.parent
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_word)))
    shift = gl.expand_dims(gl.expand_dims(number, 0), 1) * 8
    byte = ((gl.expand_dims(words, 2) >> shift) & 255).reshape([ROWS, BYTES // BLOCK])
    factor = _factors(byte, format.SCALES, format.SHIFT, EXACT, CODES)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(2, by_block)), 2)
    factor = gl.convert_layout(factor.broadcast_to(ROWS, BYTES // BLOCK, BLOCK).reshape([ROWS, BYTES]), read)
    if CODES == "e2m1":
        text: gl.constexpr = DECODED_TWICE if EXACT or format.SCALES == "e4m3" else DECODED
        even, odd = gl.inline_asm_elementwise(
            text, "=h,=h,r,r", [codes.load(read).to(gl.int32), factor], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
        x = gl.join(even, odd).reshape([ROWS, COLUMNS])
    else:
        x = in_order(decoded(codes.load(read), factor, E4M3 if CODES == "e4m3" else E5M2))
    return gl.convert_layout(x, operand, assert_trivial=True)
