"""The training formats: MXFP8, by codes and by values, FP8 with 128-blocks, and the choice between them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import mxspec
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE
from mxspec.nn._bf16 import MAX_GROUPS, gemm_bf16, wgrad_bf16
from mxspec.nn._format import Format, Operand, Tokens, Weight
from mxspec.nn._nvfp4 import NVFP4Values
from mxspec.nn._watched import forward_of
from mxspec.nn.recipe import Recipe

_SCALE_LAYOUT = "plain"  # mx_gemm's kernels for Hopper read this layout; cuBLAS needs `blocked`


class MX(Format):
    """MXFP8, in blocks of 32.

    Without token groups, one op reads a tensor once and makes both directions. Token groups are padded for every
    matmul.
    """

    kind: ClassVar[str] = "mxfp8"

    def _options(self, **more: Any) -> dict[str, Any]:
        return {"scaling": self.recipe.scaling, "backend": self.backend, **more}

    def both_ways(self, w: Tensor) -> Weight:
        layout = "blocked" if w.ndim == 3 else _SCALE_LAYOUT
        codes, scale, codes_t, scale_t = mxspec.mx_quantize_rowcol(w, **self._options(scale_layout=layout))
        return Weight(codes, scale, codes_t.mT, scale_t)

    def one_way(self, w: Tensor, turned: bool) -> tuple[Tensor, Tensor | None]:
        layout = "blocked" if w.ndim == 3 else _SCALE_LAYOUT
        codes, scale = mxspec.mx_quantize(w, axis=-2 if turned else -1, **self._options(scale_layout=layout))
        return codes.mT if turned else codes, scale

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        options = self._options(elem_dtype=elem_dtype)
        if offs is not None:
            return Tokens(
                Operand(*mxspec.mx_quantize_groups(x, offs, axis=-1, **options)) if along_features else None,
                Operand(*mxspec.mx_quantize_groups(x, offs, axis=-2, **options)) if along_tokens else None,
            )
        options["scale_layout"] = _SCALE_LAYOUT
        padded = whole_blocks(x, MX_BLOCK_SIZE) if along_tokens else x
        if along_features and along_tokens:
            q_row, s_row, q_col, s_col = mxspec.mx_quantize_rowcol(padded, **options)
            # In the blocked layout s_row stays whole: rows come in tiles of 128, so the padding of up to 31 rows adds
            # no tile, and no matmul reads the padding's scales.
            s_row = s_row[: x.shape[0]] if _SCALE_LAYOUT == "plain" else s_row
            return Tokens(Operand(q_row[: x.shape[0]], s_row), Operand(q_col.mT, s_col))
        if along_tokens:
            q_col, s_col = mxspec.mx_quantize(padded, axis=-2, **options)
            return Tokens(None, Operand(q_col.mT, s_col))
        return Tokens(Operand(*mxspec.mx_quantize(x, axis=-1, **options)) if along_features else None, None)

    def gemm(
        self, a: Operand, b: Tensor, b_scale: Tensor | None, offs: Tensor | None, M: int, dtype: torch.dtype
    ) -> Tensor:
        options: Any = {"out_dtype": dtype, "backend": self.backend}
        if offs is None:
            return mxspec.mx_gemm(a.codes, a.scale, b, b_scale, scale_layout=_SCALE_LAYOUT, **options)
        out = mxspec.mx_grouped_gemm(a.codes, a.scale, b, b_scale, a.end, **options)
        return mxspec.unpad_token_groups(out, offs, a.start, M, backend=self.backend)

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        if offs is None:
            return self.gemm(grad_out, x.codes, x.scale, None, 0, dtype)
        return mxspec.mx_grouped_gemm_wgrad(
            grad_out.codes, grad_out.scale, x.codes, x.scale, grad_out.end, out_dtype=dtype, backend=self.backend
        )

    def saves_codes(self, offs: Tensor | None) -> bool:
        return not self.recipe.wgrad_bf16

    def reads_once(self, offs: Tensor | None) -> bool:
        return offs is None


class MXValues(MX):
    """MXFP8 of token groups, multiplied as bf16 values: what a GPU without MX tensor cores can multiply fastest.

    `mx_fake_quantize_rowcol_groups` gives the values of the codes in both directions from one read. PyTorch's grouped
    matmul multiplies them. No code, no scale and no padding is written, except where `one_way` quantizes a weight.

    Each value of at least 2^-126 is exactly a bf16 number. Smaller values are rounded to multiples of 2^-133, the
    smallest bf16 number.
    """

    kind: ClassVar[str] = "mxfp8 by values"

    def both_ways(self, w: Tensor) -> Weight:
        E, N, _ = w.shape
        # N is a multiple of 32, so the blocks along N of all matrices are the blocks of one group of E * N rows.
        whole = torch.full((1,), E * N, dtype=torch.int32, device=w.device)
        rows, columns = mxspec.mx_fake_quantize_rowcol_groups(w.reshape(E * N, -1), whole, **self._options())
        return Weight(rows.view_as(w), None, columns.view_as(w).mT, None)

    def one_way(self, w: Tensor, turned: bool) -> tuple[Tensor, Tensor | None]:
        # No op gives the values of one direction alone. These two ops give the same bits by way of codes.
        axis = -2 if turned else -1
        codes = mxspec.mx_quantize(w, axis=axis, **self._options())
        values = mxspec.mx_dequantize(*codes, axis=axis, backend=self.backend)
        return values.mT if turned else values, None

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        assert offs is not None
        options = self._options(elem_dtype=elem_dtype)
        rows, columns = mxspec.mx_fake_quantize_rowcol_groups(x, offs, **options)
        return Tokens(Operand(rows) if along_features else None, Operand(columns) if along_tokens else None)

    def gemm(
        self, a: Operand, b: Tensor, b_scale: Tensor | None, offs: Tensor | None, M: int, dtype: torch.dtype
    ) -> Tensor:
        assert offs is not None
        return gemm_bf16(a.codes, b.mT, offs)

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        return wgrad_bf16(grad_out.codes, x.codes, offs)

    def reads_once(self, offs: Tensor | None) -> bool:
        return True

    def fuses_swiglu(self, x: Tensor) -> bool:
        return True

    def swiglu(self, gate_up: Tensor, offs: Tensor) -> Tokens:
        hidden = mxspec.swiglu(*gate_up.chunk(2, -1), backend=self.backend)
        return self.tokens(hidden, offs, torch.float8_e4m3fn, True, True)

    def swiglu_backward(self, gate_up: Tensor, grad_hidden: Tensor, offs: Tensor) -> Tokens:
        gradient = mxspec.swiglu_backward(*gate_up.chunk(2, -1), grad_hidden, backend=self.backend)
        return self.gradients(gradient, offs, True, True)


class FP8Blocks(Format):
    """FP8: weights in 128x128 blocks, tokens in 1x128 blocks, fp32 scales. Token groups are padded for wgrad only."""

    kind: ClassVar[str] = "fp8_128"

    def _options(self) -> dict[str, Any]:
        return {"scale_format": self.recipe.scale_format, "backend": self.backend}

    def both_ways(self, w: Tensor) -> Weight:
        return Weight(*mxspec.fp8_quantize_128x128(w, with_transpose=True, **self._options()))

    def one_way(self, w: Tensor, turned: bool) -> tuple[Tensor, Tensor | None]:
        codes, scale = mxspec.fp8_quantize_128x128(w.mT if turned else w, **self._options())
        return codes, scale

    def tokens(
        self, x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, along_features: bool, along_tokens: bool
    ) -> Tokens:
        rows = columns = None
        if along_features and along_tokens and offs is not None:
            return _both_ways(mxspec.fp8_quantize_rowcol_groups(x, offs, **self._options()))
        # The matmuls read MN-major scales directly; K-major scales would need a transpose first.
        if along_features:
            rows = Operand(*mxspec.fp8_quantize_1x128(x, scale_major="mn", **self._options()))
        if along_tokens and offs is not None:
            columns = Operand(*mxspec.fp8_quantize_k_groups(x, offs, **self._options()))
        elif along_tokens:
            padded = whole_blocks(x, FP8_BLOCK_SIZE)
            codes, scale = mxspec.fp8_quantize_1x128(padded, axis=-2, scale_major="mn", **self._options())
            columns = Operand(codes.mT, scale)
        return Tokens(rows, columns)

    def gemm(
        self, a: Operand, b: Tensor, b_scale: Tensor | None, offs: Tensor | None, M: int, dtype: torch.dtype
    ) -> Tensor:
        options: Any = {"out_dtype": dtype, "backend": self.backend}
        if offs is None:
            return mxspec.fp8_gemm(a.codes, a.scale, b, b_scale, **options)
        return mxspec.fp8_grouped_gemm(a.codes, a.scale, b, b_scale, offs, **options)

    def wgrad(self, grad_out: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        if offs is None:
            return self.gemm(grad_out, x.codes, x.scale, None, 0, torch.float32).to(dtype)
        return mxspec.fp8_grouped_gemm_wgrad(
            grad_out.codes, grad_out.scale, x.codes, x.scale, grad_out.end, out_dtype=dtype, backend=self.backend
        )

    def saves_codes(self, offs: Tensor | None) -> bool:
        return offs is not None

    def reads_once(self, offs: Tensor | None) -> bool:
        return offs is not None

    def fuses_swiglu(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16

    def swiglu(self, gate_up: Tensor, offs: Tensor) -> Tokens:
        return _both_ways(mxspec.swiglu_fp8_quantize_rowcol_groups(gate_up, offs, **self._options()))

    def swiglu_backward(self, gate_up: Tensor, grad_hidden: Tensor, offs: Tensor) -> Tokens:
        op = mxspec.swiglu_backward_fp8_quantize_rowcol_groups
        return _both_ways(op(gate_up, grad_hidden, offs, **self._options()))

    def fuses_clamped_swiglu(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16

    def clamped_swiglu(self, gate_up: Tensor, bias: Tensor, offs: Tensor) -> Tokens:
        op = mxspec.clamped_swiglu_fp8_quantize_rowcol_groups
        return _both_ways(op(gate_up, bias.to(gate_up.dtype), offs, **self._options()))

    def clamped_swiglu_backward(self, gate_up: Tensor, bias: Tensor, grad_hidden: Tensor, offs: Tensor) -> Tokens:
        op = mxspec.clamped_swiglu_backward_fp8_quantize_rowcol_groups
        return _both_ways(op(gate_up, bias.to(gate_up.dtype), grad_hidden, offs, **self._options()))

    def sums(self, columns: Operand, offs: Tensor, dtype: torch.dtype) -> Tensor:
        # A matmul with ones: it reads the codes once. fp8_grouped_gemm_wgrad needs 16 rows.
        codes, scale = columns.codes, columns.scale
        assert scale is not None
        ones = torch.ones((16, codes.shape[1]), dtype=torch.float32, device=codes.device).to(codes.dtype)
        one = torch.ones((scale.shape[1], 16), dtype=scale.dtype, device=scale.device).mT
        return self.wgrad(columns, Operand(ones, one), offs, dtype)[..., 0].contiguous()


def _both_ways(quantized: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]) -> Tokens:
    q_row, s_row, q_col, s_col, start, end = quantized
    return Tokens(Operand(q_row, s_row), Operand(q_col, s_col, start, end))


_OF_KIND: dict[str, type[Format]] = {of.kind: of for of in (MX, MXValues, FP8Blocks, NVFP4Values)}
# torch.compile moves ops of the backward into the forward if they need nothing that the backward computes, and would
# then save their results. Quantizing a saved weight is such an op. So in a graph, it is one operator that also takes a
# tensor of the backward, which it does not read.
_LIBRARY = torch.library.Library("mxspec_nn", "DEF")
_LIBRARY.define(
    "quantize_after(Tensor w, Tensor after, str kind, str scaling, str scale_format, bool turned) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _quantize_after(w: Tensor, after: Tensor, kind: str, scaling: str, scale_format: str, turned: bool) -> list[Tensor]:
    of = _OF_KIND[kind]
    format = {FP8Blocks: "fp8_128", NVFP4Values: "nvfp4"}.get(of, "mxfp8")
    recipe = Recipe(format, scaling, scale_format=scale_format)
    return [t for t in of(recipe, None, kind).one_way(w, turned) if t is not None]


_LIBRARY.impl("quantize_after", _quantize_after, "CompositeExplicitAutograd")
torch.library.register_fake("mxspec_nn::quantize_after", _quantize_after, lib=_LIBRARY)


def format_of(
    recipe: Recipe, backend: str | None, name: str, layer: nn.Module | None = None, by_values: bool = False
) -> Format | None:
    """The format of a recipe, for the layer or function `name`. None for the recipe bf16, which quantizes nothing.

    With `by_values`, mxfp8 multiplies bf16 values of token groups. `refusal_of_values` says when it can.
    """
    if recipe.format == "bf16":
        return None
    of, watch = MXValues if by_values else _OF_KIND[recipe.format], forward_of(layer)
    return of(recipe, backend, name, watch)


def refusal_of_values(recipe: Recipe, backend: str | None, w: Tensor, dtype: torch.dtype) -> str | None:
    """Why a grouped matmul of MXFP8 does not multiply bf16 values, but codes. None if it multiplies values.

    w is a weight `(E, N, K)` or `(E, K, N)`, and `dtype` is the dtype of the tokens. On a Hopper, a step by codes takes
    0.86 to 0.99 of the time of a step by values with 2 to 64 tokens an expert, and 1.01 to 1.07 with 256 and 512
    (benchmarks/results/decisions.md). Training has many tokens.
    """
    if recipe.format != "mxfp8":
        return f"the recipe's format is {recipe.format}"
    if recipe.wgrad_bf16:
        return "the recipe multiplies wgrad in bfloat16"
    if not dtype == w.dtype == torch.bfloat16:
        return f"the tokens are {dtype} and the weights {w.dtype}; values need bfloat16 for both"
    if w.shape[0] > MAX_GROUPS:
        return f"{w.shape[0]} experts; PyTorch's grouped matmul takes up to {MAX_GROUPS}"
    if backend not in (None, "auto", "triton"):
        return f"the backend is {backend!r}"
    if not _is_hopper(w.device):
        return "the GPU is no Hopper"
    return None


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


# torch.compile does not trace the driver's answer. This is what torch.compiler.assume_constant_result sets, but that
# function also imports torch._dynamo, which takes longer than the rest of `import mxspec.nn`.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


def whole_blocks(x: Tensor, block_size: int) -> Tensor:
    """x with rows of zeros that fill the last block of rows, or x itself if its last block is full.

    A compiled graph for any number of rows always pads. With a branch, torch.compile would make two graphs: one for
    multiples of the block size, and one for all other numbers of rows.
    """
    missing = -(-x.shape[0] // block_size) * block_size - x.shape[0]
    none_missing = missing == 0
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # not at the top: it imports sympy

        none_missing = statically_known_true(none_missing)
    if none_missing:
        return x
    return _padded_shards(x, missing) if hasattr(x, "placements") else pad(x, (0, 0, 0, missing))


def _padded_shards(x: Any, missing: int) -> Tensor:
    """`pad` of a DTensor. In PyTorch 2.11, its own `pad` lost the rows of zeros if x was sharded by columns."""
    from torch.distributed.tensor import DTensor, Replicate  # not at the top: the layers also run without it

    by_columns = [p if p.is_shard() and not p.is_shard(0) else Replicate() for p in x.placements]
    local = pad(x.redistribute(placements=by_columns).to_local(), (0, 0, 0, missing))
    shape = torch.Size((x.shape[0] + missing, x.shape[1]))
    return DTensor.from_local(local, x.device_mesh, by_columns, run_check=False, shape=shape, stride=(x.shape[1], 1))
