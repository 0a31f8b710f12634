"""Experts and Linears of torchtitan that train by a recipe.

torchtitan builds a model from a tree of configs, and a converter changes this tree first. `converter` makes an entry
for the list `converters` of torchtitan's model registries. `adapt` is for a model that is already built, and
`mxspec.nn.convert` calls it.

torchtitan's experts compute each grouped matmul by their method `_grouped_mm(A=, B_t=, offs=)`. The class of converted
experts is a subclass that replaces this method. Its groups need no padding, so torchtitan's token dispatcher stays.
Names of parameters, state dicts, initialization and sharding stay torchtitan's.

The method came with pytorch/torchtitan#3558 of August 2026, so torchtitan 0.2.2 lacks it. This file follows commit
b5bcd76c6 of 2026-08-21.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from mxspec.integrations._torchtitan_layers import Experts, experts_class_of, linear_class_of
from mxspec.nn.recipe import Recipe, recipe_of


def is_experts(layer: nn.Module) -> bool:
    """Whether a module is an experts layer: it has `num_experts` and a parameter of three dimensions or more."""
    return isinstance(getattr(layer, "num_experts", None), int) and any(
        parameter.ndim > 2 for parameter in layer.parameters(recurse=False)
    )


def adapt(layer: Any, name: str, recipe: Recipe) -> nn.Module:
    """Make experts of torchtitan train by a recipe, in place.

    Args:
        layer: an experts layer of a model that is built and not yet parallelized.
        name: its name in the model, for error texts.
        recipe: the `Recipe`.

    Returns:
        The layer itself.

    Raises:
        TypeError: the layer has no `_grouped_mm`, or its `_grouped_mm` is not torchtitan's, or its forward does not
            call it; or its weights are neither bfloat16 nor float32.
        ValueError: the recipe cannot run the layer's widths.
        RuntimeError: `cache_weights` holds codes of the layer's weights.
    """
    if isinstance(layer, Experts):
        layer.set_recipe(recipe)
        return layer
    kind: Any = type(layer)
    if own := {"forward", "_grouped_mm"} & vars(layer).keys():
        raise TypeError(f"{kind.__name__}: the layer has its own {' and '.join(sorted(own))}")
    layer.__class__ = experts_class_of(kind)
    try:
        layer.set_recipe(recipe)
    except (TypeError, ValueError):
        layer.__class__ = kind
        raise
    return layer


def experts_per_token(layer: nn.Module) -> int | None:
    """None: in torchtitan, the router and the token dispatcher know the number, and the experts do not."""
    return None


def converter(recipe: Recipe | str, linears: Sequence[str] = ()) -> Any:
    """An entry for the list `converters` of torchtitan's model registries: all experts train by a recipe.

        from mxspec.integrations.torchtitan import converter
        model_registry("debugmodel", converters=[converter("fp8_128", linears=["attention", "shared_experts"])])

    Args:
        recipe: a `Recipe` or its name.
        linears: parts of names, as torchtitan's own converters take them. A Linear whose name contains such a part
            trains by the recipe too. Without this argument no Linear does. Leave out the router and the output head,
            whose logits are sensitive to quantization. The recipe `bf16` takes no linears, because they compute in
            bfloat16 already.

    Returns:
        A config of a `QuantizationConverter` of torchtitan. torchtitan calls its `build().convert(model_config)`, which
        returns the changed tree of configs. That call raises ValueError if a part of `linears` is in no name, if
        nothing was converted, or if the recipe cannot run a layer; and TypeError if a layer is of a class that cannot
        be converted.

    Raises:
        TypeError: the recipe is neither a `Recipe` nor a name, or linears is a single string.
        ValueError: the recipe is unknown, or it is `bf16` and there are linears.
        ImportError: torchtitan is not installed, or has no converters of configs yet.
    """
    found = recipe_of(recipe, "converter")
    if isinstance(linears, str):
        raise TypeError(f"converter: linears is the str {linears!r}; needs a list of parts of names")
    if found.format == "bf16" and linears:
        raise ValueError("converter: the recipe bf16 takes no linears, because they compute in bfloat16 already")
    return _converter_class().Config(recipe=found, linears=list(linears))


@functools.cache
def _converter_class() -> Any:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts

    class RecipeConverter(QuantizationConverter):
        @dataclass(kw_only=True, slots=True)
        class Config(QuantizationConverter.Config):
            recipe: Recipe
            linears: list[str]

        def __init__(self, config: Any) -> None:
            self.config = config

        def convert(self, model_config: Any) -> Any:
            recipe, parts = self.config.recipe, self.config.linears
            linears = list(model_config.traverse(Linear.Config))
            chosen = [place for place in linears if any(part in place[0] for part in parts)]
            if missing := [part for part in parts if not any(part in place[0] for place in chosen)]:
                raise ValueError(f"converter: no Linear has {', '.join(map(repr, missing))} in its name")
            experts = list(model_config.traverse(GroupedExperts.Config))
            if not chosen and not experts:
                raise ValueError("converter: the model has no experts, and linears names no Linear of it")
            for fqn, config, parent, attr in experts + chosen:
                new = _config_with(fqn, config, recipe, isinstance(config, Linear.Config))
                if parent is None:
                    model_config = new
                elif isinstance(parent, list):
                    parent[attr] = new
                else:
                    setattr(parent, attr, new)
            return model_config

    return RecipeConverter


def _config_with(fqn: str, config: Any, recipe: Recipe, is_linear: bool) -> Any:
    """The config of the converted layer. Raises with the layer's name if the recipe cannot run the layer."""
    owner = getattr(type(config)._owner, "their_class", type(config)._owner)  # a second converter replaces the recipe
    values = {each.name: getattr(config, each.name) for each in fields(config)} | {"recipe": recipe}
    try:
        kind = linear_class_of(owner, recipe.format) if is_linear else experts_class_of(owner)
        new = kind.Config(**values)
        with torch.device("meta"):
            new.build()  # its checks of the widths run now, where the name is known
    except (TypeError, ValueError) as refused:
        raise type(refused)(f"converter: {fqn}: {refused}") from None
    return new
