"""The quotients of NVFP4 in the kernels: beside each number at which a scale or a code changes."""

import pytest
import torch

from mxspec import check, dispatch

if check.default_device().type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters():
    pytest.skip("needs a GPU or an interpreter", allow_module_level=True)

import triton
import triton.language as tl

from mxspec.triton_kernels.common.nvfp4_numerics import quotient, reciprocal_of

DEVICE = check.default_device()
MANTISSAS = torch.arange(2**23)
# On a CPU, a sample: every 61st divisor, and the first and the last 4096. All of them were tried once in C, with the
# same operations: no quotient was wrong.
TRIED = MANTISSAS if DEVICE.type == "cuda" else torch.cat([MANTISSAS[:4096], MANTISSAS[::61], MANTISSAS[-4096:]])
BLOCK = 1024 if DEVICE.type == "cuda" else 2**15


@triton.jit
def _quotients(n, d, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(n + i, mask=i < count), tl.load(d + i, mask=i < count, other=1.0)
    tl.store(out + i, quotient(x, -y, reciprocal_of(y), 512.0), mask=i < count)


def quotients(n, d):
    out = torch.empty_like(n)
    _quotients[(-(-n.numel() // BLOCK),)](n, d, out, n.numel(), BLOCK, enable_fp_fusion=False)
    return out


def beside(x, steps):
    return (x.view(torch.int32) + steps).view(torch.float32)


@pytest.mark.parametrize("sixteenth", range(16))
def test_the_side_of_a_tie(sixteenth):
    """A tie of e2m1 or e4m3 is 1 + sixteenth / 16 times a power of two.

    The numerators are those whose quotients are nearest to the numbers that fp32 rounds to the tie, or to a neighbour
    of it.
    """
    d = (0x3F800000 + TRIED).to(torch.int32).view(torch.float32).to(DEVICE)
    tie = torch.tensor(1 + sixteenth / 16, device=DEVICE)
    for end in (beside(tie, -1), beside(tie, 1)):
        middle = (tie.double() + end.double()) / 2
        nearest = (d.double() * middle).float()
        for steps in (-1, 0, 1):
            n = beside(nearest, steps)
            assert torch.equal(quotients(n, d), n / d)


@pytest.mark.parametrize("part", range(0, 512, 16 if DEVICE.type == "cuda" else 64))
def test_the_side_of_a_256th_of_a_step(part):
    """Where the byte of stochastic rounding starts to count is 1 + part / 512 times a power of two.

    All parts with all divisors were tried once in C, with the same operations: no quotient was wrong.
    """
    d = (0x3F800000 + (TRIED if DEVICE.type == "cuda" else TRIED[::29])).to(torch.int32).view(torch.float32).to(DEVICE)
    for place in range(part, part + 16, 1 if DEVICE.type == "cuda" else 5):
        edge = torch.tensor(1 + place / 512, device=DEVICE)
        middle = (edge.double() + beside(edge, -1).double()) / 2
        nearest = (d.double() * middle).float()
        for steps in (-1, 0, 1):
            n = beside(nearest, steps)
            assert torch.equal(quotients(n, d), n / d)


@pytest.mark.parametrize("exponent", [-90, -60, 0, 100])
def test_other_exponents_give_the_same(exponent):
    d = (0x3F800000 + TRIED[::7]).to(torch.int32).view(torch.float32).to(DEVICE) * 2.0**exponent
    for tie in (0.25, 0.75, 5.0, 2.0**-10, 440.0):
        n = (d.double() * tie).float()
        assert torch.equal(quotients(n, d), n / d)


def test_a_numerator_of_inf_stays_inf_and_of_zero_stays_zero():
    n = torch.tensor([torch.inf, 0.0, 2.0**127], device=DEVICE)
    assert quotients(n, torch.full_like(n, 2.0**-60)).tolist() == [torch.inf, 0.0, torch.inf]
