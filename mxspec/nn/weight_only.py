"""`quantize_weights` makes a model's experts hold their weights in MXFP4. Tokens stay in bfloat16: for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import mxspec
from mxspec.formats import E2M1, MX_BLOCK_SIZE, SCALINGS
from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._checks import check_parameters
from mxspec.nn._report import collapsed, percent
from mxspec.nn._weight_only_experts import WeightOnlyExperts, WeightOnlyGroupedExperts
from mxspec.nn.conversion import check_model, integration_of, wrapped
from mxspec.nn.experts import GroupedExperts


@dataclass
class QuantizedWeights:
    """The report of `quantize_weights`, which `print` shows.

    Attributes:
        held: the experts that hold MXFP4 now. It maps a layer's name to what happened to the values.
        left: the experts that stay as they were. It maps a layer's name to the reason.
        notes: what a user must know of the model now, such as how to save it.
        bytes_before, bytes_after: the bytes of the weights of the layers in `held`.
    """

    held: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        unit, of = ("GiB", 2**30) if self.bytes_before >= 2**30 else ("MiB", 2**20)
        before, after = (f"{n / of:.2f} {unit}" for n in (self.bytes_before, self.bytes_after))
        layers = f"{len(self.held)} experts layer{'s' * (len(self.held) != 1)}"
        lines = [f"{layers} changed to MXFP4 ({before} -> {after}), {len(self.left)} left"]
        lines += [f"  {names or 'the model'}: {what}" for names, what in collapsed(self.held)]
        lines += [f"  {names or 'the model'}: left, {why}" for names, why in collapsed(self.left)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def quantize_weights(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    scaling: str = "rceil",
    allow_lossy: bool = False,
) -> QuantizedWeights:
    """Make a model's experts hold their weights in MXFP4, in place: 4.25 bits for a weight, for inference.

    Experts are `GroupedExperts`, and experts of transformers' experts interface. `convert` may have given them a
    recipe; they lose it. Their tokens stay in bfloat16: `mx_grouped_gemm` multiplies bfloat16 by e2m1. So the model
    must run in bfloat16, or under an autocast to it. Each layer keeps its name, biases and hooks. Its weights become
    the buffers `<weight>_blocks` and `<weight>_scales`, in the layout of a checkpoint of gpt-oss.

    The weights of gpt-oss are MXFP4 numbers. transformers dequantizes them to bfloat16 when it loads them, unless it
    finds kernels to download. `quantize_weights` gives them codes again, without loss. Each value is compared. The
    bytes may differ from the checkpoint's in a block without large codes, which has several scales for the same values.
    If all experts of a gpt-oss hold MXFP4, its config gets the `quantization_config` of such a checkpoint. The weights
    of other models are no MXFP4 numbers. They are left, or rounded if `allow_lossy` is True.

    The layers have no gradient: a backward through them raises. A layer whose weights are on the meta device gets
    empty buffers there, for `load_state_dict(..., assign=True)`. Experts of transformers ignore an expert index from E
    on, and a negative one has no meaning.

    Args:
        model: the model, before DDP, `fully_shard` or `torch.compile` wraps it. Its experts' weights are bfloat16 or
            float32.
        filter_fn: a function of an experts layer and its name. If it returns false, the layer is left as it is. It is
            called for all layers before any layer changes.
        scaling: the rule of the scales, as for `mx_quantize`. MXFP4 numbers keep their values by `rceil`, `floor` and
            `even`, but not by `ceil`.
        allow_lossy: whether weights that are no MXFP4 numbers are rounded. The report then says how many changed.

    Returns:
        A `QuantizedWeights`: the layers that hold MXFP4, the layers that were left, each with the reason, and bytes.

    Special values: a NaN or an Inf of a weight is no MXFP4 number. With `allow_lossy`, its block of 32 becomes NaN. Its
        row of the weight then gives NaN for all tokens of the expert.

    Raises:
        TypeError: the model is not an `nn.Module`, filter_fn is not a function, or allow_lossy is not a bool.
        ValueError: scaling is unknown.
        RuntimeError: DDP, `fully_shard` or `torch.compile` has wrapped the model or a module in it.

    Example:
        >>> from mxspec.nn import GroupedExperts
        >>> model = nn.ModuleDict({"experts": GroupedExperts(2, 128, 256, dtype=torch.bfloat16)})
        >>> for weight in model.parameters():
        ...     _ = nn.init.constant_(weight, 0.75)
        >>> print(quantize_weights(model))
        1 experts layer changed to MXFP4 (0.38 MiB -> 0.10 MiB), 0 left
          experts: WeightOnlyGroupedExperts, every value is kept
        >>> offs = torch.tensor([3, 5], dtype=torch.int32)
        >>> model["experts"](torch.zeros(5, 128, dtype=torch.bfloat16), offs).shape
        torch.Size([5, 128])

    Source: OCP MX v1.0, section 5.3.3 (e2m1); openai/gpt-oss, the tensors of its checkpoints.
    """
    _check(model, filter_fn, scaling, allow_lossy)
    report, shared = QuantizedWeights(), _shared(model)
    layers = [(name, layer) for name, layer in model.named_modules() if _is_experts(layer)]
    wanted = {name: filter_fn is None or bool(filter_fn(layer, name)) for name, layer in layers}
    integrations = []
    for name, layer in layers:
        integration = None if isinstance(layer, GroupedExperts) else integration_of(layer)
        try:
            if not wanted[name]:
                raise ValueError("filter_fn returned false")
            _hold(layer, name, integration, scaling, allow_lossy, report, shared)
        except (TypeError, ValueError) as refused:
            report.left[name] = str(refused)
        if isinstance(layer, WeightOnlyExperts) and integration is not None:
            integrations.append(integration)
    if not layers:
        report.notes.append("no experts were found: no GroupedExperts, and no experts of transformers' interface")
    for integration in dict.fromkeys(integrations):
        report.notes += integration.after_hold(model)
    return report


def _check(model: nn.Module, filter_fn: object, scaling: object, allow_lossy: object) -> None:
    check_model("quantize_weights", model, filter_fn)
    if scaling not in SCALINGS:
        raise ValueError(f"quantize_weights: scaling = {scaling!r}; needs one of {', '.join(SCALINGS)}")
    if not isinstance(allow_lossy, bool):
        raise TypeError(f"quantize_weights: allow_lossy = {allow_lossy!r}; needs a bool")
    if (found := wrapped(model)) is not None:
        where, kind = found
        raise RuntimeError(
            f"quantize_weights: {where} is already wrapped by {kind}. Quantize the plain model first, and wrap it then."
        )


def _is_experts(layer: nn.Module) -> bool:
    """Whether a module has the weights of several experts, so that the report names it."""
    if isinstance(layer, (GroupedExperts, WeightOnlyExperts)) or integration_of(layer) is not None:
        return True
    stacked = any(weight.ndim >= 3 and weight.shape[0] > 1 for weight in layer.parameters(recurse=False))
    return stacked and type(layer).__name__.endswith("Experts")


def _shared(model: nn.Module) -> dict[int, str]:
    """The weights that several modules have: their identity, and the names."""
    names: dict[int, dict[int, str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(id(parameter), {})[id(module)] = key
    return {weight: " and ".join(found.values()) for weight, found in names.items() if len(found) > 1}


def _hold(
    layer: Any, name: str, integration: Any, scaling: str, allow_lossy: bool, report: QuantizedWeights,
    shared: dict[int, str],
) -> None:  # fmt: skip
    """Quantize the weights of one layer. If the layer is left, this raises an error that says why."""
    weights = _weights_to_hold(layer, integration)
    for key, weight in weights.items():
        if names := shared.get(id(getattr(layer, key))):
            raise ValueError(f"one parameter is {names}; give each layer its own")
        check_parameters(type(layer).__name__, weight.dtype)
        if weight.shape[-1] % MX_BLOCK_SIZE:
            raise ValueError(f"{key} has a width of {weight.shape[-1]}; MXFP4 needs a multiple of {MX_BLOCK_SIZE}")
    on_meta = {weight.is_meta for weight in weights.values()}
    if len(on_meta) > 1:
        raise ValueError("a part of its weights is on the meta device; load all of them, or none")
    (empty,) = on_meta
    codes, changed, odd = {}, 0, 0
    for key, weight in weights.items():
        *codes[key], more, more_odd = mxfp4_of(weight.detach(), scaling)
        changed, odd = changed + more, odd + more_odd
    count = sum(weight.numel() for weight in weights.values())
    special = f", {odd} of them NaN or Inf, which make their blocks NaN" if odd else ""
    if changed and not allow_lossy:
        share = f"{changed} of its {count} weights ({percent(changed / count)})"
        raise ValueError(f"{share} would change{special}; allow_lossy=True rounds them")
    report.bytes_before += sum(weight.nbytes for weight in weights.values())
    report.bytes_after += sum(t.nbytes for pair in codes.values() for t in pair)
    if isinstance(layer, GroupedExperts):
        layer.__class__ = WeightOnlyGroupedExperts  # type: ignore[assignment]
        del layer.recipe
    else:
        integration.hold(layer)
    layer.take_codes(codes)
    if empty:
        said = "empty on the meta device"
    else:
        said = f"{changed} of {count} values changed{special}" if changed else "every value is kept"
        wide = torch.float32 in {weight.dtype for weight in weights.values()}
        said += "; run the model in bfloat16" if wide else ""
    report.held[name] = f"{type(layer).__name__}, {said}"


def _weights_to_hold(layer: Any, integration: Any) -> dict[str, Tensor]:
    """The weights of a layer, by name: `(E, N, K)`. If the layer cannot hold MXFP4, this raises the reason."""
    if isinstance(layer, WeightOnlyExperts):
        raise TypeError("it holds MXFP4 already")
    if "_hf_hook" in vars(layer):
        raise TypeError("a hook of accelerate moves its weights; load the model onto one device")
    if is_parametrized(layer):
        raise TypeError("its weights are parametrized; torch.nn.utils.parametrize.remove_parametrizations ends this")
    if isinstance(layer, QuantizesWeights) and layer._cached:
        raise ValueError("cache_weights holds codes of its weights; leave its with-block first")
    if isinstance(layer, GroupedExperts):
        if "forward" in vars(layer):
            raise TypeError("it has its own forward")
        if type(layer) is not GroupedExperts:
            raise TypeError(f"it is a {type(layer).__name__}, and not a plain GroupedExperts")
        return {key: getattr(layer, key) for key in layer.weight_names}
    if not hasattr(integration, "weights_to_hold"):
        raise TypeError(f"quantize_weights does not know how {type(layer).__name__} computes")
    found: dict[str, Tensor] = integration.weights_to_hold(layer)
    return found


def mxfp4_of(weight: Tensor, scaling: str) -> tuple[Tensor, Tensor, int, int]:
    """The blocks and scales of experts' weights, how many values they change, and how many weights are NaN or Inf.

    Args:
        weight: `(E, N, K)`, bfloat16 or float32, of any strides. One expert after the other is quantized, so that
            memory stays small.
        scaling: the rule of the scales.
    """
    E, N, K = weight.shape
    C = K // MX_BLOCK_SIZE
    blocks = torch.empty(E, N, C, MX_BLOCK_SIZE // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(E, N, C, dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return blocks, scales, 0, 0
    counts = torch.zeros(2, dtype=torch.int64, device=weight.device)  # read at the end, so that a GPU need not wait
    for e in range(E):
        qdata, scale = mxspec.mx_quantize(weight[e], elem_dtype=E2M1.name, scaling=scaling)
        back = mxspec.mx_dequantize(qdata, scale, out_dtype=weight.dtype)
        counts += torch.stack([(back != weight[e]).sum(), (~weight[e].isfinite()).sum()])
        blocks[e], scales[e] = qdata.view(torch.uint8).view(N, C, -1), scale.view(torch.uint8)
    changed, odd = counts.tolist()
    return blocks, scales, changed, odd
