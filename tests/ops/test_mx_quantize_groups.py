"""mx_quantize_groups: codes and scale bytes by hand, and the three ops that it consists of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import check
from mxspec.spec import random_normal
from tests.helpers import ends, u8


def test_golden_along_k():
    """Two tokens, 1.75 and 448, in two groups: scales 2^-8 and 2^0, codes 0x7e; each scale begins its own tile."""
    x = torch.tensor([[1.75], [448.0]]).expand(2, 32)
    qdata, scale, start, end = mxspec.mx_quantize_groups(x, ends(1, 2))
    assert (qdata.shape, scale.shape) == ((384, 32), (640, 4))
    assert (start.tolist(), end.tolist()) == ([0, 128], [128, 256])
    assert u8(qdata).nonzero().tolist() == [[row, k] for row in (0, 128) for k in range(32)]
    assert u8(qdata)[[0, 128]].unique().tolist() == [0x7E]
    assert u8(scale).flatten().nonzero().flatten().tolist() == [0, 512]  # the tile of each group
    assert u8(scale).flatten()[[0, 512]].tolist() == [119, 127]


def test_golden_along_the_tokens():
    """Group 0 has 40 tokens of 448: two blocks, the second with 24 rows of padding. Group 1 has one token of 1.75."""
    x = torch.full((41, 1), 448.0)
    x[40] = 1.75
    qdata, scale, *_ = mxspec.mx_quantize_groups(x, ends(40, 41), axis=-2)
    assert (qdata.shape, qdata.stride(), scale.shape) == ((384, 1), (1, 384), (128, 20))
    assert u8(qdata).flatten().nonzero().flatten().tolist() == [*range(40), 128]
    assert u8(scale).flatten().nonzero().flatten().tolist() == [0, 1, 512]  # group 1 begins at 128 / 32 * 128 bytes
    assert u8(scale).flatten()[[0, 1, 512]].tolist() == [127, 127, 119]


def test_golden_plain_scales():
    x = torch.full((1, 32), -448.0)
    qdata, scale, *_ = mxspec.mx_quantize_groups(x, ends(1), scale_layout="plain")
    assert scale.shape == (256, 1)
    assert u8(scale).flatten().nonzero().tolist() == [[0]]
    assert u8(qdata)[0].tolist() == [0xFE] * 32


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=5),
    rest=st.integers(0, 3),
    axis=st.sampled_from((-1, -2)),
    pad_to=st.sampled_from((128, 256)),
    scaling=st.sampled_from(("floor", "rceil")),
)
def test_each_group_is_quantized_as_if_alone(sizes, rest, axis, pad_to, scaling):
    """Group by group with the 2-D ops, as a person would write it who knows the sizes."""
    x, offs = random_normal(sum(sizes) + rest, 64), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    qdata, scale, start, end = mxspec.mx_quantize_groups(x, offs, axis=axis, pad_to=pad_to, scaling=scaling)
    for g, size in enumerate(sizes):
        begin, stop = int(start[g]), int(end[g])
        padded = torch.zeros(-(-size // pad_to) * pad_to, 64, dtype=x.dtype)
        padded[:size] = x[int(offs[g]) - size : int(offs[g])]
        assert padded.shape[0] == stop - begin
        q, s = mxspec.mx_quantize(padded, axis=axis, scaling=scaling, scale_layout="blocked")
        assert u8(qdata[begin:stop]).equal(u8(q))
        per_row = 4 if axis == -1 else scale.shape[0] // 32
        assert u8(scale).flatten()[begin * per_row : stop * per_row].equal(u8(s))
    last = int(end[-1]) if sizes else 0
    assert not u8(qdata[last:]).any()
    assert not u8(scale).flatten()[last * (4 if axis == -1 else scale.shape[0] // 32) :].any()


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_power_of_two_moves_scales_and_nothing_else(axis):
    x, offs = random_normal(200, 64), ends(70, 200)
    q0, s0, *_ = mxspec.mx_quantize_groups(x, offs, axis=axis)
    q1, s1, *_ = mxspec.mx_quantize_groups(x * 8, offs, axis=axis)
    assert u8(q0).equal(u8(q1))
    assert u8(s1)[u8(s0) > 0].equal(u8(s0)[u8(s0) > 0] + 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the interpreter would take minutes")
@pytest.mark.parametrize("elem_dtype", ["e4m3fn", "e2m1"])
@pytest.mark.parametrize("scale_layout", ["blocked", "plain"])
def test_programs_of_several_tiles(scale_layout, elem_dtype):
    """A large matrix: a program owns several tiles of a row of tiles, and the last program has fewer."""
    x, offs = random_normal(32768, 7200).cuda(), ends(1, 1, 200, 5000, 5128, 20000, 20001, 31000).cuda()
    options = {"scale_layout": scale_layout, "elem_dtype": elem_dtype}
    got = mxspec.mx_quantize_groups(x, offs, backend="triton", **options)
    want = mxspec.mx_quantize_groups(x, offs, backend="reference", **options)
    for mine, theirs in zip(got, want, strict=True):
        assert u8(mine).equal(u8(theirs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the interpreter would take minutes")
@pytest.mark.parametrize("backend", ["triton", "helion"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_thousand_groups(backend, axis):
    sizes = torch.randint(0, 40, (1000,), generator=torch.Generator().manual_seed(0))
    offs = sizes.cumsum(0, dtype=torch.int32)
    x = random_normal(int(offs[-1]) + 3, 160)
    for op, args, kwargs in [
        (mxspec.mx_quantize_groups, (x, offs), {"axis": axis}),
        (mxspec.pad_token_groups, (x, offs, 32), {}),
        (mxspec.to_blocked_m_groups, (x.view(torch.uint8), offs), {}),
    ]:
        got = op(*check.on_device(torch.device("cuda"), args), backend=backend, **kwargs)
        expected = op(*args, backend="reference", **kwargs)
        assert all(u8(g.cpu()).equal(u8(e)) for g, e in zip(got, expected, strict=True))
