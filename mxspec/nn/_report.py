"""The report of `convert`: which layers run in low precision, which do not, and the share of the model that does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from mxspec.nn._cache import QuantizesWeights
from mxspec.nn._defaults import experts_of, is_router
from mxspec.nn.recipe import Recipe, name_of

# Parameters of these modules are read row by row and not multiplied.
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)

_NUMBER = "\0"  # stands for a number in a name


@dataclass
class Conversion:
    """The report of `convert`, which `print` shows.

    Attributes:
        recipe: the recipe of this call.
        swapped: the layers that this call converted. It maps a layer's name to its new kind.
        left: the layers that stay as they were. It maps a layer's name to the reason. It also maps the name of a
            parameter to a reason, if the parameter has two or more dimensions, is not a weight of a converted layer,
            and belongs to no layer of this dict.
        share_of_parameters: the elements of the weights that the model now multiplies in low precision, divided by the
            elements of all parameters. A parameter that several modules share counts once. None if the size of a
            parameter is unknown until a first forward.
        share_of_flops: the share of the floating-point operations for one token: the operations of the matmuls that
            now run in low precision, divided by the operations of all matmuls with a parameter. A lookup in an
            embedding is not a matmul. The matmul of queries and keys has no parameter and does not count. None if
            unknown_flops is not empty.
        unknown_flops: the layers and parameters whose operations for a token are unknown. It maps the name to the
            reason.
    """

    recipe: Recipe
    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    share_of_parameters: float | None = 0.0
    share_of_flops: float | None = None
    unknown_flops: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{len(self.swapped)} swapped to {name_of(self.recipe)}, {len(self.left)} left",
            f"in low precision: {percent(self.share_of_parameters)} of the parameters, "
            f"{percent(self.share_of_flops)} of a token's matmul operations",
        ]
        lines += [f"  {names}: {now}" for names, now in collapsed(self.swapped)]
        lines += [f"  {names}: left, {why}" for names, why in collapsed(self.left)]
        lines += [f"  {names}: its operations are unknown, {why}" for names, why in collapsed(self.unknown_flops)]
        return "\n".join(lines)


def percent(share: float | None) -> str:
    """A share in percent. It shows 100% only for a share of exactly 1, and 0% only for exactly 0."""
    if share is None:
        return "an unknown share"
    text = f"{100 * share:.1f}%"
    return {"100.0%": "99.9%", "0.0%": "0.1%"}.get(text, text) if 0 < share < 1 else f"{100 * share:.0f}%"


def collapsed(said: dict[str, str]) -> list[tuple[str, str]]:
    """The entries of a dict. Entries whose names differ only in numbers become one: `layers.{0..47}.gate`."""
    groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, text in said.items():
        parts = name.split(".")
        numbers = tuple(int(part) for part in parts if part.isdecimal())
        form = ".".join(_NUMBER if part.isdecimal() else part for part in parts)
        groups.setdefault((form, text), []).append(numbers)
    return [(name, text) for (form, text), numbers in groups.items() for name in _names(form, numbers)]


def _names(form: str, numbers: list[tuple[int, ...]]) -> Iterable[str]:
    """The names of one form. It is a single name if `numbers` holds each combination of the numbers of every place."""
    each = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if sorted(numbers) == list(itertools.product(*each)):
        for numbers_here in each:
            form = form.replace(_NUMBER, _range(numbers_here), 1)
        yield form
        return
    for first in each[0]:
        rest = [other for other in numbers if other[0] == first]
        begin, end = form.split(_NUMBER, 1)
        yield from _names(f"{begin}{first}{end}", [other[1:] for other in rest])


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = (f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return f"{{{','.join(texts)}}}"


def measure(model: nn.Module, report: Conversion, experts_per_token: Callable[[nn.Module], int | None]) -> None:
    """Fill in the shares, and name each parameter of two or more dimensions of which the report says nothing yet.

    `experts_per_token` gives the number of experts to which a token goes, for a module that has experts, or None.
    """
    low: dict[int, int] = {}  # the weights that are multiplied in low precision: their identity -> elements
    every: dict[int, int] = {}
    done, total, unsized, names = 0.0, 0.0, False, dict(model.named_modules(remove_duplicate=False))
    # The prefix of each list of experts, their number, and the number of experts that a token goes to.
    lists: list[tuple[str, int, int | None]] = []
    for name, module in names.items():
        dot = f"{name}." if name else ""
        if isinstance(module, nn.ModuleList) and f".{name}".endswith(".experts") and len(module):
            lists.append((f"{name}.", len(module), experts_per_token(names[name.rpartition(".")[0]])))
        among = next(((number, active) for prefix, number, active in lists if name.startswith(prefix)), (1, 1))
        own = dict(module.named_parameters(recurse=False))
        if any(map(nn.parameter.is_lazy, own.values())):
            unsized = True
            report.unknown_flops[name] = "its size is unknown until its first forward"
            continue
        every.update((id(parameter), parameter.numel()) for parameter in own.values())
        weights = set(module.weight_names) if isinstance(module, QuantizesWeights) else set()
        quantizes = isinstance(module, QuantizesWeights) and module.recipe.format != "bf16"
        for key, parameter in own.items():
            if parameter.ndim < 2:
                continue
            if key in weights and quantizes:
                low[id(parameter)] = parameter.numel()
            elif key not in weights and not _is_left(report, name):
                reason = _reason(module, key)
                if parameter.ndim == 2 and "bias" not in key and is_router(names, name, parameter.shape[0]):
                    reason = _ROUTER
                report.left[f"{dot}{key}"] = reason
            is_vector = parameter.ndim > 2 and parameter.numel() == max(parameter.shape)  # such as (1, 1, K)
            if is_vector or isinstance(module, LOOKUPS) or "bias" in key:
                continue
            experts, active = among
            if parameter.ndim > 2 and not _meets_each_token(module):
                if not experts_of(module):
                    report.unknown_flops[f"{dot}{key}"] = _reason(module, key)
                    continue
                experts, active = parameter.shape[0], experts_per_token(module)
            if active is None:
                report.unknown_flops[f"{dot}{key}"] = _UNKNOWN
                continue
            flops = 2 * parameter.numel() / experts * active
            total += flops
            done += flops if key in weights and quantizes else 0
    report.share_of_parameters = None if unsized else sum(low.values()) / max(sum(every.values()), 1)
    report.share_of_flops = None if report.unknown_flops else done / max(total, 1)


_ROUTER = "it is a router, whose logits are sensitive to quantization"
_UNKNOWN = "the model does not say how many experts a token goes to. Pass experts_per_token= to convert"


def _meets_each_token(module: nn.Module) -> bool:
    """Whether a module multiplies each token by each weight once, though its weight has three dimensions."""
    return isinstance(module, nn.Conv1d) and module.stride == (1,)


def _is_left(report: Conversion, name: str) -> bool:
    """Whether the report names a module, or a module that it lies in, as left."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in report.left for end in range(1, len(parts) + 1))


def _reason(module: nn.Module, key: str) -> str:
    if isinstance(module, LOOKUPS):
        return "an embedding is a lookup and no matmul"
    if "bias" in key:
        return "a bias is added and not multiplied"
    return f"convert does not know how {type(module).__name__} uses this parameter"
