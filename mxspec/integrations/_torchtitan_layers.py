"""The classes of converted experts and Linears of torchtitan."""

from __future__ import annotations

import functools
import inspect
from dataclasses import make_dataclass
from typing import Any

from torch import Tensor, nn

from mxspec.nn.conversion import LINEARS
from mxspec.nn.experts import QuantizedExperts
from mxspec.nn.grouped_mm import fp8_grouped_mm, mx_grouped_mm, nvfp4_grouped_mm
from mxspec.nn.recipe import Recipe, recipe_of


class Experts(QuantizedExperts):
    """The first base of the class of converted experts. The second base is the class of torchtitan."""

    their_class: type

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.set_recipe(config.recipe)

    @property
    def weight_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the weights. Biases of experts have two dimensions, and weights have more."""
        return tuple(name for name, weight in self.named_parameters(recurse=False) if weight.ndim > 2)

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Train with this recipe from now on. Raises if it cannot run the layer."""
        self.check_weights()
        shapes = {name: weight.shape for name, weight in zip(self.weight_names, self._weights(), strict=True)}
        out = {f"out_features of {name}": shape[1:-1].numel() for name, shape in shapes.items()}
        self.train_by(recipe, **out, **{f"in_features of {name}": shape[-1] for name, shape in shapes.items()})

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        """torchtitan's grouped matmul of the tokens A, `(M, K)`, and the weights B_t, `(E, K, N)`, by the recipe."""
        products = {"fp8_128": fp8_grouped_mm, "nvfp4": nvfp4_grouped_mm}
        product = products.get(self.recipe.format, mx_grouped_mm)
        return product(A, B_t.mT, offs, self.recipe)

    def _hold(self) -> None:
        raise TypeError(
            f"cache_weights: {type(self).__name__} of torchtitan casts its weights in every forward, so their codes "
            "cannot be held longer. Train this model without cache_weights."
        )

    def extra_repr(self) -> str:
        return str(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (experts_class_of, self.their_class), self.__getstate__()


@functools.cache
def experts_class_of(kind: Any) -> Any:
    """The class of the converted layers of a class of experts. Raises TypeError if `check_seam` refuses the class."""
    check_seam(kind)
    return _made(kind, (Experts, kind), {})


@functools.cache
def linear_class_of(kind: Any, format: str) -> Any:
    """The class of converted layers of torchtitan's Linear. Raises TypeError if the class computes something else."""
    if kind.forward is not nn.Linear.forward:
        raise TypeError(f"{kind.__name__} has its own forward, which a low-precision Linear would not run")
    base = LINEARS[format]

    def __init__(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        self.recipe = recipe_of(config.recipe, kind.__name__)

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return _new, (linear_class_of, kind, format), self.__getstate__()

    return _made(kind, (kind, base), {"__init__": __init__, "__reduce__": __reduce__})


def _made(kind: Any, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
    """A class with the name of `kind`, for error texts and `print(model)`. Its Config has the field `recipe` too."""
    own |= {"their_class": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    if config := getattr(kind, "Config", None):
        own["Config"] = make_dataclass("Config", [("recipe", Recipe | str)], bases=(config,), kw_only=True, slots=True)
    return type(kind)(kind.__name__, bases, own)


def _new(class_of: Any, *args: Any) -> nn.Module:
    """An empty converted layer, for copies and pickles."""
    made = class_of(*args)
    return made.__new__(made)


def check_seam(kind: Any) -> None:
    """Raise TypeError if a class of experts does not compute its grouped matmuls by torchtitan's own `_grouped_mm`."""
    own = [each for each in kind.__mro__ if "_grouped_mm" in vars(each)]
    if not own:
        raise TypeError(f"{kind.__name__} has no method _grouped_mm, which torchtitan's experts have since August 2026")
    if len(own) > 1:
        raise TypeError(f"{kind.__name__} already has another grouped matmul, from {own[0].__name__}")
    for each in kind.__mro__:
        if "forward" in vars(each):
            names = inspect.unwrap(each.forward).__code__.co_names
            if "_grouped_mm" in names:
                return
            if "super" not in names:
                break
    raise TypeError(f"{kind.__name__} has its own forward, which does not call _grouped_mm")
