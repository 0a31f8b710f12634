"""Layers that quantize their weights, once a forward or once for several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

# A weight's codes and scale, then those of its transpose.
Quantized = tuple[Tensor, ...]


class QuantizesWeights(nn.Module):
    """A layer whose matmuls read codes of its weights, which `cache_weights` may hold for it."""

    weight_names: ClassVar[tuple[str, ...]] = ("weight",)
    _cached: tuple[Quantized, ...] | None = None
    _cached_from: tuple[tuple[int, int], ...] | None = None

    def _quantize(self, weight: Tensor, backend: str | None) -> Quantized:
        raise NotImplementedError

    def _weights(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.weight_names)

    def _quantized(self, backend: str | None) -> tuple[Quantized, ...]:
        """The codes of each weight: those held, or new ones."""
        if self._cached is None:
            return tuple(self._quantize(weight.detach(), backend) for weight in self._weights())
        if not torch.compiler.is_compiling():
            self._check_cache()
        return self._cached

    def _hold(self) -> None:
        from torch.distributed.tensor import DTensor  # not at the top: it costs half a second

        if any(isinstance(weight, DTensor) for weight in self._weights()):
            raise TypeError(
                f"cache_weights: {type(self).__name__} has sharded weights (DTensor), which are whole only during a "
                "forward; needs plain tensors"
            )
        self._cached, self._cached_from = self._quantized(None), self._state()

    def _check_cache(self) -> None:
        if self._cached_from != self._state():
            raise RuntimeError(
                "cache_weights: a weight has changed since it was quantized; leave the with-block before the "
                "optimizer's step, and enter it again afterwards"
            )

    def _state(self) -> tuple[tuple[int, int], ...]:
        """What changes when a weight does: where its memory lies, and how often it was written in place."""
        return tuple((weight.data_ptr(), weight._version) for weight in self._weights())


@contextmanager
def cache_weights(model: nn.Module) -> Iterator[None]:
    """Quantize every weight of the model's low-precision layers once, for all forwards in the with-block.

    For micro-batches whose gradients add up: the codes then serve them all. They are wrong as soon as a weight
    changes, so that a forward after that raises, and so does leaving the block, since a compiled forward cannot look.
    What is written through `weight.data` PyTorch does not count, and nobody sees. Neither copy nor save a model in the
    block: the codes would come along.

    Raises:
        RuntimeError: a weight changed in the block, or a block inside another one.
        TypeError: weights that are sharded, as `fully_shard` leaves them.

    Example:
        >>> from mxspec.nn import MXLinear
        >>> model = MXLinear(64, 32)
        >>> with cache_weights(model):
        ...     for tokens in torch.ones(4, 3, 64):
        ...         model(tokens).sum().backward()
        >>> round(model.weight.grad[0, 0].item(), 4)
        12.0
    """
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizesWeights)]
    if any(layer._cached for layer in layers):
        raise RuntimeError("cache_weights: the model's weights are held already, by a with-block around this one")
    try:
        for layer in layers:
            layer._hold()
        yield
        for layer in layers:
            layer._check_cache()
    finally:
        for layer in layers:
            layer._cached = layer._cached_from = None
