"""The cases of an op as tensors and a manifest: the same bytes on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mxspec import dispatch
from mxspec.formats import E8M0FNU, ELEMENTS, INT_OF_BYTES, ElementFormat, ScaleFormat, may_be_nan
from mxspec.spec import Case, Reference, answer_of

# The version of the vectors, in every manifest. It rises when a test or a byte of the vectors changes.
VERSION = 3
MOST_ELEMENTS, MOST_GROUPS = 2**11, 9  # limits for the inputs of one generated test
FORMAT = (
    "A test is one call of the op: `inputs` are the positional arguments in order, and `options` are the named "
    "arguments, all of them written out.",
    "`stored` names a tensor in <op>.safetensors. The file holds the bytes of the tensor in the order of its memory, "
    "without gaps: element (i, j, ...) of `shape` is at i * strides[0] + j * strides[1] + ..., counted in elements. "
    "Equal tensors are stored once.",
    "The header of <op>.safetensors gives the shape of the memory. An output with strides [1, 96] is stored as its "
    "transpose. For F4 the header counts numbers and not bytes, so its last dimension is twice the number of bytes: "
    "[2, 32] if `shape` is [2, 16].",
    "`dtype` is torch's name. The file calls float8_e4m3fn, float8_e5m2, float8_e8m0fnu and float4_e2m1fn_x2 F8_E4M3, "
    "F8_E5M2, F8_E8M0 and F4. An element of float4_e2m1fn_x2 is one byte with two numbers, the first in its low half. "
    "`formats` says what the bits mean.",
    "`given_strides` are the strides of an input that has gaps in mxspec's own tests. If a kernel takes no gaps, give "
    "it the stored bytes.",
    "The result `valid` requires these outputs, byte for byte. If an expected element is NaN, any NaN of its dtype is "
    "right. A NaN that the op computes is stored as a positive NaN; a NaN that the op moves is stored unchanged.",
    "The result `invalid` requires an error, in any words. `error` is the error that mxspec raises.",
    "Write your outputs to results/<op>.safetensors. Name each output `<id>.<name of the output>`, and use one of "
    "three forms: the dtype and shape that the header has for the stored tensor; or its bits as unsigned integers of "
    "the element's width (U8, U16, U32 or U64), in the same shape; or its bytes as U8, with the last dimension "
    "multiplied by the bytes of an element. For F4 the last two forms are the same: U8 with half of the header's last "
    "dimension. Write results/<op>.json as "
    '{"rejected": {"<id>": "your error"}, "skipped": {"<id>": "why you do not support it"}}; both keys are optional. '
    "Then run `python -m mxspec vectors check DIR`.",
)
FLAGS = {
    "edge": "a value or a shape at a limit of the contract",
    "invalid": "must be refused",
    "generated": "made so that every two facts of a call (sizes, strides, special values, options) meet in a test",
}


def ops() -> tuple[str, ...]:
    """The ops that are judged byte for byte: the ops that quantize, dequantize or change a layout.

    An op that works in place has no outputs, so it is left out.
    """
    specs = {op: dispatch.reference(op).spec for op in dispatch.ops()}
    return tuple(op for op, spec in specs.items() if spec.min_sqnr_db == math.inf and not spec.in_place)


def export(directory: Path | str, only: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
    """Write `<op>.safetensors` and `<op>.json` for every op that is judged byte for byte, or for the ops in `only`.

    The files are the same, byte for byte, on every machine.

    Returns:
        The manifests, by op.
    """
    directory, chosen, manifests = Path(directory), _known(only), {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / f"{op}.{end}" for op in chosen for end in ("safetensors", "json")):
            if path.is_dir():
                raise ValueError(f"vectors: {path} is a folder; needs a place for a file")
        for op in chosen:
            file = _File(directory / f"{op}.safetensors")
            manifest = _manifest(op, file)
            manifest["sha256"] = file.write()
            (directory / f"{op}.json").write_text(_text(manifest), encoding="utf-8")
            manifests[op] = manifest
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"vectors: {directory}: {why}; needs a folder to write to") from error
    return manifests


def _known(only: Collection[str] | None) -> tuple[str, ...]:
    for op in only or ():
        if op not in ops():
            raise ValueError(
                f"vectors: {op!r} is not judged byte for byte, or works in place; needs one of {', '.join(ops())}"
            )
    return tuple(op for op in ops() if only is None or op in only)


class _File:
    """The tensors of one op; equal tensors are stored once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, t: Tensor) -> dict[str, Any]:
        """Store a tensor as it lies in memory, or row-major if it has gaps. Returns how to read it."""
        order = _order(t)
        dense = t.resolve_conj().resolve_neg().permute(order).clone(memory_format=torch.contiguous_format)
        strides = [dense.stride(order.index(d)) for d in range(t.ndim)]
        key = (t.dtype, dense.shape, hashlib.sha256(_bytes(dense)).digest())
        stored = self._names.setdefault(key, name)
        self._tensors.setdefault(stored, dense)
        return {"dtype": str(t.dtype).removeprefix("torch."), "shape": [*t.shape], "strides": strides, "stored": stored}

    def write(self) -> str:
        """Write the file and return its digest."""
        save_file(self._tensors, self.path)
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def _order(t: Tensor) -> list[int]:
    """The dimensions of a tensor in the order of its memory if it has no gaps, or else in their own order."""
    plain = list(range(t.ndim))
    order = sorted(plain, key=lambda d: -t.stride()[d])
    return order if not t.is_contiguous() and t.permute(order).is_contiguous() else plain


def _bytes(t: Tensor) -> bytes:
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def _manifest(op: str, file: _File) -> dict[str, Any]:
    reference = dispatch.reference(op)
    doc = inspect.getdoc(reference) or ""
    tests: list[dict[str, Any]] = []
    left_out = []
    for number, case in enumerate(reference.spec.cases(), 1):
        args = case.args()
        if because := _unstorable(reference, case, args):
            left_out.append({"comment": case.name, "flags": sorted(case.flags), "because": because})
        else:
            tests.append(_test(op, number, case, args, file))
    dtypes = {t["dtype"] for test in tests for t in (*test["inputs"], *test.get("outputs", ())) if "dtype" in t}
    return {
        "format": FORMAT,
        "version": VERSION,
        "op": op,
        "contract": " ".join(doc.partition("\n\n")[0].split()),
        "documentation": doc.partition("\nExample:")[0].rstrip(),
        "formats": _formats(dtypes | {test["options"].get("elem_dtype") for test in tests}),
        "notes": FLAGS,
        "numberOfTests": len(tests),
        "tests": tests,
        "left_out": left_out,
    }


def _unstorable(reference: Reference[..., Any], case: Case, args: tuple[Any, ...]) -> str | None:
    """Why a case is not in the vectors: JSON cannot say what it takes, or it is too large. None if it is there."""
    if "large" in case.flags:
        return "more than 2^31 elements"
    if "generated" in case.flags and not case.raises:
        tensors = [a for a in args if isinstance(a, Tensor)]
        groups = max((len(a) for a in tensors if a.dtype == torch.int32 and a.ndim == 1), default=0)
        if (size := sum(a.numel() for a in tensors)) > MOST_ELEMENTS or groups > MOST_GROUPS:
            most = f"{MOST_ELEMENTS} elements and {MOST_GROUPS} groups"
            return f"{size} elements and {groups} groups; a file holds tests of {most} at most, of those generated"
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_meta:
            return "a tensor on another device"
        if isinstance(arg, Tensor) and arg.layout != torch.strided:
            return f"a tensor of layout {arg.layout}"
        if isinstance(arg, Tensor) and arg.dtype == torch.float4_e2m1fn_x2 and not arg.ndim:
            return "two numbers in a tensor without a dimension, which a file of F4 cannot hold"
        if not isinstance(arg, (Tensor, int, float)):
            return f"a {type(arg).__name__} for a tensor"
    given = _with_annotations(reference, case, args)
    if any(isinstance(value, float) and "int" in takes.split(" | ") for value, takes in given):
        return "a float for an integer, which JSON cannot distinguish from an integer"
    return None


def _with_annotations(reference: Reference[..., Any], case: Case, args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    signature = inspect.signature(reference)
    for name, value in signature.bind(*args, **case.kwargs).arguments.items():
        yield value, signature.parameters[name].annotation


def _test(op: str, number: int, case: Case, args: tuple[Any, ...], file: _File) -> dict[str, Any]:
    reference = dispatch.reference(op)
    bound = inspect.signature(reference).bind(*args, **case.kwargs)
    bound.apply_defaults()
    inputs = []
    for name, value in zip(bound.signature.parameters, args, strict=False):
        stored = file.add(f"{number}.{name}", value) if isinstance(value, Tensor) else {"value": value}
        inputs.append({"name": name, **stored})
        if isinstance(value, Tensor) and [*value.stride()] != stored["strides"] and value.numel():
            inputs[-1]["given_strides"] = [*value.stride()]
    test: dict[str, Any] = {
        "id": number,
        "comment": case.name,
        "flags": sorted(case.flags),
        "inputs": inputs,
        "options": {name: _plain(value) for name, value in bound.kwargs.items()},
        "result": "invalid" if case.raises else "valid",
    }
    if case.raises:
        return {**test, "error": {"type": case.raises.__name__, "message": case.match}}
    outputs = answer_of(reference, args, case.kwargs)
    if reference.spec.flops(args, outputs):  # the bits of a computed NaN depend on the CPU
        outputs = tuple(_with_one_nan(t) for t in outputs)
    names = output_names(op, len(outputs))
    test["outputs"] = [{"name": n, **file.add(f"{number}.{n}", t)} for n, t in zip(names, outputs, strict=True)]
    return test


def _formats(dtypes: Collection[str | None]) -> dict[str, Any]:
    """The meaning of the bits of the narrow formats among these dtypes. FP6 has no dtype and stands by its name."""
    formats: list[ElementFormat | ScaleFormat] = [*ELEMENTS.values(), E8M0FNU]
    known = {str(fmt.dtype or fmt.name).removeprefix("torch."): fmt for fmt in formats}
    fields = {name: dataclasses.asdict(fmt) for name, fmt in known.items() if name in dtypes}
    return {name: {k: v for k, v in field.items() if k != "dtype"} for name, field in fields.items()}


def _text(manifest: Mapping[str, Any]) -> str:
    """A manifest as JSON, one line per test."""

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)) and value:
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {text(value)}" for key, value in manifest.items()) + "\n}\n"


def _plain(value: Any) -> Any:
    """An option as JSON. A dtype gets torch's name, whichever of its names the case uses."""
    value = getattr(ELEMENTS.get(value) if isinstance(value, str) else None, "dtype", None) or value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _with_one_nan(t: Tensor) -> Tensor:
    """The same values and strides, but every NaN is the NaN that torch.nan is cast to."""
    if not may_be_nan(t.dtype):
        return t
    bits = t.view(INT_OF_BYTES[t.itemsize])
    nan = torch.tensor(torch.nan).to(t.dtype).view(bits.dtype)
    return torch.where(t.float().isnan(), nan, bits).view(t.dtype)


def output_names(op: str, count: int) -> tuple[str, ...]:
    """The names of an op's outputs: from Returns in its docstring, as in `(qdata, scale)`, or `out` if there is one.

    >>> output_names("mx_quantize", 2), output_names("to_blocked", 1)
    (('qdata', 'scale'), ('out',))
    """
    if count == 1:
        return ("out",)
    returns = (inspect.getdoc(dispatch.reference(op)) or "").partition("Returns:")[2]
    for found in re.findall(r"`\(([a-z_]+(?:, [a-z_]+)+)\)`", returns):
        if len(names := tuple(found.split(", "))) == count:
            return names
    raise ValueError(f"vectors: Returns in the docstring of {op} names no {count} outputs; needs `(name, name, ...)`")
