"""What the Gluon kernel of the MX matmuls is given where the columns of tiles are tokens in groups, interpreted."""

import os

import pytest
import torch

from mxspec import check, dispatch
from mxspec.reference import mx_grouped_gemm as grouped
from mxspec.reference._mx_gemm import MIN_SQNR_DB, values
from mxspec.reference.from_blocked import from_blocked

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from mxspec.triton_kernels import _mx_sm90 as kernel


class Multiply:
    """The Gluon kernel in PyTorch: the tiles that the plan names."""

    def __getitem__(self, grid):
        return self

    def __call__(self, a_desc, b_desc, out_desc, out, a_scale, *rest, **options):
        plan, (M, col_tiles, K) = rest[4], (rest[7], *rest[10:12])
        a = values(a_desc.base.view(torch.float8_e4m3fn).view(-1, M, K), self.scale)  # what TMA sees
        order = torch.arange(64).view(4, 4, 2, 2).permute(1, 2, 0, 3).flatten()  # as `_values` reads codes
        a = torch.nn.functional.pad(a, (0, -K % 64)).unflatten(-1, (-1, 64))[..., order].flatten(-2)
        for group, first, end, _ in plan.view(-1, 4)[:col_tiles].tolist():
            last = min(end, first + b_desc.block_shape[0])
            rows = b_desc.base[first:last].double()
            out[:, first:last] = (
                (a[group] @ rows.T * options["UNSHIFT"] * 2 ** options["A_SHIFT"]).to(out.dtype) if group >= 0 else 0.0
            )


@pytest.mark.parametrize("tile", [tile for _, tile in kernel.TILES], ids=lambda t: str(t["BLOCK_N"]))
@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("sizes", [[130, 0, 200, 1], [300], [0, 256, 0, 270]], ids=str)
def test_tiles_of_tokens_meet_their_experts(sizes, layout, tile, monkeypatch):
    a, a_scale, b, b_scale, offs = grouped.made(sizes, 20, 136, 96, layout)
    multiply, seen = Multiply(), {}
    multiply.scale = b_scale if layout == "plain" else torch.stack([from_blocked(s, 136, 3) for s in b_scale])
    monkeypatch.setattr(kernel, "mx_gemm_sm90", multiply)
    monkeypatch.setattr(kernel, "mx_tiles", lambda *args, **options: seen.update(options))
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    out = torch.full((len(a), 136), -1.0)
    with check.poisoned(0xFF):
        kernel.mx_sm90(b, b_scale, a, a_scale, out.mT, layout, offs=offs, groups="N", **tile)
    expected = dispatch.reference("mx_grouped_gemm")(
        a, a_scale, b, b_scale, offs, out_dtype=torch.float32, scale_layout=layout
    )
    assert check.difference((out,), (expected,), MIN_SQNR_DB) is None
    assert (seen["marks"][0], seen["height"], seen["width"]) == (0, tile["BLOCK_N"], 128)
