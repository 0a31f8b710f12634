"""FP8 blocks that lie across memory, transposed in registers and not in shared memory, as in Triton's kernel.

A thread has 16 elements of each of 8 neighbouring rows, which are columns of memory. A warp is 8 threads along a block
by 4 threads across.
"""

from __future__ import annotations

import helion.language as hl
from torch import Tensor

from mxspec.formats import E4M3FN
from mxspec.helion_kernels.common.fp8_numerics import factors
from mxspec.helion_kernels.common.numerics import magnitude_bits, saturating_cast, widened
from mxspec.helion_kernels.common.runs import dimension, load_run


def turned_index(cols: int) -> tuple[Tensor, Tensor]:
    """The rows of a tile, `(4, cols // 32, 1, 8)`, and the first of every 16 elements of a block, `(1, 8, 1, 1, 1)`."""
    r = dimension(4, 0, 4) * 8 + dimension(cols // 32, 1, 4) * 32 + dimension(8, 3, 4)
    return r, dimension(8, 1, 5) * 16


def turn(
    x: Tensor, row: Tensor, k: Tensor, stride_k: int, qdata: Tensor, place: Tensor, inside: Tensor | None,
    owned: Tensor | None, left: Tensor | None, eps_bits: int, pow2: bool, runs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Quantize a tile, store its codes, and return the reciprocal factors, `(4, cols // 32, blocks, 8)`.

    - `row`: the start of a row of x.
    - `k`: the first of each 16 elements of the row that a thread has.
    - `place`: the start of a block's codes.
    - `inside`: which blocks exist. `owned`: which blocks' codes are stored.
    - `left`, if given: how many elements exist from each k on.
    - `runs`, if given: which runs of 16 elements exist. It needs `inside`.
    """
    _, warps, _, _ = row.shape
    blocks = place.shape[2]
    mask = None if inside is None else inside.unsqueeze(1)
    if mask is not None and runs is not None:
        mask = mask & runs
    if left is not None:
        left = left.expand(4, 8, warps, blocks, 8)
    wide = widened(load_run(x, k, stride_k, row.unsqueeze(1), mask, 16, left=left))
    wide = wide.reshape(4, 8, warps, blocks, 8, 16)
    return store_turned(wide, qdata, place, inside, owned, eps_bits, pow2, runs)


def store_turned(
    wide: Tensor, qdata: Tensor, place: Tensor, inside: Tensor | None, owned: Tensor | None, eps_bits: int, pow2: bool,
    runs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Quantize the fp32 values of a tile, store the codes, and return the reciprocal factors, as `turn` does."""
    _, _, warps, blocks, _, _ = wide.shape
    s, back = factors(magnitude_bits(wide).amax(-1).amax(1), eps_bits, pow2)
    codes = saturating_cast(wide * s.unsqueeze(1).unsqueeze(-1), E4M3FN)
    owned = inside if owned is None else owned if inside is None else inside & owned
    if owned is None:
        mask = None
    else:
        stored = owned.unsqueeze(1) if runs is None else owned.unsqueeze(1) & runs
        mask = stored.unsqueeze(-1).expand(4, 8, warps, blocks, 8, 16)
    place = (place.unsqueeze(1) + dimension(8, 1, 5) * 16).unsqueeze(-1) + dimension(16, 5, 6)
    hl.store(qdata, [place], codes, extra_mask=mask)
    return back
