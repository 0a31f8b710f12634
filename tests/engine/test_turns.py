"""Slow tests take turns. No test is left to other commits for ever, and a run says what it left."""

import pytest

from tests import turns

FILE = """
import pytest

@pytest.mark.turns(4)
@pytest.mark.parametrize("n", range(10))
def test_many(n):
    pass

@pytest.mark.turns(4, by=("op",))
@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("op", ["a", "b"])
def test_each(op, case):
    pass

@pytest.mark.turns(3)
def test_one():
    pass

@pytest.mark.turns(3)
def test_another():
    pass

def test_always():
    pass
"""


@pytest.fixture
def taken(pytester, monkeypatch):
    """The tests of FILE that a run at a commit takes, and what the run says at its end."""
    pytester.makeconftest('pytest_plugins = ["tests.turns"]')
    pytester.makepyfile(FILE)
    monkeypatch.setattr(turns.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes of xdist

    def run(commit, *options):
        monkeypatch.setenv("MXSPEC_TURN", commit)
        result = pytester.runpytest("-v", "-p", "no:cacheprovider", *options)
        lines = result.outlines
        return {line.split("::")[1].split(" ")[0] for line in lines if " PASSED" in line}, lines

    return run


def test_each_test_has_its_turn_and_each_combination_a_test_in_every_run(taken):
    runs = [taken(str(commit))[0] for commit in range(12)]
    assert len(set().union(*runs)) == 10 + 6 + 2 + 1
    for found in runs:
        assert len([name for name in found if "many" in name]) in (2, 3)
        assert {name[10] for name in found if "each" in name} == {"a", "b"}
        assert len([name for name in found if "each" in name]) == 2
        assert "test_always" in found
    assert len({frozenset(found) for found in runs}) > 2
    assert any(("test_one" in found) != ("test_another" in found) for found in runs)
    assert taken("7")[0] == runs[7]


def test_a_run_says_how_many_tests_it_left(taken):
    found, lines = taken("1")
    said = f"{19 - len(found)} tests were left to other commits; `make complete` runs all of them"
    assert said in lines
    assert said in taken("1", "-n", "2")[1]


def test_without_a_commit_all_tests_run(taken):
    found, lines = taken("")
    assert len(found) == 19
    assert not [line for line in lines if "left" in line]


def test_names_have_turns_that_do_not_go_together(monkeypatch):
    monkeypatch.setattr(turns.torch.cuda, "is_available", lambda: False)
    both = ["helion", "triton"], ["a", "b", "c"]
    found = set()
    for commit in range(32):
        monkeypatch.setenv("MXSPEC_TURN", str(commit))
        found.add(tuple(tuple(turns.chosen(2, names)) for names in both))
    assert found == {((one,), some) for one in both[0] for some in (("a", "c"), ("b",))}
    assert turns.chosen(2, ["alone"]) == ["alone"]
    monkeypatch.delenv("MXSPEC_TURN")
    assert turns.chosen(2, both[0]) == both[0]
