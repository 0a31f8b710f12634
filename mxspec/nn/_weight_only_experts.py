"""The layers that hold their weights in MXFP4: `quantize_weights` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import mxspec
from mxspec.formats import E2M1, E8M0FNU, MX_BLOCK_SIZE
from mxspec.nn._autograd import applied, signature_once
from mxspec.nn._checks import as_autocast, check_devices, check_input, check_tensors
from mxspec.nn._swiglu import Swiglu
from mxspec.nn.experts import GroupedExperts
from mxspec.nn.grouped_mm import check_offs


# An operator, because a compiled graph cannot raise by itself. Its traced backward has this call.
@torch.library.custom_op("mxspec::no_gradient_of_held_weights", mutates_args=())
def _no_gradient(grad: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    raise RuntimeError(
        f"{name}: the layer holds its weights in MXFP4, for inference, so it has no gradient. Train the model first, "
        "and call quantize_weights last."
    )


@_no_gradient.register_fake
def _(grad: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    return grad.new_empty(shape)


@signature_once
class _Product(torch.autograd.Function):
    """`mx_grouped_gemm` of bfloat16 tokens. Its backward raises an error that names the layer."""

    @staticmethod
    def forward(x: Tensor, codes: Tensor, scale: Tensor, offs: Tensor, name: str) -> Tensor:
        return mxspec.mx_grouped_gemm(x, None, codes, scale, offs, scale_layout="plain")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name, ctx.shape = inputs[-1], inputs[0].shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        return _no_gradient(grad, ctx.name, ctx.shape), None, None, None, None


class WeightOnlyExperts(nn.Module):
    """Experts of two grouped matmuls whose weights are MXFP4 codes and whose tokens are bfloat16.

    In place of each weight called `w`, the layer has two buffers of uint8, as a checkpoint of gpt-oss has them:

    - `w_blocks`, `(E, N, K/32, 16)`: two e2m1 codes in a byte, the first in the low nibble.
    - `w_scales`, `(E, N, K/32)`: the e8m0 scales.
    """

    weight_names: ClassVar[tuple[str, ...]]

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load codes by their bits. `copy_` would convert a dtype of codes by value, and other dtypes silently."""
        for name in (f"{prefix}{w}_{what}" for w in self.weight_names for what in ("blocks", "scales")):
            came = state_dict.get(name)
            if isinstance(came, Tensor) and came.dtype in (E2M1.dtype, E8M0FNU.dtype):
                state_dict[name] = came.view(torch.uint8)
            elif isinstance(came, Tensor) and came.dtype != torch.uint8:
                raise TypeError(f"{type(self).__name__}: {name} has dtype {came.dtype}; needs codes in torch.uint8")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def num_experts_held(self) -> int:
        return int(getattr(self, f"{self.weight_names[0]}_blocks").shape[0])

    def checked(self, x: Tensor, **others: Tensor) -> Tensor:
        """The tokens x, after autocast, contiguous. Raises if they are not `(M, K)`, in bfloat16, on this device."""
        name, blocks = type(self).__name__, getattr(self, f"{self.weight_names[0]}_blocks")
        check_tensors(name, x=x, **others)
        x = as_autocast(name, x)
        width = blocks.shape[-2] * MX_BLOCK_SIZE
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name}: input has dtype {x.dtype}; MXFP4 weights need tokens in torch.bfloat16")
        check_input(name, x, width)
        if x.ndim != 2:
            raise ValueError(f"{name}: input has shape {tuple(x.shape)}; needs (M, {width})")
        check_devices(name, x, **others, **{f"{self.weight_names[0]}_blocks": blocks})
        return x.contiguous()  # the matmuls need rows side by side

    def extra_repr(self) -> str:
        return "weights in MXFP4, tokens in bfloat16"


class WeightOnlyGroupedExperts(WeightOnlyExperts):
    """A `GroupedExperts` after `quantize_weights`. Its forward takes the same arguments; x is bfloat16."""

    weight_names = GroupedExperts.weight_names
    num_experts: int

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        x = self.checked(x, offs=offs)
        check_offs(type(self).__name__, offs, self.num_experts)
        return self.feed_forward(x, offs)
