"""fp8_dequantize: literal products, and the elements that each scale reaches."""

import pytest
import torch

from mxspec import check, dispatch, fp8_dequantize


def ones(*shape):
    return torch.full(shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_golden_1x128():
    out = fp8_dequantize(ones(2, 256), torch.tensor([[2.0, 3.0], [0.5, -1.0]]), backend="reference")
    assert out[:, [0, 127, 128, 255]].tolist() == [[2.0, 2.0, 3.0, 3.0], [0.5, 0.5, -1.0, -1.0]]


def test_golden_128x128_with_a_partial_block():
    out = fp8_dequantize(ones(130, 128), torch.tensor([[2.0], [3.0]]), backend="reference")
    assert out[[0, 127, 128, 129], 0].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_golden_columns():
    out = fp8_dequantize(ones(256, 2), torch.tensor([[2.0, 3.0], [4.0, 5.0]]), axis=-2, backend="reference")
    assert out[[0, 128]].tolist() == [[2.0, 4.0], [3.0, 5.0]]
    assert out.is_contiguous()


def test_golden_a_shorter_last_block():
    scale = torch.tensor([[2.0, 3.0]])
    out = fp8_dequantize(ones(1, 144), scale, backend="reference")
    assert out[0, [0, 127, 128, 143]].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert torch.equal(fp8_dequantize(ones(144, 1), scale, axis=-2, backend="reference"), out.mT)


def test_golden_two_roundings():
    """The product 1.5 * scale is 2^-24 above 1 + 2^-8, the tie between 1 and 1 + 2^-7.

    fp32 rounds it onto the tie, and bfloat16 then rounds the tie to even, which is 1. A single rounding would give
    1.0078125.
    """
    qdata = torch.full((1, 128), 0x3C, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[0.6692708730697632]])
    assert 1.5 * scale.item() == 1 + 2.0**-8 + 2.0**-24
    assert fp8_dequantize(qdata, scale, backend="reference")[0, 0].item() == 1.0
    assert fp8_dequantize(qdata, scale, out_dtype=torch.float32, backend="reference")[0, 0].item() == 1 + 2.0**-8


TRITON = pytest.mark.skipif(
    not torch.cuda.is_available() and "TRITON_INTERPRET" not in dispatch.interpreters(),
    reason="needs a GPU or an interpreter",
)


@TRITON
@pytest.mark.parametrize("op", ["fp8_quantize_1x128", "fp8_dequantize"])
def test_programs_that_fill_no_dimension_of_a_grid_evenly(op, monkeypatch):
    """If two grid dimensions share the rows, the last programs may lie past the end: here from 5 tiles on."""
    from mxspec.triton_kernels.common import launch

    monkeypatch.setattr(launch, "MOST", 4)
    ran = set()
    for case in dispatch.reference(op).spec.cases():
        if not case.raises and not {"large", "generated"} & set(case.flags) and case.args()[0].numel() > 2**14:
            result = check.check_case(op, case, "triton")
            assert result.status == "passed", result.message
            ran.add(case.name)
    assert ran
