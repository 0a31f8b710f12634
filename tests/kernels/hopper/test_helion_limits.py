"""What Helion cannot say about a matmul on Hopper: the smallest kernels that show it.

`docs/guides/three_languages.md` says what follows. A release of Helion that fails a test here may have a faster
`fp8_gemm`.
"""

from __future__ import annotations

import re

import helion.exc
import helion.language as hl
import pytest
import torch
from torch import Tensor

from mxspec.helion_kernels.common.launch import config, launch
from mxspec.machine_code.compile import compile_call
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.machine_code.measure import MachineCode

pytestmark = [
    pytest.mark.turns(3),  # each test compiles a kernel
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


def plain(a: Tensor, b: Tensor, scale: Tensor, out: Tensor) -> None:
    for m, n in hl.tile(out.size(), block_size=[None, 128]):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=128):
            acc = hl.dot(a[m, k], b[n, k].t(), acc=acc)
        out[m, n] = acc


def scaled(a: Tensor, b: Tensor, scale: Tensor, out: Tensor) -> None:
    """Each 128 columns of K have a scale, so the sum leaves the tensor cores in each step."""
    for m, n in hl.tile(out.size(), block_size=[None, 128]):
        acc = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=128):
            partial = hl.dot(a[m, k], b[n, k].t(), out_dtype=torch.float32)
            acc = acc + partial * scale[m, k.id][:, None]
        out[m, n] = acc


def carried(a: Tensor, b: Tensor, scale: Tensor, out: Tensor) -> None:
    """The next step scales the sum, so that the wait could be there."""
    for m, n in hl.tile(out.size(), block_size=[None, 128]):
        acc = hl.zeros([m, n], dtype=torch.float32)
        before = hl.zeros([m, n], dtype=torch.float32)
        factor = hl.zeros([m], dtype=torch.float32)
        for k in hl.tile(a.size(1), block_size=128):
            partial = hl.dot(a[m, k], b[n, k].t(), out_dtype=torch.float32)
            acc = acc + before * factor[:, None]
            before = partial
            factor = scale[m, k.id]
        out[m, n] = acc + before * factor[:, None]


def compiled(body, dtype: torch.dtype, **options) -> MachineCode:
    a, b = (torch.empty(4096, 4096, dtype=dtype, device="meta") for _ in range(2))
    scale, out = (torch.empty(shape, dtype=torch.float32, device="meta") for shape in ((4096, 32), (4096, 4096)))
    configs = {(9, 0): config([128], 8, num_stages=3, indexing="tensor_descriptor", **options)}
    (code,) = compile_call(lambda *args: launch(body, configs, *args), a, b, scale, out, target="sm90")
    return code


def waits(code: MachineCode) -> set[int]:
    """How many matmuls may still run after each wait."""
    return {int(n) for n in re.findall(r"wgmma\.wait_group\S* (\d+)", code.ptx)}


def test_sums_that_stay_in_the_tensor_cores_run_on_beside_the_next_loads():
    assert waits(compiled(plain, torch.bfloat16)) == {0, 1}


@pytest.mark.parametrize("body", [scaled, carried])
def test_a_matmul_whose_sums_leave_the_tensor_cores_ends_before_the_next_line(body):
    assert waits(compiled(body, torch.float8_e4m3fn)) == {0}


def test_helion_refuses_to_specialize_warps_on_hopper():
    with pytest.raises(helion.exc.InvalidConfig, match="range_warp_specialize"):
        compiled(scaled, torch.float8_e4m3fn, range_warp_specializes=[None, True])


def test_registers_are_limited_only_in_persistent_programs():
    with pytest.raises(helion.exc.InvalidConfig, match="maxnreg"):
        compiled(scaled, torch.float8_e4m3fn, maxnreg=128)
