"""A model's layers exchanged for low-precision ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    state dicts stay good; attributes that were set on it come along. A `GroupedExperts` gets the recipe. What the
    recipe cannot do is left as it is, and so is a Linear with hooks, buffers, submodules or a forward of its own, or
    whose module reads its weight without calling it.

    In evaluation an `nn.TransformerEncoderLayer` computes from the weights of its Linears, past their forwards. That
    fast path is switched off where they are exchanged. Its result at padded tokens, which is zeros in the fast path of
    an `nn.TransformerEncoder`, is then as in training.

    Args:
        model: converted before `torch.compile`, `fully_shard` or DDP wrap it.
        recipe: a `Recipe` or its name. `bf16` leaves every Linear: it computes in what autocast or its input says.
        filter_fn: called with a Linear or GroupedExperts and its name; false for one to be left. None takes all.

    Returns:
        A `Conversion`: `swapped` and `left`, dicts from a layer's name to what it is now, or to why it was left.

    Raises:
        TypeError: a model, a recipe or a filter_fn that is of another kind.
        ValueError: an unknown recipe, or a model that is itself a Linear.
        RuntimeError: a model whose weights `cache_weights` holds.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        >>> print(convert(model, "mxfp8_rceil"))
        1 swapped, 1 left
          0: MXLinear
          1: left, MXLinear: out_features = 10 must be a multiple of 32

    Source: torchao, `convert_to_float8_training(module, module_filter_fn=)`, for the order of filter_fn's arguments.
    """
    found, report = recipe_of(recipe, "convert"), Conversion()
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: the model is a {type(model).__name__}; needs an nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"convert: filter_fn is a {type(filter_fn).__name__}; needs a function of a layer and its name")
    if isinstance(model, nn.Linear):
        raise ValueError("convert: the model is a Linear itself, which has no place in a model; use from_linear")
    if any(isinstance(layer, QuantizesWeights) and layer._cached for layer in model.modules()):
        raise RuntimeError("convert: cache_weights holds the model's weights; leave its with-block first")
    made: dict[nn.Module, nn.Module] = {}  # a layer may stand at several places
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, (nn.Linear, GroupedExperts)):
            continue
        if layer not in made and filter_fn is not None and not filter_fn(layer, name):
            report.left[name] = "by filter_fn"
            continue
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        try:
            _check_place(parent, child)
            if layer not in made:
                made[layer] = _converted(layer, found)
        except (TypeError, ValueError) as refused:
            report.left[name] = str(refused)
            continue
        report.swapped[name] = _said(made[layer])
        if made[layer] is not layer:
            setattr(parent, child, made[layer])
    _leave_fast_paths(model)
    return report


# Modules that read the weight of this child, and do not call it. LinearCrossEntropyLoss is new in PyTorch 2.13.
_READS_THE_WEIGHT = {"MultiheadAttention": "out_proj", "LinearCrossEntropyLoss": "linear"}


def _check_place(parent: nn.Module, child: str) -> None:
    for name, read in _READS_THE_WEIGHT.items():
        if child == read and isinstance(parent, getattr(nn, name, ())):
            raise TypeError(f"nn.{name} reads its weight, and never calls it")


def _leave_fast_paths(model: nn.Module) -> None:
    """Make PyTorch's encoders call the low-precision Linears that they have, in evaluation too."""
    for module in model.modules():
        if _has_low_precision(module):
            # As with an activation that the fast path does not know.
            module.activation_relu_or_gelu = 0  # type: ignore[assignment]
        if isinstance(module, nn.TransformerEncoder) and any(map(_has_low_precision, module.layers)):
            module.use_nested_tensor = False


def _has_low_precision(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer) and any(
        isinstance(getattr(module, name, None), QuantizesWeights) for name in ("linear1", "linear2")
    )


def _converted(layer: nn.Linear | GroupedExperts, recipe: Recipe) -> nn.Module:
    """The layer in another kind, or an error that says why it cannot be had."""
    if isinstance(layer, GroupedExperts):
        layer.set_recipe(recipe)
        return layer
    if type(layer) is not nn.Linear:
        raise TypeError(f"is a {type(layer).__name__}, not a plain nn.Linear")
    plain = vars(nn.Linear(1, 1, device="meta"))
    if registered := _registered(layer, plain):
        raise TypeError(f"has {registered}, which a new layer would lack")
    if recipe.format == "bf16":
        raise TypeError("bf16 is what nn.Linear computes in, given bfloat16 or under autocast")
    fp8 = recipe.format == "fp8_128"
    new = Float8BlockwiseLinear.from_linear(layer) if fp8 else MXLinear.from_linear(layer, recipe)
    own = {name: value for name, value in vars(layer).items() if name not in plain}
    if taken := [name for name in own if hasattr(new, name)]:
        raise TypeError(f"has {', '.join(taken)} set on it, a name that {type(new).__name__} itself uses")
    vars(new).update(own)
    return new


def _registered(layer: nn.Linear, plain: dict[str, Any]) -> str:
    """What was registered with a Linear, by kind and name: what its dicts have and those of a plain one have not."""
    found = []
    for kind, names in plain.items():
        if isinstance(names, dict) and (others := getattr(layer, kind).keys() ^ names.keys()):
            # A hook's name is a number.
            found.append("hooks" if "hooks" in kind else f"{kind.strip('_')} {', '.join(sorted(others))}")
    return " and ".join(dict.fromkeys(found))


def _said(layer: nn.Module) -> str:
    """What the report says that a layer is now."""
    name = type(layer).__name__
    return f"{name} of {layer.recipe.format}" if isinstance(layer, GroupedExperts) else name
