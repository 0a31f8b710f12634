"""The factors of an FP8 block in the kernels, for every mantissa that amax may have."""

import pytest
import torch

from mxspec import check, dispatch

if check.default_device().type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters():
    pytest.skip("needs a GPU or an interpreter", allow_module_level=True)

import triton
import triton.language as tl

from mxspec.triton_kernels.common.fp8_numerics import factors

DEVICE = check.default_device()


@triton.jit
def _both(out, back_out, POW2: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s, back = factors(0x3F800000 + n, 1, POW2)
    tl.store(out + n, s)
    tl.store(back_out + n, back)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_every_mantissa(scale_format):
    """amax from 1 to 2, compared with divisions of fp32 tensors. All other values follow by powers of two."""
    amax = (0x3F800000 + torch.arange(2**23)).to(torch.int32).view(torch.float32)
    s = torch.full_like(amax, 448.0) / amax
    if scale_format == "pow2":
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)
    got, back = torch.empty(2, 2**23, device=DEVICE)
    block = 2**20 if DEVICE.type == "cpu" else 1024
    _both[(2**23 // block,)](got, back, scale_format == "pow2", block)
    assert torch.equal(got.cpu(), s)
    assert torch.equal(back.cpu(), torch.ones(()) / s)
