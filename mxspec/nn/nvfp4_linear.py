"""A Linear whose three matmuls multiply the bfloat16 values of NVFP4 codes.

Activations and gradients are in 1x16 blocks along the dimension that the matmul sums over. The weight is in 16x16
blocks, so the forward and dgrad multiply the same values. The forward saves the values of x along the tokens, two bytes
per element, and those of the weight, or, with `save_weight_codes=False`, the weight itself.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from mxspec.nn._linear import QuantizedLinear
from mxspec.nn.recipe import Recipe


class NVFP4Linear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply NVFP4 numbers: NVIDIA's recipe for pretraining.

    `y = x @ weight^T + bias`, with x in 1x16 blocks and the weight in 16x16 blocks. The gradient of the output is in
    1x16 blocks too. With the recipe's `hadamard`, the backward transforms x and the gradient of the output along the
    tokens for the gradient of the weight, as `hadamard_16` does. With `stochastic_rounding`, the backward rounds the
    gradient of the output stochastically in both directions. It draws a seed from PyTorch's generator of the device in
    each backward, and the forward draws none. So a forward that activation checkpointing runs again has the same bits.

    NVFP4 numbers are exact in bfloat16, so any GPU can multiply them. No codes are written, except where the weight is
    quantized. Inside a `cache_weights` block, the weight is quantized once for all forwards. The layer has the
    parameters and the state dict of `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 16.
        bias: whether the layer has a bias. The bias is added to the rounded product.
        device, dtype: the device and dtype of the parameters; bfloat16 or float32.
        recipe: an nvfp4 `Recipe` or its name.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens. Under autocast, x is cast as for `nn.Linear`.
        Returns `(..., N)` in the dtype of x (after the cast). The gradient of the weight is summed in fp32 and rounded
            once, to the weight's dtype.

    Special values: a NaN or an Inf in x makes the whole output NaN, because all tokens share a tensor scale. So does a
        NaN or an Inf in the weight.

    Raises:
        TypeError: the input is not a tensor, or a dtype is neither bfloat16 nor float32.
        ValueError: the features are not multiples of 16, x is not dense, has another last dimension or is on another
            device, or the recipe has another format.
        RuntimeError: a weight changed while `cache_weights` held its codes; a gradient is differentiated, as a gradient
            penalty does; or a checkpointed forward ran again on another backend.

    Example:
        >>> layer = NVFP4Linear.from_linear(nn.Linear(64, 32))
        >>> layer(torch.zeros(5, 64)).shape
        torch.Size([5, 32])

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4; TransformerEngine,
        `NVFP4BlockScaling`.
    """

    format = "nvfp4"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "nvfp4",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=recipe)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe | str = "nvfp4") -> Self:
        """Make a layer of this kind from an `nn.Linear`. It shares the Linear's parameters and takes nothing else."""
        return cls._with_parameters_of(linear, recipe=recipe)
