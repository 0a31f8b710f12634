"""Token groups: where each group begins and ends, and which token each padded row holds.

The tokens of group g are the rows t with `offs[g-1] <= t < offs[g]`; group 0 begins at row 0. After padding they begin
at row `start[g]`. The functions compute everything from these tensors on the device and read no value on the host. The
index of a row's group is the number of groups that end at or before the row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mxspec.formats import INT_OF_BYTES


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def padded_rows(M: int, G: int, alignment: int) -> int:
    """A number of rows that is enough for M tokens in G padded groups of any sizes. It needs no value of the device."""
    return round_up(M + G * alignment, alignment)


def each_group(offs: Tensor) -> range:
    """The indices of all groups; for tensors without values only the first.

    A fake or meta tensor has a shape but no values. One group is enough for it, because that group shows the shapes of
    all groups. A loop over 128 groups of fake tensors is slow (see benchmarks/results/decisions.md).
    """
    G = offs.shape[0]
    return range(min(G, 1) if offs.is_meta or isinstance(offs, FakeTensor) else G)


def each_group_with_tokens(offs: Tensor, group: Tensor) -> Iterable[int]:
    """As `each_group`, but on a CPU without groups that have no tokens. group: `group_of_tokens` of offs.

    128 experts have weights of gigabytes, and few tokens go to few experts.
    """
    if type(offs) is not Tensor or offs.device.type != "cpu":  # reading a GPU's values would wait for it
        return each_group(offs)
    return [e for e in group.unique().tolist() if e < offs.shape[0]]


def bounds(offs: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """Return `start` and `end` of each group, int32, when every group is padded to a multiple of `alignment`."""
    tokens = offs - first_tokens(offs)[:-1]
    padded = (tokens + (alignment - 1)) // alignment * alignment
    end = padded.cumsum(0, dtype=torch.int32)
    return end - padded, end


def first_tokens(offs: Tensor) -> Tensor:
    """Return the first token of each group, then the first token after all groups; `G + 1` entries."""
    return torch.cat([offs.new_zeros(1), offs])


def group_of_tokens(offs: Tensor, M: int) -> Tensor:
    """Return the group of each token. A token that belongs to no group gets the number of groups."""
    token = torch.arange(M, dtype=torch.int32, device=offs.device)
    return torch.searchsorted(offs.contiguous(), token, right=True)


def rows_of_tokens(offs: Tensor, start: Tensor, M: int) -> Tensor:
    """Return the row of each token, int32, if group g begins at row `start[g]`; -1 for tokens without a group."""
    token = torch.arange(M, dtype=torch.int32, device=offs.device)
    g = group_of_tokens(offs, M)
    first, begins = first_tokens(offs)[g], torch.cat([start, start.new_zeros(1)])[g]
    return torch.where(g < offs.shape[0], begins + token - first, -1)


def flat_places(end: Tensor, D: int, R: int) -> Tensor:
    """Return where element `(d, t)` of a `(D, R)` matrix lies when the columns of each group form their own matrix.

    Each of these matrices is row-major, and they follow one another. The columns after the last end form one more
    matrix. An `end` out of order gives places without meaning, but all of them lie within the `D * R` elements.
    """
    begin = first_tokens(end).to(torch.int64)
    width = torch.cat([end, end.new_full((1,), R)]) - begin
    group = group_of_tokens(end, R)
    places = torch.arange(D, device=end.device)[:, None] * width[group]  # (D, R)
    places += D * begin[group] + torch.arange(R, device=end.device) - begin[group]
    return places.clamp_(0, max(D * R - 1, 0))


def take_rows(x: Tensor, source: Tensor) -> Tensor:
    """Return a matrix whose row i is row `source[i]` of x, or zeros where x has no such row."""
    rows, K = x.shape
    # the memory of a negated view holds the numbers with the opposite sign
    bits = x.resolve_neg().contiguous().view(INT_OF_BYTES[x.element_size()])
    source = torch.where((source >= 0) & (source < rows), source, rows)
    return torch.cat([bits, bits.new_zeros(1, K)])[source].view(x.dtype)
