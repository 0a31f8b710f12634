"""The judge finds wrong candidates. Their author read only the docstrings, and had not seen the cases and facts."""

import pytest
import torch

from mxspec import check, dispatch
from tests.engine.docstring_mutants import KINDS, MUTANTS

CPU = torch.device("cpu")
# The mutants that the judge does not find, and why.
SURVIVORS = {
    "fp8_quantize_1x128: prints_for_float16": "a candidate may print: its prints are kept apart from the report",
}


# Mutants that one of the last cases or a behaviour finds, and a part of its name. It is tried first, because the judge
# would run seconds until it gets there. If it finds nothing, the judge runs as always.
FINDS = {
    "to_blocked: experts_past_a_grid_of_65535": "experts 65600",
    "to_blocked: caches_by_pointer_and_version": "no stale answer",
    "fp8_quantize_128x128: gives_no_transpose_in_inference": "the same bits in every mode",
    "fp8_gemm: the_order_of_sums_changes_between_calls": "the same bits at every call",
    "fp8_gemm_: takes_an_acc_that_requires_a_gradient": "no gradient in place",
    "fp8_grouped_gemm: the_expert_is_a_byte": "M 48, N 1, K 1152, groups three hundred",
    "mx_quantize: makes_its_factor_in_the_default_dtype": "the same bits in every mode",
    "pad_token_groups: rows_of_no_group_get_a_gradient": "behaviour: gradients",
}


def found_by(op, candidate, first=None):
    """The name of a case or behaviour that a candidate fails, or None. Those with `first` in their names come first."""
    if first:
        cases = [case for case in check.cases_of(op) if first in case.name]
        results = (check.check_case(op, case, candidate, CPU) for case in cases)
        if found := next((result.case for result in results if result.status == "failed"), None):
            return found
        behaviours = [name for name in check.behaviours(op, CPU) if first in name]
        results = (check.check_behaviour(op, name, candidate, CPU) for name in behaviours)
        if found := next((result.case for result in results if result.status == "failed"), None):
            return found
    results = check.check(op, candidate, CPU)
    return next((result.case for result in results if result.status == "failed"), None)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_wrong_by_its_own_witness(name):
    assert MUTANTS[name].witness()


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_finds_it(name):
    mutant = MUTANTS[name]
    found = found_by(mutant.op, mutant.candidate, FINDS.get(name))
    assert (found is None) == (name in SURVIVORS), f"found by {found}"


def test_there_are_mutants_of_every_op_and_many_kinds():
    assert {mutant.op for mutant in MUTANTS.values()} == set(dispatch.ops())
    assert len(MUTANTS) >= 80
    assert len(set(KINDS.values())) >= 6
    assert SURVIVORS.keys() | FINDS.keys() <= MUTANTS.keys()
