"""The bits of a token's row do not depend on where it lies: not on M, on its group's offset, or on its neighbours.

Expert parallelism is bit-equal to one process only with such kernels, because a rank has other rows than one process.
The gradient of an expert's weights must not depend on other groups either. On a GPU, the places below also change the
tiles and the kernels that a call takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import mxspec
from mxspec import dispatch
from tests.helpers import DEVICE, ends, runs_kernels

ON_GPU = DEVICE.type == "cuda"
ROWS = 40  # the rows that are compared, in group 1 of 3
K, N = (1024, 512) if ON_GPU else (256, 48)


class Place(NamedTuple):
    """How many other rows lie around the compared rows."""

    before: int  # in group 0
    left: int  # in the group of the compared rows
    right: int
    after: int  # in group 2
    special: bool = False  # the other rows have NaN, Inf, zeros, and very large and very small numbers

    @property
    def offs(self) -> Tensor:
        end = self.before + self.left + ROWS + self.right
        return ends(self.before, end, end + self.after).to(DEVICE)

    @property
    def at(self) -> int:
        """The first compared row."""
        return self.before + self.left

    def rows(self, width: int, seed: int = 0) -> Tensor:
        """All rows, in bfloat16. The compared rows are the same at every place."""
        mine = _random(ROWS, width, seed=seed)
        above, below = (_random(n, width, seed=seed + 10 + n) for n in (self.at, self.right + self.after))
        if self.special:
            for other in (above, below):
                for i, value in enumerate((float("nan"), float("inf"), 0.0, 2.0**100, 2.0**-100)):
                    other[i::7] *= value
        return torch.cat([above, mine, below]).to(DEVICE)


def _random(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


ALONE = Place(0, 0, 0, 0)
# The rows move inside a tile, over the edge of a tile and into another tile. M takes sizes that choose other tiles.
PLACES = [Place(0, 0, 0, 24), Place(0, 24, 0, 0), Place(5, 3, 16, 0), Place(100, 0, 3, 1), Place(129, 1, 130, 60)]
SPECIAL = [place._replace(special=True) for place in PLACES[2:]]
if ON_GPU:
    PLACES += [Place(64, 0, 24, 0), Place(1000, 17, 999, 3000), Place(0, 5000, 40, 1), Place(20_000, 129, 4000, 9000)]


def weights() -> Tensor:
    """The weights of three experts."""
    return torch.stack([_random(N, K, seed=100 + expert) for expert in range(3)]).to(DEVICE)


Run = Callable[..., list[Tensor]]  # takes a place and a backend, and returns what must not depend on the place


def _amax() -> Tensor:
    return torch.tensor(4.0, device=DEVICE)


def nvfp4_values(x: Tensor) -> Tensor:
    """The values of NVFP4 codes, in bfloat16 and in units of the tensor scale."""
    amax = _amax().repeat(len(x)) if x.ndim == 3 else _amax()
    q, scale, _ = mxspec.nvfp4_quantize(x, amax, backend="reference")
    return mxspec.nvfp4_dequantize(q, scale, torch.ones_like(amax), backend="reference")


def _of_rows(*results: Tensor, at: int) -> list[Tensor]:
    return [t[at : at + ROWS] for t in results]


def fp8_gemm(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.fp8_quantize_1x128(place.rows(K), scale_major="mn", backend="reference")
    b = mxspec.fp8_quantize_128x128(weights()[1], backend="reference")
    return _of_rows(mxspec.fp8_gemm(*a, *b, backend=backend), at=place.at)


def fp8_gemm_of_rows(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.fp8_quantize_1x128(place.rows(K), scale_major="mn", backend="reference")
    b = mxspec.fp8_quantize_1x128(weights()[1], scale_major="mn", backend="reference")
    return _of_rows(mxspec.fp8_gemm(*a, *b, backend=backend), at=place.at)


def fp8_gemm_(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.fp8_quantize_1x128(place.rows(K), scale_major="mn", backend="reference")
    b = mxspec.fp8_quantize_128x128(weights()[1], backend="reference")
    acc = place.rows(N, seed=70).float()
    mxspec.fp8_gemm_(acc, *a, *b, backend=backend)
    return _of_rows(acc, at=place.at)


def fp8_grouped_gemm(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.fp8_quantize_1x128(place.rows(K), scale_major="mn", backend="reference")
    b = mxspec.fp8_quantize_128x128(weights(), backend="reference")
    return _of_rows(mxspec.fp8_grouped_gemm(*a, *b, place.offs, backend=backend), at=place.at)


def as_messages(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers, each row's scales behind its codes, as rows come over the wire of expert parallelism."""
    message = torch.cat([codes.view(torch.uint8), scale.contiguous().view(torch.uint8)], 1)
    return message[:, :K].view(codes.dtype), message[:, K:].view(scale.dtype)


def fp8_grouped_gemm_of_messages(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.fp8_quantize_1x128(place.rows(K), scale_major="mn", backend="reference")
    b = mxspec.fp8_quantize_128x128(weights(), backend="reference")
    a = a if place == ALONE else as_messages(*a)
    return _of_rows(mxspec.fp8_grouped_gemm(*a, *b, place.offs, backend=backend), at=place.at)


def mx_gemm(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.mx_quantize(place.rows(K), backend="reference")
    b = mxspec.mx_quantize(weights()[1], backend="reference")
    return _of_rows(mxspec.mx_gemm(*a, *b, scale_layout="plain", backend=backend), at=place.at)


def mx_gemm_by_e2m1(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.mx_quantize(place.rows(K), backend="reference")
    b = mxspec.mx_quantize(weights()[1], elem_dtype=torch.float4_e2m1fn_x2, backend="reference")
    return _of_rows(mxspec.mx_gemm(*a, *b, backend=backend), at=place.at)


def mx_gemm_of_bf16_by_e2m1(place: Place, backend: str) -> list[Tensor]:
    b = mxspec.mx_quantize(weights()[1], elem_dtype=torch.float4_e2m1fn_x2, backend="reference")
    return _of_rows(mxspec.mx_gemm(place.rows(K), None, *b, backend=backend), at=place.at)


def mx_grouped_gemm_plain(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.mx_quantize(place.rows(K), backend="reference")
    b = mxspec.mx_quantize(weights(), backend="reference")
    return _of_rows(mxspec.mx_grouped_gemm(*a, *b, place.offs, scale_layout="plain", backend=backend), at=place.at)


def mx_grouped_gemm_blocked(place: Place, backend: str) -> list[Tensor]:
    """As the layers call it: each group is padded to whole tiles of scales."""
    a, a_scale, start, end = mxspec.mx_quantize_groups(place.rows(K), place.offs, backend="reference")
    b = mxspec.mx_quantize(weights(), scale_layout="blocked", backend="reference")
    out = mxspec.mx_grouped_gemm(a, a_scale, *b, end, backend=backend)
    return _of_rows(out, at=int(start[1]) + place.left)


def mx_grouped_gemm_by_e2m1(place: Place, backend: str) -> list[Tensor]:
    a = mxspec.mx_quantize(place.rows(K), backend="reference")
    b = mxspec.mx_quantize(weights(), elem_dtype=torch.float4_e2m1fn_x2, backend="reference")
    return _of_rows(mxspec.mx_grouped_gemm(*a, *b, place.offs, scale_layout="plain", backend=backend), at=place.at)


def mx_grouped_gemm_of_bf16_by_e2m1(place: Place, backend: str) -> list[Tensor]:
    b = mxspec.mx_quantize(weights(), elem_dtype=torch.float4_e2m1fn_x2, scale_layout="blocked", backend="reference")
    return _of_rows(mxspec.mx_grouped_gemm(place.rows(K), None, *b, place.offs, backend=backend), at=place.at)


def nvfp4_gemm(place: Place, backend: str) -> list[Tensor]:
    """The amax is given, because the other rows would change it, and with it the codes."""
    a = mxspec.nvfp4_quantize(place.rows(K), _amax(), backend="reference")
    b = mxspec.nvfp4_quantize(weights()[1], backend="reference")
    return _of_rows(mxspec.nvfp4_gemm(*a, *b, backend=backend), at=place.at)


def nvfp4_gemm_of_values(place: Place, backend: str) -> list[Tensor]:
    b = mxspec.nvfp4_quantize(weights()[1], backend="reference")
    of = nvfp4_values(place.rows(K)), None, _amax(), *b
    return _of_rows(mxspec.nvfp4_gemm(*of, backend=backend), at=place.at)


def nvfp4_grouped_gemm(place: Place, backend: str) -> list[Tensor]:
    a, a_scale, number = mxspec.nvfp4_quantize(place.rows(K), _amax(), backend="reference")
    b = mxspec.nvfp4_quantize(weights(), backend="reference")
    of = a, a_scale, number.repeat(3), *b, place.offs
    return _of_rows(mxspec.nvfp4_grouped_gemm(*of, scale_layout="plain", backend=backend), at=place.at)


def nvfp4_grouped_gemm_of_values(place: Place, backend: str) -> list[Tensor]:
    a, b, number = nvfp4_values(place.rows(K)), nvfp4_values(weights()), _amax().repeat(3)
    return _of_rows(
        mxspec.nvfp4_grouped_gemm(a, None, number, b, None, number, place.offs, backend=backend), at=place.at
    )


def mx_quantize(place: Place, backend: str) -> list[Tensor]:
    return _of_rows(*mxspec.mx_quantize(place.rows(K), backend=backend), at=place.at)


def fp8_quantize_1x128(place: Place, backend: str) -> list[Tensor]:
    return _of_rows(*mxspec.fp8_quantize_1x128(place.rows(K), backend=backend), at=place.at)


def mx_quantize_groups_rows(place: Place, backend: str) -> list[Tensor]:
    options = {"scale_layout": "plain", "backend": backend}
    *codes, start, _ = mxspec.mx_quantize_groups(place.rows(K), place.offs, **options)
    return _of_rows(*codes, at=int(start[1]) + place.left)


def mx_fake_quantize_rowcol_groups_rows(place: Place, backend: str) -> list[Tensor]:
    rows, _ = mxspec.mx_fake_quantize_rowcol_groups(place.rows(K), place.offs, backend=backend)
    return _of_rows(rows, at=place.at)


def fp8_quantize_rowcol_groups_rows(place: Place, backend: str) -> list[Tensor]:
    rows, scale, *_ = mxspec.fp8_quantize_rowcol_groups(place.rows(K), place.offs, backend=backend)
    return _of_rows(rows, scale, at=place.at)


def swiglu_fp8_quantize_rowcol_groups_rows(place: Place, backend: str) -> list[Tensor]:
    rows, scale, *_ = mxspec.swiglu_fp8_quantize_rowcol_groups(place.rows(2 * K), place.offs, backend=backend)
    return _of_rows(rows, scale, at=place.at)


def swiglu_backward_fp8_quantize_rowcol_groups_rows(place: Place, backend: str) -> list[Tensor]:
    of = place.rows(2 * K), place.rows(K, seed=60), place.offs
    rows, scale, *_ = mxspec.swiglu_backward_fp8_quantize_rowcol_groups(*of, backend=backend)
    return _of_rows(rows, scale, at=place.at)


def _bias() -> Tensor:
    """The bias of three experts."""
    return _random(3, 2 * K, seed=200).to(DEVICE)


def clamped_swiglu_fp8_quantize_rowcol_groups_rows(place: Place, backend: str) -> list[Tensor]:
    of = place.rows(2 * K), _bias(), place.offs
    rows, scale, *_ = mxspec.clamped_swiglu_fp8_quantize_rowcol_groups(*of, backend=backend)
    return _of_rows(rows, scale, at=place.at)


def clamped_swiglu_backward_fp8_quantize_rowcol_groups_rows(place: Place, backend: str) -> list[Tensor]:
    of = place.rows(2 * K), _bias(), place.rows(K, seed=60), place.offs
    rows, scale, *_ = mxspec.clamped_swiglu_backward_fp8_quantize_rowcol_groups(*of, backend=backend)
    return _of_rows(rows, scale, at=place.at)


OF_ROWS: list[Run] = [
    swiglu_backward_fp8_quantize_rowcol_groups_rows, clamped_swiglu_fp8_quantize_rowcol_groups_rows,
    clamped_swiglu_backward_fp8_quantize_rowcol_groups_rows, fp8_grouped_gemm_of_messages,
    fp8_gemm, fp8_gemm_of_rows, fp8_grouped_gemm, mx_gemm, mx_grouped_gemm_plain, mx_grouped_gemm_blocked, mx_quantize,
    mx_gemm_by_e2m1, mx_gemm_of_bf16_by_e2m1, mx_grouped_gemm_by_e2m1, mx_grouped_gemm_of_bf16_by_e2m1,
    nvfp4_gemm, nvfp4_gemm_of_values, nvfp4_grouped_gemm, nvfp4_grouped_gemm_of_values,
    fp8_quantize_1x128, mx_quantize_groups_rows, mx_fake_quantize_rowcol_groups_rows, fp8_quantize_rowcol_groups_rows,
    swiglu_fp8_quantize_rowcol_groups_rows,
]  # fmt: skip
if ON_GPU:  # the interpreters multiply by numpy: a row's fp32 sums depend on its tile, which a result in bf16 hides
    OF_ROWS.append(fp8_gemm_)


# --- what belongs to a whole group: its codes along the tokens, and the gradient of its weights ---------------------


def _columns_of_fp8(codes: Tensor, scale: Tensor, start: Tensor, end: Tensor) -> list[Tensor]:
    begin, stop = int(start[1]), int(end[1])
    D = codes.shape[0]
    return [codes.flatten()[D * begin : D * stop], scale[:, begin // 128 : stop // 128]]


def fp8_quantize_k_groups(place: Place, backend: str) -> list[Tensor]:
    return _columns_of_fp8(*mxspec.fp8_quantize_k_groups(place.rows(K), place.offs, backend=backend))


def fp8_requantize_k_groups(place: Place, backend: str) -> list[Tensor]:
    codes = mxspec.fp8_quantize_1x128(place.rows(K), scale_format="pow2", backend="reference")
    codes = codes if place == ALONE else as_messages(*codes)
    return _columns_of_fp8(*mxspec.fp8_requantize_k_groups(*codes, place.offs, scale_format="pow2", backend=backend))


def mx_requantize_groups(place: Place, backend: str) -> list[Tensor]:
    codes = mxspec.mx_quantize(place.rows(K), backend="reference")
    codes = codes if place == ALONE else as_messages(*codes)
    options = {"scale_layout": "plain", "backend": backend}
    codes, scale, start, end = mxspec.mx_requantize_groups(*codes, place.offs, **options)
    begin, stop = int(start[1]), int(end[1])
    return [codes[begin:stop], scale[:, begin // 32 : stop // 32]]


def swiglu_backward_fp8_quantize_rowcol_groups_columns(place: Place, backend: str) -> list[Tensor]:
    of = place.rows(2 * K), place.rows(K, seed=60), place.offs
    _, _, *columns = mxspec.swiglu_backward_fp8_quantize_rowcol_groups(*of, backend=backend)
    return _columns_of_fp8(*columns)


def fp8_quantize_rowcol_groups_columns(place: Place, backend: str) -> list[Tensor]:
    _, _, *columns = mxspec.fp8_quantize_rowcol_groups(place.rows(K), place.offs, backend=backend)
    return _columns_of_fp8(*columns)


def swiglu_fp8_quantize_rowcol_groups_columns(place: Place, backend: str) -> list[Tensor]:
    _, _, *columns = mxspec.swiglu_fp8_quantize_rowcol_groups(place.rows(2 * K), place.offs, backend=backend)
    return _columns_of_fp8(*columns)


def mx_quantize_groups_columns(place: Place, backend: str) -> list[Tensor]:
    options = {"axis": -2, "scale_layout": "plain", "backend": backend}
    codes, scale, start, end = mxspec.mx_quantize_groups(place.rows(K), place.offs, **options)
    begin, stop = int(start[1]), int(end[1])
    return [codes[begin:stop], scale[:, begin // 32 : stop // 32]]


def mx_fake_quantize_rowcol_groups_columns(place: Place, backend: str) -> list[Tensor]:
    _, columns = mxspec.mx_fake_quantize_rowcol_groups(place.rows(K), place.offs, backend=backend)
    return [columns[place.before : place.before + ROWS]]


def _fp8_features(place: Place) -> tuple[list[Tensor], Tensor]:
    made = [
        mxspec.fp8_quantize_k_groups(place.rows(width, seed), place.offs, backend="reference")
        for width, seed in ((N, 0), (K, 50))
    ]
    return [t for each in made for t in each[:2]], made[0][3]


def fp8_grouped_gemm_wgrad(place: Place, backend: str) -> list[Tensor]:
    features, end = _fp8_features(place)
    return [mxspec.fp8_grouped_gemm_wgrad(*features, end, backend=backend)[1]]


def fp8_grouped_gemm_wgrad_(place: Place, backend: str) -> list[Tensor]:
    features, end = _fp8_features(place)
    acc = torch.linspace(-1, 1, N * K, device=DEVICE).view(1, N, K).repeat(3, 1, 1)
    mxspec.fp8_grouped_gemm_wgrad_(acc, *features, end, backend=backend)
    return [acc[1]]


def mx_grouped_gemm_wgrad(place: Place, backend: str) -> list[Tensor]:
    options = {"axis": -2, "backend": "reference"}
    made = [
        mxspec.mx_quantize_groups(place.rows(width, seed), place.offs, **options) for width, seed in ((N, 0), (K, 50))
    ]
    features = [t for each in made for t in each[:2]]
    return [mxspec.mx_grouped_gemm_wgrad(*features, made[0][3], backend=backend)[1]]


def _column_codes(place: Place, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes along the tokens of each group, padded to whole blocks of 16 tokens, and their scales along the tokens."""
    parts = [
        mxspec.nvfp4_quantize(
            torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16)), _amax(), axis=-2, backend="reference"
        )
        for x in place.rows(width, seed).tensor_split(place.offs.tolist()[:-1])
    ]
    codes = torch.cat([q.mT.contiguous().view(torch.uint8) for q, _, _ in parts], -1)
    scale = torch.cat([s.view(torch.uint8) for _, s, _ in parts], -1)
    return codes.view(torch.float4_e2m1fn_x2).mT, scale.view(torch.float8_e4m3fn)


def nvfp4_grouped_gemm_wgrad(place: Place, backend: str) -> list[Tensor]:
    number = _amax().repeat(3)
    dy, x = (_column_codes(place, width, seed) for width, seed in ((N, 0), (K, 50)))
    padded = ends(*((place.offs.diff(prepend=place.offs.new_zeros(1)) + 15) // 16 * 16).cumsum(0).tolist()).to(DEVICE)
    of = *dy, number, *x, number, padded
    return [mxspec.nvfp4_grouped_gemm_wgrad(*of, scale_layout="plain", backend=backend)[1]]


def nvfp4_grouped_gemm_wgrad_of_values(place: Place, backend: str) -> list[Tensor]:
    number = _amax().repeat(3)
    dy, x = (nvfp4_values(place.rows(width, seed)) for width, seed in ((N, 0), (K, 50)))
    of = dy, None, number, x, None, number, place.offs
    return [mxspec.nvfp4_grouped_gemm_wgrad(*of, backend=backend)[1]]


OF_GROUPS: list[Run] = [
    fp8_requantize_k_groups, mx_requantize_groups, swiglu_backward_fp8_quantize_rowcol_groups_columns,
    fp8_quantize_k_groups, fp8_quantize_rowcol_groups_columns, swiglu_fp8_quantize_rowcol_groups_columns,
    mx_quantize_groups_columns, mx_fake_quantize_rowcol_groups_columns, fp8_grouped_gemm_wgrad, fp8_grouped_gemm_wgrad_,
    mx_grouped_gemm_wgrad, nvfp4_grouped_gemm_wgrad, nvfp4_grouped_gemm_wgrad_of_values,
]  # fmt: skip


# --- the tests ----------------------------------------------------------------------------------------------------


def backends_of(run: Run) -> Iterator[str]:
    name = run.__name__
    op = max((op for op in dispatch.ops() if name.startswith(op)), key=len)
    # On a GPU, cuBLAS sums for the reference, in float64 and in an order that depends on the number of rows.
    sums_of_torch = ON_GPU and dispatch.reference(op).spec.min_sqnr_db != math.inf
    for backend in ("reference", "triton", "helion"):
        if not sums_of_torch if backend == "reference" else dispatch.has_kernel(op, backend):
            yield backend


def each_kernel(runs: list[Run]) -> pytest.MarkDecorator:
    pairs = [
        pytest.param(run, b, marks=[runs_kernels] if b != "reference" else [], id=f"{run.__name__}-{b}")
        for run in runs
        for b in backends_of(run)
    ]
    return pytest.mark.parametrize(("run", "backend"), pairs)


def assert_same_everywhere(run: Run, backend: str, places: list[Place]) -> None:
    expected = run(ALONE, backend)
    assert all(t.numel() for t in expected)
    for place in places:
        got = run(place, backend)
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.shape == theirs.shape
            bits = [t.reshape(-1).view(torch.uint8).view(len(t), -1) for t in (mine, theirs)]
            changed = (bits[0] != bits[1]).any(1)
            assert not changed.any(), f"{place}: {int(changed.sum())} of {len(changed)} rows have other bits"


@pytest.mark.turns(12)
@each_kernel(OF_ROWS)
def test_a_row_keeps_its_bits_at_every_place(run, backend):
    assert_same_everywhere(run, backend, PLACES)


@pytest.mark.turns(12)
@each_kernel(OF_ROWS)
def test_a_row_keeps_its_bits_beside_special_numbers(run, backend):
    """The kernels of mx_gemm for Hopper compute some tiles again if they hold such numbers."""
    assert_same_everywhere(run, backend, SPECIAL)


@pytest.mark.turns(12)
@each_kernel(OF_GROUPS)
def test_a_group_keeps_its_bits_at_every_place(run, backend):
    """The group has the compared rows alone, because its blocks and sums run along the tokens."""
    places = [place._replace(before=place.before + place.left, left=0, right=0) for place in [*PLACES, *SPECIAL]]
    assert_same_everywhere(run, backend, places)


def test_a_row_that_depends_on_its_neighbours_is_found():
    def of_columns(place: Place, backend: str) -> list[Tensor]:
        x = place.rows(K)
        return _of_rows(x / x.abs().amax(0), at=place.at)

    with pytest.raises(AssertionError, match=r"40 of 40 rows have other bits"):
        assert_same_everywhere(of_columns, "reference", PLACES)
