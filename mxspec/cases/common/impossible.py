"""Pairs of facts that no call can have, whatever its op: a pattern of "one fact | the other", and the reason."""

from __future__ import annotations

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
        r"(\w+)\.cols = 1 \| \1\.strides (?:one column repeated|rows apart|columns apart|column-major)",
        "one column has no stride",
    ),
    (r"(\w+)\.values all finite \| \1\.(?:[+-]?Inf|NaN) .*", "they exclude each other"),
    (r"offs\.groups = 0 \| offs\..*", "there is no group"),
    (r"offs\.groups = 1 \| offs\.(?:inner group|last group|strides|tokens all to one) ?.*", "there is one group"),
    (r"offs\.tokens in no group \| offs\.(?:sizes|some group) .*", "no group has a token"),
    (r"offs\.sizes multiples of 128 \| offs\.some group of one token", "they exclude each other"),
    (r"offs\.strides one repeated \| offs\.(?:tokens spread|inner group .*)", "all groups but the first are empty"),
    (_DIM + r" = 0 \| offs\.(?:sizes|some group|tokens spread|tokens all to one|rest tokens).*", "there are no tokens"),
    (r"\w+\.(?:rows|cols) = 1 \| offs\.(?:sizes multiples of 128|tokens spread)", "there is one token"),
    (_DIM + r" > 4096 \| \1\.(?:rows|cols) > (?:256|1024|4096)", "more than 2.2 million elements in a tensor"),
    (r"offs\.groups > 256 \| \w+\.cols > (?:256|1024|4096)", "more than ten million elements once groups are padded"),
    (r"offs\.groups > 32 \| \w+\.cols > 4096", "more than ten million elements once groups are padded"),
    (r"(\w+)\.(?:rows|cols) = 1 \| \1\.(?:saturating block somewhere|block of zeros)", "no 32 elements in a run"),
    (r"(\w+)\.byte .* \| \1\.dtype uint8", "a byte that is no scale means nothing"),
    (r"\w*scale\.strides .* \| scale_layout = blocked", "blocked scales are one run of bytes"),
)
