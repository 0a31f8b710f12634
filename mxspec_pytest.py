"""A pytest plugin: `pytest --mxspec-op OP --mxspec-fn module:function` adds one test for each case of the op.

pytest imports the plugin at every start. So it lies outside the package, and imports mxspec and torch only if its
options are given.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mxspec.spec import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mxspec", "conformance to mxspec")
    group.addoption("--mxspec-op", metavar="OP", help="add a test for each case of this op, such as mx_quantize")
    group.addoption("--mxspec-fn", metavar="MODULE:FUNCTION", help="the function to test; it has the op's signature")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--mxspec-fn") and not hasattr(config, "workerinput"):  # not in xdist's workers
        config.pluginmanager.register(_Answered(config.getoption("--mxspec-fn")))


@pytest.hookimpl(tryfirst=True)  # before -k, -m and --deselect, so that they apply to these tests too
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    op, target = config.getoption("--mxspec-op"), config.getoption("--mxspec-fn")
    if op is None and target is None:
        return
    if op is None or target is None:
        raise pytest.UsageError("mxspec: got only one of --mxspec-op and --mxspec-fn; needs both")
    sys.path.insert(0, str(config.invocation_params.dir))  # the module is found as in `python -m mxspec check`
    from mxspec import check, dispatch

    try:
        fn, cases = check.load(target), dispatch.reference(op).spec.cases()
    except ValueError as error:
        raise pytest.UsageError(f"mxspec: {error}") from error
    for case in cases:
        name = f"{op}[{case.name}]"
        own = {"name": name, "nodeid": f"{target}::{name}", "op": op, "target": target, "fn": fn, "case": case}
        items.append(CaseItem.from_parent(session, **own))


class CaseItem(pytest.Item):
    """One case of an op, for one function."""

    def __init__(self, *, op: str, target: str, fn: Any, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._op, self._target, self._fn, self._case = op, target, fn, case
        self.user_properties.append(("mxspec", "invalid" if case.raises else "valid"))

    def runtest(self) -> None:
        from mxspec import check

        result = check.check_case(self._op, self._case, self._fn, name=self._target)
        if result.status == "skipped":
            pytest.skip(result.message)
        if result.status == "failed":
            pytest.fail(result.message, pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        return self._target, None, self.name


class _Answered:
    """Fails a run in which the function answered no valid case. Otherwise a function that always raises would pass."""

    def __init__(self, target: str) -> None:
        self._target, self._ours, self._ran = target, False, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (kind := dict(report.user_properties).get("mxspec")):
            self._ours = True
            self._ran |= kind == "valid" and not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._ours and not self._ran and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._ours and not self._ran:
            words = f"mxspec: {self._target} ran on no valid case: every case was skipped or must be refused"
            terminalreporter.write_line(words, red=True)
