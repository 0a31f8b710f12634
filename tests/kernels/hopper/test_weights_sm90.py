"""The Gluon kernel of few bfloat16 tokens by weights in codes, with each format of the codes and each of its tiles."""

import re
from typing import Any

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases.common.token_groups import offs_of
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from mxspec.reference.common.matmul import MIN_SQNR_DB
from mxspec.reference.mx_gemm import mx_gemm as reference
from mxspec.reference.mx_grouped_gemm import mx_grouped_gemm as grouped_reference
from mxspec.reference.to_blocked import to_blocked
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from tests.helpers import COMPLETE, on_hopper, u8

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.hopper.mx import launch as mx
from mxspec.triton_kernels.hopper.nvfp4 import launch as nvfp4
from mxspec.triton_kernels.hopper.weights import launch as kernel
from mxspec.triton_kernels.hopper.weights.tokens import even_first
from mxspec.triton_kernels.tiles.mx_weights import mx_weights
from mxspec.triton_kernels.tiles.nvfp4_matmul import nvfp4_tiles

pytestmark = pytest.mark.turns(8)  # each test compiles kernels


def tile(rows, columns, step, stages, parts):
    return {"BLOCK_M": rows, "BLOCK_N": columns, "STEP": step, "STAGES": stages, "PARTS": parts}


OF_MATRICES = kernel.TILES, kernel.TILES_OF_MANY, *kernel.TILES_BY_NUMBER.values()
CHOSEN = {
    (rows, kernel.BLOCK_N, *of_stage)
    for tiles in (*OF_MATRICES, kernel.TILES_OF_EXPERTS)
    for of_format in tiles.values()
    for rows, of_stage in of_format.items()
}
# Tiles that the launch does not choose: two warpgroups, other steps, other numbers of stages.
OTHERS = [(16, 64, 128, 8, 1), (64, 128, 256, 2, 2)]
TILES = [tile(*of) for of in [*sorted(CHOSEN), *OTHERS]]
LAYOUTS = "plain", "blocked"
# The dtypes of codes and of scales, and the columns of K that a scale is for.
FORMATS = {
    "mxfp4": (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32),
    "nvfp4": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
    "e4m3": (torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
    "e5m2": (torch.float8_e5m2, torch.float8_e8m0fnu, 32),
}
OF_EXPERTS = ("nvfp4", "e4m3", "e5m2")  # formats of tokens, too
FP8 = {"e4m3": "fp8", "e5m2": "fp8"}  # the name of their tiles


def name(value):
    """A test's name for a value: for a tile, its numbers."""
    return "x".join(map(str, value.values())) if isinstance(value, dict) else str(value)


each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_format = pytest.mark.parametrize("format", FORMATS)


def codes_of(format, *shape):
    dtype = FORMATS[format][0]
    if dtype == torch.float4_e2m1fn_x2:
        return torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8).view(dtype)
    return torch.randn(*shape).to(dtype)


def scales_of(format, rows, K, rare=()):
    """Plain scales. `rare` are bytes for the first rows of the second column."""
    _, dtype, block = FORMATS[format]
    low, high = (0x28, 0x48) if format == "nvfp4" else (118, 125)
    scale = torch.randint(low, high, (*rows, K // block), dtype=torch.uint8)
    scale[..., : len(rare), 1] = torch.tensor(rare, dtype=torch.uint8)
    return scale.view(dtype)


RARE = {"mxfp4": (0, 132, 133, 254, 255), "nvfp4": (0, 1, 7, 8, 0x7E, 0x7F, 0x81, 0xFF), "e4m3": (), "e5m2": ()}


def weights(format, rows, K, layout):
    scale = scales_of(format, rows, K, RARE[format])
    return codes_of(format, *rows, K), to_blocked(scale) if layout == "blocked" else scale


def launch(x, b, b_scale, *, layout, out_dtype, experts=False, even=False, **tile):
    """The kernel alone. The plan and the marks have any contents, because nothing reads them."""
    nvfp4, few = b_scale.dtype == torch.float8_e4m3fn, b.dtype == torch.float4_e2m1fn_x2
    out = torch.empty(x.shape[0], b.shape[-2], dtype=out_dtype, device=x.device)
    one = x.new_ones(b.shape[:-2], dtype=torch.float32)
    numbers = (one, int(experts), one, int(experts)) if nvfp4 else None
    kernel.by_weights(
        x, b, b_scale, out, layout, numbers=numbers, shift=0 if few else 4,
        plan=x.new_empty(7, 4, dtype=torch.int32) if experts else None,
        marks=None if few else x.new_empty(999, dtype=torch.int32), EVEN_FIRST=even, **tile,
    )  # fmt: skip
    return out


# MXFP4 scales of 864 columns are 27 bytes of a row, and those of 960 are 15 pairs of bytes.
PLACES = [(K, layout) for K in (1024, 960, 864) for layout in LAYOUTS]


def stages_of(format, experts):
    """The tiles that the launch chooses, each with whether tokens are sorted for it."""
    found = {}
    for chosen in (kernel.TILES_OF_EXPERTS,) if experts else OF_MATRICES:
        for rows, of in chosen.get(FP8.get(format, format), {}).items():
            sorted_or_not = (False,) if format in FP8 else (True,) if experts and rows <= 32 else (False, True)
            found |= {(rows, kernel.BLOCK_N, *of, even): None for even in sorted_or_not}
    return [(tile(*of), even) for *of, even in found]


LAUNCHED = [
    (format, experts, *of) for format in FORMATS for experts in (False, True) for of in stages_of(format, experts)
]
# Each tile that the launch chooses, with one of the places of scales. `make complete` takes all of them.
COMPILED = [
    (*call, *place) for i, call in enumerate(LAUNCHED) for place in (PLACES if COMPLETE else [PLACES[i % len(PLACES)]])
]
COMPILED += [("mxfp4", False, tile(*OTHERS[0]), False, *PLACES[0]), ("nvfp4", True, tile(*OTHERS[1]), True, *PLACES[3])]


def test_the_scales_of_every_format_are_compiled_in_words_in_pairs_and_in_bytes():
    for format in FORMATS:
        assert {of[4] for of in COMPILED if of[0] == format} == {1024, 960, 864}


@pytest.mark.parametrize(("format", "experts", "tile", "even", "K", "layout"), COMPILED, ids=name)
def test_every_tile_compiles_without_spilling(format, experts, tile, even, K, layout):
    args = torch.randn(200, K).bfloat16(), *weights(format, (3, 192) if experts else (192,), K, layout)
    options = {"layout": layout, "out_dtype": torch.float32, "experts": experts, "even": even, "target": "sm90"}
    code = compile_call(launch, *args, **options, **tile)
    assert [c.kernel for c in code] == ["weights_sm90"]
    patterns = r"wgmma\.mma_async.*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor\.2d\.shared", r"mul\.rn\.bf16x2"
    assert problems(code, patterns, (), edge=False) == []
    # The assemblers of CUDA 12.8 and 13.3 take sums that begin with a constant for that constant, also after the
    # matmuls. They then leave out the check for Inf and NaN.
    sums = re.findall(r"wgmma\.mma_async\S+ \{([^}]+)\}", code[0].ptx)
    begin = re.findall(r"mov\.[bf]32\s+(%\w+), 0[fx]?0*;", code[0].ptx)
    assert sums
    assert not set(",".join(sums).split(",")) & set(begin)


@each_format
@pytest.mark.parametrize("parts", [1, 2])
def test_a_wait_for_the_tensor_cores_comes_after_the_codes_of_the_next_part(parts, format):
    """Two parts of the loop, then one of an odd number. The last part has no next."""
    args = torch.randn(16, 1024).bfloat16(), *weights(format, (192,), 1024, "plain")
    even = parts == 2 and FORMATS[format][0] == torch.float4_e2m1fn_x2
    of = tile(16, 64, 128 * parts, 3, parts)
    ptx = compile_call(launch, *args, layout="plain", out_dtype=torch.bfloat16, even=even, target="sm90", **of)[0].ptx
    running = [after.split("wgmma.wait_group")[0] for after in ptx.split("wgmma.commit_group")[1:]]
    assert ["mul.rn.bf16x2" in meanwhile for meanwhile in running[:4]] == [True, True, True, False]


# --- the choice ---------------------------------------------------------------------------------------------------


def chosen(format, M, *rows, K=2048):
    with fake_gpu("sm90"):
        return kernel.tile_for(M, *(t.to("meta") for t in weights(format, rows, K, "plain")))


@pytest.mark.parametrize(
    ("M", "N", "rows"),
    [
        (1, 64, 16),
        (16, 64, 16),
        (17, 64, 32),
        (64, 64, 64),
        (65, 8448, 128),
        (65, 4096, 64),
        (128, 8448, 128),
        (999, 64, 64),
    ],
)
def test_the_tile_has_as_many_tokens_as_there_are_and_fewer_if_processors_are_idle(M, N, rows):
    for format in FORMATS:
        assert chosen(format, M, N, K=128)["BLOCK_M"] == rows


@pytest.mark.parametrize(
    ("of_each", "tiles"),
    [
        (2, kernel.TILES),
        (3, kernel.TILES_OF_MANY),
        (4, kernel.TILES_OF_MANY),
        (5, kernel.TILES_OF_MANY),
        (6, kernel.TILES_OF_MANY),
    ],
)
@pytest.mark.parametrize("M", [16, 32, 64, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_the_stages_of_a_matrix_follow_its_tiles_for_each_processor(format, M, of_each, tiles):
    name = FP8.get(format, format)
    stages = {**tiles[name], **kernel.TILES_BY_NUMBER.get(of_each, {}).get(name, {})}[M]
    for N in (64 * 132 * (of_each - 1) + 64, 64 * 132 * of_each):
        assert tuple(chosen(format, M, N, K=128).values()) == (M, 64, *stages)


def test_the_tiles_of_a_matrix_are_counted_for_all_its_tokens():
    few, three = chosen("mxfp4", 256, 8448, K=128), chosen("mxfp4", 384, 8448, K=128)
    assert (few["STAGES"], three["STAGES"]) == (3, 2)


@pytest.mark.parametrize(("of_each", "rows"), [(1, 16), (10, 16), (11, 32), (40, 32), (41, 64), (96, 64), (97, 128)])
def test_the_tile_of_experts_follows_their_tokens(of_each, rows):
    for format in OF_EXPERTS:
        assert chosen(format, 6 * of_each, 6, 64, K=128)["BLOCK_M"] == rows


@pytest.mark.parametrize(
    ("format", "M", "rows", "few"),
    [
        ("nvfp4", 384, (9000,), True),
        ("nvfp4", 385, (9000,), False),
        ("nvfp4", 385, (2048,), False),
        ("e4m3", 384, (2048,), True),
        ("e4m3", 385, (2048,), False),
        ("e4m3", 64, (9000,), True),
        ("e4m3", 65, (9000,), False),
        ("e4m3", 256, (4096,), True),
        ("e4m3", 320, (4096,), False),
        ("e4m3", 300, (200,), False),
        ("nvfp4", 6 * 384, (6, 64), True),
        ("nvfp4", 6 * 384 + 1, (6, 64), False),
        ("e5m2", 6 * 128, (6, 64), True),
        ("e5m2", 6 * 128 + 1, (6, 64), False),
    ],
)
def test_few_tokens_are_those_for_which_this_kernel_is_faster(format, M, rows, few):
    with fake_gpu("sm90"):
        b = weights(format, rows, 128, "plain")[0].to("meta")
        assert kernel.pays(M, b) == few


def test_what_the_kernel_cannot_read():
    with fake_gpu("sm90"):
        for format in FORMATS:
            b = codes_of(format, 3, 64, 384).to("meta")
            x = torch.empty(5, 384, dtype=torch.bfloat16, device="meta")
            assert kernel.reads(None, b)
            assert kernel.reads(x, b)
            assert not kernel.reads(torch.empty(5, 388, device="meta").bfloat16()[:, :-4], b)
            assert not kernel.reads(x.t().contiguous().t(), b)
            spaced = torch.empty(3, 64, b.shape[-1] + 8, dtype=torch.uint8, device="meta").view(b.dtype)
            assert not kernel.reads(x, spaced[..., : b.shape[-1]])
            close = torch.empty(9999, dtype=torch.uint8, device="meta").view(b.dtype)
            assert not kernel.reads(x, close.as_strided(b.shape, (64, 16, 1)))
            inside = torch.empty(64, 3, b.shape[-1], dtype=torch.uint8, device="meta").view(b.dtype).transpose(0, 1)
            assert not kernel.reads(x, inside)
            assert not kernel.reads(x, b[:, :1].expand(3, 64, -1))
            unit = 2**28 // (384 // b.shape[-1])
            assert kernel.reads(None, b.new_empty(64, unit - 128))
            assert not kernel.reads(None, b.new_empty(64, unit))


def test_scales_are_words_pairs_or_bytes():
    for format in FORMATS:
        of_word = 4 * FORMATS[format][2]
        b, scale = (t.to("meta") for t in weights(format, (3, 64), of_word * 3, "plain"))
        assert kernel.bytes_at_once(b, scale, "plain") == 4
        assert kernel.bytes_at_once(b, to_blocked(scale), "blocked") == 4
        assert kernel.bytes_at_once(b, scale.mT.contiguous().mT, "plain") == 1
        for width, size in ((13, 1), (14, 2), (16, 4)):
            wide = torch.empty(3, 64, width, device="meta").to(scale.dtype)
            assert kernel.bytes_at_once(b, wide[..., :12], "plain") == size
        for first, size in ((1, 1), (2, 2), (4, 4)):
            wide = torch.empty(3, 64, 16, device="meta").to(scale.dtype)
            assert kernel.bytes_at_once(b, wide[..., first : first + 12], "plain") == size  # by the offset
            moved = torch.empty(3 * 64 * 12 + 4, dtype=torch.uint8)[first:].numpy()[: 3 * 64 * 12]
            moved = torch.from_numpy(moved).view(scale.dtype).view(3, 64, 12)
            assert moved.storage_offset() == 0
            assert kernel.bytes_at_once(b, moved, "plain") == size  # by the address
        odd = torch.from_numpy(torch.empty(3 * 64 * 12 + 4, dtype=torch.uint8).numpy()[1:])[3:]
        assert odd.data_ptr() % 4 == 0
        assert kernel.bytes_at_once(b, odd.view(scale.dtype).view(3, 64, 12), "plain") == 1  # PyTorch sees no words
        for experts in (1, 3):  # words that lie 4 bytes apart, and experts that do not
            whole = torch.empty(9999, dtype=torch.uint8, device="meta").view(scale.dtype)
            for odd in (0, 1):
                of_experts = whole.as_strided((experts, 64, 12), (770 - odd, 12, 1))
                assert kernel.bytes_at_once(b[:experts], of_experts, "plain") == 2 - odd
                tiles = whole.as_strided((experts, 2048), (2050 - odd, 1))
                assert kernel.bytes_at_once(b[:experts], tiles, "blocked") == 2 - odd
        for less, size in ((1, 1), (2, 2)):  # two words and three bytes, two words and a pair
            b, scale = (t.to("meta") for t in weights(format, (64,), of_word * 3 - less * FORMATS[format][2], "plain"))
            assert kernel.bytes_at_once(b, scale, "plain") == size
            assert kernel.bytes_at_once(b, to_blocked(scale), "blocked") == size


@pytest.mark.parametrize(
    ("M", "rows", "K", "sorts"),
    [
        (16, (8192,), 8192, True),
        (16, (8192,), 8160, False),
        (999, (8192,), 8192, True),
        (7, (3, 64), 128, True),
        (32 * 3, (3, 64), 128, True),
        (64 * 3, (3, 4096), 128, True),
        (64 * 3 + 1, (3, 4096), 128, False),
        (64 * 3, (3, 64), 128, False),
        (64 * 3, (2, 6144), 128, True),
    ],
)
def test_tokens_are_sorted_if_weights_take_longer_than_tokens(M, rows, K, sorts):
    with fake_gpu("sm90"):
        b, scale = (t.to("meta") for t in weights("mxfp4", rows, K, "plain"))
        assert kernel.sorts(M, b, kernel.tile_for(M, b, scale)["BLOCK_M"]) == sorts
        odd = torch.empty(b.numel() + 1, dtype=torch.uint8, device="meta")[1:].view(b.dtype).view(b.shape)
        assert not kernel.sorts(M, odd, 16)  # PyTorch sees no pairs of bytes there


@pytest.mark.parametrize("op", ["mx_gemm", "mx_grouped_gemm"])
def test_sorted_tokens_and_their_plan_take_one_launch(op):
    x, (b, scale) = torch.randn(40, 64).bfloat16(), weights("mxfp4", (3, 192), 64, "plain")
    fn, args = getattr(dispatch.kernel_module(op, "triton"), op), (x, None, b, scale, offs_of([40, 0, 0]))
    if op == "mx_gemm":
        args = x.new_empty(16, 8192), None, b.new_empty(8192, 4096), scale.new_empty(8192, 256)
    assert [c.kernel for c in compile_call(fn, *args, target="sm90")] == ["tokens_even_first", "weights_sm90"]


# --- the bits -----------------------------------------------------------------------------------------------------


def same_but_for_overflow(got, expected):
    """Sums with the largest scales may overflow in one order of K and stay finite in another. NaN is NaN in all.

    The columns have scales of many sizes. So each column has its own error.
    """
    assert torch.equal(got.isnan(), expected.isnan())
    ordinary = (expected.abs() < 2.0**30).all(0)
    assert ordinary.sum() > expected.shape[1] - 8
    got, expected = got[:, ordinary].double(), expected[:, ordinary].double()
    off = (got - expected).square().sum(0) / expected.square().sum(0)
    assert off.max() < 10 ** -(MIN_SQNR_DB[torch.float32] / 10)


@on_hopper
@pytest.mark.parametrize("tile", TILES, ids=name)
@each_layout
@pytest.mark.parametrize(
    ("M", "N", "K"), [(200, 328, 1024), (5, 64, 256), (128, 1000, 2304), (33, 200, 864), (33, 200, 960), (20, 70, 64)]
)
def test_every_tile_gives_the_bits_of_the_plain_tiles(M, N, K, layout, tile):
    """MXFP4, with scales at both ends of the range. Those of 960 and 864 columns are no whole words."""
    x, (b, scale) = torch.randn(M, K).bfloat16().cuda(), (t.cuda() for t in weights("mxfp4", (N,), K, layout))
    plain = torch.empty(M, N, device="cuda")
    mx_weights(x, b, scale, plain, layout)
    for even in (False, True):
        tokens = even_first(x)[0] if even else x
        with check.poisoned(0xFF):
            got = launch(tokens, b, scale, layout=layout, out_dtype=torch.float32, even=even, **tile)
        assert torch.equal(got.view(torch.int32), plain.view(torch.int32))
    expected = reference(x, None, b, scale, out_dtype=torch.float32, scale_layout=layout)
    same_but_for_overflow(got, expected)


@on_hopper
@each_format
def test_scale_bytes_may_lie_more_than_2_to_the_31_apart(format):
    """The last byte of a row lies 8 GB after the first: in a part, and from one part to the next."""
    x, (b, scale) = torch.randn(16, 512).bfloat16().cuda(), (t.cuda() for t in weights(format, (64,), 512, "plain"))
    blocks = scale.shape[1]
    far = torch.empty(2**33, dtype=torch.uint8, device="cuda").as_strided((64, blocks), (1, 2**33 // blocks))
    far.copy_(u8(scale))
    options = {"layout": "plain", "out_dtype": torch.float32, **tile(16, 64, 256, 3, 1)}
    near = launch(x, b, scale, **options)
    assert torch.equal(u8(near), u8(launch(x, b, far.view(scale.dtype), **options)))


@on_hopper
@pytest.mark.parametrize("tile", TILES, ids=name)
@pytest.mark.parametrize(
    ("K", "layout"), [(896, "plain"), (864, "blocked"), (960, "plain"), (640, "blocked"), (64, "plain")]
)
@pytest.mark.parametrize("even", [False, True])
def test_every_tile_of_experts_gives_the_bits_of_the_plain_tiles(even, K, layout, tile, monkeypatch):
    """MXFP4, with experts that have no tokens, and tokens of no expert. Of 960 columns, scales are read in pairs.

    Steps of 128 and of 256 columns: 7 and 4, 7 and 4, 8 and 4, 5 and 3, 1 and 1.
    """
    N, sizes, rest = 200, [33, 0, 130, 1, 0, 70], 21
    M, offs = sum(sizes) + rest, offs_of(sizes).cuda()
    b, scale = (t.cuda() for t in weights("mxfp4", (len(sizes), N), K, layout))
    x = torch.randn(M, K).bfloat16().cuda()
    x[-rest:] = torch.nan
    got, plain = torch.empty(M, N, device="cuda"), torch.empty(M, N, device="cuda")
    monkeypatch.setattr(kernel, "sorts", lambda *_: even)
    with check.poisoned(0xFF):
        kernel.by_e2m1(x, b, scale, got, layout, offs=offs, **tile)
        mx_weights(x, b, scale, plain, layout, offs=offs)
    assert torch.equal(got.view(torch.int32), plain.view(torch.int32))
    same_but_for_overflow(got, grouped_reference(x, None, b, scale, offs, out_dtype=torch.float32, scale_layout=layout))


def calls(format, layout, K) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Ops with operands for them: one matrix, and experts of which some have no tokens."""
    N, sizes, rest = 200, [33, 0, 130, 1, 0, 70], 21
    M, offs = sum(sizes) + rest, offs_of(sizes).repeat_interleave(2)[::2]
    b, b_scale = weights(format, (len(sizes), N), K, layout)
    apart = torch.zeros(len(sizes), N + 3, b.shape[2], dtype=torch.uint8).view(b.dtype)[:, :N]
    apart.view(torch.uint8)[:] = b.view(torch.uint8)
    b = apart
    if K == 864 and layout == "plain":
        b_scale = b_scale.mT.contiguous().mT
    a, a_scale = codes_of(format, M, K), scales_of(format, (M,), K)
    if format in ("e4m3", "e5m2"):  # sums that another kernel computes again
        a.view(torch.uint8)[7, 5], a_scale.view(torch.uint8)[40, 2] = 0x7F, 254
        b.view(torch.uint8)[2, 3, 9] = 0xFF
    blocked = layout == "blocked"
    one, groups = (to_blocked(a_scale), to_blocked_m_groups(a_scale, offs)[0]) if blocked else (a_scale, a_scale)
    of = {"out_dtype": torch.float32, "scale_layout": layout}
    if format != "nvfp4":
        return [
            ("mx_gemm", (a, one, b[2], b_scale[2]), of),
            ("mx_grouped_gemm", (a, groups, b, b_scale, offs), of),
        ]
    number, values = torch.rand(2 * len(sizes))[::2], torch.randn(M, K).bfloat16()
    number[1], number[4] = torch.nan, torch.inf  # of experts without tokens
    return [
        ("nvfp4_gemm", (a, one, number[0], b[2], b_scale[2], number[2]), of),
        ("nvfp4_gemm", (values, None, number[0], b[2], b_scale[2], number[2]), of),
        ("nvfp4_grouped_gemm", (a, groups, number, b, b_scale, number, offs), of),
        ("nvfp4_grouped_gemm", (values, None, number, b, b_scale, number, offs), of),
    ]


@on_hopper
@pytest.mark.parametrize("tile", TILES, ids=name)
@pytest.mark.parametrize(
    ("K", "layout"), [(896, "blocked"), (864, "plain"), (864, "blocked"), (960, "plain"), (640, "plain")]
)
@pytest.mark.parametrize(("format", "even"), [("nvfp4", False), ("nvfp4", True), ("e4m3", False), ("e5m2", False)])
def test_every_tile_gives_the_bits_of_the_kernels_for_many_tokens(format, even, K, layout, tile, monkeypatch):
    """Even and odd numbers of steps. The scales of 864 and of 960 columns are no whole words."""
    monkeypatch.setattr(kernel, "sorts", lambda *_: even)
    for op, args, options in calls(format, layout, K):
        args = check.on_device(torch.device("cuda"), args)
        expected = dispatch.reference(op)(*args, **options)
        offs = {"offs": args[-1]} if "grouped" in op else {}
        grouped = {**offs, "grouped": "M"} if offs else {}
        operands = args[:-1] if offs else args
        got, other = torch.empty_like(expected), torch.empty_like(expected)
        with check.poisoned(0xFF):
            few = nvfp4.few if format == "nvfp4" else mx.mx_few
            few(*operands, got, layout, **offs, **tile)
        many = nvfp4_tiles if format == "nvfp4" else mx.mx_sm90
        many(*operands, other, layout, **grouped)
        assert check.difference((got,), (expected,), MIN_SQNR_DB) is None
        assert torch.equal(got.view(torch.int32), other.view(torch.int32))


@on_hopper
@pytest.mark.parametrize("N", [96, 100])
@pytest.mark.parametrize("format", FORMATS)
def test_a_token_has_the_same_bits_with_one_more_token_than_this_kernel_takes(format, N):
    """The ops then take another kernel. Rows of 200 bytes are for plain tiles."""
    most, of_expert = (256, 384) if format == "mxfp4" else kernel.LIMITS[FORMATS[format][0]]
    K, E, wide = 256, 3, 64 * 300 + N
    b, scale = (t.cuda() for t in weights(format, (E, N), K, "plain"))
    for experts in (True, False):
        M = 1 + (of_expert * E if experts else most)
        a, a_scale = codes_of(format, M, K).cuda(), scales_of(format, (M,), K).cuda()
        if format == "mxfp4":
            a, a_scale = torch.randn(M, K).bfloat16().cuda(), None
        one = torch.ones(E if experts else (), device="cuda")
        w = (b, scale) if experts else tuple(t.cuda() for t in weights(format, (wide,), K, "plain"))
        sizes = torch.tensor([40, 50, M], dtype=torch.int32, device="cuda")
        op = ("nvfp4_" if format == "nvfp4" else "mx_") + ("grouped_gemm" if experts else "gemm")
        fn = getattr(dispatch.kernel_module(op, "triton"), op)
        number = (one,) if format == "nvfp4" else ()

        def run(rows, fn=fn, a=a, a_scale=a_scale, number=number, w=w, offs=sizes, experts=experts):
            of_groups = (offs.clamp(max=rows),) if experts else ()
            of_rows = None if a_scale is None else a_scale[:rows]
            return fn(a[:rows], of_rows, *number, *w, *number, *of_groups, scale_layout="plain")

        whole, few = run(M), 45 if experts else 7
        assert u8(whole[:-1]).equal(u8(run(M - 1)))
        assert u8(whole[:few]).equal(u8(run(few)))
