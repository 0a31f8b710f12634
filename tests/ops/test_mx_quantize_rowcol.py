"""Goldens for mx_quantize_rowcol, computed by hand, and its equality with mx_quantize along each axis."""

import pytest
import torch

import mxspec
from mxspec.spec import random_bits
from tests.helpers import u8


def test_golden_one_number_a_row_and_a_column():
    """448 on the diagonal and 1 beside it: the largest of every block is 448, so every scale is 2^0 and 1 is 0x38."""
    x = torch.eye(32) * 448 + torch.eye(32).roll(1, 1)
    q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(x)
    assert u8(s_row).tolist() == u8(s_col).tolist() == [[127]] * 32
    expected = (torch.eye(32) * 0x7E + torch.eye(32).roll(1, 1) * 0x38).to(torch.uint8)
    assert u8(q_row).equal(expected)
    assert u8(q_col.contiguous()).equal(expected)


def test_golden_each_direction_has_its_own_scale():
    """Row 0 holds 2^0 .. 2^31. The row has one scale, 2^(31 - 8); along the columns each number has its own scale."""
    x = torch.zeros(32, 32)
    x[0] = torch.arange(32.0).exp2()
    q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(x, scaling="floor")
    assert u8(s_row)[0].tolist() == [127 + 31 - 8]
    assert u8(s_row)[1:].eq(0).all()
    assert q_row[0].float().tolist()[-3:] == [64.0, 128.0, 256.0]
    assert u8(s_col)[:, 0].tolist() == [127 + n - 8 for n in range(32)]
    assert q_col[0].float().tolist() == [256.0] * 32


def test_golden_a_nan_takes_its_row_block_and_its_column_block():
    x = torch.ones(64, 64)
    x[40, 3] = torch.nan
    q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(x)
    assert u8(s_row)[40].tolist() == [255, 119]
    assert u8(s_col)[3].tolist() == [119, 255]
    assert q_row.float().isnan().nonzero().tolist() == [[40, k] for k in range(32)]
    assert q_col.float().isnan().nonzero().tolist() == [[m, 3] for m in range(32, 64)]


def test_strides():
    q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(torch.zeros(2, 64, 96))
    assert (q_row.stride(), q_col.stride()) == ((6144, 96, 1), (6144, 1, 64))
    assert (s_row.shape, s_col.shape) == ((2, 64, 3), (2, 96, 2))


def test_golden_e2m1_shares_a_byte_along_either_direction():
    """6 on the diagonal and 1 beside it, codes 7 and 2. In q_row two columns share a byte; in q_col two rows."""
    x = torch.eye(32) * 6 + torch.eye(32).roll(1, 1)
    q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(x, elem_dtype="e2m1")
    assert u8(s_row).tolist() == u8(s_col).tolist() == [[127]] * 32
    assert (q_row.shape, q_row.stride()) == ((32, 16), (16, 1))
    assert (q_col.shape, q_col.stride()) == ((16, 32), (1, 16))
    assert u8(q_row)[:3, :3].tolist() == [[0x27, 0x00, 0x00], [0x70, 0x02, 0x00], [0x00, 0x27, 0x00]]
    assert u8(q_col)[:3, :4].tolist() == [[0x07, 0x72, 0x20, 0x00], [0x00, 0x00, 0x07, 0x72], [0x00, 0x00, 0x00, 0x00]]


@pytest.mark.parametrize("scale_layout", ["plain", "blocked"])
@pytest.mark.parametrize("elem_dtype", ["e4m3fn", "e2m1"])
def test_it_is_the_two_single_ops(scale_layout, elem_dtype):
    x = random_bits(96, 160, dtype=torch.bfloat16)
    options = {"scale_layout": scale_layout, "elem_dtype": elem_dtype}
    both = mxspec.mx_quantize_rowcol(x, **options)
    single = [*mxspec.mx_quantize(x, **options)]
    single += mxspec.mx_quantize(x, axis=-2, **options)
    for got, expected in zip(both, single, strict=True):
        assert got.stride() == expected.stride()
        assert u8(got).equal(u8(expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: what would differ from run to run is a race")
@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("backend", ["triton", "helion"])
def test_a_thousand_runs_give_one_result(backend, layout):
    x = random_bits(1056, 1184, dtype=torch.bfloat16).cuda()
    first = mxspec.mx_quantize_rowcol(x, scale_layout=layout, backend=backend)
    for _ in range(1000):
        again = mxspec.mx_quantize_rowcol(x, scale_layout=layout, backend=backend)
        assert all(u8(a).equal(u8(b)) for a, b in zip(first, again, strict=True))
