"""Token groups: where each begins and ends, and which row of the tokens comes to which row of the padded ones.

A group's tokens are the rows `offs[g-1] .. offs[g]`; padded, they begin at row `start[g]`. Everything is computed from
these on the device, with no value read on the host. The group of a row is found by counting.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mxspec.formats import INT_OF_BYTES


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def padded_rows(M: int, G: int, alignment: int) -> int:
    """The rows that hold M tokens of G groups, however they are distributed: known without asking the device."""
    return round_up(M + G * alignment, alignment)


def each_group(offs: Tensor) -> range:
    """Every group. Tensors without values need one alone, since it shows the shapes of all: 128 take a second."""
    G = offs.shape[0]
    return range(min(G, 1) if offs.is_meta or isinstance(offs, FakeTensor) else G)


def bounds(offs: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """`start` and `end` of each group when every group is padded to a multiple of `alignment`; int32."""
    tokens = offs - first_tokens(offs)[:-1]
    padded = (tokens + (alignment - 1)) // alignment * alignment
    end = padded.cumsum(0, dtype=torch.int32)
    return end - padded, end


def first_tokens(offs: Tensor) -> Tensor:
    """The first token of each group, and after the last group the first that belongs to none; G + 1 long."""
    return torch.cat([offs.new_zeros(1), offs])


def group_of_tokens(offs: Tensor, M: int) -> Tensor:
    """The group of each token; as many as there are groups for a token that belongs to none."""
    token = torch.arange(M, dtype=torch.int32, device=offs.device)
    return torch.searchsorted(offs.contiguous(), token, right=True)


def rows_of_tokens(offs: Tensor, start: Tensor, M: int) -> Tensor:
    """The row of each token, int32, where its group begins at row `start[g]`; -1 for a token that belongs to none."""
    token = torch.arange(M, dtype=torch.int32, device=offs.device)
    g = group_of_tokens(offs, M)
    first, begins = first_tokens(offs)[g], torch.cat([start, start.new_zeros(1)])[g]
    return torch.where(g < offs.shape[0], begins + token - first, -1)


def flat_places(end: Tensor, D: int, R: int) -> Tensor:
    """Where element `(d, t)` of `(D, R)` lies once the columns of each group are a row-major matrix of their own.

    The matrices follow one another; the columns from the last end on are one more. An `end` out of order gives places
    that mean nothing, all of them within the `D * R`.
    """
    begin = first_tokens(end).to(torch.int64)
    width = torch.cat([end, end.new_full((1,), R)]) - begin
    group = group_of_tokens(end, R)
    places = torch.arange(D, device=end.device)[:, None] * width[group]  # (D, R)
    places += D * begin[group] + torch.arange(R, device=end.device) - begin[group]
    return places.clamp_(0, max(D * R - 1, 0))


def take_rows(x: Tensor, source: Tensor) -> Tensor:
    """Row `source[i]` of x as row i; zeros where x has no such row."""
    rows, K = x.shape
    bits = x.resolve_neg().contiguous().view(INT_OF_BYTES[x.element_size()])  # of a negated view the numbers
    source = torch.where((source >= 0) & (source < rows), source, rows)
    return torch.cat([bits, bits.new_zeros(1, K)])[source].view(x.dtype)
