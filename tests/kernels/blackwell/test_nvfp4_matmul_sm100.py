"""The NVFP4 matmuls on Blackwell: codes and e4m3 scales go to the tensor cores. Compiled for sm_100, not run."""

import pytest
import torch

from mxspec import dispatch
from mxspec.cases import nvfp4_gemm as dense
from mxspec.cases import nvfp4_grouped_gemm as grouped
from mxspec.cases import nvfp4_grouped_gemm_wgrad as wgrad
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

CODES = r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.scale_vec::4X"
VALUES = r"tcgen05\.mma\.cta_group::1\.kind::f16"


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("kinds", [("codes", "codes"), ("values", "codes")], ids="-".join)
@pytest.mark.parametrize("op", ["nvfp4_gemm", "nvfp4_grouped_gemm", "nvfp4_grouped_gemm_wgrad"])
def test_the_tensor_cores_take_codes_and_scales(op, kinds, layout):
    sizes = [144, 0, 320, 16], 32, 528, 320
    args = {
        "nvfp4_gemm": lambda: dense.sized(300, 528, 352, layout, kinds),
        "nvfp4_grouped_gemm": lambda: grouped.sized(*sizes, layout, kinds),
        "nvfp4_grouped_gemm_wgrad": lambda: wgrad.sized(*sizes, layout, kinds),
    }[op]()
    fn = getattr(dispatch.kernel_module(op, "triton"), op)
    for out_dtype in (torch.bfloat16, torch.float32):
        code = compile_call(fn, *args, scale_layout=layout, out_dtype=out_dtype, target="sm100")
        assert [c.kernel for c in code] == ["_tiles"]
        assert problems(code, (CODES if kinds == ("codes", "codes") else VALUES,), (), edge=False) == []
