"""mx_gemm by e2m1 weights, with the numbers that only e5m2 has."""

import pytest

from mxspec import check, dispatch
from mxspec.machine_code.compile import compile_case, problems
from mxspec.machine_code.fake_gpu import unavailable
from tests.helpers import runs_kernels

pytest.importorskip("triton")

CASE = next(
    case for case in dispatch.reference("mx_gemm").spec.cases() if case.name == "Inf and NaN in e5m2, by e2m1, plain"
)
each_backend = pytest.mark.parametrize("backend", ["triton", "helion"])


@runs_kernels
@each_backend
def test_inf_and_nan_stay_what_they_are(backend):
    result = check.check_case("mx_gemm", CASE, backend)
    assert result.status == "passed", result.message


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
@pytest.mark.parametrize("target", ["sm90", "sm100"])
@each_backend
def test_no_conversion_makes_them_finite(backend, target):
    assert problems(compile_case("mx_gemm", backend, CASE, target), (), (), edge=True) == []
