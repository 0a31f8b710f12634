"""The conformance engine: does a backend, or any function, give the bytes that the reference gives?

One engine for pytest, the command line and the notebooks. It knows what `@spec` says and no op by name.
"""

from mxspec.check._compare import difference, form_difference, sqnr_db
from mxspec.check._engine import (
    Candidate,
    Result,
    Status,
    assert_conforms,
    cases_of,
    check,
    check_case,
    default_device,
    load,
)
from mxspec.check._memory import embedded, fill_bytes, on_device, poisoned, strayed

__all__ = [
    "Candidate",
    "Result",
    "Status",
    "assert_conforms",
    "cases_of",
    "check",
    "check_case",
    "default_device",
    "difference",
    "embedded",
    "fill_bytes",
    "form_difference",
    "load",
    "on_device",
    "poisoned",
    "sqnr_db",
    "strayed",
]
