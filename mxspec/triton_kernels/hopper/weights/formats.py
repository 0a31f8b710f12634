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


def _factors_of(pick: str, number: str) -> Any:
    """The factors of two bytes of the word `$1`, as bf16 numbers in the halves of `$0`.

    `pick` takes bytes 0 and 2, or 1 and 3. `number` makes their factors.
    """
    return gl.constexpr("{ .reg .b32 p, q, r, zero; mov.b32 zero, 0; " + pick + number + " }")


# 2^(byte - 5), or Inf from byte 133 on.
_E8M0 = " mov.b32 q, 0x00850085; min.u16x2 p, p, q; mad.lo.u32 $0, p, 0x80, 0x3D003D00;"
# The number of an e4m3 byte times 2^119. Before, `p` has the lower bits of the byte in place, and `q` its sign. The
# product by 0x7B10 is Inf for NaN only, and the last instruction makes NaN of Inf, as in `../mx/conversion.py`.
_E4M3 = (
    " and.b32 p, p, 0x07F007F0; lop3.b32 p, q, 0x80008000, p, 0xEA; mov.b32 r, 0x7B807B80; mul.rn.bf16x2 p, p, r;"
    " mov.b32 r, 0x7B107B10; mul.rn.bf16x2 q, p, r; mov.b32 r, 0x7B007B00; mul.rn.bf16x2 p, p, r;"
    " fma.rn.bf16x2 $0, q, zero, p;"
)
# For bytes 0 and 2, and for bytes 1 and 3.
_OF_E8M0 = gl.constexpr(
    (_factors_of("and.b32 p, $1, 0x00FF00FF;", _E8M0), _factors_of("prmt.b32 p, $1, zero, 0x4341;", _E8M0))
)
_OF_E4M3 = gl.constexpr(
    (
        _factors_of("shl.b32 p, $1, 4; shl.b32 q, $1, 8;", _E4M3),
        _factors_of("shr.b32 p, $1, 4; mov.b32 q, $1;", _E4M3),
    )
)


def _of_pair(UP: str) -> str:
    """The weights of a pair of bytes: the even ones of both, then the odd ones. UP may first multiply `q`.

    `v` has the bits of `$4` two places lower. Half of `p` is a byte, and above it the same byte of `v`. There the sign
    of a code is nine places above its lowest bit, as in a bf16. So a mask and one shift put a code's exponent, mantissa
    and sign in place, for both bytes.
    """
    return (
        "{ .reg .b32 v, p, q; shr.b32 v, $4, 2; prmt.b32 p, $4, v, 0x5140;"
        f" and.b32 q, p, 0x02070207; shl.b32 q, q, 6;{UP} mul.rn.bf16x2 q, q, $5; mov.b32 {{$0, $1}}, q;"
        f" and.b32 q, p, 0x20702070; shl.b32 q, q, 2;{UP} mul.rn.bf16x2 q, q, $5; mov.b32 {{$2, $3}}, q; }}"
    )


def _by_half(text: str, factor: str, half: str) -> Any:
    """`text`, but its factor is one half of the operand `factor`, `low` or `high`. This takes no instruction."""
    both = (
        f"{{ .reg .b32 both; .reg .b16 low, high; mov.b32 {{low, high}}, {factor}; mov.b32 both, {{{half}, {half}}}; "
    )
    return gl.constexpr(both + text.replace(factor, "both") + " }")


# The first is for the factor in the low half, the second for that in the high half.
_EVEN_FIRST = gl.constexpr(tuple(_by_half(_of_pair(""), "$5", half) for half in ("low", "high")))
_IN_ORDER = gl.constexpr(tuple(_by_half(DECODED.value, "$3", half) for half in ("low", "high")))
_EVEN_FIRST_TWICE = gl.constexpr(_of_pair(" mov.b32 v, 0x7E807E80; mul.rn.bf16x2 q, q, v;"))  # times 2^126


@aggregate
class Format:
    """CODES: `e2m1`, `e4m3` or `e5m2`. SCALES: `e8m0` or `e4m3`. BLOCK: the columns of K that a scale byte is for.

    The values of fp8 codes are multiplied by 2^SHIFT. Those of e2m1 codes are multiplied by 2^-4 if the scales are
    e8m0 (see `tiles/mx_weights.py`), and by 2^-7 if they are e4m3. A code in place in a bf16 is 2^-126 times its value.
    The factor makes up for 2^119 of this, because 448 * 2^119 is a bf16 number and 448 * 2^120 is none. The sums are
    2^-7 times as large, so they lose their bits below 2^-142, where fp32 ends at 2^-149. They overflow later, too.
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
def _factors(byte, SHIFT: gl.constexpr, CODES: gl.constexpr):
    """The factor of each e8m0 byte as a bf16 number, twice in 32 bits. For e2m1 it is exact for every byte."""
    if CODES == "e2m1":  # 2^(byte - 131), up to 2^-127 subnormal
        bits = gl.where(byte < 5, 4 << byte, (byte - 4) << 7)
        return gl.where(byte == 255, 0x7FC0, bits) * 0x10001
    else:  # 2^(byte - 127 + SHIFT), or Inf past the range and for NaN
        return gl.minimum(byte + SHIFT, 255) * 0x800080


@gluon.jit
def _weights(codes, factor, EVEN_FIRST: gl.constexpr, text: gl.constexpr):
    """The weights of units of e2m1 codes, in new last dimensions: (byte, code) of a pair of bytes, or (code) of one."""
    if EVEN_FIRST:
        even, even_too, odd, odd_too = gl.inline_asm_elementwise(
            text, "=h,=h,=h,=h,r,r", [codes, factor],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
        return gl.join(gl.join(even, even_too), gl.join(odd, odd_too))
    else:
        even, odd = gl.inline_asm_elementwise(
            text, "=h,=h,r,r", [codes, factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
        return gl.join(even, odd)


@gluon.jit
def _by_pairs_of_scales(codes, words, format):
    """The values of e2m1 codes. The factors of two scales lie in one register: those of bytes 0 and 2, or 1 and 3."""
    ROWS: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    BLOCK: gl.constexpr = units_of("e2m1", format.BLOCK, format.EVEN_FIRST)
    E8M0: gl.constexpr = format.SCALES == "e8m0"
    of: gl.constexpr = _OF_E8M0 if E8M0 else _OF_E4M3
    first = gl.inline_asm_elementwise(of[0], "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    second = gl.inline_asm_elementwise(of[1], "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    low, high = gl.split(codes.reshape([ROWS, WORDS, 2, 2, BLOCK]).permute([0, 1, 3, 4, 2]))
    of_blocks: gl.constexpr = gl.SliceLayout(3, low.type.layout)
    factor = gl.convert_layout(gl.join(first, second), of_blocks, assert_trivial=E8M0)
    factor = gl.expand_dims(factor, 3).broadcast_to(ROWS, WORDS, 2, BLOCK)
    text: gl.constexpr = _EVEN_FIRST if format.EVEN_FIRST else _IN_ORDER
    low = _weights(low, factor, format.EVEN_FIRST, text[0])
    x = gl.join(low, _weights(high, factor, format.EVEN_FIRST, text[1]))
    if format.EVEN_FIRST:
        x = x.reshape([ROWS, WORDS, 2, BLOCK // 4, 4, 2, 2, 2]).permute([0, 1, 7, 2, 3, 6, 4, 5])
    else:
        x = x.permute([0, 1, 5, 2, 3, 4])
    return x.reshape([ROWS, WORDS * 4 * format.BLOCK])


@gluon.jit
def _by_single_scales(codes, read: gl.constexpr, words, format):
    """The values of FP8 codes, and of e2m1 codes under every e8m0 byte. A register has the factor of one scale."""
    CODES: gl.constexpr = format.CODES
    ROWS: gl.constexpr = codes.shape[0]
    UNITS: gl.constexpr = codes.shape[1]
    BLOCK: gl.constexpr = units_of(CODES, format.BLOCK, format.EVEN_FIRST)
    by_block: gl.constexpr = _of_blocks(CODES, ROWS, UNITS, BLOCK)
    by_word: gl.constexpr = of_words(format.SCALES, ROWS, words.shape[1], 4)
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_word)))
    shift = gl.expand_dims(gl.expand_dims(number, 0), 1) * 8
    byte = ((gl.expand_dims(words, 2) >> shift) & 255).reshape([ROWS, UNITS // BLOCK])
    factor = _factors(byte, format.SHIFT, CODES)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(2, by_block)), 2)
    factor = factor.broadcast_to(ROWS, UNITS // BLOCK, BLOCK).reshape([ROWS, UNITS])
    factor = gl.convert_layout(factor, read)
    found = codes.load(read)
    if CODES != "e2m1":
        x = in_order(decoded(found, factor, E4M3 if CODES == "e4m3" else E5M2))
    elif format.EVEN_FIRST:
        x = _weights(found.to(gl.int32), factor, True, _EVEN_FIRST_TWICE)
        x = x.reshape([ROWS, UNITS // 4, 4, 2, 2]).permute([0, 1, 4, 2, 3]).reshape([ROWS, UNITS * 4])
    else:
        x = _weights(found.to(gl.int32), factor, False, DECODED_TWICE).reshape([ROWS, UNITS * 2])
    return x


@gluon.jit
def values(codes, words, operand: gl.constexpr, format, EXACT: gl.constexpr):
    """The values of the codes of a part of a stage. `words` has the bytes of their scales, four in each.

    EXACT: for every e8m0 byte of e2m1. If not, bytes from 133 on give Inf, or NaN for a code of 0. An e4m3 scale needs
    no EXACT.
    """
    ROWS: gl.constexpr = codes.shape[0]
    by_word: gl.constexpr = of_words(format.SCALES, ROWS, words.shape[1], 4)
    words = gl.convert_layout(words, gl.SliceLayout(2, by_word))
    read: gl.constexpr = _of_codes(format.CODES, ROWS, codes.shape[1])
    if format.CODES == "e2m1" and not EXACT:
        x = _by_pairs_of_scales(codes.load(read).to(gl.int32), words, format)
    else:
        x = _by_single_scales(codes, read, words, format)
    return gl.convert_layout(x, operand, assert_trivial=True)
