"""The tools that the lessons share (notebooks 10 to 15 and 17).

device = course.start()                          # the GPU, or an interpreter
course.verdict(my_quantize, op="mx_quantize")    # is my function right?
course.race({"mine": my_quantize}, x)            # how close is it to the memory's speed?
"""

from __future__ import annotations

import os
import sys

import torch

from mxspec import dispatch, interpreters
from mxspec.course._far import FAR, far_copy_problem
from mxspec.course._files import define, definitions
from mxspec.course._race import RESULTS, race, stored
from mxspec.course._unfinished import blanks, in_words
from mxspec.course._verdict import verdict

__all__ = [
    "FAR",
    "RESULTS",
    "blanks",
    "define",
    "definitions",
    "far_copy_problem",
    "in_words",
    "race",
    "start",
    "start_compiler",
    "stored",
    "verdict",
]


def start() -> torch.device:
    """Choose where kernels run: on the GPU, or on the CPU if there is no GPU or an interpreter is asked for.

    On the CPU, Triton's interpreter runs Triton kernels and the Triton kernels that Helion generates, tile by tile.
    Helion's own interpreter has no tiles, and Helion refuses both interpreters in one process. When Triton
    is imported, it reads the environment variable that selects its interpreter.

    Returns:
        The device for the tensors of a lesson.

    Raises:
        RuntimeError: Triton was imported before this call, so it compiles, and there is no GPU to compile for.
    """
    if torch.cuda.is_available() and not dispatch.interpreters():
        return torch.device("cuda")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("start: triton was imported before, to compile for a GPU; call it first, in a new process")
    os.environ.pop("HELION_INTERPRET", None)
    os.environ["TRITON_INTERPRET"] = "1"
    interpreters.install()
    return torch.device("cpu")


def start_compiler() -> None:
    """Let Triton compile in this process, with a GPU or without one: no interpreter runs.

    Raises:
        RuntimeError: Triton was imported before this call, to interpret.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("start_compiler: triton was imported before, to interpret; call it first, in a new process")
    for name in ("TRITON_INTERPRET", "HELION_INTERPRET", "MXSPEC_BACKEND"):
        os.environ.pop(name, None)
