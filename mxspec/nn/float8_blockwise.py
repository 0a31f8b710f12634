"""A Linear whose three matmuls run in FP8 with 128-blocks: DeepSeek-V3's recipe.

The weight is in 128x128 blocks, activations and gradients are in 1x128 blocks along the dimension that is summed. The
backward quantizes x along the tokens, so that x itself is saved. The gradient of the weight is summed in fp32.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from mxspec.nn._linear import QuantizedLinear
from mxspec.nn.recipe import RECIPES


class Float8BlockwiseLinear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply e4m3fn codes with fp32 scales in blocks of 128.

    `y = x @ weight^T + bias` with x in 1x128 blocks and the weight in 128x128 blocks; the gradients likewise, those of
    the weight summed in fp32. The weight is quantized once a forward, for dgrad as well; `cache_weights` stretches
    that over several. Parameters and state dict are those of `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 128.
        bias: whether there is one; it is added to the rounded product.
        device, dtype: of the parameters; bfloat16 or float32.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens; under autocast it is cast as `nn.Linear` would.
        Returns `(..., N)` of that dtype.

    Special values: a NaN or an Inf in a token makes the token's output NaN; one in the weight its 128 columns.

    Raises:
        TypeError: a dtype other than those, or an input that is no tensor.
        ValueError: features that are no multiples of 128, or an x of another last dimension or device, or not dense.
        RuntimeError: a weight that changed while `cache_weights` held its codes, the derivative of a gradient, as a
            gradient penalty needs it, or a checkpointed forward that ran again by another backend.

    Source: DeepSeek-V3 technical report, section 3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=RECIPES["fp8_128"])

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """The same parameters, not copies of them, in a layer of this kind; nothing else of the Linear comes along."""
        return cls._with_parameters_of(linear)
