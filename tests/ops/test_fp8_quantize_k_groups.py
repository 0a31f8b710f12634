"""fp8_quantize_k_groups: the place of each code and scale, and the ops that it consists of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import dispatch
from mxspec.shapes import Shapes
from mxspec.spec import random_normal
from tests.helpers import ends, only_interpreted, u8

OF_ZEROS = 0x2720D7C5  # 1e-12 / 448, the stored scale of a block of zeros


def quantize(*args, **options):
    return mxspec.fp8_quantize_k_groups(*args, backend="reference", **options)


def test_golden_each_group_is_a_matrix_of_its_own():
    """Groups of 130, 0 and 1 tokens take 256, 0 and 128 tokens of the result. The 3 tokens after them are dropped."""
    x = torch.zeros(134, 2)
    x[0, 0], x[129, 0], x[130, 0] = 448.0, -448.0, 448.0
    x[127, 1], x[128, 1], x[130, 1], x[131:] = 448.0, 448.0, -448.0, torch.nan
    qdata, scale, start, end = quantize(x, ends(130, 130, 131))
    assert (qdata.shape, scale.shape) == ((2, 640), (2, 5))  # 134 + 3 * 128, rounded up
    assert (start.tolist(), end.tolist()) == ([0, 256, 256], [256, 256, 384])
    codes = u8(qdata).flatten()
    # Group 0: feature 0 at 0..255, feature 1 at 256..511. Group 2 begins at 2 * 256, its features 128 apart.
    places = [0, 129, 256 + 127, 256 + 128, 512, 512 + 128]
    assert codes.nonzero().flatten().tolist() == places
    assert codes[places].tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0xFE]
    assert scale.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]] * 2


def test_golden_scales_are_mn_major():
    x = torch.zeros(130, 2)
    x[:, 0], x[:, 1] = 448.0 * 2, 448.0 / 4
    x[128:130] *= 16
    _, scale, *_ = quantize(x, ends(128, 130))
    assert (scale.shape, scale.stride()) == ((2, 4), (1, 2))  # 130 + 2 * 128, rounded up; two blocks are used
    assert scale.tolist() == [[2.0, 32.0, 0.0, 0.0], [0.25, 4.0, 0.0, 0.0]]


def test_golden_zeros_and_what_is_past_the_last_group():
    qdata, scale, *_ = quantize(-torch.zeros(3, 1), ends(1))
    assert u8(qdata).flatten().tolist() == [0x80] + [0] * 255  # -0, its padding, and codes of no group
    assert scale.view(torch.int32).tolist() == [[OF_ZEROS, 0]]


def test_golden_a_nan_makes_its_block_nan_padding_included():
    x = torch.ones(130, 1)
    x[129] = torch.inf
    qdata, scale, *_ = quantize(x, ends(130))
    assert u8(qdata).flatten().tolist() == [0x7E] * 128 + [0x7F] * 128 + [0] * 128
    assert scale.isnan().tolist() == [[False, True, False]]


def test_golden_a_power_of_two():
    x = torch.full((1, 1), 3.0)  # 448 / 3 = 149.3, down to 128: codes 384
    qdata, scale, *_ = quantize(x, ends(1), scale_format="pow2")
    assert (qdata[0, 0].item(), scale[0, 0].item()) == (384.0, 2**-7)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=5),
    rest=st.integers(0, 3),
    scale_format=st.sampled_from(("fp32", "pow2")),
)
def test_each_group_is_quantized_as_if_alone(sizes, rest, scale_format):
    """Group by group on the host, as DeepGEMM's tests build their operands from known sizes."""
    D = 5
    x, offs = random_normal(sum(sizes) + rest, D), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    qdata, scale, _, end = quantize(x, offs, scale_format=scale_format)
    groups = [torch.nn.functional.pad(t, (0, 0, 0, -len(t) % 128)) for t in x[: sum(sizes)].split(sizes)]
    made = [mxspec.fp8_quantize_1x128(t, axis=-2, scale_format=scale_format) for t in groups]
    tokens = sum(len(t) for t in groups)
    if sizes:
        assert u8(qdata).flatten()[: D * tokens].equal(torch.cat([u8(q.mT).flatten() for q, _ in made]))
        assert scale[:, : tokens // 128].equal(torch.cat([s for _, s in made], 1))
        assert end[-1] == tokens
    assert not u8(qdata).flatten()[D * tokens :].any()
    assert not scale[:, tokens // 128 :].any()


def test_rows_and_bounds_are_those_of_the_mx_quantizer_of_groups():
    x, offs = random_normal(200, 64), ends(70, 70, 190)
    qdata, scale, start, end = quantize(x, offs)
    mx, _, mx_start, mx_end = mxspec.mx_quantize_groups(x, offs, axis=-2)
    assert (qdata.shape, scale.shape) == (mx.mT.shape, (64, mx.shape[0] // 128))
    assert (start.tolist(), end.tolist()) == (mx_start.tolist(), mx_end.tolist())


@only_interpreted
@pytest.mark.parametrize("tokens", [7, 2**20 + 130])
def test_codes_past_2_to_the_31_lie_where_their_group_says(tokens, monkeypatch):
    """The last block of a group that begins past 2^31, or ends past it; only the programs of that block run."""
    from triton.runtime import interpreter

    before, D = 2**20 + 256 if tokens < 128 else 0, 2176
    last = (before + tokens - 1) // 128
    only = lambda n, *rest: range(n, *rest) if rest or n < 2**13 else [last]  # noqa: E731
    monkeypatch.setattr(interpreter, "range", only, raising=False)
    row = random_normal(1, D)
    x, offs = row.expand(before + tokens, D), ends(before, before + tokens)
    qdata, scale, *_ = mxspec.fp8_quantize_k_groups(x, offs, backend="triton")
    flat, width = qdata.view(-1), (last + 1) * 128 - before
    lines = flat[D * before : D * (before + width)].view(D, width)[:, -128:]  # of each feature
    codes, scales, *_ = quantize(row.expand(tokens % 128, D), ends(tokens % 128))
    assert u8(lines).equal(u8(codes.view(-1)[: D * 128].view(D, 128)))
    assert scale[:, last].equal(scales[:, 0])


def test_bench_cases_are_the_matrices():
    op = dispatch.reference("fp8_quantize_k_groups")
    (case,) = op.spec.bench_cases(Shapes(matrices=((128, 64), (1024, 64))))
    args = case.args()
    assert (case.name, args[1].shape, op(*args, check_offs=True)[0].shape) == ("1024x64, G 8", (8,), (64, 2048))
    assert op.spec.flops(args, ()) == 2 * 1024 * 64
