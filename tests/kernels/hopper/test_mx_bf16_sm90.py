"""MX matmuls by way of bf16 values: values that bf16 lacks, tiles computed again, and when this way is taken.

Also `mx_gemm` by e2m1 weights, whose large outputs go this way.
"""

import pytest
import torch

import mxspec
from mxspec import check, dispatch
from mxspec.cases import mx_gemm as dense
from mxspec.cases import mx_grouped_gemm as grouped
from mxspec.cases.common.mx_operands import E4M3FN, E5M2
from mxspec.cases.common.token_groups import offs_of
from mxspec.formats import FP8_DTYPES
from mxspec.machine_code.compile import compile_call, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.common.matmul import MIN_SQNR_DB, values

pytest.importorskip("triton")

from mxspec.triton_kernels.hopper.mx import by_memory as kernel
from tests.helpers import INTERPRETED, on_hopper, runs_kernels

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
compiles = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
each_layout = pytest.mark.parametrize("layout", ["plain", "blocked"])
OPS = "mx_gemm", "mx_grouped_gemm"


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Three processors, so that each has several tiles. A CPU's matmul cannot return fp32 for bf16, so replace it."""
    if not unavailable():
        return
    mm = torch.mm
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    if check.default_device().type == "cpu":
        monkeypatch.setattr(torch, "mm", lambda x, w, out_dtype=torch.bfloat16: mm(x.to(out_dtype), w.to(out_dtype)))


def multiply(*args, out_dtype=torch.bfloat16, scale_layout=None, check_offs=False):
    """Either op, also for small sizes."""
    a, a_scale, b, b_scale, *offs = args
    scale_layout = scale_layout or ("blocked" if offs else "plain")
    return kernel.mx_bf16(a, a_scale, b, b_scale, out_dtype, scale_layout, *offs)


def cases(op):
    """The cases with a sum to compute.

    For groups, those that PyTorch's matmul takes. The slow interpreter gets edges only. Where no kernel can run, there
    is no case to choose.
    """
    runs = INTERPRETED or check.default_device().type != "cpu"
    for case in dispatch.reference(op).spec.cases() if runs else ():
        if not case.raises and ("edge" in case.flags or not INTERPRETED):
            a, _, b, *_ = case.args()
            fp8 = a.dtype in FP8_DTYPES and b.dtype in FP8_DTYPES  # `by_weights` multiplies e2m1
            if fp8 and a.numel() and b.numel() and (op == "mx_gemm" or b.shape[1] % 8 == 0):
                yield pytest.param(op, case, id=f"{op}, {case.name}")


@runs_kernels
@pytest.mark.parametrize(("op", "case"), [param for op in OPS for param in cases(op)])
def test_every_case_gives_the_reference(op, case):
    options = dict(case.kwargs)
    if op == "mx_grouped_gemm":
        options["out_dtype"] = torch.bfloat16
    args = check.on_device(check.default_device(), case.args())
    expected = dispatch.reference(op)(*args, **options)
    embedded = check.embedded(args, dispatch.reference(op), options)
    for given in (embedded,) if INTERPRETED else (args, args, embedded):
        with check.poisoned(0xFF):
            out = multiply(*given, **options)
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None


@runs_kernels
@pytest.mark.parametrize("dtype", [E4M3FN, E5M2], ids=str)
def test_flags_say_which_scales_lead_out_of_bf16(dtype):
    """The 256 codes under each scale, one in a row. A flag is raised only under scales that lead out of bf16."""
    device = check.default_device()
    codes = torch.zeros(256 * 256, 32, dtype=torch.uint8, device=device)
    codes[:, 7] = torch.arange(256, device=device).repeat(256)
    scale = torch.arange(256, dtype=torch.uint8, device=device).repeat_interleave(256)[:, None]
    codes, scale = codes.view(dtype), scale.view(torch.float8_e8m0fnu)
    flags = torch.zeros(3 + 256 * 256, dtype=torch.int32, device=device)
    got, exact = kernel.bf16_values(codes, scale, "plain", flags, 2), values(codes, scale)
    given = codes.double()
    normal = (exact.abs() >= 2.0**-126) & (exact.abs() < 2.0**128)
    needed = ~normal & given.isfinite() & (given != 0) & ~exact.isnan()
    of_row = flags[2:-1].bool()
    assert of_row.view(256, 256).any(1).equal(needed.view(256, -1).any(1))
    assert of_row[needed.any(1)].all()
    assert flags[:2].tolist() == [1, 0]
    assert flags[-1] == 0
    same = (got.double() == exact) | (got.isnan() & exact.isnan())
    assert (same | needed).all()


@runs_kernels
@pytest.mark.parametrize("up", [1 / 4, 1 / 16])  # of tokens, of weights
def test_a_part_of_e2m1_is_exact_under_every_scale(up):
    device = check.default_device()
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(256)[:, None].expand(-1, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8, device=device).repeat_interleave(256)[:, None]
    codes, scale = codes.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e8m0fnu)
    flags = torch.zeros(1 + 256 * 256, dtype=torch.int32, device=device)
    got, exact = kernel.bf16_values(codes, scale, "plain", flags, 1, up=up), values(codes, scale)
    assert not flags.any()
    assert torch.equal(got.double().nan_to_num(), (exact * up).nan_to_num())
    assert torch.equal(got.isnan(), exact.isnan())


@runs_kernels
@each_layout
def test_blocks_of_zeros_raise_no_flag(layout, monkeypatch):
    seen = []
    real = kernel.mx_tiles
    monkeypatch.setattr(kernel, "mx_tiles", lambda *a, **kw: (seen.append(kw["flags"]), real(*a, **kw)))
    a, a_scale, b, b_scale, offs = grouped.made([130, 0, 20], 6, 136, 96, "plain")
    a[7, 32:64], b[2, 130, :32] = 0.0, 0.0
    a_scale.view(torch.uint8)[7, 1], b_scale.view(torch.uint8)[2, 130, 0] = 0, 0
    operands = check.on_device(check.default_device(), (a, a_scale, b, b_scale))

    def flags():
        args = grouped.arguments(tuple(t.clone() for t in operands), offs.to(operands[0].device), layout)
        multiply(*args, scale_layout=layout)
        return seen.pop().nonzero().flatten().tolist()

    assert flags() == []
    operands[0][7, 33], operands[0][140, 3] = 2.0**-9, torch.nan
    operands[1].view(torch.uint8)[140, 1] = 255
    assert flags() == [0, 1 + 7]  # the flag for all, and the flag of a token
    operands[1].view(torch.uint8)[133, 2] = 254  # row 3 of the last group; two tiles come before it
    operands[2][2, 130, 5] = 1.0  # the second tile of the last expert
    # The tokens have five tiles of flags. Each expert has two.
    assert flags() == [0, 1 + 7, 1 + 2 * 128 + 3, 1 + 9 * 128 + 130]


@runs_kernels
@pytest.mark.parametrize("groups", [4, 300])
def test_offs_out_of_order_are_put_in_order(groups, monkeypatch):
    ends = []
    real = kernel.grouped_mm
    monkeypatch.setattr(kernel, "grouped_mm", lambda x, w, offs: (ends.append(offs), real(x, w, offs=offs))[1])
    a, a_scale, b, b_scale, _ = grouped.made([70] + [0] * (groups - 1), 0, 8, 32, "plain")
    wild = torch.full((groups,), 45, dtype=torch.int32)
    wild[:2], wild[-2:] = torch.tensor([-3, 50]), torch.tensor([2**30, 7])
    args = check.on_device(check.default_device(), (a, a_scale, b, b_scale, wild))
    assert multiply(*args, scale_layout="plain").shape == (70, 8)
    assert ends.pop().tolist() == [0, *[50] * (groups - 3), 70, 70]


@on_gpu
@pytest.mark.parametrize("op", OPS)
def test_a_graph_replays_with_other_values(op):
    """Nothing is read on the host, and no flag of one run stays for the next."""
    made = dense.made(300, 528, 352) if op == "mx_gemm" else grouped.made([130, 0, 200], 20, 528, 352, "plain")
    args = check.on_device(torch.device("cuda"), made)
    multiply(*args, scale_layout="plain")  # this call compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply(*args, scale_layout="plain")
    byte, others = args[1].view(torch.uint8), args[3].view(torch.uint8)
    # At the last, the products of both are ordinary numbers again.
    for beyond, other in ((0, 200), (250, 80), (127, 127)):
        byte[129], others[:] = beyond, other
        graph.replay()
        expected = dispatch.reference(op)(*args, scale_layout="plain")
        assert check.difference((out,), (expected,), MIN_SQNR_DB) is None
        assert check.difference((out[129],), (expected[129],), MIN_SQNR_DB) is None
        assert expected[129].any()


def taken(op, *shapes, out_dtype=torch.bfloat16):
    """The kernels that an op launches on Hopper for codes of two shapes."""
    codes = [torch.empty(shape, dtype=E4M3FN, device="meta") for shape in shapes]
    scales = [torch.empty(*c.shape[:-1], c.shape[-1] // 32, dtype=torch.float8_e8m0fnu, device="meta") for c in codes]
    offs = [offs_of([0] * shapes[1][0])] if op == "mx_grouped_gemm" else []
    run = getattr(dispatch.kernel_module(op, "triton"), op)
    options = {"out_dtype": out_dtype, "scale_layout": "plain", "target": "sm90"}
    code = compile_call(run, codes[0], scales[0], codes[1], scales[1], *offs, **options)
    assert not problems(code, (), (), edge=False)
    return {c.kernel for c in code}


@compiles
def test_large_outputs_take_this_way():
    by_bf16, itself = {"_prepare", "_bf16_values", "_flagged_tiles"}, {"mx_values", "mx_gemm_sm90", "_marked_tiles"}
    for out_dtype in MIN_SQNR_DB:  # 264 tiles: two for each of 132 processors
        assert taken("mx_gemm", (128 * 24, 64), (128 * 11, 64), out_dtype=out_dtype) == by_bf16
    assert taken("mx_gemm", (128 * 24, 64), (128 * 10, 64)) == itself
    assert taken("mx_gemm", (256, 64), (50304, 64)) == itself  # cuBLAS may split K for few rows
    assert taken("mx_gemm", (257, 64), (50304, 64)) == by_bf16
    assert taken("mx_grouped_gemm", (128 * 64, 64), (4, 1024, 64)) == by_bf16
    assert taken("mx_grouped_gemm", (128 * 64, 64), (4, 1024, 64), out_dtype=torch.float32) == itself
    # There are too many experts for the tokens.
    assert taken("mx_grouped_gemm", (128 * 64, 64), (5, 1024, 64)) == itself
    assert taken("mx_grouped_gemm", (128 * 64, 64), (4, 1026, 64)) == {"_tiles"}  # TMA cannot write such rows, either


def weights(N, K, device="meta"):
    bytes_of = [torch.randint(low, high, shape, dtype=torch.uint8) for low, high, shape in (
        (0, 256, (N, K // 2)), (110, 125, (N, K // 32)))]  # fmt: skip
    codes, scale = (t.to(device) for t in bytes_of)
    return codes.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e8m0fnu)


def taken_by_weights(M, N, K, stride=None, codes=False):
    a, a_scale = torch.empty(M, stride or K, dtype=torch.bfloat16, device="meta")[:, :K], None
    if codes:
        a, a_scale = mxspec.mx_quantize(a)
    run = dispatch.kernel_module("mx_gemm", "triton").mx_gemm
    code = compile_call(run, a, a_scale, *weights(N, K), target="sm90")
    assert not problems(code, (), (), edge=False)
    return {c.kernel for c in code}


@compiles
def test_large_outputs_of_e2m1_weights_are_multiplied_in_gluon():
    """cuBLAS may sum in another order than the kernels of few rows."""
    by_values = {"_bf16_values", "nvfp4_gemm_sm90"}
    assert taken_by_weights(128 * 24, 128 * 11, 512) == by_values
    assert taken_by_weights(128 * 24, 128 * 11, 512, codes=True) == by_values | {"_prepare", "_flagged_tiles"}
    for few in ((256, 50304, 512), (128 * 24, 128 * 10, 512), (128 * 24, 128 * 11 + 2, 512)):
        assert taken_by_weights(*few) == {"weights_sm90"}  # TMA cannot write the last one's rows
    assert taken_by_weights(128 * 24, 128 * 11, 512, stride=516) == {"_mx_weights"}  # nor read these tokens


@on_hopper
@pytest.mark.parametrize("out_dtype", MIN_SQNR_DB, ids=str)
@pytest.mark.parametrize("of_a", ["bfloat16", "e4m3fn", "e2m1"])
def test_few_rows_have_the_bits_of_many(of_a, out_dtype):
    K, N = 2048, 8192
    b, b_scale = weights(N, K, "cuda")
    b_scale.view(torch.uint8)[:5, 3] = torch.tensor([0, 132, 133, 254, 255])  # both ends, and the largest first factor
    x = torch.randn(4096, K, device="cuda").bfloat16()
    a = (x, None) if of_a == "bfloat16" else mxspec.mx_quantize(x, elem_dtype=of_a)

    def rows(M):
        few = [t if t is None else t[:M] for t in a]
        return mxspec.mx_gemm(*few, b, b_scale, out_dtype=out_dtype, backend="triton").view(torch.uint8)

    many = rows(4096)
    for M in (1, 16, 17, 64, 128, 256, 300):
        assert torch.equal(rows(M), many[:M]), M


@compiles
@each_layout
@pytest.mark.parametrize("op", OPS)
def test_values_are_read_and_written_in_wide_words(op, layout):
    args = dense.made(300, 528, 352, layout) if op == "mx_gemm" else grouped.made([130, 0, 200], 20, 528, 352, layout)
    for out_dtype in MIN_SQNR_DB if op == "mx_gemm" else (torch.bfloat16,):
        code = compile_call(multiply, *args, out_dtype=out_dtype, scale_layout=layout, target="sm90")
        assert not problems(code, (r"wgmma\.mma_async.*\.f32\.f16\.f16", r"mul\.(rn\.)?f32"), (), edge=False)
        wide = {(c.load_bytes, c.store_bytes) for c in code if c.kernel == "_bf16_values"}
        assert wide == {(8, 16)}
        options = {"out_dtype": out_dtype, "scale_layout": layout}
        odd = check.embedded(args, dispatch.reference(op), {"scale_layout": layout})
        assert not problems(compile_call(multiply, *odd, **options, target="sm90"), (), (), edge=False)
