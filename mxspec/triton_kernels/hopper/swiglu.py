"""SwiGLU in bfloat16, and its gradient, in PTX: words of two bf16 values, for half of the instructions of plain Triton.

`mul.bf16x2` computes the products of two bf16 values. It rounds once. `common/swiglu.py` has the same functions in
Triton's own language.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

DECLARED = "{ .reg .b32 a, b, c; .reg .f32 x, y, u, v, p, q, t, l; .reg .pred z; "
WIDENED = "shl.b32 a, $G, 16; and.b32 b, $G, 0xffff0000; mov.b32 x, a; mov.b32 y, b; "
# Approximations of 2^t and 1 / y with errors of two units in the last place. They suffice for silu in bfloat16: a test
# tries every gate.
_SIGMOID = (
    "mul.rn.f32 t, $X, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $S, t; "
)


def _bits(value: float) -> str:
    return f"0f{struct.unpack('I', struct.pack('f', value))[0]:08X}"


def _exact_sigmoid() -> str:
    """The steps of `exact_sigmoid` in `common/swiglu.py`, with the same bits: Newton's method corrects `rcp.approx`."""
    steps = (
        f"min.f32 p, $X, {_bits(64.0)}; fma.rn.f32 t, p, {_bits(-1.44268798828125)}, {_bits(12582912.0)};"
        f" mov.f32 l, {_bits(12582912.0)}; sub.rn.f32 l, l, t; fma.rn.f32 l, p, {_bits(-1.44268798828125)}, l;"
        f" fma.rn.f32 l, p, {_bits(-7.05420098e-06)}, l; mov.f32 p, {_bits(0.00133969157)}; "
    )
    for coefficient in (0.00966591109, 0.0555034429, 0.240223229, 0.693147004, 1.0):
        steps += f"fma.rn.f32 p, p, l, {_bits(coefficient)}; "
    steps += (
        "mov.b32 a, t; mov.b32 b, p; shl.b32 a, a, 23; add.s32 a, a, b; mov.b32 p, a;"
        f" add.rn.f32 p, p, {_bits(1.0)}; rcp.approx.ftz.f32 $S, p; neg.f32 p, p;"
        f" fma.rn.f32 t, p, $S, {_bits(1.0)}; fma.rn.f32 $S, t, $S, $S;"
        f" setp.lt.f32 z, $X, {_bits(-87.25)}; selp.f32 $S, {_bits(0.0)}, $S, z;"
        f" abs.f32 t, $X; setp.lt.f32 z, t, {_bits(2.0**-8)};"
        f" fma.rn.f32 t, $X, {_bits(0.25 - 2.0**-26)}, {_bits(0.5)}; selp.f32 $S, t, $S, z; "
    )
    for gate, s in ((-1.28125, 0.21733751893043518), (-8.375, 0.00023050671734381467)):
        steps += f"setp.eq.f32 z, $X, {_bits(gate)}; selp.f32 $S, {_bits(s)}, $S, z; "
    return steps


def sigmoids(of: str) -> str:
    """The sigmoids u and v of x and y."""
    return "".join(of.replace("$S", s).replace("$X", x) for s, x in ("ux", "vy"))


def forward() -> str:
    """$0 is silu($1) * $2, for words of two bf16."""
    return (
        DECLARED + WIDENED.replace("$G", "$1") + sigmoids(_SIGMOID) + "mul.rn.f32 x, x, u; mul.rn.f32 y, y, v;"
        " cvt.rn.bf16x2.f32 a, y, x; mul.rn.bf16x2 $0, a, $2; }"
    )


def _backward() -> str:
    """$0 and $1 are the gradients of the gate $2 and of up, $3, from the gradient $4."""
    gate = (
        " mov.f32 t, 0f3F800000; sub.rn.f32 t, t, $S; mul.rn.f32 t, $X, t; add.rn.f32 t, t, 0f3F800000;"
        " mul.rn.f32 $P, $P, $S; mul.rn.f32 $P, $P, t;"
    )
    return (
        DECLARED + WIDENED.replace("$G", "$2") + sigmoids(_exact_sigmoid()) + "mul.rn.f32 p, x, u; mul.rn.f32 q, y, v;"
        " cvt.rn.bf16x2.f32 a, q, p; mul.rn.bf16x2 $1, a, $4; mul.rn.bf16x2 c, $3, $4;"
        " shl.b32 a, c, 16; and.b32 b, c, 0xffff0000; mov.b32 p, a; mov.b32 q, b;"
        + "".join(gate.replace("$S", s).replace("$X", x).replace("$P", p) for s, x, p in ("uxp", "vyq"))
        + " cvt.rn.bf16x2.f32 $0, q, p; }"
    )


_FORWARD, _BACKWARD = tl.constexpr(forward()), tl.constexpr(_backward())


@triton.jit
def swiglu(gate, up):
    """`silu(gate) * up` in bfloat16. Each thread needs an even number of values."""
    return tl.inline_asm_elementwise(_FORWARD, "=r,r,r", [gate, up], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def gradients(gate, up, dh):
    """The gradients of the gate and of up in bfloat16. Each thread needs an even number of values."""
    return tl.inline_asm_elementwise(
        _BACKWARD, "=&r,=&r,r,r,r", [gate, up, dh], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )
