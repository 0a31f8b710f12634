"""The models that `save` refuses. Each error says what to do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from mxspec.checkpoint import live
from mxspec.checkpoint.live import HALVES, SCHEME_OF, WHOLE, Part
from mxspec.checkpoint.reading import CheckpointError
from mxspec.checkpoint.targets import TARGETS
from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._weight_only_experts import WeightOnlyExperts
from mxspec.nn.conversion import wrapped
from mxspec.nn.experts import GroupedExperts


def format_of(model: nn.Module, to: str) -> str:
    """The format of the layers' recipes. Raises if the model cannot be saved in the family `to`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"save: the model is a {type(model).__name__}; needs an nn.Module")
    if to not in TARGETS:
        raise ValueError(f"save: no family is named {to!r}; there are {', '.join(TARGETS)}")
    if (found := wrapped(model)) is not None:
        where, kind = found
        raise CheckpointError(
            f"save: {where} is wrapped by {kind}. Pass the model that was wrapped. If its parameters are sharded, "
            "gather them with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), load them into a converted copy that is not sharded, "
            "and save the copy on one rank."
        )
    if adapters := [name for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]:
        raise CheckpointError(
            f"save: {adapters[0] or 'the model'} is a module of peft. Merge the adapters first (merge_and_unload), "
            "then convert and save the model."
        )
    if empty := [name for name, x in model.state_dict().items() if isinstance(x, Tensor) and x.is_meta]:
        raise CheckpointError(f"save: {empty[0]} is on the meta device and has no values. Load the weights first.")
    if held := [name for name, module in model.named_modules() if isinstance(module, WeightOnlyExperts)]:
        raise CheckpointError(
            f"save: {held[0] or 'the model'} holds its weights in MXFP4 (quantize_weights). For gpt-oss, call "
            "save_pretrained. For any other model, store the state_dict."
        )
    formats: dict[str, str] = {}  # and the name of the first layer that has it
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizesWeights) and layer.recipe.format != "bf16":
            formats.setdefault(layer.recipe.format, name)
    if not formats:
        raise CheckpointError(
            "save: no layer of the model computes with codes: none was converted, or all have the recipe bf16. Call "
            "mxspec.nn.convert(model, recipe) first, or write a plain checkpoint and use mxspec.checkpoint.convert."
        )
    if "nvfp4" in formats:
        raise CheckpointError(
            f"save: {formats['nvfp4']!r} has the recipe nvfp4. Each of its weights has a tensor scale of its own, and "
            "engines use one for all weights of a fused layer. So save does not write them. Write a plain checkpoint. "
            "mxspec.checkpoint.convert can quantize that, which gives other values than those of the training."
        )
    if len(formats) > 1:
        first = ", ".join(f"{name!r} has {form}" for form, name in formats.items())
        raise CheckpointError(
            f"save: the layers have several formats: {first}. A checkpoint has one: convert all layers by one recipe, "
            "or give the others the recipe bf16."
        )
    (form,) = formats
    if TARGETS[to].scheme != SCHEME_OF[form]:
        fit = ", ".join(name for name, target in TARGETS.items() if target.scheme == SCHEME_OF[form])
        raise ValueError(
            f"save: the layers compute with {form}, which {to} does not store; it needs {fit}. To write {to}, save one "
            "of these and call mxspec.checkpoint.convert."
        )
    return form


def refuse_other_weights(model: nn.Module) -> None:
    """Raise if a quantized weight is no parameter, or if a plain layer has it too: a loader would tie the two."""
    owners = live.owners(model)
    names: dict[int, list[str]] = {}
    quantized = {name for name, (layer, _) in owners.items() if layer.recipe.format != "bf16"}
    state = model.state_dict(keep_vars=True)
    if computed := sorted(quantized - state.keys()):
        raise CheckpointError(
            f"save: {computed[0]} is no parameter, so it is parametrized. Call "
            "torch.nn.utils.parametrize.remove_parametrizations first, which keeps its value."
        )
    for name, x in state.items():
        names.setdefault(id(x), []).append(name)
    for tied in names.values():
        low, plain = [n for n in tied if n in quantized], [n for n in tied if n not in quantized]
        if low and plain:
            raise CheckpointError(
                f"save: {low[0]} is quantized and {plain[0]} is plain, and they are one parameter. Leave the layer of "
                f"{low[0]} out of mxspec.nn.convert, or give it a parameter of its own."
            )


def refuse_fused(parts: Sequence[Part]) -> None:
    """Raise for quantized experts that files hold fused or whose names are unknown, and for a tensor inside a block."""
    for part in parts:
        layer = part.layer
        if not live.begins_a_block(part):
            raise CheckpointError(
                f"save: {part.name} is cut from {part.source} inside a block of 128 rows. Leave this layer out of "
                "mxspec.nn.convert by filter_fn."
            )
        if layer is None or (part.x.ndim == 2 and not layer.is_transposed and _is_named(part, layer)):
            continue
        raise CheckpointError(
            f"save: {part.source} are experts of {type(layer).__name__}, and no family names their codes in a file. "
            "Leave them out of mxspec.nn.convert by filter_fn, or give them the recipe bf16."
        )


def _is_named(part: Part, layer: QuantizesWeights) -> bool:
    """Whether the name of an expert is one that transformers or `GroupedExperts` gives it."""
    leaf = part.source.rpartition(".")[2]
    return part.matrix is None or isinstance(layer, GroupedExperts) or leaf in HALVES or leaf in WHOLE
