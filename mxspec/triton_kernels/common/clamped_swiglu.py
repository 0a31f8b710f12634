"""The clamped SwiGLU of gpt-oss in bfloat16, and its gradient. `reference/common/clamped_swiglu.py` defines both.

A test compares the two functions of the gate with the reference for every gate.
"""

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import widened

# 1.702 * log2(e) in two parts. The product of a bfloat16 and the first part is exact.
_HIGH, _LOW = tl.constexpr(2.4554443359375), tl.constexpr(2.2623655e-05)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small number rounds that number to an integer
_ALPHA = tl.constexpr(1.702)


@triton.jit
def sigmoid(x):
    """`1 / (1 + e^(-1.702 x))` of a widened bfloat16 of at most 7; 0 where it is below 2^-126.

    The steps are those of `swiglu.sigmoid`: the bits are the same on every machine, and `glu` and `slope` are right for
    every gate.
    """
    t = tl.fma(x, -_HIGH, _MAGIC)
    whole = t - _MAGIC
    rest = tl.fma(x, -_LOW, tl.fma(x, -_HIGH, -whole))
    power = tl.fma(tl.fma(0.00133969157, rest, 0.00966591109), rest, 0.0555034429)
    power = tl.fma(tl.fma(tl.fma(power, rest, 0.240223229), rest, 0.693147004), rest, 1.0)
    power = (power.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    y = -1.0 - power
    s = -1.0 / y
    return tl.where(x < -51.375, 0.0, tl.fma(tl.fma(y, s, 1.0), s, s))


@triton.jit
def clamped(v, LIMIT: tl.constexpr):
    """At most LIMIT. NaN stays."""
    return tl.where(v > LIMIT, LIMIT, v)


@triton.jit
def with_bias(v, bias):
    """The sum in bfloat16, widened."""
    return widened((widened(v) + bias).to(tl.bfloat16))


@triton.jit
def _up_1(u):
    u = clamped(u, 7.0)
    return widened((tl.where(u < -7.0, -7.0, u) + 1.0).to(tl.bfloat16))


@triton.jit
def clamped_swiglu(g, u):
    """The activation in bfloat16, of widened gates and ups."""
    x = clamped(g, 7.0)
    glu = (x * sigmoid(x)).to(tl.bfloat16)
    return (widened(glu) * _up_1(u)).to(tl.bfloat16)


@triton.jit
def gradients(g, u, dh):
    """The gradients of the gate and of up in bfloat16, of widened gates and ups."""
    x, d = clamped(g, 7.0), widened(dh)
    s = sigmoid(x)
    y = x * s
    glu, slope = y.to(tl.bfloat16), tl.fma(y * _ALPHA, 1.0 - s, s).to(tl.bfloat16)
    d_glu = (d * _up_1(u)).to(tl.bfloat16)
    d_gate = tl.where(g <= 7.0, widened(d_glu) * widened(slope), 0.0)
    d_up = tl.where(tl.abs(u) <= 7.0, d * widened(glu), 0.0)
    return d_gate.to(tl.bfloat16), d_up.to(tl.bfloat16)
