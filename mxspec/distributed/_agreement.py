"""An error of one rank becomes the same error on every rank. If one rank raised alone, the others would wait for it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

_KINDS = (TypeError, ValueError, RuntimeError)  # an error of another kind becomes a RuntimeError


def raise_everywhere(name: str, error: Exception | None, facts: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise if a rank has an error, or if two ranks differ in a fact. Every rank must call this.

    The error is that of the first rank that has one, with the rank's number.
    """
    own = None if error is None else (type(error).__name__, str(error)), {k: str(v) for k, v in facts.items()}
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    for index, (found, _) in enumerate(every):
        if found is not None:
            _raise(found[0], f"rank {dist.get_global_rank(group, index)}: {found[1]}")
    for what in facts:
        values = {dist.get_global_rank(group, index): theirs[what] for index, (_, theirs) in enumerate(every)}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in values.items())
            raise ValueError(f"{name}: {what} must be the same on every rank, but {listed}")


def _raise(kind: str, text: str) -> NoReturn:
    raise next((of for of in _KINDS if of.__name__ == kind), RuntimeError)(text)
