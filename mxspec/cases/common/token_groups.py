"""Token groups whose sizes reveal wrong results: empty, one token, a thousand groups, sizes that fit no tile."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

from mxspec.spec import Case, random_normal, these

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int16, torch.uint8, torch.bool)

# name -> tokens of each group, rows that belong to no group, whether the case is at a limit of the contract
SIZES: dict[str, tuple[list[int], int, bool]] = {
    "three groups": ([5, 33, 64], 0, False),
    "aligned groups": ([32, 128, 96], 0, False),
    "empty groups": ([0, 5, 0, 0, 130, 1, 0], 0, True),
    "all in one of eight": ([0, 0, 0, 100, 0, 0, 0, 0], 0, True),
    "rows past the last group": ([10, 0, 45], 20, True),
    "one token": ([1], 0, True),
    "one group": ([300], 0, False),
    "no group": ([], 7, True),
    "no group, no token": ([], 0, True),
    "no tokens": ([0, 0, 0], 0, True),
    "no token in a group": ([0, 0], 9, True),
    "300 groups": (Random(300).choices((0, 1, 2), k=300), 3, True),
    "1000 groups": (Random(1000).choices((0, 0, 0, 1), k=1000), 0, True),
}


def offs_of(sizes: list[int]) -> Tensor:
    """The exclusive end of each group."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def start_of(sizes: list[int], alignment: int) -> Tensor:
    """The row at which each group begins if every group is padded to a multiple of `alignment`."""
    padded = [0, *(-(-n // alignment) * alignment for n in sizes)]
    return offs_of(padded)[:-1]


def grouped() -> Iterator[tuple[str, list[int], int, int, frozenset[str]]]:
    """`(name, sizes, M, K, flags)` of every arrangement above. K is 256, or 16 if there are 300 groups or more."""
    for name, (sizes, rest, edge) in SIZES.items():
        yield name, sizes, sum(sizes) + rest, 256 if len(sizes) < 300 else 16, frozenset({"edge"} if edge else ())


def far_apart(rows: int, K: int, dtype: torch.dtype = torch.bfloat16, apart: int = 2**24) -> Tensor:
    """Rows that lie far apart. By default, offsets pass 2^31 from row 128 on. The gaps are never touched."""
    storage = torch.empty((rows - 1) * apart + K, dtype=dtype)
    return storage.as_strided((rows, K), (apart, 1)).copy_(random_normal(rows, K, dtype=dtype))


def random_offs(M: int, G: int) -> Tensor:
    """The ends of G groups of random sizes that together hold M tokens, on the default device; for the benchmarks."""
    return torch.cat([torch.randint(0, M + 1, (G - 1,)).sort()[0], torch.tensor([M])]).to(torch.int32)


def refused_scales(scale: Tensor, offs: Tensor) -> Iterator[Case]:
    """The refusals of ops that lay out the scales of groups, along either dimension."""

    def refused(name: str, error: type[Exception], match: str, scale: Tensor = scale, offs: Tensor = offs) -> Case:
        return Case(name, these(scale, offs), raises=error, match=match)

    yield refused("int32 scale", TypeError, "scale has dtype torch.int32", scale.int())
    yield refused("3-D", ValueError, "2-D", scale[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
