"""The signature of an op as torch.library needs it: the schema, and the types of the arguments."""

from __future__ import annotations

import inspect
from typing import cast

import torch
from torch import Tensor

from mxspec.formats import ELEMENTS

# A schema has no type for "a dtype or a name", so such an argument crosses the operator as text.
SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",  # in a traced graph a number of rows may be a symbol; a kernel always gets a plain int
    "int | None": "SymInt?",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "torch.dtype | str": "str",
    "torch.dtype | str | None": "str?",
    "None": "()",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "tuple[Tensor, ...]": "Tensor[]",  # the options decide how many
}


# For each annotation, the Python types that an argument may have.
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "Tensor | None": (Tensor, type(None)),
    "int": int,
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": bool,
    "str": str,
    "torch.dtype": torch.dtype,
    "torch.dtype | str": (torch.dtype, str),
    "torch.dtype | str | None": (torch.dtype, str, type(None)),
}


def dtype_of(text: str) -> torch.dtype | str:
    """The dtype of `str(dtype)` or of an element format's name. Other text stays, and the checks refuse it."""
    if text.startswith("torch."):
        return cast(torch.dtype, getattr(torch, text.removeprefix("torch."), text))
    fmt = ELEMENTS.get(text)
    return (fmt and fmt.dtype) or text


def schema(name: str, signature: inspect.Signature, in_place: bool) -> str:
    """The schema of an op, with `backend` as its last option. An op in place changes its first argument."""
    parameters, star = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        default = str(p.default) if "str" in p.annotation and p.default is not None else p.default
        shown = f'"{default}"' if isinstance(default, str) else str(default).removeprefix("torch.")
        parameters.append(f"{SCHEMA_TYPES[p.annotation]} {p.name}" + ("" if default is p.empty else f"={shown}"))
    if in_place:
        parameters[0] = parameters[0].replace("Tensor", "Tensor(a!)", 1)
    parameters += [] if star else ["*"]
    return f"{name}({', '.join(parameters)}, str backend='') -> {SCHEMA_TYPES[signature.return_annotation]}"


def annotated(signature: inspect.Signature, *kinds: str) -> tuple[str, ...]:
    """The names of an op's parameters with one of these annotations."""
    return tuple(p.name for p in signature.parameters.values() if p.annotation in kinds)
