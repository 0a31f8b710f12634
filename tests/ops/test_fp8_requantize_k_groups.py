"""fp8_requantize_k_groups: codes and scales by hand, the ops that it consists of, the cost of the second rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends, u8

BF16, F32 = torch.bfloat16, torch.float32
OF_ZEROS = 0x2720D7C5  # 1e-12 / 448, the stored scale of a block of zeros


def requantize(*args, **options):
    return mxspec.fp8_requantize_k_groups(*args, backend="reference", **options)


def codes(M, D=16):
    return torch.zeros(M, D, dtype=torch.float8_e4m3fn)


def test_golden_a_value_is_the_product_of_its_code_and_its_tokens_scale():
    """Feature 0 is 448 * 1 and 224 * 4 = 896: its block is scaled by 2. Feature 1 is 0 and 1 * 4."""
    q, scale = codes(3), torch.tensor([[1.0], [4.0], [8.0]])
    q[0, 0], q[1, 0], q[1, 1] = 448.0, 224.0, 1.0
    qdata, of_columns, start, end = requantize(q, scale, ends(3))
    assert (qdata.shape, of_columns.shape, of_columns.stride()) == ((16, 256), (16, 2), (1, 16))
    assert (start.tolist(), end.tolist()) == ([0], [128])
    flat = u8(qdata).flatten()
    assert flat[:3].tolist() == [0x76, 0x7E, 0]  # 224 and 448
    assert flat[128:131].tolist() == [0, 0x7E, 0]
    assert flat.nonzero().flatten().tolist() == [0, 1, 129]
    # 448 / 4 is 112, and the stored scale is 1 / 112: 8/7 * 2^-7, with the mantissa 2^23 / 7 = 0x124924.9.
    bits = of_columns[:, 0].view(torch.int32).tolist()
    assert bits == [0x40000000, 0x3C124925] + [OF_ZEROS] * 14
    assert of_columns[:, 1].tolist() == [0.0] * 16


def test_golden_each_block_of_features_has_its_own_scale_and_each_group_its_own_matrix():
    """130 tokens and 1 token. Feature 3 lies in the first block of 128 features, and feature 130 in the second."""
    q, scale = codes(132, 144), torch.ones(132, 2)
    q[129, 3], q[129, 130], q[130, 130], q[131] = 448.0, 448.0, -448.0, torch.nan
    scale[129], scale[130, 1], scale[131] = torch.tensor([2.0, 0.5]), 0.25, torch.nan
    qdata, of_columns, _, end = requantize(q, scale.mT.contiguous().mT, ends(130, 131))
    assert end.tolist() == [256, 384]
    # Group 0 is (144, 256) from place 0 on, group 1 is (144, 128) from place 144 * 256 on.
    places = [3 * 256 + 129, 130 * 256 + 129, 144 * 256 + 130 * 128]
    flat = u8(qdata).flatten()
    assert flat.nonzero().flatten().tolist() == places
    assert flat[places].tolist() == [0x7E, 0x7E, 0xFE]
    assert (of_columns[3, 1].item(), of_columns[130, 1:4].tolist()) == (2.0, [0.5, 0.25, 0.0])


def test_golden_the_values_are_rounded_to_dtype():
    """448 * (1 + 2^-9) = 448.875 is a number of fp32. In bfloat16 the numbers near it are 2 apart: it becomes 448."""
    q, scale = codes(1), torch.tensor([[1 + 2.0**-9]])
    q[0, 0] = 448.0
    for dtype, back in ((F32, 1 + 2.0**-9), (BF16, 1.0)):
        qdata, of_columns, *_ = requantize(q, scale, ends(1), dtype=dtype)
        assert (u8(qdata)[0, 0].item(), of_columns[0, 0].item()) == (0x7E, back)


def test_golden_a_value_beyond_bfloat16_is_inf_and_its_block_nan():
    """The largest fp32 number, 2^128 - 2^104, rounds to 2^128 in bfloat16, which is Inf."""
    q, scale = codes(130), torch.ones(130, 1)
    q[129, 5], scale[129] = 1.0, torch.finfo(F32).max
    for dtype, nan in ((F32, False), (BF16, True)):
        qdata, of_columns, *_ = requantize(q, scale, ends(130), dtype=dtype)
        lines = u8(qdata).flatten()[: 16 * 256].view(16, 256)
        assert of_columns[:, :2].isnan().nonzero().tolist() == ([[5, 1]] if nan else [])
        assert lines[5, 128:].tolist() == ([0x7F] * 128 if nan else [0, 0x7E] + [0] * 126)
        assert not lines[5, :128].any()


def test_golden_special_scales():
    """A NaN scale makes 16 features NaN. Inf times 0 is NaN, and Inf times 1 is Inf. A scale may be negative, or 0."""
    q, scale = codes(5), torch.tensor([[1.0], [torch.inf], [-2.0], [0.0], [torch.nan]])
    q[:, 0] = 1.0
    qdata, of_columns, *_ = requantize(q, scale, ends(1, 2, 3, 4, 5))  # each token is a group of its own
    first_two = u8(qdata).flatten()[: 5 * 16 * 128].view(5, 16, 128)[:, :2, 0]
    assert first_two.tolist() == [[0x7E, 0], [0x7F, 0x7F], [0xFE, 0x80], [0, 0], [0x7F, 0x7F]]
    assert of_columns[0, :5].isnan().tolist() == [False, True, False, False, True]
    assert of_columns[1, :5].isnan().tolist() == [False, True, False, False, True]
    assert of_columns[:2, 3].view(torch.int32).tolist() == [OF_ZEROS] * 2


def test_golden_a_power_of_two_keeps_the_codes_that_stay_normal():
    """448 beside 1.125 * 2^-6 keeps the latter: 2^-6 is the smallest normal number of e4m3fn. Beside 448 * 2^1 it loses
    its last bit: 1.125 * 2^-7 is 4.5 times 2^-9, a tie between 4 and 5 times 2^-9 that becomes 4.
    """
    q, scale = codes(2), torch.tensor([[1.0], [2.0**-6]])
    q[0, 0], q[1, 0], q[0, 1], q[1, 1] = 448.0, 1.125, 448.0, 1.125
    for row, wanted in ((1.0, [0x7E, 0x09]), (2.0, [0x7E, 0x04])):
        scale[0] = row
        qdata, of_columns, *_ = requantize(q, scale, ends(2), scale_format="pow2")
        assert u8(qdata).flatten()[:2].tolist() == wanted
        assert of_columns[0, 0].item() == row


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=5),
    rest=st.integers(0, 3),
    scale_format=st.sampled_from(("fp32", "pow2")),
    dtype=st.sampled_from((BF16, F32)),
)
def test_each_group_is_requantized_as_if_alone(sizes, rest, scale_format, dtype):
    D = 144
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    q, s = mxspec.fp8_quantize_1x128(random_normal(sum(sizes) + rest, D), scale_format=scale_format)
    qdata, scale, _, end = requantize(q, s, offs, dtype=dtype, scale_format=scale_format)
    made = []
    for g, size in enumerate(sizes):
        mine = slice(int(offs[g]) - size, int(offs[g]))
        values = mxspec.fp8_dequantize(q[mine], s[mine], out_dtype=dtype)
        padded = torch.nn.functional.pad(values, (0, 0, 0, -size % 128))
        made.append(mxspec.fp8_quantize_1x128(padded, axis=-2, scale_format=scale_format))
    tokens = int(end[-1]) if sizes else 0
    if sizes:
        assert u8(qdata).flatten()[: D * tokens].equal(torch.cat([u8(codes.mT).flatten() for codes, _ in made]))
        assert scale[:, : tokens // 128].equal(torch.cat([of for _, of in made], 1))
    assert not u8(qdata).flatten()[D * tokens :].any()
    assert not scale[:, tokens // 128 :].any()


def values_of(qdata, scale, M):
    """The values of the codes of one group of M tokens, `(M, D)`."""
    D, width = len(qdata), -(-M // 128) * 128
    lines = qdata.flatten()[: D * width].view(D, width)
    return mxspec.fp8_dequantize(lines, scale[:, : width // 128], out_dtype=F32).mT[:M]


@pytest.mark.parametrize(("scale_format", "least_db", "most_db"), [("fp32", 2.7, 3.3), ("pow2", -0.01, 0.01)])
def test_the_second_rounding_costs_3_db_with_fp32_scales_and_nothing_with_powers_of_two(
    scale_format, least_db, most_db
):
    """Two roundings of one size have twice the noise of a single rounding. With few blocks the size varies a little."""
    x, offs = random_normal(1024, 256, dtype=F32), ends(1024)
    q, s = mxspec.fp8_quantize_1x128(x, scale_format=scale_format)
    twice = values_of(*requantize(q, s, offs, scale_format=scale_format)[:2], 1024)
    once = values_of(*mxspec.fp8_quantize_k_groups(x, offs, scale_format=scale_format)[:2], 1024)
    noise = [(x.double() - values.double()).square().sum().log10().mul(10).item() for values in (twice, once)]
    assert least_db < noise[0] - noise[1] < most_db


def test_powers_of_two_round_only_what_a_larger_scale_makes_subnormal():
    x = random_normal(256, 128, dtype=F32) * torch.logspace(0, 9, 256, base=2)[:, None]
    q, s = mxspec.fp8_quantize_1x128(x, scale_format="pow2")
    before = mxspec.fp8_dequantize(q, s, out_dtype=F32)
    qdata, of_columns, *_ = requantize(q, s, ends(256), scale_format="pow2")
    after = values_of(qdata, of_columns, 256)
    of_tokens = of_columns[:, :2].repeat_interleave(128, 1).mT
    rounded = before != after
    assert 100 < int(rounded.sum()) < rounded.numel() // 10
    assert ((of_tokens > s) & (before.abs() < of_tokens * 2.0**-6))[rounded].all()


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("fp8_requantize_k_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 64), (1024, 64))))
    args = case.args()
    assert (case.name, args[1].stride(), args[2].shape) == ("1024x64, G 8", (1, 1024), (8,))
    assert op(*args, check_offs=True)[0].shape == (64, 2048)
    assert op.spec.flops(args, ()) == 3 * 1024 * 64
