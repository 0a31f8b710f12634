"""The judgement of another program's results: each test passed, failed, was skipped or is missing."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mxspec import dispatch, rules
from mxspec.check import Result, Status, difference
from mxspec.formats import ELEMENTS
from mxspec.vectors._export import VERSION

# The fields that are read from a manifest. It may have other fields, for example from a newer release.
_MANIFEST = {"version": int, "sha256": str, "tests": list}
_TEST = {"id": int, "comment": str, "inputs": list, "options": dict, "result": str}
_STORED = {"name": str, "stored": str, "shape": list, "strides": list}
_WORDS = {int: "an integer", str: "text", list: "a list", dict: "an object"}
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def check(directory: Path | str, only: Collection[str] | None = None) -> Iterator[Result]:
    """Judge the results that lie beside the vectors of a folder: of all ops that have results, or of the ops in `only`.

    The expected outputs are read from the folder, so they may come from another release.

    Yields:
        A result for each test: `passed`; `failed`; `skipped` if the program says that it does not support the test; or
        `missing` if it says nothing. The message of a failure names the first wrong block, its bits, and the library
        whose rule gives exactly these outputs, as `rules.explaining` does.
    """
    directory, found = Path(directory), exported(directory)
    if unknown := sorted(set(only or ()) - set(found)):
        raise ValueError(f"vectors: {directory} has no vectors of {', '.join(unknown)}")
    results = directory / "results"
    for path in results.glob("*"):
        if path.stem not in found or path.suffix not in (".json", ".safetensors"):
            names = ", ".join(found)
            raise ValueError(
                f"vectors: {path} holds results of no exported op; needs <op>.safetensors or .json of {names}"
            )
    answered = [op for op in found if any((results / f"{op}.{end}").exists() for end in ("safetensors", "json"))]
    for op in answered if only is None else only:
        yield from _check_op(op, directory)


def exported(directory: Path | str) -> list[str]:
    """The ops whose vectors a folder holds."""
    found = [path.stem for path in Path(directory).glob("*.json") if path.with_suffix(".safetensors").exists()]
    if not found:
        raise ValueError(f"vectors: {directory} holds no vectors; run `python -m mxspec vectors export` first")
    return sorted(found)


def _check_op(op: str, directory: Path) -> Iterator[Result]:
    manifest = _load_manifest(directory / f"{op}.json")
    file = directory / f"{op}.safetensors"
    if hashlib.sha256(_read_bytes(file)).hexdigest() != manifest["sha256"]:
        raise ValueError(f"vectors: {file} is not the file that {op}.json describes; export both again")
    stored, got = _load_tensors(file), _load_tensors(directory / "results" / f"{op}.safetensors")
    _check_places(directory / f"{op}.json", manifest, stored)
    said = _load_json(directory / "results" / f"{op}.json")
    rejected, skipped = said.get("rejected", {}), said.get("skipped", {})
    ids = {str(test["id"]) for test in manifest["tests"]}
    if strangers := {name.partition(".")[0] for name in (*got, *rejected, *skipped)} - ids:
        raise ValueError(f"vectors: results of {op} have the id {min(strangers)!r}; needs an id of the manifest")
    once = [{name.partition(".")[0] for name in got}, set(rejected), set(skipped)]
    if twice := (once[0] & once[1]) | (once[0] & once[2]) | (once[1] & once[2]):
        raise ValueError(
            f"vectors: results of {op} answer test {min(twice)} twice; needs one of outputs, rejected, skipped"
        )
    for test in manifest["tests"]:
        number = str(test["id"])
        status: Status
        mine = {name.partition(".")[2]: t for name, t in got.items() if name.partition(".")[0] == number}
        if number in skipped:
            status, message = "skipped", str(skipped[number])
        elif test["result"] == "invalid":
            accepted = f"accepted what must be refused: {test['error']['message']}"
            status, message = (
                ("passed", "") if number in rejected else ("failed", accepted) if mine else ("missing", "")
            )
        elif number in rejected:
            status, message = "failed", f"rejected what is valid: {rejected[number]}"
        else:
            status, message = _judged(op, test, stored, mine)
        yield Result(op, "results", test["comment"], status, message, number=test["id"])


def _judged(
    op: str, test: Mapping[str, Any], stored: Mapping[str, Tensor], mine: Mapping[str, Tensor]
) -> tuple[Status, str]:
    """The status and the message of a valid test."""
    if not mine:
        return "missing", ""
    outputs = test["outputs"]
    if strange := sorted(mine.keys() - {entry["name"] for entry in outputs}):
        return "failed", f"has an output {', '.join(strange)}, which the op does not have"
    if lacking := [entry["name"] for entry in outputs if entry["name"] not in mine]:
        return "failed", f"has no output {', '.join(lacking)}"
    expected = tuple(_as_given(stored[entry["stored"]], entry) for entry in outputs)
    got = []
    for entry in outputs:
        t, wanted = mine[entry["name"]], stored[entry["stored"]]
        # The bytes of an element may lie side by side in the last dimension.
        width = wanted.itemsize if t.dtype == torch.uint8 else 1
        bits = t.dtype in _UNSIGNED and t.itemsize * width == wanted.itemsize
        if bits and t.shape == (*wanted.shape[:-1], *(n * width for n in wanted.shape[-1:])):
            # Flat, because the strides of an empty tensor may be odd.
            t = t.flatten().view(wanted.dtype).view(wanted.shape)
        if t.shape != wanted.shape:
            return "failed", f"output {entry['name']}: stored shape {tuple(t.shape)}; needs {tuple(wanted.shape)}"
        got.append(_as_given(t, entry))
    problem = difference(tuple(got), expected)
    if problem is None:
        return "passed", ""
    return "failed", "\n".join(filter(None, [problem, _whose(op, test, stored, tuple(got))]))


def _as_given(dense: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """A stored tensor with its own shape and strides."""
    return dense.as_strided(entry["shape"], entry["strides"])


def _whose(op: str, test: Mapping[str, Any], stored: Mapping[str, Tensor], got: tuple[Tensor, ...]) -> str | None:
    """The names of the rules that give exactly these outputs; None if there are none or this release lacks the call."""
    if op not in dispatch.ops():
        return None
    args = [_as_given(stored[e["stored"]], e) if "stored" in e else e["value"] for e in test["inputs"]]
    takes = inspect.signature(dispatch.reference(op)).parameters
    kwargs = {}
    for name, value in test["options"].items():
        is_dtype = name in takes and "torch.dtype" in takes[name].annotation
        by_name = value is None or str(value) in ELEMENTS  # FP6 has no dtype
        if name not in takes or (is_dtype and not by_name and not hasattr(torch, str(value))):
            return None
        kwargs[name] = getattr(torch, value) if is_dtype and not by_name else value
    names = rules.explaining(op, tuple(args), kwargs, got)
    return f"your bytes are those of: {', '.join(names)}" if names else None


def _load_manifest(path: Path) -> dict[str, Any]:
    manifest = _read_json(path)
    try:
        _check_fields("it", manifest, _MANIFEST)
        if not 1 <= manifest["version"] <= VERSION:
            raise ValueError(f"it has version {manifest['version']}; this release judges 1 to {VERSION}")
        for number, test in enumerate(manifest["tests"], 1):
            _check_test(f"test {number}", test)
        ids = [test["id"] for test in manifest["tests"]]
        if len(set(ids)) != len(ids) or not ids:
            raise ValueError("it has no tests, or two of one id")
    except ValueError as error:
        raise ValueError(f"vectors: {path} is not a manifest of `vectors export`: {error}") from error
    return manifest


def _check_test(where: str, test: Any) -> None:
    _check_fields(where, test, _TEST)
    if test["result"] not in ("valid", "invalid"):
        raise ValueError(f"{where} has the result {test['result']!r}; needs valid or invalid")
    for i, entry in enumerate(test["inputs"]):
        has_value = isinstance(entry, dict) and "value" in entry
        _check_fields(f"input {i} of {where}", entry, {"name": str} if has_value else _STORED)
    if test["result"] == "invalid":
        _check_fields(where, test, {"error": dict})
        _check_fields(f"error of {where}", test["error"], {"message": str})
        return
    _check_fields(where, test, {"outputs": list})
    for i, entry in enumerate(test["outputs"]):
        _check_fields(f"output {i} of {where}", entry, _STORED)


def _check_fields(where: str, value: Any, fields: Mapping[str, type]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_WORDS.get(type(value), repr(value))}; needs an object")
    for name, kind in fields.items():
        if type(value.get(name)) is not kind:
            raise ValueError(f"{where} has no {name!r} that is {_WORDS[kind]}")


def _check_places(path: Path, manifest: Mapping[str, Any], stored: Mapping[str, Tensor]) -> None:
    """Refuse a manifest if an entry names a tensor that is not stored, or elements outside of it."""
    for test in manifest["tests"]:
        for entry in (*test["inputs"], *test.get("outputs", ())):
            try:
                _as_given(stored[entry["stored"]], entry) if "stored" in entry else None
            except (KeyError, RuntimeError, TypeError) as error:
                place = f"output or input {entry['name']!r} of test {test['id']}"
                raise ValueError(f"vectors: {path}: {place} is not in the file of tensors: {error}") from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"vectors: {path}: {error.strerror}; needs a file") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_bytes(path).decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"vectors: {path}: {error}; needs JSON in UTF-8") from error


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path) if path.exists() else {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"vectors: {path}: {error}") from error


def _load_json(path: Path) -> dict[str, dict[str, str]]:
    said, known = _read_json(path) if path.exists() else {}, {"rejected", "skipped"}
    if not isinstance(said, dict) or said.keys() - known or not all(isinstance(v, dict) for v in said.values()):
        raise ValueError(f"vectors: {path}: needs {{'rejected': {{id: words}}, 'skipped': {{id: words}}}}")
    return said
