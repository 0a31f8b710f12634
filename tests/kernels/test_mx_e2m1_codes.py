"""The e2m1 codes of MX blocks in the kernels: every bfloat16 and float16 magnitude from 2^-9 to 8."""

import pytest
import torch

import mxspec
from mxspec import check, dispatch

if check.default_device().type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters():
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)


def every_magnitude(dtype: torch.dtype, power: int) -> torch.Tensor:
    """Blocks of both signs, `(blocks, 32)`. The first number of each is 4 times the power, which sets the scale."""
    lowest, highest = (torch.tensor(v, dtype=dtype).view(torch.int16).item() for v in (2.0**-9, 8.0))
    magnitudes = torch.arange(lowest, highest, dtype=torch.int16).view(dtype)
    numbers = torch.cat([magnitudes, -magnitudes])
    numbers = torch.cat([numbers, numbers.new_zeros(-numbers.numel() % 31)]).view(-1, 31)
    first = torch.full((numbers.shape[0], 1), 4.0, dtype=dtype)
    return torch.cat([first, numbers], 1) * 2.0**power


# The powers keep all magnitudes among the normal numbers of the dtype.
@pytest.mark.parametrize(
    ("dtype", "power"),
    [(torch.bfloat16, 0), (torch.bfloat16, 120), (torch.bfloat16, -117), (torch.float16, 0), (torch.float16, 12)],
    ids=str,
)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scale_layout", ["plain", "blocked"])
def test_every_narrow_magnitude(dtype, power, axis, scale_layout):
    x = every_magnitude(dtype, power)
    x = x.mT.contiguous() if axis == -2 else x
    options = {"elem_dtype": torch.float4_e2m1fn_x2, "scaling": "floor", "axis": axis, "scale_layout": scale_layout}
    codes, scales = dispatch.reference("mx_quantize")(x, **options)
    with mxspec.use_backend("triton"):
        found = mxspec.mx_quantize(x.to(check.default_device()), **options)
    assert torch.equal(found[0].cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found[1].cpu().view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize(("capability", "number"), [((8, 9), 0), ((9, 0), 1), ((10, 0), 2), ((10, 3), 2), ((12, 0), 1)])
def test_which_gpus_compare_two_numbers_at_once_and_which_convert_to_e2m1(monkeypatch, capability, number):
    from mxspec.triton_kernels.common import pairs

    monkeypatch.setattr(pairs, "capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert (pairs.COMPARES.value, pairs.CONVERTS.value) == (1, 2)
    assert pairs.instructions(torch.device("cuda")) == number
    assert pairs.instructions(torch.device("cpu")) == 0
