"""The Gluon kernel of the NVFP4 matmuls with each of its tiles, and the values that it multiplies."""

import re
from functools import partial

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases import nvfp4_gemm as dense
from mxspec.cases import nvfp4_grouped_gemm as grouped
from mxspec.cases import nvfp4_grouped_gemm_wgrad as wgrad
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.common.matmul import MIN_SQNR_DB
from mxspec.reference.common.nvfp4_matmul import values
from tests.helpers import COMPILED_OUTPUTS, combined, on_hopper, runs_kernels

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.hopper.nvfp4 import launch as kernel
from mxspec.triton_kernels.tiles.nvfp4_matmul import nvfp4_tiles
from mxspec.triton_kernels.tiles.nvfp4_values import nvfp4_values

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

VALUES = "values", "values"
TILES = [tile for _, tile in kernel.TILES]


def name(value):
    """A test's name for a value: for a tile, its size."""
    return f"{value['BLOCK_M']}x{value['BLOCK_N']}" if isinstance(value, dict) else str(value)


each_tile = pytest.mark.parametrize("tile", TILES, ids=name)
# The operands of each call, and whether the rows of a and of b lie across the memory.
CALLS = {
    "nvfp4_gemm": partial(dense.sized, 304, 528, 352, kinds=VALUES),
    "nvfp4_grouped_gemm": partial(grouped.sized, [130, 0, 200, 1], 21, 528, 320, kinds=VALUES),
    "nvfp4_grouped_gemm_wgrad": partial(wgrad.sized, [97, 0, 321, 3], 64, 304, 512, kinds=VALUES),
}
EACH_CALL = [
    *(("nvfp4_gemm", across) for across in ("", "a", "b", "ab")),
    *(("nvfp4_grouped_gemm", across) for across in ("", "b")),  # `reads` declines the others
    ("nvfp4_grouped_gemm_wgrad", ""),
]
each_call = pytest.mark.parametrize(("op", "across"), EACH_CALL)


def operands(op, across):
    a, _, Ta, b, _, Tb, *offs = CALLS[op]()
    a, b = (t.mT.contiguous().mT if name in across else t for name, t in (("a", a), ("b", b)))
    return a, None, Ta, b, None, Tb, *offs


def launch(a, _, Ta, b, __, Tb, *offs, op, out_dtype, **tile):
    """The op by the Gluon kernel alone."""
    of_groups = {"grouped": "K" if "wgrad" in op else "M", "offs": offs[0]} if offs else {}
    shape = (len(offs[0]), a.shape[1], b.shape[1]) if "wgrad" in op else (a.shape[0], b.shape[-2])
    out = torch.empty(shape, dtype=out_dtype, device=a.device)
    if "wgrad" in op:
        a, b = a.mT, b.mT
    kernel.nvfp4_sm90(a, Ta, b, Tb, out, **of_groups, **tile)
    return out


@pytest.mark.parametrize(("call", "out_dtype", "tile"), combined(EACH_CALL, COMPILED_OUTPUTS, TILES), ids=name)
def test_every_tile_compiles_without_spilling(call, out_dtype, tile):
    op, across = call
    code = compile_call(launch, *operands(op, across), op=op, out_dtype=out_dtype, target="sm90", **tile)
    assert [c.kernel for c in code] == ["nvfp4_gemm_sm90"]
    patterns = r"wgmma\.mma_async.*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor\.2d\.shared", r"setmaxnreg"
    assert problems(code, patterns, (), edge=False) == []


def test_a_matmul_waits_while_another_runs():
    """A turn of the loop issues the matmuls of a stage, and then waits for those of the stage before."""
    code = compile_call(
        launch, *operands("nvfp4_gemm", ""), op="nvfp4_gemm", out_dtype=torch.bfloat16, target="sm90", **TILES[0]
    )  # fmt: skip
    ptx = code[0].ptx
    assert ptx.count("wgmma.wait_group.sync.aligned 1;") == 2  # one for each warpgroup
    assert ptx.count("wgmma.wait_group.sync.aligned 0;") == 2  # after the last block of K


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("kinds", [("codes", "codes"), ("codes", "values"), ("values", "codes"), VALUES], ids="-".join)
def test_codes_of_many_tokens_become_values_before_the_matmul(op, kinds):
    made = CALLS[op].func
    args = made(*([400, 9000, 64] if op == "nvfp4_gemm" else [[144, 0, 1600, 16], 32, 528, 320]), kinds=kinds)
    fn = getattr(dispatch.kernel_module(op, "triton"), op)
    layout = "plain" if op == "nvfp4_gemm" else "blocked"
    code = compile_call(fn, *args, scale_layout=layout, target="sm90")
    assert {c.kernel for c in code} == {"nvfp4_gemm_sm90", *(["_nvfp4_values"] if "codes" in kinds else [])}
    assert problems(code, (), (), edge=False) == []


@pytest.mark.parametrize("features", [16, 40, 72, 528])
def test_a_stage_of_the_wgrad_of_codes_expects_the_bytes_of_two_whole_tiles(features):
    """The device makes descriptors of whole tiles, whatever the number of features."""
    fn = dispatch.kernel_module("nvfp4_grouped_gemm_wgrad", "triton").nvfp4_grouped_gemm_wgrad
    code = compile_call(fn, *wgrad.sized([144, 0, 320, 16], 32, features, 512), target="sm90")
    ptx = next(c.ptx for c in code if c.kernel == "nvfp4_gemm_sm90")
    columns = kernel.tile_for(features, 512, 132, 4, "K")["BLOCK_N"]
    expected = {int(size) for size in re.findall(r"mbarrier\.arrive\.expect_tx\S* _, \[[^]]+\], (\d+);", ptx)}
    assert expected == {(128 + columns) * 128}


@on_hopper
@pytest.mark.parametrize("kinds", [("codes", "codes"), ("codes", "values")], ids="-".join)
@pytest.mark.parametrize("features", [16, 40, 72])
def test_the_wgrad_of_codes_of_few_features_and_many_tokens(features, kinds):
    """A program hands each stage round several times."""
    op = "nvfp4_grouped_gemm_wgrad"
    args = check.on_device(torch.device("cuda"), wgrad.sized([2048, 16, 3072], 0, features, 256, kinds=kinds))
    expected = dispatch.reference(op)(*args)
    assert (
        check.difference((getattr(dispatch.kernel_module(op, "triton"), op)(*args),), (expected,), MIN_SQNR_DB) is None
    )


@on_hopper
@each_tile
def test_a_tile_waits_for_the_buffer_of_the_tile_before(tile, monkeypatch):
    """One block of K, so that a program writes tile after tile."""
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    args = check.on_device(torch.device("cuda"), dense.sized(2000, 2048, 16, kinds=VALUES))
    expected = dispatch.reference("nvfp4_gemm")(*args)
    for _ in range(5):
        out = launch(*args, op="nvfp4_gemm", out_dtype=torch.bfloat16, **tile)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None


@pytest.mark.parametrize("op", ["nvfp4_gemm", "nvfp4_grouped_gemm"])
def test_few_tokens_read_the_codes_of_weights(op):
    """Their values are not written. A scale that is no whole word is for plain tiles, if tokens are very few."""
    fn, dense = getattr(dispatch.kernel_module(op, "triton"), op), op == "nvfp4_gemm"
    made, sizes = CALLS[op].func, [128] if dense else [[100, 0, 27, 1], 0]
    for kinds, kernels in (
        (("codes", "codes"), {"_nvfp4_values", "weights_sm90"}),
        (("values", "codes"), {"weights_sm90"}),
        (("codes", "values"), {"_nvfp4_values", "nvfp4_gemm_sm90"}),
        (VALUES, {"nvfp4_gemm_sm90"}),
    ):
        code = compile_call(fn, *made(*sizes, 528, 320, kinds=kinds), target="sm90")
        assert {c.kernel for c in code} == kernels | (
            {"tokens_even_first"} if "weights_sm90" in kernels and not dense else set()
        )
        assert problems(code, (), (), edge=False) == []
    odd = compile_call(fn, *made(*sizes, 528, 336), target="sm90")
    assert {c.kernel for c in odd} == ({"_nvfp4_values", "nvfp4_gemm_sm90"} if dense else {"_tiles"})


@pytest.mark.parametrize(
    ("M", "N", "tile"),
    [
        (1, 2048, (64, 32)),
        (16, 4096, (64, 32)),
        (64, 7168, (64, 64)),
        (128, 7168, (64, 128)),
        (128, 4096, (64, 64)),
        (256, 4096, (64, 128)),
        (256, 7168, (128, 128)),
        (2048, 5120, (128, 128)),
        (4096, 4096, (128, 256)),
    ],
)
def test_the_tile_follows_the_shape(M, N, tile):
    chosen = kernel.tile_for(M, N, 132)
    assert (chosen["BLOCK_M"], chosen["BLOCK_N"]) == tile


@pytest.mark.parametrize(
    ("M", "N", "E", "tile"),
    [(64, 2048, 8, (64, 128)), (2048, 4096, 8, (128, 128)), (4096, 4096, 8, (128, 256)), (8192, 1536, 16, (128, 128))],
)
def test_the_tile_of_groups_follows_the_shape(M, N, E, tile):
    chosen = kernel.tile_for(M, N, 132, E, "M")
    assert (chosen["BLOCK_M"], chosen["BLOCK_N"]) == tile


@on_hopper
@pytest.mark.parametrize("M", [1, 17, 40, 64, 65, 100, 128, 200, 1000])
@each_tile
def test_rows_that_are_not_read_do_not_matter(M, tile):
    """A tile may hold what earlier programs left, such as NaN."""
    args = check.on_device(torch.device("cuda"), dense.sized(300, 528, 2048, kinds=VALUES))
    launch(torch.full_like(args[0], torch.nan), *args[1:], op="nvfp4_gemm", out_dtype=torch.float32, **tile)
    args = check.on_device(torch.device("cuda"), dense.sized(M, 528, 2048, kinds=VALUES))
    with check.poisoned(0xFF):
        out = launch(*args, op="nvfp4_gemm", out_dtype=torch.float32, **tile)
    expected = dispatch.reference("nvfp4_gemm")(*args, out_dtype=torch.float32)
    assert check.difference((out,), (expected,), MIN_SQNR_DB) is None


def test_what_tma_cannot_read_is_for_plain_tiles():
    for op, args in {
        "nvfp4_gemm": dense.sized(304, 528, 350, kinds=VALUES),  # rows of 700 bytes
        "nvfp4_grouped_gemm": grouped.sized([130, 9], 0, 530, 320, kinds=VALUES),  # an output with rows of 1060 bytes
        "nvfp4_grouped_gemm_wgrad": wgrad.sized([97, 3], 0, 300, 512, kinds=VALUES),
    }.items():
        code = compile_call(getattr(dispatch.kernel_module(op, "triton"), op), *args, target="sm90")
        assert [c.kernel for c in code] == ["_tiles"]
    fn = dispatch.kernel_module("nvfp4_grouped_gemm", "triton").nvfp4_grouped_gemm
    # a group of rows across the memory begins at bytes that TMA cannot begin at; b may lie either way
    for across in ("a", "ab"):
        args = operands("nvfp4_grouped_gemm", across)
        code = compile_call(fn, *args, target="sm90")
        assert [c.kernel for c in code] == ["_tiles"]
    # 64 rows of the transpose of b would end in the next expert
    a, _, Ta, b, _, Tb, offs = grouped.sized([130, 9], 0, 528, 352, kinds=VALUES)
    code = compile_call(fn, a, None, Ta, b.mT.contiguous().mT, None, Tb, offs, target="sm90")
    assert [c.kernel for c in code] == ["_tiles"]


@runs_kernels
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_values_of_codes_are_exact(layout):
    device = check.default_device()

    def same(got, expected):
        assert got.double().equal(expected)

    for M, K in ((150, 208), (128, 64), (5, 16)):
        plain, laid = (check.on_device(device, dense.sized(M, 8, K, one)) for one in ("plain", layout))
        same(nvfp4_values(*laid[:2], layout), values(*plain[:2]))
    for sizes, rest in (([5, 33, 64, 0, 150], 10), ([0, 0, 128], 5)):
        plain, laid = (check.on_device(device, grouped.sized(sizes, rest, 40, 96, one)) for one in ("plain", layout))
        n = sum(sizes)
        same(nvfp4_values(*laid[:2], layout, laid[6], "M")[:n], values(*plain[:2])[:n])
        same(nvfp4_values(*laid[3:5], layout), values(*plain[3:5]))
    for sizes, rest in (([48, 160, 64, 0, 16], 32), ([0, 0, 128], 16)):
        plain, laid = (check.on_device(device, wgrad.sized(sizes, rest, 150, 40, one)) for one in ("plain", layout))
        n = sum(sizes)
        for i in (0, 3):
            got = nvfp4_values(laid[i].mT, laid[i + 1], layout, laid[6], "K")
            same(got[:, :n], values(plain[i].mT, plain[i + 1])[:, :n])


@on_hopper
@each_tile
@each_call
def test_every_tile_gives_the_reference(op, across, tile, monkeypatch):
    """Three processors, so that each has several tiles."""
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    args = check.on_device(torch.device("cuda"), operands(op, across))
    for out_dtype in MIN_SQNR_DB:
        with check.poisoned(0xFF):
            out = launch(*args, op=op, out_dtype=out_dtype, **tile)
        expected = dispatch.reference(op)(*args, out_dtype=out_dtype)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None
        assert launch(*args, op=op, out_dtype=out_dtype, **tile).equal(out)


@on_hopper
@pytest.mark.parametrize("K", [16, 64, 72, 128, 256, 320, 448, 1096])
def test_stages_are_handed_round_for_any_number_of_blocks(K, monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    args = check.on_device(torch.device("cuda"), dense.sized(700, 520, K, kinds=VALUES))
    for tile in TILES:
        out = launch(*args, op="nvfp4_gemm", out_dtype=torch.float32, **tile)
        expected = dispatch.reference("nvfp4_gemm")(*args, out_dtype=torch.float32)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None


@on_hopper
def test_tiles_and_the_gluon_kernel_give_a_row_the_same_bits():
    args = check.on_device(torch.device("cuda"), dense.sized(300, 528, 2048))
    fn = dispatch.kernel_module("nvfp4_gemm", "triton").nvfp4_gemm
    a, a_scale, *others = args
    whole = fn(*args)
    for rows in (1, 64, 128, 129):
        assert fn(a[:rows], a_scale[:rows], *others).equal(whole[:rows])
    by_tiles = torch.empty_like(whole)
    nvfp4_tiles(*args, by_tiles, "plain")
    assert by_tiles.equal(whole)
