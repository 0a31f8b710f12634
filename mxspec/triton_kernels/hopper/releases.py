"""The Triton releases under which the Gluon kernels are offered. Gluon's language changes with each release.

Under any other release nothing of Gluon is imported. Hopper's matmuls, and its quantizers of token groups in both
directions, then run as plain tiles in Triton's own language, which is stable.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
from torch import Tensor

from mxspec.triton_kernels.common.launch import capability

# `make test` compiles every Gluon kernel under each of these releases: tests/engine/test_triton_releases.py.
COMPILED_UNDER = ("3.6", "3.7", "3.8", "3.9")


@functools.cache
def release() -> str:
    """The version of the installed Triton, without the patch number."""
    return ".".join(triton.__version__.split(".")[:2])


@functools.cache
def refusal() -> str | None:
    """Why this Triton has no Gluon kernels, or None if it has them."""
    if release() in COMPILED_UNDER:
        return None
    return f"are compiled under Triton {', '.join(COMPILED_UNDER)}, and this is {triton.__version__}"


def note(a: Tensor, *_: Any, **__: Any) -> str | None:
    """For `mxspec.explain`: why an op on Hopper runs without its Gluon kernel, or None if it runs with it."""
    if a.device.type == "cpu" or capability(a.device) != (9, 0) or refusal() is None:
        return None
    return f"by plain tiles: the Gluon kernels {refusal()}"
