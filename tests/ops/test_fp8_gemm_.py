"""fp8_gemm_: literal sums onto a matrix, elements that stay unchanged, and that torch knows of the change."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxspec
from mxspec import dispatch
from mxspec.cases.fp8_gemm_ import onto
from mxspec.shapes import Shapes

E4M3FN = torch.float8_e4m3fn
REFERENCE = dispatch.reference("fp8_gemm_")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def zeros(M, N, K, rows=1):
    return (
        torch.zeros(M, K).to(E4M3FN),
        torch.ones(M, K // 128),
        torch.zeros(N, K).to(E4M3FN),
        torch.ones(-(-N // rows), K // 128),
    )


def fp8_gemm_(*args):
    assert mxspec.fp8_gemm_(*args, backend="reference") is None
    return args[0]


def test_golden_1x128_by_1x128():
    a, a_scale, b, b_scale = zeros(1, 3, 256)
    a[0, 127], a[0, 128], b[:, 127], b[:, 128] = 1.0, 1.0, 2.0, 1.0
    a_scale[0, 1] = 4.0
    b_scale[:] = torch.tensor([[1.0, 1.0], [0.5, 0.0], [0.0, -8.0]])  # products 2 + 4, 1 + 0, 0 - 32
    acc = torch.tensor([[0.5, -1.0, 100.0]])
    assert fp8_gemm_(acc, a, a_scale, b, b_scale).tolist() == [[6.5, 0.0, 68.0]]
    assert fp8_gemm_(acc, a, a_scale, b, b_scale).tolist() == [[12.5, 1.0, 36.0]]


def test_golden_1x128_by_128x128():
    a, a_scale, b, b_scale = zeros(2, 130, 256, rows=128)
    a[0, 0], a[1, 255], b[0, 0], b[129, 255] = 1.5, -448.0, -2.0, 0.5
    b_scale[:] = torch.tensor([[0.5, 3.0], [10.0, 2.0]])  # rows 0..127 of b, rows 128 and 129
    acc = fp8_gemm_(torch.ones(2, 130), a, a_scale, b, b_scale)
    assert acc[:, [0, 129]].tolist() == [[-0.5, 1.0], [1.0, -447.0]]  # 1.5 * -2 * 0.5; -448 * 0.5 * 2
    assert (acc[:, 1:129] == 1).all()


def test_golden_product_and_acc_are_rounded_once():
    a, a_scale, b, b_scale = zeros(1, 2, 256)
    a[0, 0] = a[0, 128] = b[:, 0] = b[1, 128] = 1.0
    # This would be lost if the product alone were rounded to fp32: acc + 1 is a tie that rounds to even.
    a_scale[0, 1] = 2**-28
    acc = torch.full((1, 2), 2.0**24)
    assert fp8_gemm_(acc, a, a_scale, b, b_scale).tolist() == [[2.0**24, 2.0**24 + 2]]


def test_golden_only_the_rows_of_acc_are_changed():
    a, a_scale, b, b_scale = zeros(2, 3, 128)
    a[:, 0] = b[:, 0] = 2.0
    whole = torch.arange(20.0).view(2, 10)
    fp8_gemm_(whole[:, 4:7], a, a_scale, b, b_scale)
    assert whole[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 7, 8, 9]
    assert whole[1].tolist() == [10, 11, 12, 13, 18, 19, 20, 17, 18, 19]


def test_golden_a_sum_of_nothing_leaves_the_sign_of_zero():
    a, a_scale, b, b_scale = (t[:, :0] for t in zeros(1, 2, 128))
    acc = torch.tensor([[-0.0, torch.nan]])
    bits = acc.view(torch.int32).clone()
    assert fp8_gemm_(acc, a, a_scale, b, b_scale).view(torch.int32).equal(bits)


# --- torch.library ----------------------------------------------------------------------------------------------


def test_the_schema_says_what_is_changed():
    schema = str(torch.ops.mxspec.fp8_gemm_.default._schema)
    assert schema.startswith("mxspec::fp8_gemm_(Tensor(a!) acc, Tensor a, ")
    assert schema.endswith(" -> ()")
    assert REFERENCE.spec.in_place
    assert not dispatch.reference("fp8_gemm").spec.in_place


@pytest.mark.parametrize("through", ["the op", "the operator"])
def test_autograd_sees_that_acc_has_changed(through):
    acc, *operands = onto(4, 8, 128)
    x = torch.ones(4, 8, requires_grad=True)
    loss = (x * acc).sum()  # saves acc for backward
    (mxspec.fp8_gemm_ if through == "the op" else torch.ops.mxspec.fp8_gemm_)(acc, *operands)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_kernel_that_writes_unseen_changes_the_version(monkeypatch):
    monkeypatch.setattr(dispatch.resolve, "run", lambda *a: None)
    acc, *operands = onto(4, 8, 128)
    mxspec.fp8_gemm_(acc, *operands)
    torch.ops.mxspec.fp8_gemm_(acc, *operands)
    assert acc._version == onto(4, 8, 128)[0]._version + 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", [0, 2])
def test_a_gradient_is_refused(which, compiled):
    torch._dynamo.reset()
    args = onto(4, 8, 128)
    args[which].requires_grad_()
    before = args[0].detach().clone()
    call = torch.compile(mxspec.fp8_gemm_, fullgraph=True, backend="aot_eager") if compiled else mxspec.fp8_gemm_
    with pytest.raises(RuntimeError, match="fp8_gemm_ has no gradient; call it inside an"):
        call(*args)
    assert args[0].equal(before)
    with torch.no_grad():
        call(*args)
    assert not args[0].equal(before)


@pytest.mark.turns(3)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_changes_inputs_views_and_what_is_computed(backend):
    torch._dynamo.reset()

    def steps(acc, whole, *operands):
        mxspec.fp8_gemm_(acc, *operands)
        mxspec.fp8_gemm_(whole[:, 2:10], *operands)
        mine = acc * 2
        mxspec.fp8_gemm_(mine, *operands)
        mxspec.fp8_gemm_(mine, *operands)
        return mine + 1

    def run(fn):
        acc, *operands = onto(4, 8, 128)
        whole = torch.arange(48.0).view(4, 12)
        return fn(acc, whole, *operands), acc, whole

    for got, expected in zip(run(torch.compile(steps, fullgraph=True, backend=backend)), run(steps), strict=True):
        assert torch.equal(got, expected)


def test_meta_and_fake_tensors_stay_as_they_are():
    args = onto(4, 8, 128)
    assert mxspec.fp8_gemm_(*(t.to("meta") for t in args)) is None
    with FakeTensorMode() as mode:
        assert mxspec.fp8_gemm_(*map(mode.from_tensor, args)) is None


@gpu
def test_in_a_cuda_graph_every_replay_adds():
    acc, *operands = (t.cuda() for t in onto(128, 256, 512, 1))
    mxspec.fp8_gemm_(acc, *operands, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mxspec.fp8_gemm_(acc, *operands, backend="triton")
    acc.zero_()
    once = mxspec.fp8_gemm(*operands, out_dtype=torch.float32, backend="triton")
    graph.replay()
    assert acc.equal(once)
    graph.replay()
    assert acc.equal(once + once)


def test_bench_cases_are_the_shapes_of_wgrad():
    (wgrad,) = REFERENCE.spec.bench_cases(Shapes(linear=((4, 200, 256),), wgrad=((128, 256, 384),)))
    args = wgrad.args()
    assert (args[0].shape, args[2].stride(), args[4].stride()) == ((128, 256), (1, 128), (1, 256))
    outputs = REFERENCE.spec.outputs(args, REFERENCE(*args))
    assert outputs[0] is args[0]
    assert REFERENCE.spec.flops(args, outputs) == 2 * 128 * 256 * 384
    moved = 128 * 384 + 256 * 384 + (128 + 256) * 3 * 4 + 2 * 128 * 256 * 4  # acc is read and written
    assert REFERENCE.spec.bytes_moved(args, outputs) == moved
