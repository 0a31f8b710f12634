"""The Gluon kernel of bfloat16 by MXFP4 weights, with each of its tiles."""

import pytest
import torch

from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.common.matmul import MIN_SQNR_DB
from mxspec.reference.mx_gemm import mx_gemm as reference
from tests.helpers import combined, on_hopper

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.hopper.mx import launch_weights as kernel
from mxspec.triton_kernels.tiles.mx_weights import mx_weights

# Tiles that the launch does not choose: two warpgroups, other steps, other numbers of stages.
OTHERS = [
    {"BLOCK_M": 16, "BLOCK_N": 64, "STEP": 128, "STAGES": 8},
    {"BLOCK_M": 64, "BLOCK_N": 128, "STEP": 256, "STAGES": 4},
    {"BLOCK_M": 64, "BLOCK_N": 64, "STEP": 256, "STAGES": 2},
    {"BLOCK_M": 128, "BLOCK_N": 128, "STEP": 128, "STAGES": 5},
]
TILES = [*kernel.TILES.values(), kernel.MANY_TILES, *OTHERS]
LAYOUTS = "plain", "blocked"


def name(value):
    """A test's name for a value: for a tile, its numbers."""
    return "x".join(map(str, value.values())) if isinstance(value, dict) else str(value)


each_tile = pytest.mark.parametrize("tile", TILES, ids=name)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def operands(M, N, K, layout):
    """Scales at both ends of the range, too."""
    x = torch.randn(M, K, dtype=torch.bfloat16)
    scale = torch.randint(110, 125, (-(-N // 128) * 128, K // 32), dtype=torch.uint8)
    scale[:5, 1] = torch.tensor([0, 132, 133, 254, 255])
    b = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    # The tiles of 128 x 4 scales are in any order here: each of them is random.
    scale = scale.flatten() if layout == "blocked" else scale[:N]
    return x, b, scale.view(torch.float8_e8m0fnu)


def launch(x, b, b_scale, *, multiply, layout, out_dtype, **tile):
    out = torch.empty(x.shape[0], b.shape[0], dtype=out_dtype, device=x.device)
    multiply(x, b, b_scale, out, layout, **tile)
    return out


@pytest.mark.parametrize(("layout", "out_dtype", "tile"), combined(LAYOUTS, MIN_SQNR_DB, TILES), ids=name)
def test_every_tile_compiles_without_spilling(layout, out_dtype, tile):
    args = operands(200, 192, 1024, layout)
    options = {"layout": layout, "out_dtype": out_dtype, "target": "sm90"}
    code = compile_call(launch, *args, multiply=kernel.mx_weights_on_hopper, **options, **tile)
    assert [c.kernel for c in code] == ["mx_weights_sm90"]
    patterns = r"wgmma\.mma_async.*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor\.2d\.shared", r"mul\.rn\.bf16x2"
    assert problems(code, patterns, (), edge=False) == []


def test_a_wait_for_the_tensor_cores_comes_after_the_codes_of_the_next_step():
    args = operands(64, 192, 1024, "plain")
    options = {"layout": "plain", "out_dtype": torch.bfloat16, "target": "sm90"}
    ptx = compile_call(launch, *args, multiply=kernel.mx_weights_on_hopper, **options)[0].ptx
    multiplied = ptx.index("wgmma.commit_group")
    assert ptx.index("mul.rn.bf16x2", multiplied) < ptx.index("wgmma.wait_group", multiplied)


@pytest.mark.parametrize(("M", "rows"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128), (1000, 128)])
def test_the_tile_has_as_many_tokens_as_there_are(M, rows):
    assert kernel.tile_for(M, 4096, 132)["BLOCK_M"] == rows


@pytest.mark.parametrize(("M", "N", "step"), [(16, 57344, 256), (32, 57344, 128), (32, 14336, 256), (17, 16960, 128)])
def test_more_tiles_than_two_a_processor_take_shorter_steps(M, N, step):
    assert kernel.tile_for(M, N, 132)["STEP"] == step


@on_hopper
@each_tile
@each_layout
@pytest.mark.parametrize(("M", "N", "K"), [(200, 328, 1024), (5, 64, 256), (128, 1000, 2304)])
def test_every_tile_gives_the_bits_of_the_plain_tiles(M, N, K, layout, tile):
    args = [t.cuda() for t in operands(M, N, K, layout)]
    options = {"layout": layout, "out_dtype": torch.float32}
    got = launch(*args, multiply=kernel.mx_weights_on_hopper, **options, **tile)
    assert torch.equal(got.view(torch.int32), launch(*args, multiply=mx_weights, **options).view(torch.int32))
    x, b, scale = args
    expected = reference(x, None, b, scale, out_dtype=torch.float32, scale_layout=layout)
    assert torch.equal(got.isnan(), expected.isnan())
    ordinary = expected.isfinite().all(0) & (expected.abs() < 2.0**30).all(0)
    off = (got - expected)[:, ordinary].square().sum() / expected[:, ordinary].square().sum()
    assert ordinary.sum() > N - 8
    assert off < 10 ** -(MIN_SQNR_DB[torch.float32] / 10)
