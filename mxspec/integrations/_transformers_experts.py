"""The classes of converted experts of transformers, and the function that runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxspec.nn._weight_only_experts import WeightOnlyExperts
from mxspec.nn.expert_calls import ExpertCall, SeparableExperts
from mxspec.nn.experts import QuantizedExperts
from mxspec.nn.recipe import Recipe
from mxspec.nn.routing import Routing, add_bias, experts_of_rows, routing

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
        return _after_matmuls(self, out, biases, experts)

    def results(self, out: Tensor, call: ExpertCall) -> Tensor:
        assert call.pairs is not None
        assert call.weights is not None
        return _sum_of_experts(out, call.pairs, call.weights).to(call.dtype)

    def extra_repr(self) -> str:
        return str(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self.their_class, self.weight_names, Experts), self.__getstate__()


class WeightOnly(WeightOnlyExperts):
    """The first base of the class of a layer that holds MXFP4. The second base is the class of transformers."""

    their_class: type
    is_swiglu: bool
    has_bias: bool

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = self.checked(hidden_states, top_k_index=top_k_index, top_k_weights=top_k_weights)
        _check_routing(type(self).__name__, x, top_k_index, top_k_weights)
        pairs = routing(top_k_index, self.num_experts_held())
        rows = pairs.gather(x)
        biases = [getattr(self, f"{name}_bias") for name in self.weight_names if self.has_bias]
        out = self.feed_forward(rows, pairs.offs, _activation(self, biases, pairs.experts))
        out = _after_matmuls(self, out, biases, pairs.experts)
        return _sum_of_experts(out, pairs, top_k_weights).to(hidden_states.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self.their_class, self.weight_names, WeightOnly), self.__getstate__()


def class_of(kind: type, weight_names: tuple[str, str], base: Any) -> Any:
    """The class of converted layers of a class of transformers. Adds `mxspec` to the table of experts functions."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    return _made(kind, weight_names, base)


@functools.cache
def _made(kind: type, weight_names: tuple[str, str], base: Any) -> Any:
    # With the old class's name, for error texts and `print(model)`.
    own = {"their_class": kind, "weight_names": weight_names, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (base, kind), own)


def _new(kind: type, weight_names: tuple[str, str], base: Any = Experts) -> Any:
    """An empty converted layer, for copies and pickles. An older pickle has no base."""
    made = class_of(kind, weight_names, base)
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
    if not isinstance(self, (Experts, WeightOnly)):
        raise TypeError(
            f"{type(self).__name__}: the experts implementation {IMPLEMENTATION!r} has no recipe. Call "
            "mxspec.nn.convert(model, recipe) in place of set_experts_implementation."
        )
    return self.compute(hidden_states, top_k_index, top_k_weights)


def _after_matmuls(layer: Any, out: Tensor, biases: list[Tensor], experts: Tensor) -> Tensor:
    """The results of the rows, from the second matmul's."""
    if biases:
        out = add_bias(out, biases[1], experts)
    return layer.post_expert_norm(out) if getattr(layer, "has_post_expert_norm", False) else out


def _sum_of_experts(out: Tensor, pairs: Routing, weights: Tensor) -> Tensor:
    """Each token's results, weighted and added up."""
    return pairs.combine(out * pairs.sort(weights.reshape(-1))[:, None])


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
