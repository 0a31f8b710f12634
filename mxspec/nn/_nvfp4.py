"""NVFP4 training: bf16 values of NVFP4 codes, which any GPU can multiply.

| operand | blocks | rounding | transform |
|---|---|---|---|
| activations, along the features and along the tokens | 1x16 | to nearest | along the tokens |
| gradients of outputs, in the same directions | 1x16 | stochastic | along the tokens |
| weights | 16x16: one set of values for both directions | to nearest | none |

The values are in units of the tensor scales, and exact in bfloat16. The matmuls take the tensor scales too. There is
one for a weight matrix, and for each token group one in each direction.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

import mxspec
from mxspec.nn._format import Format, Operand, Tokens, Weight

# TransformerEngine's random signs of the transform: + + + - + - - - - - - + - + - -, the first in the lowest bit.
SIGNS = 0xD7E8


class NVFP4Values(Format):
    """NVFP4, multiplied as bf16 values.

    `nvfp4_fake_quantize_rowcol_groups` gives the values in both directions. Tokens without groups are one group. The
    values along the tokens stay transformed and padded: both operands of wgrad are.
    """

    kind: ClassVar[str] = "nvfp4"

    def both_ways(self, w: Tensor) -> Weight:
        values, scale = self.one_way(w, False)
        return Weight(values, scale, values.mT, scale)

    def one_way(self, w: Tensor, turned: bool) -> tuple[Tensor, Tensor | None]:
        values, tensor_scale = mxspec.nvfp4_fake_quantize(w, block="16x16", backend=self.backend)
        return values.mT if turned else values, tensor_scale

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        return self._tokens(x, offs, None, along_features, along_tokens)

    def gradients(self, gradient: Tensor, offs: Tensor | None, along_features: bool, along_tokens: bool) -> Tokens:
        random = None
        if self.recipe.stochastic_rounding is not False:
            # A seed and an offset from the generator of the device. The host does not read them.
            random = torch.randint(2**62, (2,), dtype=torch.int64, device=gradient.device)
        return self._tokens(gradient, offs, random, along_features, along_tokens)

    @property
    def signs(self) -> int | None:
        """The signs of the transform of both operands of wgrad. None if the recipe has no transform."""
        return SIGNS if self.recipe.hadamard is not False else None

    def _tokens(
        self, x: Tensor, offs: Tensor | None, random: Tensor | None, along_features: bool, along_tokens: bool
    ) -> Tokens:
        groups = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device) if offs is None else offs
        op = mxspec.nvfp4_fake_quantize_rowcol_groups
        rows, row_scale, columns, column_scale, _, end = op(x, groups, random, signs=self.signs, backend=self.backend)
        if offs is None:
            row_scale, column_scale = row_scale[0], column_scale[0]
        return Tokens(
            Operand(rows, row_scale) if along_features else None,
            Operand(columns, column_scale, end=end) if along_tokens else None,
            random,
        )

    def gemm(
        self, a: Operand, b: Tensor, b_scale: Tensor | None, offs: Tensor | None, M: int, dtype: torch.dtype
    ) -> Tensor:
        assert a.scale is not None
        assert b_scale is not None
        if offs is None:
            return mxspec.nvfp4_gemm(
                a.codes, None, a.scale, b, None, b_scale, out_dtype=dtype, backend=self.backend
            )  # fmt: skip
        return mxspec.nvfp4_grouped_gemm(
            a.codes, None, a.scale, b, None, b_scale, offs, out_dtype=dtype, backend=self.backend
        )

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert x.scale is not None
        if offs is None:  # rows after the tokens are 0
            return self.gemm(grad_out._replace(codes=grad_out.codes.mT), x.codes.mT, x.scale, None, 0, dtype)
        assert grad_out.scale is not None
        assert grad_out.end is not None
        return mxspec.nvfp4_grouped_gemm_wgrad(
            grad_out.codes, None, grad_out.scale, x.codes, None, x.scale, grad_out.end,
            out_dtype=dtype, backend=self.backend,
        )  # fmt: skip

    def reads_once(self, offs: Tensor | None) -> bool:
        return True

    def fuses_swiglu(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16

    def swiglu(self, gate_up: Tensor, offs: Tensor) -> Tokens:
        hidden = mxspec.swiglu(*gate_up.chunk(2, -1), backend=self.backend)
        return self.tokens(hidden, offs, torch.float8_e4m3fn, True, True)

    def swiglu_backward(self, gate_up: Tensor, grad_hidden: Tensor, offs: Tensor) -> Tokens:
        gradient = mxspec.swiglu_backward(*gate_up.chunk(2, -1), grad_hidden, backend=self.backend)
        return self.gradients(gradient, offs, True, True)
