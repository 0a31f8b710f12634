"""Any routing of tokens to experts: group by group, a grouped matmul gives the result of the dense matmul.

The references run everywhere. On a GPU the Triton kernels run too, and must reach the op's SQNR.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxspec import check, dispatch
from mxspec.cases import fp8_grouped_gemm as fp8_rows
from mxspec.cases import fp8_grouped_gemm_wgrad as fp8_tokens
from mxspec.cases import mx_grouped_gemm as mx_rows
from mxspec.cases import mx_grouped_gemm_wgrad as mx_tokens
from mxspec.reference.fp8_gemm import fp8_gemm
from mxspec.reference.mx_gemm import mx_gemm

ON_GPU = check.default_device().type == "cuda"
routed = settings(max_examples=40 if ON_GPU else 15, deadline=None)
sizes_of = st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 300)), min_size=1, max_size=6)
columns = st.sampled_from((8, 40, 136, 264))


def at_device(args):
    return check.on_device(check.default_device(), args)


def groups(offs):
    ends = offs.tolist()
    return enumerate(zip([0, *ends], ends, strict=False))


def compare(op, args, options, alone):
    reference = dispatch.reference(op)
    expected = reference(*args, **options)
    assert expected.equal(alone)
    if ON_GPU:
        with check.poisoned(0xFF):
            out = dispatch.public(op)(*args, backend="triton", **options)
        assert check.difference((out,), (expected,), reference.spec.min_sqnr_db) is None


@routed
@given(sizes=sizes_of, rest=st.integers(0, 70), N=columns, C=st.integers(1, 5))
def test_fp8_tokens_by_their_experts(sizes, rest, N, C):
    args = at_device(fp8_rows.made(sizes, rest, N, 128 * C, major="mn"))
    a, a_scale, b, b_scale, offs = args
    alone = a_scale.new_zeros(len(a), N, dtype=torch.bfloat16)
    for e, (begin, end) in groups(offs):
        alone[begin:end] = fp8_gemm(a[begin:end], a_scale[begin:end], b[e], b_scale[e])
    compare("fp8_grouped_gemm", args, {}, alone)


@routed
@given(blocks=st.lists(st.integers(0, 3), min_size=1, max_size=6), rest=st.integers(0, 2), N=columns, K=columns)
def test_fp8_gradients_of_the_experts(blocks, rest, N, K):
    args = at_device(fp8_tokens.made([128 * n for n in blocks], 128 * rest, N, K))
    dy, dy_scale, x, x_scale, offs = args
    alone = dy_scale.new_zeros(len(blocks), N, K)
    for e, (begin, end) in groups(offs):
        own = [t.flatten()[len(t) * begin : len(t) * end].view(len(t), -1) for t in (dy, x)]
        scales = [s[:, begin // 128 : end // 128] for s in (dy_scale, x_scale)]
        if end > begin:
            alone[e] = fp8_gemm(own[0], scales[0], own[1], scales[1], out_dtype=torch.float32)
    compare("fp8_grouped_gemm_wgrad", args, {}, alone)


@routed
@given(sizes=sizes_of, rest=st.integers(0, 70), N=columns, C=st.integers(1, 9))
def test_mx_tokens_by_their_experts(sizes, rest, N, C):
    args = at_device(mx_rows.made(sizes, rest, N, 32 * C, "plain"))
    a, a_scale, b, b_scale, offs = args
    alone = torch.zeros(len(a), N, dtype=torch.bfloat16, device=a.device)
    for e, (begin, end) in groups(offs):
        alone[begin:end] = mx_gemm(a[begin:end], a_scale[begin:end], b[e], b_scale[e])
    compare("mx_grouped_gemm", args, {"scale_layout": "plain"}, alone)


@routed
@given(blocks=st.lists(st.integers(0, 9), min_size=1, max_size=6), rest=st.integers(0, 2), N=columns, K=columns)
def test_mx_gradients_of_the_experts(blocks, rest, N, K):
    args = at_device(mx_tokens.made([32 * n for n in blocks], 32 * rest, N, K, "plain"))
    dy, dy_scale, x, x_scale, offs = args
    alone = torch.zeros(len(blocks), N, K, device=dy.device)
    for e, (begin, end) in groups(offs):
        own = [t[begin:end].mT for t in (dy, x)]
        scales = [s[:, begin // 32 : end // 32] for s in (dy_scale, x_scale)]
        if end > begin:
            alone[e] = mx_gemm(own[0].contiguous(), scales[0], own[1].contiguous(), scales[1], out_dtype=torch.float32)
    compare("mx_grouped_gemm_wgrad", args, {"scale_layout": "plain"}, alone)
