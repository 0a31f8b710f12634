"""The CPU interpreters of Triton and Helion, with the right bits and in less time.

`TRITON_INTERPRET=1` and `HELION_INTERPRET=1` run kernels without a GPU. `corrections.py` replaces the functions that
compute wrong bits. `accelerations.py` replaces the functions that are slow.
"""

from __future__ import annotations

import os

import torch

from mxspec.interpreters.accelerations import accelerate, distinct_rows
from mxspec.interpreters.corrections import correct
from mxspec.interpreters.operators import accelerate_operators


def install() -> None:
    """Correct and accelerate Triton's interpreter, and accelerate Helion's, if this process uses them.

    A kernel folder calls this when it is imported.
    """
    if os.environ.get("HELION_INTERPRET") == "1":
        torch.Tensor.unique = distinct_rows  # type: ignore[method-assign]
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if getattr(interpreter, "corrected_by_mxspec", False):
        return
    interpreter.corrected_by_mxspec = True
    correct(interpreter)
    accelerate(interpreter)
    accelerate_operators(interpreter)
