"""fp8_grouped_gemm_wgrad_: literal sums onto matrices, and elements that stay unchanged."""

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.fp8_grouped_gemm_wgrad_ import onto
from mxspec.shapes import Shapes
from tests.helpers import ends

E4M3FN = torch.float8_e4m3fn
REFERENCE = dispatch.reference("fp8_grouped_gemm_wgrad_")


def ones(N, K, R):
    """Features that are 1 at the first token of every block, and scales of 1."""
    dy, x = torch.zeros(N, R), torch.zeros(K, R)
    dy[:, ::128], x[:, ::128] = 1.0, 1.0
    return dy.to(E4M3FN), torch.ones(N, R // 128), x.to(E4M3FN), torch.ones(K, R // 128)


def add(acc, *args):
    assert mxspec.fp8_grouped_gemm_wgrad_(acc, *args, backend="reference") is None
    return acc


def test_golden_every_call_adds():
    acc = torch.tensor([[[0.5, -1.0]], [[100.0, 3.0]]])
    operands = ones(1, 2, 384)
    operands[3][:] = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    offs = ends(256, 384)  # 1 + 2 and 8 + 16; 4 and 32
    assert add(acc, *operands, offs).tolist() == [[[3.5, 23.0]], [[104.0, 35.0]]]
    assert add(acc, *operands, offs).tolist() == [[[6.5, 47.0]], [[108.0, 67.0]]]


def test_golden_a_group_without_tokens_is_left_alone():
    acc = torch.full((3, 1, 2), -0.0)
    acc[1, 0, 1] = torch.nan
    bits = acc.view(torch.int32).clone()
    add(acc, *ones(1, 2, 256), ends(128, 128, 256))
    assert acc[1].view(torch.int32).equal(bits[1])
    assert acc[[0, 2]].tolist() == [[[1.0, 1.0]], [[1.0, 1.0]]]


def test_golden_product_and_acc_are_rounded_once():
    dy, dy_scale, x, x_scale = ones(1, 1, 256)
    # This would be lost if the product alone were rounded to fp32: acc + 1 is a tie that rounds to even.
    dy_scale[0, 1] = 2**-28
    acc = torch.full((1, 1, 1), 2.0**24)
    assert add(acc, dy, dy_scale, x, x_scale, ends(256)).tolist() == [[[2.0**24 + 2]]]


def test_golden_only_the_rows_of_acc_are_changed():
    whole = torch.zeros(2, 3, 6)
    add(whole[:, :2, 1:4], *ones(2, 3, 256), ends(128, 256))
    assert whole[1].tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0], [0] * 6]
    assert whole.sum() == 12


def test_the_schema_says_what_is_changed():
    schema = str(torch.ops.mxspec.fp8_grouped_gemm_wgrad_.default._schema)
    assert schema.startswith("mxspec::fp8_grouped_gemm_wgrad_(Tensor(a!) acc, Tensor dy, ")
    assert schema.endswith(" -> ()")
    assert REFERENCE.spec.in_place


def test_a_gradient_is_refused():
    args = onto([128], 0, 4, 8)
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="fp8_grouped_gemm_wgrad_ has no gradient"):
        mxspec.fp8_grouped_gemm_wgrad_(*args)


def test_compiled_it_changes_a_view_and_gives_what_the_other_op_gives():
    torch._dynamo.reset()

    def steps(acc, *operands):
        mxspec.fp8_grouped_gemm_wgrad_(acc[:, 1:], *operands)
        return acc + 1

    _, *operands = onto([128, 256], 128, 40, 72)
    acc = torch.zeros(2, 41, 72)
    after = torch.compile(steps, fullgraph=True, backend="aot_eager")(acc, *operands)
    assert acc[:, 1:].equal(mxspec.fp8_grouped_gemm_wgrad(*operands))
    assert acc[:, 0].count_nonzero() == 0
    assert after.equal(acc + 1)


def test_bench_cases_are_the_grouped_shapes():
    (even,) = REFERENCE.spec.bench_cases(Shapes(grouped=((256, 40, 96, 2),)))
    args = even.args()
    outputs = REFERENCE.spec.outputs(args, REFERENCE(*args, check_offs=True))
    assert outputs[0] is args[0]
    assert not args[0].isnan().any()
    assert REFERENCE.spec.flops(args, args[:1]) == 2 * 256 * 40 * 96
    moved = (40 + 96) * (256 + 2 * 4) + 2 * 4 + 2 * 2 * 40 * 96 * 4  # acc is read and written
    assert REFERENCE.spec.bytes_moved(args, args[:1]) == moved
