"""The Gluon kernel of fp8_gemm with each of its tiles. The cases of the op are too small to choose them."""

from functools import partial

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases.fp8_gemm import operands
from mxspec.cases.fp8_gemm_ import onto
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, fp8_gemm
from mxspec.reference.fp8_gemm_ import fp8_gemm_
from tests.helpers import COMPILED_OUTPUTS, adds_once, blocks_of_stages, fetches_its_descriptors, on_hopper

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.fp8_gemm import PTX
from mxspec.triton_kernels.hopper.fp8 import launch as kernel

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

TILES = [*((tile, 128) for _, tile in kernel.TILES), *((tile, 1) for _, tile in kernel.VECTOR_TILES)]
# Each tile with the rows of b that share a scale.
each_tile = pytest.mark.parametrize(
    ("tile", "rows"), TILES, ids=[f"{t['BLOCK_M']}x{t['BLOCK_N']}, scales of {rows}x128" for t, rows in TILES]
)
each_output = pytest.mark.parametrize("out_dtype", MIN_SQNR_DB, ids=str)
each_compiled_output = pytest.mark.parametrize("out_dtype", COMPILED_OUTPUTS, ids=str)


def launch(a, a_scale, b, b_scale, tile, out_dtype):
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    kernel.fp8_sm90(a, a_scale, b, b_scale, out, tile=tile)
    return out


@each_compiled_output
@each_tile
def test_every_tile_compiles_without_spilling(tile, out_dtype, rows):
    # The order of the scales decides how they are loaded. Neighbouring tiles have different orders.
    # `make complete` tries each order with each tile.
    major = ("k", "mn")[(TILES.index((tile, rows)) + list(MIN_SQNR_DB).index(out_dtype)) % 2]
    made = operands(300, 264, 256, rows, major=major)
    code = compile_call(launch, *made, tile=tile, out_dtype=out_dtype, target="sm90")
    assert not problems(code, (), (), edge=False)
    assert fetches_its_descriptors(code[0].ptx)
    for pattern in (*PTX["sm90"], r"cp\.async\.bulk\.tensor\.2d\.shared", r"setmaxnreg"):
        assert not problems(code, (pattern,), (), edge=False) or tile["WARPGROUPS"] == 1


def add(acc, a, a_scale, b, b_scale, tile):
    kernel.fp8_sm90(a, a_scale, b, b_scale, acc, tile=tile, accumulate=True)


@each_tile
def test_every_tile_adds_without_spilling(tile, rows):
    code = compile_call(add, *onto(300, 264, 256, rows, row=268), tile=tile, target="sm90")
    assert not problems(code, (), (), edge=False)
    names = [c.kernel for c in code]
    adding = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add"
    assert names == ["fp8_gemm_sm90"]
    assert not problems(code, (adding,), (), edge=False)
    assert problems(code, (r"cp\.async\.bulk\.tensor\.2d\.global",), (), edge=False), "it writes as well"


@on_hopper
@each_tile
def test_every_tile_adds_once(tile, rows, monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    made = check.on_device(torch.device("cuda"), onto(700, 520, 128 * 9, rows, row=524, major="mn"))
    adds_once(fp8_gemm_, made, partial(add, tile=tile))


@on_hopper
@each_output
@each_tile
def test_stages_are_handed_round_for_any_number_of_blocks_and_tiles(tile, out_dtype, rows, monkeypatch):
    """Three processors, so that each has several tiles. K has fewer blocks than stages, as many, and more."""
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    stages = blocks_of_stages(tile)
    for blocks in (1, 2, stages - 1, stages, stages + 1, 2 * stages + 1):
        made = check.on_device(torch.device("cuda"), operands(700, 520, 128 * blocks, rows, major="mn"))
        with check.poisoned(0xFF):
            out = launch(*made, tile, out_dtype)
        expected = fp8_gemm(*made, out_dtype=out_dtype)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None, f"{blocks} blocks"
        assert launch(*made, tile, out_dtype).equal(out)


@pytest.mark.parametrize(
    ("M", "N", "tile"),
    [
        (4096, 4096, (128, 256)),
        (16, 7168, (64, 64)),
        (16, 4096, (64, 32)),
        (16, 2112, (64, 16)),
        (128, 7168, (64, 128)),
        (128, 24576, (64, 128)),
        (512, 7168, (128, 256)),
        (512, 2112, (128, 64)),
        (512, 4096, (128, 128)),
        (1024, 5120, (128, 160)),
        (1536, 4096, (128, 192)),
    ],
)
def test_the_tile_follows_the_shape(M, N, tile):
    chosen = kernel.tile_for(M, N, 132)
    assert (chosen["BLOCK_M"], chosen["BLOCK_N"]) == tile


@pytest.mark.parametrize("right", [0, 32, 64, 128])
def test_tiles_cover_the_columns_and_none_is_empty(right):
    """A run of columns: first the left parts of 128 columns, then as many right parts."""
    BLOCK_N = 128 + right
    together = 128 // right if right else 1
    for N in range(16, 2000, 16):
        last = [run + left for run in range(0, N, together * BLOCK_N) for left in range(0, together * 128, 128)]
        assert kernel.tiles_along_n(N, BLOCK_N, right) == sum(left < N for left in last)


@pytest.mark.parametrize(
    ("M", "N", "tile"),
    [(4096, 4096, (256, 128)), (128, 7168, (128, 64)), (300, 264, (64, 64)), (128, 18432, (128, 128))],
)
def test_the_tile_for_scales_of_columns_follows_the_shape(M, N, tile):
    chosen = kernel.tile_for(M, N, 132, vector=True)
    assert (chosen["BLOCK_M"], chosen["BLOCK_N"]) == tile


@on_hopper
@pytest.mark.parametrize("M", [1, 16, 17, 32, 33, 40, 64, 100, 200, 1000])
@pytest.mark.parametrize("tile", [t for t, rows in TILES if rows > 1], ids=lambda t: f"{t['BLOCK_M']}x{t['BLOCK_N']}")
def test_of_few_rows_only_those_are_read(M, tile):
    """Stale contents of the tile do not matter: earlier programs may have left NaN there."""
    made = check.on_device(torch.device("cuda"), operands(M, 200, 4096, major="mn"))
    out = launch(*made, tile, torch.float32)
    assert check.difference((out,), (fp8_gemm(*made, out_dtype=torch.float32),), MIN_SQNR_DB) is None


def test_what_tma_does_not_read_takes_plain_tiles():
    a, a_scale, b, b_scale = operands(64, 128, 256)
    wide = torch.zeros(64, 257, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 1:]
    fn = dispatch.kernel_module("fp8_gemm", "triton").fp8_gemm
    names = [compile_call(fn, x, a_scale, b, b_scale, target="sm90")[0].kernel for x in (a, wide)]
    assert names == ["fp8_gemm_sm90", "_tiles"]
    fn = dispatch.kernel_module("fp8_gemm_", "triton").fp8_gemm_
    names = [compile_call(fn, *onto(64, 128, 256, row=row), target="sm90")[0].kernel for row in (132, 129)]
    assert names == ["fp8_gemm_sm90", "_tiles"]
    column = onto(64, 1, 256)
    column = torch.zeros(64, 8)[:, :1].as_strided((64, 1), (8, 3)), *column[1:]  # all its columns are the same column
    assert compile_call(fn, *column, target="sm90")[0].kernel == "_tiles"
