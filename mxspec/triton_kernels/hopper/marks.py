"""The marks of tiles whose sums another kernel computes again: see `tiles/mx_matmul.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def mark(marks, row, column):
    """Note a tile whose sums are not all finite."""
    at = marks + 1 + 2 * gl.atomic_add(marks, 1)
    gl.store(at, row)
    gl.store(at + 1, column)
