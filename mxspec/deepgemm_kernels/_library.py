"""DeepGEMM: whether it is installed, and the layouts of matrices and scales that it reads without a copy."""

from __future__ import annotations

import functools
import importlib
import operator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

PTX = "no: DeepGEMM compiles its kernels itself, at their first use"
INTERPRETABLE = "no: DeepGEMM has no kernels for a CPU"


@functools.cache
def library() -> Any:
    """The package, or a text that says why it cannot be used."""
    try:
        return importlib.import_module("deep_gemm")
    except Exception as error:  # without a CUDA toolkit the import raises any error of its build
        return f"needs the package deep_gemm, which cannot be imported: {type(error).__name__}: {error}"


@functools.cache
def absent(device: torch.device, function: str) -> str | None:
    """Why a function of the package cannot be called, or None. Builds of the same version have different functions."""
    if isinstance(found := library(), str):
        return found
    if not hasattr(found, function):
        return f"needs {function}, which this build of deep_gemm lacks"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):  # on Blackwell DeepGEMM rounds scales to powers of two
        return f"keeps fp32 scales on compute capability 9.0 only, not {'.'.join(map(str, capability))}"
    return None


def layout_reason(*operands: tuple[str, Tensor, tuple[int, ...]]) -> str | None:
    """Why DeepGEMM would copy a tensor or cannot read it, or None. A stride along a dimension of 1 has no meaning."""
    for name, t, strides in operands:
        if any(n > 1 and got != needed for n, got, needed in zip(t.shape, t.stride(), strides, strict=True)):
            return f"needs {name} with strides {strides}, not {t.stride()}"
        if t.data_ptr() % 16:
            return f"needs {name} to begin at a multiple of 16 bytes"
    return None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]


def mn_major(rows: int) -> tuple[int, int]:
    """The strides of scales that TMA can read: each column begins at a multiple of 16 bytes."""
    return 1, rows + -rows % 4


@functools.cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU: the programs that share the tiles of a matmul."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def given(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor whose layout fits, with the strides that DeepGEMM expects.

    DeepGEMM also checks the strides along dimensions of 1.
    """
    return t.as_strided(t.shape, strides)
