"""The tensors of a directory of safetensors files, which are read when they are asked for."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mxspec.checkpoint.shards import DTYPES

LARGEST_HEADER = 100_000_000  # bytes; safetensors has the same limit
NAMES = {name: dtype for dtype, name in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or cannot be converted as asked."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int


class Checkpoint:
    """A checkpoint: `tensors` by name, `config`, `shards`, `path`, and `folder`, where the shards lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.tensors: dict[str, Entry] = {}
        self._files: dict[str, BinaryIO] = {}
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise CheckpointError(f"{path} holds no safetensors file; files that hold pickles (.bin, .pt) are not read")
        self.shards = [file.name for file in files]
        config = self.folder / "config.json"
        self.config: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}
        index = self.folder / "model.safetensors.index.json"
        if path.is_dir() and index.exists():
            named = set(json.loads(index.read_text())["weight_map"].values())
            if missing := sorted(named - set(self.shards)):
                raise CheckpointError(f"{path} lacks the shard {missing[0]}, which its index names")
            self.shards = [shard for shard in self.shards if shard in named]
        for shard in self.shards:
            self._open(self.folder / shard)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the headers."""
        return cls(Path(path))

    def read(self, name: str) -> Tensor:
        """A tensor."""
        entry = self.tensors[name]
        return self._read(entry, entry.begin, entry.end).view(entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a tensor."""
        entry = self.tensors[name]
        row = (entry.end - entry.begin) // max(entry.shape[0], 1)
        found = self._read(entry, entry.begin + start * row, entry.begin + stop * row)
        return found.view(stop - start, *entry.shape[1:])

    def _read(self, entry: Entry, begin: int, end: int) -> Tensor:
        """Bytes of a file as elements. They are read and not mapped, so that memory holds only what is in use."""
        if begin == end:
            return torch.empty(0, dtype=entry.dtype)
        data = torch.empty(end - begin, dtype=torch.uint8)
        view, file = memoryview(data.numpy().data), self._files[entry.shard].fileno()
        while view:
            got = os.preadv(file, [view], begin)
            if not got:
                raise CheckpointError(f"{entry.shard}: the file has become shorter")
            view, begin = view[got:], begin + got
        return data.view(entry.dtype)

    def _open(self, path: Path) -> None:
        try:
            file = path.open("rb")
            self._files[path.name] = file
            length = os.fstat(file.fileno()).st_size
            (size,) = struct.unpack("<Q", file.read(8))
            if 8 + size > length or size > LARGEST_HEADER:
                raise ValueError(f"the header is said to have {size} bytes, the file has {length}")
            header = json.loads(file.read(size), object_pairs_hook=_without_duplicates)
            if not isinstance(header, dict):
                raise ValueError("the header is no JSON object")
            for name, said in header.items():
                if name != "__metadata__":
                    self._add(name, path.name, said, 8 + size, length)
            mine = sorted((e.begin, e.end, name) for name, e in self.tensors.items() if e.shard == path.name)
            for (_, end, first), (begin, _, second) in pairwise(mine):
                if begin < end:
                    raise ValueError(f"{first} and {second} overlap")
        except (OSError, KeyError, TypeError, struct.error, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path.name}: {error}") from error

    def _add(self, name: str, shard: str, said: dict[str, Any], start: int, length: int) -> None:
        if said["dtype"] not in NAMES:
            raise ValueError(f"{name} has the dtype {said['dtype']}, which torch has not")
        dtype, shape = NAMES[said["dtype"]], tuple(said["shape"])
        begin, end = (start + offset for offset in said["data_offsets"])
        if end - begin != torch.Size(shape).numel() * dtype.itemsize or not start <= begin <= end <= length:
            raise ValueError(f"{name} has the offsets {said['data_offsets']}, which do not fit {said['dtype']} {shape}")
        if name in self.tensors:
            raise ValueError(f"{name} is in two shards")
        self.tensors[name] = Entry(dtype, shape, shard, begin, end)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise ValueError(f"the header has {twice!r} twice")
    return found
