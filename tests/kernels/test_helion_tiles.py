"""The tiles of Helion's matmuls of values. The cases of the ops are too small to choose most of them."""

import pytest
import torch

from mxspec.cases.nvfp4_gemm import sized
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.helion_kernels import mx_gemm, nvfp4_gemm
from mxspec.helion_kernels.tiles import mx_by_memory
from mxspec.helion_kernels.tiles.mx_by_memory import TILES, tile_of

# A call on an H200, which has 132 processors, and its tile.
CALLS = {
    (64, 7168): ("64 x 64", "64 x 64"),
    (128, 4096): ("64 x 64", "64 x 64"),
    (128, 7168): ("128 x 128", "128 x 128"),
    (512, 4096): ("128 x 128", "128 x 128"),
    (512, 7168): ("128 x 256", "128 x 128"),
    (4096, 4096): ("128 x 256", "128 x 128"),
}  # M, N: the tiles to bfloat16 and to fp32
DTYPES = (torch.bfloat16, torch.float32)


def out(M, N, dtype):
    return torch.empty((M, N), dtype=dtype, device="meta")


def mx(M, N, K):
    a, b = (torch.zeros(rows, K, dtype=torch.uint8).view(torch.float8_e4m3fn) for rows in (M, N))
    scales = (torch.zeros(rows, K // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu) for rows in (M, N))
    return a, next(scales), b, next(scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_is_the_largest_of_which_there_are_enough(dtype):
    with fake_gpu("sm90"):
        mx_by_memory.processors.cache_clear()
        found = {size: tile_of(out(*size, dtype)) for size in CALLS}
    assert found == {size: tiles[DTYPES.index(dtype)] for size, tiles in CALLS.items()}
    assert set(found.values()) == TILES.keys() - ({"128 x 256"} if dtype == torch.float32 else set())


@pytest.mark.turns(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(64, 512), (128, 7168), (4096, 4096)])
@pytest.mark.parametrize("module", [mx_gemm, nvfp4_gemm])
def test_each_compiles_without_spilling(module, M, N, dtype, monkeypatch):
    monkeypatch.setattr("builtins._", None, raising=False)  # as in test_compile
    is_mx = module is mx_gemm
    args = mx(M, N, 128) if is_mx else sized(M, N, 128, kinds=("values", "values"))
    code = compile_call(module.mx_gemm if is_mx else module.nvfp4_gemm, *args, target="sm90", out_dtype=dtype)
    assert not problems(code, (r"wgmma\.mma_async.*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor"), args, edge=False)
