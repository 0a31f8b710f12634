"""Every backend answers every case of every op as the reference does. Never edited for a new op or kernel."""

import pytest

from mxspec import check, dispatch

WORK = [
    pytest.param(op, backend, case, id=f"{op}-{backend}-{case.name}")
    for op in dispatch.ops()
    for backend in dispatch.backends()
    if backend == "reference" or dispatch.has_kernel(op, backend)
    for case in dispatch.reference(op).spec.cases()
]


@pytest.mark.parametrize(("op", "backend", "case"), WORK)
def test_case(op, backend, case):
    result = check.check_case(op, case, backend)
    if result.status == "skipped":
        pytest.skip(result.message)
    assert result.status == "passed", result.message
