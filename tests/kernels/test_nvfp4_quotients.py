"""The quotients of NVFP4 in the kernels: beside each number at which a scale or a code changes."""

import pytest
import torch

import mxspec
from mxspec import check, dispatch

if check.default_device().type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters():
    pytest.skip("needs a GPU or an interpreter", allow_module_level=True)

import triton
import triton.language as tl

from mxspec.triton_kernels.common.numerics import signs_of
from mxspec.triton_kernels.common.nvfp4_numerics import factors, is_short, packed_codes, quotient, reciprocal_of
from mxspec.triton_kernels.common.nvfp4_values import nearest_of_narrow, reciprocal_of_scale, scale_of, stochastic
from mxspec.triton_kernels.common.pairs import instructions

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


TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@triton.jit
def _narrow(x, s, d, byte, out, count, FEW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, s = tl.load(x + i, mask=i < count, other=0.0), tl.load(s + i, mask=i < count, other=1.0)
    d = tl.load(d + i, mask=i < count, other=1.0)
    r = reciprocal_of(d)
    if byte is None:
        value = nearest_of_narrow(x, reciprocal_of_scale(s) * (r * 0.65625))
    else:
        q = tl.minimum(quotient(x * 0.65625, -(s * d), reciprocal_of_scale(s) * r, None), 6.0)
        value = stochastic(q, tl.load(byte + i, mask=i < count, other=0), FEW)
    tl.store(out + i, value, mask=i < count)


def narrow(x, s, d, byte=None, few=False):
    out = torch.empty_like(x)
    _narrow[(-(-x.numel() // BLOCK),)](x, s, d, byte, out, x.numel(), few, BLOCK, enable_fp_fusion=False)
    return out


def beside_quotients(dtype, quotients, every=1):
    """Numbers of a dtype, with the scales and the group magnitudes for which they lie beside quotients, or on them.

    Any two that differ only by powers of two behave in the same way, so the magnitudes lie between 1 and 2.
    """
    bits = 8 if dtype == torch.bfloat16 else 11
    amax = 1 + torch.arange(0, 2 ** (bits - 1), every) * 2.0 ** (1 - bits)
    grid = torch.meshgrid(amax, torch.arange(8, 16) / 8, quotients, indexing="ij")
    amax, scale, tie = (t.reshape(-1).float() for t in grid)
    exact = tie.double() * scale * amax * 32 / 21
    unit = torch.exp2(torch.floor(torch.log2(exact)) + 1 - bits)
    numbers = torch.stack([(torch.floor(exact / unit) + step) * unit for step in (-1, 0, 1, 2)])
    numbers = numbers.to(dtype).float()  # the last two may round to one
    return (numbers, *(t.expand_as(numbers) for t in (scale, amax, tie)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_narrow_number_beside_a_tie(dtype):
    x, s, d, _ = (t.reshape(-1).contiguous() for t in beside_quotients(dtype, torch.tensor(TIES)))
    y = (x * 0.65625) / (s * d)  # both products are exact
    above = (y[:, None] > torch.tensor(TIES)).sum(1)
    tie = (y[:, None] == torch.tensor(TIES)).any(1)
    assert tie.any()
    code = above + (tie & (above % 2 == 1))  # to the even code
    assert torch.equal(narrow(*(t.to(DEVICE) for t in (x, s, d))).cpu(), E2M1[code])
    assert torch.equal(narrow(*(t.to(DEVICE) for t in (-x, s, d))).cpu(), -E2M1[code])


@triton.jit
def _short(x, s, h, out, count, ASM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(s + i, mask=i < count, other=1.0).to(tl.float8e4nv)
    h = tl.load(h + i, mask=i < count, other=1.0)
    wrong = s.to(tl.float32) < 0
    minus_d, factor = factors(s, h, 1.0, wrong, True, ASM)
    x = tl.broadcast_to(tl.load(x + i, mask=i < count, other=0.0)[:, None], (BLOCK, 8))
    word = packed_codes(x, signs_of(x), minus_d, factor, 1.0, wrong, True, None, True, False, False, ASM)
    tl.store(out + i, word.to(tl.int32, bitcast=True), mask=i < count)


def short(x, s, h):
    """The words of eight times each number."""
    out = torch.empty(x.shape, dtype=torch.int32, device=DEVICE)
    args = (t.to(DEVICE) for t in (x, s, h))
    _short[(-(-x.numel() // BLOCK),)](*args, out, x.numel(), instructions(out.device), BLOCK, enable_fp_fusion=False)
    return out.cpu()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_short_way_has_the_codes_of_the_exact_quotients(dtype, sign):
    x, s, h, _ = (t.reshape(-1).contiguous() for t in beside_quotients(dtype, torch.tensor(TIES)))
    exact = (x * 0.65625) / (s * h)
    above = (exact[:, None] > torch.tensor(TIES)).sum(1)
    tie = (exact[:, None] == torch.tensor(TIES)).any(1)
    assert tie.any()
    code = above + (tie & (above % 2 == 1)) + (8 if sign < 0 else 0)  # to the even code
    assert torch.equal(short(x * sign, s, h).long() & 0xFFFFFFFF, code * 0x11111111)


def test_the_short_way_reads_a_scale_of_0_as_0_and_saturates():
    x, s, h = torch.tensor([3.0, 2.0**100, -torch.inf, 6.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.ones(4)
    assert [hex(word & 0xFFFFFFFF) for word in short(x, s, h).tolist()] == ["0x0", "0x0", "0xffffffff", "0x66666666"]


@triton.jit
def _are_short(A, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, is_short(tl.load(A + i), True).to(tl.int32))


def test_a_short_magnitude_has_11_bits_and_is_not_small():
    numbers = [0.0, 2.0**-149, 2.0**-73, 2.0**-72, 1.0, 1 + 2.0**-10, 1 + 2.0**-11, 6.0, 2047.0, 2049.0, 65504.0]
    out = torch.empty(16, dtype=torch.int32, device=DEVICE)
    _are_short[(1,)](torch.tensor(numbers + [1 / 3] * 5, device=DEVICE), out, 16)
    assert out.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1] + [0] * 5


@pytest.mark.parametrize(
    ("dtype", "few"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)], ids=str
)
def test_narrow_numbers_beside_the_256ths_of_a_step(dtype, few):
    parts = torch.cat([torch.arange(1, 1024) / 512, torch.arange(512, 1024) / 256, torch.arange(512, 768) / 128])
    every = 1 if DEVICE.type == "cuda" or dtype == torch.bfloat16 else 32
    x, s, d, at = (t.reshape(-1).contiguous() for t in beside_quotients(dtype, parts, every))
    y = ((x * 0.65625) / (s * d)).clamp(max=6)
    low = torch.searchsorted(E2M1, y, right=True).clamp(max=7) - 1
    step = E2M1[low + 1] - E2M1[low]
    lowest = torch.searchsorted(E2M1, at, right=True).clamp(max=7) - 1
    part = ((at - E2M1[lowest]) / (E2M1[lowest + 1] - E2M1[lowest]) * 256).int()
    byte = (256 - part) & 0xFF  # with this byte, a quotient becomes the larger code from `at` on
    larger = torch.floor(256 * (y - E2M1[low]) / step).int() + byte >= 256
    expected = torch.where(larger, E2M1[low + 1], E2M1[low])
    got = narrow(*(t.to(DEVICE) for t in (x, s, d, byte)), few)
    assert torch.equal(got.cpu(), expected)


@triton.jit
def _scales(b, d, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(d + i, mask=i < count, other=1.0)
    tl.store(out + i, scale_of(tl.load(b + i, mask=i < count, other=0.0), d, reciprocal_of(d)), mask=i < count)


@pytest.mark.parametrize("exponent", range(-20, 1))
def test_the_scale_of_every_bfloat16_magnitude(exponent):
    """The magnitudes of blocks and of groups have 8 bits. Scales go from 0 to 448, with all ties."""
    mantissas = 1 + torch.arange(128) / 128
    b, amax = (t.reshape(-1).contiguous() for t in torch.meshgrid(mantissas, mantissas, indexing="ij"))
    b = b[keep := b * 2.0**exponent <= amax].to(DEVICE) * 2.0**exponent
    d = amax[keep].to(DEVICE) * 2.0**-12
    out = torch.empty_like(b)
    _scales[(-(-b.numel() // BLOCK),)](b, d, out, b.numel(), BLOCK, enable_fp_fusion=False)
    expected = (b.double() * 7 / 64 / d.double()).float()  # rounded beside no tie: a quotient of 11 by 8 bits
    assert torch.equal(out.cpu(), expected.cpu().to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-138, 2.0**-137])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_numbers_far_above_an_amax_whose_divisor_vanishes(amax, dtype, axis):
    x = torch.tensor([3e38, 1.0, -(2.0**-30), 0.0], dtype=dtype).repeat_interleave(16).repeat(16, 1)
    x = x.mT.contiguous() if axis == -2 else x
    tensor_amax = torch.tensor(amax)
    expected = dispatch.reference("nvfp4_quantize")(x, tensor_amax, axis=axis)
    with mxspec.use_backend("triton"):
        found = mxspec.nvfp4_quantize(x.to(DEVICE), tensor_amax.to(DEVICE), axis=axis)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("asm", [False, True])
def test_reciprocals_of_all_scales(asm):
    if asm and not instructions(torch.device(DEVICE)):
        pytest.skip("only a GPU has the instruction")
    s = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    out = torch.empty_like(s, device=DEVICE)
    _reciprocals[(1,)](s.to(DEVICE), out, 126, asm, 128, enable_fp_fusion=False)
    assert (out.cpu().double() * s.double() - 1).abs().max() < 2.0**-23


@triton.jit
def _reciprocals(s, out, count, ASM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, reciprocal_of_scale(tl.load(s + i, mask=i < count, other=1.0), ASM), mask=i < count)
