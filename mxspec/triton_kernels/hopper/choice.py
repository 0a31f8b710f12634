"""The choice of a tile for Hopper's matmuls of bfloat16 values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The cost of one element of the output in a tile, by measured times (benchmarks/results/decisions.md), and the tile.
Choice = tuple[float, dict[str, Any]]


def cheapest(
    choices: Sequence[Choice], M: int, N: int, processors: int, E: int = 1, grouped: str = ""
) -> dict[str, Any]:
    """The tile with the least estimated cost: the number of waves, times the cost of a tile.

    A wave is as many tiles as there are processors.

    Groups of rows ("M") or of columns ("N") may end inside a tile, so the last tile of each counts as half empty. Each
    group of columns has a tile, as far as there are columns. The device alone knows how many tiles groups have, so the
    tiles of groups count as 0.4 of a wave more than they fill.
    """

    def cost(choice: Choice) -> float:
        of_element, tile = choice
        BLOCK_M, BLOCK_N = tile.get("BLOCK_M", 128), tile["BLOCK_N"]
        rows, columns = -(-M // BLOCK_M), -(-N // BLOCK_N)
        if grouped == "M":
            tiles = (rows + E // 2) * columns
        elif grouped == "N":
            tiles = rows * max(columns + E // 2, min(E, N))
        else:
            tiles = rows * columns * E
        waves = max(1, tiles / processors + 0.4) if grouped in ("M", "N") else -(-tiles // processors)
        return waves * BLOCK_M * BLOCK_N * of_element

    return min(choices, key=cost)[1]
