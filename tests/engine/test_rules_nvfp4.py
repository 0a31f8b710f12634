"""rules, for NVFP4: every preset gives what its peer's code gave, block by block and over whole ranges of amaxes."""

import hashlib

import pytest
import torch

from mxspec import check, nvfp4_dequantize, nvfp4_quantize, rules
from mxspec.cases.nvfp4_quantize import ties_under_scales
from mxspec.formats import E2M1
from mxspec.reference.common.numerics import unpacked
from mxspec.rules import _recorded
from mxspec.spec import normal, random_bits, random_normal
from tests.engine.nvfp4_pairs import IN_RANGE, TENSOR_AMAXES, every_pair

RECORD = _recorded.load_nvfp4()
PRESETS = {peer: getattr(rules, peer) for peer in rules.peers() if hasattr(getattr(rules, peer), "nvfp4_quantize")}
ENTRY = {peer: next(iter(module.RECORDED["nvfp4"])) for peer, module in PRESETS.items() if "nvfp4" in module.RECORDED}


def ties(dtype):
    """Numbers beside the ties of the codes, under every scale and 128 tensor amaxes, rounded to dtype."""
    amax = TENSOR_AMAXES.float() * (1.0 if dtype == torch.bfloat16 else 1 + 2.0**-12)
    return (ties_under_scales() * (amax / 2688)[:, None, None]).to(dtype), amax


def finite(dtype, seed):
    x = random_bits(256, 256, dtype=dtype, seed=seed)
    return (torch.where(x.isfinite(), x, x.new_ones(())),)


# The calls whose results the record holds as digests.
CALLS = {
    "every pair of amaxes": every_pair,
    "ties, bfloat16": lambda: ties(torch.bfloat16),
    "ties, float32": lambda: ties(torch.float32),
    "ties, float16": lambda: ties(torch.float16),
    "normal, bfloat16": lambda: (random_normal(256, 512),),
    "normal, float32": lambda: (normal(256, 512, seed=3),),
    "normal, float16": lambda: (random_normal(256, 512, dtype=torch.float16, seed=4),),
    "bits, bfloat16": lambda: finite(torch.bfloat16, 1),
    "bits, float32": lambda: finite(torch.float32, 2),
    "bits, float16": lambda: finite(torch.float16, 3),
}


def digest(qdata, scale):
    """sha256 of the codes' bytes, then the scales' bytes."""
    stored = (t.contiguous().view(torch.uint8).numpy().tobytes() for t in (qdata, scale))
    return hashlib.sha256(b"".join(stored)).hexdigest()


PEERS = sorted(PRESETS)


def test_six_presets_and_the_kernels_of_one_of_them():
    assert PEERS == ["compressed_tensors", "modelopt", "te", "te_reference", "torchao", "torchao_0_18", "vllm"]
    assert sorted(set(PEERS) - set(ENTRY)) == ["te"]  # no GPU that runs TransformerEngine's kernels was there
    assert set(ENTRY.values()) == set(RECORD["peers"])


# The blocks that are compared, and the probes that the preset refuses.
COUNTS = {
    "compressed_tensors": (542, 6),
    "modelopt": (552, 0),
    "te_reference": (696, 0),
    "torchao": (361, 24),
    "torchao_0_18": (361, 24),
    "vllm": (526, 16),
}


@pytest.mark.parametrize("peer", sorted(ENTRY))
def test_blocks(peer):
    """Every recorded block: bytes of scales and codes, and the multiplier of the matrix."""
    checked = refused = 0
    for probe in _recorded.all_of("nvfp4"):
        recorded = probe.recorded.get(ENTRY[peer])
        if recorded is None:
            with pytest.raises(NotImplementedError, match="needs"):
                PRESETS[peer].nvfp4_quantize(*probe.args(), **probe.options)
        elif recorded[-1] is None:  # a NaN was cast to e2m1
            with pytest.raises(ValueError, match="casts a NaN to e2m1"):
                PRESETS[peer].nvfp4_quantize(*probe.args(), **probe.options)
            refused += 1
        else:
            got = PRESETS[peer].nvfp4_quantize(*probe.args(), **probe.options)
            assert rules.matches(got, recorded), (probe.name, got, recorded)
            checked += probe.x.numel() // 16
    assert (checked, refused) == COUNTS[peer]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("peer", sorted(set(ENTRY) - {"torchao_0_18"}))
def test_digests(peer, call):
    """The same bytes as the peer's code on whole ranges, such as every pair of bfloat16 amaxes."""
    want = RECORD["digests"][call].get(ENTRY[peer])
    args = CALLS[call]()
    if want is None:
        assert (peer, args[0].dtype) == ("torchao", torch.float16)
    else:
        assert digest(*PRESETS[peer].nvfp4_quantize(*args)[:2]) == want


def scale_bytes(rule):
    return rule(*every_pair())[1].view(torch.uint8)[..., 0]


@pytest.fixture(scope="module")
def contract():
    return scale_bytes(nvfp4_quantize)


# Pairs, of 204,864, whose scale byte is not the exact quotient, rounded once. The contract's is.
APART = {"torchao": 61, "modelopt": 75, "vllm": 210, "te": 263, "te_reference": 263, "compressed_tensors": 3255}


@pytest.mark.parametrize("peer", APART)
def test_how_far_a_rule_is_from_the_contract(peer, contract):
    assert IN_RANGE.sum() == 204_864
    assert ((scale_bytes(PRESETS[peer].nvfp4_quantize) != contract) & IN_RANGE).sum() == APART[peer]


def test_the_block_that_sets_transformer_engine_apart():
    x = torch.zeros(1, 16)
    x[0, 0] = 0.0003719329833984375
    got = {p: m.nvfp4_quantize(x, torch.tensor(1.015625))[1].view(torch.uint8).item() for p, m in PRESETS.items()}
    assert {p for p, byte in got.items() if byte == 0x23} == {"te", "te_reference"}
    assert set(got.values()) == {0x22, 0x23}


def test_the_bytes_of_a_block_of_zeros_and_of_one_that_underflows():
    x = torch.zeros(1, 48, dtype=torch.bfloat16)
    x[0, 16], x[0, 17], x[0, 32] = 2.0**-12, -(2.0**-12), 2688.0
    x[0, 18] = -0.0
    want = {  # the scale of zeros, the scale of the small block, and the first three codes of the small block
        "te_reference": (0x00, 0x00, 7, 15, 0),
        "te": (0x00, 0x00, 7, 15, 8),
        "torchao": (0x08, 0x08, 0, 8, 8),
        "modelopt": (0x38, 0x01, 0, 8, 0),
        "compressed_tensors": (0x20, 0x20, 0, 8, 0),
        "vllm": (0x00, 0x00, 0, 8, 0),
    }
    for peer, bytes_and_codes in want.items():
        qdata, scale, _ = PRESETS[peer].nvfp4_quantize(x)
        stored, codes = scale.view(torch.uint8)[0].tolist(), qdata.view(torch.uint8)[0, 8:10].tolist()
        got = (*stored[:2], codes[0] & 15, codes[0] >> 4, codes[1] & 15)
        assert got == bytes_and_codes, peer


def test_the_kernels_of_transformer_engine_are_its_reference_except_for_minus_zero_and_what_was_not_run():
    te, reference = PRESETS["te"].nvfp4_quantize, PRESETS["te_reference"].nvfp4_quantize
    compared = signs = 0
    for probe in _recorded.all_of("nvfp4"):
        args = probe.args()
        if any(t.isnan().any() for t in args):
            with pytest.raises(ValueError, match="no recorded result for a NaN"):
                te(*args, **probe.options)
            continue
        if probe.amax is not None and probe.amax == 0:
            continue
        ours, theirs = te(*args, **probe.options), reference(*args, **probe.options)
        assert check.difference(ours[1:], theirs[1:]) is None
        codes, others = (unpacked(t[0], E2M1) for t in (ours, theirs))
        minus_zero = (codes == 8) & (others == 0)
        assert ((codes == others) | minus_zero).all()
        signs += int(minus_zero.sum())
        compared += 1
    assert compared >= 100
    assert signs >= 100


@pytest.mark.parametrize("peer", PEERS)
def test_stacks_axes_and_layouts(peer):
    """A matrix of a stack, alone; blocks along the other axis; scales in the other layout."""
    rule = PRESETS[peer].nvfp4_quantize
    x = normal(3, 48, 64) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    amax = torch.tensor([4.0, 5e-3, 200.0])
    for given in ((), (amax,)):
        qdata, scale, multiplier = rule(x, *given)
        for i in range(3):
            alone = rule(x[i], *(a[i] for a in given))
            assert check.difference((qdata[i], scale[i], multiplier[i]), alone) is None
        down = rule(x.mT.contiguous(), *given, axis=-2, scale_layout="blocked")
        assert check.difference((down[0].mT, down[2]), (qdata, multiplier)) is None
        assert check.difference(down[1:2], rule(x, *given, scale_layout="blocked")[1:2]) is None
        again = nvfp4_dequantize(qdata, scale, multiplier, out_dtype=torch.float32)
        assert ((again - x).norm() / x.norm()) < 0.11


@pytest.mark.parametrize("peer", PEERS)
def test_refusals(peer):
    rule = PRESETS[peer].nvfp4_quantize
    with pytest.raises(ValueError, match="no rule for a negative tensor_amax; needs 0 or more"):
        rule(torch.ones(1, 16), torch.tensor(-1.0))
    if peer not in ("torchao", "torchao_0_18"):  # torchao refuses an amax of 0
        ours, theirs = (rule(torch.ones(1, 16), torch.tensor(zero)) for zero in (0.0, -0.0))
        assert check.difference(ours, theirs) is None
    if peer in ("te", "te_reference"):
        assert rule(normal(32, 32), block="16x16")[1].view(torch.uint8)[:16].unique(dim=0).shape == (1, 2)
    else:
        with pytest.raises(NotImplementedError, match="has no block = '16x16'; needs '1x16'"):
            rule(normal(32, 32), block="16x16")


@pytest.mark.parametrize("peer", PEERS)
def test_the_report_names_the_rule_of_a_kernel(peer):
    """`mxspec check` says whose rule a kernel follows, also with 16x16 blocks."""
    rule, args = PRESETS[peer].nvfp4_quantize, (random_normal(32, 64),)
    assert peer in rules.explaining("nvfp4_quantize", args, {}, rule(*args))
    said = rules.report("nvfp4_quantize", rule, args, {})
    assert f"(rules.{peer})" in said, said
    assert "differ from the contract on" in said
    if peer == "te":
        square = {"block": "16x16"}
        assert peer in rules.explaining("nvfp4_quantize", args, square, rule(*args, **square))
        assert "(rules.te)" in rules.report("nvfp4_quantize", rule, args, square)


def test_a_right_kernel_needs_no_rule():
    args = (random_normal(32, 64),)
    assert rules.report("nvfp4_quantize", nvfp4_quantize, args, {}) is None
    assert rules.explaining("nvfp4_quantize", args, {}, nvfp4_quantize(*args))[0] == "contract"
    square = nvfp4_quantize(*args, block="16x16")
    assert rules.explaining("nvfp4_quantize", args, {}, square) == ["contract, block='16x16'"]


@pytest.mark.parametrize("peer", ["te", "torchao", "modelopt", "compressed_tensors", "vllm"])
def test_a_rule_needs_values(peer):
    with pytest.raises(ValueError, match="reads values, and x has none: it is on meta, or fake"):
        getattr(rules, peer).nvfp4_quantize(torch.empty(16, 32, dtype=torch.bfloat16, device="meta"))
