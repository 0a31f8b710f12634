"""nvfp4_grouped_gemm_wgrad: literal sums over the tokens of each group, of codes and of values."""

import torch

import mxspec
from tests.helpers import ends

PACKED, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn


def nvfp4_grouped_gemm_wgrad(*args, **options):
    return mxspec.nvfp4_grouped_gemm_wgrad(*args, backend="reference", **options)


def codes():
    """48 tokens. dy has 1 (token 1), 2 (token 17) and 3 (token 40). x has 4, -6 and 0.5 there."""
    dy, x = torch.zeros(1, 24, dtype=torch.uint8), torch.zeros(1, 24, dtype=torch.uint8)
    dy[0, [0, 8, 20]], x[0, [0, 8, 20]] = torch.tensor([[0x20, 0x40, 0x05], [0x60, 0xF0, 0x01]], dtype=torch.uint8)
    return dy.view(PACKED).mT, x.view(PACKED).mT


def scales(*row):
    return torch.tensor([row], dtype=torch.uint8).view(E4M3)


def test_golden_each_group_sums_its_tokens_times_its_tensor_scales():
    dy, x = codes()
    of_dy, of_x = scales(0x38, 0x40, 0x48), scales(0x30, 0x38, 0x7E)  # 1, 2, 4; 1/2, 1, 448
    Td, Tx = torch.tensor([1.0, 7.0, 0.5]), torch.tensor([1.0, 1.0, -2.0])
    out = nvfp4_grouped_gemm_wgrad(dy, of_dy, Td, x, of_x, Tx, ends(32, 32, 48), scale_layout="plain")
    assert (out.dtype, out.shape) == (torch.float32, (3, 1, 1))
    assert out.flatten().tolist() == [1 * 4 * 0.5 - 2 * 6 * 2, 0.0, -(3 * 0.5 * 4 * 448)]


def test_golden_tokens_of_no_group_do_not_count():
    dy, x = codes()
    of_dy, of_x = scales(0x38, 0x7F, 0x7F), scales(0x38, 0x7F, 0x7F)
    one = torch.ones(1)
    out = nvfp4_grouped_gemm_wgrad(dy, of_dy, one, x, of_x, one, ends(16), scale_layout="plain")
    assert out.item() == 4.0


def test_golden_a_groups_blocked_scales_are_tiled_alone():
    dy, x = codes()
    of_dy, of_x = (torch.full((128, 3 + 4 * 2), 0x7F, dtype=torch.uint8) for _ in range(2))
    for scale in (of_dy, of_x):  # the blocks 0 and 1 are the first group's, and block 2 begins the second tile
        scale.view(-1)[[0, 1, 512]] = torch.tensor([0x38, 0x40, 0x48], dtype=torch.uint8)
    one = torch.ones(2)
    out = nvfp4_grouped_gemm_wgrad(dy, of_dy.view(E4M3), one, x, of_x.view(E4M3), one, ends(32, 48))
    assert out.flatten().tolist() == [4 - 12 * 4, 1.5 * 16]


def test_golden_values_of_groups_of_any_size():
    dy = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [torch.nan, 0.0]]).bfloat16()
    x = torch.tensor([[1.0], [-1.0], [0.5], [torch.inf]]).bfloat16()
    Td, Tx = torch.tensor([2.0, 1.0, 3.0]), torch.ones(3)
    out = nvfp4_grouped_gemm_wgrad(dy, None, Td, x, None, Tx, ends(1, 3, 3))
    assert out.tolist() == [[[2.0], [4.0]], [[-0.5], [-1.0]], [[0.0], [0.0]]]
