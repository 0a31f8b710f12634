"""The benchmarks' yardsticks (a copy, a bare cast) as kernels: over several programs, and with a ragged end."""

import pytest
import torch

from mxspec import check, dispatch
from mxspec.bench.timing import bare_cast, copy

DEVICE = check.default_device()
runs_kernels = pytest.mark.skipif(
    DEVICE.type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters(), reason="needs a GPU or an interpreter"
)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 4096), (1, 1), (77, 131)])
def test_the_copy_copies_every_byte(shape, dtype):
    from mxspec.bench import limits

    x = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8).flatten(-2).view(dtype).to(DEVICE)
    with check.poisoned(0x5A):
        out = limits.copy(x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert out.view(torch.uint8).equal(x.view(torch.uint8))


@runs_kernels
@pytest.mark.parametrize("shape", [(3, 4096), (1, 1), (77, 131)])
def test_the_bare_cast_casts_every_element(shape):
    from mxspec.bench import limits

    x = torch.randn(shape).bfloat16().to(DEVICE)
    with check.poisoned(0x5A):
        out = limits.bare_cast(x)
    assert out.view(torch.uint8).equal(x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_elsewhere_the_yardsticks_are_torchs(dtype):
    x = torch.arange(64).to(dtype)
    assert copy(x).equal(x)
    assert copy(x).data_ptr() != x.data_ptr()
    if dtype == torch.bfloat16:
        assert bare_cast(x).dtype == torch.float8_e4m3fn
