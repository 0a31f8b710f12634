"""SwiGLU in bfloat16, and its gradient, in Triton. `reference/common/swiglu.py` defines both.

A test compares the results with the reference for every gate, and for every pair of a gate and a mantissa of d_silu.
"""

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import widened

_LOG2_E = tl.constexpr(1.4426950216293335)  # log2(e), rounded to fp32
_REST = tl.constexpr(1.925963033500545e-08)  # log2(e) - _LOG2_E
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small number rounds that number to an integer


@triton.jit
def sigmoid(x):
    """`1 / (1 + e^-x)` of a widened bfloat16, within a rounding of fp32; 0 where it is below 2^-126.

    The bits are the same on every machine. Each step is an operation that IEEE 754 defines, except the quotient, and a
    step of Newton's method corrects its last bits. `exp2` is not used: its last bits on a GPU and in the interpreter
    differ, and a few gradients would show that.
    """
    # 2^t with t = -x * log2(e). The product loses bits, which `lost` holds. `lost` is 0 if t is clamped: an
    # infinite t would make it NaN.
    t = x * -_LOG2_E
    lost = tl.fma(x, -_REST, tl.fma(x, -_LOG2_E, -t))
    lost = tl.where(tl.abs(t) < 126.0, lost, 0.0)
    t = tl.minimum(tl.maximum(t, -126.0), 126.0)
    whole = (t + _MAGIC) - _MAGIC
    rest = (t - whole) + lost  # between -0.5 and 0.5
    power = tl.fma(tl.fma(0.0013390866806730628, rest, 0.009666373953223228), rest, 0.055503569543361664)
    power = tl.fma(tl.fma(tl.fma(power, rest, 0.2402234822511673), rest, 0.6931471824645996), rest, 1.0)
    power = (power.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    # The last bits of a quotient may be wrong on a GPU. One step of Newton's method rounds it right.
    y = tl.fma(power, -1.0, -1.0)
    s = -1.0 / y
    return tl.where(x < -87.25, 0.0, tl.fma(tl.fma(y, s, 1.0), s, s))


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
def gradient_of_gate(gate, up, dh):
    """The gradient of the gate in bfloat16."""
    x = widened(gate)
    s = sigmoid(x)
    d_silu = (widened(dh) * widened(up)).to(tl.bfloat16)
    # `1 + x * (1 - s)`, rounded once and not twice: both give the same bfloat16.
    return (widened(d_silu) * s * tl.fma(x, 1.0 - s, 1.0)).to(tl.bfloat16)
