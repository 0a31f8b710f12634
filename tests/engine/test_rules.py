"""rules: every preset reproduces its peer's recorded results bit for bit, and refuses calls that the peer lacks."""

import contextlib
import inspect
import re

import numpy as np
import pytest
import torch

import mxspec
from mxspec import check, dispatch, mx_quantize, rules
from mxspec.formats import ELEMENTS, SCALINGS
from mxspec.rules import _recorded
from tests.helpers import published

PEERS = {name: getattr(rules, name) for name in rules.peers()}
# The op that the blocks of a section of peers.json belong to.
OP_OF = {"mx": "mx_quantize", "blk": "fp8_quantize_1x128"}
ENTRIES = [
    (peer, section, entry)
    for peer, module in PEERS.items()
    for section, entries in module.RECORDED.items()
    if section in OP_OF  # test_rules_nvfp4.py has NVFP4
    for entry in entries
]
VECTORS = {name: published(name) for name in ("mx_blocks", "fp8_block")}


def supported(op, **kwargs):
    try:
        dispatch.reference(op)(torch.zeros(1, 128), **kwargs)
    except TypeError:  # the op does not have this recorded element format
        return False
    return True


@pytest.mark.parametrize(("peer", "section", "entry"), ENTRIES, ids=lambda value: value)
def test_a_preset_gives_what_is_recorded_of_its_peer(peer, section, entry):
    module, op = PEERS[peer], OP_OF[section]
    function, options = getattr(module, op), module.RECORDED[section][entry]
    otherwise = getattr(module, "SOURCE_DIFFERS", {}).get(section, ())
    checked = 0
    for probe in _recorded.all_of(section):
        recorded = probe.recorded.get(entry)
        chosen = {"elem_dtype": probe.elem_dtype} if section == "mx" else {}
        if recorded is None or not supported(op, **chosen):
            continue
        if recorded[0] == "ERR":
            with pytest.raises(ValueError, match="no NaN"):
                function(probe.given(entry), **options, **chosen)
            continue
        result = function(probe.given(entry), **options, **chosen)
        found = rules.matches(result, recorded, probe.elem_dtype)
        assert found == (probe.name not in otherwise), (probe.name, result, recorded)
        checked += 1
    assert checked >= (30 if section == "mx" else 10)
    assert not otherwise or "*" in entry  # only a transcribed entry may differ from the source


@pytest.mark.parametrize("section", OP_OF)
def test_everything_recorded_belongs_to_a_preset(section):
    recorded = {entry for probe in _recorded.all_of(section) for entry in probe.recorded}
    assert recorded == {entry for _, of, entry in ENTRIES if of == section}


def test_a_name_in_the_record_is_a_whole_formats_name(monkeypatch):
    assert {key.partition("|")[2] for key in _recorded.load()["mx"]} <= set(ELEMENTS)
    monkeypatch.setattr(_recorded, "load", lambda: {"mx": {"one|e2m": {}}})
    with pytest.raises(TypeError, match="elem_dtype 'e2m' is no element format"):
        list(_recorded.all_of("mx"))


MX_PEERS = [peer for peer, module in PEERS.items() if hasattr(module, "mx_quantize")]


@pytest.mark.parametrize("peer", [peer for peer in MX_PEERS if peer != "ocp"])  # ocp is a text and was not run
def test_a_preset_gives_numbers_only_where_something_is_recorded(peer):
    taken, x = set(), torch.linspace(-3, 3, 32).unsqueeze(0)
    for fmt in ELEMENTS.values():
        for scaling in SCALINGS:
            with contextlib.suppress(NotImplementedError):
                PEERS[peer].mx_quantize(x, elem_dtype=fmt.name, scaling=scaling)
                taken.add((fmt.name, scaling))
    assert taken == {
        (probe.elem_dtype, options["scaling"])
        for probe in _recorded.all_of("mx")
        for entry, options in PEERS[peer].RECORDED["mx"].items()
        if probe.recorded.get(entry) is not None
    }


def test_no_peer_without_a_record_explains_e2m1():
    x = torch.linspace(-3, 3, 64).view(2, 32)
    got = mx_quantize(x, elem_dtype="e2m1", scaling="floor", backend="reference")
    assert rules.explaining("mx_quantize", (x,), {"elem_dtype": "e2m1", "scaling": "floor"}, got) == [
        "contract",
        "compressed_tensors, scaling='even'",  # the largest magnitudes of these blocks are below 1.75 * 2^k
        "gfloat",
        "microxcaling",
        "modelopt, scaling='rceil'",  # and no number lies between two values
        "ocp",
        "torchao",
        "torchao_0_18",
    ]


def test_peers_agree_in_fp6_and_int8_about_finite_blocks():
    """gfloat by `floor`, compressed-tensors by `even`, which makes amaxes that round to 2^128 zeros."""
    for elem_dtype in ("e2m3", "e3m2", "int8"):
        probes = [probe for probe in rules.probes("mx", elem_dtype) if probe.x.isfinite().all()]
        assert len(probes) == 32
        for probe in probes:
            for entry, scaling in (("gfloat", "floor"), ("ct020", "even")):
                recorded = probe.recorded.get(entry)
                if recorded and (entry, probe.name) not in {("ct020", "bf16 max"), ("ct020", "fp32 max")}:
                    got = mx_quantize(probe.x, elem_dtype=elem_dtype, scaling=scaling, backend="reference")
                    assert rules.matches(got, recorded, elem_dtype), (entry, probe.name, got, recorded)


def test_gfloat_has_the_lowest_int8():
    x = torch.tensor([[1.0, -1.998]]).repeat(1, 16)
    (theirs, _), (ours, _) = (
        quantize(x, elem_dtype="int8", scaling="floor") for quantize in (rules.gfloat.mx_quantize, mx_quantize)
    )
    assert (theirs[0, :2].tolist(), ours[0, :2].tolist()) == ([64, -128], [64, -127])


def test_what_a_preset_does_differently_stays_inside_its_own_block():
    """A block gives the same result among others as alone, along either axis and with either layout of x."""
    x = torch.cat([probe.x.float() for probe in rules.probes("mx") if probe.x.dtype == torch.bfloat16])[:24].repeat(
        4, 1
    )
    for name, module in PEERS.items():
        if name == "ocp" or not hasattr(module, "mx_quantize"):
            continue  # ocp refuses some of these blocks
        qdata, scale = module.mx_quantize(x)
        alone = [module.mx_quantize(row.unsqueeze(0)) for row in x]
        assert torch.equal(scale.view(torch.uint8), torch.cat([s.view(torch.uint8) for _, s in alone])), name
        down, down_scale = module.mx_quantize(x.mT.contiguous(), axis=-2, scale_layout="blocked")
        assert down.stride() == (1, 32)
        assert torch.equal(down.mT.view(torch.uint8), qdata.view(torch.uint8)), name
        assert torch.equal(down_scale.view(torch.uint8), mxspec.to_blocked(scale.view(torch.uint8))), name


@pytest.mark.parametrize("source", ["bf16", "f32"])
@pytest.mark.parametrize("elem_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["floor", "rceil"])
def test_vectors_of_torchao_main(source, elem_dtype, scaling):
    vectors = VECTORS["mx_blocks"]
    store, dtype = {"bf16": (np.int16, torch.bfloat16), "f32": (np.int32, torch.float32)}[source]
    x = torch.from_numpy(vectors[f"{source}.x"].view(store)).view(dtype)
    key = f"{source}.{'e4m3' if elem_dtype == torch.float8_e4m3fn else 'e5m2'}.{scaling}"
    qdata, scale = rules.torchao.mx_quantize(x, elem_dtype=elem_dtype, scaling=scaling)
    want = torch.from_numpy(vectors[f"{key}.q"]).view(elem_dtype), torch.from_numpy(vectors[f"{key}.scale"])
    assert torch.equal(scale.view(torch.uint8)[:, 0], want[1])
    assert check.difference((qdata,), want[:1]) is None


@pytest.mark.parametrize("key", sorted(key[:-2] for key in VECTORS["fp8_block"] if key.endswith(".q")))
def test_fp8_vectors_of_torchao_main(key):
    op = {"act1x128": "fp8_quantize_1x128", "w128x128": "fp8_quantize_128x128"}[key.split(".")[1]]
    x, q, s = (torch.from_numpy(VECTORS["fp8_block"][name]) for name in (f"{key[0]}.x", f"{key}.q", f"{key}.s"))
    result = getattr(rules.torchao, op)(x)
    assert check.difference(result, (q.view(torch.float8_e4m3fn), s.view(result[1].shape))) is None
    if op == "fp8_quantize_1x128":  # 1 / fp32(448 / a) and a / 448 differ for some a
        assert 0 < (rules.deepgemm.fp8_quantize_1x128(x)[1] != s).sum() < s.numel()


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_the_standard_is_the_contracts_floor_on_numbers_and_silent_on_the_rest(value):
    x = torch.cat([probe.x.float() for probe in rules.probes("mx") if probe.x.isfinite().all()])
    ours = mx_quantize(x, scaling="floor", backend="reference")
    assert check.difference(rules.ocp.mx_quantize(x), ours) is None
    x[3, 7] = value
    with pytest.raises(ValueError, match="has no rule for a block with a NaN or an Inf"):
        rules.ocp.mx_quantize(x)
    with pytest.raises(NotImplementedError, match="has no scaling = 'rceil'; needs 'floor'"):
        rules.ocp.mx_quantize(x, scaling="rceil")


OPS = ("mx_quantize", "fp8_quantize_1x128", "fp8_quantize_128x128", "nvfp4_quantize")
PRESETS = [(peer, op) for peer, module in PEERS.items() for op in OPS if hasattr(module, op)]


@pytest.mark.parametrize(("peer", "op"), PRESETS)
def test_a_preset_has_the_ops_signature_a_source_and_words_for_what_it_lacks(peer, op):
    function, reference = getattr(PEERS[peer], op), dispatch.reference(op)
    ours, theirs = inspect.signature(reference).parameters, inspect.signature(function).parameters
    assert [(p.name, p.kind, p.annotation) for p in ours.values()] == [
        (p.name, p.kind, p.annotation) for p in theirs.values()
    ]
    assert re.search(r"Source: \S", function.__doc__)
    ran, refusals = 0, set()
    for case in reference.spec.cases():
        if {"large", "generated"} & set(case.flags):
            continue
        if case.raises and "eps" not in case.name:
            with pytest.raises((case.raises, NotImplementedError)):
                function(*case.args(), **case.kwargs)
        elif not case.raises:
            try:
                got = function(*case.args(), **case.kwargs)
            except (NotImplementedError, ValueError) as error:
                refusals.add(str(error))
                continue
            assert check.form_difference(got, reference(*case.args(), **case.kwargs)) is None, case.name
            ran += 1
    assert all(words.startswith(op.split("_1")[0]) and "; needs " in words for words in refusals)
    assert ran >= 10


def test_the_first_word_goes_to_what_was_asked():
    torch.manual_seed(0)  # some draws have the same codes under more rules
    x = torch.randn(4, 64) * torch.tensor([1.0, 2.0**-130]).repeat_interleave(32)
    x[1, 3], x[2, 5] = torch.inf, 3.9
    assert rules.explaining("mx_quantize", (x,), {}, rules.te.mx_quantize(x)) == ["modelopt", "te"]
    assert rules.explaining("mx_quantize", (x,), {"scaling": "floor"}, rules.te.mx_quantize(x)) == [
        "modelopt, scaling='rceil'",
        "te, scaling='rceil'",
    ]
    assert rules.explaining("mx_quantize", (x,), {}, mx_quantize(x)) == ["contract", "torchao"]
    assert rules.explaining("mx_quantize", (x,), {}, mx_quantize(x, scaling="floor"))[0] == "contract, scaling='floor'"
    large = torch.full((1, 128), 300.0)
    got = mxspec.fp8_quantize_1x128(large, scale_format="pow2")
    assert rules.explaining("fp8_quantize_1x128", (large,), {"eps": 1e-4}, got)[0] == "contract, scale_format='pow2'"
    nothing = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(4, 2).to(torch.float8_e8m0fnu)
    assert rules.explaining("mx_quantize", (x,), {}, nothing) == []
    qdata, scale = mx_quantize(x)
    for other in ((qdata.view(torch.uint8), scale), (qdata.unsqueeze(0), scale), (qdata,)):  # the same bytes
        assert rules.explaining("mx_quantize", (x,), {}, other) == []


@pytest.mark.parametrize(("peer", "op"), PRESETS)
def test_each_preset_explains_itself(peer, op):
    x = torch.randn(128, 256) * torch.tensor([1.0, 2.0**-120]).repeat_interleave(128)
    function = getattr(PEERS[peer], op)
    assert peer in rules.explaining(op, (x,), {}, function(x))


def test_explaining_changes_no_inputs():
    (args, kwargs) = next((c.args(), c.kwargs) for c in dispatch.reference("fp8_gemm_").spec.cases() if not c.flags)
    before = args[0].clone()
    assert rules.explaining("fp8_gemm_", args, kwargs, args[0]) == []
    assert args[0].equal(before)


def test_an_unknown_peer_is_named():
    with pytest.raises(AttributeError, match="no peer 'nobody'; it has compressed_tensors, deepgemm, deepseek, flash"):
        rules.nobody  # noqa: B018


@pytest.mark.parametrize("peer", rules.peers())
def test_fixed_points_are_counted_or_refused(peer):
    for op in ("mx_quantize", "fp8_quantize_1x128", "fp8_quantize_128x128"):
        with contextlib.suppress(NotImplementedError):  # the peer has no such rule
            assert rules.fixed_points(peer, op, dtype=torch.bfloat16).blocks == 128


def test_a_preset_has_no_gradient():
    tried = 0
    ops = ("mx_quantize", "fp8_quantize_1x128", "fp8_quantize_128x128", "nvfp4_quantize")
    for peer, op in ((peer, op) for peer in rules.peers() for op in ops):
        preset = getattr(getattr(rules, peer), op, None)
        if preset:
            x = torch.ones(128, 128, requires_grad=True)
            assert not any(out.requires_grad for out in preset(x)), (peer, op)
            tried += 1
    assert tried > 20
