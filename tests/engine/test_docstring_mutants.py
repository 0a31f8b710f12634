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


def found_by(op, candidate):
    """The name of the first case or behaviour that a candidate fails, or None."""
    results = check.check(op, candidate, CPU)
    return next((result.case for result in results if result.status == "failed"), None)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_wrong_by_its_own_witness(name):
    assert MUTANTS[name].witness()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_finds_it(name):
    mutant = MUTANTS[name]
    found = found_by(mutant.op, mutant.candidate)
    assert (found is None) == (name in SURVIVORS), f"found by {found}"


def test_there_are_mutants_of_every_op_and_many_kinds():
    assert {mutant.op for mutant in MUTANTS.values()} == set(dispatch.ops())
    assert len(MUTANTS) >= 80
    assert len(set(KINDS.values())) >= 6
    assert SURVIVORS.keys() <= MUTANTS.keys()
