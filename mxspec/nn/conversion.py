"""A model's layers exchanged for low-precision ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from mxspec.nn._cache import QuantizesWeights
from mxspec.nn.experts import GroupedExperts
from mxspec.nn.float8_blockwise import Float8BlockwiseLinear
from mxspec.nn.mx_linear import MXLinear
from mxspec.nn.recipe import Recipe, recipe_of


@dataclass
class Conversion:
    """What `convert` did: for each Linear and each GroupedExperts, by name, what it is now or why it was left."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} swapped, {len(self.left)} left"]
        lines += [f"  {name}: {now}" for name, now in self.swapped.items()]
        lines += [f"  {name}: left, {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def convert(
    model: nn.Module, recipe: Recipe | str, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> Conversion:
    """Make a model's Linears and experts train by a recipe, in place.

    An `nn.Linear` becomes an `MXLinear` or a `Float8BlockwiseLinear` of the same parameters, so that optimizers and
    state dicts stay good; a `GroupedExperts` gets the recipe. What the recipe cannot do is left as it is.

    Args:
        model: converted before `torch.compile`, `fully_shard` or DDP wrap it.
        recipe: a `Recipe` or its name. `bf16` leaves every Linear: it computes in what autocast or its input says.
        filter_fn: called with a Linear or GroupedExperts and its name; false for one to be left. None takes all.

    Returns:
        A `Conversion`: `swapped` and `left`, dicts from a layer's name to what it is now, or to why it was left.

    Raises:
        ValueError: an unknown recipe, or a model that is itself a Linear.
        RuntimeError: a model whose weights `cache_weights` holds.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        >>> print(convert(model, "mxfp8_rceil"))
        1 swapped, 1 left
          0: MXLinear
          1: left, MXLinear: out_features = 10 is no multiple of 32; each is a K of a matmul

    Source: torchao, `convert_to_float8_training(module, module_filter_fn=)`, for the order of filter_fn's arguments.
    """
    found, report = recipe_of(recipe, "convert"), Conversion()
    if isinstance(model, nn.Linear):
        raise ValueError("convert: the model is a Linear itself, which has no place in a model; use from_linear")
    if any(isinstance(layer, QuantizesWeights) and layer._cached for layer in model.modules()):
        raise RuntimeError("convert: cache_weights holds the model's weights; leave its with-block first")
    made: dict[nn.Module, nn.Module] = {}  # a layer may stand at several places
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, (nn.Linear, GroupedExperts)):
            continue
        if layer not in made:
            if filter_fn is not None and not filter_fn(layer, name):
                report.left[name] = "by filter_fn"
                continue
            try:
                made[layer] = _converted(layer, found)
            except (TypeError, ValueError) as refused:
                report.left[name] = str(refused)
                continue
        report.swapped[name] = _said(made[layer])
        if made[layer] is not layer:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[layer])
    return report


def _converted(layer: nn.Linear | GroupedExperts, recipe: Recipe) -> nn.Module:
    """The layer in another kind, or an error that says why it cannot be had."""
    if isinstance(layer, GroupedExperts):
        layer.set_recipe(recipe)
        return layer
    if type(layer) is not nn.Linear:
        raise TypeError(f"is a {type(layer).__name__}, not a plain nn.Linear")
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise TypeError("has hooks, which a new layer would lack")
    if recipe.format == "bf16":
        raise TypeError("bf16 is what nn.Linear computes in, given bfloat16 or under autocast")
    if recipe.format == "fp8_128":
        return Float8BlockwiseLinear.from_linear(layer)
    return MXLinear.from_linear(layer, recipe)


def _said(layer: nn.Module) -> str:
    """What the report says that a layer is now."""
    name = type(layer).__name__
    return f"{name} of {layer.recipe.format}" if isinstance(layer, GroupedExperts) else name
