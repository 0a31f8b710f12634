"""The files of a checkpoint, which are untrusted: headers, index and configuration are checked before a tensor is read.

Nothing is ever unpickled. Files that hold pickles are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxspec.checkpoint.headers import LARGEST_HEADER, CheckpointError, Header, read_header, without_duplicates

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
INDEX = "model.safetensors.index.json"
NUMBERED = re.compile(r"(.*-)(\d+)(-of-)(\d+)\.safetensors")


@dataclass(frozen=True)
class Problem:
    """A defect of a checkpoint.

    Attributes:
        kind: a short name, such as `header`, `overlap`, `index` or `missing scale`.
        where: the tensor or the file.
        message: what is there, and what is needed.
        fatal: whether the checkpoint cannot be read.
    """

    kind: str
    where: str
    message: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass
class Scan:
    """The headers of a checkpoint, its configuration files, and their defects."""

    folder: Path
    shards: list[str] = field(default_factory=list)
    tensors: dict[str, Header] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    hf_quant_config: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)  # tensors that the index puts into files not scanned here

    def add(self, kind: str, where: str, message: str, *, fatal: bool = True) -> None:
        self.problems.append(Problem(kind, where, message, fatal))


def scan(path: str | Path) -> Scan:
    """Read and check the headers of a directory or of one safetensors file. A defect is an entry of `problems`.

    Args:
        path: a directory, with or without `model.safetensors.index.json`, or a safetensors file.

    Raises:
        FileNotFoundError: there is nothing at the path.
    """
    path = Path(path)
    found = Scan(path if path.is_dir() else path.parent)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; needs a directory or a safetensors file")
    found.config = _json(found, "config.json")
    found.hf_quant_config = _json(found, "hf_quant_config.json")
    quant = (found.config or {}).get("quantization_config")
    if not isinstance(quant, dict | None):
        found.add("json", "config.json", f"has the quantization_config {str(quant)[:80]!r}; needs an object")
    named: dict[str, str] = {}
    if path.is_dir():
        found.shards = sorted(file.name for file in path.glob("*.safetensors"))
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        found.notes += [f"{name} is not read, because such a file holds a pickle" for name in pickles]
        if not (path / "config.json").exists():
            found.notes.append("there is no config.json, so the model and its configuration are not checked")
        if (path / INDEX).exists():
            named = _index(found)
        elif len(found.shards) > 1:
            found.add("no index", INDEX, "is missing; loaders need it for several files", fatal=False)
        elif not found.shards:
            pickle = "; files that hold pickles (.bin, .pt, .pth, .ckpt) are not read; it holds "
            hint = f"{pickle}{pickles[0]}" if pickles else ""
            found.add("no safetensors", str(path), f"holds no safetensors file{hint}")
    elif path.suffix in PICKLES:
        found.add("pickle", path.name, "files that hold pickles are not read; needs a safetensors file")
    elif not path.is_file():
        found.add("no file", path.name, "is neither a directory nor a plain file")
    else:
        found.shards = [path.name]
        of_index = _weight_map(found)
        if path.name in of_index.values():
            found.elsewhere = {name: shard for name, shard in of_index.items() if shard != path.name}
    for shard in found.shards:
        if path.is_dir() and (why := _outside(found.folder, shard)):
            found.add("path", shard, why)
        else:
            _add(found, shard)
    _compare(found, named)
    return found


def _json(found: Scan, name: str) -> dict[str, Any] | None:
    path = found.folder / name
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > LARGEST_HEADER:
            raise ValueError(f"is not a plain file of at most {LARGEST_HEADER} bytes")
        value = json.loads(path.read_bytes(), object_pairs_hook=without_duplicates)
        if not isinstance(value, dict):
            raise TypeError(f"is a JSON {type(value).__name__}; needs an object")
    except json.JSONDecodeError as error:
        found.add("json", name, f"is no valid JSON: {error}")
        return None
    except (OSError, TypeError, ValueError, RecursionError) as error:
        found.add("json", name, f"{error}")
        return None
    return value


def _outside(folder: Path, shard: str) -> str | None:
    """Why a file of an index is refused, or None. Links to `blobs`, as huggingface_hub's cache has, are accepted."""
    root = folder.resolve()
    try:
        target = (folder / shard).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        return f"is not a path: {error}"
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if Path(shard).is_absolute() or ".." in Path(shard).parts:
        return "leaves the directory; needs the name of a file in it"
    if not target.is_relative_to(root) and target.parent != blobs:
        return f"is a link that leaves the directory, to {target}"
    if target.exists() and not target.is_file():
        return "is not a plain file"
    return None


def _weight_map(found: Scan) -> dict[str, str]:
    index = _json(found, INDEX)
    named = {} if index is None else index.get("weight_map")
    if isinstance(named, dict) and all(isinstance(shard, str) for shard in named.values()):
        return named
    found.add("index", INDEX, "has no weight_map from the names of tensors to the names of files")
    return {}


def _index(found: Scan) -> dict[str, str]:
    """The tensors that the index names. Only the shards that it names are read."""
    named, shards = _weight_map(found), []
    for shard in sorted(set(named.values())):
        if not shard.endswith(".safetensors"):
            found.add("pickle", INDEX, f"names the file {shard!r}; needs safetensors files, and pickles are not read")
        elif why := _outside(found.folder, shard):
            found.add("path", INDEX, f"the file {shard!r} {why}")
        elif not (found.folder / shard).exists():
            found.add("missing shard", str(found.folder), f"lacks the shard {shard}, which its index names")
        else:
            shards.append(shard)
    found.notes += [
        f"{shard} is not read, because the index does not name it" for shard in found.shards if shard not in shards
    ]
    found.shards = shards
    return named


def _compare(found: Scan, named: dict[str, str]) -> None:
    """Check the index against the files."""
    for name, shard in named.items():
        if shard not in found.shards:
            continue
        header = found.tensors.get(name)
        if header is None and not any(p.where == shard for p in found.problems):
            found.add("index", name, f"is in {shard} by the index, but no file has it")
        elif header is not None and header.shard != shard:
            found.add("index", name, f"is in {shard} by the index; it is in {header.shard}")
    if named:
        for name, header in found.tensors.items():
            if name not in named:
                found.add("index", name, f"is in {header.shard}, and the index does not name it", fatal=False)


def _add(found: Scan, shard: str) -> None:
    """The tensors of one file. A file with a defect adds none of its tensors."""
    try:
        tensors, metadata = read_header(found.folder / shard, shard)
    except CheckpointError as error:
        return found.add("header", shard, str(error).removeprefix(f"{shard}: "))
    for name in tensors.keys() & found.tensors.keys():
        found.add("twice", name, f"is in two shards, {found.tensors[name].shard} and {shard}")
    found.tensors |= tensors
    found.metadata |= metadata
    return None


def missing_of_series(shards: Sequence[str]) -> list[str]:
    """The files that a numbered series lacks, such as `model-00002-of-00002.safetensors`."""
    named = NUMBERED.fullmatch(shards[0]) if shards else None
    if not named:
        return []
    head, digits, of, total = named.groups()
    want = [f"{head}{i:0{len(digits)}}{of}{total}.safetensors" for i in range(1, min(int(total), 10_000) + 1)]
    return sorted(set(want) - set(shards))
