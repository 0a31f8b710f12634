"""`convert` replaces a model's layers with low-precision layers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._defaults import left_by_default
from mxspec.nn._linear import QuantizedLinear
from mxspec.nn._report import Conversion, measure
from mxspec.nn.experts import GroupedExperts, QuantizedExperts
from mxspec.nn.float8_blockwise import Float8BlockwiseLinear
from mxspec.nn.mx_linear import MXLinear
from mxspec.nn.nvfp4_linear import NVFP4Linear
from mxspec.nn.recipe import Recipe, recipe_of

LINEARS: dict[str, Any] = {kind.format: kind for kind in (MXLinear, Float8BlockwiseLinear, NVFP4Linear)}


def convert(
    model: nn.Module,
    recipe: Recipe | str,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    include: Iterable[str] = (),
    experts_per_token: int | None = None,
) -> Conversion:
    """Make a model's Linears and experts train by a recipe, in place.

    An `nn.Linear` becomes an `MXLinear`, a `Float8BlockwiseLinear` or an `NVFP4Linear` with the same parameters. So
    optimizers and state dicts stay valid. The new layer keeps the attributes that the user set on the Linear. A
    `GroupedExperts` stays the same object and gets the recipe. So does a layer that an earlier `convert` made of a
    Linear, if the recipe is another one and its format is the layer's or bf16. Experts of another library convert if
    `mxspec.integrations` has a module for that library.

    `convert` leaves a layer as it is if the recipe cannot run it. It also leaves a Linear that has hooks, buffers,
    submodules or its own forward, and a Linear whose parent module reads the weight without calling the Linear. The
    report says why.

    Three kinds of Linears are left unless `include` names them:

    - the output head: a Linear that `get_output_embeddings()` of the model or of a submodule returns, or whose weight
      is also the weight of an `nn.Embedding`;
    - a router: a Linear with experts beside it. It is called `router` or `gate`, or lies in a module with such a name,
      or has as many outputs as there are experts;
    - the feed-forward Linears of an `nn.TransformerEncoderLayer`. In evaluation, a fast path of this layer reads their
      weights and does not call them. If `include` names them, `convert` switches the fast path off. The fast path of an
      `nn.TransformerEncoder` returns zeros at padded tokens. Without the fast path, evaluation returns the same values
      at padded tokens as training.

    Args:
        model: the model. Convert it before DDP, `fully_shard` or `torch.compile` wraps it.
        recipe: a `Recipe` or its name. The recipe `bf16` leaves every `nn.Linear`, which already computes in the dtype
            of its input or of autocast. The matmuls of experts are then in bfloat16, also for float32 tokens.
        filter_fn: a function of a layer (a Linear or experts) and its name. If it returns false, the layer is left as
            it is. `convert` calls it last, only for layers that it would convert otherwise. Without a filter_fn, all
            these layers are converted.
        include: names of layers that are left by default, or patterns of such names, as `fnmatch` reads them.
        experts_per_token: the number of experts that a token goes to, for the share of operations in the report. By
            default it comes from the config of a model of transformers: `num_experts_per_tok` or a similar name.

    Returns:
        A `Conversion`: the converted layers, the layers and parameters that were left, each with the reason, and the
        shares of the parameters and of the matmul operations that now run in low precision.

    Raises:
        TypeError: the model is not an `nn.Module`, the recipe is neither a `Recipe` nor a name, or filter_fn is not a
            function.
        ValueError: the recipe is unknown, the model is itself a Linear, or a pattern of `include` matches no layer.
        RuntimeError: `cache_weights` holds codes of the model's weights, or DDP, `fully_shard` or `torch.compile` has
            wrapped the model or a module in it. `set_recipe` of its layers works there, too.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        >>> print(convert(model, "mxfp8_rceil"))
        1 swapped to mxfp8_rceil, 1 left
        in low precision: 85.0% of the parameters, 86.5% of a token's matmul operations
          0: MXLinear
          1: left, MXLinear: out_features = 10 must be a multiple of 32. Use a PyTorch layer, or pad the model.

    Source: torchao, `convert_to_float8_training(module, module_filter_fn=)`, for the order of filter_fn's arguments.
    """
    found = recipe_of(recipe, "convert")
    report = Conversion(found)
    _check(model, filter_fn, experts_per_token)
    by_default, patterns = left_by_default(model), [include] if isinstance(include, str) else list(include)
    named = [(name, layer) for name, layer in model.named_modules(remove_duplicate=False) if _is_ours(layer)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(f"convert: include has {pattern!r}, which matches no Linear and no experts of the model")
    made: dict[nn.Module, nn.Module] = {}  # old layer -> new layer: a model may use one layer in several places
    for name, layer in named:
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        try:
            _check_place(parent, child)
            if name in by_default and not any(fnmatchcase(name, pattern) for pattern in patterns):
                raise ValueError(by_default[name])
            if layer not in made and filter_fn is not None and not filter_fn(layer, name):
                raise ValueError("filter_fn returned false")
            if layer not in made:
                made[layer] = _converted(layer, name, found)
        except (TypeError, ValueError) as refused:
            report.left[name] = str(refused)
            continue
        report.swapped[name] = _said(made[layer])
        if made[layer] is not layer:
            setattr(parent, child, made[layer])
    _leave_fast_paths(model)
    measure(model, report, lambda module: experts_per_token or _experts_per_token(model, module))
    return report


def check_model(name: str, model: object, filter_fn: object) -> None:
    """Raise TypeError if the arguments that change the layers of a model are of another kind. name: the function's."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: the model is a {type(model).__name__}; needs an nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"{name}: filter_fn is a {type(filter_fn).__name__}; needs a function of a layer and its name")


def _check(model: nn.Module, filter_fn: object, experts_per_token: object) -> None:
    check_model("convert", model, filter_fn)
    if experts_per_token is not None and (not isinstance(experts_per_token, int) or experts_per_token < 1):
        raise ValueError(f"convert: experts_per_token = {experts_per_token}; needs an int of at least 1")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "convert: the model is a Linear itself, and convert can only replace a Linear inside a model. "
            "Use from_linear of MXLinear, Float8BlockwiseLinear or NVFP4Linear."
        )
    if any(isinstance(layer, QuantizesWeights) and layer._cached for layer in model.modules()):
        raise RuntimeError("convert: cache_weights holds the model's weights. Leave its with-block first.")
    if (found := wrapped(model)) is not None:
        where, kind = found
        raise RuntimeError(
            f"convert: {where} is already wrapped by {kind}. Convert the plain model first, then call fully_shard "
            "or DDP, and torch.compile last."
        )


def wrapped(model: nn.Module) -> tuple[str, str] | None:
    """The first module of a model that has a wrapper, in words, and the wrapper's name. None if there is none."""
    for name, module in model.named_modules():
        if kind := wrapper_of(module):
            return f"the module {name!r}" if name else "the model", kind
    return None


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the wrapper of a module (compile, DDP or FSDP), or None."""
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    for wrapper in ("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
        if wrapper in names:
            return {"OptimizedModule": "torch.compile", "FSDPModule": "fully_shard"}.get(wrapper, wrapper)
    sharded = any(type(weight.data).__name__ == "DTensor" for weight in module.parameters(recurse=False))
    return "a DTensor of its parameters" if sharded else None


def integration_of(layer: nn.Module) -> Any:
    """The module of `mxspec.integrations` that converts a layer, found by the library of the layer's class."""
    for package in dict.fromkeys(kind.__module__.partition(".")[0] for kind in type(layer).__mro__):
        if (found := _module_of(package)) is not None and found.is_experts(layer):
            return found
    return None


@functools.cache
def _module_of(package: str) -> Any:
    name = f"mxspec.integrations.{package}"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def _is_ours(layer: nn.Module) -> bool:
    """Whether a layer is a Linear or experts: `convert` gives only these to filter_fn, and reports each by its name."""
    return isinstance(layer, (nn.Linear, GroupedExperts)) or integration_of(layer) is not None


def _experts_per_token(model: nn.Module, module: nn.Module) -> int | None:
    """The number of experts to which a token goes, by the config of the module or of the model."""
    for owner in (module, model):
        found = getattr(getattr(owner, "config", None), "num_experts_per_tok", None)
        if isinstance(found, int) and found > 0:
            return found
    integration = integration_of(module)
    return None if integration is None else integration.experts_per_token(module)


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
            # This attribute is 0 for an activation that the fast path does not support.
            module.activation_relu_or_gelu = 0  # type: ignore[assignment]
        if isinstance(module, nn.TransformerEncoder) and any(map(_has_low_precision, module.layers)):
            module.use_nested_tensor = False


def _has_low_precision(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer) and any(
        isinstance(getattr(module, name, None), QuantizesWeights) for name in ("linear1", "linear2")
    )


def _converted(layer: nn.Module, name: str, recipe: Recipe) -> nn.Module:
    """The converted layer. If the layer cannot be converted, this raises an error that says why."""
    if (integration := integration_of(layer)) is not None:
        return integration.adapt(layer, name, recipe)
    if isinstance(layer, GroupedExperts):
        layer.set_recipe(recipe)
        return layer
    if isinstance(layer, QuantizedLinear):
        already = f"it is a {type(layer).__name__} of {layer.recipe.format} already"
        if recipe.format not in (layer.format, "bf16"):
            raise TypeError(f"{already}, and takes only {layer.format} and bf16")
        if recipe == layer.recipe:
            raise TypeError(already)
        layer.set_recipe(recipe)
        return layer
    if type(layer) is not nn.Linear:
        raise TypeError(f"it is a {type(layer).__name__}, not a plain nn.Linear")
    plain = vars(nn.Linear(1, 1, device="meta"))
    if registered := _registered(layer, plain):
        raise TypeError(f"it has {registered}, and a new layer would lose them")
    if recipe.format == "bf16":
        raise TypeError("for bf16, nn.Linear is enough: give it bfloat16, or use autocast")
    new = LINEARS[recipe.format].from_linear(layer, recipe)
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
    assert isinstance(layer, QuantizesWeights)
    of = layer.recipe.format
    if isinstance(layer, QuantizedExperts) and of == "bf16" and torch.float32 in {w.dtype for w in layer.parameters()}:
        return f"{name} of bf16, which multiplies float32 weights in bfloat16, too"
    return f"{name} of {of}" if isinstance(layer, QuantizedExperts) or of == "bf16" else name
