"""`explain`: which backend runs a call, and why."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from mxspec.dispatch.choice import current_backend, known
from mxspec.dispatch.files import backends, kernel_module, reference
from mxspec.dispatch.resolve import is_batch_invariant, refusal, taken_by_auto, unranked
from mxspec.dispatch.schema import annotated
from mxspec.reference.common import checks


@dataclass(frozen=True)
class Explanation:
    """The backend that a call would use, and for each other backend the reason why it would not be used."""

    op: str
    asked: str
    backend: str | None  # None: the call would raise
    reasons: dict[str, str]
    note: str | None = None  # set if the backend runs this call in another way than its rank assumes
    # Whether the kernel promises on this device that a row's bits do not depend on the other rows. The docstring of the
    # op has the conditions.
    batch_invariant: bool = False
    measured: str | None = None  # how fast the backend was for calls of this size, beside other libraries

    def __str__(self) -> str:
        head = f"{self.op}: {self.asked!r} " + (f"runs {self.backend!r}" if self.backend else "raises")
        head += ", batch-invariant under the conditions of its docstring" if self.batch_invariant else ""
        head += f", {self.note}" if self.note else ""
        head += f", measured {self.measured}" if self.measured else ""
        return "\n".join([head, *(f"  {backend:<10} {reason}" for backend, reason in self.reasons.items())])


def explain(name: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Say which backend `mxspec.<name>(*args, backend=backend, **kwargs)` would run, without running it.

    >>> print(explain("to_blocked", torch.zeros(128, 4, dtype=torch.uint8)))  # doctest: +ELLIPSIS
    to_blocked: 'auto' runs 'reference'
      cublas     has no kernel for to_blocked
      deepgemm   has no kernel for to_blocked
      helion     is used on cpu tensors only if chosen by name
      triton     is used on cpu tensors only if chosen by name
    """
    if not isinstance(name, str):
        raise TypeError(f"explain: the op is {name!r}; needs its name, such as 'mx_quantize'")
    asked = known(backend, "explain") if backend else current_backend()
    signature = inspect.signature(reference(name))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {name}: {error}; needs the arguments of a call of {name}") from None
    args, kwargs = bound.args, bound.kwargs
    for flag in annotated(signature, "bool"):
        checks.boolean(name, flag, kwargs.get(flag, False))
    reference(name).spec.check_args(*args, **kwargs)
    chosen: str | None
    reasons: dict[str, str] = {}
    if asked == "auto":
        chosen = taken_by_auto(name, args, kwargs)
        for other in backends():
            if other not in (chosen, "reference"):
                module = kernel_module(name, other)
                no_rank = module if isinstance(module, str) else unranked(module, args[0].device)
                reasons[other] = no_rank or refusal(name, other, args, kwargs) or f"ranks behind {chosen!r}"
        if chosen != "reference":
            reasons["reference"] = "is used only if chosen by name, or if no kernel supports the call"
    else:
        why_not = refusal(name, asked, args, kwargs)
        chosen = None if why_not else asked
        for other in backends():
            if other != asked:
                reasons[other] = refusal(name, other, args, kwargs) or f"can run this call, but {asked!r} was chosen"
        if why_not:
            reasons = {asked: why_not, **reasons}
    kernel = kernel_module(name, chosen) if chosen not in (None, "reference") else None
    note, measured = (getattr(kernel, what, lambda *_, **__: None)(*args, **kwargs) for what in ("note", "measured"))
    # Numpy multiplies in an interpreter. The order of its sums depends on the number of rows.
    invariant = chosen is not None and args[0].is_cuda and is_batch_invariant(name, chosen)
    return Explanation(name, asked, chosen, reasons, note, invariant, measured)
