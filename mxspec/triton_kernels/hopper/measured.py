"""For `mxspec.explain`: what was measured for calls of one size. The figures stand with the kernels."""

from __future__ import annotations

# The least and the largest size, and what was measured in between. Other sizes were not measured.
Class = tuple[int, int, str]


def of_size(size: int, classes: tuple[Class, ...]) -> str | None:
    """What was measured for a size, or None."""
    return next((said for least, most, said in classes if least <= size <= most), None)
