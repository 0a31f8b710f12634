"""Write safetensors files whose tensors arrive in pieces. A file gets its final name only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}
SENT_AT_ONCE = 1 << 23  # bytes


@dataclass(frozen=True)
class Planned:
    """A tensor that a shard will hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class _Place:
    """Where the next piece of a tensor goes."""

    planned: Planned
    at: int
    end: int
    cached: int  # from here on, the bytes may be in the cache of files
    digest: Any = field(default_factory=hashlib.sha256)


class ShardWriter:
    """A safetensors file that is written piece by piece, under a temporary name until `finish`.

    Pieces of one tensor arrive in order. Different tensors may be written by different threads at the same time.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> writer = ShardWriter(Path(folder.name, "model.safetensors"), [Planned("x", torch.uint8, (4,))])
        >>> writer.write("x", torch.tensor([1, 2], dtype=torch.uint8))
        >>> writer.write("x", torch.tensor([3, 4], dtype=torch.uint8))
        >>> digests = writer.finish()
        >>> from safetensors.torch import load_file
        >>> load_file(Path(folder.name, "model.safetensors"))["x"].tolist()
        [1, 2, 3, 4]

    Source: safetensors, README (the format).
    """

    def __init__(self, path: Path, tensors: Iterable[Planned]) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        # The widest dtypes first, so that every tensor is aligned to its elements, as readers of mapped files need.
        ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for t in ordered:
            header[t.name] = {"dtype": DTYPES[t.dtype], "shape": t.shape, "data_offsets": (at, at + t.nbytes)}
            at += t.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._places = {}
        for t in ordered:
            begin, end = header[t.name]["data_offsets"]
            self._places[t.name] = _Place(t, start + begin, start + end, start + begin)
        self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            if hasattr(os, "posix_fallocate"):  # so that a full disk raises here, not during a later write
                os.posix_fallocate(self._file, 0, start + at)
            _write_all(self._file, struct.pack("<Q", len(text)) + text, 0)
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, piece: Tensor) -> None:
        """Write the next piece of a tensor: a contiguous tensor of its dtype, or of its bytes."""
        place = self._places[name]
        data = memoryview(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
        if place.at + len(data) > place.end:
            raise ValueError(f"{name}: got more than the {place.planned.nbytes} bytes that were planned")
        place.digest.update(data)
        _write_all(self._file, data, place.at)
        place.at += len(data)
        if place.at - place.cached >= 2 * SENT_AT_ONCE:
            # The first call for a range sends its bytes to the disk. The second call frees its memory.
            _forget(self._file, place.cached, place.at - place.cached)
            place.cached = place.at - SENT_AT_ONCE

    def finish(self) -> Mapping[str, str]:
        """Give the file its name. Returns the SHA-256 of each tensor's bytes, by name."""
        short = [name for name, place in self._places.items() if place.at != place.end]
        if short:
            self.abandon()
            raise ValueError(f"{self.path.name}: {len(short)} tensors are not whole, the first is {short[0]}")
        os.fsync(self._file)
        _forget(self._file, 0, 0)  # all
        os.close(self._file)
        os.replace(self.partial, self.path)
        sync_folder(self.path.parent)
        return {name: place.digest.hexdigest() for name, place in self._places.items()}

    def abandon(self) -> None:
        """Remove the temporary file."""
        os.close(self._file)
        self.partial.unlink(missing_ok=True)


def _forget(file: int, at: int, length: int) -> None:
    """Take bytes of a file out of the cache of files: a checkpoint is larger than memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, at, length, os.POSIX_FADV_DONTNEED)


def _write_all(file: int, data: Any, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def sync_folder(folder: Path) -> None:
    """Make a renamed file last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a temporary name, then rename it."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
