"""The rules of libraries that write checkpoints, compared bit by bit with their own code if it is installed."""

import types

import pytest
import torch

from mxspec import rules
from mxspec.formats import same_bits


def numbers(dtype, rows=256, columns=512, seed=0):
    """Random numbers of many magnitudes, with zeros, a row of zeros and magnitudes at every tie of e2m1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-30, 20, (rows, 1), generator=generator).float())
    x[1], x[2, ::3], x[3, :64] = 0.0, -0.0, torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 6.0]).repeat(8)
    return x.to(dtype)


def same(ours, theirs):
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    assert all(
        bool(same_bits(a.view(torch.uint8), b.view(torch.uint8)).all()) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [(128, 128), (1, 128)], ids=["128x128", "1x128"])
def test_transformers(block, dtype, scale_format):
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    scale_fmt = "ue8m0" if scale_format == "pow2" else "float"
    config = types.SimpleNamespace(weight_block_size=list(block), scale_fmt=scale_fmt)
    quantizer = library.Fp8Quantize(types.SimpleNamespace(quantization_config=config))
    x = numbers(dtype)
    theirs = quantizer._quantize_one("m.weight", x)
    op = "fp8_quantize_128x128" if block[0] == 128 else "fp8_quantize_1x128"
    ours = getattr(rules.transformers, op)(x, scale_format=scale_format)
    same(ours, (theirs["m.weight"], theirs["m.weight_scale_inv"].float()))


def compressed(preset, x, low, high):
    """The codes and the scale that compressed-tensors stores for a weight, from the extrema of its blocks."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scale, zero_point = calculate_qparams(low, high, scheme.weights)
    stored = {"FP8_BLOCK": "float-quantized", "MXFP8": "mxfp8-quantized", "MXFP4": "mxfp4-pack-quantized"}
    stored = {**stored, "MXFP6A16": "mxfp6-pack-quantized"}[preset]
    given = {"weight": x, "weight_scale": scale, "weight_zero_point": zero_point}
    return BaseCompressor.get_value_from_registry(stored).compress(given, scheme)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_blocks(dtype):
    x = numbers(dtype)
    blocks = x.view(2, 128, 4, 128)
    theirs = compressed("FP8_BLOCK", x, blocks.amin((1, 3)), blocks.amax((1, 3)))
    ours = rules.compressed_tensors.fp8_quantize_128x128(x)
    assert theirs["weight_scale"].dtype == dtype
    same(ours, (theirs["weight"], theirs["weight_scale"].float()))


@pytest.mark.parametrize(
    ("preset", "elem_dtype", "key"),
    [("MXFP8", "e4m3fn", "weight"), ("MXFP4", "e2m1", "weight_packed"), ("MXFP6A16", "e2m3", "weight_packed")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_mx(preset, elem_dtype, key, dtype):
    x = numbers(dtype)
    blocks = x.view(256, 16, 32)
    theirs = compressed(preset, x, blocks.amin(-1), blocks.amax(-1))
    same(rules.compressed_tensors.mx_quantize(x, elem_dtype=elem_dtype), (theirs[key], theirs["weight_scale"]))


def test_the_fold_at_1_75():
    def byte(amax):
        x = torch.zeros(1, 32).index_fill(1, torch.tensor([0]), amax)
        return rules.compressed_tensors.mx_quantize(x)[1].view(torch.uint8).item()

    assert [byte(a) for a in (256.0, 447.9, 448.0, 512.0)] == [127, 127, 128, 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_modelopt(dtype):
    library = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="nvidia-modelopt is not installed")
    x = numbers(dtype)
    for tensor, elem_dtype, given in (
        (library.MXFP8QTensor, "e4m3fn", ()),
        (library.mxfp4_tensor.MXFP4QTensor, "e2m1", (32,)),
    ):
        stored, scale = tensor.quantize(x, *given)
        ours = rules.modelopt.mx_quantize(x, elem_dtype=elem_dtype)
        same(ours, (stored._quantized_data, scale.view(256, 16)))


def test_modelopt_rounds_ties_towards_zero_and_writes_minus_zero():
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0])
    codes, scale = rules.modelopt.mx_quantize(x, elem_dtype="e2m1")
    assert scale.view(torch.uint8).item() == 127
    assert codes.view(torch.uint8)[0, :5].tolist() == [0x07, 0x21, 0x4B, 0x65, 0x88]


def test_deepseek_divides_by_the_stored_scale():
    x = numbers(torch.bfloat16)
    blocks = x.double().view(2, 128, 4, 128)
    amax = blocks.abs().amax((1, 3)).clamp(min=torch.tensor(1e-4).double())
    want_scale = (amax / 448).float()  # one rounding: the quotient of two fp32 numbers in fp64 has bits to spare
    quotient = (blocks / want_scale.double()[:, None, :, None]).float()
    want = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(256, 512)
    same(rules.deepseek.fp8_quantize_128x128(x), (want, want_scale))
    _, powers = rules.deepseek.fp8_quantize_128x128(x, scale_format="pow2")
    assert powers.equal(torch.exp2(torch.ceil(torch.log2(amax / 448))).float())


def test_vllm_requantizes_to_powers_of_two_once():
    codes, scale = rules.deepseek.fp8_quantize_128x128(numbers(torch.bfloat16))
    requantized, powers = rules.vllm_requant.requantize(codes, scale)
    assert (powers.view(torch.int32) & 0x7FFFFF).eq(0).all()
    assert not requantized.view(torch.uint8).equal(codes.view(torch.uint8))
    again, same_powers = rules.vllm_requant.requantize(requantized, powers)
    values = [
        q.float() * s.repeat_interleave(128, 0).repeat_interleave(128, 1)
        for q, s in ((requantized, powers), (again, same_powers))
    ]
    assert values[0].equal(values[1])
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    codes, scale = rules.deepseek.fp8_quantize_128x128(x)
    vllm, sglang = (rules.vllm_requant.requantize(codes, scale, dtype=d)[0] for d in (torch.float32, torch.bfloat16))
    assert not sglang.view(torch.uint8).equal(vllm.view(torch.uint8))


@pytest.mark.parametrize(
    ("peer", "op", "options", "moved"),
    [
        ("deepseek", "fp8_quantize_128x128", {}, 0),
        ("contract", "fp8_quantize_128x128", {}, 569468),
        ("transformers", "fp8_quantize_128x128", {}, 991537),
    ],
)
def test_fixed_points_over_all_mantissas(peer, op, options, moved):
    found = rules.fixed_points(peer, op, **options)
    assert (found.blocks, found.scales) == (1 << 23, moved)
    assert (found.first is None) == (moved == 0)


def test_a_scale_that_moves_does_so_in_a_whole_block_too():
    amax = rules.fixed_points("transformers", "fp8_quantize_128x128").first
    codes, scale = rules.transformers.fp8_quantize_128x128(torch.full((128, 128), amax))
    assert rules.transformers.fp8_quantize_128x128(codes.float() * scale)[1] != scale


def test_fixed_points_refuses_what_it_does_not_know():
    with pytest.raises(NotImplementedError, match=r"rules\.ocp has no block rule for fp8_quantize_1x128"):
        rules.fixed_points("ocp", "fp8_quantize_1x128")
    with pytest.raises(TypeError, match=r"needs torch\.float32 or torch\.bfloat16"):
        rules.fixed_points("deepseek", "fp8_quantize_1x128", dtype=torch.float16)
    with pytest.raises(TypeError, match="fp8_quantize_1x128 has no option eps"):
        rules.fixed_points("deepseek", "fp8_quantize_1x128", eps=1.0)
    with pytest.raises(ValueError, match="op is 'fp8_gemm'; needs mx_quantize"):
        rules.fixed_points("deepseek", "fp8_gemm")
