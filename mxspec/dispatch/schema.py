"""How an op's signature crosses torch.library: its schema, and the types that it takes."""

from __future__ import annotations

import inspect
from typing import cast

import torch
from torch import Tensor

from mxspec.formats import ELEMENTS

# A dtype or a name is more than a schema can say: it crosses the operator as text.
SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "int": "SymInt",  # a number of rows may be a symbol while a graph is traced; a kernel always gets a plain int
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "torch.dtype | str": "str",
    "None": "()",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor, Tensor)",
    "tuple[Tensor, ...]": "Tensor[]",  # as many as the options ask for
}


# The types in Python of what is annotated so.
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "torch.dtype": torch.dtype,
    "torch.dtype | str": (torch.dtype, str),
}


def dtype_of(text: str) -> torch.dtype | str:
    """The dtype that `str(dtype)` or an element format's name stands for; other text as it is, to be refused."""
    if text.startswith("torch."):
        return cast(torch.dtype, getattr(torch, text.removeprefix("torch."), text))
    fmt = ELEMENTS.get(text)
    return (fmt and fmt.dtype) or text


def schema(name: str, signature: inspect.Signature, in_place: bool) -> str:
    """The schema of an op, with `backend` as a last option; one in place changes its first argument."""
    parameters, star = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        default = str(p.default) if "str" in p.annotation else p.default
        shown = f'"{default}"' if isinstance(default, str) else str(default).removeprefix("torch.")
        parameters.append(f"{SCHEMA_TYPES[p.annotation]} {p.name}" + ("" if default is p.empty else f"={shown}"))
    if in_place:
        parameters[0] = parameters[0].replace("Tensor", "Tensor(a!)", 1)
    parameters += [] if star else ["*"]
    return f"{name}({', '.join(parameters)}, str backend='') -> {SCHEMA_TYPES[signature.return_annotation]}"


def annotated(signature: inspect.Signature, kind: str) -> tuple[str, ...]:
    """The parameters of an op that are of a kind."""
    return tuple(p.name for p in signature.parameters.values() if p.annotation == kind)
