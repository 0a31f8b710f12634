"""mx_gemm by e2m1 weights, with the numbers that only e5m2 has."""

import pytest
import torch

from mxspec import check, dispatch
from mxspec.machine_code.compile import compile_case, problems
from mxspec.machine_code.fake_gpu import unavailable
from tests.helpers import runs_kernels

triton = pytest.importorskip("triton")
tl = triton.language

CASE = next(
    case for case in dispatch.reference("mx_gemm").spec.cases() if case.name == "Inf and NaN in e5m2, by e2m1, plain"
)
each_backend = pytest.mark.parametrize("backend", ["triton", "helion"])


@triton.jit
def _convert(x, direct, by_fp16):
    i = tl.arange(0, 256)
    codes = tl.load(x + i)
    tl.store(direct + i, codes.to(tl.bfloat16))
    tl.store(by_fp16 + i, codes.to(tl.float16).to(tl.bfloat16))


@runs_kernels
def test_only_the_direct_conversion_of_triton_makes_them_finite():
    """The reason for the test below, in a kernel by itself."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2)
    x = codes.to(check.default_device())
    direct, by_fp16 = (torch.empty(256, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    _convert[(1,)](x, direct, by_fp16)
    values = codes.to(torch.bfloat16)
    assert torch.equal(by_fp16.cpu().nan_to_num(9.0), values.nan_to_num(9.0))
    of_inf_and_nan = torch.tensor([65536.0, 81920.0, 98304.0, 114688.0])
    values[124:128], values[252:] = of_inf_and_nan, -of_inf_and_nan
    assert torch.equal(direct.cpu(), values)


@pytest.mark.turns(8)
@runs_kernels
@each_backend
def test_inf_and_nan_stay_what_they_are(backend):
    result = check.check_case("mx_gemm", CASE, backend)
    assert result.status == "passed", result.message


@pytest.mark.turns(4)
@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
@pytest.mark.parametrize("target", ["sm90", "sm100"])
@each_backend
def test_no_conversion_makes_them_finite(backend, target):
    assert problems(compile_case("mx_gemm", backend, CASE, target), (), (), edge=True) == []
