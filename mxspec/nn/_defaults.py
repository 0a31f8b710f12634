"""The layers that `convert` leaves unless `include` names them: output heads, routers, and Linears of a fast path."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from mxspec.nn._cache import QuantizesWeights

HEAD = "it is the output head, whose logits are sensitive to quantization; include= converts it"
ROUTER = "it is a router, whose logits are sensitive to quantization; include= converts it"
FAST_PATH = (
    "in evaluation, nn.TransformerEncoderLayer reads the weight of this Linear and does not call the Linear; include= "
    "converts it and switches this fast path off"
)


def left_by_default(model: nn.Module) -> dict[str, str]:
    """The names of the Linears that `convert` leaves by default, and the reason for each.

    A Linear is an output head if `get_output_embeddings()` of the model or of a submodule returns it. It is also an
    output head if its weight is the weight of an `nn.Embedding`.

    A Linear is a router in two cases:

    - A sibling of the Linear is a module of experts, and out_features is the number of these experts.
    - The Linear or its parent is called `router` or `gate`, and has a sibling that is a module of experts.

    A module of experts is an `nn.ModuleList` named `experts`, or a module with a parameter of three dimensions, whose
    first size is the number of experts. A convolution does not count, and neither does a parameter of first size 1. A
    dense model has no experts, so it has no router.
    """
    heads = _heads(model)
    names = dict(model.named_modules(remove_duplicate=False))
    left = {}
    for name, layer in names.items():
        if not isinstance(layer, nn.Linear):
            continue
        path, _, child = name.rpartition(".")
        if id(layer) in heads:
            left[name] = HEAD
        elif is_router(names, name, layer.out_features):
            left[name] = ROUTER
        elif child in ("linear1", "linear2") and isinstance(names.get(path), nn.TransformerEncoderLayer):
            left[name] = FAST_PATH
    return left


def _heads(model: nn.Module) -> set[int]:
    found: set[int] = set()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in embeddings:
            found.add(id(module))
        if callable(of_output := getattr(module, "get_output_embeddings", None)):
            try:
                found.add(id(of_output()))
            except (NotImplementedError, AttributeError):  # transformers raises for a model without a head
                continue
    return found


def is_router(names: dict[str, nn.Module], name: str, outputs: int) -> bool:
    """Whether the layer called `name`, which has this number of outputs, is a router. `names` are all modules."""
    path, _, child = name.rpartition(".")
    beside = _experts_beside(names, path, child)
    if outputs in beside:
        return True
    if child in ("router", "gate"):
        return bool(beside)
    above, _, parent = path.rpartition(".")
    return parent in ("router", "gate") and bool(_experts_beside(names, above, parent))


def _experts_beside(names: dict[str, nn.Module], path: str, child: str) -> set[int]:
    """The number of experts of each experts module that is another child of the module at `path`."""
    siblings = names[path].named_children() if path in names else ()
    return {number for name, sibling in siblings if name != child and (number := experts_of(sibling, name))}


def experts_of(module: nn.Module, name: str = "") -> int:
    """The number of experts of a module with this name in its parent. 0 if it is not a module of experts."""
    if isinstance(module, nn.ModuleList):
        return len(module) if name == "experts" else 0
    if isinstance(module, _ConvNd):
        return 0
    if (held := getattr(module, "num_experts_held", None)) is not None:  # its weights are buffers
        return int(held())
    weights = module._weights() if isinstance(module, QuantizesWeights) else module.parameters(recurse=False)
    return next((weight.shape[0] for weight in weights if weight.ndim == 3 and weight.shape[0] > 1), 0)
