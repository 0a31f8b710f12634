"""lossless: values that it keeps are equal one by one, and values that would change are counted and named."""

import pytest
import torch

import mxspec
from mxspec.checkpoint import lossless, mxfp4_to_fp8_blocks, mxfp4_to_nvfp4
from mxspec.checkpoint.lossless import NotLossless

POWERS = torch.exp2(torch.arange(-127, 128).float())
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values(codes, scale):
    """MXFP4 in fp64."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    return E2M1[nibbles].double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


def fp8_values(q, s):
    n, k = q.shape
    return q.double() * s.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def test_every_power_of_e8m0_is_retyped_there_and_back():
    stored = lossless.retype(POWERS, torch.uint8)
    assert stored.tolist() == list(range(255))
    assert lossless.retype(stored, torch.float32).equal(POWERS)
    assert lossless.retype(POWERS, torch.float8_e8m0fnu).view(torch.uint8).equal(stored)
    assert lossless.retype(stored, torch.bfloat16).float().equal(POWERS)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 3.0, 2.0**-128, torch.inf])
def test_a_scale_that_e8m0_lacks_is_named(wrong):
    scale = torch.ones(3, 4)
    scale[1, 2] = scale[2, 0] = wrong
    found = lossless.retype(scale, torch.uint8)
    assert isinstance(found, NotLossless)
    assert (found.blocks, found.failed, found.first) == (12, 2, (1, 2))


def test_nan_is_byte_255_and_bfloat16_holds_what_it_holds():
    assert lossless.retype(torch.tensor([torch.nan]), torch.uint8).item() == 255
    assert lossless.retype(torch.tensor([0.0078125 * 3]), torch.bfloat16).item() == 0.0234375
    found = lossless.retype(torch.tensor([1.0, 1.001]), torch.bfloat16)
    assert (found.failed, found.first) == (1, (1,))
    with pytest.raises(TypeError, match=r"retype: scale is torch\.float16"):
        lossless.retype(torch.ones(1).half(), torch.uint8)


@pytest.mark.parametrize("shape", [(128, 128), (200, 320), (256, 384), (1, 32)])
def test_mxfp4_with_a_spread_of_14_becomes_fp8(shape):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(100, 115, (shape[0], shape[1] // 32), generator=generator, dtype=torch.uint8)
    scale[0, 0] = 100
    q, s = mxfp4_to_fp8_blocks(codes, scale)
    assert q.shape == shape
    assert (s.view(torch.int32) & 0x7FFFFF).eq(0).all()
    got, want = fp8_values(q, s), values(codes, scale)
    assert got.equal(want)
    assert got.signbit().equal(want.signbit())  # minus zero too


def test_a_spread_of_15_is_lossless_only_where_the_codes_allow_it():
    codes = torch.full((128, 128), 0x77, dtype=torch.uint8)  # 6.0
    scale = torch.full((128, 8), 120, dtype=torch.uint8)
    scale[5, 6] = 105
    q, s = mxfp4_to_fp8_blocks(codes, scale)  # the lowest bit of 6.0 is 2^1, two above that of 0.5
    assert fp8_values(q, s).equal(values(codes, scale))
    codes[5, 100] = 0x71  # 0.5 with the exponent 105
    found = mxfp4_to_fp8_blocks(codes, scale)
    assert (found.blocks, found.failed, found.first) == (2, 1, (0, 1))
    codes[:, 64:96] = 0x01  # the blocks of 120 keep a 6.0 in the last quarter
    assert isinstance(mxfp4_to_fp8_blocks(codes, scale), NotLossless)
    codes[:, 64:] = 0x11  # only 0.5
    q, s = mxfp4_to_fp8_blocks(codes, scale)
    assert fp8_values(q, s).equal(values(codes, scale))


def test_a_nan_byte_is_not_lossless_and_bytes_at_both_ends_are():
    codes = torch.full((128, 64), 0x75, dtype=torch.uint8)
    scale = torch.full((128, 4), 200, dtype=torch.uint8)
    scale[3, 1] = 255
    assert mxfp4_to_fp8_blocks(codes, scale).first == (0, 0)
    scale = torch.full_like(scale, 254)
    scale[3, 1] = 255  # an exponent of 128 would be near enough
    assert mxfp4_to_fp8_blocks(codes, scale).failed == 1
    for end in (0, 254):
        q, s = mxfp4_to_fp8_blocks(codes, torch.full_like(scale, end))
        assert fp8_values(q, s).equal(values(codes, torch.full_like(scale, end)))
    with pytest.raises(ValueError, match="needs \\(N, K/2\\) and \\(N, K/32\\)"):
        mxfp4_to_fp8_blocks(codes, scale[:, :2])


def test_mxfp4_as_the_ops_have_it():
    codes, scale = mxspec.mx_quantize(torch.randn(130, 64), elem_dtype=torch.float4_e2m1fn_x2)
    qdata, blocks = mxfp4_to_fp8_blocks(codes, scale)
    values = mxspec.mx_dequantize(codes, scale, out_dtype=torch.float32)
    assert mxspec.fp8_dequantize(qdata, blocks, out_dtype=torch.float32).equal(values)
    assert mxspec.nvfp4_dequantize(*mxfp4_to_nvfp4(codes, scale), out_dtype=torch.float32).equal(values)
    assert mxfp4_to_fp8_blocks(codes[:0], scale[:0])[0].shape == (0, 64)
    q, s, tensor_scale = mxfp4_to_nvfp4(codes[:0], scale[:0])
    assert (q.shape, s.shape, s.dtype, tensor_scale) == ((0, 32), (0, 4), torch.float8_e4m3fn, 1.0)


@pytest.mark.parametrize("convert", [mxfp4_to_fp8_blocks, mxfp4_to_nvfp4])
def test_operands_that_are_no_mxfp4(convert):
    codes, scale = torch.full((2, 16), 0x22, dtype=torch.uint8), torch.full((2, 1), 127, dtype=torch.uint8)
    for wrong in (codes.to(torch.int8), codes.short(), codes.float(), [[1]]):
        with pytest.raises(
            TypeError, match=rf"{convert.__name__}: codes is .*; needs a tensor of uint8 or torch.float4"
        ):
            convert(wrong, scale)
    for wrong in (scale.to(torch.float8_e4m3fn), scale.float(), scale.int(), None):
        with pytest.raises(
            TypeError, match=rf"{convert.__name__}: scale is .*; needs a tensor of uint8 or torch.float8"
        ):
            convert(codes, wrong)
    with pytest.raises(ValueError, match=rf"{convert.__name__}: codes is on meta; needs a tensor on the CPU"):
        convert(codes.to("meta"), scale)
    for shape in ((16,), (1, 2, 16), ()):
        with pytest.raises(
            ValueError, match=rf"{convert.__name__}: codes are .* needs \((E, )?N, K/2\) and \((E, )?N, K/32\)"
        ):
            convert(torch.zeros(shape, dtype=torch.uint8), scale)


@pytest.mark.parametrize("block", [128, 32])
def test_square_blocks_become_rows(block):
    n, k = 200, 320
    scale = torch.exp2(torch.arange(-(-n // block) * -(-k // block)).float() - 20).view(-(-n // block), -1)
    rows = lossless.blocks_to_rows(scale, (n, k), block)
    assert rows.shape == (n, k // 32)
    for i, j in ((0, 0), (n - 1, k // 32 - 1), (130, 5), (31, 3), (32, 4)):
        assert 2.0 ** (rows[i, j].item() - 127) == scale[i // block, j * 32 // block]
    scale[1, 0] = 3.0
    assert lossless.blocks_to_rows(scale, (n, k), block).first == (1, 0)
    with pytest.raises(ValueError, match="needs"):
        lossless.blocks_to_rows(scale, (n + 128, k), block)
