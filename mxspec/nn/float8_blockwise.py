"""A Linear whose three matmuls run in FP8 with 128-blocks: DeepSeek-V3's recipe.

The weight is in 128x128 blocks. Activations and gradients are in 1x128 blocks along the dimension that the matmul sums
over. The forward saves x itself, because the backward quantizes it along the tokens. It saves the codes of the weight's
transpose, or, with `save_weight_codes=False`, the weight itself. The gradient of the weight is summed in fp32.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from mxspec.nn._linear import QuantizedLinear
from mxspec.nn.recipe import Recipe


class Float8BlockwiseLinear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply e4m3fn codes with fp32 scales in blocks of 128.

    `y = x @ weight^T + bias`, with x in 1x128 blocks and the weight in 128x128 blocks. The gradient of the output is in
    1x128 blocks too, and the gradient of the weight is summed in fp32. Each forward quantizes the weight once, for its
    own matmul and for dgrad. Inside a `cache_weights` block, the weight is quantized once for all forwards. The layer
    has the parameters and the state dict of `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 16. The last block of 128 may be shorter.
        bias: whether the layer has a bias. The bias is added to the rounded product.
        device, dtype: the device and dtype of the parameters; bfloat16 or float32.
        recipe: `fp8_128` or its `Recipe`. With `save_weight_codes=False` the forward quantizes the weight along K only
            and saves the weight itself, and dgrad quantizes its transpose.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens. Under autocast, x is cast as for `nn.Linear`.
        Returns `(..., N)` in the dtype of x (after the cast).

    Special values: a NaN or an Inf in a token makes the token's output NaN. A NaN or an Inf in the weight makes the 128
        output columns of its block NaN.

    Raises:
        TypeError: the input is not a tensor, or a dtype is neither bfloat16 nor float32.
        ValueError: the features are not multiples of 16, x is not dense, has another last dimension or is on another
            device, or the recipe has another format.
        RuntimeError: a weight changed while `cache_weights` held its codes; a gradient is differentiated, as a gradient
            penalty does; or a checkpointed forward ran again on another backend.

    Source: DeepSeek-V3 technical report, section 3.3.
    """

    format = "fp8_128"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "fp8_128",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=recipe)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe | str = "fp8_128") -> Self:
        """Make a layer of this kind from an `nn.Linear`. It shares the Linear's parameters and takes nothing else."""
        return cls._with_parameters_of(linear, recipe=recipe)
