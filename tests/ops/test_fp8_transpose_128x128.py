"""fp8_transpose_128x128: places by hand, every bit of every backend, and the op whose bytes it gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_bits, random_normal
from tests.helpers import DEVICE, u8

E4M3 = torch.float8_e4m3fn
OP = "fp8_transpose_128x128"
KERNELS = [b for b in ("triton", "helion") if dispatch.static_refusal(OP, b, DEVICE.type) is None]
each_backend = pytest.mark.parametrize("backend", ["reference", *KERNELS])


def transpose(*args, backend="reference"):
    return mxspec.fp8_transpose_128x128(*args, backend=backend)


def codes(*shape):
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


def words(t):
    return t.view(torch.int32).cpu().tolist()


def test_golden_codes_and_scales_change_places():
    """130 x 144: blocks of 128 and 2 rows, of 128 and 16 columns."""
    q, scale = codes(130, 144), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    u8(q)[0, 1], u8(q)[127, 143], u8(q)[129, 0], u8(q)[128, 128] = 0x01, 0x7E, 0x80, 0xFE
    qdata_t, scale_t = transpose(q, scale)
    assert (qdata_t.shape, qdata_t.stride(), qdata_t.dtype) == ((144, 130), (130, 1), E4M3)
    assert (scale_t.stride(), scale_t.tolist()) == ((2, 1), [[1.0, 3.0], [2.0, 4.0]])
    assert u8(qdata_t).nonzero().tolist() == [[0, 129], [1, 0], [128, 128], [143, 127]]
    assert u8(qdata_t)[[0, 1, 128, 143], [129, 0, 128, 127]].tolist() == [0x80, 0x01, 0xFE, 0x7E]


def test_golden_each_expert_is_a_matrix_of_its_own():
    q, scale = codes(2, 3, 16), torch.tensor([5.0, 6.0]).view(2, 1, 1)
    u8(q)[0, 2, 15], u8(q)[1, 0, 3] = 0x11, 0x22
    qdata_t, scale_t = transpose(q, scale)
    assert (qdata_t.shape, qdata_t.stride(), scale_t.flatten().tolist()) == ((2, 16, 3), (48, 3, 1), [5.0, 6.0])
    assert u8(qdata_t).nonzero().tolist() == [[0, 15, 2], [1, 3, 0]]
    assert u8(qdata_t)[[0, 1], [15, 3], [2, 0]].tolist() == [0x11, 0x22]


@each_backend
@pytest.mark.parametrize("N", [256, 130])
def test_golden_every_bit_stays(backend, N):
    """Also the sign and the payload of a NaN, which the judge does not compare. 0x7F and 0xFF are e4m3fn's NaN."""
    q, scale = codes(N, 128), torch.zeros(2, 1, dtype=torch.int32)
    u8(q)[3], u8(q)[:, 5] = 0x7F, 0xFF
    scale[:, 0] = torch.tensor([0x7FC00001, -0x7FFFFFFF])  # a NaN with a payload, and a negative subnormal number
    qdata_t, scale_t = transpose(q.to(DEVICE), scale.view(torch.float32).to(DEVICE), backend=backend)
    assert words(scale_t) == [[0x7FC00001, -0x7FFFFFFF]]
    turned = u8(qdata_t).cpu()
    assert turned[5].tolist() == [0xFF] * N
    assert turned[:5, 3].tolist() == turned[6:11, 3].tolist() == [0x7F] * 5
    assert int(turned.count_nonzero()) == N + 127


@each_backend
@settings(max_examples=10, deadline=None)
@given(
    lead=st.sampled_from(((), (1,), (2,))),
    N=st.integers(1, 300),
    K=st.integers(1, 20).map(lambda n: 16 * n),
    scale_format=st.sampled_from(("fp32", "pow2")),
)
def test_the_bytes_are_those_of_with_transpose(backend, lead, N, K, scale_format):
    w = random_normal(*lead, N, K)
    q, scale, *wanted = mxspec.fp8_quantize_128x128(w, scale_format=scale_format, with_transpose=True)
    got = transpose(q.to(DEVICE), scale.to(DEVICE), backend=backend)
    for one, other in zip(got, wanted, strict=True):
        assert one.is_contiguous()
        assert u8(one).cpu().equal(u8(other))


def test_twice_gives_the_codes_again():
    q, scale = random_bits(2, 144, 272, dtype=E4M3), random_normal(2, 2, 3, dtype=torch.float32)
    again, of_again = transpose(*transpose(q, scale))
    assert u8(again).equal(u8(q))
    assert of_again.equal(scale)


@pytest.mark.parametrize("shape", [(1, 16), (16, 16), (256, 16)])
def test_no_result_shares_memory_with_an_argument(shape):
    """Also not if the transpose in memory is the matrix itself."""
    q, scale = codes(*shape[::-1]).mT, torch.ones(1, -(-shape[0] // 128)).mT
    results = transpose(q, scale)
    for result, argument in zip(results, (q, scale), strict=True):
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != argument.untyped_storage().data_ptr()


def test_bench_cases_are_the_weights():
    op = dispatch.reference(OP)
    found = list(op.spec.bench_cases(Shapes(linear=((4, 32, 48), (8, 32, 48)), experts=((2, 130, 64),))))
    assert [case.name for case in found] == ["32x48", "2x130x64"]
    for case in found:
        args = case.args()
        results = op(*args)
        assert op.spec.bytes_moved(args, results) == 2 * sum(t.nbytes for t in args)
