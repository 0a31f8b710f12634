"""What a launch needs to know of its device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import torch

T = TypeVar("T")

# Whether a product and a sum may be rounded at once, which each launch says: the default of Triton 3.10 is another one
# than that of 3.9. Quantizers and dequantizers have no such sum, so that no bit of theirs depends on it (the fused
# multiply-adds of a quantization factor are calls); every machine code is searched for one. A matmul's sums, promised
# to so many dB, take half the instructions where they are fused.
UNFUSED = {"enable_fp_fusion": False}
FUSED = {"enable_fp_fusion": True}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; Hopper's for a CPU, under the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type != "cpu" else (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """How many streaming multiprocessors a GPU has: programs of a persistent kernel."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def for_device(configs: Mapping[tuple[int, int], T], device: torch.device) -> T:
    """The configurations for a device's compute capability; Hopper's where it has none, and under the interpreter."""
    return configs.get(capability(device), configs[9, 0])


MOST = 65535  # programs that a grid's second and its third dimension hold


def grid(across: int, down: int) -> tuple[int, int, int]:
    """Programs that run `across` first and then `down`, which the second dimension and the third share.

    The place down is `tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)`; a few at the end may be past it.
    """
    parts = max(1, -(-down // MOST))
    return across, -(-down // parts), parts
