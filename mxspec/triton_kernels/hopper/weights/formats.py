"""Turn codes of weights into bf16, in the registers in which the tensor cores read their first operand.

A thread reads the codes that the tensor cores expect in it, so no exchange between threads is needed. Rows of fp8 codes
have the order of `../mx/conversion.py`. Rows of e2m1 have two codes in a byte, and one of two orders:

- The tensor cores' order of K. A thread has two bytes of each 16 columns, four bytes apart. A byte becomes two numbers
  in one register: see `DECODED` in `../../tiles/mx_weights.py`.
- EVEN_FIRST: the tokens have their even columns first, in each 16 columns. Then a thread has two bytes that follow each
  other, and reads both at once. Their two low codes become two numbers in one register, and their two high codes in
  another. So one shift moves two codes, in place of two multiplications for each byte: see `_EVEN_FIRST`.

An instruction of the tensor cores sums 16 columns, and their order does not change the sum. So both orders give the
same bits.
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


def _of_pair(UP: str) -> Any:
    """The weights of a pair of bytes: the even ones of both, then the odd ones. UP may first multiply `q`.

    `v` has the bits of `$4` two places lower. Half of `p` is a byte, and above it the same byte of `v`. There the sign
    of a code is nine places above its lowest bit, as in a bf16. So a mask and one shift put a code's exponent, mantissa
    and sign in place, for both bytes.
    """
    return gl.constexpr(
        "{ .reg .b32 v, p, q; shr.b32 v, $4, 2; prmt.b32 p, $4, v, 0x5140;"
        f" and.b32 q, p, 0x02070207; shl.b32 q, q, 6;{UP} mul.rn.bf16x2 q, q, $5; mov.b32 {{$0, $1}}, q;"
        f" and.b32 q, p, 0x20702070; shl.b32 q, q, 2;{UP} mul.rn.bf16x2 q, q, $5; mov.b32 {{$2, $3}}, q; }}"
    )


_EVEN_FIRST = _of_pair("")
_EVEN_FIRST_TWICE = _of_pair(" mov.b32 v, 0x7E807E80; mul.rn.bf16x2 q, q, v;")  # times 2^126


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
    EVEN_FIRST: gl.constexpr  # the order of columns; only e2m1 has a choice


@gluon.constexpr_function
def units_of(CODES: str, columns: int, EVEN_FIRST: bool) -> int:
    """The units in which codes are read: bytes, or pairs of bytes if EVEN_FIRST."""
    return columns // (4 if EVEN_FIRST else 2 if CODES == "e2m1" else 1)


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
def _of_codes(CODES: str, ROWS: int, UNITS: int) -> Any:
    """The units of rows: a thread has the units of its own columns of the tensor cores' operand."""
    if CODES == "e2m1":
        return _layout([[0, n] for n in (4, 8, 16, 32, 64) if n < UNITS], [[0, 1], [0, 2]], [ROWS, UNITS])
    return _layout([[0, n] for n in (1, 2, 16, 32, 64, 128) if n < UNITS], [[0, 4], [0, 8]], [ROWS, UNITS])


@gluon.constexpr_function
def _of_blocks(CODES: str, ROWS: int, UNITS: int, BLOCK: int) -> Any:
    """The same units as `(ROWS, UNITS / BLOCK, BLOCK)`: one row for each block of BLOCK units."""
    inside = (4, 8, 16) if CODES == "e2m1" else (1, 2, 16)
    row = [*([0, 0, n] for n in inside if n < BLOCK), *([0, n, 0] for n in (1, 2, 4, 8) if n * BLOCK < UNITS)]
    of_thread = (1, 2) if CODES == "e2m1" else (4, 8)
    return _layout(row, [[0, 0, n] for n in of_thread], [ROWS, UNITS // BLOCK, BLOCK])


@gluon.constexpr_function
def of_words(SCALES: str, ROWS: int, WORDS: int, UNITS: int) -> Any:
    """Words of 4 scale bytes, as `(ROWS, WORDS, UNITS)`: a word has 4, 2 or 1 units.

    Four threads have the same e8m0 bytes. They share out the words of e4m3 bytes.
    """
    shared = [n for n in (1, 2) if n < WORDS] if SCALES == "e4m3" else []
    own = [n for n in (1, 2, 4) if n < WORDS and n not in shared]
    row = [*([0, 0, n] for n in (1, 2) if n < UNITS), *([0, n, 0] for n in own)]
    return _layout(row, [*([0, n, 0] for n in shared), *[[0, 0, 0]] * (2 - len(shared))], [ROWS, WORDS, UNITS])


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
    """The values of the codes of a part of a stage. `words` has the bytes of their scales, four in each.

    EXACT: for every scale byte of e2m1. If not, scale bytes from 133 on give Inf or NaN in place of a value other than
    0. An e4m3 scale needs no EXACT.
    """
    CODES: gl.constexpr = format.CODES
    ROWS: gl.constexpr = codes.shape[0]
    UNITS: gl.constexpr = codes.shape[1]
    BLOCK: gl.constexpr = units_of(CODES, format.BLOCK, format.EVEN_FIRST)
    COLUMNS: gl.constexpr = UNITS * format.BLOCK // BLOCK
    read: gl.constexpr = _of_codes(CODES, ROWS, UNITS)
    by_block: gl.constexpr = _of_blocks(CODES, ROWS, UNITS, BLOCK)
    WORDS: gl.constexpr = words.shape[1]
    by_word: gl.constexpr = of_words(format.SCALES, ROWS, WORDS, 4)
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_word)))
    shift = gl.expand_dims(gl.expand_dims(number, 0), 1) * 8
    words = gl.convert_layout(words, gl.SliceLayout(2, by_word))
    byte = ((gl.expand_dims(words, 2) >> shift) & 255).reshape([ROWS, UNITS // BLOCK])
    factor = _factors(byte, format.SCALES, format.SHIFT, EXACT, CODES)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(2, by_block)), 2)
    factor = gl.convert_layout(factor.broadcast_to(ROWS, UNITS // BLOCK, BLOCK).reshape([ROWS, UNITS]), read)
    if format.EVEN_FIRST:
        of_pairs: gl.constexpr = _EVEN_FIRST_TWICE if EXACT or format.SCALES == "e4m3" else _EVEN_FIRST
        even, even_too, odd, odd_too = gl.inline_asm_elementwise(
            of_pairs, "=h,=h,=h,=h,r,r", [codes.load(read).to(gl.int32), factor],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
        x = gl.join(gl.join(even, even_too), gl.join(odd, odd_too))
        x = x.reshape([ROWS, UNITS // 4, 4, 2, 2]).permute([0, 1, 4, 2, 3]).reshape([ROWS, COLUMNS])
    elif CODES == "e2m1":
        text: gl.constexpr = DECODED_TWICE if EXACT or format.SCALES == "e4m3" else DECODED
        even, odd = gl.inline_asm_elementwise(
            text, "=h,=h,r,r", [codes.load(read).to(gl.int32), factor], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
        x = gl.join(even, odd).reshape([ROWS, COLUMNS])
    else:
        x = in_order(decoded(codes.load(read), factor, E4M3 if CODES == "e4m3" else E5M2))
    return gl.convert_layout(x, operand, assert_trivial=True)
