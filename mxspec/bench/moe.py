"""Times each kernel of one grouped linear of an MoE layer: forward and backward, with MXFP8 operands.

With tokens x `(M, K)` sorted by expert, weights w `(E, N, K)` and the gradient dy `(M, N)`:

    forward   y  = x  @ w^T    x along K, w along K
    dgrad     dx = dy @ w      dy along N, w along N
    wgrad     dw = dy^T @ x    dy and x along the tokens

The quantizers are mxspec's. Every expert has the same number of tokens, a multiple of 128. So nothing is padded, and
the blocked scales of a group are a slice of all scales. The matmuls are PyTorch's in bfloat16: their time is the time
of the matmuls in a layer without quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec import dispatch
from mxspec.bench import model
from mxspec.bench.record import Step
from mxspec.bench.timing import MATMUL, MEMORY, Contender, input_sets, race
from mxspec.spec import Case, outputs_of

Layer = tuple[int, int, int, int]
BLOCKED = {"scaling": "rceil", "scale_layout": "blocked"}
# Two of torchao's grouped shapes (M, N, K, E), with the experts that one GPU holds: Llama 4 and DeepSeek-V3.
LAYERS = ((32768, 8192, 5120, 2), (32768, 2048, 7168, 8))


@dataclass(frozen=True)
class Kernel:
    """A step of the layer before it is timed: an op with its options, or a bf16 matmul."""

    phase: str
    what: str
    op: str | None
    kwargs: dict[str, Any]
    args: Callable[[], tuple[Any, ...]]


def kernels(M: int, N: int, K: int, E: int) -> Iterator[Kernel]:
    """The steps of a layer in their order. As in torchao's table, all experts get the same number of tokens."""
    randn = partial(torch.randn, dtype=torch.bfloat16)
    x, dy, w = (lambda: (randn(M, K),)), (lambda: (randn(M, N),)), (lambda: (randn(E, N, K),))
    offs = lambda: torch.arange(1, E + 1, dtype=torch.int32) * (M // E)  # noqa: E731
    along = lambda axis: {"axis": axis, **BLOCKED}  # noqa: E731
    quantize, matmul = "mx_quantize", None
    yield Kernel("forward", f"x {M}x{K} along K", quantize, along(-1), x)
    yield Kernel("forward", f"w {E}x{N}x{K} along K", quantize, along(-1), w)
    yield Kernel("forward", "x @ w^T", matmul, {}, lambda: (randn(M, K), randn(E, N, K).mT, offs()))
    yield Kernel("dgrad", f"dy {M}x{N} along N", quantize, along(-1), dy)
    yield Kernel("dgrad", f"w {E}x{N}x{K} along N", quantize, along(-2), w)
    yield Kernel("dgrad", "dy @ w", matmul, {}, lambda: (randn(M, N), randn(E, N, K), offs()))
    yield Kernel("wgrad", f"dy {M}x{N} along tokens", quantize, along(-2), dy)
    yield Kernel("wgrad", f"x {M}x{K} along tokens", quantize, along(-2), x)
    yield Kernel("wgrad", "dy^T @ x", matmul, {}, lambda: (randn(M, N).mT, randn(M, K), offs()))


def grouped_matmul(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """PyTorch's bf16 grouped matmul: tokens times weights, or tokens times tokens for the gradient of the weights."""
    return torch.nn.functional.grouped_mm(a, b, offs=offs)


def label(layer: Layer) -> str:
    """The name of a layer."""
    return ", ".join(f"{name} {size}" for name, size in zip("MNKE", layer, strict=True))


def measure_layer(layer: Layer, device: torch.device) -> Iterator[Step]:
    """Time each kernel of a layer, on the backend that `auto` takes. A wrong kernel gets no time but the reason."""
    for kernel in kernels(*layer):
        case = Case(kernel.what, kernel.args, kernel.kwargs)
        moved, flops = cost_of(kernel, layer)
        expected: list[tuple[Tensor, ...]] | None = None
        if kernel.op is None:
            with device:
                inputs = [case.args()]
            call, backend = grouped_matmul, "torch bf16"
        else:
            reference = dispatch.reference(kernel.op)
            inputs = input_sets(reference, case, device)
            expected = [outputs_of(reference(*args, **kernel.kwargs)) for args in inputs]
            call = partial(dispatch.public(kernel.op), **kernel.kwargs)
            backend = dispatch.explain(kernel.op, *inputs[0], **kernel.kwargs).backend or ""
        contender = Contender(kernel.what, call, inputs)
        wrong = contender.prove(expected)
        if not wrong:
            race([contender], MEMORY if kernel.op else MATMUL)
            wrong = contender.prove_again(expected) if expected else None
        us = None if wrong else contender.us
        yield Step(label(layer), kernel.phase, kernel.what, backend, us, moved, flops, kernel.op is None, wrong or "")


def cost_of(kernel: Kernel, layer: Layer) -> tuple[int, int]:
    """Bytes and flops of a step."""
    if kernel.op is not None:
        return model.cost(dispatch.reference(kernel.op), Case(kernel.what, kernel.args, kernel.kwargs))[:2]
    M, N, K, E = layer
    return 2 * (M * K + M * N + E * N * K), 2 * M * N * K  # x, y and w are each read or written once, in bf16
