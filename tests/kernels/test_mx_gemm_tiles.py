"""The plain tiles of the MX matmuls: single tiles, offsets past 2^31, and code that no case of the ops shows."""

from unittest import mock

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases.common.token_groups import offs_of
from mxspec.machine_code.compile import compile_call, compile_case, problems
from mxspec.machine_code.fake_gpu import unavailable
from mxspec.reference.common.matmul import MIN_SQNR_DB

pytest.importorskip("triton")

from mxspec.triton_kernels.tiles import mx_matmul as kernel
from tests.helpers import only_interpreted, runs_kernels

OPS = ("mx_gemm", "mx_grouped_gemm", "mx_grouped_gemm_wgrad")
E4M3FN, E8M0FNU = torch.float8_e4m3fn, torch.float8_e8m0fnu
compiles = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
each_target = pytest.mark.parametrize("target", ["sm90", "sm100"])


def case_of(op, name):
    return next(case for case in dispatch.reference(op).spec.cases() if case.name == name)


def operands(*shapes):
    """Codes and plain scales of each shape, on the device that runs the tests."""
    made = []
    for seed, (rows, K) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        made.append(torch.randn(rows, K, generator=generator).to(E4M3FN))
        made.append(torch.randint(126, 129, (rows, K // 32), generator=generator).to(torch.uint8).view(E8M0FNU))
    return check.on_device(check.default_device(), tuple(made))


@runs_kernels
@pytest.mark.parametrize("op", OPS)
def test_only_elements_of_marked_tiles_that_are_not_finite_are_written(op):
    """M-groups: 130 rows, which are two row tiles, then 20 rows, then 6 rows of no group.

    K-groups: 32 and 64 tokens, with 150 rows each.
    """
    a, a_scale, b, b_scale = operands((156 if op == OPS[1] else 150, 96), (140, 96))
    reference, offs, groups, tops = dispatch.reference(op), None, "", [0, 128]
    if op == "mx_grouped_gemm":
        offs, groups, tops = offs_of([130, 20]).to(a.device), "M", [0, 128, 130, 150]
        b, b_scale = torch.stack([b, b]), torch.stack([b_scale, b_scale])
        expected = reference(a, a_scale, b, b_scale, offs, out_dtype=torch.float32, scale_layout="plain")
    elif op == "mx_grouped_gemm_wgrad":
        offs, groups, tops = offs_of([32, 64]).to(a.device), "K", [0, 128, 150, 278]
        expected = reference(a.mT, a_scale, b.mT, b_scale, offs, scale_layout="plain").flatten(0, 1)
    else:
        expected = reference(a, a_scale, b, b_scale, out_dtype=torch.float32)
    columns = kernel.for_device(kernel.CONFIGS["aligned"], a.device)["BLOCK_N"]
    column_tiles = -(-140 // columns)
    for marked in range(len(tops)):
        marks = torch.tensor([1, marked, column_tiles - 1, -1, -1], dtype=torch.int32, device=a.device)
        out = torch.full_like(expected, -1.0)
        out[:, ::3], out[:, 1::3] = torch.nan, torch.inf
        untouched = out.clone()
        only = {"marks": marks, "width": columns, "programs": 3}
        kernel.mx_tiles(a, a_scale, b, b_scale, out, "plain", offs=offs, grouped=groups, **only)
        where = slice(tops[marked], [*tops, len(expected)][marked + 1]), slice((column_tiles - 1) * columns, None)
        untouched[where] = untouched[where].where(untouched[where] == -1, expected[where])
        assert check.difference((out,), (untouched,), MIN_SQNR_DB) is None, tops[marked]
        assert (out == -1.0).equal(untouched == -1.0)
        assert out.isfinite()[where].all()


@runs_kernels
@pytest.mark.parametrize("op", OPS[:2])
def test_only_flagged_sums_are_written(op):
    """Row tiles of 128, 2 and 20 rows, and 6 rows past the groups. Tiles of 128 and 12 columns, for both experts."""
    a, a_scale, b, b_scale = operands((156, 96), (140, 96))
    options, offs, tops = {"out_dtype": torch.float32, "scale_layout": "plain"}, [], [0, 128]
    if op == "mx_grouped_gemm":
        b, b_scale, tops = torch.stack([b, b.flip(0)]), torch.stack([b_scale, b_scale]), [0, 128, 130, 150]
        offs = [offs_of([130, 20]).to(a.device)]
    only = {"offs": offs[0], "grouped": "M"} if offs else {}
    expected = dispatch.reference(op)(a, a_scale, b, b_scale, *offs, **options)
    of_b = 128 * len(tops)  # the first flag of b
    # Rows of a: 3, and the second row of the second tile. Rows of b: 7 and 130, or 7 and 130 of the second expert.
    second = 256 if offs else 0
    for raised in [[], [3], [129], [of_b + second + 7], [of_b + second + 130], [3, 129, of_b + second + 130]]:
        flags = torch.zeros(1 + of_b + (512 if offs else 256), dtype=torch.int32, device=a.device)
        flags[[1 + i for i in raised]], flags[0] = 1, len(raised)
        out = torch.full_like(expected, -1.0)
        kernel.mx_tiles(a, a_scale, b, b_scale, out, "plain", **only, flags=flags, programs=3)
        written = torch.zeros_like(expected, dtype=torch.bool)
        for i in raised:
            if i < of_b:
                written[tops[i // 128] + i % 128] = True
            elif offs:  # the rows of the second expert
                written[130:150, i - of_b - second] = True
            else:
                written[:, i - of_b] = True
        if offs:
            written[150:] = True
        untouched = torch.where(written, expected, -1.0)
        assert check.difference((out,), (untouched,), MIN_SQNR_DB) is None, raised
        assert (out == -1.0).equal(~written), raised


@runs_kernels
@pytest.mark.parametrize("values", [(0.0, 0.0), (2.0**-9, -(2.0**-9)), (448.0, 448.0)], ids=str)
def test_every_pair_of_scale_bytes(values):
    """A single product under each pair of scales: fp32 holds it, rounds it once, or gives Inf or 0 for it."""
    device = check.default_device()
    byte = torch.arange(256, dtype=torch.uint8, device=device).view(E8M0FNU)[:, None]
    a, b = (torch.zeros(256, 32, device=device).index_fill_(1, torch.tensor(7, device=device), v) for v in values)
    args = a.to(E4M3FN), byte, b.to(E4M3FN), byte
    got = dispatch.public("mx_gemm")(*args, out_dtype=torch.float32, backend="triton")
    expected = dispatch.reference("mx_gemm")(*args, out_dtype=torch.float32)
    assert (got.isnan() == expected.isnan()).all()
    assert torch.equal(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def spread(t, stride):
    """The same rows, `stride` elements apart. The pages in between are never touched."""
    storage = torch.empty((t.shape[0] - 1) * stride + t.shape[1], dtype=t.dtype, device=t.device)
    return storage.as_strided(t.shape, (stride, 1)).copy_(t)


@runs_kernels
@pytest.mark.parametrize("op", OPS)
def test_rows_past_2_to_the_31_elements(op):
    a, a_scale, b, b_scale = operands((131, 64), (130, 64))
    offs = offs_of([32, 32] if op == OPS[2] else [131]).to(a.device)
    for far in range(4):
        given = [a, a_scale, b, b_scale]
        given[far] = spread(given[far], 2**25 + 16)
        if op == "mx_grouped_gemm":
            given[2:] = given[2][None], given[3][None]
        elif op == "mx_grouped_gemm_wgrad":
            given[::2] = given[0].mT, given[2].mT
        args = given if op == "mx_gemm" else [*given, offs]
        got = dispatch.public(op)(*args, scale_layout="plain", backend="triton")
        expected = dispatch.reference(op)(*args, scale_layout="plain")
        assert check.difference((got,), (expected,), MIN_SQNR_DB) is None, far


@only_interpreted
def test_blocked_scales_and_an_output_past_2_to_the_31():
    """Only the first and the last programs run. No program touches the memory before the last rows."""
    from triton.runtime import interpreter

    def ends(count, *rest):
        return range(count, *rest) if rest or count <= 64 else [0, *range(count - 4, count)]

    for M, N, K in ((2**25 + 5, 1, 2048), (2**22 + 5, 600, 32)):
        a, a_scale, b, b_scale = operands((5, K), (N, K))
        blocked = torch.empty(-(-M // 128) * 512 * -(-K // 128), dtype=torch.uint8)
        last = dispatch.reference("to_blocked")(a_scale).view(torch.uint8)
        blocked[-len(last) :] = last
        rows = a[:1].expand(M, K)
        b_blocked = dispatch.reference("to_blocked")(b_scale)
        with mock.patch.object(interpreter, "range", ends, create=True):
            out = torch.empty(M, N, dtype=torch.bfloat16)
            kernel.mx_tiles(rows, blocked.view(E8M0FNU), b, b_blocked, out, "blocked")
        expected = dispatch.reference("mx_gemm")(a[:1].expand(5, K), a_scale, b, b_scale)
        tile = kernel.CONFIGS["aligned"][9, 0]["BLOCK_N"]
        columns = slice(max(0, (N - 1) // tile * tile), N)
        assert check.difference((out[-5:, columns],), (expected[:, columns],), MIN_SQNR_DB) is None, (M, N)


@compiles
@each_target
def test_column_major_operands_reach_the_tensor_cores(target):
    """No case of wgrad is contiguous, so no case is searched for these instructions."""
    code = compile_case(OPS[2], "triton", case_of(OPS[2], "three groups, blocked, float32"), target)
    assert not problems(code, kernel.PTX[target], (), edge=False)


@pytest.mark.turns(3)
@compiles
@each_target
@pytest.mark.parametrize("op", OPS)
def test_strides_of_any_alignment_spill_nothing(op, target):
    case = case_of(op, f"{'three groups' if op != 'mx_gemm' else '150x136x160'}, plain, float32")
    args = check.embedded(case.args(), dispatch.reference(op), case.kwargs)
    code = compile_call(getattr(dispatch.kernel_module(op, "triton"), op), *args, target=target, **case.kwargs)
    assert not problems(code, (), (), edge=False)
