"""The Gluon kernel of the MX matmuls with each of its tiles, and the tiles that it leaves to the exact kernel."""

from functools import partial

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases import mx_gemm as dense
from mxspec.cases import mx_grouped_gemm as grouped
from mxspec.cases import mx_grouped_gemm_wgrad as wgrad
from mxspec.cases.common.mx_operands import E4M3FN, E5M2
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.common.matmul import MIN_SQNR_DB
from tests.helpers import COMPILED_OUTPUTS, combined, on_hopper

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.hopper.mx import launch as kernel

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

TILES = [tile for _, tile in kernel.TILES]


def name(value):
    """A test's name for a value: for a tile, its columns."""
    return str(value["BLOCK_N"] if isinstance(value, dict) else value)


each_tile = pytest.mark.parametrize("tile", TILES, ids=name)
each_layout = pytest.mark.parametrize("layout", ["plain", "blocked"])
each_format = pytest.mark.parametrize("dtypes", [(E4M3FN, E5M2), (E5M2, E4M3FN)], ids=["e4m3", "e5m2"])
MADE = {
    "mx_gemm": partial(dense.made, 300, 528, 352),
    "mx_grouped_gemm": partial(grouped.made, [130, 0, 200, 1], 20, 528, 352),
    "mx_grouped_gemm_wgrad": partial(wgrad.made, [96, 0, 320, 32], 64, 304, 512),
}
SWAPPED = "mx_gemm swapped", "mx_grouped_gemm_wgrad swapped"
each_call = pytest.mark.parametrize("call", [*MADE, *SWAPPED])


def made(call, layout, dtypes):
    if call == "mx_grouped_gemm_wgrad swapped":  # the features of b are whole tiles
        return wgrad.made([96, 0, 320, 32], 64, 512, 304, layout, dtypes)
    return MADE[call.removesuffix(" swapped")](layout, dtypes)


def launch(*args, call, layout, out_dtype, **options):
    """The op by the Gluon kernel. Either operand may be the larger."""
    first, first_scale, second, second_scale, *offs = args
    if "wgrad" in call:
        first, second, kw = first.mT, second.mT, {"offs": offs[0], "grouped": "K"}
        shape = offs[0].shape[0], first.shape[0], second.shape[0]
    else:
        kw = {"offs": offs[0], "grouped": "M"} if offs else {}
        shape = first.shape[0], second.shape[-2]
    out = torch.empty(shape, dtype=out_dtype, device=first.device)
    if "swapped" in call:
        kernel.mx_sm90(second, second_scale, first, first_scale, out.mT, layout, **kw, **options)
    else:
        kernel.mx_sm90(first, first_scale, second, second_scale, out, layout, **kw, **options)
    return out


def reference(call, *args, **kwargs):
    return dispatch.reference(call.removesuffix(" swapped"))(*args, **kwargs)


@pytest.mark.parametrize(("call", "out_dtype", "tile"), combined([*MADE, *SWAPPED], COMPILED_OUTPUTS, TILES), ids=name)
def test_every_tile_compiles_without_spilling(call, out_dtype, tile):
    # The small kernels read the layout. Each layout is tried with each tile and with each call.
    layout = ("plain", "blocked")[((*MADE, *SWAPPED).index(call) + TILES.index(tile)) // 2 % 2]
    args = made(call, layout, (E4M3FN, E5M2))
    code = compile_call(launch, *args, call=call, layout=layout, out_dtype=out_dtype, target="sm90", **tile)
    assert [c.kernel for c in code] == ["mx_values", "mx_gemm_sm90", "_marked_tiles"]
    patterns = r"wgmma\.mma_async.*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor\.2d\.shared", r"setmaxnreg"
    assert not problems(code, patterns, (), edge=False)


def test_codes_are_made_bf16_without_a_turn_through_shared_memory():
    """A thread reads 16 codes with one instruction, and then holds the values that the tensor cores take."""
    args = made("mx_gemm", "plain", (E4M3FN, E4M3FN))
    options = {"call": "mx_gemm", "layout": "plain", "out_dtype": torch.bfloat16, "target": "sm90"}
    ptx = next(c.ptx for c in compile_call(launch, *args, **options) if c.kernel == "mx_gemm_sm90")
    # One turn of the loop: from a matmul to the wait for it, and from the loads of codes to the matmul.
    before, _, after = ptx.partition("wgmma.mma_async")
    loads = before[before.index("ldmatrix") :]
    loop = after[: after.index("wgmma.wait_group")] + loads
    assert loads.count("ldmatrix.sync.aligned.m8n8.x4.shared.b16") == 2  # 64 rows of 64 codes in 128 threads
    assert "st.shared" not in loop


@on_hopper
@each_tile
@each_layout
@each_format
@each_call
def test_every_tile_gives_the_reference(call, dtypes, layout, tile, monkeypatch):
    """Three processors, so that each has several tiles."""
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    args = check.on_device(torch.device("cuda"), made(call, layout, dtypes))
    for out_dtype in MIN_SQNR_DB:
        with check.poisoned(0xFF):
            out = launch(*args, call=call, layout=layout, out_dtype=out_dtype, **tile)
        expected = reference(call, *args, out_dtype=out_dtype, scale_layout=layout)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None
        assert launch(*args, call=call, layout=layout, out_dtype=out_dtype, **tile).equal(out)


@on_hopper
@each_tile
@each_layout
def test_experts_may_lie_apart_and_need_no_tokens(layout, tile, monkeypatch):
    """The weights of an expert are rows of a larger matrix, whose other rows are finite. An exact pass would mend NaN.

    One expert of many has all tokens, or none has.
    """
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    for sizes in ([300], [0, 0, 300, 0], [0] * 4, [0] * 40 + [3] + [0] * 300 + [70]):
        a, a_scale, b, b_scale, offs = check.on_device(torch.device("cuda"), grouped.made(sizes, 20, 136, 96, layout))
        apart = torch.full((len(sizes), 150, 128), 448.0, device="cuda").to(b.dtype)[:, 7:143, :96].copy_(b)
        inside = torch.full((136, len(sizes), 96), 448.0, device="cuda").to(b.dtype).transpose(0, 1).copy_(b)
        shifted = torch.zeros(b.numel() + 1, device="cuda").to(b.dtype)[1:].view(b.shape).copy_(b)
        assert kernel.reads_experts(apart)
        assert len(sizes) == 1 or not kernel.reads_experts(inside)  # such weights are copied
        assert not kernel.reads_experts(shifted)
        expected = reference("mx_grouped_gemm", a, a_scale, b, b_scale, offs, scale_layout=layout)
        options = {"call": "mx_grouped_gemm", "layout": layout, "out_dtype": torch.bfloat16, **tile}
        out = launch(a, a_scale, b, b_scale, offs, **options)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None
        for strided in (apart, inside, shifted):
            assert launch(a, a_scale, strided, b_scale, offs, **options).equal(out)
        repeated = b[:, :1].expand_as(b)  # one row of weights, N times
        of_rows = launch(a, a_scale, repeated, b_scale, offs, **options)
        assert of_rows.equal(launch(a, a_scale, repeated.contiguous(), b_scale, offs, **options))


def test_tma_reads_the_weights_of_experts_that_lie_whole_rows_apart():
    b = torch.empty(3, 136, 96, dtype=torch.int8)
    assert kernel.reads_experts(b)
    assert kernel.reads_experts(torch.empty(3, 150, 128, dtype=torch.int8)[:, 7:143, :96])
    assert kernel.reads_experts(b[:1].as_strided((1, 136, 96), (5, 96, 1)))  # one expert: its stride does not count
    assert not kernel.reads_experts(b.as_strided((3, 100, 96), (96 * 100 + 16, 96, 1)))
    assert not kernel.reads_experts(torch.empty(136, 3, 96, dtype=torch.int8).transpose(0, 1))
    assert not kernel.reads_experts(torch.empty(b.numel() + 1, dtype=torch.int8)[1:].view(b.shape))
    assert not kernel.reads_experts(torch.empty(3, 136, 104, dtype=torch.int8)[..., :96])
    for experts in (b, b[:1]):
        assert not kernel.reads_experts(experts[:, :1].expand_as(experts))  # one row, repeated


@on_hopper
@each_tile
@each_layout
def test_nothing_outside_is_written_if_offs_is_out_of_order(layout, tile):
    """Values have no meaning then. Memory around the output keeps its values, and no access fails."""
    a, a_scale, b, b_scale, offs = check.on_device(
        torch.device("cuda"), grouped.made([130, 0, 150], 20, 136, 96, layout)
    )
    a[3, 5] = torch.nan  # so that there are marks, too
    for wild in ([200, 100, 400], [-5, 3, 2], [2**31 - 1, 0, 20], [-(2**31), 2**31 - 1, -1], [0, 400, 380]):
        around = torch.full((600, 136), 7.0, device="cuda", dtype=torch.bfloat16)
        offs = torch.tensor(wild, device="cuda", dtype=torch.int32)
        kernel.mx_sm90(a, a_scale, b, b_scale, around[150:450], layout, offs=offs, grouped="M", **tile)
        torch.cuda.synchronize()
        assert (around[:150] == 7).all()
        assert (around[450:] == 7).all()


@on_hopper
@each_tile
def test_only_marked_tokens_of_groups_are_done_over(tile, monkeypatch):
    """A NaN of one token is in its own row alone, and a tile of tokens has marks for each 64 rows of weights.

    A tile that ends past its group has the next group's token too, and gets no mark for it.
    """
    marks = []
    real = kernel.mx_tiles
    monkeypatch.setattr(kernel, "mx_tiles", lambda *a, **kw: (marks.append(kw["marks"]), real(*a, **kw)))
    a, a_scale, b, b_scale, offs = check.on_device(
        torch.device("cuda"), grouped.made([130, 0, 300, 1], 20, 200, 96, "blocked")
    )
    options = {"call": "mx_grouped_gemm", "layout": "blocked", "out_dtype": torch.float32, **tile}
    clean = launch(a, a_scale, b, b_scale, offs, **options)
    assert marks.pop()[0] == 0  # the rows of no group hold NaN, and belong to no tile
    # The 130 tokens are two tiles of 128. Tokens 256 to 299 of the third expert are their group's third tile. The token
    # after them is alone.
    for token, of_128 in ((130 + 270, 4), (430, 5)):
        with_nan = a.clone()
        with_nan[token, 5] = torch.nan
        dirty = launch(with_nan, a_scale, b, b_scale, offs, **options)
        found = marks.pop()
        tiles = {tuple(mark) for mark in found[1 : 1 + 2 * found[0]].view(-1, 2).tolist()}
        rows = {of_128, of_128 + 1} if tile["BLOCK_N"] == 256 else {of_128}
        assert tiles == {(row, column) for row in rows for column in range(4)}
        assert dirty[token].isnan().all()
        dirty[token] = clean[token]
        assert dirty.equal(clean)


@pytest.mark.parametrize(
    ("T", "N", "E", "columns"),
    [
        (512, 1536, 128, 32), (64, 4096, 8, 32), (64, 4096, 256, 32), (4096, 1536, 128, 64), (2048, 1024, 16, 128),
        (16384, 1536, 128, 256), (4096, 2048, 8, 256), (32768, 2048, 64, 256),
    ],
)  # fmt: skip
def test_the_tile_of_token_groups_was_among_the_fastest(T, N, E, columns):
    """At 16384 tokens, 128 columns took 457 us and 256 took 469 us on an H200.

    Where the other shapes were measured with several tiles, no tile was faster than this one.
    """
    assert kernel.tile_for(N, T, 132, E, "N")["BLOCK_N"] == columns


@on_hopper
@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 7, 8, 9, 17])
def test_stages_are_handed_round_for_any_number_of_blocks(blocks, monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    args = check.on_device(torch.device("cuda"), dense.made(700, 520, 32 * blocks, "plain"))
    out = launch(*args, call="mx_gemm", layout="plain", out_dtype=torch.float32)
    expected = reference("mx_gemm", *args, out_dtype=torch.float32)
    assert check.difference((out,), (expected,), MIN_SQNR_DB) is None


@on_hopper
@pytest.mark.parametrize("dtype", [E4M3FN, E5M2], ids=str)
def test_every_code_by_every_scale(dtype):
    """Each of the 256 codes times each of the 256 scales, on either side, against a 1: exact at once, or done again."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    a = codes.repeat_interleave(256)[:, None].view(torch.uint8) * torch.eye(32, dtype=torch.uint8)[:1]
    a, a_scale = a.view(dtype), torch.arange(256, dtype=torch.uint8).repeat(256)[:, None]
    b = torch.zeros(48, 32).to(E4M3FN)
    b[:, 0] = 1.0
    args = a, a_scale.view(torch.float8_e8m0fnu), b, torch.full((48, 1), 127, dtype=torch.uint8)
    args = check.on_device(torch.device("cuda"), (*args[:3], args[3].view(torch.float8_e8m0fnu)))
    for call in ("mx_gemm", "mx_gemm swapped"):
        swapped = call.endswith("swapped")
        given = args if not swapped else (*args[2:], *args[:2])
        got = launch(*given, call=call, layout="plain", out_dtype=torch.float32)
        expected = reference("mx_gemm", *given, out_dtype=torch.float32)
        assert check.difference((got,), (expected,)) is None  # byte for byte: there is one product, and zeros


@on_hopper
def test_only_tiles_that_are_not_finite_are_done_over(monkeypatch):
    marks = []
    real = kernel.mx_tiles
    monkeypatch.setattr(kernel, "mx_tiles", lambda *a, **kw: (marks.append(kw["marks"]), real(*a, **kw)))
    a, a_scale, b, b_scale = check.on_device(torch.device("cuda"), dense.made(300, 520, 128, "plain"))
    a_scale.view(torch.uint8)[:, 1] = 0  # a block of zeros has the byte 0
    a[:, 32:64] = 0.0
    launch(a, a_scale, b, b_scale, call="mx_gemm", layout="plain", out_dtype=torch.float32, BLOCK_N=256, NUM_STAGES=4)
    assert marks.pop()[0] == 0
    for few in (1, 17, 40, 100):  # a tile of b may hold what earlier programs left there
        for tile in TILES:
            given = (a[:few], a_scale[:few], b, b_scale)
            launch(*given, call="mx_gemm swapped", layout="plain", out_dtype=torch.float32, **tile)
            assert marks.pop()[0] == 0
    b[300, 5] = torch.nan
    launch(a, a_scale, b, b_scale, call="mx_gemm", layout="plain", out_dtype=torch.float32, BLOCK_N=256, NUM_STAGES=4)
    found = marks.pop()
    assert {tuple(mark) for mark in found[1 : 1 + 2 * found[0]].view(-1, 2).tolist()} == {(0, 1), (1, 1), (2, 1)}
