"""SwiGLU in bfloat16, and its gradient, in Triton. `reference/common/swiglu.py` defines both.

A test compares the results with the reference for every gate, and for every pair of a gate and a mantissa of d_silu.
"""

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import widened

_LOG2_E = tl.constexpr(1.4426950216293335)  # log2(e), rounded to fp32
_REST = tl.constexpr(1.925963033500545e-08)  # log2(e) - _LOG2_E
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sigmoid(x):
    """`1 / (1 + e^-x)` of a widened bfloat16, within a rounding of fp32; 0 where it is below 2^-126.

    The product `x * log2(e)` loses bits, and exp2 would multiply their loss by up to 128. So the lost part becomes a
    factor `1 + lost * ln(2)` of the power.
    """
    t = x * -_LOG2_E
    lost = tl.fma(x, -_REST, tl.fma(x, -_LOG2_E, -t))
    # The part that is lost of an infinite t is NaN, so such a gate skips it.
    lost = tl.where(tl.abs(t) < 256.0, lost, 0.0)
    power = tl.exp2(t)
    y = 1.0 + tl.fma(power, lost * _LN_2, power)
    return tl.where(x < -87.25, 0.0, 1.0 / y)


@triton.jit
def swiglu(gate, up):
    """`silu(gate) * up` in bfloat16."""
    x = widened(gate)
    silu = (x * sigmoid(x)).to(tl.bfloat16)
    return (widened(silu) * widened(up)).to(tl.bfloat16)


@triton.jit
def swiglu_backward(gate, up, dh):
    """The gradients of gate and up in bfloat16."""
    x, d = widened(gate), widened(dh)
    s = sigmoid(x)
    silu = (x * s).to(tl.bfloat16)
    d_up = (d * widened(silu)).to(tl.bfloat16)
    d_silu = (d * widened(up)).to(tl.bfloat16)
    # `1 + x * (1 - s)`, rounded once and not twice: both give the same bfloat16.
    d_gate = (widened(d_silu) * s * tl.fma(x, 1.0 - s, 1.0)).to(tl.bfloat16)
    return d_gate, d_up
