"""All pairs of bfloat16 mantissas of a tensor's amax and of a block's amax, for the tests of NVFP4's rules."""

import torch


def bf16_from(first, count):
    """Consecutive bfloat16 numbers."""
    return (
        (torch.tensor(first, dtype=torch.bfloat16).view(torch.int16) + torch.arange(count)).short().view(torch.bfloat16)
    )


TENSOR_AMAXES = bf16_from(1.0, 128)  # every mantissa
BLOCK_AMAXES = bf16_from(2.0**-12, 13 * 128)  # every mantissa under 13 exponents
IN_RANGE = BLOCK_AMAXES.float() <= TENSOR_AMAXES.float()[:, None]  # 204,864 pairs


def every_pair():
    """A matrix for each tensor amax, whose row i has the largest magnitude `BLOCK_AMAXES[i]`; and the tensor amaxes."""
    fractions = torch.tensor([1.0] + [(-1) ** i * i / 16 for i in range(1, 16)])
    x = (BLOCK_AMAXES.float()[:, None] * fractions).to(torch.bfloat16)
    return x.expand(128, -1, -1), TENSOR_AMAXES.float()
