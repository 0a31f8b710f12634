"""nvfp4_quantize_groups: codes, scales and tensor scales by hand, and the three ops that it consists of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec.spec import random_normal
from tests.helpers import ends, u8


def test_golden_along_k():
    """Two tokens, 1.5 and 6, in two groups: each is the largest of its group, so both have the scale 448 = 0x7e."""
    x = torch.tensor([[1.5], [6.0]]).expand(2, 16)
    qdata, scale, tensor_scale, start, end = mxspec.nvfp4_quantize_groups(x, ends(1, 2))
    assert (qdata.shape, scale.shape, qdata.is_contiguous()) == ((384, 8), (640, 4), True)
    assert (start.tolist(), end.tolist()) == ([0, 128], [128, 256])
    assert u8(qdata).nonzero().tolist() == [[row, k] for row in (0, 128) for k in range(8)]
    assert u8(qdata)[[0, 128]].unique().tolist() == [0x77]
    assert u8(scale).flatten().nonzero().flatten().tolist() == [0, 512]  # the tile of each group
    assert u8(scale).flatten()[[0, 512]].tolist() == [0x7E, 0x7E]
    assert tensor_scale.tolist() == [torch.tensor(1.5 / 2688).item(), torch.tensor(6 / 2688).item()]


def test_golden_along_the_tokens():
    """Group 0 has 20 tokens: two blocks, the second with 12 rows of padding. Group 1 has one token."""
    x = torch.full((21, 1), 12.0)
    x[16:20], x[20] = -6.0, 0.5
    qdata, scale, tensor_scale, *_ = mxspec.nvfp4_quantize_groups(x, ends(20, 21), axis=-2)
    assert (qdata.shape, qdata.stride(), scale.shape) == ((192, 1), (1, 192), (128, 384 // 16 + 8))
    codes = u8(qdata).flatten()
    assert codes.nonzero().flatten().tolist() == [*range(10), 64]
    assert codes[:10].tolist() == 8 * [0x77] + 2 * [0xFF]
    assert codes[64] == 0x07
    assert u8(scale).flatten().nonzero().flatten().tolist() == [0, 1, 1024]  # group 1 begins at 128 / 16 * 128 bytes
    assert u8(scale).flatten()[[0, 1, 1024]].tolist() == [0x7E, 0x76, 0x7E]  # 448, 224, 448
    assert tensor_scale.tolist() == [torch.tensor(amax / 2688).item() for amax in (12.0, 0.5)]


def test_golden_plain_scales_and_a_given_amax():
    x = torch.full((3, 16), -6.0)
    amax = torch.tensor([2688.0, 5.0, 1344.0])
    qdata, scale, tensor_scale, *_ = mxspec.nvfp4_quantize_groups(x, ends(1, 1, 3), amax, scale_layout="plain")
    assert scale.shape == (512, 1)
    assert u8(scale).flatten().nonzero().flatten().tolist() == [0, 128, 129]
    assert u8(scale)[[0, 128, 129], 0].tolist() == [0x38, 0x40, 0x40]  # 1, and 2 for half of the amax
    assert u8(qdata)[0].tolist() == [0xFF] * 8
    assert tensor_scale.tolist() == [1.0, torch.tensor(5 / 2688).item(), 0.5]  # an empty group has its given amax


def test_golden_groups_without_tokens_and_groups_of_nan():
    x = torch.ones(3, 64)
    x[1, 5] = torch.nan
    qdata, scale, tensor_scale, start, end = mxspec.nvfp4_quantize_groups(x, ends(1, 1, 2, 3))
    assert (start.tolist(), end.tolist()) == ([0, 128, 128, 256], [128, 128, 256, 384])
    assert tensor_scale.isnan().tolist() == [False, False, True, False]
    assert tensor_scale[1] == 0
    assert u8(qdata)[128:256].unique().tolist() == [0x77]  # the group and its padding
    assert u8(scale)[128:256].unique().tolist() == [0x7F]
    assert u8(qdata)[384:].unique().tolist() == [0]
    assert u8(qdata)[256, 0] == 0x77
    assert u8(qdata)[257:384].unique().tolist() == [0]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=5),
    rest=st.integers(0, 3),
    axis=st.sampled_from((-1, -2)),
    pad_to=st.sampled_from((128, 256)),
    given_amax=st.booleans(),
    K=st.sampled_from((16, 64, 144)),
)
def test_each_group_is_quantized_as_if_alone(sizes, rest, axis, pad_to, given_amax, K):
    """Group by group with the 2-D ops, as a person would write it who knows the sizes."""
    x, offs = random_normal(sum(sizes) + rest, K), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    amax = torch.arange(len(sizes)) * 5.0 + 0.3 if given_amax else None
    options = {"axis": axis, "backend": "reference"}
    qdata, scale, tensor_scale, start, end = mxspec.nvfp4_quantize_groups(x, offs, amax, pad_to=pad_to, **options)
    plain = mxspec.nvfp4_quantize_groups(x, offs, amax, pad_to=pad_to, scale_layout="plain", **options)
    assert u8(plain[0]).equal(u8(qdata))
    for g, size in enumerate(sizes):
        begin, stop = int(start[g]), int(end[g])
        padded = torch.zeros(-(-size // pad_to) * pad_to, K, dtype=x.dtype)
        padded[:size] = x[int(offs[g]) - size : int(offs[g])]
        assert padded.shape[0] == stop - begin
        of_group = None if amax is None else amax[g]
        q, s, T = mxspec.nvfp4_quantize(padded, of_group, scale_layout="blocked", **options)
        assert T.equal(tensor_scale[g])
        rows = slice(begin, stop) if axis == -1 else slice(begin // 2, stop // 2)
        assert u8(qdata[rows]).equal(u8(q))
        unit = scale.shape[1] if axis == -1 else scale.shape[0] // 16
        assert u8(scale).flatten()[begin * unit : stop * unit].equal(u8(s))
        s = mxspec.nvfp4_quantize(padded, of_group, **options)[1]
        got = plain[1][begin:stop] if axis == -1 else plain[1][:, begin // 16 : stop // 16]
        assert u8(got).equal(u8(s))
    last = int(end[-1]) if sizes else 0
    assert not u8(qdata[last if axis == -1 else last // 2 :]).any()
    assert not u8(scale).flatten()[last * (scale.shape[1] if axis == -1 else scale.shape[0] // 16) :].any()


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_power_of_two_moves_the_tensor_scale_of_its_group_alone(axis):
    x, offs = random_normal(200, 64), ends(70, 200)
    first = mxspec.nvfp4_quantize_groups(x, offs, axis=axis)
    x[70:] *= 8
    second = mxspec.nvfp4_quantize_groups(x, offs, axis=axis)
    assert u8(first[0]).equal(u8(second[0]))
    assert u8(first[1]).equal(u8(second[1]))
    assert (second[2] / first[2]).tolist() == [1.0, 8.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the interpreter would take minutes")
@pytest.mark.parametrize("scale_layout", ["blocked", "plain"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_programs_of_several_tiles(axis, scale_layout):
    """A large matrix: a program owns several tiles of a row of tiles, and the last program has fewer."""
    x, offs = random_normal(32768, 7184).cuda(), ends(1, 1, 200, 5000, 5128, 20000, 20001, 31000).cuda()
    options = {"axis": axis, "scale_layout": scale_layout}
    got = mxspec.nvfp4_quantize_groups(x, offs, backend="triton", **options)
    want = mxspec.nvfp4_quantize_groups(x, offs, backend="reference", **options)
    for mine, theirs in zip(got, want, strict=True):
        assert u8(mine).equal(u8(theirs))
