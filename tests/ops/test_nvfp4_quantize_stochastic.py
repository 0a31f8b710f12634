"""nvfp4_quantize_stochastic: known answers of Philox, the rule over fractions and over bits, and the mean."""

from fractions import Fraction

import pytest
import torch

from mxspec import nvfp4_dequantize, nvfp4_quantize, nvfp4_quantize_stochastic
from mxspec.formats import E2M1, same_bits
from mxspec.reference.common.numerics import unpacked
from mxspec.reference.common.nvfp4_numerics import stochastic_cast
from mxspec.reference.common.philox import bytes_of_blocks, philox4x32
from mxspec.spec import random_bits, random_normal

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
VALUES = [Fraction(E2M1.value(code)) for code in range(8)]


def quantized(x, random, amax=None, **options):
    """(codes, one per byte; scale bytes; tensor scale)"""
    qdata, scale, tensor_scale = nvfp4_quantize_stochastic(x, random, amax, backend="reference", **options)
    qdata = qdata.mT if options.get("axis") == -2 else qdata
    return unpacked(qdata, E2M1), scale.view(U8), tensor_scale


# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_golden_philox(counter, key, words):
    def numbers(text):
        return tuple(torch.tensor(int(word, 16)) for word in text.split())

    assert philox4x32(numbers(counter), numbers(key)) == numbers(words)


def test_golden_bytes_of_a_block():
    """The first known answer: seed 0, offset 0, block 0. Word 0 is 6627e8d5, and its lowest byte is first."""
    first = bytes_of_blocks(torch.tensor([0, 0]), (2, 3))
    assert first.shape == (2, 3, 16)
    assert first[0, 0].tolist() == list(bytes.fromhex("d5e82766 8dc569e1 4cac57bc d8db009b"))
    last = bytes_of_blocks(torch.tensor([-1, -1]), (1,))  # another block number than the second known answer
    assert last[0].tolist() != list(bytes.fromhex("6d278f40 0e3bc841 c6c70ba2 fd51546d"))


def test_golden_the_words_of_seed_offset_and_block():
    """The third known answer needs a block number above 2^32, so the words are compared with a call of Philox."""
    state = torch.tensor([0x299F31D0_A4093822, 0x05A308D3_243F6A88])
    words = philox4x32(
        tuple(torch.tensor(word) for word in (0x243F6A88, 0x05A308D3, 5, 0)),
        (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)),
    )
    expected = b"".join(int(word).to_bytes(4, "little") for word in words)
    assert bytes_of_blocks(state, (7,))[5].tolist() == list(expected)


def test_golden_codes_by_hand():
    """A tensor amax of 2688 and a first element of 6 give the scale 1, so y is x."""
    x = torch.tensor([[6.0, 2.25, 2.25, 2.25, -2.25, -2.25, 0.0, -0.0, 5.0, 5.0, 0.1, -0.1, 1.5, 1.5, 4.0, -6.0]])
    r = torch.tensor([[255, 191, 192, 255, 191, 192, 255, 255, 127, 128, 204, 205, 0, 255, 255, 255]], dtype=U8)
    codes, scale, tensor_scale = quantized(x, r, torch.tensor(2688.0))
    assert (scale.item(), tensor_scale.item()) == (0x38, 1.0)
    # 2.25 is 64/256 of the way from 2 to 3; 0.1 is 51.2/256 of the way from 0 to 0.5
    assert codes[0].tolist() == [7, 4, 5, 5, 12, 13, 0, 8, 6, 7, 0, 9, 3, 3, 6, 15]
    qdata, *_ = nvfp4_quantize_stochastic(x, r, torch.tensor(2688.0), backend="reference")
    assert qdata.view(U8)[0, :2].tolist() == [0x47, 0x55]


def test_golden_byte_0_truncates():
    x = torch.tensor(
        [[6.0, 5.99, 3.99, 2.99, 1.99, 1.49, 0.99, 0.49, -5.99, -3.99, -2.99, -1.99, -1.49, -0.99, -0.49, 0.0]]
    )
    codes = quantized(x, torch.zeros(1, 16, dtype=U8), torch.tensor(2688.0))[0]
    assert codes[0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 14, 13, 12, 11, 10, 9, 8, 0]


def test_golden_bytes_down_the_columns():
    x = torch.full((16, 2), 2.5)
    x[0] = 6.0
    r = torch.zeros(16, 2, dtype=U8)
    r[3, 0], r[4, 1] = 128, 127
    codes, scale, _ = quantized(x, r, torch.tensor(2688.0), axis=-2)
    assert scale.tolist() == [[0x38], [0x38]]
    assert codes[0].tolist() == [7, 4, 4, 5, *12 * [4]]
    assert codes[1].tolist() == [7, *15 * [4]]


def by_fractions(y, byte):
    """The rule of the contract, without rounding."""
    magnitude = min(abs(Fraction(y)), Fraction(6))
    code = max(i for i in range(8) if VALUES[i] <= magnitude)
    if code < 7:
        part = (magnitude - VALUES[code]) / (VALUES[code + 1] - VALUES[code])
        code += int(256 * part) + byte >= 256
    return code


def by_bits(y, byte):
    """A conversion to e2m1 with 8 random bits below the last bit that it keeps, then truncation, on the bits of fp32.

    The significand of a number below 1, which is subnormal in e2m1, is first shifted to the exponent 0.
    """
    bits = torch.tensor(min(abs(y), 6.0), dtype=F32).view(torch.int32).item()
    exponent, significand = (bits >> 23) - 127, (bits & 0x7FFFFF) | (0x800000 if bits >> 23 else 0)
    if exponent < 0:
        exponent, significand = 0, significand >> -exponent
    significand += byte << 14  # e2m1 keeps bits 23 and 22 of the significand, so 21 to 14 are the 8 bits below
    if significand >> 24:  # a carry into the next binade
        exponent, significand = exponent + 1, significand >> 1
    mantissa = significand >> 22 & 1
    return (exponent + 1) << 1 | mantissa if significand >> 23 else mantissa


def test_the_rule_is_an_addition_of_the_byte_and_a_truncation():
    """All 256 bytes for numbers on, above and below each of the 256 parts between two codes."""
    parts = torch.arange(256 * 7, dtype=torch.float64)
    values = torch.tensor([float(v) for v in VALUES], dtype=torch.float64)
    at = (parts // 256).long()
    exact = (values[at] + (values[at + 1] - values[at]) * (parts % 256) / 256).to(F32)
    beside = [exact.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    tiny = torch.tensor([2.0**-149, 2.0**-126, 2.0**-40, 2.0**-9, 7.0, 1e30])
    y = torch.cat([exact, *beside, tiny]).abs()
    byte = torch.arange(256, dtype=torch.int32)
    grid, bytes_ = y.repeat_interleave(256), byte.repeat(len(y))
    codes = unpacked(stochastic_cast(grid, bytes_), E2M1).view(len(y), 256)
    picked = [0, 1, 2, 63, 64, 127, 128, 129, 191, 192, 254, 255]
    for i, number in enumerate(y.tolist()):
        for b in picked:
            assert codes[i, b] == by_fractions(number, b) == by_bits(number, b), (number, b)
    more = codes[:, 1:] >= codes[:, :-1]
    assert more.all()  # so the bytes between the picked ones are right too, up to the place of the step
    ups = (codes != codes[:, :1]).sum(1)
    whole = [int(256 * _part(number)) for number in y.tolist()]
    assert ups.tolist() == whole


def _part(number):
    magnitude = min(Fraction(number), Fraction(6))
    code = max(i for i in range(8) if VALUES[i] <= magnitude)
    return Fraction(0) if code == 7 else (magnitude - VALUES[code]) / (VALUES[code + 1] - VALUES[code])


def test_the_scales_are_those_of_nvfp4_quantize():
    x = random_normal(2, 48, 64)
    for axis in (-1, -2):
        for layout in ("plain", "blocked"):
            options = {"axis": axis, "scale_layout": layout, "backend": "reference"}
            nearest = nvfp4_quantize(x, **options)
            drawn = nvfp4_quantize_stochastic(x, torch.tensor([1, 2]), **options)
            assert same_bits(nearest[1], drawn[1]).all()
            assert same_bits(nearest[2], drawn[2]).all()
            assert drawn[0].stride() == nearest[0].stride()


def test_seeds_are_the_bytes_of_philox():
    x = random_normal(3, 32, 48)
    for axis in (-1, -2):
        state = torch.tensor([2**40 + 3, -5])
        blocks = (3, 32, 3) if axis == -1 else (3, 48, 2)
        r = bytes_of_blocks(state, blocks).flatten(-2).to(U8)
        r = r if axis == -1 else r.mT
        for a, b in zip(quantized(x, state, axis=axis), quantized(x, r, axis=axis), strict=True):
            assert same_bits(a, b).all()


def test_the_mean_of_all_bytes_is_the_number_cut_to_256_parts():
    """Over the 256 bytes, the mean of the codes' values is y, rounded down to a 256th of the step."""
    y = torch.rand(500, generator=torch.Generator().manual_seed(0)).double() * 6
    y = y.to(F32)
    table = torch.tensor([float(v) for v in VALUES])
    codes = unpacked(stochastic_cast(y.repeat(256, 1), torch.arange(256, dtype=torch.int32)[:, None]), E2M1)
    mean = table[codes.long()].double().mean(0)
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0)).double()
    assert ((y - mean >= 0) & (y - mean < step / 256)).all()


def test_the_mean_over_seeds_comes_close_to_x():
    x = random_normal(16, 64, dtype=F32)
    total = torch.zeros(16, 64, dtype=torch.float64)
    for seed in range(200):
        parts = nvfp4_quantize_stochastic(x, torch.tensor([seed, 7]), backend="reference")
        total += nvfp4_dequantize(*parts, out_dtype=F32, backend="reference")
    nearest = nvfp4_dequantize(*nvfp4_quantize(x, backend="reference"), out_dtype=F32, backend="reference")
    held = (x.abs().view(16, 4, 16).amax(-1, keepdim=True) * 0.9 > x.abs().view(16, 4, 16)).view(16, 64)  # not cut at 6
    assert ((total / 200 - x)[held].norm()) < 0.2 * (nearest - x)[held].norm()


def test_bytes_without_a_choice_change_nothing():
    """Values of e2m1 never move, whatever the bytes are."""
    grid = torch.tensor([float(v) for v in VALUES] + [-float(v) for v in VALUES])
    x = grid.repeat(8, 1)
    for seed in range(3):
        codes = quantized(x, random_bits(8, 16, dtype=U8, seed=seed), torch.tensor(2688.0))[0]
        assert codes.tolist() == 8 * [list(range(16))]
