"""Every backend answers every case of every op as the reference does. Never edited for a new op or kernel."""

import pytest

from mxspec import check, dispatch


def shows_something(op, backend, case):
    """Whether this run can find a fault there that no other does.

    An interpreted run is for what kernels answer. References are no different in it, and neither are refusals: the
    switch checks arguments before it looks for a kernel, and a plain run asks every backend by its name.
    """
    if not dispatch.interpreters():
        return backend == "reference" or dispatch.has_kernel(op, backend)
    return not case.raises and dispatch._static_refusal(op, backend, "cpu") is None


WORK = [
    pytest.param(op, backend, case, id=f"{op}-{backend}-{case.name}")
    for op in dispatch.ops()
    for backend in dispatch.backends()
    for case in dispatch.reference(op).spec.cases()
    if shows_something(op, backend, case)
]


@pytest.mark.parametrize(("op", "backend", "case"), WORK)
def test_case(op, backend, case):
    result = check.check_case(op, case, backend)
    if result.status == "skipped":
        pytest.skip(result.message)
    assert result.status == "passed", result.message
