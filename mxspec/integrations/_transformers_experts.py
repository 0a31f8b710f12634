"""The class of converted experts of transformers, and the function that runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mxspec.nn.expert_calls import ExpertCall, SeparableExperts
from mxspec.nn.experts import QuantizedExperts
from mxspec.nn.recipe import Recipe
from mxspec.nn.routing import add_bias, experts_of_rows, routing

IMPLEMENTATION = "mxspec"  # the function's name in the table of transformers


class Experts(SeparableExperts, QuantizedExperts):
    """The first base of a converted layer's class. The second base is the class of transformers."""

    their_class: type
    is_swiglu: bool
    is_clamped_swiglu: bool
    alpha: float
    limit: float
    config: Any
    has_bias: bool
    down_proj: Tensor
    post_expert_norm: Callable[[Tensor], Tensor]

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Train with this recipe from now on. Raises if it cannot run the layer."""
        self.check_weights()
        self.train_by(recipe, **self.widths())

    def widths(self) -> dict[str, int]:
        down = self.down_proj
        inner, hidden = down.shape[1:] if self.is_transposed else down.shape[:0:-1]
        return {"hidden_size": hidden, "intermediate_size": inner}

    def expert_parameters(self) -> tuple[str, ...]:
        return (*self.weight_names, *(f"{name}_bias" for name in self.weight_names if self.has_bias))

    def checked_call(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> ExpertCall:
        width = self.widths()["hidden_size"]
        x = self.checked(hidden_states, width, top_k_index=top_k_index, top_k_weights=top_k_weights)
        _check_routing(type(self).__name__, x, top_k_index, top_k_weights)
        pairs = routing(top_k_index, self.experts_of_all_ranks())
        return ExpertCall(x, pairs.offs, pairs, top_k_weights, hidden_states.dtype)

    def run_experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        biases = [self.local(f"{name}_bias") for name in self.weight_names if self.has_bias]
        experts = experts_of_rows(offs, rows.shape[0]) if biases else offs
        clamped = self.is_clamped_swiglu and (self.alpha, self.limit) == (1.702, 7.0)  # the constants of the op
        bias = biases[0] if clamped else None
        out = self.feed_forward(rows, offs, _activation(self, biases, experts), bias)
        if biases:
            out = add_bias(out, biases[1], experts)
        if getattr(self, "has_post_expert_norm", False):
            out = self.post_expert_norm(out)
        return out

    def results(self, out: Tensor, call: ExpertCall) -> Tensor:
        assert call.pairs is not None
        assert call.weights is not None
        out = out * call.pairs.sort(call.weights.reshape(-1))[:, None]
        return call.pairs.combine(out).to(call.dtype)

    def extra_repr(self) -> str:
        return str(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self.their_class, self.weight_names), self.__getstate__()


def class_of(kind: type, weight_names: tuple[str, str]) -> type[Experts]:
    """The class of converted layers of a class of transformers. Adds `mxspec` to the table of experts functions."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    return _made(kind, weight_names)


@functools.cache
def _made(kind: type, weight_names: tuple[str, str]) -> type[Experts]:
    # With the old class's name, for error texts and `print(model)`.
    own = {"their_class": kind, "weight_names": weight_names, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Experts, kind), own)


def _new(kind: type, weight_names: tuple[str, str]) -> nn.Module:
    """An empty converted layer, for copies and pickles."""
    made = class_of(kind, weight_names)
    return made.__new__(made)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function `mxspec` of transformers' table. It computes what `grouped_mm` computes, by the recipe.

    Args:
        hidden_states: `(tokens, hidden_size)`, bfloat16 or float32.
        top_k_index: `(tokens, top_k)`, the experts that the router chose. A number from `num_experts` on means an
            expert of another device, under expert parallelism. It adds nothing here. No number may be negative.
        top_k_weights: `(tokens, top_k)`, the routing weights.

    Returns:
        `(tokens, hidden_size)` in the dtype of hidden_states.

    Raises:
        TypeError: the layer was not converted, or an argument has another dtype; top_k_index has no integers.
        ValueError: a shape or a device does not fit.
    """
    if not isinstance(self, Experts):
        raise TypeError(
            f"{type(self).__name__}: the experts implementation {IMPLEMENTATION!r} has no recipe. Call "
            "mxspec.nn.convert(model, recipe) in place of set_experts_implementation."
        )
    return self.compute(hidden_states, top_k_index, top_k_weights)


def _check_routing(name: str, x: Tensor, index: Tensor, weights: Tensor) -> None:
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"{name}: top_k_index has dtype {index.dtype}; needs integers")
    if index.ndim != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(f"{name}: top_k_index has shape {tuple(index.shape)}; needs ({x.shape[0]}, top_k)")
    if weights.shape != index.shape:
        raise ValueError(
            f"{name}: top_k_weights has shape {tuple(weights.shape)}; needs {tuple(index.shape)}, as top_k_index has"
        )


def _activation(layer: Any, biases: list[Tensor], experts: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The layer's function between its two matmuls. None if this is SwiGLU, which has an op of its own."""
    if layer.is_swiglu:
        return None
    gate = layer._apply_gate if getattr(layer, "has_gate", True) else layer.act_fn
    return (lambda out: gate(add_bias(out, biases[0], experts))) if biases else gate
