"""Experts of Hugging Face transformers that train by a recipe.

transformers runs experts through an interface: `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS` is a table of
functions, and `config._experts_implementation` is the name of one of them. `adapt` adds the function `mxspec` to the
table, and gives a converted layer its own copy of the config, with this name. The model's config stays as it is. So
`save_pretrained` writes nothing of mxspec, and layers that were not converted run as before.

A converted layer keeps its parameters, hooks and methods. Its class becomes a subclass of its old class and of
`QuantizedExperts`. So `cache_weights` works, and transformers still recognizes the layer.

The interface came with transformers 5.0.0 (huggingface/transformers#42697). Tested with 5.17.0 and 5.23.0.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mxspec.nn.experts import QuantizedExperts
from mxspec.nn.recipe import Recipe
from mxspec.nn.routing import Routing, routing

IMPLEMENTATION = "mxspec"  # our function's name in the table of transformers
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


def adapt(layer: Any, name: str, recipe: Recipe) -> nn.Module | None:
    """Make experts of transformers train by a recipe, in place.

    Args:
        layer: any module of transformers.
        name: its name in the model, for error texts.
        recipe: the `Recipe`.

    Returns:
        The layer itself, or None if it is no experts layer of transformers' experts interface.

    Raises:
        TypeError: the layer does not run through the interface, or its weights are not bfloat16 or float32.
        ValueError: the recipe cannot run the layer's widths.
        RuntimeError: `cache_weights` holds codes of the layer's weights.
    """
    if not (hasattr(layer, "is_transposed") and hasattr(layer, "has_bias") and hasattr(layer, "config")):
        return None  # transformers' decorator gives every experts layer these attributes
    from transformers.integrations import moe

    kind: Any = type(layer)
    if getattr(kind.forward, "__globals__", {}).get("__name__") != moe.__name__ or "forward" in vars(layer):
        raise TypeError(f"{kind.__name__} has its own forward, which does not call transformers' experts interface")
    for weight in weight_names(layer):
        if not isinstance(stored := getattr(layer, weight, None), Tensor) or stored.ndim != 3:
            raise TypeError(f"{kind.__name__} has no parameter {weight} of three dimensions")
    moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    if isinstance(layer, _Experts):
        layer.set_recipe(recipe)
        return layer
    layer.__class__ = _class_of(kind, weight_names(layer))
    try:
        layer.set_recipe(recipe)
    except (TypeError, ValueError):
        layer.__class__ = kind
        raise
    layer.config = copy.deepcopy(layer.config)
    layer.config._experts_implementation = IMPLEMENTATION
    return layer


def flops_per_token(layer: Any) -> float:
    """The floating-point operations of the experts' matmuls for one token in the forward: 2 for each weight it meets.

    Raises:
        ValueError: the config does not say how many experts a token goes to.
    """
    top_k = next((found for key in TOP_K if isinstance(found := getattr(layer.config, key, None), int)), None)
    if top_k is None:
        raise ValueError(f"flops_per_token: the config of {type(layer).__name__} has none of {', '.join(TOP_K)}")
    return 2.0 * top_k * sum(getattr(layer, name)[0].numel() for name in weight_names(layer))


def weight_names(layer: nn.Module) -> tuple[str, str]:
    """The names of the two weights. Experts without a gate have `up_proj` in place of `gate_up_proj`."""
    return "gate_up_proj" if getattr(layer, "has_gate", True) else "up_proj", "down_proj"


class _Experts(QuantizedExperts):
    """The first base of a converted layer's class. The second base is the class of transformers."""

    their_class: type
    config: Any
    down_proj: Tensor
    down_proj_bias: Tensor
    post_expert_norm: Callable[[Tensor], Tensor]

    def set_recipe(self, recipe: Recipe) -> None:
        """Train with this recipe from now on. Raises if it cannot run the layer."""
        self.check_weights()
        self.train_by(recipe, **self.widths())

    def widths(self) -> dict[str, int]:
        down = self.down_proj
        inner, hidden = down.shape[1:] if self.is_transposed else down.shape[:0:-1]
        return {"hidden_size": hidden, "intermediate_size": inner}

    def extra_repr(self) -> str:
        return str(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self.their_class, self.weight_names), self.__getstate__()


@functools.cache
def _class_of(kind: type, weight_names: tuple[str, str]) -> type[_Experts]:
    """The class of converted layers of a class. It has the old class's name, for error texts and `print(model)`."""
    own = {"their_class": kind, "weight_names": weight_names, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Experts, kind), own)


def _new(kind: type, weight_names: tuple[str, str]) -> nn.Module:
    """An empty converted layer, for copies and pickles."""
    from transformers.integrations import moe

    moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    made = _class_of(kind, weight_names)
    return made.__new__(made)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function `mxspec` of transformers' table. It computes what `grouped_mm` computes, by the recipe.

    Args:
        hidden_states: `(tokens, hidden_size)`, bfloat16 or float32.
        top_k_index: `(tokens, top_k)`, the experts that the router chose. A number from `num_experts` on means an
            expert of another device, under expert parallelism. It adds nothing here.
        top_k_weights: `(tokens, top_k)`, the routing weights.

    Returns:
        `(tokens, hidden_size)` in the dtype of hidden_states.

    Raises:
        TypeError: the layer was not converted, or an argument has another dtype.
        ValueError: a shape or a device does not fit.
    """
    if not isinstance(self, _Experts):
        raise TypeError(
            f"{type(self).__name__}: the experts implementation {IMPLEMENTATION!r} has no recipe. Call "
            "mxspec.nn.convert(model, recipe) in place of set_experts_implementation."
        )
    width = self.widths()["hidden_size"]
    x = self.checked(hidden_states, width, top_k_index=top_k_index, top_k_weights=top_k_weights)
    pairs = routing(top_k_index, self._weights()[0].shape[0])
    out = self.feed_forward(pairs.gather(x), pairs.offs, _activation(self, pairs))
    if self.has_bias:
        out = pairs.add_bias(out, self.down_proj_bias)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    out = out * pairs.sort(top_k_weights.reshape(-1))[:, None]
    return pairs.combine(out).to(hidden_states.dtype)


def _activation(layer: Any, pairs: Routing) -> Callable[[Tensor], Tensor] | None:
    """The layer's function between its two matmuls. None if this is SwiGLU of halves, without a bias."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    gate = layer._apply_gate if getattr(layer, "has_gate", True) else layer.act_fn
    if layer.has_bias:
        bias = getattr(layer, f"{layer.weight_names[0]}_bias")
        return lambda out: gate(pairs.add_bias(out, bias))
    plain = getattr(gate, "__func__", None) is _default_apply_gate
    return None if plain and type(layer.act_fn) in (nn.SiLU, SiLUActivation) else gate
