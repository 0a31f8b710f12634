"""The experts of a mixture-of-experts layer: SwiGLU feed-forward layers, one for each token group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mxspec.nn._autograd import backend_now
from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._checks import (
    as_autocast,
    check_devices,
    check_features,
    check_input,
    check_parameters,
    check_sizes,
    check_tensors,
)
from mxspec.nn._formats import refusal_of_values
from mxspec.nn._product import grouped_product
from mxspec.nn._swiglu import Swiglu, swiglu_experts
from mxspec.nn.expert_calls import ExpertCall, SeparableExperts
from mxspec.nn.grouped_mm import check_offs
from mxspec.nn.recipe import SIZE_MULTIPLES, Recipe, recipe_of


class QuantizedExperts(QuantizesWeights):
    """Experts of two grouped matmuls with an activation between them: the base of mxspec's and converted layers.

    `weight_names` names the weights of the two matmuls, `(E, N, K)`, or `(E, K, N)` if `is_transposed`.
    """

    def train_by(self, recipe: Recipe | str, **widths: int) -> None:
        """Set the recipe. Raises if the recipe cannot run these widths, or if `cache_weights` holds codes."""
        name, found = type(self).__name__, recipe_of(recipe, type(self).__name__)
        check_features(name, SIZE_MULTIPLES[found.format], **widths)
        self._take(found)

    def check_weights(self) -> None:
        """Raise TypeError if a weight has a dtype that no recipe can run."""
        for weight in self._stored():
            check_parameters(type(self).__name__, weight.dtype)  # `half()` may have come after the constructor

    def checked(self, x: Tensor, width: int, **others: Tensor) -> Tensor:
        """The tokens x, after autocast. Raises if x is not of shape `(M, width)`, or a dtype or device does not fit."""
        name = type(self).__name__
        check_tensors(name, x=x, **others)
        x = as_autocast(name, x)
        self.check_weights()
        check_input(name, x, width)
        if x.ndim != 2:
            raise ValueError(f"{name}: input has shape {tuple(x.shape)}; needs (M, {width})")
        check_devices(name, x, **others, **dict(zip(self.weight_names, self._stored(), strict=True)))
        return x

    def explain(self, dtype: torch.dtype = torch.bfloat16) -> str:
        """Say how the matmuls of this layer would run for tokens of a dtype, without running them.

        On Hopper, MXFP8 has two ways: PyTorch's grouped matmul on the bf16 values of the codes, or mxspec's kernels on
        the codes. Both multiply the same MXFP8 numbers. The sums differ in their order.

        >>> from mxspec.nn import GroupedExperts
        >>> print(GroupedExperts(2, 128, 128, "fp8_128").explain())
        GroupedExperts: fp8_128 multiplies codes: the recipe's format is fp8_128
        """
        name, backend = type(self).__name__, backend_now(self)
        if self.recipe.format == "bf16":
            return f"{name}: bf16 quantizes nothing and multiplies bfloat16"
        if self.recipe.format == "nvfp4":
            return f"{name}: nvfp4 multiplies the bf16 values of its codes"
        why_not = self._why_no_values(backend, dtype)
        if why_not is None:
            return f"{name}: mxfp8 multiplies bf16 values, because Hopper has no MX tensor cores"
        return f"{name}: {self.recipe.format} multiplies codes: {why_not}"

    def _why_no_values(self, backend: str | None, dtype: torch.dtype) -> str | None:
        """Why the experts multiply codes and not their bf16 values. None if they multiply values."""
        if why_not := refusal_of_values(self.recipe, backend, self._weights()[0], dtype):
            return why_not
        return None if self._cached is None or self._cached_values else "cache_weights holds codes"

    def _caches_values(self) -> bool:
        return refusal_of_values(self.recipe, None, self._weights()[0], torch.bfloat16) is None

    def feed_forward(
        self, x: Tensor, offs: Tensor, activation: Callable[[Tensor], Tensor] | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Run the experts by the recipe on tokens sorted by expert.

        Args:
            x: `(M, K)`, bfloat16 or float32, after autocast.
            offs: `(E,)` int32, the exclusive end of each expert's tokens, as for `GroupedExperts`.
            activation: a differentiable function of the first matmul's result. None means SwiGLU: `silu` of the first
                half times the second half. One op then computes SwiGLU and quantizes it, if the recipe has such an op.
            bias: `(E, 2I)`. Says that the activation adds this bias, and is then the clamped SwiGLU of
                `clamped_swiglu_fp8_quantize_rowcol_groups`. This op then takes its place, if the recipe has such an op.

        Returns `(M, N)` in x's dtype. Rows from `offs[-1]` on are 0.
        """
        name, (first, second), stored = type(self).__name__, self._weights(), self.is_transposed
        backend = backend_now(self)
        by_values = self._why_no_values(backend, x.dtype) is None
        (of_first, of_second), by = self._quantized(backend, by_values), self._format(backend, by_values)
        if by is None or of_first is None or of_second is None:
            out = grouped_product(x, first, offs, None, None, None, name, stored)
            hidden = activation(out) if activation else Swiglu.apply(out, name)
            return grouped_product(hidden, second, offs, None, None, None, name, stored)
        tokens = by.activations(x, offs, first.requires_grad)
        if bias is not None and by.fuses_clamped_swiglu(x):
            return swiglu_experts(x, first, second, offs, tokens, (of_first, of_second), by, bias, stored)
        if activation is None and not stored and by.fuses_swiglu(x):
            return swiglu_experts(x, first, second, offs, tokens, (of_first, of_second), by)
        out = grouped_product(x, first, offs, tokens, of_first, by, name, stored)
        hidden = activation(out) if activation else Swiglu.apply(out, name)
        tokens = by.activations(hidden, offs, second.requires_grad)
        return grouped_product(hidden, second, offs, tokens, of_second, by, name, stored)


class GroupedExperts(SeparableExperts, QuantizedExperts):
    """`(silu(x @ w_gate[g]^T) * (x @ w_up[g]^T)) @ w_down[g]^T` for the tokens of each expert g.

    The weights of the gate and of up are one parameter. So one grouped matmul computes both, and each of their
    gradients is one matmul too. The layer uses the matmuls of `mx_grouped_mm`, `fp8_grouped_mm` and `nvfp4_grouped_mm`.
    With fp8_128 and bfloat16 tokens, one op computes SwiGLU and quantizes it (`swiglu_fp8_quantize_rowcol_groups`), and
    one op does the same for its gradient (`swiglu_backward_fp8_quantize_rowcol_groups`). Each forward quantizes the
    weights once, in both directions. With `save_weight_codes=False` the forward and the backward each quantize them in
    one direction. Inside a `cache_weights` block, they are quantized once for all forwards. The host never waits for
    the device.

    On Hopper, the MXFP8 recipes may multiply the bfloat16 values of the codes. `explain` says when.

    Args:
        num_experts: the number of experts, E.
        dim, hidden_dim: the width of a token, and the width between the matmuls. Both are multiples of 16; for mxfp8
            of 32.
        recipe: a `Recipe` or its name, as for `mx_grouped_mm`, `fp8_grouped_mm` and `nvfp4_grouped_mm`. `set_recipe`
            changes it later.
        device, dtype: the device and dtype of the parameters; bfloat16 or float32.

    Parameters: `w_gate_up`, `(E, 2 * hidden_dim, dim)`, and `w_down`, `(E, dim, hidden_dim)`. In `w_gate_up`, the rows
        of the gate come before the rows of up. The parameters start with the same random distribution as the weight of
        an `nn.Linear` of the same width. `w_gate` and `w_up` are views of the halves of `w_gate_up`. A state dict of a
        version before 0.3 has `w_gate` and `w_up`; it loads too.

    Shapes:
        x: `(M, dim)`, bfloat16 or float32. The tokens of each expert lie together. Under autocast, x is cast first.
        offs: `(E,)` int32 on x's device, the exclusive end of each expert's tokens. The last end is at most M.
        Returns `(M, dim)` in x's dtype. Rows from `offs[-1]` on are 0.

    Special values: as for `mx_grouped_gemm` and `fp8_grouped_gemm`: a NaN stays with its expert. With the recipe nvfp4,
        a NaN of a token makes all tokens of its expert NaN, because they share a tensor scale. The values of offs are
        not checked: ends out of order give results without meaning.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: a size, a shape or a device does not fit, or the recipe is unknown.
        RuntimeError: a weight changed while `cache_weights` held its codes; a gradient is differentiated, as a gradient
            penalty does; or a checkpointed forward ran again on another backend.

    Example:
        >>> experts = GroupedExperts(2, 32, 64)
        >>> experts(torch.zeros(5, 32), torch.tensor([3, 5], dtype=torch.int32)).shape
        torch.Size([5, 32])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; torchtitan, `GroupedExperts` (w1, w3, w2).
    """

    weight_names: ClassVar[tuple[str, ...]] = ("w_gate_up", "w_down")

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        recipe: Recipe | str = "mxfp8_rceil",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_sizes(name, dim=dim, hidden_dim=hidden_dim)
        if not isinstance(num_experts, int) or num_experts <= 0:
            raise ValueError(f"{name}: num_experts = {num_experts}; needs an int of at least 1")
        check_parameters(name, dtype or torch.get_default_dtype())
        super().__init__()
        self.num_experts, self.dim, self.hidden_dim = num_experts, dim, hidden_dim
        self.set_recipe(recipe)
        shapes = (num_experts, 2 * hidden_dim, dim), (num_experts, dim, hidden_dim)
        self.w_gate_up, self.w_down = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self._weights():
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    @property
    def w_gate(self) -> Tensor:
        """The first half of `w_gate_up`, `(E, hidden_dim, dim)`: a view, not a parameter."""
        return self.w_gate_up[:, : self.hidden_dim]

    @property
    def w_up(self) -> Tensor:
        """The second half of `w_gate_up`, `(E, hidden_dim, dim)`: a view, not a parameter."""
        return self.w_gate_up[:, self.hidden_dim :]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load `w_gate` and `w_up` of an older state dict as the halves of `w_gate_up`."""
        halves = [f"{prefix}{name}" for name in ("w_gate", "w_up")]
        if f"{prefix}w_gate_up" not in state_dict and all(name in state_dict for name in halves):
            state_dict[f"{prefix}w_gate_up"] = torch.cat([state_dict.pop(name) for name in halves], 1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Train by this recipe from now on, which may have any format. The parameters stay.

        With the recipe `bf16`, the matmuls are in bfloat16 for float32 tokens, too. Call it between two steps, and not
        between a forward and its backward.

        Raises:
            TypeError: the recipe is neither a `Recipe` nor a name.
            ValueError: the recipe is unknown, or a width is no multiple of the number that its format needs.
            RuntimeError: the call is inside a `cache_weights` block that holds codes of this layer.
        """
        self.train_by(recipe, dim=self.dim, hidden_dim=self.hidden_dim)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, dim={self.dim}, hidden_dim={self.hidden_dim}, {self.recipe}"

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.compute(x, offs)

    def checked_call(self, x: Tensor, offs: Tensor) -> ExpertCall:
        x = self.checked(x, self.dim, offs=offs)
        check_offs(type(self).__name__, offs, self.num_experts)
        return ExpertCall(x, offs)

    def run_experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        return self.feed_forward(rows, offs)

    def results(self, out: Tensor, call: ExpertCall) -> Tensor:
        return out
