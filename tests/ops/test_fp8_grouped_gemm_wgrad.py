"""fp8_grouped_gemm_wgrad: literal sums over each group's tokens, and tokens of no group."""

import torch

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from tests.helpers import ends

E4M3FN = torch.float8_e4m3fn


def wgrad(dy, dy_scale, x, x_scale, offs, **options):
    args = dy.to(E4M3FN), dy_scale, x.to(E4M3FN), x_scale, offs
    return mxspec.fp8_grouped_gemm_wgrad(*args, backend="reference", **options)


def operands():
    """Groups of 256, 0 and 128 tokens, and 128 tokens of no group.

    dy has one feature: 1 at tokens 0, 129 and 256, 0 elsewhere. x has two features: group 0 has their codes at places
    0..255 and 256..511, and group 2 at 512..639 and 640..767. The first feature of x is 2 everywhere. The second is the
    number of the token's block, but 3 from token 1 on in group 2.
    """
    dy, x = torch.zeros(1, 512), torch.full((2, 512), 2.0)
    dy[0, [0, 129, 256]] = 1.0
    flat = x.view(-1)
    flat[256:384], flat[384:512], flat[640], flat[641:768] = 0.0, 1.0, 2.0, 3.0
    dy[:, 384:], flat[768:] = torch.nan, torch.nan
    dy_scale, x_scale = torch.ones(1, 4), torch.ones(2, 4)
    dy_scale[:, 3:], x_scale[:, 3:] = torch.nan, torch.nan
    return dy, dy_scale, x, x_scale, ends(256, 256, 384)


def test_golden_sums_over_the_tokens_of_a_group():
    out = wgrad(*operands())
    assert (out.dtype, out.stride()) == (torch.float32, (2, 2, 1))
    assert out.tolist() == [[[4.0, 1.0]], [[0.0, 0.0]], [[2.0, 2.0]]]  # 2 + 2 and 0 + 1; no token; 2 and 2


def test_golden_a_token_has_the_scale_of_its_block_whatever_the_strides():
    dy, dy_scale, x, x_scale, offs = operands()
    dy_scale[0, :3] = torch.tensor([1.0, 10.0, 100.0])
    x_scale[:, :3] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for of_x in (x_scale, x_scale.t().contiguous().t(), torch.stack([x_scale, -x_scale], -1)[..., 0]):
        out = wgrad(dy, dy_scale, x, of_x, offs, out_dtype=torch.bfloat16, check_offs=True)
        assert out.dtype == torch.bfloat16
        # 2 + 10 * 2 * 2 and 0 + 10 * 1 * 5; 100 * 2 * 3 and 100 * 2 * 6
        assert out.tolist() == [[[42.0, 50.0]], [[0.0, 0.0]], [[600.0, 1200.0]]]


def test_golden_of_several_features_each_has_its_row():
    dy, x = torch.zeros(3, 256), torch.zeros(1, 256)
    dy.view(-1)[[0, 128 + 1, 256 + 2]] = torch.tensor([1.0, 2.0, 4.0])  # group 0: features 0, 1, 2 at tokens 0, 1, 2
    dy.view(-1)[384 + 128 + 5] = 8.0  # group 1: feature 1 at token 5
    x.view(-1)[[0, 1, 2, 128 + 5]] = torch.tensor([1.0, 10.0, 104.0, 3.0])
    out = wgrad(dy, torch.ones(3, 2), x, torch.ones(1, 2), ends(128, 256))
    assert out[..., 0].tolist() == [[1.0, 20.0, 416.0], [0.0, 24.0, 0.0]]


def test_golden_a_nan_stays_with_its_expert():
    dy, dy_scale, x, x_scale, offs = operands()
    x.view(-1)[300] = torch.nan  # feature 1 of group 0
    dy_scale[0, 2] = torch.nan  # group 2
    out = wgrad(dy, dy_scale, x, x_scale, offs)
    assert out.isnan().tolist() == [[[False, True]], [[False, False]], [[True, True]]]


def test_the_size_of_the_buffers_changes_nothing():
    """Codes and scales cut to the tokens that groups have, and with additional codes and scales behind them."""
    given = operands()
    cut = [given[0][:, :384], given[1][:, :3], given[2].view(-1)[:768].view(2, 384), given[3][:, :3]]
    assert wgrad(*cut, given[4]).equal(wgrad(*given))


def test_it_is_the_gradient_of_a_grouped_linear():
    dy, x, offs = torch.randn(300, 40), torch.randn(300, 72), ends(150, 150, 283)
    of_dy, of_x = (mxspec.fp8_quantize_k_groups(t, offs) for t in (dy, x))
    out = mxspec.fp8_grouped_gemm_wgrad(*of_dy[:2], *of_x[:2], of_x[3])
    for e, (first, last) in enumerate(((0, 150), (150, 150), (150, 283))):
        exact = dy[first:last].T @ x[first:last]
        assert (out[e] - exact).norm() <= 0.06 * exact.norm()  # two roundings to 3 bits of mantissa


def test_bench_cases_are_the_grouped_shapes():
    op = dispatch.reference("fp8_grouped_gemm_wgrad")
    even, even_bf16, ragged = op.spec.bench_cases(Shapes(grouped=((256, 40, 96, 2),)))
    args = even.args()
    assert (even.name, args[4].tolist()) == ("256x40x96, E 2, even, padded, float32", [128, 256])
    assert op.spec.flops(args, ()) == 2 * 256 * 40 * 96
    for case in (even, even_bf16, ragged):
        args = case.args()
        assert args[0].shape == (40, args[4][-1])
        out = op(*args, check_offs=True, **case.kwargs)
        assert (out.shape, out.isnan().any().item()) == ((2, 40, 96), False)
        assert str(out.dtype) == f"torch.{case.name.split(', ')[-1]}"
    assert len(list(op.spec.bench_cases(Shapes(grouped=((256, 40, 96, 1),))))) == 2  # one group is never ragged
