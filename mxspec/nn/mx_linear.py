"""A Linear whose three matmuls multiply MXFP8 codes, in blocks of 32 along the dimension that the matmul sums over.

Each tensor is read once and quantized along both of its dimensions. This happens to x and the weight in the forward,
and to the gradient of the output in the backward. The forward saves the codes of x along the tokens for the backward,
one byte per element. It saves the codes of the weight's transpose too, or, with `save_weight_codes=False`, the weight
itself. With `wgrad_bf16`, x and the gradient of the output are quantized along the features only, and the
forward saves x.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from mxspec.nn._linear import QuantizedLinear
from mxspec.nn.recipe import Recipe


class MXLinear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply MXFP8 codes.

    `y = x @ weight^T + bias`. Each operand is quantized in blocks of 32 along the dimension that its matmul sums over.
    Each forward quantizes the weight once, for its own matmul and for dgrad. With `save_weight_codes=False` it saves
    the weight itself, and the backward quantizes it for dgrad. Inside a `cache_weights` block, the weight is quantized
    once for all forwards. If the weight needs a gradient, the forward also quantizes x along the tokens, and saves only
    these codes of x. For this, it pads x with zero rows to a multiple of 32 tokens. The layer has the parameters and
    the state dict of `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 32.
        bias: whether the layer has a bias. The bias is added to the rounded product.
        device, dtype: the device and dtype of the parameters; bfloat16 or float32.
        recipe: an mxfp8 `Recipe` or its name. With `wgrad_bf16` the gradient of the weight is a bfloat16 matmul of
            grad_out and x, rounded to bfloat16, and the forward saves x itself.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens. Under autocast, x is cast as for `nn.Linear`.
        Returns `(..., N)` in the dtype of x (after the cast). The gradient of the weight is summed in fp32 and rounded
            once, to the weight's dtype.

    Special values: a NaN or an Inf in a token makes the token's output NaN. A NaN or an Inf in a row of the weight
        makes the output column of this row NaN.

    Raises:
        TypeError: the input is not a tensor, or a dtype is neither bfloat16 nor float32.
        ValueError: the features are not multiples of 32, x is not dense, has another last dimension or is on another
            device, or the recipe has another format.
        RuntimeError: a weight changed while `cache_weights` held its codes; a gradient is differentiated, as a gradient
            penalty does; or a checkpointed forward ran again on another backend.

    Example:
        >>> layer = MXLinear.from_linear(nn.Linear(64, 32), recipe="mxfp8_floor")
        >>> layer(torch.zeros(5, 64)).shape
        torch.Size([5, 32])

    Source: OCP MX v1.0; NVIDIA, "Recipes for Pre-training LLMs with MXFP8", 2025.
    """

    format = "mxfp8"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "mxfp8_rceil",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=recipe)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe | str = "mxfp8_rceil") -> Self:
        """Make a layer of this kind from an `nn.Linear`. It shares the Linear's parameters and takes nothing else."""
        return cls._with_parameters_of(linear, recipe=recipe)
