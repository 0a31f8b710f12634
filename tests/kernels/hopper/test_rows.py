"""How TMA reads an operand that has fewer rows than a tile."""

import pytest

from mxspec.machine_code.fake_gpu import unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.hopper.rows import rows_to_read


@pytest.mark.parametrize("boxes", [1, 4])
@pytest.mark.parametrize("tile", [32, 64, 128, 256])
def test_a_tile_has_few_boxes_and_all_rows_of_the_operand(tile, boxes):
    for M in range(1, 2 * tile + 1):
        rows, box = rows_to_read(M, tile, boxes)
        assert min(M, tile) <= rows <= tile
        assert rows % box == 0
        assert rows // box <= boxes
        assert box & (box - 1) == 0
        assert box >= 16


@pytest.mark.parametrize(
    ("M", "found"),
    [(1, (16, 16)), (40, (48, 16)), (64, (64, 64)), (100, (128, 128)), (128, (128, 128)), (4100, (128, 128))],
)
def test_the_rows_and_the_box(M, found):
    assert rows_to_read(M, 128) == found
