"""Every two facts of a call meet in a valid case, and a candidate that is wrong only there is caught."""

import inspect

import pytest
import torch

from mxspec import cases, check, dispatch, rules
from mxspec.cases.common.pairwise import pairwise
from mxspec.check import Fact
from tests.helpers import COMPLETE, enough


# Scoped to the module, so that the tests of an op follow each other.
@pytest.fixture(scope="module", params=dispatch.ops())
def op(request):
    return request.param


@pytest.fixture(scope="module")
def coverage(op):
    return check.coverage(op)


@pytest.mark.turns(8)
def test_every_two_facts_meet_in_a_valid_case_or_cannot(op, coverage):
    missing = [" and ".join(sorted(map(str, pair))) for pair in coverage.missing]
    assert not missing, f"{op}: no case has {missing[:5]}, {len(missing)} in all"


@pytest.mark.turns(8)
def test_no_case_shows_what_is_said_to_be_impossible(op, coverage):
    """A pattern that is too broad would hide pairs that a case could show."""
    rules = dict(cases.impossible(op))
    wrong = {
        f"{pattern!r}: {name} shows {sorted(map(str, pair))}"
        for pair, name in coverage.shown.items()
        for pattern in rules
        if cases.matches(pattern, pair)
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.turns(8)
def test_every_pattern_of_an_op_is_of_use(op, coverage):
    for pattern, reason in getattr(cases.of(op), "IMPOSSIBLE", ()):
        assert any(cases.matches(pattern, pair) for pair in coverage.impossible), f"{pattern}: {reason}"


@pytest.mark.turns(8)
def test_a_candidate_that_is_wrong_on_one_pair_alone_is_caught(op, coverage, monkeypatch):
    """For each pair, the smallest case that has it. All pairs of a case hold in one call: one run proves them.

    `make test` takes only as many of these cases as show every fact.
    """
    monkeypatch.setattr(rules, "report", lambda *_: None)  # it compares each failure with every peer, which takes long
    of_case = {}
    for pair, name in coverage.shown.items():
        of_case.setdefault(name, set()).add(pair)
    if not COMPLETE:
        taken = enough([frozenset().union(*pairs) for pairs in of_case.values()])
        of_case = {name: pairs for i, (name, pairs) in enumerate(of_case.items()) if i in taken}
    reference = dispatch.reference(op)
    for case in reference.spec.cases():
        if case.name not in of_case:
            continue
        met = []

        def mutant(*args, pairs=of_case[case.name], met=met, **kwargs):
            met.append(pairs <= set(check.pairs(check.facts_of(op, args, kwargs))))
            result = reference(*args, **kwargs)
            return spoiled(reference, args, result) if met[-1] else result

        result = check.check_case(op, case, mutant, torch.device("cpu"))
        assert any(met), f"{op}, {case.name!r}: no call of the engine has the case's facts"
        assert result.status == "failed", f"{op}, {case.name!r}: survived; {sorted(map(str, min(of_case[case.name])))}"


def spoiled(reference, args, result):
    """The outputs with one wrong element. An empty output has no element, so the call raises instead."""
    outputs = [t for t in reference.spec.outputs(args, result) if t.numel()]
    if not outputs:
        raise RuntimeError("wrong here")
    out = outputs[-1][tuple(size - 1 for size in outputs[-1].shape)]
    if reference.spec.min_sqnr_db == float("inf"):
        bits = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()])
        bits ^= bits if out.is_floating_point() and out.float().isnan() else 1
    else:
        out.fill_(0 if out.isnan() else torch.nan)
    return result


def test_every_tensor_is_refused_with_a_wrong_dtype_and_rank_and_every_option_with_a_wrong_value(op):
    refused = [case.name for case in dispatch.reference(op).spec.cases() if case.raises and "generated" in case.flags]
    for name, parameter in inspect.signature(dispatch.reference(op)).parameters.items():
        mine = [text.removeprefix(f"refused: {name} ") for text in refused if text.startswith(f"refused: {name} ")]
        assert ("None" in mine) == (parameter.default is not None)
        if parameter.annotation == "Tensor":
            assert any(text.startswith("of ") for text in mine), name
            assert any("dimension" in text for text in mine), name
            assert "a list" in mine
        else:
            assert len(mine) >= 3, (name, mine)


def test_facts_are_read_off_the_tensors():
    x = torch.full((2, 64, 33), torch.nan)[:, :, 1:].mT
    facts = check.facts_of("mx_quantize", (x,), {"axis": -2})
    said = {str(fact) for fact in facts}
    assert {"x.rank 3", "x.strides column-major", "x.begins between words", "axis = -2", "scaling not given"} <= said
    assert {"x.NaN in the first element", "x.NaN in the last element", "x.rows a multiple of 16", "x.cols > 32"} <= said
    assert not {"x.values all finite", "x.-0 somewhere", "x.rank 2", "x.sign of a negated view"} & said
    assert Fact("x.experts", "> 8") not in facts


def test_groups_have_facts():
    offs = torch.tensor([0, 9, 9, 10, 10], dtype=torch.int32)
    said = {str(fact) for fact in check.facts_of("pad_token_groups", (torch.zeros(12, 4), offs, 32), {})}
    assert {"offs.first group empty", "offs.inner group empty", "offs.last group empty"} <= said
    assert {"offs.some group of one token", "offs.rest tokens past the last group", "offs.tokens spread"} <= said


def test_a_pair_is_of_facts_about_different_things():
    facts = {Fact("x.rows", "> 8"), Fact("x.rows", "odd"), Fact("axis", "= -1")}
    assert sorted(sorted(map(str, pair)) for pair in check.pairs(facts)) == [
        ["axis = -1", "x.rows > 8"],
        ["axis = -1", "x.rows odd"],
    ]


def test_a_plan_shows_every_possible_pair_and_what_is_asked_for_besides():
    dimensions = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1)}
    plan = list(pairwise(dimensions, lambda c: not (c.get("a") == 2 and c.get("b") == 2), [{"a": 1, "b": 1, "c": 1}]))
    seen = {((p, c[p]), (q, c[q])) for c in plan for p in c for q in c if p < q}
    wanted = {
        ((p, x), (q, y)) for p in dimensions for q in dimensions if p < q for x in dimensions[p] for y in dimensions[q]
    }
    assert wanted - seen == {(("a", 2), ("b", 2))}
    assert plan[0] == {"a": 1, "b": 1, "c": 1}
    assert len(plan) <= 11


def test_a_pair_that_no_case_has_is_listed(capsys, monkeypatch):
    from mxspec.__main__ import main

    own = cases.pair_cases
    monkeypatch.setattr(cases, "pair_cases", lambda op: (c for i, c in enumerate(own(op)) if i % 2))
    assert main(["check", "--op", "to_blocked", "--facts"]) == 1
    assert "no case" in capsys.readouterr().out
