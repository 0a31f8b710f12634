"""mxspec.layouts: places computed by hand, the table's formulas, and every pair of layouts as a bijection."""

import sys
from itertools import permutations, product
from math import ceil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mxspec
from mxspec import layouts
from mxspec.layouts import LAYOUTS, convert, draw, listing, scale_at

E8M0 = torch.float8_e8m0fnu
UNGROUPED = [name for name, entry in LAYOUTS.items() if not entry.groups]
MULTIPLES = {  # the multiples that rows and columns are rounded up to in memory
    **dict.fromkeys(("blocked", "blocked_5d", "te_rowwise", "te_columnwise"), (128, 4)),
    "mn_major_tma_aligned": (4, 1),
    "deepgemm_packed": (4, 4),
    "cublas_128x128": (1, 4),
}


def same(a, b):
    """Whether dtype, shape, strides and bits are equal; all fp32 NaNs are equal."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.numel():
        assert [s for n, s in zip(a.shape, a.stride(), strict=True) if n > 1] == [
            s for n, s in zip(b.shape, b.stride(), strict=True) if n > 1
        ]
    if a.dtype == torch.float32:
        return torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    return torch.equal(*(t.view(torch.uint8) if t.dtype == E8M0 else t for t in (a, b)))


# The scales of a 5 x 6 matrix in each layout, by hand: (r, c) -> its place, and the number of places.
PLACES = {
    "plain": ({(0, 1): 1, (1, 0): 6, (4, 5): 29}, 30),
    "blocked": ({(0, 3): 3, (1, 0): 16, (4, 3): 67, (0, 4): 512, (4, 5): 577}, 1024),
    "blocked_5d": ({(0, 3): 3, (1, 0): 16, (4, 3): 67, (0, 4): 512, (4, 5): 577}, 1024),
    "te_rowwise": ({(0, 1): 1, (1, 0): 8, (4, 5): 37}, 1024),
    "te_columnwise": ({(1, 0): 1, (0, 1): 128, (4, 5): 644}, 1024),
    "mn_major": ({(1, 0): 1, (0, 1): 5, (4, 5): 29}, 30),
    "mn_major_tma_aligned": ({(1, 0): 1, (0, 1): 8, (4, 5): 44}, 48),
    "deepgemm_packed": ({(0, 1): 1, (0, 3): 3, (1, 0): 4, (4, 3): 19, (0, 4): 32, (4, 5): 49}, 64),
    "cublas_128x128": ({(0, 1): 1, (1, 0): 8, (4, 5): 37}, 40),
}


@pytest.mark.parametrize("layout", UNGROUPED)
def test_golden_places(layout):
    places, size = PLACES[layout]
    held = scale_at(layout, (5, 6)).tolist()
    assert len(held) == size
    assert {(r, c): held.index(6 * r + c) for r, c in places} == places


def test_golden_places_of_groups():
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    rows = scale_at("blocked_m_groups", (5, 6), offs=offs).tolist()  # a row has 8 columns; group 2 begins at row 128
    assert [rows.index(n) for n in (0, 1, 6, 12, 18, 16)] == [0, 1, 16, 1024, 1040, 1024 + 512]
    # A column has 128 rows; group 2 begins at column 4.
    columns = scale_at("blocked_k_groups", (5, 6), offs=offs).tolist()
    assert [columns.index(n) for n in (0, 6, 2, 8, 4)] == [0, 16, 512, 528, 514]
    assert 5 not in columns  # past offs[-1]


@pytest.mark.parametrize("layout", UNGROUPED)
@pytest.mark.parametrize("shape", [(1, 1), (5, 6), (4, 4), (129, 5), (260, 13)])
def test_the_formula_of_the_table_is_the_layout(layout, shape):
    R, C = shape
    rows, cols = MULTIPLES.get(layout, (1, 1))
    names = {"R": R, "C": C, "Rp": rows * ceil(R / rows), "Cp": cols * ceil(C / cols)}
    formula = compile(LAYOUTS[layout].offset, layout, "eval")
    held = torch.full((names["Rp"] * names["Cp"],), -1)
    for r, c in product(range(R), range(C)):
        held[eval(formula, names | {"r": r, "c": c})] = C * r + c
    assert torch.equal(scale_at(layout, shape), held)
    twice = scale_at(layout, (2, R, C))  # matrices follow one another
    assert torch.equal(twice, torch.cat([held, torch.where(held >= 0, held + R * C, -1)]))


def test_golden_words_of_deepgemm():
    # The kernel's own packing: v0 >> 23 | v1 >> 15 | v2 >> 7 | v3 << 1 of the fp32 bits.
    scale = torch.tensor([[2.0**-126, 2.0, 1.0, 2.0**127, 4.0]])
    bits = scale.view(torch.int32).tolist()[0]
    packed = convert(scale, to="deepgemm_packed")
    assert packed.dtype == torch.int32
    word = bits[0] >> 23 | bits[1] >> 15 | bits[2] >> 7 | bits[3] << 1
    assert [w & 0xFFFFFFFF for w in packed[0].tolist()] == [word, 129] == [0xFE7F8001, 0x81]
    assert packed.stride() == (1, 4)
    assert convert(torch.zeros(3, 5, 9, dtype=E8M0), to="deepgemm_packed").stride() == (24, 1, 8)


@pytest.mark.parametrize("layout", UNGROUPED)
def test_padding_is_zero(layout):
    stored = convert(torch.full((5, 6), 255, dtype=torch.uint8), to=layout)
    places = scale_at(layout, (5, 6)).repeat_interleave(LAYOUTS[layout].dtypes[0].itemsize)
    held = torch.tensor(stored.untyped_storage().tolist())
    assert len(held) == len(places)
    assert not held[places < 0].any()


sizes = st.integers(0, 9) | st.integers(125, 131)


@given(st.lists(st.integers(0, 3), max_size=1), sizes, st.integers(0, 9), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_every_pair_is_a_bijection(lead, rows, cols, seed):
    shape = (*lead, rows, cols)
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(E8M0)
    stored = {name: convert(plain, to=name) for name in UNGROUPED}
    for a, b in permutations(UNGROUPED, 2):
        there = convert(stored[a], a, b, shape=shape)
        # Only plain holds both dtypes, and keeps the dtype that comes.
        assert same(there, stored[b].to(there.dtype) if b == "plain" else stored[b]), (a, b)
        assert same(convert(there, b, a, shape=shape, dtype=E8M0 if a == "plain" else None), stored[a]), (b, a)


@given(st.lists(st.integers(0, 3), max_size=1), sizes, st.integers(0, 9), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_fp32_layouts_move_any_bits(lead, rows, cols, seed):
    shape = (*lead, rows, cols)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    fp32 = [name for name in UNGROUPED if torch.float32 in LAYOUTS[name].dtypes]
    for a, b in permutations(fp32, 2):
        stored = convert(convert(bits.view(torch.float32), to=a), a, b, shape=shape)
        assert torch.equal(convert(stored, b, "plain", shape=shape).view(torch.int32), bits), (a, b)


@given(st.integers(1, 140), st.lists(st.integers(0, 140), max_size=4), st.integers(0, 9), st.integers(0, 2**31))
@example(130, [5, 0, 7], 2, 0)  # two rows of tiles, so that the tiles of a group are not consecutive in the matrix
@settings(max_examples=8, deadline=None, derandomize=True)
def test_groups_are_bijections_up_to_the_last_end(other, counts, rest, seed):
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    end = sum(counts)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in (("blocked_m_groups", (end + rest, other)), ("blocked_k_groups", (other, end + rest))):
        plain = torch.randint(1, 256, shape, generator=generator, dtype=torch.uint8)
        stored = convert(plain, to=name, offs=offs)
        held = plain.clone()
        (held if name == "blocked_m_groups" else held.mT)[end:] = 0
        assert torch.equal(convert(stored, name, "plain", shape=shape, offs=offs, dtype=torch.uint8), held)
        for to in ("mn_major", "deepgemm_packed"):  # every conversion goes through plain
            moved = convert(stored, name, to, shape=shape, offs=offs)
            assert same(convert(moved, to, name, shape=shape, offs=offs, dtype=torch.uint8), stored)


def test_what_fp32_cannot_be_an_exponent_is_refused():
    for value in (3.0, 0.0, -1.0, float("inf"), 2.0**-128, 1 + 2.0**-23):
        scale = torch.ones(2, 3)
        scale[1, 2] = value
        for to in ("deepgemm_packed", "blocked"):
            with pytest.raises(ValueError, match=r"scale\[1, 2\] = .* is no power of two"):
                convert(scale, to=to)
    codes = torch.arange(256, dtype=torch.uint8).view(E8M0).view(16, 16)
    assert same(convert(convert(codes, to="mn_major"), "mn_major", "plain", dtype=E8M0), codes)


def test_quantizers_write_what_convert_gives():
    x = torch.randn(140, 256)
    plain, mn = (mxspec.fp8_quantize_1x128(x, scale_major=major)[1] for major in ("k", "mn"))
    assert same(convert(plain, to="mn_major"), mn)
    plain, blocked = (mxspec.mx_quantize(x, scale_layout=layout)[1] for layout in ("plain", "blocked"))
    assert same(convert(plain), blocked)
    offs = torch.tensor([5, 131], dtype=torch.int32)
    for axis, layout in ((-1, "blocked_m_groups"), (-2, "blocked_k_groups")):
        _, scale, _, end = mxspec.mx_quantize_groups(x, offs, axis=axis, scale_layout="plain")
        _, blocked, _, _ = mxspec.mx_quantize_groups(x, offs, axis=axis, scale_layout="blocked")
        assert same(convert(scale, to=layout, offs=end // (1 if axis == -1 else 32)), blocked)


ONES = torch.ones(4, 8)
BYTES = torch.ones(4, 8, dtype=torch.uint8)
OFFS = torch.tensor([2, 4], dtype=torch.int32)
REFUSED = [
    (BYTES, {"to": "swizzled"}, ValueError, "to = 'swizzled'; needs one of 'plain'"),
    (BYTES, {"from_": "swizzled"}, ValueError, "from_ = 'swizzled'"),
    (BYTES.int(), {}, TypeError, "plain of .* has dtype torch.int32; needs"),
    (
        torch.ones(1024),
        {"from_": "blocked", "to": "plain", "shape": (4, 8)},
        TypeError,
        "has dtype torch.float32; needs torch.float8_e8m0fnu or torch.uint8$",
    ),
    (BYTES[0], {}, ValueError, r"have shape \(8,\); needs \(R, C\) or \(E, R, C\)"),
    (BYTES.mT, {}, ValueError, r"plain of \(8, 4\), has strides \(1, 8\); needs \(4, 1\)"),
    (ONES, {"from_": "mn_major", "to": "plain"}, ValueError, r"strides \(8, 1\); needs \(1, 4\)"),
    (BYTES, {"shape": (4, 7)}, ValueError, r"has shape \(4, 8\); needs \(4, 7\)"),
    (BYTES, {"shape": (4, -8)}, ValueError, "shape = -8"),
    (
        BYTES,
        {"from_": "blocked", "to": "plain"},
        ValueError,
        r"blocked has shape .*, with padding; needs shape=",
    ),
    (BYTES, {"from_": "blocked", "to": "plain", "shape": (4, 8)}, ValueError, r"needs \(1024,\)"),
    (BYTES, {"from_": "deepgemm_packed", "to": "plain", "shape": (4, 32)}, TypeError, "needs torch.int32"),
    (
        BYTES,
        {"to": "blocked_m_groups"},
        ValueError,
        "offs = None; needs the end of each group for plain and blocked_m_groups",
    ),
    (BYTES, {"to": "blocked_m_groups", "offs": OFFS.long()}, TypeError, "offs has dtype torch.int64"),
    (BYTES, {"to": "blocked_m_groups", "offs": OFFS.flip(0)}, ValueError, r"offs\[1\] = 2 after 4"),
    (BYTES, {"to": "blocked_m_groups", "offs": OFFS + 1}, ValueError, r"offs\[-1\] = 5 is past R = 4"),
    (BYTES, {"to": "blocked_k_groups", "offs": OFFS + 5}, ValueError, r"offs\[-1\] = 9 is past C = 8"),
    (BYTES[None], {"to": "blocked_k_groups", "offs": OFFS}, ValueError, r"needs \(R, C\)"),
    (BYTES, {"offs": OFFS}, ValueError, "there are no groups in plain and blocked; needs offs = None"),
    (BYTES, {"dtype": torch.float32}, TypeError, "blocked needs one of torch.float8_e8m0fnu, torch.uint8"),
    (BYTES, {"dtype": "float32"}, TypeError, "dtype = 'float32'; blocked needs one of"),
    (BYTES, {"shape": 4}, TypeError, r"shape = 4; needs \(R, C\) or \(E, R, C\)"),
    ([1], {}, TypeError, "needs a tensor"),
]


@pytest.mark.parametrize(("scale", "how", "error", "match"), REFUSED)
def test_refused(scale, how, error, match):
    with pytest.raises(error, match=match) as raised:
        convert(scale, **how)
    assert str(raised.value).startswith("layouts.convert: ")


@pytest.mark.parametrize("function", [scale_at, listing, draw])
@pytest.mark.parametrize(
    ("layout", "shape", "how", "error", "words"),
    [
        ("swizzled", (4, 8), {}, ValueError, "layout = 'swizzled'; needs one of 'plain'"),
        ("plain", 4, {}, TypeError, "shape = 4; needs (R, C) or (E, R, C)"),
        ("plain", (4, -1), {}, ValueError, "shape = -1; needs a size >= 0"),
        ("plain", (4, 2.0), {}, TypeError, "shape = 2.0; needs an integer"),
        ("plain", (4,), {}, ValueError, "the scales in plain have shape (4,); needs (R, C) or (E, R, C)"),
        ("plain", (4, 8), {"offs": OFFS}, ValueError, "there are no groups in plain; needs offs = None"),
        (
            "plain",
            (4, 8),
            {"device": "nonsense"},
            ValueError,
            "device = 'nonsense'; needs a device that torch has here",
        ),
        ("plain", (4, 8), {"device": "meta"}, ValueError, "device = meta; needs a device whose tensors have bytes"),
        ("blocked_m_groups", (4, 8), {}, ValueError, "offs = None; needs the end of each group for blocked_m_groups"),
        ("blocked_m_groups", (4, 8), {"offs": [4]}, TypeError, "offs is a list; needs a tensor"),
        ("blocked_m_groups", (2, 4, 8), {"offs": OFFS}, ValueError, "have shape (2, 4, 8); needs (R, C)"),
    ],
)
def test_what_says_where_scales_lie_names_itself_and_what_it_needs(function, layout, shape, how, error, words):
    with pytest.raises(error) as raised:
        function(layout, shape, **how)
    assert str(raised.value).startswith(f"layouts.{function.__name__}: ")
    assert words in str(raised.value)


@pytest.mark.parametrize("function", [listing, draw])
@pytest.mark.parametrize("lines", [3, [4], [-1], ["a"], [1.0]])
def test_lines_that_a_picture_does_not_have_are_refused(function, lines):
    with pytest.raises(ValueError, match=rf"^layouts.{function.__name__}: lines = .*; needs numbers from 0 to 3, and"):
        function("plain", (4, 4), lines=lines)


def test_explain_names_all_and_each():
    assert all(f"\n{name}\n" in "\n" + layouts.explain() for name in LAYOUTS)
    assert layouts.explain("plain").splitlines()[3] == "  offset  C * r + c"


@pytest.mark.parametrize("by", ["memory", "matrix"])
def test_a_picture_has_the_text_of_its_listing(by):
    import matplotlib

    matplotlib.use("agg")
    for name in ("blocked", "deepgemm_packed", "mn_major_tma_aligned", "cublas_128x128"):
        how = {"by": by, "lines": [0, 2, None, 3]} if LAYOUTS[name].line and by == "memory" else {"by": by}
        ax = draw(name, (4, 6), text=True, **how)
        shown = [text.get_text() for text in ax.texts]
        # A text with a line break is the title of a tile.
        drawn = [words for words in shown if words not in ("", "⋮") and "\n" not in words]
        listed = [word for line in listing(name, (4, 6), **how).splitlines() for word in line.split("  ")[-1].split()]
        assert sorted(drawn) == sorted(word for word in listed if word not in (".", "...")), name
        matplotlib.pyplot.close(ax.figure)


def test_a_picture_is_coloured_by_owner():
    import matplotlib

    matplotlib.use("agg")
    owner = torch.tensor([[0, 1], [2, -1]])
    ax = draw("mn_major_tma_aligned", (2, 2), owner=owner)
    lines = [mesh.get_array().flatten().tolist() for mesh in ax.collections]
    assert lines == [[0, 2, -1, -1], [1, -1, -1, -1]]
    matplotlib.pyplot.close(ax.figure)
    with pytest.raises(ValueError, match=r"owner has shape \(1, 2\); needs \(2, 2\) as the scales"):
        draw("plain", (2, 2), owner=owner[:1])
    with pytest.raises(ValueError, match="at least one scale"):
        draw("plain", (0, 2))
    with pytest.raises(ValueError, match="by = 'rows'"):
        listing("plain", (2, 2), by="rows")


def test_without_matplotlib_a_picture_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"layouts.draw: needs matplotlib.*listing"):
        draw("plain", (2, 2))
