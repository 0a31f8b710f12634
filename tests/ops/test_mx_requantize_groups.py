"""mx_requantize_groups: codes and scale bytes by hand, the two ops that it consists of, and what it keeps."""

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
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def requantize(*args, scale_layout="plain", **options):
    return mxspec.mx_requantize_groups(*args, backend="reference", scale_layout=scale_layout, **options)


def operand(M, K=32, dtype=E4M3):
    """Codes of zeros under scale bytes of 127."""
    return torch.zeros(M, K, dtype=dtype), torch.full((M, K // 32), 127, dtype=torch.uint8)


def e8m0(byte):
    return byte.view(torch.float8_e8m0fnu)


def test_golden_a_value_is_the_product_of_its_code_and_its_tokens_scale():
    """Column 0 is 448 and 256 * 2^-7 = 2 under the scale 1. Column 1 is 1, alone: 1 * 2^8 under the scale 2^-8."""
    q, byte = operand(2)
    q[0, 0], q[0, 1], q[1, 0], byte[1] = 448.0, 1.0, 256.0, 120
    qdata, scale, start, end = requantize(q, e8m0(byte), ends(2))
    assert (qdata.shape, qdata.stride(), scale.shape) == ((256, 32), (1, 256), (32, 8))
    assert (start.tolist(), end.tolist()) == ([0], [128])
    assert u8(qdata)[:2, :2].tolist() == [[0x7E, 0x78], [0x40, 0]]
    assert u8(qdata).nonzero().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert u8(scale)[:2, 0].tolist() == [127, 119]
    assert u8(scale).nonzero().tolist() == [[0, 0], [1, 0]]


def test_golden_blocked_scales_of_two_groups():
    """40 tokens of 448 and one of 448 * 2^-8: as in the golden of mx_quantize_groups along the tokens."""
    q, byte = operand(41)
    q[:, 0], byte[40] = 448.0, 119
    qdata, scale, *_ = requantize(q, e8m0(byte), ends(40, 41), scale_layout="blocked")
    assert (qdata.shape, scale.shape) == ((384, 32), (128, 20))
    assert u8(qdata).nonzero().tolist() == [[m, 0] for m in (*range(40), 128)]
    assert u8(scale).flatten().nonzero().flatten().tolist() == [0, 1, 512]
    assert u8(scale).flatten()[[0, 1, 512]].tolist() == [127, 127, 119]


def test_golden_each_block_of_features_has_its_own_scale():
    q, byte = operand(1, 64)
    q[0, 31], q[0, 32], byte[0, 1] = 448.0, 448.0, 130
    qdata, scale, *_ = requantize(q, e8m0(byte), ends(1))
    assert u8(scale)[30:34, 0].tolist() == [0, 127, 130, 0]
    assert u8(qdata)[0, 30:34].tolist() == [0, 0x7E, 0x7E, 0]


def test_golden_nan_and_inf_stay_in_their_column():
    """A NaN code, the byte 255, and 448 * 2^127 = Inf: each makes 32 tokens of its column NaN, padding included."""
    q, byte = operand(40, 64)
    q[33, 0], byte[2, 1], q[2, 40], q[5, 3], byte[5, 0] = torch.nan, 255, 0.0, 448.0, 254
    qdata, scale, *_ = requantize(q, e8m0(byte), ends(33, 40))
    # Group 1 begins at row 128, and its blocks are those of the columns 4 on of the scale.
    nan = {(0, 3), *((0, k) for k in range(32, 64)), (4, 0)}
    assert {(j, k) for k, j in (u8(scale) == 255).nonzero().tolist()} == nan
    rows = qdata.float().isnan().nonzero().tolist()
    assert sorted(map(tuple, rows)) == sorted((32 * j + i, k) for j, k in nan for i in range(32))


def test_golden_an_inf_of_e5m2():
    q, byte = operand(1, dtype=E5M2)
    q[0, 0], q[0, 1] = -torch.inf, 57344.0
    qdata, scale, *_ = requantize(q, e8m0(byte), ends(1))
    # 57344 / 448 = 128: 1.75 * 2^15 becomes 1.75 * 2^8 under the scale 2^7.
    assert u8(scale)[:2, 0].tolist() == [255, 134]
    assert u8(qdata)[0, 1].item() == 0x7E
    assert qdata[:32, 0].float().isnan().all()
    qdata, scale, *_ = requantize(q, e8m0(byte), ends(1), elem_dtype="e5m2")
    assert (u8(scale)[1, 0].item(), u8(qdata)[0, 1].item()) == (127, 0x7B)


def test_golden_the_ends_of_the_range():
    """The smallest product, 2^-9 * 2^-127, is a number of fp32. In bfloat16 it is below 2^-134 and becomes 0."""
    q, byte = operand(1, 64)
    q[0, 0], byte[0, 0], q[0, 32], byte[0, 1] = 2.0**-9, 0, 1.875, 254
    for dtype, code in ((F32, 0x01), (BF16, 0x00)):
        qdata, scale, *_ = requantize(q, e8m0(byte), ends(1), dtype=dtype)
        assert (u8(qdata)[0, 0].item(), u8(scale)[0, 0].item()) == (code, 0)
        # 1.875 * 2^127 / 448 is above 2^119, so the scale is 2^120, and the code is 240.
        assert (qdata[0, 32].item(), u8(scale)[32, 0].item()) == (240.0, 247)


def test_golden_a_code_is_rounded_where_a_larger_scale_makes_it_subnormal():
    """1.125 * 2^-6 is a normal number of e4m3fn under the scale 1. Under the scale 2 it is 4.5 * 2^-9: a tie, to 4."""
    q, byte = operand(2)
    q[0, 0], q[1, 0], byte[1] = 448.0, 1.125, 121
    for row, wanted in ((127, 0x09), (128, 0x04)):
        byte[0] = row
        qdata, scale, *_ = requantize(q, e8m0(byte), ends(2))
        assert u8(qdata)[:2, 0].tolist() == [0x7E, wanted]
        assert u8(scale)[0, 0].item() == row


def test_golden_zeros_and_rows_of_no_group():
    q, byte = operand(3)
    q[0], q[2], byte[2] = -0.0, torch.nan, 255
    qdata, scale, *_ = requantize(q, e8m0(byte), ends(1))
    assert u8(qdata)[:3, 0].tolist() == [0x80, 0, 0]
    assert not u8(qdata)[1:].any()
    assert not u8(scale).any()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=5),
    rest=st.integers(0, 3),
    codes=st.sampled_from((E4M3, E5M2)),
    elem=st.sampled_from(("e4m3fn", "e5m2")),
    scaling=st.sampled_from(("floor", "rceil", "ceil", "even")),
    dtype=st.sampled_from((BF16, F32)),
)
def test_each_group_is_requantized_as_if_alone(sizes, rest, codes, elem, scaling, dtype):
    """Group by group with the 2-D ops, as a person would write it who knows the sizes."""
    x, offs = random_normal(sum(sizes) + rest, 64), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    q, s = mxspec.mx_quantize(x, elem_dtype=codes)
    options = {"elem_dtype": elem, "scaling": scaling}
    qdata, scale, start, end = requantize(q, s, offs, dtype=dtype, **options)
    for g, size in enumerate(sizes):
        begin, stop, mine = int(start[g]), int(end[g]), slice(int(offs[g]) - size, int(offs[g]))
        values = mxspec.mx_dequantize(q[mine], s[mine], out_dtype=dtype)
        padded = torch.nn.functional.pad(values, (0, 0, 0, stop - begin - size))
        alone, of_alone = mxspec.mx_quantize(padded, axis=-2, **options)
        assert u8(qdata[begin:stop]).equal(u8(alone))
        assert u8(scale[:, begin // 32 : stop // 32]).equal(u8(of_alone))


def test_column_codes_of_weights_from_their_row_codes():
    """The weights of E experts as E groups of N tokens, N a multiple of 128: the codes along N of each expert."""
    E, N, K = 3, 256, 96
    w = random_normal(E, N, K)
    q, s = mxspec.mx_quantize(w)
    offs = (torch.arange(E) + 1).mul(N).to(torch.int32)
    qdata, scale, *_ = requantize(q.view(E * N, K), s.view(E * N, K // 32), offs)
    wanted, of_wanted = mxspec.mx_quantize(mxspec.mx_dequantize(q, s), axis=-2)
    assert u8(qdata[: E * N].mT.unflatten(1, (E, N)).transpose(0, 1).mT).equal(u8(wanted))
    assert u8(scale[:, : E * N // 32].unflatten(1, (E, N // 32)).transpose(0, 1)).equal(u8(of_wanted))


def test_only_what_a_larger_scale_makes_subnormal_is_rounded():
    x = random_normal(256, 128, dtype=F32) * torch.logspace(0, 9, 256, base=2)[torch.randperm(256)][:, None]
    q, s = mxspec.mx_quantize(x)
    before = mxspec.mx_dequantize(q, s, out_dtype=F32)
    qdata, scale, *_ = requantize(q, s, ends(256))
    after = mxspec.mx_dequantize(qdata[:256], scale[:, :8], axis=-2, out_dtype=F32)
    of_tokens, of_rows = scale[:, :8].float().repeat_interleave(32, 1).mT, s.float().repeat_interleave(32, 1)
    rounded = before != after
    assert 100 < int(rounded.sum()) < rounded.numel() // 10
    assert ((of_tokens > of_rows) & (before.abs() < of_tokens * 2.0**-6))[rounded].all()


@pytest.mark.parametrize("elem", ["e4m3fn", "e5m2"])
def test_the_noise_is_that_of_one_quantization(elem):
    x, offs = random_normal(1024, 256, dtype=F32), ends(1024)
    twice = requantize(*mxspec.mx_quantize(x, elem_dtype=elem), offs, elem_dtype=elem)
    once = mxspec.mx_quantize_groups(x, offs, axis=-2, scale_layout="plain", elem_dtype=elem)
    read = [mxspec.mx_dequantize(q[:1024], s[:, :32], axis=-2, out_dtype=F32) for q, s, *_ in (twice, once)]
    noise = [(x.double() - values.double()).square().sum().log10().mul(10).item() for values in read]
    assert noise[0] == pytest.approx(noise[1], abs=0.01)


def test_bench_cases_are_the_matrices_and_the_weights():
    op = dispatch.reference("mx_requantize_groups")
    found = list(op.spec.bench_cases(Shapes(matrices=((64, 32), (1024, 64)), experts=((2, 32, 64),))))
    assert [case.name for case in found] == ["1024x64, G 8", "2x32x64, the weights of experts"]
    for case in found:
        q, s, offs = case.args()
        assert op(q, s, offs, check_offs=True)[0].shape[1] == q.shape[1]
