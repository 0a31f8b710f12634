"""fp8_quantize_128x128: goldens worked by hand and peers' bytes."""

from pathlib import Path

import numpy as np
import torch

from mxspec import fp8_quantize_128x128

VECTORS = np.load(Path(__file__).parent / "vectors" / "fp8_block.npz")


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


def test_golden_nan_stays_in_its_block():
    w = torch.ones(256, 128)
    w[200, 5] = torch.nan
    qdata, scale = fp8_quantize_128x128(w, backend="reference")
    assert scale.isnan().tolist() == [[False], [True]]
    assert qdata.float().isnan().sum(1).tolist() == [0] * 128 + [128] * 128


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
