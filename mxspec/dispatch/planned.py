"""Runs a call by its launch plan, if it has one. Otherwise the call takes the ordinary path, and may be recorded."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from mxspec.dispatch import resolve
from mxspec.dispatch.choice import current_backend
from mxspec.plans import PLANS, Description, Plan, described, record
from mxspec.spec import Reference


def describe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None) -> Description | None:
    """The description of a call on a GPU, or None if the call cannot have a plan."""
    if not args or not getattr(args[0], "is_cuda", False) or not isinstance(backend, str | None):
        return None
    return described(name, backend or current_backend(), args, kwargs)


def run(
    fn: Reference[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None,
    call: Description | None,
) -> Any:
    """Run a call of this description."""
    if call is None:
        return resolve.run(fn, args, kwargs, backend)
    facts, addresses = call
    plan = PLANS.find(facts)
    if type(plan) is Plan and not plan.watched():
        return plan.run(addresses)
    ordinary = functools.partial(resolve.run, fn, args, kwargs, backend)
    if plan is not None:
        return ordinary()
    if len(set(addresses)) < len(addresses):  # the recorder could not tell two tensors at one address apart
        return ordinary()
    if not PLANS.is_due(facts):
        result = ordinary()
        PLANS.see(facts)
        return result
    taken = backend or current_backend()
    if taken == "auto":
        taken = resolve.taken_by_auto(fn.__name__, args, kwargs)
    if not getattr(sys.modules.get(f"mxspec.{taken}_kernels"), "PLANNED", False):
        PLANS.keep(facts, f"the kernels of {taken!r} have no plans")
        return ordinary()
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    result, made = record(ordinary, tensors)
    if made is not None:
        PLANS.keep(facts, made)
    return result
