"""How a layer reports its operands to the open watches.

`format_of` gives each forward a `Forward` if a watch is open for its layer. The autograd functions tell it, once in the
forward and once in the backward, which tensors they quantized for which matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mxspec.nn._counters import Counters, count_tokens, count_weight
from mxspec.nn._watch_log import Call, Log, open_logs, running

if TYPE_CHECKING:
    from mxspec.nn._format import Format, Tokens


def forward_of(layer: nn.Module | None) -> Forward | None:
    """The object to which a forward of this layer reports its operands. None if no watch is open for the layer.

    Without a layer, the forward belongs to the innermost running module that an open watch knows.
    """
    if not open_logs:
        return None
    calls = [Call(layer)] if layer is not None else reversed(running.calls)
    for call in calls:
        if any(call.module in log.names for log in open_logs):
            return Forward(call, layer is None, torch.is_grad_enabled())
    return None


@dataclass(eq=False)
class Forward:
    """One forward of a layer. Its methods get tensors as they are before they are quantized."""

    call: Call
    is_function: bool
    has_gradients: bool

    def __post_init__(self) -> None:
        name = type(self.call.module).__name__
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"watch: torch.compile traces a forward of {name} inside the block, and a compiled forward cannot be "
                "watched. Call torch.compile before the block: then the forward runs in the block uncompiled."
            )
        if torch._C._functorch.get_interpreter_stack():
            raise RuntimeError(f"watch: {name} runs under a torch.func transform, which cannot be watched")

    def product(
        self, by: Format, x: Tensor, w: Tensor, offs: Tensor | None, tokens: Tokens, dgrad: bool,
        transposed: bool = False,
    ) -> Matmul:  # fmt: skip
        """Count x and w in the forward of a matmul. A transposed w is `(E, K, N)`."""
        matmul = Matmul(self, by, self._next_weight(w))
        matmul.activation(lambda: x.detach(), offs, True, tokens.columns is not None)
        matmul.weight(w.detach(), dgrad and self.has_gradients, transposed)
        return matmul

    def second(
        self, by: Format, hidden: Callable[[], Tensor], w: Tensor, offs: Tensor, dgrad: bool, wgrad: bool,
        transposed: bool = False,
    ) -> Matmul:  # fmt: skip
        """Count the second matmul of fused experts. `hidden` computes its input, because no op writes it."""
        matmul = Matmul(self, by, self._next_weight(w))
        matmul.activation(hidden, offs, True, wgrad and self.has_gradients)
        matmul.weight(w.detach(), dgrad and self.has_gradients, transposed)
        return matmul

    def _next_weight(self, w: Tensor) -> str:
        """The name of a matmul's weight: the layer's next name, or the parameter that w comes from, or a number."""
        number, module = self.call.products, self.call.module
        self.call.products += 1
        names = () if self.is_function else getattr(module, "weight_names", ())
        if number < len(names):
            return str(names[number])
        names = (name for name, parameter in module.named_parameters() if _is_from(w, parameter))
        return next(names, f"matmul {number + 1}")


def _is_from(w: Tensor, parameter: Tensor) -> bool:
    """Whether w is a parameter, shares its memory, or comes from it by ops of one argument, such as a cast."""
    node = w.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    if getattr(node, "variable", w) is parameter:
        return True
    plain = {type(w), type(parameter)} <= {Tensor, nn.Parameter} and w.device == parameter.device
    return plain and w.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


@dataclass(eq=False)
class Matmul:
    """The matmuls of one weight: forward, dgrad and wgrad."""

    forward: Forward
    by: Format
    weight_name: str

    def activation(self, x: Callable[[], Tensor], offs: Tensor | None, for_forward: bool, for_wgrad: bool) -> None:
        """Count the input in the directions asked for. `x` returns it."""
        matmuls = {"forward": for_forward, "wgrad": for_wgrad}
        self._count_tokens("activation", matmuls, x, offs, torch.float8_e4m3fn)

    def gradient(
        self, grad: Callable[[], Tensor], offs: Tensor | None, for_dgrad: bool, for_wgrad: bool,
        random: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Count the gradient of the output in the directions asked for. `grad` returns it.

        random: the seed and the offset by which the backward rounded it stochastically.
        """
        matmuls = {"dgrad": for_dgrad, "wgrad": for_wgrad}
        self._count_tokens("gradient", matmuls, grad, offs, self.by.recipe.grad_dtype, random)

    def weight(self, w: Tensor, for_dgrad: bool, transposed: bool) -> None:
        axes = {"forward": -2 if transposed else -1, "dgrad": -1 if transposed else -2}
        if not for_dgrad:
            del axes["dgrad"]
        if self.by.recipe.format != "mxfp8":  # the codes of a square serve both matmuls
            axes = {", ".join(axes): -1}
        for matmul, axis in axes.items():
            self._add("weight", matmul, w, partial(count_weight, self.by, w, axis))

    def _count_tokens(
        self, tensor: str, matmuls: dict[str, bool], make: Callable[[], Tensor], offs: Tensor | None,
        dtype: torch.dtype, random: Tensor | None = None,
    ) -> None:  # fmt: skip
        if not any(matmuls.values()) or not self._logs():
            return
        with torch.no_grad():
            x = make()
        for matmul, asked in matmuls.items():
            if asked:
                self._add(tensor, matmul, x, partial(count_tokens, self.by, x, offs, dtype, matmul == "wgrad", random))

    def _logs(self) -> list[Log]:
        return [log for log in open_logs if self.forward.call.module in log.names]

    def _add(self, tensor: str, matmul: str, x: Tensor, count: Callable[[], Counters]) -> None:
        logs = self._logs()
        if not logs or x.is_meta or isinstance(x, FakeTensor):  # a tensor without values has nothing to count
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("watch: a CUDA graph is being captured, and its replays would not be counted")
        with torch.no_grad():
            counters = count()
            for log in logs:
                log.add((log.names[self.forward.call.module], self.weight_name, tensor, matmul), counters)
