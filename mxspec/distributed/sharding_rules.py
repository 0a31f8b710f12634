"""DTensor's rules for mxspec's ops, so that the Linears run under `ColwiseParallel` and `RowwiseParallel`.

A rule says which shards of the results follow from which shards of the arguments. Each rule holds for one dimension of
a mesh. R is Replicate, and S(d) is a shard along dimension d.

| op | results | arguments |
|---|---|---|
| quantizers along the last dimension | S(d), S(d) | S(d), d 0 or 1 |
| along the other dimension | S(d), S(1 - d) | S(d) |
| quantizers of both directions | of the rows S(d), S(d), of the columns S(d), S(1 - d) | S(d) |
| `mx_gemm`, `fp8_gemm` (a, a_scale, b, b_scale) | S(0) | a S(0), b R |
| | S(1) | a R, b S(0) |
| | a Partial sum | both S(1) |

A shard must hold whole blocks. If it does not, or if the scales are blocked, DTensor gathers the arguments first.

PyTorch's public `register_sharding` does not fit. Its cache of results ignores options that are texts, such as
`scale_layout`, and then gives the placements of another call. So these rules name every option, by private names that
PyTorch 2.11 and 2.13 share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import mxspec  # noqa: F401  registers the ops
from mxspec.formats import FP8_BLOCK_SIZE, MX_BLOCK_SIZE

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Rule = list[Any]  # the placements of the results, then of the arguments
Fits = Callable[[int, int], bool]  # whether a size can be shared in whole blocks of a width


def _quantize(fits: Fits, x: Any, across: int, along: int, axis: int) -> tuple[int, list[Rule]]:
    """A quantizer of blocks of `along` elements of `axis`, and of `across` elements of the other dimension."""
    if len(x.shape) != 2:
        return 2, []
    of_rows, of_columns = (across, along) if axis == -1 else (along, across)
    whole = [d for d, width in ((0, of_rows), (1, of_columns)) if fits(x.shape[d], width)]
    return 2, [[Shard(d), Shard(d if axis == -1 else 1 - d), Shard(d)] for d in whole]


def _mx_quantize(
    fits: Fits, x: Any, *, axis: int = -1, scale_layout: str = "plain", **_: Any
) -> tuple[int, list[Rule]]:
    return (2, []) if scale_layout != "plain" else _quantize(fits, x, 1, MX_BLOCK_SIZE, axis)


def _mx_quantize_rowcol(fits: Fits, x: Any, *, scale_layout: str = "plain", **_: Any) -> tuple[int, list[Rule]]:
    if len(x.shape) != 2 or scale_layout != "plain":
        return 4, []
    whole = [d for d in (0, 1) if fits(x.shape[d], MX_BLOCK_SIZE)]
    return 4, [[Shard(d), Shard(d), Shard(d), Shard(1 - d), Shard(d)] for d in whole]


def _fp8_quantize_1x128(fits: Fits, x: Any, *, axis: int = -1, **_: Any) -> tuple[int, list[Rule]]:
    return _quantize(fits, x, 1, FP8_BLOCK_SIZE, axis)


def _fp8_quantize_128x128(fits: Fits, w: Any, *, with_transpose: bool = False, **_: Any) -> tuple[int, list[Rule]]:
    found = _quantize(fits, w, FP8_BLOCK_SIZE, FP8_BLOCK_SIZE, -1)[1]
    if not with_transpose:
        return 2, found
    turned = {S0: S1, S1: S0}
    return 4, [[codes, scale, turned[codes], turned[scale], argument] for codes, scale, argument in found]


def _gemm(block: int) -> Callable[..., tuple[int, list[Rule]]]:
    def rules(
        fits: Fits, a: Any, a_scale: Any, b: Any, b_scale: Any, *, scale_layout: str = "plain", **_: Any
    ) -> tuple[int, list[Rule]]:
        if scale_layout != "plain" or a_scale is None:
            return 1, []
        rows = 1 if b_scale.shape[0] == b.shape[0] else FP8_BLOCK_SIZE  # the rows of b that share a scale
        of_byte = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
        found = [
            (fits(a.shape[0], 1), [S0, S0, S0, R, R]),
            (fits(b.shape[0], rows), [S1, R, R, S0, S0]),
            (fits(a.shape[1], block // of_byte), [Partial(), S1, S1, S1, S1]),
        ]
        return 1, [rule for fit, rule in found if fit]

    return rules


_RULES: dict[str, Callable[..., tuple[int, list[Rule]]]] = {
    "mx_quantize": _mx_quantize,
    "mx_quantize_rowcol": _mx_quantize_rowcol,
    "fp8_quantize_1x128": _fp8_quantize_1x128,
    "fp8_quantize_128x128": _fp8_quantize_128x128,
    "mx_gemm": _gemm(MX_BLOCK_SIZE),
    "fp8_gemm": _gemm(FP8_BLOCK_SIZE),
}


def register_sharding_rules() -> None:
    """Teach DTensor the quantizers and the dense matmuls. Call it once in each process; again is harmless.

    `MXLinear` and `Float8BlockwiseLinear` then train under `ColwiseParallel` and `RowwiseParallel`, with plain or
    sharded tokens. The output and the weights' gradients of a `ColwiseParallel` layer are the bits of one process. The
    gradient of its tokens is a sum over the ranks, so it differs in its last bits. For `RowwiseParallel` the output is
    such a sum, and both gradients have the bits of one process.

    The rules are of tensors with two dimensions. A shard of a size that is no multiple of the block is gathered first:
    the blocks of 128 of fp8_128, the blocks of 32 of MXFP8. Blocked scales are always gathered.

    Raises:
        ImportError: this release of PyTorch lacks a private name that the rules need.

    Example, on each rank::

        register_sharding_rules()
        parallelize_module(model, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})

    Source: PyTorch, `torch.distributed.tensor.experimental.register_sharding`.
    """
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

        register = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"register_sharding_rules: PyTorch {torch.__version__} lacks a private name: {error}. 2.11, 2.13 have it."
        ) from error

    for name, rules in _RULES.items():

        def strategy(schema: Any, rules: Callable[..., tuple[int, list[Rule]]] = rules) -> Any:
            mesh = schema.get_mesh_from_args()
            ranks = mesh.size()
            given = schema.args_schema
            tensors = [None if of is None else of.strategies[0].output_spec.tensor_meta for of in given]

            def fits(size: int, width: int) -> bool:
                return size % (width * ranks) == 0

            results, found = rules(fits, *tensors, **schema.kwargs_schema)
            every = [[R] * (results + sum(t is not None for t in tensors)), *found]
            return expand_to_full_mesh_op_strategy(mesh, schema, every, input_index=results)

        operator = getattr(torch.ops.mxspec, name).default
        options = [argument.name for argument in operator._schema.arguments if argument.kwarg_only]
        register(operator, strategy, RuntimeSchemaInfo(100, options, needs_pytree=True))
