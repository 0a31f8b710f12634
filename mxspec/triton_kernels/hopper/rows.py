"""How TMA reads an operand that has fewer rows than a tile.

TMA takes longer for rows past the end of an operand than for rows of it, so a load leaves most of them out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxspec.triton_kernels.hopper.names import async_load


def rows_to_read(rows: int, tile: int, boxes: int = 4) -> tuple[int, int]:
    """How many rows of a tile TMA reads, and how many at once. The operand has `rows` rows.

    An operand with fewer rows than a tile is read in up to `boxes` boxes, of at least 16 rows.
    """
    if rows >= tile:
        return tile, tile
    box = 16
    while rows > boxes * box:
        box *= 2
    read = -(-rows // box) * box
    return read, read & -read


@gluon.jit
def load_rows(desc, row, k, bar, tile, ROWS: gl.constexpr):
    """Let TMA read the first ROWS rows of a tile of an operand.

    The tensor cores multiply the stale contents of the tile's other rows, too, and the results are not used.
    """
    BOX: gl.constexpr = desc.block_shape[0]
    for down in gl.static_range(0, ROWS, BOX):
        async_load(desc, [row + down, k], bar, tile.slice(down, BOX))
