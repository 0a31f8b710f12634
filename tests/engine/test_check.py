"""The judge itself: it fails each kind of mistake, and its report names the mistake."""

import ctypes
import dataclasses
import re
import sys

import pytest
import torch

import mxspec
from mxspec import check, dispatch
from mxspec.check import _memory
from mxspec.spec import Case

CPU = torch.device("cpu")
BATCH = "behaviour: batch invariance"  # a function that does not promise it is not judged by it


def reference(x, **kwargs):
    return dispatch.reference("mx_quantize")(x, **kwargs)


def failures(op, function):
    return [r for r in check.check(op, function, CPU) if r.status == "failed"]


def case(op, name):
    return next(c for c in dispatch.reference(op).spec.cases() if c.name == name)


@pytest.mark.turns(2)
def test_the_reference_itself_is_green():
    assert failures("mx_quantize", reference) == []


def off_by_one(x, **kwargs):
    qdata, scale = reference(x, **kwargs)
    codes = qdata.view(torch.uint8).clone()
    if codes.numel():
        codes[..., -1] ^= 1
    return codes.view(qdata.dtype), scale


def test_a_wrong_byte_is_named():
    result = check.check_case("mx_quantize", case("mx_quantize", "one block"), off_by_one, CPU)
    assert result.status == "failed"
    assert "1 of 32 elements differ, first at [0, 31]: got " in result.message
    assert "block [0, 0:32]" in result.message
    assert result.message.endswith("check --op mx_quantize tests.engine.test_check:off_by_one --case 'one block'")


def high_nibble_first(x, **kwargs):
    qdata, scale = reference(x, **kwargs)
    codes = qdata.view(torch.uint8)
    return (codes >> 4 | codes << 4).view(qdata.dtype), scale


def test_where_elements_share_a_byte_a_block_is_shown_whole_and_no_code_is_nan():
    for name, got in (("one block, e2m1, axis -1", "first at [0, 0]"), ("edge blocks, rceil, e2m1", "first at ")):
        result = check.check_case("mx_quantize", case("mx_quantize", name), high_nibble_first, CPU)
        assert result.status == "failed"
        assert got in result.message
        assert re.search(r"block \[\d+, (0:16|16:32)\]", result.message)
    # In fp8 the bytes 255 and 127 are NaN. In e2m1 each byte holds two elements, and none is NaN.
    one, other = (torch.full((1, 16), byte, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for byte in (255, 127))
    assert "16 of 16 elements differ" in (check.difference((one,), (other,)) or "")


def drops_nan(x, **kwargs):
    return reference(torch.where(x.isnan(), 0, x), **kwargs)


def test_a_rule_that_no_peer_has_is_said_to_be_none():
    name = "random bit patterns, bfloat16, rceil, e4m3fn"
    result = check.check_case("mx_quantize", case("mx_quantize", name), drops_nan, CPU)
    assert (
        "your bytes are no known peer's rule on the 36 probe blocks, "
        "and differ from the contract on 1 of them (nan + 1)" in result.message
    )


def always_floor(x, **kwargs):
    return reference(x, **{**kwargs, "scaling": "floor"})


def test_floor_for_rceil_is_recognised():
    name = "random bit patterns, bfloat16, rceil, e4m3fn"
    result = check.check_case("mx_quantize", case("mx_quantize", name), always_floor, CPU)
    assert (
        "your bytes are the contract's own with scaling='floor', torchao main's (rules.torchao, scaling='floor') on "
        "this case and on all 36 probe blocks, and differ from what was asked for on 17 of them ("
    ) in result.message


def said(op, case, fn):
    """The lines of a failure's report that say whose bytes these are."""
    result = check.check_case(op, case, fn, CPU)
    assert "elements differ" in result.message
    return [line for line in result.message.splitlines() if "your bytes" in line]


@pytest.mark.parametrize(
    ("op", "name", "options", "words"),
    [  # no peer has these rules: each has another `even`, another eps, or another scale for a NaN
        ("mx_quantize", "random bit patterns, bfloat16, rceil, e4m3fn", {"scaling": "even"}, "scaling='even'"),
        ("fp8_quantize_1x128", "ragged rows", {"scale_format": "pow2"}, "scale_format='pow2'"),
        ("fp8_quantize_1x128", "larger eps", {"eps": 1e-12}, "eps=1e-12"),
    ],
)
def test_another_rule_of_the_contract_is_recognised(op, name, options, words):
    def otherwise(x, **kwargs):
        return dispatch.reference(op)(x, **{**kwargs, **options})

    (line,) = said(op, case(op, name), otherwise)
    assert line.startswith(f"your bytes are the contract's own with {words} on this case and on all ")


def test_who_explains_the_case_and_not_the_probe_blocks_is_one_sentence():
    def floor_of_many(small):
        return lambda x, **kwargs: always_floor(x, **kwargs) if x.numel() > 32 else small(x, **kwargs)

    ragged = case("mx_quantize", "ragged rows, blocked")
    start = "your bytes are the contract's own with scaling='floor', gfloat's (rules.gfloat), "
    for small, end in [
        (
            drops_nan,
            "on this case, but no known peer's rule on the 36 probe blocks, and differ from what was asked for on 1 ",
        ),
        (
            mxspec.rules.te.mx_quantize,
            "on this case, but TransformerEngine's (rules.te) on all 36 probe blocks, and ",
        ),
        (reference, "on this case, and the contract's on all 36 probe blocks"),
    ]:
        (line,) = said("mx_quantize", ragged, floor_of_many(small))
        assert line.startswith(start)
        assert end in line


def test_of_a_peers_rules_the_one_that_explains_all_is_named():
    def pow2_of_te(x, *, scale_format="fp32", **kwargs):
        return mxspec.rules.te.fp8_quantize_1x128(x, scale_format="pow2", **kwargs)

    x = torch.full((1, 128), 448.0)  # the scale is 1 under both rules
    x[0, 7] = torch.nan  # TransformerEngine's amax skips it, the contract's does not
    (line,) = said("fp8_quantize_1x128", Case("448 and NaN", lambda: (x,)), pow2_of_te)
    assert "your bytes are TransformerEngine's (rules.te, scale_format='pow2') on this case and on all 10 probe" in line


def test_what_is_right_on_the_case_as_given_is_no_peers():
    wrong = case("mx_quantize", "32x32, axis -1, plain")
    assert said("mx_quantize", wrong, assumes_contiguous) == []  # as given, its bytes are also torchao's


def te_rule(x, *, elem_dtype=torch.float8_e4m3fn, **kwargs):
    """TransformerEngine's rule: its amax skips a NaN, and Inf is clamped to byte 254."""
    amax = torch.where(x.isnan(), 0, x.float()).unflatten(-1, (-1, 32)).abs().amax(-1)
    if amax.isfinite().all() and not x.isnan().any():
        return reference(x, elem_dtype=elem_dtype, **kwargs)
    _, scale = reference(amax.unsqueeze(-1).expand(*amax.shape, 32).flatten(-2).clamp(max=3e38), elem_dtype=elem_dtype)
    byte = torch.where(amax.isinf(), 254, scale.view(torch.uint8).int())
    inverse = (127.0 - byte).exp2()
    blocks = x.float().unflatten(-1, (-1, 32)) * inverse.unsqueeze(-1)
    top = torch.finfo(elem_dtype).max
    q = blocks.clamp(-top, top).to(elem_dtype)
    return q.flatten(-2), byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def test_transformer_engines_nan_rule_is_recognised():
    name = "random bit patterns, bfloat16, rceil, e4m3fn"
    result = check.check_case("mx_quantize", case("mx_quantize", name), te_rule, CPU)
    assert (
        "your bytes are TransformerEngine's (rules.te) on this case and on all 36 probe blocks, "
        "and differ from the contract on 4 of them (inf + 1, -inf + 1, nan + 1, nan + inf)"
    ) in result.message


def test_deepgemms_fp8_rule_is_recognised():
    def deepgemm(x, *, eps=1e-12, **kwargs):  # DeepGEMM has its own eps inside
        return mxspec.rules.deepgemm.fp8_quantize_1x128(x, **kwargs)

    result = check.check_case("fp8_quantize_1x128", case("fp8_quantize_1x128", "ragged rows"), deepgemm, CPU)
    assert "your bytes are DeepGEMM's (rules.deepgemm) on this case and on all 10 probe blocks" in result.message


def test_a_rule_kept_on_probe_blocks_alone_is_not_claimed_for_the_case():
    def te_on_single_blocks(x, **kwargs):
        return mxspec.rules.te.mx_quantize(x, **kwargs) if x.numel() == 32 else off_by_one(x, **kwargs)

    result = check.check_case("mx_quantize", case("mx_quantize", "ragged rows, blocked"), te_on_single_blocks, CPU)
    assert (
        "your bytes are TransformerEngine's (rules.te) on all 36 probe blocks, and differ from the " in result.message
    )
    assert "; on this case they are no known peer's\n" in result.message


def byte_hole(x, **kwargs):
    """Wrong only for small scales, which random numbers of ordinary size never give."""
    qdata, scale = reference(x, **kwargs)
    byte = scale.view(torch.uint8)
    return qdata, torch.where((byte >= 3) & (byte <= 85), byte + 1, byte).view(scale.dtype)


def ignores_axis(x, *, axis=-1, **kwargs):
    """Wrong only for axis -2 of inputs that are not bfloat16."""
    if axis == -2 and x.dtype != torch.bfloat16 and x.shape[-1] % 32 == 0:
        qdata, scale = reference(x, **kwargs)
        return (qdata.mT.contiguous().mT, scale)
    return reference(x, axis=axis, **kwargs)


def scrambles_blocked_e5m2(x, *, elem_dtype=torch.float8_e4m3fn, scale_layout="plain", **kwargs):
    qdata, scale = reference(x, elem_dtype=elem_dtype, scale_layout=scale_layout, **kwargs)
    wrong = scale_layout == "blocked" and elem_dtype in (torch.float8_e5m2, "e5m2")
    return qdata, scale.view(torch.uint8).flip(-1).view(scale.dtype) if wrong else scale


def knows_no_names(x, *, elem_dtype=torch.float8_e4m3fn, **kwargs):
    if not isinstance(elem_dtype, torch.dtype):
        raise KeyError(elem_dtype)
    return reference(x, elem_dtype=elem_dtype, **kwargs)


@pytest.mark.parametrize("mutant", [byte_hole, ignores_axis, scrambles_blocked_e5m2, knows_no_names])
def test_the_cases_reach_into_the_corners(mutant):
    assert any(result.status == "failed" for result in check.check("mx_quantize", mutant, CPU))


def quack_rule(x, **kwargs):
    """The scale byte is NaN, but the codes of the other elements stay as they are."""
    qdata, scale = reference(x, **kwargs)
    finite, _ = reference(torch.where(x.isfinite(), x, 0), **kwargs)
    return torch.where(x.isfinite(), finite.view(torch.uint8), qdata.view(torch.uint8)).view(qdata.dtype), scale


def test_a_kernel_that_leaves_codes_beside_a_nan_gets_its_report():
    name = "random bit patterns, bfloat16, rceil, e4m3fn"
    result = check.check_case("mx_quantize", case("mx_quantize", name), quack_rule, CPU)
    assert result.status == "failed"
    assert "your bytes are " in result.message


def test_what_a_function_does_not_support_is_skipped():
    def bf16_only(x, **kwargs):
        if x.dtype != torch.bfloat16:
            raise NotImplementedError(f"{x.dtype}")
        return reference(x, **kwargs)

    results = list(check.check("mx_quantize", bf16_only, CPU))
    assert {r.status for r in results} == {"passed", "skipped"}


@pytest.mark.turns(2)
def test_assert_conforms_counts_what_it_ran():
    def bytes_only(scale):
        if scale.dtype != torch.uint8:
            raise NotImplementedError("uint8 only")
        return dispatch.reference("to_blocked")(scale)

    cases = [c for c in dispatch.reference("to_blocked").spec.cases() if "large" not in c.flags]
    counts = check.assert_conforms(bytes_only, op="to_blocked", cases=lambda c: "large" not in c.flags, device=CPU)
    others = sum(not c.raises and c.args()[0].dtype != torch.uint8 for c in cases)
    assert others > 2
    assert counts == {"passed": len(cases) - others, "skipped": others}
    assert check.assert_conforms(bytes_only, op="to_blocked", cases="127x3", device="cpu") == {
        "passed": 1,
        "skipped": 0,
    }


def test_assert_conforms_reports_the_first_failures_and_names_the_others():
    with pytest.raises(AssertionError) as raised:
        check.assert_conforms(off_by_one, op="mx_quantize", cases=lambda c: c.name.startswith("2x"), device=CPU)
    text = str(raised.value)
    assert text.startswith("mx_quantize: 12 cases failed, 0 passed, 0 skipped\n\ncase '2x160x64, ")
    assert text.count("elements differ, first at [") == text.count("reproduce: ") == 3
    assert text.count("'2x96x160, axis -2, blocked'") == 1  # the report has only the name of the last failure


def test_a_backend_without_a_kernel_passes_no_case():
    results = [check.check_case("to_blocked", one, "deepgemm", CPU) for one in check.cases_of("to_blocked")]
    assert {(r.status, r.message) for r in results} == {("skipped", "deepgemm has no kernel for to_blocked")}


@pytest.mark.parametrize("cases", [lambda c: not c.raises, lambda c: c.raises])
def test_assert_conforms_to_nothing_is_a_failure(cases):
    def nothing(scale):
        raise NotImplementedError("not yet")

    with pytest.raises(AssertionError, match="to_blocked: the function ran on no valid case"):
        check.assert_conforms(nothing, op="to_blocked", cases=cases, device=CPU)


def test_assert_conforms_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="to_blocked has no case named '127x4'"):
        check.assert_conforms(leaves_padding, op="to_blocked", cases="127x4")
    with pytest.raises(ValueError, match="unknown op 'to_bloked'"):
        check.assert_conforms(leaves_padding, op="to_bloked")


def leaves_padding(scale):
    """Blocked scales with uninitialized padding."""
    good = dispatch.reference("to_blocked")(scale)
    owned = dispatch.reference("to_blocked")(torch.ones(scale.shape, dtype=torch.uint8))
    out = torch.empty(good.shape, dtype=torch.uint8)
    out[owned.bool()] = good.view(torch.uint8)[owned.bool()]
    return out.view(scale.dtype)


def test_bytes_that_were_never_written_are_found():
    by_hand = check.cases_of("to_blocked", lambda case: not case.flags & {"generated", "large"})
    results = [check.check_case("to_blocked", case, leaves_padding, CPU) for case in by_hand]
    failed = {result.case for result in results if result.status == "failed"}
    assert {"1x1", "127x3", "300x70"} <= failed
    assert "128x4" not in failed  # it has no padding


def leaves_nan_blocks(x, **kwargs):
    """The codes of NaN blocks are uninitialized. The poison 0xFF is a NaN too, so one poison is not enough."""
    qdata, scale = reference(x, **kwargs)
    out = torch.empty(qdata.shape, dtype=torch.uint8).as_strided(qdata.shape, qdata.stride())
    written = ~qdata.float().isnan()
    out[written] = qdata.view(torch.uint8)[written]
    return out.view(qdata.dtype), scale


def test_an_unwritten_nan_is_found():
    name = "edge blocks, rceil, e4m3fn"
    assert check.check_case("mx_quantize", case("mx_quantize", name), leaves_nan_blocks, CPU).status == "failed"


def runs_out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError


def test_only_a_call_of_2_31_elements_may_run_out_of_memory(monkeypatch):
    monkeypatch.setattr("mxspec.check._engine._too_large", lambda device, args: None)
    small = case("mx_quantize", "one block")
    large = dataclasses.replace(small, flags=frozenset({"large"}))
    result = check.check_case("mx_quantize", large, runs_out_of_memory, CPU)
    assert result.status == "skipped"
    assert result.message.endswith("runs_out_of_memory ran out of memory on cpu; nothing was checked")
    result = check.check_case("mx_quantize", small, runs_out_of_memory, CPU)
    assert result.status == "failed"
    assert "raised on a valid call" in result.message
    monkeypatch.setattr("mxspec.check._engine.answer_of", runs_out_of_memory)
    result = check.check_case("mx_quantize", large, reference, CPU)
    assert (result.status, result.message[:13]) == ("skipped", "the reference")
    with pytest.raises(torch.OutOfMemoryError):
        check.check_case("mx_quantize", small, reference, CPU)


def assumes_contiguous(x, **kwargs):
    flat = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
    return reference(flat, **kwargs)


def test_a_kernel_that_ignores_strides_is_found():
    result = check.check_case("mx_quantize", case("mx_quantize", "32x32, axis -1, plain"), assumes_contiguous, CPU)
    assert "inputs embedded in larger, poisoned memory" in result.message


def wrong_strides(x, *, axis=-1, **kwargs):
    qdata, scale = reference(x, axis=axis, **kwargs)
    return qdata.contiguous(), scale


def test_wrong_strides_are_found():
    result = check.check_case("mx_quantize", case("mx_quantize", "96x160, axis -2, plain"), wrong_strides, CPU)
    assert "output 0: strides (160, 1); needs (1, 96)" in result.message


def test_what_torch_compile_would_be_told_is_compared(monkeypatch):
    def told(x, backend=None, **kwargs):
        return wrong_strides(x, **kwargs)

    monkeypatch.setattr(dispatch, "public", lambda op: told)
    result = check.check_case("mx_quantize", case("mx_quantize", "96x160, axis -2, plain"), "reference", CPU)
    assert result.message.startswith("under FakeTensor, output 0: strides (160, 1); needs (1, 96)")


def accepts_anything(x, **kwargs):
    return x, x


def test_what_must_be_refused_and_is_not_is_found():
    result = check.check_case("mx_quantize", case("mx_quantize", "K = 100"), accepts_anything, CPU)
    assert result.message.startswith("accepted a call that must be refused: mx_quantize: K = 100 is not a multiple")


def test_sqnr():
    e = torch.tensor([3.0, 4.0])
    assert check.sqnr_db(e, e) == float("inf")
    assert check.sqnr_db(torch.tensor([3.0, 4.5]), e) == pytest.approx(20.0)  # 25 / 0.25
    assert check.sqnr_db(torch.tensor([1e-9]), torch.zeros(1)) == -float("inf")
    assert check.sqnr_db(torch.tensor([torch.nan]), torch.ones(1)) == -float("inf")


def test_the_largest_of_few_numbers_may_be_rounded_the_other_way():
    e = torch.tensor([*35 * [1.0], 3.0]).bfloat16()
    unit = 2.0**-6
    for units, place, enough in ((1, 35, True), (2, 35, False), (2, 0, False)):
        g = e.clone()
        g[place] += units * unit
        assert (check.difference((g,), (e,), 60.0) is None) == enough, (units, place)
    zero = torch.zeros(36, dtype=torch.bfloat16)
    assert "needs 60.0 dB" in check.difference((zero + 2.0**-40,), (zero,), 60.0)


def test_a_sum_that_stands_in_many_columns_is_rounded_once():
    """If the rows of b are one row repeated, the columns of the output are equal."""
    e = torch.tensor([[256.0], [100.0], [-90.0]], dtype=torch.bfloat16).repeat(1, 40)
    other, twice, elsewhere = e.clone(), e.clone(), e.clone()
    other[0], twice[0], elsewhere[1:] = 258.0, 260.0, torch.tensor([[101.0], [-91.0]])
    assert check.sqnr_db(other, e) < 45
    assert check.difference((other,), (e,), 55.0) is None
    assert "needs 55.0 dB" in (check.difference((twice,), (e,), 55.0) or "")
    assert "needs 55.0 dB" in (check.difference((elsewhere,), (e,), 55.0) or "")


def test_a_sum_under_several_scales_is_rounded_once():
    """The rows of b are one row repeated, and each has a scale of its own. The sum need not be the largest."""
    scales = torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0]).repeat(8)
    e = (torch.tensor([[256.0], [151.0], [-90.0]]) * scales).bfloat16()
    others = (1, 152.0, True), (1, 150.0, True), (1, 153.0, False), (0, 255.0, True), (0, 254.0, False)
    for row, value, enough in others:
        g = e.clone()
        g[row] = value * scales
        assert check.sqnr_db(g, e) < 55
        assert (check.difference((g,), (e,), 55.0) is None) == enough, (row, value)
        turned = check.difference((g.mT.contiguous(),), (e.mT.contiguous(),), 55.0)
        assert (turned is None) == enough, (row, value)
    two = e.clone()
    two[1:] = torch.tensor([[152.0], [-90.5]]) * scales
    assert "needs 60.0 dB" in (check.difference((two,), (e,), 60.0) or "")


def test_equal_sums_of_different_rows_and_columns_are_several_sums():
    """Also if every row of a and of b is one row repeated, all numbers are one sum."""
    later = torch.arange(128)[:, None] + torch.arange(128) > 126  # no two rows are alike, and no two columns
    e, g = (torch.where(later, number, 1.0).bfloat16() for number in (1.5, 1.5078125))
    assert "needs 55.0 dB" in (check.difference((g,), (e,), 55.0) or "")
    same = torch.full((8, 16), 3.0).bfloat16()
    assert check.difference((same + 2.0**-6,), (same,), 55.0) is None


def test_sqnr_is_judged_by_the_dtype_and_away_from_nan_and_inf():
    bounds = {torch.float32: 30.0, torch.bfloat16: 10.0}
    e, g = torch.tensor([3.0, torch.nan, torch.inf, 4.0]), torch.tensor([3.0, torch.nan, torch.inf, 4.5])
    assert check.difference((g,), (e,), bounds) == "output 0: 20.0 dB; needs 30.0 dB"
    assert check.difference((g.bfloat16(),), (e.bfloat16(),), bounds) is None
    g[1] = 0
    assert check.difference((g,), (e,), bounds) == (
        "output 0: 1 of 4 NaN or Inf differ, first at [1]: got 0.0, expected nan"
    )


def test_poisoned_memory_is_full_of_the_byte():
    x = torch.ones(2, 2)
    with check.poisoned(0x5A):
        outs = [torch.empty(3, dtype=torch.bfloat16), torch.empty_like(x), torch.empty_strided((2,), (3,))]
        outs += [x.new_empty(5), x.new_empty_strided((2, 2), (1, 2), dtype=torch.uint8)]
    assert all(set(o.untyped_storage().tolist()) == {0x5A} for o in outs)
    assert not hasattr(torch.empty, "__wrapped__")
    assert not hasattr(torch.Tensor.new_empty, "__wrapped__")


@pytest.mark.turns(6)
def test_every_op_has_about_a_quarter_of_edge_and_invalid_cases():
    for op in dispatch.ops():
        cases = list(dispatch.reference(op).spec.cases())
        assert len({c.name for c in cases}) == len(cases), op
        assert sum(bool(c.flags) for c in cases) * 4 >= len(cases), op


@pytest.mark.parametrize("op", dispatch.ops())
def test_public_signature_is_the_references_with_a_backend(op):
    import inspect

    public, ref = inspect.signature(getattr(mxspec, op)), inspect.signature(dispatch.reference(op))
    assert list(public.parameters) == [*ref.parameters, "backend"]


def test_embedded_inputs_keep_the_order_of_their_dimensions_and_lie_dense_where_the_contract_asks():
    op = dispatch.reference("mx_grouped_gemm_wgrad")
    calls = {c.name: c for c in op.spec.cases()}
    for layout, strides in (("plain", (1, 291)), ("blocked", (1, 288))):
        call = calls[f"three groups, {layout}, float32"]
        args = call.args()
        embedded = check.embedded(args, op, call.kwargs)
        assert embedded[0].stride() == strides
        assert embedded[0].storage_offset() > 0
        assert embedded[1].is_contiguous() == (layout == "blocked")
        assert all(torch.equal(e.view(torch.uint8), a.view(torch.uint8)) for e, a in zip(embedded, args, strict=True))
        assert embedded[1].untyped_storage()[0] == 0xFF


def test_a_backend_that_refuses_the_strides_of_embedded_inputs_is_not_given_them(monkeypatch):
    def refusal(op, backend, args, kwargs):
        return None if args[0].is_contiguous() else "takes contiguous tensors only"

    def kernel(scale):
        assert scale.is_contiguous()
        return dispatch.reference("to_blocked")(scale)

    for place in (dispatch, dispatch.resolve):  # the judge uses the first, and the call itself the second
        monkeypatch.setattr(place, "refusal", refusal)
    monkeypatch.setattr(dispatch.resolve, "kernel_function", lambda op, backend: kernel)
    case = next(c for c in dispatch.reference("to_blocked").spec.cases() if not c.flags)
    assert check.check_case("to_blocked", case, "triton", torch.device("cpu")).status == "passed"


# --- an op that changes its argument ------------------------------------------------------------------------------


def adds(acc, *operands):
    dispatch.reference("fp8_gemm_")(acc, *operands)


def product_of(*operands):
    return dispatch.reference("fp8_gemm")(*operands, out_dtype=torch.float32)


def overwrites(acc, *operands):
    acc.copy_(product_of(*operands))


def adds_twice(acc, *operands):
    adds(acc, *operands)
    adds(acc, *operands)


def forgets_an_element(acc, *operands):
    """Forgets the element with the largest product. No bound on the noise could notice a small product."""
    place = product_of(*operands).nan_to_num(0).abs().flatten().argmax() if acc.numel() else None
    kept = acc.clone()
    adds(acc, *operands)
    if place is not None:
        acc[place // acc.shape[1], place % acc.shape[1]] = kept.flatten()[place]


def forgets_what_was_there_in_a_row(acc, *operands):
    adds(acc, *operands)
    acc[1:2] = product_of(*operands)[1:2]


def gives_a_copy(acc, *operands):
    acc = acc.clone()
    adds(acc, *operands)
    return acc


def also_returns_it(acc, *operands):
    adds(acc, *operands)
    return acc


def writes_the_next_element(acc, *operands):
    adds(acc, *operands)
    if acc.storage_offset() + acc.numel() < acc.untyped_storage().nbytes() // 4:
        acc.as_strided((1,), (1,), acc.storage_offset() + acc.shape[1]).zero_()


@pytest.mark.turns(2)
def test_an_op_in_place_is_green():
    results = list(check.check("fp8_gemm_", adds, CPU))
    refused = {c.name for c in cases_in_place() if c.raises}
    assert {r.status for r in results if r.case not in refused and r.case != BATCH} == {"passed"}


def cases_in_place():
    return list(dispatch.reference("fp8_gemm_").spec.cases())


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (overwrites, "further off than their sums explain"),
        (adds_twice, "further off than their sums explain"),
        (forgets_an_element, "further off than their sums explain"),
        (forgets_what_was_there_in_a_row, "further off than their sums explain"),
        (gives_a_copy, "needs None"),
        (also_returns_it, "needs None"),
        (writes_the_next_element, "bytes outside the tensor that it changes"),
    ],
)
def test_each_mistake_in_place_is_found(mutant, words):
    plain = [c for c in cases_in_place() if not c.flags]
    results = [check.check_case("fp8_gemm_", c, mutant, CPU) for c in plain]
    assert [r.status for r in results] == ["failed"] * len(plain)
    assert all(words in r.message for r in results)


def adds_even_where_nothing_is_summed(acc, *operands):
    acc.copy_(acc + product_of(*operands))


def adds_a_sum_that_begins_at_minus_zero(acc, *operands):
    summed = product_of(*operands)
    acc.copy_(acc + torch.where(summed == 0, -0.0, summed))


@pytest.mark.parametrize(
    ("K", "candidate", "status"),
    [
        (0, adds, "passed"),
        (0, adds_even_where_nothing_is_summed, "failed"),
        (128, adds, "passed"),
        (128, adds_even_where_nothing_is_summed, "passed"),
        (128, adds_a_sum_that_begins_at_minus_zero, "passed"),  # the reference's fp64 matmul gives zeros of both signs
    ],
)
@pytest.mark.parametrize("code", [0.0, -0.0])
def test_a_minus_zero_stays_one_where_nothing_is_summed(K, candidate, status, code):
    def operands():
        codes, scales = torch.full((4, K), code).to(torch.float8_e4m3fn), torch.ones(4, K // 128)
        return torch.tensor([[-0.0, 0.0, 1.0]]), codes[:1], scales[:1], codes[1:].abs(), scales[1:]

    result = check.check_case("fp8_gemm_", Case("a -0", operands), candidate, CPU)
    assert (result.status, "needs -0" in result.message) == (status, status == "failed"), result.message


def test_what_lies_between_the_rows_is_compared_without_embedding_too():
    result = check.check_case("fp8_gemm_", case("fp8_gemm_", "rows of acc far apart"), writes_the_next_element, CPU)
    assert result.message.startswith("it wrote 2 bytes outside")  # two of a float32 NaN's four bytes are 0 anyway


def test_the_cases_own_tensors_are_never_changed():
    acc, *operands = case("fp8_gemm_", "K = 128").args()
    once = Case("again", lambda: (acc, *operands))
    before = acc.clone()
    for _ in range(2):
        assert check.check_case("fp8_gemm_", once, adds, CPU).status == "passed"
        assert check.check_case("fp8_gemm_", once, "reference", CPU).status == "passed"
    assert acc.equal(before)


def test_a_negated_view_is_moved_as_one():
    view = torch._neg_view(torch.arange(12.0).reshape(3, 4).t())
    (moved,) = check.on_device(torch.device("meta"), (view,))
    assert moved.is_meta
    assert moved.is_neg()
    assert moved.stride() == view.stride()


def test_a_tensor_is_moved_with_its_strides():
    whole = torch.arange(40.0).view(4, 10)
    for t in (whole[:, 2:7], whole[1:, :1].expand(3, 8), whole.t(), whole[:0], whole[:, ::3]):
        (moved,) = check.on_device(CPU, (t,))
        assert (moved.equal(t), moved.stride()) == (True, t.stride())


# --- what a candidate does apart from its outputs -----------------------------------------------------------------


def mx(x, **options):
    return mxspec.mx_quantize(x, **options)


def zeroes_its_input(x, **options):
    out = mx(x, **options)
    x.view(-1)[:1] = 0
    return out


def changes_the_last_of(far, *args):
    out = mxspec.pad_token_groups(far, *args)
    far[-1, -1] = 3
    return out


def writes_behind_a_row_of(far, *args):
    out = mxspec.pad_token_groups(far, *args)
    far.as_strided((129, 65), far.stride())[128, 64] = 3
    return out


def writes_behind_its_output(scale):
    out = torch.empty(512, dtype=scale.dtype)
    out.copy_(mxspec.to_blocked(scale))
    ctypes.memset(out.data_ptr() + 512, 0x77, 8)
    return out


def writes_before_its_output(scale):
    out = torch.empty_like(scale, memory_format=torch.contiguous_format)
    ctypes.memset(out.data_ptr() - 3, 0x77, 3)
    return mxspec.to_blocked(scale)


def leaves(scale):
    sys.exit(0)


@pytest.mark.parametrize(
    ("op", "case", "fn", "words"),
    [
        ("mx_quantize", "one block", zeroes_its_input, "it changed its input x"),
        ("pad_token_groups", "rows far apart", changes_the_last_of, "it changed its input x"),
        ("pad_token_groups", "rows far apart", writes_behind_a_row_of, "it changed its input x"),
        ("to_blocked", "128x4", writes_behind_its_output, "it wrote 8 bytes outside the memory that it allocated"),
        ("to_blocked", "128x4", writes_before_its_output, "it wrote 3 bytes outside the memory that it allocated"),
        ("to_blocked", "128x4", leaves, "raised on a valid call"),
    ],
)
def test_what_a_function_does_beside_its_outputs_is_found(op, case, fn, words):
    (chosen,) = check.cases_of(op, case)
    result = check.check_case(op, chosen, fn, torch.device("cpu"))
    assert result.status == "failed"
    assert result.message.startswith(words)
    assert "your bytes are" not in result.message


def test_of_rows_gigabytes_apart_only_their_pages_are_read():
    (case,) = check.cases_of("pad_token_groups", "rows far apart")
    far = case.args()[0]
    assert far.untyped_storage().nbytes() > 2**32
    assert _memory._touched(far).shape == (140, 4096)
    assert _memory._touched(far[128:]).equal(_memory._touched(far)[128:])
    assert _memory._touched(torch.zeros(3, 5)[:, 1:]).shape == (3 * 5 * 4,), "of all else all of it"


def test_guarded_memory_is_as_aligned_and_as_large_as_asked_for():
    with check.poisoned(0x5A) as overrun:
        for dtype in (torch.uint8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bfloat16, torch.float64):
            out = torch.empty_strided((3, 5), (1, 4), dtype=dtype)
            assert (out.shape, out.stride(), out.dtype) == ((3, 5), (1, 4), dtype)
            assert out.data_ptr() % 64 == 0
            assert set(out.as_strided((3,), (1,)).view(torch.uint8).tolist()) == {0x5A}
        assert overrun() is None


def test_a_name_that_no_case_has_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"to_blocked has no case named '128x5'; among its \d+ cases are .*'128x4'"):
        check.assert_conforms(mxspec.to_blocked, op="to_blocked", cases="128x5")


@pytest.mark.parametrize(("fn", "cases", "words"), [(None, None, "fn = None"), (mx, ["one block"], r"cases = \['one")])
def test_what_is_no_function_or_choice_is_refused(fn, cases, words):
    with pytest.raises(TypeError, match=words):
        check.assert_conforms(fn, op="mx_quantize", cases=cases)


def test_a_device_without_bytes_is_refused():
    with pytest.raises(ValueError, match="device = meta; needs a device whose tensors have bytes"):
        check.assert_conforms(mx, op="mx_quantize", cases="one block", device=torch.device("meta"))


def test_scalars_are_compared_too():
    assert check.difference((torch.tensor(1.0),), (torch.tensor(1.0),)) is None
    assert "1 of 1 elements differ" in check.difference((torch.tensor(1.0),), (torch.tensor(2.0),))


# --- batch invariance --------------------------------------------------------------------------------------------

MATMULS = (
    "fp8_gemm", "fp8_gemm_", "fp8_grouped_gemm", "mx_gemm", "mx_grouped_gemm", "nvfp4_gemm", "nvfp4_grouped_gemm",
)  # fmt: skip


def promised(op, change):
    """The op in float64, as a function that promises batch invariance and breaks it by `change`."""

    def candidate(*args, **kwargs):
        returned = dispatch.reference(op)(*args, **kwargs)
        out = args[0] if returned is None else returned
        change(out)
        return returned

    candidate.batch_invariant = True
    return candidate


def of_the_number_of_rows(out):
    if len(out) > 100:
        out.view({2: torch.int16, 4: torch.int32}[out.element_size()])[:, -1] ^= 1


def of_the_row_before(out):
    bits = out.view({2: torch.int16, 4: torch.int32}[out.element_size()])
    bits[1:, 0] ^= bits[:-1, 0].clone() & 1


@pytest.mark.turns(6)
@pytest.mark.parametrize("op", MATMULS)
@pytest.mark.parametrize("change", [of_the_number_of_rows, of_the_row_before])
def test_a_row_that_depends_on_other_rows_is_found(op, change):
    assert BATCH in check.behaviours(op, CPU)
    assert check.check_behaviour(op, BATCH, promised(op, lambda out: None), CPU).status == "passed"
    found = check.check_behaviour(op, BATCH, promised(op, change), CPU)
    assert found.status == "failed"
    assert "changes the bits of" in found.message


def test_an_interpreter_is_not_judged_by_batch_invariance(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreters", lambda: ["TRITON_INTERPRET"])
    found = check.check_behaviour("fp8_gemm", BATCH, promised("fp8_gemm", of_the_number_of_rows), CPU)
    assert found.status == "skipped"
    assert "multiplies matrices by numpy" in found.message


def test_who_does_not_promise_batch_invariance_is_not_judged_by_it():
    for candidate in ("reference", dispatch.reference("mx_gemm")):
        found = check.check_behaviour("mx_gemm", BATCH, candidate, CPU)
        assert found.status == "skipped"
        assert "does not promise batch invariance" in found.message
    assert BATCH not in check.behaviours("mx_quantize", CPU)
