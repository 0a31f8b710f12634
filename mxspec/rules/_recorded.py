"""The recorded results of peers' code on probe blocks, `rules/peers.json` and `rules/nvfp4.json`, as tensors.

Section `mx` has an entry for each block and element format, named `name|format`. The entry holds the fp32 bits of
element 0, and the elements that follow. Section `blk` is FP8 with 128-blocks of e4m3fn. Its entries hold the first
elements of each block. All elements that are not given are 0. Both sections have, for each peer and rule, the stored
scale and the codes of the given elements. null means that the peer's code was not run, and "ERR" that it raised an
error. If the name of a result has a `*`, the result was transcribed from the peer's source; all other results come from
runs. `given` is the dtype in which a peer got the blocks, if it was not the block's own dtype.

`nvfp4.json` has the bits of a matrix of one row, or of 16 rows for 16x16 blocks, and of its tensor amax, if one was
given. A result is the fp32 number that the peer stores for the matrix, the bytes of its scales, and the bytes of its
codes. `stores` says what this number is: the amax, the multiplier or the divisor. null in place of codes means that the
peer cast a NaN to e2m1 with a result that depends on the machine. All results come from runs. Section `digests` has
the sha256 of a peer's bytes for whole ranges of blocks, which `tests/engine/test_rules_nvfp4.py` makes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import E2M1, E4M3FN, FP8_BLOCK_SIZE, MX_BLOCK_SIZE, NVFP4_LARGEST, element
from mxspec.reference.common.numerics import unpacked

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Probe:
    """A block, `(1, 32)` or `(1, 128)`, and the recorded results. `elem_dtype` is the name of the element format.

    For NVFP4, x is a matrix of several blocks; `amax` and `block` are arguments of the call.
    """

    name: str
    x: Tensor
    elem_dtype: str
    recorded: dict[str, Any]
    amax: Tensor | None = None
    options: dict[str, str] = field(default_factory=dict)

    def args(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """The positional arguments of the call."""
        return tuple(t.to(device) for t in (self.x, self.amax) if t is not None)

    def given(self, entry: str) -> Tensor:
        """The block in the dtype in which the code behind an entry got it."""
        dtype = load()["given"].get(entry)
        return self.x if dtype is None else self.x.to(_DTYPES[dtype])


@functools.cache
def load() -> dict[str, Any]:
    """The whole file `rules/peers.json`."""
    return json.loads((files("mxspec") / "rules" / "peers.json").read_text())


@functools.cache
def load_nvfp4() -> dict[str, Any]:
    """The whole file `rules/nvfp4.json`."""
    return json.loads((files("mxspec") / "rules" / "nvfp4.json").read_text())


def probes(section: str, elem_dtype: torch.dtype | str = torch.float8_e4m3fn) -> list[Probe]:
    """The blocks of a section for one element format. The section `nvfp4` has only e2m1."""
    name = E2M1.name if section == "nvfp4" else element(elem_dtype).name
    return [probe for probe in all_of(section) if probe.elem_dtype == name]


@functools.cache
def formats(section: str, entries: tuple[str, ...]) -> tuple[str, ...]:
    """The element formats for which one of the entries has results.

    >>> formats("mx", ("quack.floor",)), formats("mx", ("aotri018.floor*",))
    (('e4m3fn', 'e5m2'), ('e4m3fn',))
    """
    found = load()[section].items()
    shown = [key for key, block in found if any(block["out"].get(entry) is not None for entry in entries)]
    return tuple(dict.fromkeys(_name_and_format(key)[1] for key in shown))


def _name_and_format(key: str) -> tuple[str, str]:
    name, _, elem_dtype = key.partition("|")
    return name, element(elem_dtype or E4M3FN.name).name


def all_of(section: str) -> Iterator[Probe]:
    if section == "nvfp4":
        yield from _nvfp4()
        return
    for key, entry in load()[section].items():
        name, elem_dtype = _name_and_format(key)
        if section == "mx":
            first = torch.tensor([int(entry["amax_f32_bits"], 16)]).to(torch.int32).view(torch.float32)
            values, size = torch.cat([first, torch.tensor([float(v) for v in entry["probes"]])]), MX_BLOCK_SIZE
        else:
            values, size = torch.tensor([float(v) for v in entry["x"]]), FP8_BLOCK_SIZE
        x = torch.cat([values, torch.zeros(size - len(values))]).to(_DTYPES[entry["dtype"]])
        x = x.masked_fill(x.isnan(), torch.nan)  # torch's cast may set the sign of a NaN
        yield Probe(name, x.unsqueeze(0), elem_dtype, entry["out"])


def _nvfp4() -> Iterator[Probe]:
    stores = {entry: peer["stores"] for entry, peer in load_nvfp4()["peers"].items()}
    for name, entry in load_nvfp4()["blocks"].items():
        x = _numbers(entry["x"], _DTYPES[entry["dtype"]]).view(entry.get("rows", 1), -1)
        amax = _numbers(entry["amax"], torch.float32)[0] if "amax" in entry else None
        out = {peer: [_multiplier(stored, stores[peer]), *rest] for peer, (stored, *rest) in entry["out"].items()}
        yield Probe(name, x, E2M1.name, out, amax, {"block": entry.get("block", "1x16")})


def _multiplier(stored: str, meaning: str) -> float:
    """The factor by which a peer's reader multiplies, from the number that the peer stores."""
    number = _numbers(stored, torch.float32)
    if meaning == "amax":
        number = number * torch.full_like(number, NVFP4_LARGEST).reciprocal()
    elif meaning == "divisor":
        number = number.reciprocal()
    return number.item()


def _numbers(bits: str, dtype: torch.dtype) -> Tensor:
    """Numbers from their bits in hexadecimal, the highest digit first."""
    digits = 2 * dtype.itemsize
    store = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    stored = [int(bits[i : i + digits], 16) for i in range(0, len(bits), digits)]
    return torch.tensor(stored).to(store).view(dtype)


def codes_of(qdata: Tensor, elem_dtype: torch.dtype | str) -> list[int]:
    """The codes of one block as integers, one per element."""
    return unpacked(qdata.contiguous(), element(elem_dtype)).flatten().tolist()


def matches(result: Any, recorded: Any, elem_dtype: torch.dtype | str | None = None) -> bool:
    """Whether a quantizer's outputs for one block equal the recorded results; any NaN equals any NaN.

    `elem_dtype` is the format of the codes, if their dtype does not say it.
    """
    if recorded is None:  # not run
        return True
    if len(recorded) == 3:
        return _matches_nvfp4(result, *recorded)
    stored, codes = recorded
    qdata, scale = result[:2]
    if isinstance(stored, str):  # the bits of an fp32 scale
        want = torch.tensor(int(stored, 16)).to(torch.int32).view(torch.float32).item()
        if not _same(scale.item(), want):
            return False
    elif scale.view(torch.uint8).item() != stored:
        return False
    fmt = element(elem_dtype or qdata.dtype)
    return codes is None or all(
        _same(fmt.value(got), fmt.value(want) if want != "nan" else float("nan"))
        for got, want in zip(codes_of(qdata, fmt.name), codes, strict=False)  # only the first elements are recorded
    )


def _matches_nvfp4(result: Any, multiplier: float, scales: str, codes: str | None) -> bool:
    """The same for `(qdata, scale, tensor_scale)` and all blocks of a matrix."""
    qdata, scale, tensor_scale = result
    bytes_of = scale.view(torch.uint8)
    bytes_of = torch.where(scale.float().isnan(), 0x7F, bytes_of)
    return (
        _same(tensor_scale.item(), multiplier)
        and bytes(bytes_of.flatten().tolist()).hex() == scales
        and codes is not None
        and bytes(qdata.contiguous().view(torch.uint8).flatten().tolist()).hex() == codes
    )


def _same(got: float, want: float) -> bool:
    """Whether two numbers are equal (-0 differs from 0) or both NaN."""
    return (got != got and want != want) or (got == want and str(got) == str(want))
