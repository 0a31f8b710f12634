"""Pairs of facts that no call of any op can have: a pattern of "one fact | the other fact", and the reason."""

from __future__ import annotations

import re

_DIM = r"(\w+)\.(?:rows|cols|experts|length)"
_VALUE = (
    r"\.(?:[+-]?(?:NaN|Inf)|-0|subnormal|largest|negative|tie of e\w+|values|saturating block|block|row of zeros"
    r"|byte \d+)"
)

IMPOSSIBLE: tuple[tuple[str, str], ...] = (
    (_DIM + r" = 0 \| \1\.(?:strides|begins|sign) .*", "an empty tensor has no place in memory"),
    (_DIM + r" = 0 \| \1" + _VALUE + " .*", "an empty tensor has no values"),
    (r"(\w+)\.rank 2 \| \1\.experts .*", "a matrix has no experts"),
    (r"(\w+)\.rank 2 \| \1\.strides (?:one expert repeated|experts .*)", "a matrix has no experts"),
    (r"(\w+)\.experts = 1 \| \1\.strides (?:one expert repeated|experts .*)", "one expert has no stride"),
    (
        r"(\w+)\.rows = 1 \| \1\.strides (?:one row repeated|rows apart|column-major|experts .*)",
        "one row has no stride",
    ),
    (
        r"(\w+)\.cols = 1 \| \1\.strides (?:one column repeated|columns apart|column-major)",
        "one column has no stride",
    ),
    (r"(\w+)\.values all finite \| \1\.(?:[+-]?Inf|NaN) .*", "they exclude each other"),
    (r"(\w+)\.dtype float8_e4m3fn \| \1\.[+-]Inf .*", "e4m3fn has no Inf"),
    (r"(\w+)\.rows = 1 \| (?:\1_)?scale\.blocks .*", "the scale of one row always belongs to that row"),
    (r"offs\.groups = 0 \| offs\..*", "there is no group"),
    (r"offs\.groups = 1 \| offs\.(?:inner group|strides|tokens all to one) ?.*", "there is one group"),
    (r"offs\.tokens in no group \| offs\.(?:sizes|some group) .*", "no group has a token"),
    (r"offs\.sizes multiples of 128 \| offs\.some group of one token", "they exclude each other"),
    (r"offs\.strides one repeated \| offs\.tokens spread", "all groups but the first are empty"),
    (_DIM + r" > 4096 \| \1\.(?:rows|cols) > (?:1024|4096)", "more than 2.2 million elements in a tensor"),
    (r"(\w+)\.byte .* \| \1\.dtype uint8", "a byte that is no scale means nothing"),
)

# For ops that pad every group to 128 tokens.
PADDED_GROUPS = (
    (r"offs\.groups > 256 \| \w+\.cols > (?:1024|4096)", "more than 16 million elements once groups are padded"),
    (r"offs\.groups > 32 \| \w+\.cols > 4096", "more than 16 million elements once groups are padded"),
)


def no_tokens(size: str) -> tuple[tuple[str, str], ...]:
    """The pairs for an op whose size `size` counts the tokens that are divided into groups."""
    size = re.escape(size)
    return (
        (size + r" = 0 \| offs\.(?:sizes|some group|tokens spread|tokens all|rest tokens).*", "there are no tokens"),
        (size + r" = 1 \| offs\.sizes multiples of 128", "there is one token"),
    )


def of_blocks(size: int) -> tuple[tuple[str, str], ...]:
    """What an op with an axis leaves out: sizes along it are multiples of the size of a block."""
    return (
        (r"axis (?:= -1|not given) \| x\.cols (?:= 1|odd)", f"K is a multiple of {size}"),
        (r"axis = -2 \| x\.rows (?:= 1|odd)", f"M is a multiple of {size}"),
        (r"x\.cols (?:= 1|odd) \| x\.rows (?:= 1|odd)", f"rows or columns are a multiple of {size}"),
    )
