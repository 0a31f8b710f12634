"""The cases of from_blocked: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import EXPERTS
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import BEGINS, laid, small_enough, strides_fit
from mxspec.formats import MX_BLOCK_SIZE
from mxspec.reference.to_blocked import blocked_bytes
from mxspec.spec import Case, Shapes, random_bits, these


def cases() -> Iterator[Case]:
    for R, C in [(128, 4), (1, 1), (127, 3), (129, 5), (300, 70)]:
        yield Case(f"{R}x{C}", these(random_bits(blocked_bytes(R, C), dtype=torch.uint8), R, C))
    yield Case("3-D 3x130x6", these(random_bits(3, 2048, dtype=torch.uint8), 130, 6))
    yield Case("3-D e8m0fnu", these(random_bits(3, 2048, dtype=torch.float8_e8m0fnu), 130, 6))
    yield Case("e8m0fnu", these(random_bits(2048, dtype=torch.float8_e8m0fnu), 130, 6))
    yield Case("no rows", these(torch.zeros(0, dtype=torch.uint8), 0, 8), flags={"edge"})
    yield Case("wrong size", these(torch.zeros(512, dtype=torch.uint8), 129, 4), raises=ValueError, match="1024")
    yield Case("negative", these(torch.zeros(512, dtype=torch.uint8), -1, 4), raises=ValueError, match=">= 0")
    float_rows = these(torch.zeros(512, dtype=torch.uint8), 64.0, 2)
    yield Case("rows of 64.0", float_rows, raises=TypeError, match="rows = 64.0")
    yield Case("int32", these(torch.zeros(512, dtype=torch.int32), 128, 4), raises=TypeError, match="int32")
    yield Case("e4m3fn, the scales of NVFP4", these(random_bits(2048, dtype=torch.float8_e4m3fn), 130, 6))


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def tiles(R: int, C: int) -> tuple[Tensor, int, int]:
        return torch.randint(0, 256, (blocked_bytes(R, C),), dtype=torch.uint8), R, C

    for M, K in shapes.matrices:
        R, C = M, -(-K // MX_BLOCK_SIZE)  # the scales of a quantized M x K
        yield Case(f"{R}x{C}", partial(tiles, R, C))


def _possible(choice: Choice) -> bool:
    strides, experts = choice.get("strides"), choice.get("experts", 2)
    sizes = [choice[name] for name in ("rows", "cols", "experts") if choice.get(name) is not None]
    if strides in ("rows apart", "one row repeated") and experts in (None, 0, 1):
        return False
    told = {choice[name] for name in ("strides", "begins") if name in choice}
    if "none" in told and told != {"none"}:
        return False
    if told and 0 in sizes and told != {"none"}:
        return False
    if not {"rows", "cols", "experts"} <= choice.keys():
        return True
    shape = (1 if choice["experts"] is None else choice["experts"], blocked_bytes(choice["rows"], choice["cols"]))
    return small_enough(*shape) and (strides is None or strides_fit(strides, shape))


def _make(choice: Choice) -> tuple[Any, ...]:
    rows, cols, experts = (choice[name] for name in ("rows", "cols", "experts"))
    shape = 1 if experts is None else experts, blocked_bytes(rows, cols)
    bits = random_bits(*shape, dtype=torch.uint8)
    if bits.numel():
        bits[:, :4] = torch.tensor([0, 127, 254, 255], dtype=torch.uint8).roll(experts or 1)
        bits[:4, 0] = torch.tensor([0, 127, 254, 255], dtype=torch.uint8)[: len(bits)]
    blocked: Tensor = laid(bits.view(choice["dtype"]), choice["strides"], choice["begins"])
    return blocked[0] if experts is None else blocked, rows, cols


DIMENSIONS = {
    "rows": (0, 1, 32, 161, 256, 272, 1056, 4128),
    "cols": (0, 1, 33, 48, 161, 256, 272, 1056, 4128),
    "experts": EXPERTS,
    "strides": ("none", "row-major", "rows apart", "columns apart", "one row repeated", "one column repeated"),
    "begins": ("none", *BEGINS),
    "dtype": (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn),
}
ALSO: list[Choice] = [
    {"strides": "one column repeated", "experts": 9, "dtype": torch.float8_e8m0fnu},
    {"strides": "one row repeated", "experts": 9, "dtype": torch.float8_e8m0fnu},
    {"experts": None, "rows": 4128, "cols": 1},
    {"experts": None, "rows": 1, "cols": 4128},
    {"experts": None, "rows": 161, "cols": 256},
    {"experts": None, "rows": 256, "cols": 4128, "begins": "at 0"},
    {"experts": 9, "rows": 0, "cols": 1},
    {"experts": 9, "rows": 1, "cols": 0},
    {"experts": 9, "rows": 256, "cols": 0},
    *({"experts": None, "rows": 0, "cols": cols} for cols in (1, 256, 4128)),
    *({"experts": None, "rows": rows, "cols": 0} for rows in (1, 256, 4128)),
]
SPACE = Space(DIMENSIONS, _make, {}, _possible, ALSO)
IMPOSSIBLE = (
    (r"blocked\.length .* \| blocked\.(?:rows|cols|rank) .*", "the bytes of one matrix are a vector"),
    (r"blocked\.length .* \| blocked\.strides (?:one row repeated|rows apart)", "a vector has no rows"),
    (r"(?:rows|cols) = 0 \| blocked\.(?:strides|begins|byte \d+) .*", "there are no bytes"),
    (r"(?:rows|cols) = 0 \| blocked\.(?:length|cols) (?:> .*|a multiple of 128)", "there are no bytes"),
    (r"rows > 4096 \| cols > (?:1024|4096)", "more than 2.2 million bytes"),
    (r"rows > 1024 \| cols > 4096", "more than 2.2 million bytes"),
)
MOVES_BYTES = True
