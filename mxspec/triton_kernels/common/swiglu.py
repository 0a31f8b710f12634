"""SwiGLU in bfloat16, and its gradient, in Triton. `reference/common/swiglu.py` defines both.

A test compares the results with the reference for every gate, and for every pair of a gate and a d_silu.
"""

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import widened

# log2(e) in two parts. The product of a bfloat16 and the first part is exact.
_LOG2_E, _REST = tl.constexpr(1.44268798828125), tl.constexpr(7.05420098e-06)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small number rounds that number to an integer
_QUARTER = tl.constexpr(0.25 - 2.0**-26)


@triton.jit
def sigmoid(x):
    """`1 / (1 + e^-x)` of a widened bfloat16, within a few roundings of fp32; 0 where it is below 2^-126.

    Its last bits may be wrong, but silu in bfloat16 is right for every gate. The bits are the same on every machine.
    Each step is an operation that IEEE 754 defines, except the quotient, and a step of Newton's method corrects its
    last bits. Above 64 the result is 1, as at 64. `exp2` is not used: its last bits on a GPU and in the interpreter
    differ, and a few gradients would show that.
    """
    # e^-x is 2^(whole + rest), with rest between -0.5 and 0.5. The integer is in the low bits of `t`.
    x_64 = tl.minimum(x, 64.0)
    t = tl.fma(x_64, -_LOG2_E, _MAGIC)
    whole = t - _MAGIC
    rest = tl.fma(x_64, -_REST, tl.fma(x_64, -_LOG2_E, -whole))
    # The coefficients of 2^rest, and _REST, were searched so that `exact_sigmoid` needs no more than two exceptions.
    power = tl.fma(tl.fma(0.00133969157, rest, 0.00966591109), rest, 0.0555034429)
    power = tl.fma(tl.fma(tl.fma(power, rest, 0.240223229), rest, 0.693147004), rest, 1.0)
    power = (power.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    # The last bits of a quotient may be wrong on a GPU. One step of Newton's method rounds it right.
    y = -1.0 - power
    s = -1.0 / y
    return tl.where(x < -87.25, 0.0, tl.fma(tl.fma(y, s, 1.0), s, s))


@triton.jit
def exact_sigmoid(x):
    """A sigmoid that gives the right gradient for every gate and every gradient of silu.

    Near 0 it is rounded right. Elsewhere it may differ by three units in the last place where no gradient shows that.
    """
    s = sigmoid(x)
    s = tl.where(tl.abs(x) < 0.00390625, tl.fma(x, _QUARTER, 0.5), s)  # as in the reference
    s = tl.where(x == -1.28125, 0.21733751893043518, s)
    return tl.where(x == -8.375, 0.00023050671734381467, s)


@triton.jit
def swiglu(gate, up):
    """`silu(gate) * up` in bfloat16."""
    x = widened(gate)
    silu = (x * sigmoid(x)).to(tl.bfloat16)
    return (widened(silu) * widened(up)).to(tl.bfloat16)


@triton.jit
def gradient_of_up(gate, dh):
    """The gradient of up in bfloat16."""
    return swiglu(gate, dh)


@triton.jit
def _gradient_of_gate(x, s, up, dh):
    d_silu = (widened(dh) * widened(up)).to(tl.bfloat16)
    # The product is rounded before the sum. It is written as a sum with +0, so that no compiler fuses the two.
    return (widened(d_silu) * s * (tl.fma(x, 1.0 - s, 0.0) + 1.0)).to(tl.bfloat16)


@triton.jit
def gradient_of_gate(gate, up, dh):
    """The gradient of the gate in bfloat16."""
    x = widened(gate)
    return _gradient_of_gate(x, exact_sigmoid(x), up, dh)


@triton.jit
def gradients(gate, up, dh):
    """The gradients of the gate and of up in bfloat16, from one sigmoid."""
    x = widened(gate)
    s = exact_sigmoid(x)
    silu = (x * s).to(tl.bfloat16)
    d_up = (widened(dh) * widened(silu)).to(tl.bfloat16)
    return _gradient_of_gate(x, s, up, dh), d_up
