"""MXFP4 on Blackwell: its instruction converts to e2m1. Compiled, not run."""

from __future__ import annotations

import re

import pytest
import torch

from mxspec.dispatch import kernel_module
from mxspec.machine_code.compile import compile_call
from mxspec.machine_code.fake_gpu import unavailable

pytestmark = [
    pytest.mark.turns(4),  # each test compiles kernels
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
CONVERT, LIMITS = r"cvt\.rn\.satfinite\.e2m1x2\.f32", r"0f(40C00000|40400000|3F740000)"  # 6, 3 and 61/64
OFFS = torch.empty(4, dtype=torch.int32, device="meta")
CALLS = {
    "rows": ("mx_quantize", (), {}),
    "rows, blocked": ("mx_quantize", (), {"scale_layout": "blocked"}),
    "columns": ("mx_quantize", (), {"axis": -2}),
    "both": ("mx_quantize_rowcol", (), {}),
    "groups": ("mx_quantize_groups", (OFFS,), {}),
    "groups, columns": ("mx_quantize_groups", (OFFS,), {"axis": -2}),
    "groups, both": ("mx_quantize_rowcol_groups", (OFFS,), {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_codes_come_from_the_instruction(name, dtype):
    """Hopper has no such instruction: there, a limited magnitude is rounded by an addition."""
    op, more, options = CALLS[name]
    if name == "groups, both" and dtype == torch.float32:
        pytest.skip("the kernel takes no float32")
    kernel = getattr(kernel_module(op, "triton"), op)
    x = torch.empty(1024, 2048, dtype=dtype, device="meta")
    for target, converts in (("sm100", True), ("sm90", False)):
        codes = compile_call(kernel, x, *more, elem_dtype="e2m1", target=target, **options)
        found = [code for code in codes if re.search(CONVERT if converts else LIMITS, code.ptx)]
        assert found
        assert not any(re.search(LIMITS if converts else CONVERT, code.ptx) for code in codes)
        assert not any(code.local_bytes for code in codes)
