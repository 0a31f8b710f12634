"""Facts about the device that a launch needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import torch

T = TypeVar("T")

# Each launch says whether a product and a sum may be fused, that is, rounded only once. The default changed between
# Triton 3.9 and 3.10. Quantizers and dequantizers have no such sum, so their bits do not depend on this option. (The
# fused multiply-adds of a quantization factor are explicit calls.) The tests search all their machine code for such a
# sum. Matmuls fuse: their contract is a number of decibels, and fused sums take half the instructions.
UNFUSED = {"enable_fp_fusion": False}
FUSED = {"enable_fp_fusion": True}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU. A CPU, under the interpreter, counts as Hopper."""
    return torch.cuda.get_device_capability(device) if device.type != "cpu" else (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU, which is the number of programs of a persistent kernel.

    Under the interpreter there are few, so that a program has several parts.
    """
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def for_device(configs: Mapping[tuple[int, int], T], device: torch.device) -> T:
    """The configurations for a device's compute capability.

    A device without an entry, and the interpreter, get Hopper's.
    """
    return configs.get(capability(device), configs[9, 0])


MOST = 65535  # the largest size of a grid's second and third dimension


def grid(across: int, down: int) -> tuple[int, int, int]:
    """A grid that runs `across` first and then `down`. The second and the third dimension share `down`.

    A program's place down is `tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)`. The last few places may be
    past `down`.
    """
    parts = max(1, -(-down // MOST))
    return across, -(-down // parts), parts


_PROGRAMS = 64  # at least so many for each processor


def span(across: int, down: int, device: torch.device, most: int, programs: int = _PROGRAMS) -> int:
    """How many neighbouring tiles a program owns. What is the same for all of them, it computes once.

    There are `across` tiles side by side, and `down` rows of tiles. Small matrices have one tile a program, so that
    there are enough programs: `programs` for each processor. Under the interpreter, a program always has two, so that
    small cases have several programs.
    """
    if device.type == "cpu":
        return 2
    return max(1, min(most, across * down // (programs * processors(device))))
