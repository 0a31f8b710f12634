"""The judge finds wrong quantizers by the cases that are written by hand. Each is a reference with a changed input."""

import pytest
import torch

from mxspec import dispatch
from tests.helpers import finding

MX = ["mx_quantize", "mx_quantize_rowcol", "mx_quantize_groups", "mx_quantize_rowcol_groups"]
OPS = [
    *MX, "mx_fake_quantize_rowcol_groups", "nvfp4_quantize", "nvfp4_quantize_stochastic", "nvfp4_fake_quantize",
    "fp8_quantize_1x128", "fp8_quantize_128x128",
]  # fmt: skip
DTYPES = torch.bfloat16, torch.float16, torch.float32


def flushed(x):
    return x.where(x.abs() >= torch.finfo(x.dtype).tiny, 0 * x).where(~x.isnan(), x)


CHANGES = {
    "subnormal numbers are 0": flushed,
    "-Inf is the smallest number": lambda x: x.where(x != -torch.inf, torch.finfo(x.dtype).min),
    "Inf is the largest number": lambda x: x.where(x != torch.inf, torch.finfo(x.dtype).max),
    "NaN is 0": lambda x: x.where(~x.isnan(), 0.0),
    "-0 is 0": lambda x: x.where(x != 0, 0.0),
    "the last row is 0": lambda x: torch.cat([x[..., :-1, :], 0 * x[..., -1:, :].nan_to_num()], -2),
}


# Subnormal numbers lie below the default eps of the FP8 quantizers, so they do not matter there.
CALLS = [(op, of) for op in OPS for of in CHANGES if not (op.startswith("fp8") and of == "subnormal numbers are 0")]


@pytest.mark.turns(4)
@pytest.mark.parametrize(("op", "change"), CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_numbers_that_a_quantizer_gets_wrong(op, dtype, change):
    reference = dispatch.reference(op)

    def changed(x, *rest, **kwargs):
        return reference(CHANGES[change](x) if x.dtype == dtype and x.numel() else x, *rest, **kwargs)

    assert next(finding(op, changed, lambda case: case.args()[0].dtype == dtype), None)
