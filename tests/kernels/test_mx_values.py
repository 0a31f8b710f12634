"""What the Gluon kernel of the MX matmuls reads: the values of tokens, and the plan of the tiles of token groups."""

import pytest
import torch

import mxspec
from mxspec.cases.common.token_groups import offs_of
from mxspec.triton_kernels.hopper.mx import launch as kernel
from tests.helpers import DEVICE, runs_kernels

FORMATS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 10}  # the exponent by which values are shifted
SIZES = {"ragged": [130, 0, 200, 1, 0], "none": [0, 0, 0], "one": [300], "many": [0] * 20 + [3] + [1] * 40}


def tokens(rows, K, dtype):
    """Codes without NaN and Inf, and plain scales under which each value is a bf16 number."""
    codes = torch.randn(rows, K).to(dtype).to(DEVICE)
    return codes, torch.randint(110, 140, (rows, K // 32), dtype=torch.uint8).to(DEVICE).view(torch.float8_e8m0fnu)


def in_order(values):
    """The values in the order of K. In each 16 columns, they lie in the order in which the tensor cores take them."""
    return values.reshape(len(values), -1, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(len(values), -1)


def plan_of(sizes, rows, tile):
    """For each tile: the expert, the first row, the end, and its tile of 128 padded rows."""
    found, first, before = [], 0, 0
    for expert, size in enumerate(sizes):
        found += [(expert, first + i, first + size, before + i // 128) for i in range(0, size, tile)]
        first, before = first + size, before + -(-size // 128)
    none = [(-1, first + i, rows) for i in range(0, rows - first, tile)]
    return found, none


@runs_kernels
@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_values_of_tokens_and_the_plan(dtype, sizes, layout):
    rest, K = 37, 160
    rows, offs, of_groups = sum(sizes) + rest, offs_of(sizes).to(DEVICE), sum(sizes)
    codes, scale = tokens(rows, K, dtype)
    laid = scale if layout == "plain" else mxspec.to_blocked_m_groups(scale, offs, backend="reference")[0]
    for tile in (32, 64, 128, 256):
        marks = torch.full((3,), 9, dtype=torch.int32, device=DEVICE)
        values, plan = kernel.values_and_plan(codes, laid, layout, marks, offs, "M", tile)
        exponents = scale.view(torch.uint8).int().repeat_interleave(32, 1) - 127 + FORMATS[dtype]
        expected = torch.ldexp(codes.float(), exponents).bfloat16()
        assert in_order(values)[:of_groups, :K].equal(expected[:of_groups])
        assert not in_order(values)[:of_groups, K:].any()
        assert marks.tolist() == [0, 9, 9]
        found, none = plan_of(sizes, rows, tile)
        stored = [tuple(entry) for entry in plan.tolist()]
        assert stored[: len(found)] == found
        assert [entry[:3] for entry in stored[len(found) :]][: len(none)] == none
        for expert, first, end, _ in stored[len(found) + len(none) :]:
            assert expert == -1
            assert first >= end


@runs_kernels
def test_the_values_of_one_matrix():
    codes, scale = tokens(70, 96, torch.float8_e4m3fn)
    marks = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for layout, laid in (("plain", scale), ("blocked", mxspec.to_blocked(scale, backend="reference"))):
        values, plan = kernel.values_and_plan(codes, laid, layout, marks, None, "", 256)
        exponents = scale.view(torch.uint8).int().repeat_interleave(32, 1) - 123
        assert in_order(values)[:, :96].equal(torch.ldexp(codes.float(), exponents).bfloat16())
        assert plan is None


@runs_kernels
def test_weights_of_experts_are_copied_from_any_strides():
    b = torch.randn(3, 70, 160).to(torch.float8_e4m3fn).to(DEVICE)
    inside = torch.empty(70, 3, 168, device=DEVICE).to(b.dtype).transpose(0, 1)[..., :160].copy_(b)
    shifted = torch.empty(b.numel() + 1, device=DEVICE).to(b.dtype)[1:].view(b.shape).copy_(b)
    for strided in (b, inside, shifted):
        out = kernel.copied(strided)
        assert out.is_contiguous()
        assert out.view(torch.uint8).equal(b.view(torch.uint8))
    repeated = b[:, :1].expand(3, 70, 160)  # one row of weights
    assert kernel.copied(repeated).view(torch.uint8).equal(repeated.view(torch.uint8))
