"""The Helion kernels for Blackwell, tile by tile on the CPU. An emulation replaces the hardware's scaled products."""

import numpy as np
import pytest
import torch

from mxspec import check, dispatch
from tests.helpers import only_interpreted

pytestmark = only_interpreted
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
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


def values(codes, scale, fmt):
    wide = torch.from_numpy(np.ascontiguousarray(codes)).view(FORMATS[fmt]).double()
    factor = torch.from_numpy(np.ascontiguousarray(scale)).view(torch.float8_e8m0fnu).double()
    return wide * factor.repeat_interleave(32, 1)


def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, acc, *_options):
    """A substitute for `tl.dot_scaled`, which the interpreter lacks: exact products, fp32 sums."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (
        values(a.handle.data, a_scale.handle.data, a_format),
        values(b.handle.data.T, b_scale.handle.data, b_format),
    )
    sums = acc.handle.data + (left @ right.T).numpy()
    return self.tensor(TensorHandle(sums.astype(np.float32), acc.handle.dtype), acc.type)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in CASES.items() for name in names])
def test_a_case(op, name, monkeypatch):
    from triton.language.semantic import TritonSemantic

    from mxspec.helion_kernels.common import launch

    monkeypatch.setattr(TritonSemantic, "dot_scaled", dot_scaled)
    monkeypatch.setattr(launch, "_capability", lambda device: (10, 0))
    (case,) = [case for case in dispatch.reference(op).spec.cases() if case.name == name]
    result = check.check_case(op, case, "helion")
    assert result.status == "passed", result.message
