"""Calls with some of the rows of another call: a batch-invariant kernel gives each of these rows the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]


def of_matmul(args: Arguments, kwargs: Mapping[str, Any], rows: Tensor) -> Arguments | None:
    """A dense matmul of these rows of a. None if the scales lie in tiles, because a tile holds 128 rows."""
    if kwargs.get("scale_layout") == "blocked":
        return None
    a, a_scale, *others = args
    return _taken(a, rows), None if a_scale is None else _taken(a_scale, rows), *others


def of_sum(args: Arguments, kwargs: Mapping[str, Any], rows: Tensor) -> Arguments | None:
    """A dense matmul that adds to its first argument."""
    acc, *others = args
    dense = of_matmul(tuple(others), kwargs, rows)
    return None if dense is None else (_taken(acc, rows), *dense)


def of_groups(
    args: Arguments, kwargs: Mapping[str, Any], rows: Tensor, scale_layout: str = "plain"
) -> Arguments | None:
    """A grouped matmul of these rows of a, which are in order of their groups. `scale_layout` is the op's default.

    None if groups begin at multiples of a number.
    """
    if kwargs.get("scale_layout", scale_layout) == "blocked" or kwargs.get("alignment", 1) != 1:
        return None
    *operands, offs = args
    of_each = torch.searchsorted(offs.contiguous(), rows.to(offs.dtype), right=True)
    ends = torch.searchsorted(of_each, torch.arange(len(offs), device=rows.device), right=True)
    dense = of_matmul(tuple(operands), kwargs, rows)
    return None if dense is None else (*dense, ends.to(offs.dtype))


def _taken(t: Tensor | None, rows: Tensor) -> Tensor | None:
    """Rows of a matrix, in the order of memory of the matrix. None if there is no matrix."""
    if t is None:
        return None
    if t.dtype == torch.float4_e2m1fn_x2:  # torch cannot select rows of it
        return t.view(torch.uint8).index_select(0, rows).view(t.dtype)
    return t.mT.index_select(1, rows).mT if t.stride(0) == 1 != t.stride(1) else t.index_select(0, rows)
