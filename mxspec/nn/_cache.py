"""Layers that quantize their weights once per forward, or once for several forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from mxspec.nn._format import Format, Weight
from mxspec.nn._formats import format_of
from mxspec.nn.recipe import Recipe

Quantized = Weight | None  # None for the recipe bf16, which quantizes nothing


class QuantizesWeights(nn.Module):
    """A layer whose matmuls read codes of its weights. `cache_weights` may hold the codes for several forwards."""

    weight_names: ClassVar[tuple[str, ...]] = ("weight",)
    is_transposed: bool = False  # whether the weights are stored `(E, K, N)`
    recipe: Recipe
    _cached: tuple[Quantized, ...] | None = None
    _cached_values: bool = False
    _cached_from: tuple[tuple[int, int], ...] | None = None

    def _take(self, recipe: Recipe) -> None:
        if self._cached:
            name = type(self).__name__
            raise RuntimeError(f"{name}: cache_weights holds the codes of its recipe. Leave its with-block first.")
        self.recipe = recipe

    def _format(self, backend: str | None, by_values: bool = False) -> Format | None:
        return format_of(self.recipe, backend, type(self).__name__, self, by_values)

    def _caches_values(self) -> bool:
        """Whether `cache_weights` shall hold bf16 values in place of codes."""
        return False

    def _stored(self) -> tuple[Tensor, ...]:
        """The weights as the parameters hold them: DTensors, if they are sharded."""
        return tuple(getattr(self, name) for name in self.weight_names)

    def _weights(self) -> tuple[Tensor, ...]:
        """The weights that the matmuls read."""
        return self._stored()

    def _quantized(self, backend: str | None, by_values: bool = False, held: bool = False) -> tuple[Quantized, ...]:
        """The codes of each weight: the held codes if there are any, else new codes. With `by_values`, its values.

        `held` makes codes that `cache_weights` holds.
        """
        if self._cached is None or by_values != self._cached_values:
            by = self._format(backend, by_values)
            stored = self.is_transposed
            return tuple(None if by is None else by.weight(weight.detach(), stored, held) for weight in self._weights())
        if not torch.compiler.is_compiling():
            self._check_cache()
        return self._cached

    def _hold(self) -> None:
        from torch.distributed.tensor import DTensor  # not at the top of the file: the import is slow

        name, weights = type(self).__name__, self._weights()
        if any(isinstance(weight, DTensor) for weight in self._stored()):
            raise TypeError(
                f"cache_weights: {name} has sharded weights (DTensor). They are whole only during a forward, so their "
                "codes cannot be held longer. Train a sharded model without cache_weights."
            )
        if any(weight.is_inference() for weight in weights):
            raise TypeError(
                f"cache_weights: {name} has weights made in inference mode. PyTorch does not count their changes, so "
                "wrong codes would go unnoticed. Make the weights outside of torch.inference_mode()."
            )
        with torch.inference_mode(False), torch.no_grad():  # so that a forward outside of these modes can save them
            by_values = self._caches_values()
            self._cached, self._cached_values = self._quantized(None, by_values, held=True), by_values
        self._cached_from = self._state()

    def _note_step(self, parameters: list[Tensor]) -> None:
        """Count the weights as changed if an optimizer stepped one of them, or a tensor that shares its memory."""
        if any(_overlap(parameter, weight) for weight in self._weights() for parameter in parameters):
            self._cached_from = None

    def _check_cache(self) -> None:
        if self._cached_from != self._state():
            raise RuntimeError(
                "cache_weights: a weight has changed since it was quantized. Leave the with-block before the "
                "optimizer's step, and enter it again after the step."
            )

    def _state(self) -> tuple[tuple[int, int], ...]:
        """For each weight, values that change when it changes: its address, and its count of writes in place."""
        return tuple((weight.data_ptr(), weight._version) for weight in self._weights())

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles. It leaves out the codes, because a copy may change its own weights."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_cached")}


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if torch.compiler.is_compiling() or not {type(a), type(b)} <= {Tensor, nn.Parameter}:
        return False  # a traced tensor has no address, and neither has a DTensor
    return max(a.data_ptr(), b.data_ptr()) < min(a.data_ptr() + a.nbytes, b.data_ptr() + b.nbytes)


@contextmanager
def cache_weights(model: nn.Module) -> Iterator[None]:
    """Quantize every weight of the model's low-precision layers once, for all forwards in the with-block.

    Use it for gradient accumulation: all micro-batches then read the same codes. The codes are those of both
    directions, so with `save_weight_codes=False` too no forward saves a weight. The codes are wrong as soon as a
    weight changes. So the next forward after a change raises an error. Leaving the block after a change raises too,
    because a compiled forward cannot check its weights. A layer of the recipe `bf16` has no codes, so its weights may
    change.

    Any step of a `torch.optim` optimizer that holds a weight counts as a change, because PyTorch does not count the
    writes of a fused step. Two kinds of writes go unnoticed: writes through `weight.data`, and writes of a kernel that
    the user launches. A copy of the model, or a saved model, has no codes.

    Raises:
        RuntimeError: a weight changed in the block, or the block is inside another `cache_weights` block.
        TypeError: the model is not an `nn.Module`, its weights are sharded (by `fully_shard`), or its weights were made
            in inference mode.

    Example:
        >>> from mxspec.nn import MXLinear
        >>> model = MXLinear(64, 32)
        >>> with cache_weights(model):
        ...     for tokens in torch.ones(4, 3, 64):
        ...         model(tokens).sum().backward()
        >>> round(model.weight.grad[0, 0].item(), 4)
        12.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cache_weights: the model is a {type(model).__name__}; needs an nn.Module")
    quantizing = (layer for layer in model.modules() if isinstance(layer, QuantizesWeights))
    layers = [layer for layer in quantizing if layer.recipe.format != "bf16"]
    if any(layer._cached for layer in layers):
        raise RuntimeError("cache_weights: the codes are held already by an outer with-block. Remove the inner one.")

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for layer in layers:
            layer._note_step(parameters)

    hook = register_optimizer_step_post_hook(after_step)
    try:
        for layer in layers:
            layer._hold()
        yield
        for layer in layers:
            layer._check_cache()
    finally:
        hook.remove()
        for layer in layers:
            layer._cached = layer._cached_from = None
            layer._cached_values = False
