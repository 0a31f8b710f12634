"""`quantize_weights` makes a model's experts hold their weights in MXFP4. Tokens stay in bfloat16: for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import mxspec
from mxspec.formats import E2M1, MX_BLOCK_SIZE, SCALINGS
from mxspec.nn._autograd import applied, signature_once
from mxspec.nn._checks import as_autocast, check_devices, check_features, check_input, check_parameters, check_tensors
from mxspec.nn._report import collapsed, percent
from mxspec.nn._swiglu import Swiglu
from mxspec.nn.conversion import integration_of, wrapper_of
from mxspec.nn.experts import GroupedExperts
from mxspec.nn.grouped_mm import check_offs


@signature_once
class _Product(torch.autograd.Function):
    """`mx_grouped_gemm` of bfloat16 tokens. Its backward raises an error that names the layer."""

    @staticmethod
    def forward(x: Tensor, codes: Tensor, scale: Tensor, offs: Tensor, name: str) -> Tensor:
        return mxspec.mx_grouped_gemm(x, None, codes, scale, offs, scale_layout="plain")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{ctx.name}: the layer holds its weights in MXFP4, for inference, so it has no gradient. Train the model "
            "first, and call quantize_weights last."
        )


class WeightOnlyExperts(nn.Module):
    """Experts of two grouped matmuls whose weights are MXFP4 codes and whose tokens are bfloat16.

    In place of each weight called `w`, the layer has two buffers of uint8, as a checkpoint of gpt-oss has them:

    - `w_blocks`, `(E, N, K/32, 16)`: two e2m1 codes in a byte, the first in the low nibble.
    - `w_scales`, `(E, N, K/32)`: the e8m0 scales.
    """

    weight_names: tuple[str, str]

    def take_codes(self, codes: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Replace the weights by their codes."""
        for name, (blocks, scales) in codes.items():
            delattr(self, name)
            self.register_buffer(f"{name}_blocks", blocks)
            self.register_buffer(f"{name}_scales", scales)

    def product(self, x: Tensor, name: str, offs: Tensor) -> Tensor:
        """The tokens of each expert times one of the weights: `(M, K)` -> `(M, N)`, in bfloat16."""
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        codes, scale = blocks.flatten(-2).view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
        return applied(_Product, x, codes, scale, offs, type(self).__name__)

    def feed_forward(self, x: Tensor, offs: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Run the experts on bfloat16 tokens that are sorted by expert. Without an activation: SwiGLU of halves."""
        first, second = self.weight_names
        out = self.product(x, first, offs)
        hidden = activation(out) if activation else applied(Swiglu, out, type(self).__name__)
        return self.product(hidden, second, offs)

    def num_experts_held(self) -> int:
        return int(getattr(self, f"{self.weight_names[0]}_blocks").shape[0])

    def checked(self, x: Tensor, **others: Tensor) -> Tensor:
        """The tokens x, after autocast. Raises if they are not `(M, K)` in bfloat16, or on another device."""
        name, blocks = type(self).__name__, getattr(self, f"{self.weight_names[0]}_blocks")
        check_tensors(name, x=x, **others)
        x = as_autocast(name, x)
        width = blocks.shape[-2] * MX_BLOCK_SIZE
        check_input(name, x, width)
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name}: input has dtype {x.dtype}; MXFP4 weights need tokens in torch.bfloat16")
        if x.ndim != 2:
            raise ValueError(f"{name}: input has shape {tuple(x.shape)}; needs (M, {width})")
        check_devices(name, x, **others, **{f"{self.weight_names[0]}_blocks": blocks})
        return x

    def extra_repr(self) -> str:
        return "weights in MXFP4, tokens in bfloat16"


class WeightOnlyGroupedExperts(WeightOnlyExperts):
    """A `GroupedExperts` after `quantize_weights`. Its forward takes the same arguments; x is bfloat16."""

    weight_names = GroupedExperts.weight_names  # type: ignore[assignment]
    num_experts: int

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        x = self.checked(x, offs=offs)
        check_offs(type(self).__name__, offs, self.num_experts)
        return self.feed_forward(x, offs)


@dataclass
class QuantizedWeights:
    """The report of `quantize_weights`, which `print` shows.

    Attributes:
        held: the experts that hold MXFP4 now. It maps a layer's name to what happened to the values.
        left: the experts that stay as they were. It maps a layer's name to the reason.
        bytes_before, bytes_after: the bytes of the weights of the layers in `held`.
    """

    held: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        unit, of = ("GiB", 2**30) if self.bytes_before >= 2**30 else ("MiB", 2**20)
        before, after = (f"{n / of:.2f} {unit}" for n in (self.bytes_before, self.bytes_after))
        lines = [f"{len(self.held)} experts layers hold MXFP4 ({before} -> {after}), {len(self.left)} left"]
        lines += [f"  {names}: {what}" for names, what in collapsed(self.held)]
        return "\n".join([*lines, *(f"  {names}: left, {why}" for names, why in collapsed(self.left))])


def quantize_weights(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    scaling: str = "rceil",
    allow_lossy: bool = False,
) -> QuantizedWeights:
    """Make a model's experts hold their weights in MXFP4, in place: 4.25 bits for a weight, for inference.

    Experts are `GroupedExperts`, and experts of transformers' experts interface. Their tokens stay in bfloat16:
    `mx_grouped_gemm` multiplies bfloat16 by e2m1. Each layer keeps its name, biases and hooks. Its weights become the
    buffers `<weight>_blocks` and `<weight>_scales`, with the names, shapes and bytes of a checkpoint of gpt-oss.

    The weights of gpt-oss are MXFP4 numbers. transformers dequantizes them to bfloat16 when it loads them, unless it
    finds kernels to download. `quantize_weights` gives them their codes back, without loss. Each value is compared.
    Weights of other models are rounded, so they are left unless `allow_lossy` is True.

    The layers have no gradient: a backward through them raises. A layer whose weights are on the meta device gets
    empty buffers there, for `load_state_dict(..., assign=True)`.

    Args:
        model: the model, before DDP, `fully_shard` or `torch.compile` wraps it. Its experts' weights are bfloat16 or
            float32.
        filter_fn: a function of an experts layer and its name. If it returns false, the layer is left as it is.
        scaling: the rule of the scales, as for `mx_quantize`. MXFP4 numbers keep their values by `rceil`, `floor` and
            `even`, but not by `ceil`.
        allow_lossy: whether weights that are no MXFP4 numbers are rounded. The report then says how many changed.

    Returns:
        A `QuantizedWeights`: the layers that hold MXFP4, the layers that were left, each with the reason, and bytes.

    Special values: a NaN or an Inf of a weight is no MXFP4 number. With `allow_lossy`, its block of 32 becomes NaN.

    Raises:
        TypeError: the model is not an `nn.Module`, or filter_fn is not a function.
        ValueError: scaling is unknown.
        RuntimeError: DDP, `fully_shard` or `torch.compile` has wrapped the model or a module in it.

    Example:
        >>> from mxspec.nn import GroupedExperts
        >>> model = nn.ModuleDict({"experts": GroupedExperts(2, 128, 256, dtype=torch.bfloat16)})
        >>> for weight in model.parameters():
        ...     _ = nn.init.constant_(weight, 0.75)
        >>> print(quantize_weights(model))
        1 experts layers hold MXFP4 (0.38 MiB -> 0.10 MiB), 0 left
          experts: WeightOnlyGroupedExperts, every value is kept
        >>> offs = torch.tensor([3, 5], dtype=torch.int32)
        >>> model["experts"](torch.zeros(5, 128, dtype=torch.bfloat16), offs).shape
        torch.Size([5, 128])

    Source: OCP MX v1.0, section 5.3.3 (e2m1); openai/gpt-oss, the tensors of its checkpoints.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_weights: the model is a {type(model).__name__}; needs an nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        kind = type(filter_fn).__name__
        raise TypeError(f"quantize_weights: filter_fn is a {kind}; needs a function of a layer and its name")
    if scaling not in SCALINGS:
        raise ValueError(f"quantize_weights: scaling = {scaling!r}; needs one of {', '.join(SCALINGS)}")
    layers = list(model.named_modules())
    for name, layer in layers:
        if wrapper := wrapper_of(layer):
            where = f"the module {name!r}" if name else "the model"
            raise RuntimeError(f"quantize_weights: {where} is already wrapped by {wrapper}. Call it before.")
    report = QuantizedWeights()
    integrations = []
    for name, layer in layers:
        if isinstance(layer, WeightOnlyExperts):
            report.left[name] = "it holds MXFP4 already"
            continue
        integration = integration_of(layer)
        if not (isinstance(layer, GroupedExperts) or integration is not None):
            continue
        try:
            if filter_fn is not None and not filter_fn(layer, name):
                raise ValueError("filter_fn returned false")
            _hold(layer, name, integration, scaling, allow_lossy, report)
            integrations += [] if integration is None else [integration]
        except (TypeError, ValueError) as refused:
            report.left[name] = str(refused)
    for integration in dict.fromkeys(integrations):
        integration.note_in_config(model)
    return report


def _hold(layer: Any, name: str, integration: Any, scaling: str, allow_lossy: bool, report: QuantizedWeights) -> None:
    """Quantize the weights of one layer. If the layer is left, this raises an error that says why."""
    if isinstance(layer, GroupedExperts):
        if type(layer) is not GroupedExperts or "compute" in vars(layer):
            raise TypeError("it is a subclass of GroupedExperts, or its experts lie on several ranks")
        if layer._cached:
            raise ValueError("cache_weights holds codes of its weights; leave its with-block first")
        weights = {key: getattr(layer, key) for key in layer.weight_names}
    elif hasattr(integration, "weights_to_hold"):
        weights = integration.weights_to_hold(layer)
    else:
        raise TypeError("quantize_weights knows no experts of this library")
    for key, weight in weights.items():
        check_parameters(type(layer).__name__, weight.dtype)
        check_features(type(layer).__name__, MX_BLOCK_SIZE, **{f"the last dimension of {key}": weight.shape[-1]})
    codes, changed, count = {}, 0, 0
    for key, weight in weights.items():
        *codes[key], differ = mxfp4_of(weight.detach(), scaling)
        changed, count = changed + differ, count + weight.numel()
    if changed and not allow_lossy:
        raise ValueError(
            f"{percent(changed / count)} of its weights are no MXFP4 numbers; allow_lossy=True rounds them"
        )
    report.bytes_before += sum(weight.nbytes for weight in weights.values())
    report.bytes_after += sum(t.nbytes for pair in codes.values() for t in pair)
    if isinstance(layer, GroupedExperts):
        layer.__class__ = WeightOnlyGroupedExperts  # type: ignore[assignment]
    else:
        integration.hold(layer)
    layer.take_codes(codes)
    on_meta = any(weight.is_meta for weight in weights.values())
    kept = f"{percent(changed / count)} of the values are rounded" if changed else "every value is kept"
    report.held[name] = f"{type(layer).__name__}, {'empty on the meta device' if on_meta else kept}"


def mxfp4_of(weight: Tensor, scaling: str) -> tuple[Tensor, Tensor, int]:
    """The blocks and scales of experts' weights, and how many values they change.

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
        return blocks, scales, 0
    changed = torch.zeros((), dtype=torch.int64, device=weight.device)
    for e in range(E):
        qdata, scale = mxspec.mx_quantize(weight[e], elem_dtype=E2M1.name, scaling=scaling)
        back = mxspec.mx_dequantize(qdata, scale, out_dtype=weight.dtype)
        changed += (back != weight[e]).sum()
        blocks[e], scales[e] = qdata.view(torch.uint8).view(N, C, -1), scale.view(torch.uint8)
    return blocks, scales, int(changed)
