"""rules.flashinfer: an interval that holds every result of an approximate reciprocal, and not much more."""

from fractions import Fraction

import pytest
import torch

from mxspec import nvfp4_quantize, rules
from mxspec.reference.to_blocked import to_blocked
from mxspec.rules.flashinfer import _HIGH, _LOW, _product, _reciprocal
from mxspec.spec import random_normal
from tests.engine.nvfp4_pairs import IN_RANGE, every_pair

FLASHINFER = rules.flashinfer
SMALLEST_NORMAL = 2.0**-126


def bounds(x):
    x = torch.tensor(x)
    return tuple(_reciprocal(x, end).item() for end in (_LOW, _HIGH))


@pytest.mark.parametrize("exponent", [-125, -60, 0, 1, 90, 125])
def test_the_bounds_of_a_reciprocal_are_within_one_unit_and_as_wide_as_that_allows(exponent):
    fractions = [0, 1, 2, 2**22, 2**23 - 1, *torch.randint(2**23, (200,)).tolist()]
    for fraction in fractions:
        x = (1 + fraction * 2.0**-23) * 2.0**exponent
        low, high = bounds(x)
        exact = 1 / Fraction(x)
        unit = Fraction(2) ** (-exponent - 23 - (fraction != 0))
        assert low <= exact <= high
        assert exact - unit <= low or low == 0
        assert high <= exact + unit
        step = torch.nextafter(torch.tensor([low, high]), torch.tensor([-torch.inf, torch.inf])).tolist()
        assert low in (0, SMALLEST_NORMAL) or step[0] < exact - unit
        assert high == torch.inf or step[1] > exact + unit


@pytest.mark.parametrize(
    ("x", "reciprocal"), [(0.0, torch.inf), (2.0**-127, torch.inf), (torch.inf, 0.0), (2.0**127, 0.0)]
)
def test_a_subnormal_number_counts_as_0(x, reciprocal):
    assert bounds(x) == (reciprocal, reciprocal)


def test_a_product_that_rounds_to_the_smallest_normal_number_may_be_0():
    x, y = torch.tensor(1.5), torch.tensor(SMALLEST_NORMAL / 1.5)
    assert x.double() * y.double() < SMALLEST_NORMAL
    assert [_product(x, y, end).item() for end in (_LOW, _HIGH)] == [0, SMALLEST_NORMAL]
    assert [_product(-x, y, end).item() for end in (_LOW, _HIGH)] == [0, -SMALLEST_NORMAL]


@pytest.fixture(scope="module")
def pairs():
    x, amax = every_pair()
    low, high = (t.view(torch.uint8)[..., 0].int() for t in FLASHINFER.nvfp4_scales(x, amax))
    return x, amax, low, high


def test_most_scales_are_certain_and_the_others_are_neighbours(pairs):
    _, _, low, high = pairs
    assert ((high - low)[IN_RANGE] >= 0).all()
    assert (high - low)[IN_RANGE].max() == 1
    assert ((high != low) & IN_RANGE).sum() == 323  # of 204,864


# Pairs, of 204,864, whose scale byte FlashInfer cannot write.
OUTSIDE = {"vllm": 0, "contract": 13, "torchao": 62, "modelopt": 76, "te": 178, "compressed_tensors": 3145}


@pytest.mark.parametrize("peer", OUTSIDE)
def test_how_many_scales_of_a_rule_are_outside(peer, pairs):
    x, amax, low, high = pairs
    rule = nvfp4_quantize if peer == "contract" else getattr(rules, peer).nvfp4_quantize
    byte = rule(x, amax)[1].view(torch.uint8)[..., 0].int()
    assert (((byte < low) | (byte > high)) & IN_RANGE).sum() == OUTSIDE[peer]


def test_it_allows_the_result_of_exact_reciprocals(pairs):
    x, amax, *_ = pairs
    assert FLASHINFER.nvfp4_allows(x, *rules.vllm.nvfp4_quantize(x, amax)[:2], amax)[IN_RANGE].all()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_layout", ["plain", "blocked"])
def test_it_allows_the_scales_of_the_contract_and_all_of_exact_reciprocals(axis, dtype, scale_layout):
    x = random_normal(2, 96, 160, dtype=dtype)
    low, high = FLASHINFER.nvfp4_scales(x, axis=axis, scale_layout=scale_layout)
    scale = nvfp4_quantize(x, axis=axis, scale_layout=scale_layout)[1]
    low, high, byte = (t.view(torch.uint8) for t in (low, high, scale))
    assert ((low <= byte) & (byte <= high)).all()
    assert (high - low).max() <= 1
    qdata, scale, _ = rules.vllm.nvfp4_quantize(x, axis=axis, scale_layout=scale_layout)
    for given in ((qdata, scale), (qdata.view(torch.uint8), scale.view(torch.uint8))):
        allowed = FLASHINFER.nvfp4_allows(x, *given, axis=axis, scale_layout=scale_layout)
    assert allowed.shape == ((2, 96, 10) if axis == -1 else (2, 160, 6))
    assert allowed.all()


def test_it_refuses_another_scale_and_another_code():
    x = random_normal(64, 64, dtype=torch.bfloat16)
    qdata, scale, _ = nvfp4_quantize(x)
    for other in (-1, 1):
        assert not FLASHINFER.nvfp4_allows(x, qdata, scale.view(torch.uint8) + other).any()
    codes = qdata.view(torch.uint8)
    for changed in (0x08, 0x01, 0x80, 0x10):  # the sign of either code, and its last bit
        wrong = codes.clone()
        wrong[:, ::8] ^= changed
        assert not FLASHINFER.nvfp4_allows(x, wrong.view(qdata.dtype), scale).any()


def one_block(*numbers):
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, : len(numbers)] = torch.tensor(numbers)
    return x


def test_zeros_keep_their_sign_and_under_a_scale_of_0_all_codes_are_6():
    zero, scale = one_block(0.0, -0.0), torch.zeros(1, 1, dtype=torch.uint8)
    amax = torch.tensor(2688.0)
    codes = torch.zeros(1, 8, dtype=torch.uint8)
    codes[0, 0] = 0x80
    assert FLASHINFER.nvfp4_allows(zero, codes, scale, amax).all()
    codes[0, 0] = 0x00
    assert not FLASHINFER.nvfp4_allows(zero, codes, scale, amax).any()
    small = one_block(2.0**-12, -(2.0**-12))
    assert [t.view(torch.uint8).item() for t in FLASHINFER.nvfp4_scales(small, amax)] == [0, 0]
    codes[:] = 0x77
    codes[0, 0] = 0xF7
    assert FLASHINFER.nvfp4_allows(small, codes, scale, amax).all()


def test_where_the_factor_may_be_infinite_a_zero_keeps_its_sign_or_becomes_6():
    x = one_block(6 * SMALLEST_NORMAL, -0.0, 0.0)
    amax, scale = torch.tensor(2688 * SMALLEST_NORMAL), torch.full((1, 1), 0x38, dtype=torch.uint8)
    assert FLASHINFER.nvfp4_scales(x, amax)[1].view(torch.uint8).item() == 0x38
    for first, second, allowed in ((8, 0, True), (7, 7, True), (15, 0, False), (8, 3, False), (0, 0, False)):
        codes = torch.zeros(1, 8, dtype=torch.uint8)
        codes[0, 0], codes[0, 1] = 7 | first << 4, second
        assert FLASHINFER.nvfp4_allows(x, codes, scale, amax).item() == allowed, (first, second)


def test_a_matrix_of_zeros_has_nan_scales():
    low, high = FLASHINFER.nvfp4_scales(one_block())
    assert low.view(torch.uint8).item() == high.view(torch.uint8).item() == 0x7F
    assert FLASHINFER.nvfp4_allows(one_block(), torch.zeros(1, 8, dtype=torch.uint8), low).all()


def test_where_b_may_be_flushed_beside_an_infinite_G_the_scale_is_nan_or_448():
    x, codes = one_block(6 * SMALLEST_NORMAL), torch.full((1, 8), 0x77, dtype=torch.uint8)
    assert [t.view(torch.uint8).item() for t in FLASHINFER.nvfp4_scales(x)] == [0x7F, 0x7E]
    for byte, allowed in ((0x7F, True), (0x7E, True), (0x7D, False), (0xFF, False)):
        scale = torch.full((1, 1), byte, dtype=torch.uint8)
        assert FLASHINFER.nvfp4_allows(x, codes, scale).item() == allowed, byte


def test_what_it_refuses():
    x = one_block(1.0)
    qdata, scale, _ = nvfp4_quantize(x)
    for wrong in (x.float(), x.double()):
        with pytest.raises(TypeError, match=r"nvfp4_scales: x has dtype .*; needs torch.bfloat16 or torch.float16$"):
            FLASHINFER.nvfp4_scales(wrong)
    with pytest.raises(ValueError, match="nvfp4_scales: the rule of FlashInfer reads values"):
        FLASHINFER.nvfp4_scales(x.to("meta"))
    for layout in ("foo", None):
        with pytest.raises(ValueError, match="nvfp4_allows: scale_layout"):
            FLASHINFER.nvfp4_allows(x, qdata, scale, scale_layout=layout)
    for name, given in (
        ("scale", (qdata, scale.view(torch.int8))),
        ("scale", (qdata, scale.view(torch.float8_e5m2))),
        ("scale", (qdata, scale.float())),
        ("qdata", (qdata.view(torch.float8_e4m3fn), scale)),
        ("qdata", (None, scale)),
    ):
        with pytest.raises(TypeError, match=f"nvfp4_allows: {name} "):
            FLASHINFER.nvfp4_allows(x, *given)
    with pytest.raises(ValueError, match="nvfp4_allows: x is on cpu and scale on meta; needs one device"):
        FLASHINFER.nvfp4_allows(x, qdata, scale.to("meta"))
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="needs finite numbers"):
            FLASHINFER.nvfp4_scales(one_block(bad))
        with pytest.raises(ValueError, match="needs finite numbers"):
            FLASHINFER.nvfp4_scales(x, torch.tensor(bad))
    with pytest.raises(ValueError, match="nvfp4_allows: scale"):
        FLASHINFER.nvfp4_allows(x, qdata, scale.expand(2, 1))
    with pytest.raises(ValueError, match="nvfp4_allows: qdata"):
        FLASHINFER.nvfp4_allows(x, qdata.expand(2, -1), scale)
    for blocked in (to_blocked(scale).expand(2, -1), to_blocked(scale)[:500]):
        with pytest.raises(ValueError, match="nvfp4_allows: scale has shape"):
            FLASHINFER.nvfp4_allows(x, qdata, blocked, scale_layout="blocked")
