"""A Linear whose three matmuls multiply MXFP8 codes, blocks of 32 along the dimension that is summed.

Each tensor is read once and quantized along both of its dimensions: x and the weight in the forward, the gradient of
the output in the backward. The codes of x along the tokens are saved for the backward, a byte an element.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from mxspec.nn._linear import QuantizedLinear
from mxspec.nn.recipe import Recipe, recipe_of


class MXLinear(QuantizedLinear):
    """`nn.Linear` whose forward, dgrad and wgrad multiply MXFP8 codes.

    `y = x @ weight^T + bias`, each operand quantized in blocks of 32 along the dimension that its matmul sums over. The
    weight is quantized once a forward, for dgrad as well; `cache_weights` stretches that over several. Where the
    weight needs a gradient, x is quantized along the tokens in the forward and only those codes are kept of it; a
    number of tokens that is no multiple of 32 is padded with zeros for that. Parameters and state dict are those of
    `nn.Linear`.

    Args:
        in_features, out_features: K and N, multiples of 32.
        bias: whether there is one; it is added to the rounded product.
        device, dtype: of the parameters; bfloat16 or float32.
        recipe: an mxfp8 `Recipe` or its name. With `wgrad_bf16` the gradient of the weight is a bfloat16 matmul of
            grad_out and x, rounded to bfloat16, and x itself is saved.

    Shapes:
        x: `(..., K)`, bfloat16 or float32, any number of tokens; under autocast it is cast as `nn.Linear` would.
        Returns `(..., N)` of that dtype. The gradient of the weight is summed in fp32 and rounded once, to the
            weight's dtype.

    Special values: a NaN or an Inf in a token makes the token's output NaN; one in the weight its column.

    Raises:
        TypeError: a dtype other than those, or an input that is no tensor.
        ValueError: features that are no multiples of 32, an x of another last dimension or device, or not dense, a
            recipe of another format.
        RuntimeError: a weight that changed while `cache_weights` held its codes, the derivative of a gradient, as a
            gradient penalty needs it, or a checkpointed forward that ran again by another backend.

    Example:
        >>> layer = MXLinear.from_linear(nn.Linear(64, 32), recipe="mxfp8_floor")
        >>> layer(torch.zeros(5, 64)).shape
        torch.Size([5, 32])

    Source: OCP MX v1.0; NVIDIA, "Recipes for Pre-training LLMs with MXFP8", 2025.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str = "mxfp8_rceil",
    ) -> None:
        found = recipe_of(recipe, "MXLinear")
        if found.format != "mxfp8":
            raise ValueError(f"MXLinear: the recipe's format is {found.format}; needs mxfp8")
        super().__init__(in_features, out_features, bias, device, dtype, recipe=found)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe | str = "mxfp8_rceil") -> Self:
        """The same parameters, not copies of them, in a layer of this kind; nothing else of the Linear comes along."""
        return cls._with_parameters_of(linear, recipe=recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"
