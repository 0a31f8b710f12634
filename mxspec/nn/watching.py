"""`watch` counts what quantization loses in each layer."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._watch_log import Key, Log, close_log, is_open, open_log
from mxspec.nn._weight_only_experts import WeightOnlyExperts
from mxspec.nn.watched_operand import WatchedOperand, operand_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_ORDER = {"activation": 0, "weight": 1, "gradient": 2}
_MATMULS = {"forward": 0, "forward, dgrad": 0, "dgrad": 1, "wgrad": 2}


def watch(model: nn.Module) -> WatchReport:
    """Count what quantization loses in each layer of a model, in a `with` block.

    A layer quantizes activations, weights and gradients. For each such tensor, and for each matmul that reads it, the
    layer counts the elements that saturate or underflow, the blocks with a NaN or an Inf, the range of the scales and
    the SQNR. `WatchedOperand` defines the numbers. They accumulate in tensors on the device. The host waits for the
    device only when the user asks for the numbers: with `rows`, `worst`, `table`, `draw` or `print`. The results of the
    layers stay the same bits.

    The layers are `MXLinear`, `Float8BlockwiseLinear`, `NVFP4Linear`, `GroupedExperts` and layers of other libraries
    that `convert` changed. `mx_grouped_mm`, `fp8_grouped_mm` and `nvfp4_grouped_mm` count for the module of the model
    in whose forward they run. `unwatched` lists every other module that has a weight.

    - The watch quantizes each tensor a second time, with plain scales. It gets the same codes and scales as the matmul.
      So steps in the block take longer. Outside of a block, a layer only checks whether a block is open.
    - Gradients of nvfp4 count with the random bytes of their backward. The watch draws nothing from the generator.
    - With fp8_128 and bfloat16 tokens, `GroupedExperts` writes neither SwiGLU's result nor its gradient. The watch
      computes them again, by PyTorch's ops. The bits are the same, except for gates of -87.5, -88 and -88.5: for
      these gates the op gives zero, and the watch counts results around 1e-37.
    - A forward counts if it runs in the block. Its backward counts if it also runs in the block.
    - Every forward counts the codes of the weight that it reads, also if `cache_weights` holds them.
    - A layer that checkpointing runs twice counts its activation and its weight twice. The shares and the SQNR stay the
      same.
    - A frozen weight has no wgrad, and without gradients only the forward is counted.
    - Blocks may be nested, also of the same model: each watch counts for itself. An exception in the block closes it
      and keeps the counts. Entering a watch again adds to its counts.
    - `torch.compile` is switched off in the block, for the whole process: a model that was compiled before runs
      uncompiled (`torch.compiler.set_stance("force_eager")`). So its bits may differ from the bits of the compiled
      model. PyTorch may warn that the hooks of the watch fire an extra time for a compiled module. This changes no
      count. If the first `torch.compile` of the process is in the block, the layers break its graph and run
      uncompiled. With `fullgraph=True` they raise an error.
    - Each process counts its own part of the model and of the data.

    Args:
        model: the model. The layers that it has when the block begins are watched.

    Returns:
        A `WatchReport`, which is the value of the `with` statement.

    Raises:
        TypeError: the model is not an `nn.Module`.
        RuntimeError: the watch is open already; or a layer runs while a CUDA graph is captured, or under a torch.func
            transform, or is compiled in the block with `fullgraph=True`.

    Example:
        >>> from mxspec.nn import MXLinear
        >>> model = nn.Sequential(MXLinear(32, 64), nn.Linear(64, 10))
        >>> x = torch.ones(5, 32)
        >>> x[0, 0], x[1, 3] = 1e9, torch.inf
        >>> with watch(model) as seen, torch.no_grad():
        ...     _ = model(x)
        >>> row = seen.rows()[0]
        >>> row.name, row.tensor, row.matmul, row.elements, row.underflowed, row.blocks, row.nonfinite_blocks
        ('0', 'activation', 'forward', 160, 31, 5, 1)
        >>> seen.unwatched()
        {'1': 'Linear ran no matmul of low precision in the block'}

    Source: NVIDIA/TransformerEngine#2801, which asks which layer loses accuracy.
    """
    return WatchReport(model)


class WatchReport:
    """The counts of a `watch` block. `print` shows the rows that lose most, and the modules that are not watched."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch: the model is a {type(model).__name__}; needs an nn.Module")
        self._model, self._log, self._exits = model, Log({}), ExitStack()

    def __enter__(self) -> Self:
        if is_open(self._log):
            raise RuntimeError("watch: this watch is open already. Make another one for a nested block.")
        self._log.names = {module: name for name, module in self._model.named_modules()}
        with ExitStack() as exits:
            if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the import would be slow
                exits.enter_context(torch.compiler.set_stance("force_eager"))
            open_log(self._log)
            exits.callback(close_log, self._log)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._exits.close()

    def rows(self) -> list[WatchedOperand]:
        """All counts: layers in the order of the model, and each layer's weights in the order of their first matmul.

        Waits for the device.
        """
        layers = {name: place for place, name in enumerate(self._log.names.values())}
        first = {key[:2]: place for place, key in reversed(list(enumerate(self._log.sums)))}

        def order(key: Key) -> tuple[int, ...]:
            layer, weight, tensor, matmul = key
            return layers.get(layer, -1), first[layer, weight], _ORDER[tensor], _MATMULS[matmul]

        return [operand_of(key, self._log.sums[key]) for key in sorted(self._log.sums, key=order)]

    def worst(self, count: int | None = None) -> list[WatchedOperand]:
        """The rows that lose most, ordered by `WatchedOperand.loss`; all rows without a count. Waits for the device."""
        return sorted(self.rows(), key=lambda row: -row.loss)[:count]

    def unwatched(self) -> dict[str, str]:
        """Maps the name of each module without counts to the reason, if it has a weight of two or more dimensions."""
        seen = {key[0] for key in self._log.sums}
        return {
            name: _reason(module, module in self._log.names)
            for name, module in self._model.named_modules()
            if name not in seen and (isinstance(module, WeightOnlyExperts) or _has_a_weight(module))
        }

    def table(self, count: int | None = None) -> Table:
        """A table of `rich`: all rows in the order of the model, or the `count` rows that lose most, worst first.

        Waits for the device.
        """
        from mxspec.nn._watch_views import table

        return table(self.rows() if count is None else self.worst(count))

    def draw(self, count: int = 5) -> Figure:
        """A matplotlib picture of all layers. It names the `count` layers that lose most. Waits for the device.

        The upper half shows the SQNR of each layer's activations, weights and gradients. The lower half shows the share
        of their elements that underflow.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was counted.
        """
        from mxspec.nn._watch_views import draw

        return draw(self.rows(), self.worst(), count)

    def __str__(self) -> str:
        from mxspec.nn._watch_views import text

        return text(self.worst(), self.unwatched())


def _has_a_weight(module: nn.Module) -> bool:
    return any(is_lazy(p) or p.ndim > 1 for p in module.parameters(recurse=False))


def _reason(module: nn.Module, was_there: bool) -> str:
    kind = type(module).__name__
    if not was_there:
        return f"{kind} joined the model after the block began"
    if isinstance(module, WeightOnlyExperts):
        return f"{kind} holds its weights in MXFP4, and watch compares layers that quantize in their forward"
    if not isinstance(module, QuantizesWeights):
        return f"{kind} ran no matmul of low precision in the block"
    if module.recipe.format == "bf16":
        return f"{kind} has the recipe bf16, which quantizes nothing"
    return f"{kind} ran no forward in the block"
