"""FSDP2 that gathers codes: each rank quantizes its share of an FP8 weight, and half of the bytes cross the wire.

`fully_shard` calls two methods of a parameter, if it has them: `fsdp_pre_all_gather` gives what is gathered, and
`fsdp_post_all_gather` makes the whole parameter from it. `Master` is a parameter with these methods. Its values stay in
the parameter's dtype, for the optimizer. `Gathered` is the whole parameter of a forward. It holds codes and no values.

A share is two matrices of bytes: the codes, and the scales. A row of them belongs to an expert's weight, or to 128 rows
of a matrix. If the group of shards has one rank, FSDP2 loses a second tensor. Then a share is one matrix: a row has its
codes, and then its scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import mxspec
from mxspec.distributed._bare import EPS, Bare
from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.nn import Float8BlockwiseLinear, GroupedExperts
from mxspec.nn._cache import QuantizesWeights

aten = torch.ops.aten
# The ops by which FSDP2, DTensor and optimizers make a parameter from another: their result is a `Master` too.
_KEPT = frozenset(
    (
        aten.alias.default, aten.as_strided.default, aten.clone.default, aten.detach.default, aten.empty_like.default,
        aten.new_empty.default, aten.new_empty_strided.default, aten.new_zeros.default, aten.slice.Tensor,
        aten.split.Tensor, aten.view.default, aten._to_copy.default, aten._pin_memory.default, aten.copy_.default,
    )
)  # fmt: skip


def gather_codes(model: nn.Module, mesh: DeviceMesh) -> dict[str, str]:
    """Make FSDP2 gather the codes of FP8 weights instead of their values. Call it before `fully_shard`.

    Each rank quantizes its share of the weight before each gather. A block of 128 x 128 lies in one share, so the codes
    are those of the whole weight, and a model trains with the same bits as without this call. A gather moves 1 byte an
    element and 4 bytes a block, in place of 2 or 4 bytes an element.

    The parameters keep their names, shapes and dtypes. Their class changes. The layers read codes in a forward, so
    another reader of a weight (weight normalization, a penalty) raises. `state_dict`, distributed checkpoints and
    optimizers see the values.

    Args:
        model: its layers with a recipe of the format fp8_128 are changed: the weights of `GroupedExperts`, and of
            `Float8BlockwiseLinear`. Experts of other libraries are left.
        mesh: the mesh of one dimension that `fully_shard` gets. Its size decides which weights can be shared evenly.

    Returns:
        For each weight of a layer with a recipe: `codes`, or why its values are gathered.

    Raises:
        TypeError: the model is not an `nn.Module`.
        ValueError: the mesh does not have one dimension.
        RuntimeError: the model is sharded already.

    Example, on each rank::

        mesh = init_device_mesh("cuda", (world_size,))
        gather_codes(model, mesh)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)

    Source: PyTorch, FSDP2's extension hooks, as torchao's float8 all-gather uses them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"gather_codes: the model is a {type(model).__name__}; needs an nn.Module")
    if mesh.ndim != 1:
        raise ValueError(f"gather_codes: the mesh has {mesh.ndim} dimensions; needs 1. Take one: mesh['name']")
    said: dict[str, str] = {}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantizesWeights)]
    for path, layer in layers:
        for name in layer.weight_names:
            weight, full = getattr(layer, name), f"{path}.{name}" if path else name
            if type(weight.data) is not Tensor:
                kind = type(weight.data).__name__
                raise RuntimeError(f"gather_codes: {full} is a {kind} already. Call it once, and before fully_shard.")
            said[full] = why = _why_values(layer, weight, mesh.size()) or "codes"
            if why == "codes":
                master = Master(weight.detach(), layer.recipe.scale_format)
                setattr(layer, name, nn.Parameter(master, weight.requires_grad))
        layer.register_state_dict_post_hook(_plain_state)
    return said


def _plain_state(layer: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put the values into the state dict, in the same memory, so that any model can load it."""
    for name in layer.weight_names:
        whole = state.get(f"{prefix}{name}")
        local = whole.to_local() if isinstance(whole, DTensor) else whole
        if not isinstance(local, Master):
            continue
        state[f"{prefix}{name}"] = plain = local.plain
        if isinstance(whole, DTensor):
            mesh, placements = whole.device_mesh, whole.placements
            found = DTensor.from_local(plain, mesh, placements, shape=whole.shape, stride=whole.stride())
            state[f"{prefix}{name}"] = found


def _why_values(layer: QuantizesWeights, weight: Tensor, ranks: int) -> str | None:
    if not isinstance(layer, GroupedExperts | Float8BlockwiseLinear):
        return f"values, because the layer is a {type(layer).__name__}"
    if layer.recipe.format != "fp8_128":
        return f"values, because the recipe's format is {layer.recipe.format}"
    unit, what = (1, "experts") if weight.ndim == 3 else (FP8_BLOCK_SIZE, "rows")
    if weight.shape[0] % (unit * ranks):
        return f"values, because {weight.shape[0]} {what} are no multiple of {unit * ranks} for {ranks} ranks"
    return None


class Master(Bare):
    """The values of a weight, or of a rank's share of it. FSDP2 gathers their codes."""

    plain: Tensor
    scale_format: str

    def __new__(cls, plain: Tensor, scale_format: str) -> Master:
        made: Master = cls.like(cls, plain.shape, plain.stride(), plain.dtype, plain.device)
        made.plain, made.scale_format = plain, scale_format
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Master({self.plain!r}, {self.scale_format!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], self.scale_format

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Master:
        return Master(inner["plain"], meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        formats = {arg.scale_format for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls)}
        given, named = tree_map_only(cls, lambda t: t.plain, (args, kwargs or {}))
        out = func(*given, **named)
        if func is aten.copy_.default:
            return args[0]
        if func not in _KEPT:
            return out
        (scale_format,) = formats
        return tree_map_only(Tensor, lambda t: cls(t, scale_format), out)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        # FSDP2 would cast values before it gathers them.
        plain = self.plain if mp_policy.param_dtype is None else self.plain.to(mp_policy.param_dtype)
        codes, scale = mxspec.fp8_quantize_128x128(plain, scale_format=self.scale_format)
        rows = self.shape[0] if self.ndim == 3 else self.shape[0] // FP8_BLOCK_SIZE
        parts = tuple(t.view(torch.uint8).reshape(rows, -1) for t in (codes, scale))
        return parts if mesh.size() > 1 else (torch.cat(parts, 1),), (tuple(outer_size), self.scale_format)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if out is not None:  # it holds views of the same memory, which FSDP2 has filled again
            return None
        size, scale_format = metadata
        return Gathered(gathered, size, param_dtype, scale_format), ()


class Gathered(Bare):
    """A whole weight that is only codes. `fp8_quantize_128x128` gives them; other ops raise.

    `turned` says that it stands for the transpose of each matrix.
    """

    shares: tuple[Tensor, ...]  # of all ranks: the codes and the scales, or both in one matrix
    whole: tuple[int, ...]
    scale_format: str
    turned: bool

    def __new__(
        cls,
        shares: tuple[Tensor, ...],
        whole: Sequence[int],
        dtype: torch.dtype,
        scale_format: str,
        turned: bool = False,
    ) -> Gathered:
        *lead, N, K = whole
        shape, inner = ((*lead, K, N), (1, K)) if turned else ((*lead, N, K), (K, 1))
        strides = (*(N * K for _ in lead), *inner)
        made: Gathered = cls.like(cls, shape, strides, dtype, shares[0].device)
        made.shares, made.whole, made.scale_format, made.turned = shares, tuple(whole), scale_format, turned
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)}, {self.dtype}, {self.scale_format})"

    def codes(self) -> tuple[Tensor, Tensor]:
        """The codes and the scales of the weight, not turned. FSDP2 frees their memory after a forward."""
        *lead, N, K = self.whole
        blocks = -(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE)
        size = math.prod(self.whole) // self.shares[0].shape[0]
        codes, scale = self.shares if len(self.shares) == 2 else self.shares[0].tensor_split([size], 1)
        codes, scale = codes.contiguous(), scale.contiguous()
        return codes.view(torch.float8_e4m3fn).view(self.whole), scale.view(torch.float32).view(*lead, *blocks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self, *rest = args or (None,)
        if isinstance(self, cls):
            same = func in (aten.detach.default, aten.alias.default)
            if func is aten.as_strided.default:
                same = (tuple(rest[0]), tuple(rest[1])) == (self.shape, self.stride())
            mirrors = func is aten.transpose.int and {dim % self.ndim for dim in rest} == {self.ndim - 2, self.ndim - 1}
            if same or mirrors:
                turned = self.turned if same else not self.turned
                return cls(self.shares, self.whole, self.dtype, self.scale_format, turned)
            if func.name() == "mxspec::fp8_quantize_128x128":
                return self._quantized(**(kwargs or {}))
        raise RuntimeError(
            f"{func.name()}: a weight that gather_codes gathers has codes and no values in a forward, so only the "
            "matmuls of its recipe can read it. Read it outside of the forward, or leave it out of gather_codes."
        )

    def _quantized(
        self, scale_format: str = "fp32", eps: float = EPS, with_transpose: bool = False, backend: str = ""
    ) -> list[Tensor]:
        if (scale_format, eps) != (self.scale_format, EPS):
            raise RuntimeError(
                f"fp8_quantize_128x128: the gathered codes have scale_format {self.scale_format} and eps {EPS}; the "
                f"recipe now asks for {scale_format} and {eps}. Set the recipe before gather_codes."
            )
        own = self.codes()
        needed = self.turned or with_transpose
        mirrored = mxspec.fp8_transpose_128x128(*own, backend=backend) if needed else ()
        if not with_transpose:
            return list(mirrored if self.turned else own)
        # The second direction is for the backward, and must outlive the gathered memory.
        return [*mirrored, *(t.clone() for t in own)] if self.turned else [*own, *mirrored]
