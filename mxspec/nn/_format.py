"""What a training format does: it quantizes the operands of a layer's three matmuls, and chooses the ops that multiply.

| matmul | a | b | out |
|---|---|---|---|
| forward | x, quantized along K | w, quantized along K | `(M, N)` |
| dgrad | grad_out, quantized along N | w^T, quantized along N | `(M, K)` |
| wgrad | grad_out^T, along the tokens | x^T, along the tokens | `(N, K)`, for experts `(E, N, K)`; w's dtype |

A `Format` serves one forward and its backward. It holds the recipe and the backend of both. `offs` holds the ends of
the token groups, and each group has its own weight matrix. `offs=None` means one matrix for all tokens. The host reads
no tensor's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mxspec.nn._watched import Forward
from mxspec.nn.recipe import Recipe


class Operand(NamedTuple):
    """K-major codes and their scales. For padded token groups, also the first row and the end row of each group.

    For the format `MXValues`: bf16 values in place of codes, in the order of the tokens, and no scales. For
    `NVFP4Values`: bf16 values, and the tensor scale of each group. Its columns are padded.
    """

    codes: Tensor
    scale: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None


class Tokens(NamedTuple):
    """Activations or gradients, quantized along the features (rows) and along the tokens (columns).

    A direction that no matmul reads is None. `random` is the seed and the offset of stochastic rounding, if there is
    any. Only a watch reads it, to count the same codes.
    """

    rows: Operand | None
    columns: Operand | None
    random: Tensor | None = None


class Weight(NamedTuple):
    """The codes of a weight for the forward, and the codes of its transpose for dgrad. Or values, without scales.

    Without `codes_t`, the forward saves the weight itself, and dgrad quantizes it.
    """

    codes: Tensor
    scale: Tensor | None
    codes_t: Tensor | None = None
    scale_t: Tensor | None = None

    def for_dgrad(self, w: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tensors that the forward saves: the codes of the transpose and their scales, or w itself."""
        return (w, None) if self.codes_t is None else (self.codes_t, self.scale_t)


@dataclass(frozen=True)
class Format:
    kind: ClassVar[str]
    recipe: Recipe
    backend: str | None
    name: str  # the name of the layer or the function, for error texts
    watch: Forward | None = None  # counts the losses of this forward and its backward, if a watch is open

    def weight(self, w: Tensor, transposed: bool = False, held: bool = False) -> Weight:
        """The codes of a weight `(N, K)` or `(E, N, K)`, or of a transposed weight `(E, K, N)`.

        One op reads the weight once, and makes the codes of both directions. For a transposed weight, the codes of the
        two directions change places. If the recipe saves no codes of weights, the codes are those of the forward alone.
        Codes that `cache_weights` holds are always those of both directions.
        """
        if not (held or self.recipe.save_weight_codes):
            return Weight(*self.one_way(w, transposed))
        codes, scale, codes_t, scale_t = self.both_ways(w)
        if not transposed:
            return Weight(codes, scale, codes_t, scale_t)
        assert codes_t is not None
        return Weight(codes_t, scale_t, codes, scale)

    def both_ways(self, w: Tensor) -> Weight:
        """The codes of a matrix, or of each of several matrices, and of its transpose."""
        raise NotImplementedError

    def one_way(self, w: Tensor, turned: bool) -> tuple[Tensor, Tensor | None]:
        """The codes and scales of a matrix, or of each of several matrices. If `turned`, those of its transpose.

        They are the bits of `both_ways`.
        """
        raise NotImplementedError

    def saved_weight(self, w: Tensor, transposed: bool, after: Tensor) -> tuple[Tensor, Tensor | None]:
        """The codes for dgrad of a weight that the forward saved. `after` is any tensor that the backward computes."""
        if not torch.compiler.is_compiling():
            return self.one_way(w.detach(), not transposed)
        rules = self.recipe.scaling, self.recipe.scale_format
        quantize_after = torch.ops.mxspec_nn.quantize_after.default  # of `_formats.py`
        codes, *scale = quantize_after(w.detach(), after, self.kind, *rules, not transposed)
        return codes, scale[0] if scale else None

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        """The codes of activations `(M, K)`, or of gradients, in the directions asked for."""
        raise NotImplementedError

    def gradients(self, gradient: Tensor, offs: Tensor | None, along_features: bool, along_tokens: bool) -> Tokens:
        """The codes of the gradient of an output, `(M, N)`, in the directions asked for."""
        return self.tokens(gradient, offs, self.recipe.grad_dtype, along_features, along_tokens)

    def gemm(
        self, a: Operand, b: Tensor, b_scale: Tensor | None, offs: Tensor | None, M: int, dtype: torch.dtype
    ) -> Tensor:
        """The matmul of the forward, or of dgrad."""
        raise NotImplementedError

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def saves_codes(self, offs: Tensor | None) -> bool:
        """Whether the forward saves x's codes along the tokens for wgrad. If not, it saves x itself."""
        return True

    def reads_once(self, offs: Tensor | None) -> bool:
        """Whether one op makes the codes of both directions from one read."""
        return False

    def fuses_swiglu(self, x: Tensor) -> bool:
        """Whether `swiglu` and `swiglu_backward` exist for these tokens: ops that write codes and no values."""
        return False

    def swiglu(self, gate_up: Tensor, offs: Tensor) -> Tokens:
        """The codes of `silu(gate) * up` in both directions."""
        raise NotImplementedError

    def swiglu_backward(self, gate_up: Tensor, grad_hidden: Tensor, offs: Tensor) -> Tokens:
        """The codes of the gradient of gate and up in both directions."""
        raise NotImplementedError

    def fuses_clamped_swiglu(self, x: Tensor) -> bool:
        """Whether the three methods below exist for these tokens."""
        return False

    def clamped_swiglu(self, gate_up: Tensor, bias: Tensor, offs: Tensor) -> Tokens:
        """The codes of gpt-oss's activation of `gate_up + bias` in both directions. gate_up is interleaved."""
        raise NotImplementedError

    def clamped_swiglu_backward(self, gate_up: Tensor, bias: Tensor, grad_hidden: Tensor, offs: Tensor) -> Tokens:
        """The codes of the gradient of gate_up in both directions."""
        raise NotImplementedError

    def sums(self, columns: Operand, offs: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of each group's codes along the tokens, `(E, N)`: the gradient of a bias."""
        raise NotImplementedError

    def activations(self, x: Tensor, offs: Tensor | None, weight_needs_grad: bool) -> Tokens:
        """The codes of x for the forward, and the codes for wgrad if the forward saves them."""
        along_tokens = torch.is_grad_enabled() and weight_needs_grad and self.saves_codes(offs)
        return self.tokens(x.detach(), offs, torch.float8_e4m3fn, True, along_tokens)
