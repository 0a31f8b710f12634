"""What `convert` has finished. Until it writes the manifest, a file in the destination lists the complete shards."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.shards import DTYPES, write_json
from mxspec.checkpoint.work import Work

PARTIAL, MANIFEST = ".mxspec_partial.json", "mxspec_manifest.json"
PIECE = 1 << 24  # bytes


class Progress:
    """The finished shards of a conversion, and the entries of their tensors.

    If a conversion was refused before it finished a shard, the folder holds nothing of it, and takes another one.
    """

    def __init__(self, target: Path, job: dict[str, Any]) -> None:
        self.target, self.job = target, job
        self.finished: dict[str, dict[str, Any]] = {}
        path = target / PARTIAL
        others = [p.name for p in target.iterdir() if not p.name.startswith(".")]
        if path.exists():
            stored = json.loads(path.read_text())
            same = stored["job"] == job
            if others and not same:
                raise CheckpointError(
                    f"convert: {target} holds a part of a conversion with other arguments, or of another source; needs "
                    "a new directory, or this one empty"
                )
            if same:
                self.finished = {
                    shard: tensors for shard, tensors in stored["shards"].items() if _is_whole(target / shard, tensors)
                }
        elif others:
            if _of_manifest(target) == job:
                raise CheckpointError(f"convert: {target} holds this conversion already, and it is complete")
            raise CheckpointError(f"convert: {target} is not empty, it holds {others[0]}; needs a new directory")
        self._store()

    def has(self, shard: str) -> bool:
        return shard in self.finished

    def add(self, shard: str, works: list[Work], digests: dict[str, str]) -> None:
        """Note a shard that is complete."""
        self.finished[shard] = entries(shard, works, digests)
        self._store()

    def tensors(self, shards: list[str]) -> dict[str, Any]:
        """The entries of all tensors, in the order of the shards."""
        return {name: entry for shard in shards for name, entry in self.finished[shard].items()}

    def _store(self) -> None:
        write_json(self.target / PARTIAL, {"job": self.job, "shards": self.finished})


def _of_manifest(target: Path) -> dict[str, Any] | None:
    """The job of a complete conversion; None if the folder holds none."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    return {key: value for key, value in manifest.items() if key not in ("warnings", "tensors")}


def entries(shard: str, works: list[Work], digests: Mapping[str, str]) -> dict[str, Any]:
    """What the manifest says of the tensors of a shard."""
    return {
        planned.name: {
            "shard": shard,
            "dtype": DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "sha256": digests[planned.name],
            "from": list(work.unit.names),
            **work.note,
        }
        for work in works
        for planned in work.planned
    }


def _is_whole(path: Path, tensors: dict[str, Any]) -> bool:
    """Whether a shard holds the bytes that were written."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            for name, entry in tensors.items():
                begin, end = header[name]["data_offsets"]
                file.seek(8 + size + begin)
                digest, left = hashlib.sha256(), end - begin
                while left:
                    piece = file.read(min(PIECE, left))
                    if not piece:
                        return False
                    digest.update(piece)
                    left -= len(piece)
                if digest.hexdigest() != entry["sha256"]:
                    return False
    except (OSError, ValueError, KeyError, struct.error):
        return False
    return True


def source_digest(checkpoint: Checkpoint) -> dict[str, Any]:
    """The path of the source, and for each shard its size and the SHA-256 of its header."""
    shards = {}
    for shard in checkpoint.shards:
        path = checkpoint.folder / shard
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            digest = hashlib.sha256(file.read(size)).hexdigest()
        shards[shard] = {"bytes": path.stat().st_size, "header_sha256": digest}
    return {"path": str(checkpoint.path.resolve()), "shards": shards}
