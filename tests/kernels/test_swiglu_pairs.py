"""SwiGLU in the kernels: every gate, and every finite gate beside every mantissa of the gradient of silu.

Each block of 128 columns holds one value that is not 0. So the stored scale of the block shows the bits of the value,
and the code its sign. A power of two brings each value near to 1, since eps hides values below 1e-12. On a CPU a kernel
is interpreted, with a sample of the values.
"""

import importlib.util

import pytest
import torch

import mxspec
from mxspec import check, dispatch, plans
from mxspec.cases.common.swiglu import every_gate
from mxspec.reference.common.clamped_swiglu import glu, slope
from mxspec.reference.common.swiglu import sigmoid, silu, swiglu_backward
from tests.helpers import DEVICE, ends, u8

FORWARD, BACKWARD = "swiglu_fp8_quantize_rowcol_groups", "swiglu_backward_fp8_quantize_rowcol_groups"
ON_A_CPU = DEVICE.type == "cpu"
BLOCKS = 4 if ON_A_CPU else 64  # of 128 columns, in a row of the gate
ROWS = 64 if ON_A_CPU else 2**13  # of a call, whose tensors take a few GiB at most
FINITE = (t := torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16))[t.isfinite()]


def kernels(op):
    """The backends with a kernel; those that cannot run here are skipped."""
    for backend in dispatch.backends():
        if backend != "reference" and dispatch.has_kernel(op, backend):
            lacks = ON_A_CPU and f"{backend.upper()}_INTERPRET" not in dispatch.interpreters()
            yield pytest.param(backend, marks=pytest.mark.skipif(lacks, reason="needs a GPU or its interpreter"))


def toward_one(values):
    """For each number the power of two that brings it near to 1, as far as bfloat16 can."""
    exponent = torch.frexp(values.float())[1]
    return torch.exp2(-exponent.clamp(-120, 100).float()).bfloat16()


def alone(values):
    """`(rows, BLOCKS * 128)`: each value in a block of its own, at a place that changes from block to block."""
    count = -(-len(values) // BLOCKS) * BLOCKS
    wide = torch.zeros(count, 128, dtype=values.dtype, device=values.device)
    places = torch.arange(len(values), device=values.device) * 37 % 128
    wide[: len(values)].scatter_(1, places[:, None], values[:, None])
    return wide.view(-1, BLOCKS * 128)


def difference(op, backend, *tensors):
    """How the six results of a kernel differ from those of the reference, or None."""
    rows = len(tensors[0])
    args = (*tensors, ends(rows // 3, rows).to(DEVICE))
    got, wanted = (getattr(mxspec, op)(*args, backend=b) for b in (backend, "reference"))
    return check.difference(got, wanted)


@pytest.mark.parametrize("backend", [*kernels(FORWARD)])
def test_every_gate(backend):
    gate = FINITE[::37] if ON_A_CPU else FINITE
    for mantissa in (1.0, -1.3984375):
        up = mantissa * toward_one(silu(gate))
        for some, beside in zip(gate.split(ROWS * BLOCKS), up.split(ROWS * BLOCKS), strict=True):
            gate_up = torch.cat([alone(some), alone(beside)], 1).to(DEVICE)
            assert difference(FORWARD, backend, gate_up) is None
    assert difference(FORWARD, backend, every_gate().to(DEVICE)) is None  # NaN and Inf too


@pytest.mark.parametrize("backend", [*kernels(BACKWARD)])
def test_every_gate_and_every_mantissa(backend):
    """up is 1, so that dh is the gradient of silu."""
    ones = torch.ones(len(FINITE), 1, dtype=torch.bfloat16)
    power = toward_one(swiglu_backward(FINITE[:, None], ones, ones)[:, 0]).to(DEVICE)
    gate, mantissa = FINITE.to(DEVICE), (1 + torch.arange(128, device=DEVICE) / 128).bfloat16()
    pairs = torch.arange(0, len(gate) * 128, 4099 if ON_A_CPU else 1, device=DEVICE)
    for some in pairs.split(ROWS * BLOCKS):
        of_gate, dh = alone(gate[some // 128]), alone(power[some // 128] * mantissa[some % 128])
        gate_up = torch.cat([of_gate, torch.ones_like(of_gate)], 1)
        assert difference(BACKWARD, backend, gate_up, dh) is None


def test_a_block_shows_the_bits_of_its_value():
    """Values that differ in their last bit have other scales, and a negative value another code."""
    values = torch.tensor([1.0, 1.0078125, -1.0, 1.9921875], dtype=torch.bfloat16).repeat(BLOCKS // 4)
    q_row, s_row, *_ = mxspec.fp8_quantize_rowcol_groups(alone(values), ends(1), backend="reference")
    assert len(s_row.unique()) == 3
    codes = u8(q_row).view(BLOCKS, 128).amax(1)
    assert codes[:4].tolist() == [0x7E, 0x7E, 0xFE, 0x7E]


def test_no_gate_hides_behind_eps():
    """Beside its power of two each gate shows its silu, and each derivative shows, unless s is 0."""
    some = silu(FINITE).float() * toward_one(silu(FINITE)).float()
    assert (some[some != 0].abs() > 2**-20).all()
    hidden = FINITE[(some == 0) & (FINITE != 0)]
    assert sorted(hidden[hidden > -1].tolist()) == [-(2**-133), 2**-133]  # half of it is a tie, and rounded to 0
    assert hidden[hidden < -1].max() == -87.5


# --- the ops without codes, whose results show every bit ------------------------------------------------------------

EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
# A sigmoid that is off by one or by two shows at these gates, and a fused sum at the first four. For the last eight,
# `1/2 + gate/4` is near the middle of two fp32 numbers.
HARD = torch.tensor(
    [-0.1123046875, -1.28125, -1.421875, -2.265625, -1.6640625, -2.09375, -7.0, -7.9375, -8.375, -10.125, -24.625]
    + [-37.75, -38.75, -51.25, -54.25, -87.0, 2.265625, 7.09375, -torch.inf, torch.inf]
    + [sign * odd * 2.0**-22 for sign in (1, -1) for odd in (1.5, 2.5, 5.5, 9.5)]
).bfloat16()


@pytest.fixture(params=[True, False] if torch.cuda.is_available() else [False], ids=lambda on: "ptx" if on else "plain")
def hopper(request, monkeypatch):
    """Triton's kernel with the PTX of `hopper/swiglu.py`, and in Triton's own language. On a CPU, only the latter."""
    if importlib.util.find_spec("triton") and not request.param:
        monkeypatch.setattr("mxspec.triton_kernels.tiles.swiglu._on_hopper", lambda device: False)
    with plans.turned_off():
        yield


def agree(op, backend, *tensors):
    """Whether a kernel gives the bits of the reference, where any NaN equals any NaN."""
    got, wanted = (getattr(mxspec, op)(*tensors, backend=b) for b in (backend, "reference"))
    nan = got.isnan()
    same = (got.view(torch.int16) == wanted.view(torch.int16)) | nan
    return bool(same.all()) and bool((nan == wanted.isnan()).all())


@pytest.mark.parametrize("backend", [*kernels("swiglu")])
def test_every_gate_without_codes(backend, hopper):
    gate = EVERY.view(256, 256).to(DEVICE)
    for up in (1.0, -1.3984375, 2.0**127, 2.0**-120, torch.inf, 0.0):
        assert agree("swiglu", backend, gate, torch.full_like(gate, up))
    assert agree("swiglu", backend, gate, gate)


@pytest.mark.parametrize("backend", [*kernels("swiglu_backward")])
def test_every_gate_and_every_gradient_of_silu(backend, hopper):
    """up is 1, so that dh is the gradient of silu. A GPU tries all 2^32 pairs."""
    gates = HARD if ON_A_CPU else torch.cat([EVERY, HARD])
    dh = EVERY.to(DEVICE)
    for some in gates.to(DEVICE).split(512):
        gate = some[:, None].repeat(1, len(dh))
        assert agree("swiglu_backward", backend, gate, torch.ones_like(gate), dh.expand(gate.shape))


@pytest.mark.parametrize("backend", [*kernels("swiglu_backward")])
def test_every_gate_and_some_gradients_of_silu(backend, hopper):
    gate = EVERY.view(256, 256).to(DEVICE)
    for dh in (1.0, -1.3984375, 2.0**127, 3 * 2.0**-133, torch.inf, 0.0):
        assert agree("swiglu_backward", backend, gate, gate, torch.full_like(gate, dh))


def test_a_fused_sum_gives_other_bits():
    """`1 + gate * (1 - s)` needs both of its roundings: four small gradients of silu show that."""
    gate, d_silu = HARD[:4, None].double(), EVERY[None].float()
    s = sigmoid(HARD[:4, None])
    fused, apart = (1 + gate * (1 - s)).float(), 1 + gate.float() * (1 - s)
    one, other = (((d_silu * s) * slope).bfloat16() for slope in (fused, apart))
    assert ((one != other) & one.isfinite()).sum(1).tolist() == [2, 2, 2, 2]  # of both signs


# --- the clamped SwiGLU of gpt-oss --------------------------------------------------------------------------------

CLAMPED, CLAMPED_BACKWARD = (f"clamped_{op}" for op in (FORWARD, BACKWARD))


def beside(gate, up):
    """Gates and ups that alternate, in `(rows, 2 * columns)`."""
    return torch.stack([gate, torch.full_like(gate, up)], -1).flatten(1)


@pytest.mark.parametrize("backend", [*kernels(CLAMPED)])
def test_every_gate_of_gpt_oss(backend):
    """up is 0, so that h is `glu(gate)`."""
    for some in (FINITE[::37] if ON_A_CPU else FINITE).split(ROWS * BLOCKS):
        gate_up = beside(alone(some), 0.0).to(DEVICE)
        assert difference(CLAMPED, backend, gate_up, gate_up.new_zeros(2, gate_up.shape[1])) is None


@pytest.mark.parametrize("backend", [*kernels(CLAMPED_BACKWARD)])
def test_a_place_without_a_token_has_no_gradient(backend):
    """A bias of NaN reaches the up of a place without a token, whose gradient would be NaN. Every real up is 8."""
    gate_up = beside(torch.zeros(3, 128).bfloat16(), 8.0).to(DEVICE)
    bias = beside(torch.full((2, 128), torch.nan).bfloat16(), 0.0).to(DEVICE)
    assert difference(CLAMPED_BACKWARD, backend, gate_up, bias, torch.ones_like(gate_up[:, ::2])) is None


@pytest.mark.parametrize("up", [-1.0, 8.0])
@pytest.mark.parametrize("backend", [*kernels(CLAMPED_BACKWARD)])
def test_every_gate_of_gpt_oss_in_the_gradient(backend, up):
    """An up of -1 makes d_gate 0, so d_up shows the bits of `glu`. An up of 8 makes d_up 0, so d_gate shows `slope`."""
    shown = toward_one(glu(FINITE.clamp(max=7)) if up < 0 else slope(FINITE.clamp(max=7)))
    places = torch.arange(0, len(FINITE), 37 if ON_A_CPU else 1)
    for some in places.split(ROWS * BLOCKS):
        gate, dh = alone(FINITE[some]), alone(shown[some])
        gate_up = beside(gate, up).to(DEVICE)
        bias = gate_up.new_zeros(2, gate_up.shape[1])
        assert difference(CLAMPED_BACKWARD, backend, gate_up, bias, dh.to(DEVICE)) is None
