"""The CPU interpreters of Triton and Helion, with the right bits and in less time.

`TRITON_INTERPRET=1` and `HELION_INTERPRET=1` run kernels without a GPU. `corrections.py` replaces the functions that
compute wrong bits. `accelerations.py` replaces the functions that are slow.
"""

from __future__ import annotations

import os

from mxspec.interpreters.accelerations import accelerate
from mxspec.interpreters.corrections import correct


def install() -> None:
    """Correct and accelerate Triton's interpreter, if this process uses it. Helion's ref mode stays as it is.

    A kernel folder calls this when it is imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if getattr(interpreter, "corrected_by_mxspec", False):
        return
    interpreter.corrected_by_mxspec = True
    correct(interpreter)
    accelerate(interpreter)
