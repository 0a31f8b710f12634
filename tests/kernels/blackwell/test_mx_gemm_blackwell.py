"""The Helion kernels for Blackwell, tile by tile on the CPU. An emulation replaces the hardware's scaled products."""

import pytest

from mxspec import check, dispatch
from tests.helpers import dot_scaled, only_interpreted

pytestmark = [only_interpreted, pytest.mark.turns(8)]
# The cases have a K past whole steps, both layouts, two formats, every scale, and NaN.
CASES = {
    "mx_gemm": ["150x136x160, blocked, float32", "e4m3fn by e5m2, plain", "scales from 2^-127 to 2^127, blocked"],
    "mx_grouped_gemm": [
        "three groups, blocked, float32",
        "dgrad, plain, bfloat16",
        "a scale of 255 in the first, blocked",
    ],
    "mx_grouped_gemm_wgrad": [
        "three groups, blocked, float32",
        "as quantized, plain, bfloat16",
        "a NaN code in the second, blocked",
    ],
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in CASES.items() for name in names])
def test_a_case(op, name, monkeypatch):
    from triton.language.semantic import TritonSemantic

    from mxspec.helion_kernels.common import launch

    monkeypatch.setattr(TritonSemantic, "dot_scaled", dot_scaled)
    monkeypatch.setattr(launch, "_capability", lambda device: (10, 0))
    (case,) = [case for case in dispatch.reference(op).spec.cases() if case.name == name]
    result = check.check_case(op, case, "helion")
    assert result.status == "passed", result.message
