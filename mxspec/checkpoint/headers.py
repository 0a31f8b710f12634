"""The header of a safetensors file, which is untrusted: every number is checked before a byte of a tensor is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

LARGEST_HEADER = 100_000_000  # bytes; safetensors has the same limit
KEYS = {"dtype", "shape", "data_offsets"}

# Bits of an element. Source: safetensors 0.8.0, `Dtype::bitsize`
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or cannot be converted as asked."""


@dataclass(frozen=True)
class Header:
    """A tensor as the header of its file describes it.

    Attributes:
        stored: the dtype of safetensors, such as `F8_E4M3`.
        shape: the dimensions; the last one of F4 and F6 counts elements, not bytes.
        shard: the file, relative to the directory.
        begin, end: the places of the bytes in the file.
    """

    stored: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path, shard: str) -> tuple[dict[str, Header], dict[str, str]]:
    """The tensors and the metadata of one file.

    Args:
        path: the file.
        shard: the name of the file in messages and in the headers.

    Raises:
        CheckpointError: the header has a defect; the message names the tensor and the defect.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(0)
            (size,) = struct.unpack("<Q", file.read(8))
            if 8 + size > length or size > LARGEST_HEADER:
                raise ValueError(
                    f"the header is said to have {size} bytes, the file has {length}: it is cut, or no safetensors file"
                )
            header = json.loads(file.read(size).decode(), object_pairs_hook=without_duplicates)
        if not isinstance(header, dict):
            raise TypeError("the header is not a JSON object")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("__metadata__ is not an object of strings")
        tensors = {name: _header(name, shard, said, 8 + size, length) for name, said in header.items()}
    except struct.error:
        raise CheckpointError(f"{shard}: the file is shorter than 8 bytes") from None
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{shard}: {error}") from error
    if why := next(_gaps(tensors, 8 + size, length), None):
        raise CheckpointError(f"{shard}: {why}")
    return tensors, metadata


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"has {key!r} twice")
        found[key] = value
    return found


def _header(name: str, shard: str, said: Any, start: int, length: int) -> Header:
    if not isinstance(said, dict) or set(said) != KEYS:
        raise ValueError(f"{name} is not an object with exactly dtype, shape and data_offsets")
    stored, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(stored, str) or stored not in BITS:
        raise ValueError(f"{name} has the dtype {stored!r}, which safetensors does not have")
    for value in (shape, offsets):
        if not isinstance(value, list) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in value):
            raise ValueError(f"{name} has the shape {shape} and the offsets {offsets}; needs lists of numbers from 0")
    fits = len(offsets) == 2 and 8 * (offsets[1] - offsets[0]) == prod(shape) * BITS[stored]
    if fits and start + offsets[1] > length:
        raise ValueError(
            f"{name} has the offsets {offsets}, which do not lie in {length - start} bytes: the file is cut, or the "
            "header is wrong"
        )
    if not fits:
        raise ValueError(
            f"{name} has the offsets {offsets}, which do not fit {stored} {tuple(shape)} in {length - start} bytes"
        )
    return Header(stored, tuple(shape), shard, start + offsets[0], start + offsets[1])


def _gaps(mine: dict[str, Header], start: int, length: int) -> Iterator[str]:
    """The bytes of a file that belong to two tensors or to none. safetensors refuses such files."""
    at, before = start, "the header"
    for name, entry in sorted(mine.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < at:
            yield f"{before} and {name} overlap"
        elif entry.begin > at:
            yield f"{entry.begin - at} bytes between {before} and {name} belong to no tensor"
        at, before = entry.end, name
    if at != length:
        yield f"{length - at} bytes after {before} belong to no tensor"
