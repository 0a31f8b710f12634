"""zero_unused_: literal rows and matrices, unchanged elements, offsets past 2^31, and torch knows of the change."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from tests.helpers import DEVICE, ends, runs_kernels

REFERENCE = dispatch.reference("zero_unused_")
KERNELS = pytest.mark.parametrize("backend", ["triton", "helion"])
gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
large = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: 2^31 elements take minutes in an interpreter")


def zeroed(x, *offs):
    assert mxspec.zero_unused_(x, ends(*offs), backend="reference") is None
    return x


def test_golden_rows_from_the_last_end_on():
    x = zeroed(torch.arange(1.0, 11.0).view(5, 2), 1, 1, 3)
    assert x.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]


def test_golden_matrices_of_groups_without_tokens():
    x = zeroed(torch.arange(1.0, 11.0).view(5, 1, 2), 0, 2, 2, 3, 3)
    assert x.tolist() == [[[0, 0]], [[3, 4]], [[0, 0]], [[7, 8]], [[0, 0]]]


def test_golden_no_unused_row_and_no_used_row():
    nan = torch.full((2, 2), torch.nan, dtype=torch.bfloat16)
    assert zeroed(nan.clone(), 1, 2).isnan().all()
    assert zeroed(nan.clone(), 1, 7).isnan().all()
    for offs in ((0, 0), (2, -9), ()):
        assert zeroed(nan.clone(), *offs).view(torch.int16).tolist() == [[0, 0], [0, 0]]


def test_golden_all_groups_empty_and_none():
    nan = torch.full((2, 3, 2), torch.nan, dtype=torch.float16)
    assert zeroed(nan.clone(), 1, 2).isnan().all()
    for offs in ((0, 0), (-5, -6), (-(2**31), -(2**31))):
        assert zeroed(nan.clone(), *offs).view(torch.int16).tolist() == 2 * [3 * [[0, 0]]]
    assert zeroed(nan[:0].clone()).shape == (0, 3, 2)


def test_golden_an_end_before_its_beginning_is_a_group_without_tokens():
    assert zeroed(torch.ones(3, 1, 1), 9, 4, 5).flatten().tolist() == [1, 0, 1]


def test_golden_the_gaps_of_memory_stay():
    whole = torch.full((3, 6), -0.0)
    zeroed(whole[:, 1:4], 2)
    assert whole.signbit().tolist() == [[True] * 6, [True] * 6, [True, False, False, False, True, True]]
    whole = torch.full((2, 3, 6), -0.0)
    zeroed(whole[:, :2, 1:4], 4, 4)
    assert whole[0].signbit().all()
    assert whole[1].signbit().int().tolist() == [[1, 0, 0, 0, 1, 1], [1, 0, 0, 0, 1, 1], [1] * 6]


# --- torch.library ----------------------------------------------------------------------------------------------


def test_the_schema_says_what_is_changed():
    schema = str(torch.ops.mxspec.zero_unused_.default._schema)
    assert schema.startswith("mxspec::zero_unused_(Tensor(a!) x, Tensor offs, *, str backend=")
    assert schema.endswith(" -> ()")


@pytest.mark.parametrize(("shape", "offs"), [((4, 8), [2]), ((2, 4, 8), [2, 2])])
def test_autograd_sees_that_x_has_changed(shape, offs):
    x, w = torch.ones(shape), torch.ones(shape, requires_grad=True)
    loss = (w * x).sum()  # saves x for backward
    mxspec.zero_unused_(x, ends(*offs))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="zero_unused_ has no gradient"):
        mxspec.zero_unused_(w, ends(*offs))


def test_compiled_it_changes_inputs_and_what_is_computed():
    torch._dynamo.reset()

    def steps(rows, matrices, offs):
        mine = rows * 2
        mxspec.zero_unused_(mine, offs)
        mxspec.zero_unused_(rows[:, 2:], offs)
        mxspec.zero_unused_(matrices[:, 2:], offs)
        return mine + 1

    def run(fn):
        rows, matrices = torch.ones(5, 8), torch.ones(3, 5, 8)
        return fn(rows, matrices, ends(1, 1, 3)), rows, matrices

    got, expected = run(torch.compile(steps, fullgraph=True, backend="aot_eager")), run(steps)
    assert all(map(torch.equal, got, expected))
    assert expected[0].sum(1).tolist() == [24, 24, 24, 8, 8]
    assert expected[1].sum(1).tolist() == [8, 8, 8, 2, 2]
    assert expected[2].sum((1, 2)).tolist() == [40, 16, 40]


# --- kernels ----------------------------------------------------------------------------------------------------


@runs_kernels
@KERNELS
def test_offsets_past_2_to_the_31(backend):
    """Rows lie 2^24 elements apart, and matrices 2^28 with rows 2^26 apart. The gaps are never touched."""
    memory = torch.empty(199 * 2**24 + 64, dtype=torch.bfloat16, device=DEVICE)
    rows = memory.as_strided((200, 64), (2**24, 1))
    rows.fill_(1)
    rows[-1].fill_(torch.nan)
    mxspec.zero_unused_(rows, ends(3, 150).to(DEVICE), backend=backend)
    assert rows.sum(1).tolist() == [64] * 150 + [0] * 50
    matrices = memory.as_strided((10, 2, 64), (2**28, 2**26, 1))
    matrices.fill_(1)
    matrices[8].fill_(torch.nan)
    mxspec.zero_unused_(matrices, ends(1, 2, 3, 3, 4, 5, 6, 7, 7, 8).to(DEVICE), backend=backend)
    assert matrices.sum((1, 2)).tolist() == [128, 128, 128, 0, 128, 128, 128, 128, 0, 128]


@large
@KERNELS
def test_more_than_2_to_the_31_elements(backend):
    x = torch.ones(2**20 + 5, 2048, dtype=torch.bfloat16, device=DEVICE)
    mxspec.zero_unused_(x, ends(3, 2**20 + 1).to(DEVICE), backend=backend)
    assert x[-5:].sum(1).tolist() == [2048, 0, 0, 0, 0]
    assert bool(x[:-4].all())
    mxspec.zero_unused_(x, ends(7).to(DEVICE), backend=backend)
    assert int(x.count_nonzero()) == 7 * 2048
    x = torch.ones(2, 2**20 + 1, 2048, dtype=torch.bfloat16, device=DEVICE)
    mxspec.zero_unused_(x, ends(4, 4).to(DEVICE), backend=backend)
    assert bool(x[0].all())
    assert not bool(x[1].any())


@large
@KERNELS
@pytest.mark.parametrize("shape", [(2**31 - 8, 1), (2**31 + 8, 1), (2, 2**31 - 8), (2, 1, 2**31 + 8)], ids=str)
def test_a_dimension_near_2_to_the_31(shape, backend):
    x = torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
    used = 2**31 - 16 if shape[1] == 1 and len(shape) == 2 else 1
    mxspec.zero_unused_(x, ends(used, used).to(DEVICE)[: shape[0]], backend=backend)
    assert bool((x[:used] == 1).all())
    assert not bool(x[used:].any())


@gpu
@KERNELS
def test_in_a_cuda_graph_each_replay_reads_offs(backend):
    x, offs = torch.ones(64, 256, device=DEVICE), ends(8, 64).to(DEVICE)
    mxspec.zero_unused_(x, offs, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mxspec.zero_unused_(x, offs, backend=backend)
    graph.replay()
    assert bool(x.all())
    offs[-1] = 20
    graph.replay()
    assert (x.sum(1) > 0).tolist() == [True] * 20 + [False] * 44


@gpu
def test_the_host_never_waits():
    x, offs = torch.ones(64, 256, device=DEVICE), ends(8, 64).to(DEVICE)
    for backend in ("triton", "helion", "reference"):
        mxspec.zero_unused_(x, offs, backend=backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mxspec.zero_unused_(x, offs, backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_bench_cases_zero_all_and_count_what_they_write():
    rows, matrices = REFERENCE.spec.bench_cases(Shapes(matrices=((256, 40),), experts=((4, 24, 40),)))
    for case, size, groups in ((rows, 256 * 40, 8), (matrices, 4 * 24 * 40, 4)):
        args = case.args()
        REFERENCE(*args)
        assert not args[0].any()
        assert REFERENCE.spec.bytes_moved(args, args[:1]) == size * 2 + groups * 4
