"""A call of experts in three steps, so that expert parallelism can send the rows to other ranks between the steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxspec.nn._cache import QuantizesWeights
from mxspec.nn.routing import Routing


class ExpertCall(NamedTuple):
    """The checked arguments of a call. A row is what one expert gets: a token, or a (token, expert) pair."""

    x: Tensor  # (T, K), this call's tokens, after autocast
    offs: Tensor  # (E,) int32, the exclusive end of each expert's rows
    pairs: Routing | None = None  # how a token becomes rows. None if x is the rows, sorted by expert
    weights: Tensor | None = None  # (T, top_k), the routing weights, if the layer applies them
    dtype: torch.dtype | None = None  # the dtype of the layer's result, if it is not that of x

    def rows(self) -> Tensor:
        """The rows, sorted by expert."""
        return self.x if self.pairs is None else self.pairs.gather(self.x)

    def num_rows(self) -> int:
        return self.x.shape[0] if self.pairs is None else self.pairs.order.shape[0]


class SeparableExperts(QuantizesWeights):
    """Experts whose call has three steps: `checked_call`, `run_experts` and `results`.

    `compute` runs the steps one after the other. Expert parallelism replaces it: then `run_experts` gets the rows of
    all ranks for this rank's experts, and the other two steps get this rank's own tokens. So these methods read a
    parameter of `expert_parameters` only by `local`.
    """

    def expert_parameters(self) -> tuple[str, ...]:
        """The names of the parameters whose first dimension is the expert."""
        return self.weight_names

    def local(self, name: str) -> Tensor:
        """A parameter of the experts. If they lie on several ranks, this rank's part of it."""
        found: Tensor = getattr(self, name)
        return found

    def _weights(self) -> tuple[Tensor, ...]:
        return tuple(map(self.local, self.weight_names))

    def experts_of_all_ranks(self) -> int:
        """E, the number of experts of all ranks together."""
        return int(getattr(self, self.weight_names[0]).shape[0])

    def checked_call(self, *args: Any, **kwargs: Any) -> ExpertCall:
        """Check the arguments of a forward, and say which rows each expert gets."""
        raise NotImplementedError

    def run_experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        """The results of rows that are sorted by expert. Rows from `offs[-1]` on belong to no expert."""
        raise NotImplementedError

    def results(self, out: Tensor, call: ExpertCall) -> Tensor:
        """The layer's result, from the results of the call's rows."""
        raise NotImplementedError

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the three steps."""
        call = self.checked_call(*args, **kwargs)
        return self.results(self.run_experts(call.rows(), call.offs), call)
