"""Pictures of layouts, and the same pictures as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mxspec.layouts._convert import sent
from mxspec.layouts._table import LAYOUTS
from mxspec.reference.common import checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class _Cells:
    """A picture: tiles side by side, each with lines of cells; the scale in each cell (-1: none), and its text."""

    scale: Tensor  # (tiles, lines, width)
    texts: list[list[list[str]]]
    lines: list[str]
    columns: list[str]
    titles: list[str]


def _span(held: Tensor, shape: Sequence[int]) -> str:
    """The range of rows and columns of the scales in a tile."""
    if not len(held):
        return ""
    of = held // shape[-1] % shape[-2], held % shape[-1]
    return "".join(f"\n{name} {t.min()}..{t.max()}" for name, t in zip(("rows", "columns"), of, strict=True))


def _cells(
    op: str, layout: str, shape: Sequence[int], offs: Tensor | None, by: str, device: torch.device | str | None
) -> _Cells:
    checks.choice(op, "by", by, ("memory", "matrix"))
    memory, width = sent(op, layout, shape, offs, device)
    if not prod(shape):
        raise ValueError(f"{op}: shape = {tuple(shape)}; a picture needs at least one scale")
    item = LAYOUTS[layout].dtypes[0].itemsize
    names = [",".join(map(str, place)) for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist()]
    if by == "matrix":
        place = torch.full((prod(shape),), -1)
        place[memory[memory >= 0]] = torch.arange(len(memory))[memory >= 0]
        scale = torch.where(place >= 0, torch.arange(len(place)), -1).view(1, -1, shape[-1])
        text = [str(item * at) if at >= 0 else "-" for at in place.tolist()]
        rows = [name.rsplit(",", 1)[0] for name in names[:: shape[-1]]]
        columns, lines, titles = list(map(str, range(shape[-1]))), [f"row {row}" for row in rows], [""]
    else:
        tile = 32 if LAYOUTS[layout].line == 16 else max(len(memory) // width, 1)
        each = tile * width
        used = int((memory >= 0).nonzero().max()) + 1 if (memory >= 0).any() else each
        memory = torch.nn.functional.pad(memory, (0, each), value=-1)[: -(-used // each) * each]
        scale = memory.view(-1, tile, width)
        text = [names[number] if number >= 0 else "" for number in memory.tolist()]
        columns = [f"+{item * i}" for i in range(width)]
        lines = [f"{'+' if len(scale) > 1 else 'byte '}{item * width * i}" for i in range(tile)]
        titles = [
            f"bytes {each * t}..{each * (t + 1) - 1}{_span(held[held >= 0], shape)}" for t, held in enumerate(scale)
        ]
    it = iter(text)
    texts = [[[next(it) for _ in range(scale.shape[2])] for _ in range(scale.shape[1])] for _ in range(scale.shape[0])]
    return _Cells(scale, texts, lines, columns, titles)


def _chosen(op: str, lines: Sequence[int | None] | None, count: int) -> list[int | None]:
    """The lines that the caller asked for; None is a gap."""
    if lines is None:
        return list(range(count))
    numbers = [*range(count), None]
    if not isinstance(lines, Sequence) or any(isinstance(n, float) or n not in numbers for n in lines):  # 1.0 == 1
        raise ValueError(f"{op}: lines = {lines!r}; needs numbers from 0 to {count - 1}, and None for a gap")
    return list(lines)


def listing(
    layout: str,
    shape: Sequence[int],
    *,
    by: str = "memory",
    offs: Tensor | None = None,
    lines: Sequence[int | None] | None = None,
    device: torch.device | str | None = None,
) -> str:
    """Return the picture of `draw` as text. The arguments mean the same as for `draw`.

    Example:
        >>> print(listing("mn_major_tma_aligned", (3, 2)))
        byte 0   0,0 1,0 2,0 .
        byte 16  0,1 1,1 2,1 .
        >>> print(listing("mn_major_tma_aligned", (3, 2), by="matrix"))
        row 0  0 16
        row 1  4 20
        row 2  8 24
    """
    cells = _cells("layouts.listing", layout, shape, offs, by, device)
    chosen, out = _chosen("layouts.listing", lines, len(cells.lines)), []
    for t, tile in enumerate(cells.texts):
        head = f"tile {t}, " if len(cells.texts) > 1 else ""
        heads = [head + line for line in cells.lines]
        size = max(map(len, heads))
        out += ["..." if i is None else f"{heads[i]:<{size}}  {' '.join(x or '.' for x in tile[i])}" for i in chosen]
    return "\n".join(out)


COLORS = ("#9dc3ea", "#f7c78e", "#a3d6a3", "#d9aed6", "#f0e08c")
PADDING = "#e4e4e4"


def draw(
    layout: str,
    shape: Sequence[int],
    *,
    by: str = "memory",
    offs: Tensor | None = None,
    lines: Sequence[int | None] | None = None,
    owner: Tensor | None = None,
    labels: Sequence[str] = (),
    text: bool | None = None,
    ax: Axes | None = None,
    device: torch.device | str | None = None,
) -> Axes:
    """Draw where scales lie. The function sends 1, 2, 3, ... through `convert`; `listing` gives the same as text.

    By memory, each cell is an address, and its text is the scale at that address, as `row,column`. By matrix, each cell
    is a scale, and its text is the scale's byte. Tiles of 512 bytes stand side by side, up to the last tile that holds
    a scale. Grey cells are padding.

    Args:
        layout, shape, offs, device: as for `scale_at`.
        by: `memory` or `matrix`.
        lines: the lines to draw of each tile; None in the list draws a gap. By default all lines.
        owner: integers in the shape of the scales: the owner of each scale, which gives its colour; -1 is drawn as
            padding. By default the owner is the scale's row, or, in tiled layouts, its group of 32 rows. There are five
            colours: with more than five owners, some owners have the same colour.
        labels: the names of the owners 0, 1, ..., for a legend.
        text: whether cells have a text. By default they have a text if there are at most 512 cells.
        ax: matplotlib axes to draw on; by default new axes.

    Returns:
        The matplotlib axes.
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
    except ImportError as error:
        needs = "needs matplotlib: pip install 'mxspec[notebooks]'; layouts.listing gives the same as text"
        raise ImportError(f"layouts.draw: {needs}") from error
    cells = _cells("layouts.draw", layout, shape, offs, by, device)
    chosen = _chosen("layouts.draw", lines, len(cells.lines))
    if owner is None:
        rows, band = torch.arange(shape[-2]), LAYOUTS[layout].band
        owner = (rows % 128 // band if band > 1 else rows)[:, None].expand(tuple(shape))
        labels = labels or [f"rows +{i}..{i + band - 1}" for i in range(0, 128, band) if band > 1]
    else:
        checks.dense("layouts.draw", "owner", owner)
        checks.shape("layouts.draw", "owner", owner, tuple(shape), "as the scales")
    owners = torch.cat([owner.flatten().cpu(), torch.tensor([-1])])[cells.scale]  # index -1 takes this last entry
    colour = torch.where(owners < 0, -1, owners % len(COLORS))

    tiles, _, width = cells.scale.shape
    if text is None:
        text = tiles * len(chosen) * width <= 512
    if ax is None:
        size = tiles * (width + 1) * (0.56 if text else 0.11) + 1, len(chosen) * (0.28 if text else 0.12) + 0.8
        _, ax = plt.subplots(figsize=size, dpi=80, layout="constrained")
    for t in range(tiles):
        left = t * (width + 1)
        for y, line in enumerate(chosen):
            if line is None:
                for x in range(width):
                    ax.text(left + x + 0.5, y + 0.5, "⋮", ha="center", va="center", color="#888888")
                continue
            ax.pcolormesh(
                range(left, left + width + 1), (y, y + 1), colour[t, line : line + 1],
                cmap=ListedColormap([PADDING, *COLORS]), vmin=-1, vmax=len(COLORS) - 1, edgecolor="white", lw=0.7,
            )  # fmt: skip
            for x, words in enumerate(cells.texts[t][line] if text else ()):
                ax.text(left + x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=8)
        if tiles > 1:
            ax.text(left + width / 2, -0.4, cells.titles[t], ha="center", fontsize=8)
    step = 1 if text else 4
    ax.set_xticks([x + 0.5 for x in range(0, width, step)], cells.columns[::step])
    ax.set_yticks(
        [y + 0.5 for y in range(0, len(chosen), step)],
        ["" if line is None else cells.lines[line] for line in chosen[::step]],
    )
    ax.set_xlim(0, tiles * (width + 1) - 1)
    ax.set_ylim(len(chosen), 0)
    named = [(COLORS[i % len(COLORS)], name) for i, name in enumerate(labels) if (owners == i).any()]
    if named:
        named += [(PADDING, "padding")] if (owners < 0).any() else []
        patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color, _ in named]
        ax.legend(
            patches, [name for _, name in named], loc="upper center", bbox_to_anchor=(0.5, -0.06),
            ncols=len(named), frameon=False, fontsize=8,
        )  # fmt: skip
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    return ax
