"""Every backend answers every case of every op like the reference. A new op or kernel needs no change here."""

import contextlib

import pytest
import torch
from filelock import FileLock

from mxspec import cases, check, dispatch
from mxspec.machine_code.planner import worth_tracing
from tests.helpers import COMPLETE, generated


def shows_something(op, backend, case):
    """Whether this test run can find a fault in a case that no other test run finds.

    A run with an interpreter is for the answers of kernels. References give the same answers in it, and so do refused
    calls: the switch checks the arguments before it looks for a kernel, and a plain run tests every backend by name.
    Without a GPU, that plain run has no use for the valid calls of a kernel that needs one.
    """
    if backend == "reference":
        return not dispatch.interpreters()
    if not dispatch.interpreters() and (case.raises or on_a_gpu()):
        return dispatch.has_kernel(op, backend)
    return not case.raises and dispatch.static_refusal(op, backend, "cpu") is None


def on_a_gpu():
    return torch.cuda.is_available() and not dispatch.interpreters()


def work(op, backend):
    # The generated cases of a reference are one test. The generated cases of a kernel need a GPU, because each takes
    # seconds in an interpreter. The switch refuses calls in the same words for every backend, so refused cases are left
    # out.
    if backend == "reference" or not on_a_gpu():
        chosen = cases.of(op).cases()  # the cases that are written by hand
    else:
        chosen = check.cases_of(op, lambda case: "generated" not in case.flags or not case.raises)
    chosen = [case for case in chosen if shows_something(op, backend, case)]
    generates = backend == "helion" and "TRITON_INTERPRET" in dispatch.interpreters()
    return worth_tracing(op, chosen, check.embedded, few=not COMPLETE) if chosen and generates else chosen


EVERY = [(op, backend, case) for op in dispatch.ops() for backend in dispatch.backends() for case in work(op, backend)]
# A large case may wait for the large cases of the other processes.
AN_HOUR = pytest.mark.timeout(3600)
WORK = [
    pytest.param(*one, id=f"{one[0]}-{one[1]}-{one[2].name}", marks=[AN_HOUR] if "large" in one[2].flags else [])
    for one in EVERY
    if not one[2].raises
]
# A refusal takes a millisecond, and a test of its own takes ten.
REFUSED = {}
for op, backend, case in EVERY:
    if case.raises:
        REFUSED.setdefault((op, backend), []).append(case)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A lock of all processes of this run. A case of 2^31 elements fills a GPU, so one runs at a time."""
    return FileLock(tmp_path_factory.getbasetemp().parent / "room.lock")


# In an interpreter a case takes seconds.
@pytest.mark.turns(72 if dispatch.interpreters() else 4, by=("op", "backend"))
@pytest.mark.parametrize(("op", "backend", "case"), WORK)
def test_case(op, backend, case, room):
    with room if "large" in case.flags else contextlib.nullcontext():
        result = check.check_case(op, case, backend)
        if "large" in case.flags and on_a_gpu():
            torch.cuda.empty_cache()  # before another process takes its turn
    if result.status == "skipped":
        pytest.skip(result.message)
    assert result.status == "passed", result.message


@pytest.mark.parametrize(("op", "backend"), REFUSED)
def test_refused_cases(op, backend):
    results = [check.check_case(op, case, backend) for case in REFUSED[op, backend]]
    wrong = [f"{result.case}: {result.message}" for result in results if result.status != "passed"]
    assert not wrong, "\n".join(wrong)


KERNELS = [
    (op, b) for op in dispatch.ops() for b in dispatch.backends() if b != "reference" and dispatch.has_kernel(op, b)
]


@pytest.mark.turns(12)
@pytest.mark.skipif(bool(dispatch.interpreters()), reason="references are no different interpreted")
@pytest.mark.parametrize("op", dispatch.ops())
def test_generated_cases_of_the_reference(op):
    """Compares a reference with itself: under FakeTensor, and with other strides. On a GPU on every case.

    Elsewhere on a third of the refusals.
    """
    if on_a_gpu():
        chosen = check.cases_of(op, lambda case: "generated" in case.flags)
    else:  # `test_from_the_pages` and `test_facts` read every refusal
        refused = [case for case in generated(op) if case.raises]
        chosen = [*(case for case in generated(op) if not case.raises), *refused[:: 1 if COMPLETE else 3]]
    results = [check.check_case(op, case, "reference") for case in chosen]
    failed = [f"{result.case}: {result.message}" for result in results if result.status == "failed"]
    assert not failed, "\n".join(failed)
    assert any(result.status == "passed" for result in results)


@pytest.mark.skipif(on_a_gpu(), reason="on a GPU each case is a test of its own")
@pytest.mark.parametrize(("op", "backend"), [] if dispatch.interpreters() else KERNELS)
def test_cases_on_a_gpu(op, backend):
    pytest.skip("the valid cases of a kernel need a GPU, or an interpreter for the cases written by hand")


@pytest.mark.turns(10)
@pytest.mark.skipif(bool(dispatch.interpreters()), reason="interpreted, each behaviour takes a minute")
@pytest.mark.parametrize(
    ("op", "backend"),
    [(op, b) for op in dispatch.ops() for b in dispatch.backends() if dispatch.has_kernel(op, b) or b == "reference"],
)
def test_behaviour(op, backend):
    """A backend keeps every promised behaviour."""
    results = [check.check_behaviour(op, name, backend) for name in check.behaviours(op)]
    failed = [result.message for result in results if result.status == "failed"]
    assert not failed, "\n".join(failed)
    if all(result.status == "skipped" for result in results):
        pytest.skip(results[0].message)
