"""The Gluon kernel on token groups, with each of its tiles. The cases of the ops are too small to choose them."""

import itertools
from functools import partial

import pytest
import torch
import triton

from mxspec import check, dispatch
from mxspec.cases import fp8_grouped_gemm as rows
from mxspec.cases import fp8_grouped_gemm_wgrad as tokens
from mxspec.cases import fp8_grouped_gemm_wgrad_ as in_place
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.fp8_gemm import MIN_SQNR_DB
from mxspec.reference.fp8_grouped_gemm import fp8_grouped_gemm
from mxspec.reference.fp8_grouped_gemm_wgrad import fp8_grouped_gemm_wgrad
from mxspec.reference.fp8_grouped_gemm_wgrad_ import fp8_grouped_gemm_wgrad_
from tests.helpers import COMPILED_OUTPUTS, adds_once, blocks_of_stages, fetches_its_descriptors, on_hopper

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.fp8_gemm import PTX
from mxspec.triton_kernels.hopper.fp8 import launch as kernel

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

ROW_TILES = [tile for _, tile in kernel.TILES]
TILES = [tile for _, tile in kernel.VECTOR_TILES]


def of(tiles):
    return pytest.mark.parametrize("tile", tiles, ids=lambda t: f"{t['BLOCK_M']}x{t['BLOCK_N']}")


each_row_tile, each_tile = of(ROW_TILES), of(TILES)
each_output = pytest.mark.parametrize("out_dtype", MIN_SQNR_DB, ids=str)
each_compiled_output = pytest.mark.parametrize("out_dtype", COMPILED_OUTPUTS, ids=str)
F32 = torch.float32


def forward(a, a_scale, b, b_scale, offs, tile, out_dtype=torch.bfloat16):
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    kernel.fp8_sm90(a, a_scale, b, b_scale, out, offs=offs, grouped="M", tile=tile)
    return out


def wgrad(dy, dy_scale, x, x_scale, offs, tile, out_dtype=F32):
    out = torch.empty(offs.shape[0], dy.shape[0], x.shape[0], dtype=out_dtype, device=dy.device)
    kernel.fp8_sm90(dy, dy_scale, x, x_scale, out, offs=offs, grouped="K", tile=tile)
    return out


def add(acc, dy, dy_scale, x, x_scale, offs, tile):
    kernel.fp8_sm90(dy, dy_scale, x, x_scale, acc, offs=offs, grouped="K", accumulate=True, tile=tile)


def on_gpu(args):
    return check.on_device(torch.device("cuda"), args)


def compiles(call, args, tile, out_dtype):
    code = compile_call(call, *args, tile=tile, out_dtype=out_dtype, target="sm90")
    assert [c.kernel for c in code] == ["fp8_gemm_sm90"]
    assert not problems(code, PTX["sm90"], (), edge=False)
    return code


@each_compiled_output
@each_row_tile
def test_every_tile_of_rows_compiles_without_spilling(tile, out_dtype):
    code = compiles(forward, rows.made([150, 129], 7, 264, 256, 1, "mn"), tile, out_dtype)
    assert fetches_its_descriptors(code[0].ptx)


@pytest.mark.parametrize("N", [256, 264])
@of([tile for tile in ROW_TILES if "RIGHT" in tile])
def test_a_large_tile_of_rows_compiles_without_spilling_for_any_number_of_columns(tile, N):
    """To bfloat16, with two buffers. Triton compiles another kernel for a multiple of 16."""
    compiles(forward, rows.made([150, 129], 7, N, 256, 1, "mn"), tile, torch.bfloat16)


@each_compiled_output
@each_tile
def test_every_tile_of_sums_over_tokens_compiles_without_spilling(tile, out_dtype):
    code = compiles(wgrad, tokens.made([128, 384, 256], 128, 264, 144), tile, out_dtype)
    assert not problems(code, (r"tensormap\.replace",), (), edge=False), "a group's matrix has a stride of its own"


def test_the_tile_for_short_groups_compiles_without_spilling():
    args = tokens.made([128, 384, 256], 128, 264, 144)
    code = compile_call(wgrad, *args, tile=kernel.SHORT_GROUPS, out_dtype=torch.bfloat16, target="sm90")
    assert not problems(code, PTX["sm90"], (), edge=False)


@each_tile
def test_every_tile_adds_without_spilling(tile):
    code = compile_call(add, *in_place.onto([128, 384, 256], 128, 264, 144), tile=tile, target="sm90")
    adding = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add"
    assert not problems(code, (adding,), (), edge=False)
    assert problems(code, (r"cp\.async\.bulk\.tensor\.2d\.global",), (), edge=False), "it writes as well"


SIZES = {
    "ragged": [257, 0, 1, 64, 300, 128, 0, 77],
    "aligned": [256, 512, 0, 256],
    "one group": [700],
    "all to the last": [0, 0, 0, 640],
    "none": [0, 0, 0],
    "many": [3, 0, 17, 140] * 20,
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))


@on_hopper
@each_size
@each_output
@each_row_tile
def test_tokens_of_any_groups(tile, out_dtype, sizes, monkeypatch):
    """Three processors, so that each has tiles of several groups. The rows past the last group hold NaN."""
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    stages = blocks_of_stages(tile)
    for blocks in (1, stages, 2 * stages + 1):
        args = on_gpu(rows.made(sizes, 70, 264, 128 * blocks, 1, "mn"))
        with check.poisoned(0xFF):
            out = forward(*args, tile, out_dtype)
        expected = fp8_grouped_gemm(*args, out_dtype=out_dtype)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None, f"{blocks} blocks"
        assert forward(*args, tile, out_dtype).equal(out)


@on_hopper
@each_row_tile
def test_rows_of_no_expert_are_zeros_whatever_was_there(tile, monkeypatch):
    """A program then has several blocks without an expert, of one group or of two."""
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    for sizes in ([40, 0, 300], [0] * 30):
        args = on_gpu(rows.made(sizes, 3000, 264, 256, 1, "mn"))
        with check.poisoned(0xFF):
            out = forward(*args, tile)
        assert not out[sum(sizes) :].any()
        assert check.difference((out,), (fp8_grouped_gemm(*args),), MIN_SQNR_DB) is None


BLOCKS = {
    "some": [3, 0, 1, 5, 2],
    "one each": [1] * 40,  # fewer blocks than stages, so that descriptors are overwritten while loads are in flight
    "one group": [9],
    "none": [0, 0],
    "the last": [0, 0, 0, 7],
    "long": [20, 30],
}


@on_hopper
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=list(BLOCKS))
@pytest.mark.parametrize(
    ("tile", "out_dtype"),
    [*itertools.product(TILES, MIN_SQNR_DB), (kernel.SHORT_GROUPS, torch.bfloat16)],
    ids=lambda value: "x".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_sums_over_the_tokens_of_any_groups(tile, out_dtype, blocks, monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    for N, K in ((264, 400), (64, 136), (520, 128)):
        args = on_gpu(tokens.made([128 * b for b in blocks], 256, N, K))
        with check.poisoned(0xFF):
            out = wgrad(*args, tile, out_dtype)
        expected = fp8_grouped_gemm_wgrad(*args, out_dtype=out_dtype)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None, f"{N}x{K}"
        assert wgrad(*args, tile, out_dtype).equal(out)


@on_hopper
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=list(BLOCKS))
@each_tile
def test_sums_are_added_once(tile, blocks, monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    made = on_gpu(in_place.onto([128 * b for b in blocks], 128, 264, 400, row=404))
    made[0][0, 0, 0] = -0.0
    adds_once(fp8_grouped_gemm_wgrad_, made, partial(add, tile=tile))


@on_hopper
@pytest.mark.parametrize("ends", [[90, 30, 60], [-128, 640, 10**6], [10**6, -(10**6), 0]], ids=str)
def test_offs_out_of_order_stay_inside(ends):
    """The values have no meaning.

    No access is outside of the operands and the result: compute-sanitizer would report it.
    """
    for call, args, tile in (
        (forward, rows.made([30, 30, 30], 30, 264, 256), ROW_TILES[0]),
        (wgrad, tokens.made([128, 256, 128], 128, 264, 144), TILES[0]),
    ):
        args = on_gpu(args)
        args[4].copy_(torch.tensor(ends, dtype=torch.int32))
        call(*args, tile)
        torch.cuda.synchronize()


@on_hopper
def test_the_callers_allocator_is_left_alone():
    asked = []

    def allocator(size, alignment, stream):
        asked.append(size)

    triton.set_allocator(allocator)
    args = on_gpu(tokens.made([128, 256], 0, 64, 64))
    assert wgrad(*args, TILES[-1]).isfinite().all()
    assert not asked


def test_what_tma_does_not_read_takes_plain_tiles():
    """With one block of K, its number is a constant to the compiler."""
    a, a_scale, b, b_scale, offs = rows.made([5, 30], 3, 40, 128)
    apart = torch.zeros(2, 41, 128, dtype=torch.uint8).view(b.dtype)[:, :40]
    fn = dispatch.kernel_module("fp8_grouped_gemm", "triton").fp8_grouped_gemm
    code = [compile_call(fn, a, a_scale, w, b_scale, offs, target="sm90")[0] for w in (b, apart)]
    assert [c.kernel for c in code] == ["fp8_gemm_sm90", "_tiles"]
    assert not problems(code, (), (), edge=False)
    fn = dispatch.kernel_module("fp8_grouped_gemm_wgrad_", "triton").fp8_grouped_gemm_wgrad_
    code = [compile_call(fn, *in_place.onto([128], 0, 40, 72, row=row), target="sm90")[0] for row in (76, 75)]
    assert [c.kernel for c in code] == ["fp8_gemm_sm90", "_tiles"]
    assert not problems(code, (), (), edge=False)


@pytest.mark.parametrize(
    ("M", "N", "E", "groups", "tile"),
    [
        (32768, 2048, 8, "M", (128, 256)),
        (512, 2048, 8, "M", (64, 128)),
        (64, 2048, 1, "M", (64, 16)),
        (1024, 1536, 128, "M", (64, 128)),
        (2048, 7168, 8, "K", (256, 128)),
        (64, 64, 2, "K", (64, 64)),
    ],
)
def test_the_tile_follows_the_shape(M, N, E, groups, tile):
    chosen = kernel.tile_for(M, N, 132, E, groups, vector=groups == "K")
    assert (chosen["BLOCK_M"], chosen["BLOCK_N"]) == tile


@pytest.mark.parametrize(
    ("M", "N", "E", "alignment", "tile"),
    [
        (4096, 2048, 8, 128, (128, 256)),  # 256 tiles on 132 processors, as many as two waves take
        (4096, 768, 8, 128, (128, 192)),  # 160 tiles of 192 columns, or 96 of 256, which would leave processors idle
        (1536, 4096, 8, 128, (128, 192)),  # 264 tiles: two waves
        (1536, 4096, 8, 64, (64, 128)),  # groups end inside tiles of 128 rows
        (1024, 4096, 8, 1, (64, 128)),
        (8192, 2048, 8, 1, (128, 256)),
    ],
)
def test_groups_of_whole_tiles_have_no_half_empty_tile(M, N, E, alignment, tile):
    chosen = kernel.tile_for(M, N, 132, E, "M", alignment=alignment)
    assert (chosen["BLOCK_M"], chosen["BLOCK_N"]) == tile


def test_the_op_tells_the_kernel_the_alignment_of_its_groups(monkeypatch):
    taken = []
    monkeypatch.setattr(kernel, "tile_for", lambda *args: taken.append(args[-1]) or kernel.WIDE)
    fn = dispatch.kernel_module("fp8_grouped_gemm", "triton").fp8_grouped_gemm
    for alignment in (1, 128):
        compile_call(fn, *rows.made([256, 128], 0, 256, 128, 1, "mn"), alignment=alignment, target="sm90")
    assert taken == [1, 128]


@pytest.mark.parametrize(("out_dtype", "buffers"), [(torch.bfloat16, 2), (F32, 1)])
def test_the_large_tile_of_token_groups_has_four_stages_and_more_room_for_the_output(out_dtype, buffers, monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda device: 1)
    taken = []
    monkeypatch.setattr(kernel, "fp8_gemm_sm90", {(1,): lambda *args, **options: taken.append(options)})
    args = rows.made([256], 0, 256, 128, 1, "mn")
    forward(*args, None, out_dtype)
    assert [(one["BLOCK_N"], one["NUM_STAGES"], one["BUFFERS"]) for one in taken] == [(256, 4, buffers)]


@pytest.mark.parametrize(
    ("blocks", "E", "out_dtype", "stages"),
    [(7, 1, torch.bfloat16, 4), (8, 1, torch.bfloat16, 3), (7, 1, F32, 3), (31, 4, torch.bfloat16, 4)],
)
def test_groups_of_few_blocks_have_four_stages(blocks, E, out_dtype, stages, monkeypatch):
    """One processor, so that the large tile is chosen for a small output."""
    monkeypatch.setattr(kernel, "processors", lambda device: 1)
    taken = []
    monkeypatch.setattr(kernel, "fp8_gemm_sm90", {(1,): lambda *args, **options: taken.append(options["NUM_STAGES"])})
    dy, dy_scale, x, x_scale, _ = tokens.made([128 * blocks], 0, 256, 128)
    offs = torch.full((E,), 128 * blocks, dtype=torch.int32)
    wgrad(dy, dy_scale, x, x_scale, offs, None, out_dtype)
    assert taken == [stages]
