"""nvfp4_grouped_gemm: literal sums, the weights and tensor scales that each token meets, and rows of no group."""

import torch

import mxspec
from tests.helpers import ends

PACKED, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn


def nvfp4_grouped_gemm(*args, **options):
    return mxspec.nvfp4_grouped_gemm(*args, backend="reference", **options)


def tokens_and_weights():
    """Tokens 1, 2, 3, 4, 6 and weights 1 (expert 0), 2 (expert 1) and 4 (expert 2), in element 20 of 32."""
    a, b = torch.zeros(5, 16, dtype=torch.uint8), torch.zeros(3, 2, 16, dtype=torch.uint8)
    a[:, 10] = torch.tensor([2, 4, 5, 6, 7])
    b[:, 1, 10] = torch.tensor([2, 4, 6])
    return a.view(PACKED), b.view(PACKED)


def ones(*shape):
    return torch.full(shape, 0x38, dtype=torch.uint8).view(E4M3)


def test_golden_each_token_meets_its_experts_weights_and_tensor_scales():
    a, b = tokens_and_weights()
    a_scale, b_scale = ones(5, 2), ones(3, 2, 2)
    a_scale.view(torch.uint8)[4, 1], b_scale.view(torch.uint8)[2, 1, 1] = 0x40, 0x30  # 2, 1/2
    of_a, of_b = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([-1.0, 4.0, 1.0])
    out = nvfp4_grouped_gemm(a, a_scale, of_a, b, b_scale, of_b, ends(1, 3, 5), scale_layout="plain")
    assert (out.dtype, out.stride()) == (torch.bfloat16, (2, 1))
    assert out.abs()[:, 0].tolist() == 5 * [0.0]
    assert out[:, 1].tolist() == [-1.0, 2 * 2 * 2.0, 2 * 3 * 2.0, 2 * 4 * 2.0, 2 * 6 * 2 * 2.0]


def test_golden_an_empty_group_and_tokens_of_none():
    a, b = tokens_and_weights()
    a_scale, b_scale = ones(5, 2), ones(3, 2, 2)
    a_scale.view(torch.uint8)[3:], b_scale.view(torch.uint8)[1] = 0x7F, 0x7F  # expert 1 has no tokens
    of_a, of_b = torch.tensor([1.0, torch.nan, 1.0]), torch.ones(3)
    out = nvfp4_grouped_gemm(a, a_scale, of_a, b, b_scale, of_b, ends(1, 1, 3), scale_layout="plain")
    assert out[:, 1].tolist() == [1.0, 8.0, 12.0, 0.0, 0.0]


def test_golden_a_groups_blocked_scales_begin_at_a_multiple_of_128_rows():
    a, b = tokens_and_weights()
    a_scale, b_scale = (torch.full(s, 0x7F, dtype=torch.uint8) for s in ((5 + 3 * 128, 4), (3, 512)))
    # Token 0 is row 0 of the first tile, tokens 1 and 2 rows 0 and 1 of the second, 3 and 4 of the third.
    for row, place in enumerate([0, 512, 512 + 16, 1024, 1024 + 16]):
        a_scale.view(-1)[place : place + 2] = torch.tensor([0x38, 0x38 + 8 * row])  # 1, 2^row
    b_scale[:, 16:18] = b_scale[:, 0:2] = 0x38
    out = nvfp4_grouped_gemm(
        a, a_scale.view(E4M3), torch.ones(3), b, b_scale.view(E4M3), torch.ones(3), ends(1, 3, 5)
    )  # fmt: skip
    assert out[:, 1].tolist() == [1.0, 2 * 2 * 2.0, 3 * 2 * 4.0, 4 * 4 * 8.0, 6 * 4 * 16.0]


def test_golden_values_of_transposed_weights():
    dy = torch.tensor([[1.0, 2.0], [3.0, -1.0]]).bfloat16()
    w = torch.tensor([[[1.0, 0.5, 2.0], [4.0, 0.0, 8.0]]]).bfloat16().expand(2, 2, 3)  # (E, N, K)
    out = nvfp4_grouped_gemm(dy, None, torch.tensor([1.0, 0.5]), w.mT, None, torch.ones(2), ends(1, 2))
    assert out.tolist() == [[9.0, 0.5, 18.0], [-0.5, 0.75, -1.0]]
