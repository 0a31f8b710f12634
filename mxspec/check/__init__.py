"""The conformance engine: does a backend, or any function, give the same bytes as the reference?

For a matmul it asks whether the sums are near enough to the reference's. pytest, the command line and the notebooks use
this one engine. It reads each op's `@spec` and names no op itself.
"""

from mxspec.check._compare import difference, form_difference, sqnr_db
from mxspec.check._engine import (
    Candidate,
    Result,
    Status,
    assert_conforms,
    behaviours,
    cases_of,
    check,
    check_behaviour,
    check_case,
    default_device,
    load,
)
from mxspec.check._facts import Coverage, Fact, coverage, facts_of, pairs
from mxspec.check._memory import embedded, fill_bytes, on_device, poisoned, strayed

__all__ = [
    "Candidate",
    "Coverage",
    "Fact",
    "Result",
    "Status",
    "assert_conforms",
    "behaviours",
    "cases_of",
    "check",
    "check_behaviour",
    "check_case",
    "coverage",
    "default_device",
    "difference",
    "embedded",
    "facts_of",
    "fill_bytes",
    "form_difference",
    "load",
    "on_device",
    "pairs",
    "poisoned",
    "sqnr_db",
    "strayed",
]
