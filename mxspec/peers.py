"""Whose rule is it? Compares a quantizer's bytes with what peers' code gave on probe blocks.

`vectors/peers.json`, section `mx`: per block and format, the fp32 bits and dtype of element 0, the next elements
(the rest are 0), and per peer and rule the scale byte and the codes of those elements. A name that ends in `*` was
transcribed from the peer's source, the others were run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import element
from mxspec.spec import Case

_PEERS = {
    "te": "TransformerEngine",
    "ao018": "torchao 0.18",
    "aotri018": "torchao 0.18 (Triton)",
    "aomain": "torchao main",
    "quack": "quack",
    "mxms": "microxcaling",
    "gfloat": "gfloat",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KEYS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

Row = tuple[str, int, dict[str, Any]]  # the block's name, how many codes are known, results by peer and rule


@functools.cache
def load() -> dict[str, Any]:
    """The whole of `vectors/peers.json`."""
    return json.loads((files("mxspec") / "vectors" / "peers.json").read_text())


def mx_rows(elem_dtype: torch.dtype) -> list[tuple[Tensor, Row]]:
    """The probe blocks for a format, `(1, 32)` each, with what the peers made of them."""
    rows = []
    for key, entry in load()["mx"].items():
        name, fmt = key.rsplit("|", 1)
        if fmt != _KEYS.get(elem_dtype):
            continue
        block = torch.zeros(32)
        block[0] = torch.tensor(int(entry["amax_f32_bits"], 16)).to(torch.int32).view(torch.float32)
        block[1 : 1 + len(entry["probes"])] = torch.tensor([float(p) for p in entry["probes"]])
        x = block.to(_DTYPES[entry["dtype"]]).unsqueeze(0)
        rows.append((x, (name, 1 + len(entry["probes"]), entry["out"])))
    return rows


def same_codes(got: list[int], peer: list[int], elem_dtype: torch.dtype) -> bool:
    """Whether codes agree, with NaN as a class."""
    value = element(elem_dtype).value
    return all(g == p or (value(g) != value(g) and value(p) != value(p)) for g, p in zip(got, peer, strict=True))


def matches(got: tuple[int, list[int]], peer: Any, elem_dtype: torch.dtype) -> bool:
    """Whether a scale byte and codes are the ones of a peer's entry; null there means not run, "nan" any NaN."""
    if peer is None:
        return True
    byte, codes = peer
    codes = codes and [element(elem_dtype).nan_code if code == "nan" else code for code in codes]
    return got[0] == byte and (codes is None or same_codes(got[1][: len(codes)], codes, elem_dtype))


def bytes_of_block(result: Any, count: int) -> tuple[int, list[int]]:
    """The scale byte and the first codes of a quantizer's `(qdata, scale)` for one block."""
    qdata, scale = (t.contiguous().view(torch.uint8).flatten().tolist() for t in result)
    return scale[0], qdata[:count]


def whose_rule(reference: Callable[..., Any], call: Callable[..., Any], case: Case, device: torch.device) -> str | None:
    """The peers whose results a quantizer repeats on every probe block, if it leaves the contract on any."""
    elem_dtype = element(case.kwargs.get("elem_dtype", torch.float8_e4m3fn)).dtype
    assert elem_dtype is not None
    kwargs = {"elem_dtype": elem_dtype, "scaling": case.kwargs.get("scaling", "rceil")}
    rows = mx_rows(elem_dtype)
    if not rows:  # no peer's code was run on blocks of this format
        return None
    agreeing = set(rows[0][1][2])
    leaving = []
    for x, (name, count, by_peer) in rows:
        want = bytes_of_block(reference(x, **kwargs), count)
        try:
            got = bytes_of_block(call(x.to(device), **kwargs), count)
        except Exception:  # the finding was reported; this only looks for its origin
            return None
        if got[0] != want[0] or not same_codes(got[1], want[1], elem_dtype):
            leaving.append(name)
            agreeing = {peer for peer in agreeing if by_peer.get(peer) is not None}  # not run is no evidence here
        agreeing = {peer for peer in agreeing if matches(got, by_peer.get(peer), elem_dtype)}
    if not leaving:
        return None
    named = ", ".join(leaving[:4]) + (", ..." if len(leaving) > 4 else "")
    where = f"which leave the contract on {len(leaving)} of them ({named})"
    names = ", ".join(sorted({f"{_PEERS[p.split('.')[0]]}'s ({p})" for p in agreeing}))
    if not names:
        return f"your bytes are no known peer's rule on the {len(rows)} probe blocks, {where}"
    return f"your bytes are {names} on all {len(rows)} probe blocks, {where}"
