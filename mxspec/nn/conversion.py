"""`convert` replaces a model's layers with low-precision layers."""

from __future__ import annotations

import importlib.util
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
    """The report of `convert`, which `print` shows.

    `swapped` maps the name of each converted Linear or GroupedExperts to its new kind. `left` maps the name of each
    other one to the reason why it was left as it is.
    """

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

    An `nn.Linear` becomes an `MXLinear` or a `Float8BlockwiseLinear` with the same parameters. So optimizers and state
    dicts stay valid. The new layer keeps the attributes that the user set on the Linear. A `GroupedExperts` stays the
    same object and gets the recipe.

    `convert` leaves a layer as it is if the recipe cannot run it. It also leaves a Linear that has hooks, buffers,
    submodules or its own forward, and a Linear whose parent module reads the weight without calling the Linear. The
    report says why.

    In evaluation, an `nn.TransformerEncoderLayer` takes a fast path that reads the weights of its Linears and does not
    call them. If `convert` replaces these Linears, it switches the fast path off. The fast path of an
    `nn.TransformerEncoder` returns zeros at padded tokens. Without it, the results at padded tokens are as in training.

    Args:
        model: the model. Convert it before `torch.compile`, `fully_shard` or DDP wraps it.
        recipe: a `Recipe` or its name. The recipe `bf16` leaves every Linear, because an `nn.Linear` already computes
            in the dtype of its input or of autocast.
        filter_fn: a function of a layer (a Linear or GroupedExperts) and its name. If it returns false, the layer is
            left as it is. Without a filter_fn, all layers are converted.

    Returns:
        A `Conversion` with two dicts. `swapped` maps a layer's name to its new kind, and `left` to the reason why the
        layer was left.

    Raises:
        TypeError: the model is no `nn.Module`, the recipe is no `Recipe` or name, or filter_fn is no function.
        ValueError: the recipe is unknown, or the model is itself a Linear.
        RuntimeError: `cache_weights` holds codes of the model's weights.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        >>> print(convert(model, "mxfp8_rceil"))
        1 swapped, 1 left
          0: MXLinear
          1: left, MXLinear: out_features = 10 must be a multiple of 32. Use a PyTorch layer, or pad the model.

    Source: torchao, `convert_to_float8_training(module, module_filter_fn=)`, for the order of filter_fn's arguments.
    """
    found, report = recipe_of(recipe, "convert"), Conversion()
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: the model is a {type(model).__name__}; needs an nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"convert: filter_fn is a {type(filter_fn).__name__}; needs a function of a layer and its name")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "convert: the model is a Linear itself, and convert can only replace a Linear inside a model. "
            "Use MXLinear.from_linear or Float8BlockwiseLinear.from_linear."
        )
    if any(isinstance(layer, QuantizesWeights) and layer._cached for layer in model.modules()):
        raise RuntimeError("convert: cache_weights holds the model's weights. Leave its with-block first.")
    made: dict[nn.Module, nn.Module] = {}  # old layer -> new layer: a model may use one layer in several places
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, (nn.Linear, GroupedExperts)):
            if filter_fn is None or filter_fn(layer, name):
                _adapt(model, layer, name, found, report)
            continue
        if layer not in made and filter_fn is not None and not filter_fn(layer, name):
            report.left[name] = "filter_fn returned false"
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


def _adapt(model: nn.Module, layer: nn.Module, name: str, recipe: Recipe, report: Conversion) -> None:
    """Let the integration of the layer's library convert it."""
    packages = dict.fromkeys(kind.__module__.partition(".")[0] for kind in type(layer).__mro__)
    for package in packages:
        integration = f"mxspec.integrations.{package}"
        if importlib.util.find_spec(integration) is None:
            continue
        try:
            new = importlib.import_module(integration).adapt(layer, name, recipe)
        except (TypeError, ValueError) as refused:
            report.left[name] = str(refused)
            return
        if new is not None:
            report.swapped[name] = f"{type(new).__name__} of {recipe.format}"
            if new is not layer:
                path, _, child = name.rpartition(".")
                setattr(model.get_submodule(path), child, new)
            return


# Modules that read the weight of a child (named here) and do not call it. PyTorch 2.13 adds LinearCrossEntropyLoss.
_READS_THE_WEIGHT = {"MultiheadAttention": "out_proj", "LinearCrossEntropyLoss": "linear"}


def _check_place(parent: nn.Module, child: str) -> None:
    for name, read in _READS_THE_WEIGHT.items():
        if child == read and isinstance(parent, getattr(nn, name, ())):
            raise TypeError(f"nn.{name} reads the weight of this Linear and never calls the Linear")


def _leave_fast_paths(model: nn.Module) -> None:
    """Make PyTorch's encoders call their low-precision Linears in evaluation too."""
    for module in model.modules():
        if _has_low_precision(module):
            # 0 means an activation that the fast path does not support.
            module.activation_relu_or_gelu = 0  # type: ignore[assignment]
        if isinstance(module, nn.TransformerEncoder) and any(map(_has_low_precision, module.layers)):
            module.use_nested_tensor = False


def _has_low_precision(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer) and any(
        isinstance(getattr(module, name, None), QuantizesWeights) for name in ("linear1", "linear2")
    )


def _converted(layer: nn.Linear | GroupedExperts, recipe: Recipe) -> nn.Module:
    """The converted layer. Raises an error that says why, if the layer cannot be converted."""
    if isinstance(layer, GroupedExperts):
        layer.set_recipe(recipe)
        return layer
    if type(layer) is not nn.Linear:
        raise TypeError(f"it is a {type(layer).__name__}, not a plain nn.Linear")
    plain = vars(nn.Linear(1, 1, device="meta"))
    if registered := _registered(layer, plain):
        raise TypeError(f"it has {registered}, and a new layer would lose them")
    if recipe.format == "bf16":
        raise TypeError("for bf16, nn.Linear is enough: give it bfloat16, or use autocast")
    fp8 = recipe.format == "fp8_128"
    new = Float8BlockwiseLinear.from_linear(layer) if fp8 else MXLinear.from_linear(layer, recipe)
    own = {name: value for name, value in vars(layer).items() if name not in plain}
    if taken := [name for name in own if hasattr(new, name)]:
        raise TypeError(f"it has the attribute {', '.join(taken)}, a name that {type(new).__name__} itself uses")
    vars(new).update(own)
    return new


def _registered(layer: nn.Linear, plain: dict[str, Any]) -> str:
    """Whatever was registered with a Linear (hooks, buffers, submodules), by kind and name.

    These are the entries in which the Linear's dicts differ from the dicts of a plain Linear.
    """
    found = []
    for kind, names in plain.items():
        if isinstance(names, dict) and (others := getattr(layer, kind).keys() ^ names.keys()):
            # The name of a hook is only a number, so it is left out.
            found.append("hooks" if "hooks" in kind else f"{kind.strip('_')} {', '.join(sorted(others))}")
    return " and ".join(dict.fromkeys(found))


def _said(layer: nn.Module) -> str:
    """A converted layer's new kind, in the words of the report."""
    name = type(layer).__name__
    return f"{name} of {layer.recipe.format}" if isinstance(layer, GroupedExperts) else name
