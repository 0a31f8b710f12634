"""rules, for NVFP4: every preset gives what its peer's code gave, block by block and over whole ranges of amaxes."""

import hashlib

import pytest
import torch

from mxspec import check, nvfp4_dequantize, nvfp4_quantize, rules
from mxspec.cases.nvfp4_quantize import ties_under_scales
from mxspec.rules import _recorded
from mxspec.spec import normal, random_bits, random_normal

RECORD = _recorded.load_nvfp4()
PRESETS = {peer: getattr(rules, peer) for peer in rules.peers() if hasattr(getattr(rules, peer), "nvfp4_quantize")}
ENTRY = {peer: next(iter(module.RECORDED["nvfp4"])) for peer, module in PRESETS.items() if "nvfp4" in module.RECORDED}


def bf16_from(first, count):
    """Consecutive bfloat16 numbers."""
    return (torch.tensor(first, dtype=torch.bfloat16).view(torch.int16) + torch.arange(count)).short().view(torch.bfloat16)


TENSOR_AMAXES = bf16_from(1.0, 128)  # every mantissa
BLOCK_AMAXES = bf16_from(2.0**-12, 13 * 128)  # every mantissa under 13 exponents
IN_RANGE = BLOCK_AMAXES.float() <= TENSOR_AMAXES.float()[:, None]  # 204,864 pairs


def every_pair():
    """A matrix for each tensor amax, whose row i has the largest magnitude `BLOCK_AMAXES[i]`; and the tensor amaxes."""
    fractions = torch.tensor([1.0] + [(-1) ** i * i / 16 for i in range(1, 16)])
    x = (BLOCK_AMAXES.float()[:, None] * fractions).to(torch.bfloat16)
    return x.expand(128, -1, -1), TENSOR_AMAXES.float()


def ties(dtype):
    """Numbers beside the ties of the codes, under every scale and 128 tensor amaxes, rounded to dtype."""
    amax = TENSOR_AMAXES.float() * (1.0 if dtype == torch.bfloat16 else 1 + 2.0**-12)
    return (ties_under_scales() * (amax / 2688)[:, None, None]).to(dtype), amax


def finite(dtype, seed):
    x = random_bits(256, 256, dtype=dtype, seed=seed)
    return (torch.where(x.isfinite(), x, x.new_ones(())),)


# The calls whose results the record holds as digests.
CALLS = {
    "every pair of amaxes": every_pair,
    "ties, bfloat16": lambda: ties(torch.bfloat16),
    "ties, float32": lambda: ties(torch.float32),
    "ties, float16": lambda: ties(torch.float16),
    "normal, bfloat16": lambda: (random_normal(256, 512),),
    "normal, float32": lambda: (normal(256, 512, seed=3),),
    "normal, float16": lambda: (random_normal(256, 512, dtype=torch.float16, seed=4),),
    "bits, bfloat16": lambda: finite(torch.bfloat16, 1),
    "bits, float32": lambda: finite(torch.float32, 2),
    "bits, float16": lambda: finite(torch.float16, 3),
}


def digest(qdata, scale):
    """sha256 of the codes' bytes, then the scales' bytes."""
    stored = (t.contiguous().view(torch.uint8).numpy().tobytes() for t in (qdata, scale))
    return hashlib.sha256(b"".join(stored)).hexdigest()
