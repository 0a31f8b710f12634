"""A tile of 128 tokens by 128 features in registers, as words of two bf16 values, for Hopper's quantizers in Gluon.

A thread keeps 8 rows by 8 columns of the tile. Most steps serve two values at once:

- `max.u16x2` takes the maximum of two magnitudes. The bits of a bf16 magnitude have the order of the magnitudes.
- `mul.bf16x2` computes SwiGLU's products of two bf16 values. It rounds once. An fp32 product of two bf16 values is
  exact, so rounding it to bf16 gives the same bits.

The values of a tile are those of x, or SwiGLU's, or the gradient of SwiGLU's. `fp8/both_ways.py` and `mx/both_ways.py`
quantize them in both directions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxspec.triton_kernels.hopper.swiglu import DECLARED, WIDENED, forward, sigmoids

# The gradient needs smaller errors. t is the product of -x and log2(e), where log2(e) is rounded to 16 bits, so that
# the product is exact. l is the rest of the exponent, as a factor 1 + l. The bias -2^-25 of l balances the errors of
# ex2.approx. With this bias, each pair of a gate and a mantissa of d_silu gives the right bits, except for the gate
# -2.09375. There the sigmoid is one unit off, so it is replaced by its right value. A test tries all pairs. Below
# -87.25, 1 + e^-x is so large that rcp.approx gives 0.
_EXACT_SIGMOID = (
    "mul.rn.f32 t, $X, 0fBFB8AA00; ex2.approx.ftz.f32 t, t; fma.rn.f32 l, $X, 0fB6A407DB, 0fB3000000;"
    " fma.rn.f32 t, t, l, t; add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $S, t;"
    " setp.eq.f32 z, $X, 0fC0060000; selp.f32 $S, 0f3DE0AD6C, $S, z; "
)


def _of_gate(gate: str) -> str:
    """u and v are the sigmoids of the two gates in a word, x and y."""
    return DECLARED + WIDENED.replace("$G", gate) + sigmoids(_EXACT_SIGMOID)


def _d_up(out: str, dh: str) -> str:
    return f"mul.rn.f32 p, x, u; mul.rn.f32 q, y, v; cvt.rn.bf16x2.f32 a, q, p; mul.rn.bf16x2 {out}, a, {dh};"


def _d_gate(out: str, up: str, dh: str) -> str:
    gate = (
        " mov.f32 t, 0f3F800000; sub.rn.f32 t, t, $S; fma.rn.f32 t, $X, t, 0f3F800000; mul.rn.f32 $P, $P, $S;"
        " mul.rn.f32 $P, $P, t;"
    )
    return (
        f" mul.rn.bf16x2 c, {up}, {dh}; shl.b32 a, c, 16; and.b32 b, c, 0xffff0000; mov.b32 p, a; mov.b32 q, b;"
        + "".join(gate.replace("$S", s).replace("$X", x).replace("$P", p) for s, x, p in ("uxp", "vyq"))
        + f" cvt.rn.bf16x2.f32 {out}, q, p;"
    )


FORWARD = gl.constexpr(forward())
# The gradients of the gate and of up, from the gate, up and the gradient dh.
BACKWARD = gl.constexpr(_of_gate("$2") + _d_up("$1", "$4") + _d_gate("$0", "$3", "$4") + " }")
D_GATE = gl.constexpr(_of_gate("$1") + _d_gate("$0", "$2", "$3") + " }")
D_UP = gl.constexpr(_of_gate("$1") + _d_up("$0", "$2") + " }")  # from the gate and dh


# The layout of a tile of words, and the layout of the same registers with the rows first. A warp holds 32 rows of 64
# columns, so blocks of 32 rows and blocks of 32 columns lie inside a warp.
_ROWS, _WORDS = [[1, 0], [2, 0], [4, 0]], [[0, 1], [0, 2]]
_LANE, _WARP = [[0, 4], [0, 8], [0, 16], [8, 0], [16, 0]], [[0, 32], [32, 0], [64, 0]]
WORD = gl.constexpr(gl.DistributedLinearLayout(_WORDS + _ROWS, _LANE, _WARP, [], [128, 64]))
TURNED = gl.constexpr(gl.DistributedLinearLayout(_ROWS + _WORDS, _LANE, _WARP, [], [128, 64]))


@gluon.jit
def larger(a, b):
    """The larger of two magnitudes, for each half of a word."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def addresses(x, stride_m, token, column):
    """The addresses of the words from a column on."""
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, WORD))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, WORD))
    return x + token.to(gl.int64) * stride_m + column // 2 + (gl.expand_dims(r, 1) * stride_m + gl.expand_dims(d, 0))


@gluon.jit
def loaded(x, stride_m, token, column, there):
    """The words from a column on. `there` says which words exist; the others are 0."""
    return gl.load(addresses(x, stride_m, token, column), mask=there, other=0)


@gluon.jit
def one_gradient(x, stride_m, dh, dh_stride_m, token, d0, half, rows):
    """The words of a tile of the output: the gradient of the gate before the column `half`, from there on of up."""
    word = d0 // 2 + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, WORD)), 0)
    w = gl.zeros((128, 64), gl.int32, WORD)
    if d0 < half:
        there = rows & (word < half // 2)
        gate, up = loaded(x, stride_m, token, d0, there), loaded(x + half // 2, stride_m, token, d0, there)
        w = gl.inline_asm_elementwise(
            D_GATE, "=&r,r,r,r", [gate, up, loaded(dh, dh_stride_m, token, d0, there)],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    if d0 + 128 > half:
        there = rows & (word >= half // 2) & (word < half)
        gate = loaded(x, stride_m, token, d0 - half, there)
        d_up = gl.inline_asm_elementwise(
            D_UP, "=&r,r,r", [gate, loaded(dh, dh_stride_m, token, d0 - half, there)],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        w = gl.where(word < half // 2, w, d_up)
    return w
