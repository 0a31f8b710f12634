"""Rows that came as codes. The matmuls of an FP8 recipe multiply these codes, so nothing is quantized twice for them.

`Coded` has the shape and the dtype of the rows, so autograd takes it for tokens, or for a gradient. It holds the
messages of `Wire`. Quantizers read the messages in place of values:

| quantizer | what it gives |
|---|---|
| FP8, along the features | the codes and scales of the messages |
| FP8, along the tokens | `fp8_requantize_k_groups` of them |
| FP8, in both directions | both |
| MX, along the tokens | `mx_requantize_groups` of them |

Every other op, and a quantizer with other options, reads the values of the codes: the values that `wire_reference`
gives. `mx_fake_quantize_rowcol_groups`, which MXFP8 calls on Hopper, is such an op.

Along the tokens, the results have the bytes that quantizing the values has. Along the features, codes and scales may
differ from those of the values, but each product of code and scale is equal. There is one exception: a code may stand
for a number beyond the largest number of the dtype. Its value is Inf, but a matmul of codes multiplies the number.

For float32 rows with fp32 scales the numbers would differ: quantizing the values can give a scale that differs in its
last bit. So such rows are values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mxspec
from mxspec.distributed._bare import EPS, Bare
from mxspec.distributed._wire import Wire

aten = torch.ops.aten


def rows_of(message: Tensor, wire: Wire, D: int, dtype: torch.dtype) -> Tensor:
    """The rows `(M, D)` of messages: `Coded`, or their values if quantizing these would give other numbers."""
    has_fp32_scales = (wire.recipe.format, wire.recipe.scale_format) == ("fp8_128", "fp32")
    if has_fp32_scales and dtype == torch.float32:
        return wire.decode(message, D, dtype)
    return Coded(message, wire, D, dtype)


class Coded(Bare):
    """Rows `(M, D)` that are only codes and scales: the messages of a wire, `(M, bytes)` uint8."""

    message: Tensor
    wire: Wire

    def __new__(cls, message: Tensor, wire: Wire, D: int, dtype: torch.dtype) -> Coded:
        made: Coded = cls.like(cls, (message.shape[0], D), (D, 1), dtype, message.device)
        made.message, made.wire = message, wire
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Coded({tuple(self.shape)}, {self.dtype}, {self.wire.recipe})"

    def values(self) -> Tensor:
        """The values of the codes, as a plain tensor."""
        return self.wire.decode(self.message, self.shape[1], self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["message"], (self.wire, self.shape[1], self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Coded:
        wire, D, dtype = meta
        return Coded(inner["message"], wire, D, dtype)

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected_type: type | None = None) -> Any:
        """For a compiled backward, which was traced for plain gradients."""
        return self.values() if expected_type in (None, Tensor) else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self, named = args[0] if args else None, kwargs or {}
        if isinstance(self, cls):
            same_shape = func is aten.view.default and tuple(args[1]) == self.shape
            if same_shape or func in (aten.detach.default, aten.alias.default):
                return cls(self.message, self.wire, self.shape[1], self.dtype)
            if func is aten.record_stream.default:
                return func(self.message, *args[1:])
            quantized = _QUANTIZERS.get(func.name())
            if quantized and (found := quantized(self, *args[1:], **named)) is not None:
                return found
        values, named = tree_map_only(cls, lambda t: t.values(), (args, named))
        return func(*values, **named)

    def _rows(
        self,
        *,
        axis: int = -1,
        scale_major: str = "k",
        scale_format: str = "fp32",
        eps: float = EPS,
        backend: str = "",
    ) -> list[Tensor] | None:
        recipe = self.wire.recipe
        if (recipe.format, recipe.scale_format, EPS, -1) != ("fp8_128", scale_format, eps, axis):
            return None
        codes, scale = self.wire.parts(self.message, self.shape[1])
        return [codes, scale.mT.contiguous().mT if scale_major == "mn" else scale.contiguous()]

    def _columns(self, offs: Tensor, **options: Any) -> list[Tensor] | None:
        if self.wire.recipe.format != "fp8_128":
            return None
        return self._requantized(mxspec.fp8_requantize_k_groups, offs, options)

    def _both_ways(self, offs: Tensor, **options: Any) -> list[Tensor] | None:
        of_rows = {key: value for key, value in options.items() if key != "check_offs"}
        if (rows := self._rows(scale_major="mn", **of_rows)) is None:
            return None
        return [*rows, *self._requantized(mxspec.fp8_requantize_k_groups, offs, options)]

    def _mx_columns(self, offs: Tensor, *, axis: int = -1, **options: Any) -> list[Tensor] | None:
        if self.wire.recipe.format != "mxfp8" or axis != -2:
            return None
        return self._requantized(mxspec.mx_requantize_groups, offs, options)

    def _requantized(self, op: Any, offs: Tensor, options: dict[str, Any]) -> list[Tensor]:
        codes, scale = self.wire.parts(self.message, self.shape[1])
        return list(op(codes, scale, offs, dtype=self.dtype, **options))


_QUANTIZERS: dict[str, Any] = {
    "mxspec::fp8_quantize_1x128": Coded._rows,
    "mxspec::fp8_quantize_k_groups": Coded._columns,
    "mxspec::fp8_quantize_rowcol_groups": Coded._both_ways,
    "mxspec::mx_quantize_groups": Coded._mx_columns,
}
