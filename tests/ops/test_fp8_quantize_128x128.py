"""fp8_quantize_128x128: goldens computed by hand, and peers' bytes."""

import numpy as np
import pytest
import torch

from mxspec import fp8_quantize_128x128
from tests.helpers import published

VECTORS = published("fp8_block")


def test_golden_one_scale_for_a_square():
    w = torch.zeros(256, 256)
    w[0, 0], w[127, 127], w[128, 0], w[0, 128] = 448.0, 1.0, 896.0, 224.0
    qdata, scale = fp8_quantize_128x128(w, backend="reference")
    assert scale.tolist() == [[1.0, 0.5], [2.0, float(np.float32(1e-12) / np.float32(448))]]
    assert qdata.view(torch.uint8)[[0, 127, 128, 0], [0, 127, 0, 128]].tolist() == [0x7E, 0x38, 0x7E, 0x7E]


def test_golden_partial_block():
    w = torch.ones(130, 128)
    w[129] = 2.0
    qdata, scale = fp8_quantize_128x128(w, backend="reference")
    assert qdata.shape == (130, 128)
    assert qdata.float()[[0, 128, 129], 0].tolist() == [448.0, 224.0, 448.0]
    assert scale.shape == (2, 1)


def test_golden_a_partial_block_along_both_dimensions():
    w = torch.zeros(130, 144)
    w[0, 0], w[0, 128], w[129, 127], w[129, 143] = 448.0, 896.0, 224.0, -1.75
    qdata, scale, qdata_t, scale_t = fp8_quantize_128x128(w, with_transpose=True, backend="reference")
    assert scale.tolist() == [[1.0, 2.0], [0.5, 1 / 256]]
    assert scale_t.tolist() == [[1.0, 0.5], [2.0, 1 / 256]]
    assert qdata.shape == (130, 144)
    assert qdata.float()[[0, 0, 129, 129], [0, 128, 127, 143]].tolist() == [448.0, 448.0, 448.0, -448.0]
    assert torch.equal(qdata_t.float(), qdata.float().mT)


def test_golden_nan_stays_in_its_block():
    w = torch.ones(256, 128)
    w[200, 5] = torch.nan
    qdata, scale = fp8_quantize_128x128(w, backend="reference")
    assert scale.isnan().tolist() == [[False], [True]]
    assert qdata.float().isnan().sum(1).tolist() == [0] * 128 + [128] * 128


def test_golden_with_transpose_and_a_partial_block():
    w = torch.zeros(130, 256)
    w[0, 1], w[127, 255], w[129, 2], w[128, 128] = 448.0, -896.0, 224.0, 1.75
    qdata, scale, qdata_t, scale_t = fp8_quantize_128x128(w, with_transpose=True, backend="reference")
    assert (qdata.shape, qdata_t.shape) == ((130, 256), (256, 130))
    assert (qdata_t.stride(), scale_t.stride()) == ((130, 1), (2, 1))
    codes = qdata_t.view(torch.uint8)
    assert codes[[1, 255, 2, 128], [0, 127, 129, 128]].tolist() == [0x7E, 0xFE, 0x7E, 0x7E]
    assert int((codes != 0).sum()) == 4
    assert scale.tolist() == [[1.0, 2.0], [0.5, 1 / 256]]
    assert scale_t.tolist() == [[1.0, 0.5], [2.0, 1 / 256]]


@pytest.mark.parametrize("through", ["switch", "operator", "compiled", "fake"])
def test_two_outputs_or_four(through):
    def both(w):
        return fp8_quantize_128x128(w), fp8_quantize_128x128(w, with_transpose=True)

    w = torch.randn(130, 128)
    if through == "operator":  # a gradient calls the operator
        w.requires_grad_()
    if through == "compiled":
        torch._dynamo.reset()
        both = torch.compile(both, fullgraph=True, backend="aot_eager")
    if through == "fake":
        w = w.to("meta")
    pair, four = both(w)
    assert type(pair) is type(four) is tuple
    assert (len(pair), len(four)) == (2, 4)
    assert [t.shape for t in four] == [(130, 128), (2, 1), (128, 130), (1, 2)]


def test_with_transpose_is_the_op_on_the_transpose():
    w = torch.randn(2, 256, 384)
    qdata, scale, qdata_t, scale_t = fp8_quantize_128x128(w, with_transpose=True)
    for got, expected in zip((qdata, scale), fp8_quantize_128x128(w), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    for got, expected in zip((qdata_t, scale_t), fp8_quantize_128x128(w.mT), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_vectors_of_torchao_main():
    qdata, scale = fp8_quantize_128x128(torch.from_numpy(VECTORS["0.x"]), backend="reference")
    assert qdata.view(torch.uint8).tolist() == VECTORS["0.w128x128.q"].tolist()
    assert scale.view(torch.int32).tolist() == VECTORS["0.w128x128.s"].view(np.int32).tolist()


def test_the_transpose_of_the_result_is_the_result_of_the_transpose():
    w = torch.randn(256, 384)
    qdata, scale = fp8_quantize_128x128(w, backend="reference")
    other, other_scale = fp8_quantize_128x128(w.mT, backend="reference")
    assert torch.equal(qdata.mT.contiguous().view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(scale.mT, other_scale)
