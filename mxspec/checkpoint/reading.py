"""The tensors of a directory of safetensors files, which are read when they are asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mxspec.checkpoint.files import Scan, scan
from mxspec.checkpoint.headers import CheckpointError, Header
from mxspec.checkpoint.shards import DTYPES

__all__ = ["Checkpoint", "CheckpointError", "Entry"]

NAMES = {name: dtype for dtype, name in DTYPES.items()}
READ_AHEAD = 1 << 23  # bytes
LARGE = 1 << 18  # bytes. The cache of files keeps smaller pieces, which may be read again


@dataclass(frozen=True)
class Entry(Header):
    """A tensor of a file: where its bytes lie, and its dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of torch.

        Raises:
            CheckpointError: the tensor is F4, F6_E2M3 or F6_E3M2, and torch has no such dtype.
        """
        if self.stored not in NAMES:
            raise CheckpointError(f"{self.shard}: a tensor has the dtype {self.stored}, which torch does not have")
        return NAMES[self.stored]


class Checkpoint:
    """A checkpoint: `tensors` by name, `config`, `shards`, `path`, and `folder`, where the shards lie."""

    def __init__(self, path: Path, found: Scan) -> None:
        self.path = path
        self.folder = found.folder
        self.shards = found.shards
        self.tensors = {name: Entry(**vars(header)) for name, header in found.tensors.items()}
        self.config: dict[str, Any] = found.config or {}
        self.hf_quant_config = found.hf_quant_config
        self.metadata = found.metadata
        self.elsewhere = found.elsewhere
        self._files: dict[str, BinaryIO] = {}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read and check the headers.

        Args:
            path: a directory, with or without `model.safetensors.index.json`, or a safetensors file.

        Raises:
            CheckpointError: a header or the index has a defect, which the message names.
            FileNotFoundError: there is nothing at the path.
        """
        found = scan(path)
        if fatal := [problem for problem in found.problems if problem.fatal]:
            more = f" (and {len(fatal) - 1} more problems)" if len(fatal) > 1 else ""
            named = str(fatal[0]) if str(path) in fatal[0].where else f"{found.folder}: {fatal[0]}"
            raise CheckpointError(f"{named}{more}")
        return cls(Path(path), found)

    def read(self, name: str) -> Tensor:
        """A tensor. F4 and F6 give their bytes as a uint8 vector."""
        entry = self.tensors[name]
        data = self._read(entry, entry.begin, entry.end)
        return data.view(entry.dtype).view(entry.shape) if entry.stored in NAMES else data

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a tensor."""
        entry = self.tensors[name]
        row = entry.nbytes // max(entry.shape[0], 1)
        found = self._read(entry, entry.begin + start * row, entry.begin + stop * row)
        return found.view(entry.dtype).view(stop - start, *entry.shape[1:])

    def read_bytes(self, name: str, start: int, stop: int) -> Tensor:
        """Some bytes of a tensor, as a uint8 vector."""
        entry = self.tensors[name]
        return self._read(entry, entry.begin + start, min(entry.begin + stop, entry.end))

    def _read(self, entry: Entry, begin: int, end: int) -> Tensor:
        """Bytes of a file. They are read and not mapped, so that memory holds only the tensors in use."""
        data = torch.empty(end - begin, dtype=torch.uint8)
        if begin == end:
            return data
        opened = self._files.get(entry.shard)
        if opened is None:  # two threads may open a shard at once; both use the file that was stored first
            opened = self._files.setdefault(entry.shard, (self.folder / entry.shard).open("rb"))
        view, file, at = memoryview(data.numpy().data), opened.fileno(), begin
        while view:
            got = os.preadv(file, [view], at)
            if not got:
                raise CheckpointError(f"{entry.shard}: the file has become shorter")
            view, at = view[got:], at + got
        if end - begin >= LARGE and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, end, min(READ_AHEAD, entry.end - end), os.POSIX_FADV_WILLNEED)
            os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return data
