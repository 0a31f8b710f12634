"""Which part of an exercise is not finished, and an error of it in words."""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any


def blanks(fn: Callable[..., Any]) -> str | None:
    """Which function still has a `...`: fn, or a function or kernel of its module that fn uses. None if all are done.

    A `...` inside an index with other parts, such as `x[..., None]`, is not a gap.
    """
    for each in _used_by(fn):
        try:
            lines = textwrap.dedent(inspect.getsource(each)).splitlines()
            tree = ast.parse("\n".join(lines))
        except (OSError, TypeError, SyntaxError):  # a function without a source, or a lambda in the middle of a line
            continue
        in_index = {id(e) for t in ast.walk(tree) if isinstance(t, ast.Subscript) for e in _parts_of_index(t)}
        found = sorted(
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value is ... and id(node) not in in_index
        )
        if found:
            count = f"{len(found)} blanks" if len(found) > 1 else "a blank"
            return f"{each.__name__} still has {count} (`...`); the first: {lines[found[0] - 1].strip()}"
    return None


def _parts_of_index(index: ast.Subscript) -> list[ast.expr]:
    """The parts of an index in which `...` is not a gap to fill in.

    This is `...` beside other parts of the index, or in the target of an assignment.
    """
    if isinstance(index.slice, ast.Tuple):
        return index.slice.elts
    return [] if isinstance(index.ctx, ast.Load) else [index.slice]


def _used_by(fn: Callable[..., Any]) -> list[Any]:
    """fn and the functions and kernels of its module that it uses, through globals and closures."""
    found, todo = dict[int, Any](), [fn]
    while todo:
        each: Any = todo.pop()
        for attribute in ("__wrapped__", "fn", "func"):  # attributes of a cached function, a kernel, a partial
            while callable(getattr(each, attribute, None)):
                each = getattr(each, attribute)
        if not inspect.isfunction(each) or each.__module__ != getattr(fn, "__module__", None) or id(each) in found:
            continue
        found[id(each)] = each
        cells = [cell.cell_contents for cell in each.__closure__ or () if cell != type(cell)()]
        names = _names(each.__code__)
        todo += [value for value in [*cells, *(each.__globals__.get(name) for name in names)] if callable(value)]
    return list(found.values())


def _names(code: CodeType) -> list[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*code.co_names, *(name for each in inner for name in _names(each))]


def in_words(error: BaseException, fn: Callable[..., Any]) -> str:
    """An error that fn raised, in one sentence that names the function, the line and the reason."""
    while type(error).__name__ in ("InterpreterError", "InternalError") and error.__cause__ is not None:
        error = error.__cause__  # the interpreter and Helion wrap the error in their own
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if type(error).__name__ == "CompilationError":  # Triton's: it shows the source, a mark below it, and the reason
        return f"Triton does not compile {_at_line(error, fn)}: {str(error).strip().splitlines()[-1]}"
    names = {each.__name__: each for each in _used_by(fn)}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name in names]
    if not frames:
        return f"{fn.__name__} raises {type(error).__name__}: {reason}"
    where = f"{frames[-1].name}, at `{(frames[-1].line or '').strip()}`,"
    if isinstance(error, NameError):
        return f"{where} uses a name that nothing defines: {getattr(error, 'name', None) or reason}"
    return f"{where} raises {type(error).__name__}: {reason}"


def _at_line(error: Any, fn: Callable[..., Any]) -> str:
    """The kernel and the line of a CompilationError, as far as it names them."""
    source, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", None)
    if not source or not line:
        return fn.__name__
    lines = source.splitlines()
    name = next((text.split("(")[0].removeprefix("def ") for text in lines if text.startswith("def ")), fn.__name__)
    return f"{name}, at `{lines[line - 1].strip()}`"
