"""A Helion kernel checks only its last call quickly, so an op does not run one kernel twice in a call."""

from collections import Counter

import pytest

from mxspec.dispatch import kernel_module
from mxspec.machine_code.compile import kernels
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from mxspec.machine_code.planner import calls

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)
try:
    from mxspec.helion_kernels.common import launch as module
except ImportError as error:
    pytest.skip(f"helion cannot be imported: {error}", allow_module_level=True)


@pytest.mark.parametrize("op", [op for op, backend in kernels() if backend == "helion"])
def test_no_kernel_runs_twice_in_a_call(op, monkeypatch):
    ran: Counter[tuple[object, ...]] = Counter()

    def kernel(*of):
        return lambda *args: ran.update([of])

    ops, some = kernel_module(op, "helion"), False
    with fake_gpu("sm90"):
        monkeypatch.setattr(module, "_kernel", kernel)
        for call in calls(op, ops, generated=False):
            ran.clear()
            if not call.skipped:
                getattr(ops, op)(*call.args, **call.kwargs)
            some |= bool(ran)
            assert not [f"{body.__name__}, role {role!r}" for (body, _, _, role), n in ran.items() if n > 1], call.case
    assert some
