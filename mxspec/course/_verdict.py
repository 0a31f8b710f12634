"""Whether a function of an exercise keeps the contract of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mxspec import dispatch
from mxspec.course._far import counted_launches, far_problem
from mxspec.course._unfinished import blanks, in_words
from mxspec.spec import Case


def verdict(fn: Callable[..., Any], *, op: str, case: str | None = None) -> None:
    """Check a function with the conformance engine, and print the result in words that are the same on every machine.

    The function may raise NotImplementedError, with its reason, for arguments that it does not take. Those cases are
    left out. A function with a `...`, or one that raises another error, is unfinished: the verdict is then `not yet`
    and a sentence that names the missing part. Only the first failure is shown.

    A Triton or Helion kernel that passes all cases is also run on tensors whose last elements lie more than 2^31
    elements behind their first. The verdict leaves three kinds of cases to `check.assert_conforms` and
    `python -m mxspec check`: calls that must be refused, tensors of more than 2^31 elements, and generated cases of
    more than 2^18 elements, for which an interpreter takes many seconds.

    Args:
        fn: a function with the op's signature.
        op: the op whose contract the function must keep.
        case: the name of one case to run. By default all cases run.

    Raises:
        ValueError: op is unknown, or no case has this name.
    """
    from mxspec.check import cases_of, check_case, default_device  # triton is interpreted from this import on, or not

    cases = [c for c in cases_of(op, case) if not (c.raises or "large" in c.flags or (case is None and _is_slow(c)))]
    device = default_device()
    if missing := blanks(fn):
        print(f"not yet: {missing}")
        return
    watched = _Watched(fn, dispatch.reference(op))
    left_out, taken = dict[str, None](), list[dict[str, Any]]()
    with counted_launches() as launches:
        for each in cases:
            result = check_case(op, each, watched, device, name=fn.__name__)
            if watched.unfinished:
                print(f"not yet: {watched.unfinished}")
                return
            if result.status == "failed":
                print(f"wrong in the case {each.name!r}")
                print("\n".join(line for line in result.message.splitlines() if not line.startswith("reproduce: ")))
                return
            if result.status == "skipped":
                left_out[result.message.removeprefix(f"{fn.__name__}: ")] = None
            else:
                taken.append(dict(each.kwargs))
    if not taken:
        print(f"not yet: {'; '.join(left_out)}")
        return
    if case is None and launches:
        try:
            problem = far_problem(fn, op, taken, device)
        except Exception as error:
            problem = in_words(error, fn)
        if problem:
            print(f"wrong where offsets pass 2^31: are they 64-bit?\n{problem}")
            return
    where = "in every case that it takes" if case is None else f"in the case {case!r}"
    print(f"right: {fn.__name__} keeps the contract of {op} {where}")
    if left_out:
        print(f"left out, as it says: {'; '.join(left_out)}")


def _is_slow(case: Case) -> bool:
    sizes = (x.numel() for x in case.args() if isinstance(x, Tensor)) if "generated" in case.flags else ()
    return sum(sizes) > 2**18


class _Watched:
    """Calls fn. `unfinished` says why fn is unfinished: a call raised an error, or returned no valid answer."""

    def __init__(self, fn: Callable[..., Any], reference: Any):
        self.fn, self.reference, self.unfinished = fn, reference, ""
        self.__name__ = fn.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from mxspec.check._answers import returned_problem

        try:
            answer = self.fn(*args, **kwargs)
        except NotImplementedError:
            raise
        except Exception as error:
            self.unfinished = in_words(error, self.fn)
            raise
        problem = "returns None" if answer is None else returned_problem(self.reference, answer)
        if problem:
            self.unfinished = f"{self.fn.__name__} {problem}"
            raise TypeError(self.unfinished)
        return answer
