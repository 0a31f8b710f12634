"""The cases of zero_unused_: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.bytes import made
from mxspec.cases.common.groups import GROUPS, groups_fit, nothing_in_groups, offsets, sizes_of
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import fits
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import BEGINS, FLOATS
from mxspec.cases.common.token_groups import grouped, offs_of
from mxspec.spec import Case, Shapes, random_bits, random_normal, these

MATRIX_SIZES = {"1x1": (1, 1), "one column": (64, 1), "K = 40": (3, 40), "K = 1100": (7, 1100), "K = 5000": (2, 5000)}


def with_room(rows: int, K: int, room: int) -> Tensor:
    """Rows with `room` elements between them."""
    return random_bits(rows, K + room, dtype=torch.bfloat16)[:, :K]


def cases() -> Iterator[Case]:
    def args(
        sizes: list[int], *shape: int, dtype: torch.dtype = torch.bfloat16, make: Any = random_bits
    ) -> tuple[Tensor, Tensor]:
        return make(*shape, dtype=dtype), offs_of(sizes)

    for name, sizes, M, K, flags in grouped():
        yield Case(f"rows: {name}", partial(args, sizes, M, K, make=random_normal), flags=flags)
        if name not in ("no group", "rows past the last group", "1000 groups"):  # matrices would show nothing new
            N = 33 if len(sizes) < 300 else 5
            yield Case(f"matrices: {name}", partial(args, sizes, len(sizes), N, 64, make=random_normal), flags=flags)
    for dtype in FLOATS:
        yield Case(f"rows: {str(dtype)[6:]}", partial(args, [7, 0, 33], 64, 256, dtype=dtype))
        yield Case(f"matrices: {str(dtype)[6:]}", partial(args, [7, 0, 33], 3, 24, 240, dtype=dtype))
    for name, (N, K) in MATRIX_SIZES.items():
        yield Case(f"rows: {name}", partial(args, [5, 4], 9 + N, K), flags={"edge"})
        yield Case(f"matrices: {name}", partial(args, [5, 0, 0, 4], 4, N, K), flags={"edge"})
    yield Case("rows: thousands unused", partial(args, [5, 3], 9001, 16))
    yield Case("matrices: thousands of rows", partial(args, [5, 0, 4], 3, 3000, 16))
    # With so many groups, one program writes a whole matrix, here in two steps.
    yield Case("matrices: 520 groups", partial(args, 260 * [0, 1], 520, 3, 1025), flags={"edge"})
    yield Case("rows: one unused", partial(args, [40, 23], 64, 256), flags={"edge"})
    yield Case("rows: one row, unused", partial(args, [0], 1, 256), flags={"edge"})
    yield Case("matrices: one empty group", partial(args, [0], 1, 33, 64), flags={"edge"})
    yield Case("rows: no rows", partial(args, [0, 0], 0, 256), flags={"edge"})
    yield Case("matrices: no rows", partial(args, [5, 0], 2, 0, 64), flags={"edge"})
    yield Case("rows: no columns", partial(args, [2, 3], 9, 0), flags={"edge"})
    yield Case("matrices: no columns", partial(args, [5, 0], 2, 24, 0), flags={"edge"})
    rows, offs = args([5, 0, 33, 0], 64, 256)
    matrices = random_bits(4, 24, 64, dtype=torch.bfloat16)
    for name, room in (("rows apart", 16), ("rows at odd places", 3)):
        yield Case(f"rows: {name}", these(with_room(64, 256, room), offs), flags={"edge"})
        yield Case(f"matrices: {name}", these(with_room(96, 64, room).unflatten(0, (4, 24)), offs), flags={"edge"})
    yield Case("matrices: matrices apart", these(with_room(4, 24 * 64, 16).unflatten(1, (24, 64)), offs))
    for kind, x in (("rows", rows), ("matrices", matrices)):
        yield Case(f"{kind}: every second offset", these(x, offs.repeat_interleave(2)[::2]), flags={"edge"})
        for name, ends in (
            ("ends that fall", [60, 20, 60, 20]),
            ("ends below 0", [-3, -3, -1, -2]),
            ("the smallest ends", [5, 5, -(2**31), -(2**31)]),
            ("a last end past the rows", [5, 65, 65, 65]),
            ("the largest ends", [2**31 - 1, -(2**31), 2**31 - 1, 2**31 - 1]),
        ):
            yield Case(f"{kind}: {name}", these(x, torch.tensor(ends, dtype=torch.int32)), flags={"edge"})
        yield from _refused(kind, x, offs)
    yield _wrong("1-D", rows[0], offs, "x has shape (256,); needs a 2-D or 3-D tensor")
    yield _wrong("a negated view", torch._neg_view(rows), offs, "x is a negated view; needs a tensor whose memory")
    yield _wrong("one end too few", matrices, offs[:3], "offs has shape (3,); needs (4,) for the 4 matrices of x")
    overlapping = matrices.as_strided((4, 12, 64), (767, 64, 1))
    yield _wrong("matrices that overlap", overlapping, offs, "needs matrices that do not overlap, stride(0) >= 768")


def _wrong(name: str, x: Tensor, offs: Tensor, match: str, error: type[Exception] = ValueError) -> Case:
    return Case(name, these(x, offs), raises=error, match=match)


def _refused(kind: str, x: Tensor, offs: Tensor) -> Iterator[Case]:
    overlapping = x.as_strided(x.shape, (*x.stride()[:-2], x.shape[-1] - 1, 1))
    yield _wrong(f"{kind}: float64", x.double(), offs, "x has dtype torch.float64; needs torch.bfloat16 or", TypeError)
    yield _wrong(f"{kind}: codes", x.to(torch.float8_e4m3fn), offs, "x has dtype torch.float8_e4m3fn", TypeError)
    yield _wrong(f"{kind}: int64 offs", x, offs.long(), "offs has dtype torch.int64; needs torch.int32", TypeError)
    yield _wrong(f"{kind}: 2-D offs", x, offs[None], "offs has shape (1, 4); needs a 1-D")
    yield _wrong(f"{kind}: offs elsewhere", x, offs.to("meta"), "needs one device")
    yield _wrong(f"{kind}: column-major", x.mT.contiguous().mT, offs, "needs row-major rows, that is stride(")
    yield _wrong(f"{kind}: every second column", x.repeat_interleave(2, -1)[..., ::2], offs, "needs row-major rows")
    yield _wrong(f"{kind}: one row repeated", x[..., :1, :].expand(x.shape), offs, "needs rows that do not overlap")
    yield _wrong(
        f"{kind}: rows that overlap", overlapping, offs, f"needs rows that do not overlap, stride({x.ndim - 2})"
    )


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    """Everything is unused. A call in which nothing is unused takes the time of a launch."""

    def args(*shape: int, groups: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, dtype=torch.bfloat16), torch.zeros(groups, dtype=torch.int32)

    for M, K in shapes.matrices:
        yield Case(f"{M}x{K}, no row used", partial(args, M, K, groups=8))
    for E, N, K in shapes.experts:
        yield Case(f"{E}x{N}x{K}, all empty", partial(args, E, N, K, groups=E))


def _shaped(choice: Choice) -> Choice:
    """The choice with its number of tokens, and, for matrices, with a matrix for each group."""
    if choice["x"] == "rows":
        return {**choice, "tokens": choice.get("rows"), "experts": None}
    groups = choice.get("groups", "three")
    tokens = 0 if nothing_in_groups(choice) else 1024
    return {**choice, "tokens": tokens, "experts": len(sizes_of(groups, tokens))}


def _possible(choice: Choice) -> bool:
    if "x" not in choice:
        return any(_possible({**choice, "x": kind}) for kind in DIMENSIONS["x"])
    if choice["x"] == "matrices" and choice.get("rest"):
        return False  # matrices have no tokens past the last group
    if choice.get("strides") == "experts apart" and (choice["x"] == "rows" or choice.get("rows") == 1):
        return False
    if choice["x"] == "matrices" and "groups" not in choice:
        return True
    choice = _shaped(choice)
    return groups_fit(choice, choice["tokens"]) and fits(choice)


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    choice = _shaped(choice)
    return made(choice), offsets(choice, choice["tokens"])


SIZES = (0, 1, 32, 161, 256, 1056, 4128)
DIMENSIONS: dict[str, Any] = {
    "x": ("rows", "matrices"),
    **GROUPS,
    "rows": SIZES,
    "cols": SIZES,
    "strides": ("none", "row-major", "rows apart", "experts apart"),
    "begins": BEGINS,
    "dtype": FLOATS,
}
# Facts that an arrangement shows only together with one size.
ALSO: list[Choice] = [{"x": "rows", "groups": "one offset repeated", "rows": 1, "rest": False}]
# Sizes and strides that no pair of the values above shows.
_PLAIN: Choice = {"x": "rows", "groups": "three", "strides": "row-major", "begins": "at 0"}
BEYOND: list[Choice] = [
    {**_PLAIN, "rows": 4128, "cols": 288},
    {**_PLAIN, "rows": 288, "cols": 4128},
    {**_PLAIN, "rows": 32, "cols": 1, "strides": "rows apart"},
    {**_PLAIN, "rows": 32, "cols": 1, "strides": "experts apart", "x": "matrices"},
]
SPACE = Space(DIMENSIONS, _make, {}, _possible, ALSO, beyond=BEYOND)
MOVES_BYTES = True
TOLD_BEFORE = ("x.experts",)  # as many as there are groups
IMPOSSIBLE = ((r"offs\.groups = [01] \| x\.strides experts apart", "there is no other matrix"),)
