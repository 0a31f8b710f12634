"""The tools that the lessons share (notebooks 10 to 15 and 17).

device = course.start()                          # the GPU, or an interpreter
course.verdict(my_quantize, op="mx_quantize")    # is my function right?
course.race({"mine": my_quantize}, x)            # how close is it to the memory's speed?
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import linecache
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxspec import dispatch, interpreters
from mxspec.spec import Case

FAR = 2**31  # the first offset that does not fit into a signed integer of 32 bits
# The stored runs of `benchmarks/lessons.py`. An installed package has no such folder.
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "lessons"


def start() -> torch.device:
    """Choose where kernels run: on the GPU, or on the CPU if there is no GPU or an interpreter is asked for.

    On the CPU, Triton's interpreter runs Triton kernels and the Triton kernels that Helion generates, tile by tile.
    Helion's own interpreter has no tiles, and Helion refuses both interpreters in one process. When Triton
    is imported, it reads the environment variable that selects its interpreter.

    Returns:
        The device for the tensors of a lesson.

    Raises:
        RuntimeError: Triton was imported before this call, so it compiles, and there is no GPU to compile for.
    """
    if torch.cuda.is_available() and not dispatch.interpreters():
        return torch.device("cuda")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("start: triton was imported before, to compile for a GPU; call it first, in a new process")
    os.environ.pop("HELION_INTERPRET", None)
    os.environ["TRITON_INTERPRET"] = "1"
    interpreters.install()
    return torch.device("cpu")


def start_compiler() -> None:
    """Let Triton compile in this process, with a GPU or without one: no interpreter runs.

    Raises:
        RuntimeError: Triton was imported before this call, to interpret.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("start_compiler: triton was imported before, to interpret; call it first, in a new process")
    for name in ("TRITON_INTERPRET", "HELION_INTERPRET", "MXSPEC_BACKEND"):
        os.environ.pop(name, None)


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
    with _counted_launches() as launches:
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
            problem = _far_problem(fn, op, taken, device)
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


# --- an exercise that is not finished ---------------------------------------------------------------------------


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


# --- offsets of more than 31 bits -------------------------------------------------------------------------------


@contextlib.contextmanager
def _counted_launches() -> Iterator[list[None]]:
    """Within the block, every launch of a Triton kernel, also of a kernel from Helion, adds one element to the list."""
    launches: list[None] = []
    if "triton" not in sys.modules:
        yield launches
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            launches.append(None)
            return run(*args, **kwargs)

        return counted

    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "run", counting(kind.run)))
        yield launches


@contextlib.contextmanager
def _only_the_ends(count: int = 16) -> Iterator[None]:
    """Within the block, Triton's interpreter runs only the first two and the last `count` programs of a long grid."""
    from triton.runtime import interpreter

    def ends(length: int, *rest: int) -> Any:
        return range(length, *rest) if rest or length < 64 else [0, 1, *range(length - count, length)]

    def keep(*_: Any) -> None:
        """Nothing is copied back: on the CPU the interpreter works on the arguments themselves."""

    with (
        mock.patch.object(interpreter, "range", ends, create=True),
        mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", keep),
    ):
        yield


def _behind_a_margin(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """A tensor with 2^31 elements of memory in front, so that an offset that turned negative stays in that memory.

    On the CPU this needs little memory: the system provides a page only when a program first touches it, and a program
    touches few pages of the margin.
    """
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = _empty(FAR + extent, dtype=dtype, device=device)
    return memory.as_strided(shape, stride, FAR)


_empty = torch.empty


@contextlib.contextmanager
def _margins() -> Iterator[None]:
    """Within the block, new uninitialised tensors end with bytes 0x5a, and large tensors have a margin in front."""

    def marked(out: Tensor) -> Tensor:
        if type(out) is Tensor and out.numel() and out.device.type != "meta":
            if out.numel() >= FAR:
                out = _behind_a_margin(tuple(out.shape), out.stride(), out.dtype, out.device)
            flat = _empty(0, dtype=torch.uint8, device=out.device).set_(out.untyped_storage())  # type: ignore[call-overload]
            flat[-min(4096, out.nbytes) :].fill_(0x5A)
        return out

    def marking(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            return marked(allocate(*args, **kwargs))

        return allocated

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, marking(getattr(owner, name))))
        yield


def far_copy_problem(copy: Callable[[Tensor, Tensor], Any], device: torch.device, columns: int = 0) -> str | None:
    """What is wrong with `copy(x, out)` of more than 2^31 elements; the last 4096 are compared.

    Args:
        copy: the function. It writes x to `out`, which is contiguous.
        device: where the tensors are.
        columns: 0 for a vector. Otherwise x is a matrix with so many columns, which lie one after the other in memory.

    Returns:
        The difference, or None if there is none.
    """
    from mxspec.check import difference

    n = FAR // max(1, columns) + 5000
    shape, stride = ((n, columns), (1, n + 3)) if columns else ((n,), (1,))
    x = _behind_a_margin(shape, stride, torch.uint8, device)
    flat = _behind_a_margin((n * max(1, columns),), (1,), torch.uint8, device)
    end = torch.arange(4096 * max(1, columns), device=device).remainder(251).view(-1, *shape[1:])
    x[-4096:] = end
    flat[-4096:].fill_(0x5A)
    with _only_the_ends() if device.type == "cpu" else contextlib.nullcontext():
        copy(x, flat.view(shape))
    return difference((flat[-4096:],), (end.to(torch.uint8).view(-1)[-4096:],))


# The rows of a tall tensor, the rows of a wide tensor, and the elements from one row of a wide tensor to the next. The
# last tile of 128 rows has 32 rows.
_TALL, _ROWS, _STEP = 2**25 + 32, 2**16 + 32, 2**15
_SMALL = 160  # the rows of the small call with which the last rows are compared


def _tall_and_wide(of: Tensor, tall: int = _TALL) -> list[tuple[Tensor, Tensor]]:
    """Two large tensors, each with a small tensor that is equal to its end.

    The tall tensor is one row, repeated by `expand`. The wide tensor has rows that lie far apart.
    """
    many = of[:1].expand(tall, -1), of[:1].expand(_SMALL, -1)
    wide = _behind_a_margin((_ROWS, of.shape[1]), (_STEP, 1), of.dtype, of.device)
    raw, end = wide.view(_INTS[of.element_size()]), of.view(_INTS[of.element_size()])
    raw[-_SMALL:] = end
    return [many, (wide, of)]


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


_Call = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # the large arguments and the small ones


def _far_calls(op: str, kwargs: Mapping[str, Any], device: torch.device) -> list[_Call]:
    """Pairs of calls: a large call whose offsets in inputs or outputs pass 2^31, and a small call with the same end."""
    generator = torch.Generator().manual_seed(10)

    def codes(rows: int, columns: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        values = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.uint8)
        return values.to(device).view(dtype)

    if op in ("mx_quantize", "mx_quantize_rowcol"):
        x = torch.randn(_SMALL, 64, generator=generator).to(device, torch.bfloat16)
        return [((large,), (small,)) for large, small in _tall_and_wide(x)]
    if op == "to_blocked":
        scale = codes(_SMALL, 8, 0, 255, torch.float8_e8m0fnu)
        return [((large,), (small,)) for large, small in _tall_and_wide(scale, 2**28 + 32)]
    if op == "mx_gemm":
        a, b = (codes(rows, 32, 0x30, 0x40, torch.float8_e4m3fn) for rows in (_SMALL, 64))  # 0.5 to 1.875

        def of_ones(rows: int) -> Tensor:  # all are 1, in either layout
            ones = torch.full((512 * -(-rows // 128),), 127, dtype=torch.uint8, device=device)
            return (ones if kwargs.get("scale_layout") == "blocked" else ones[:rows, None]).view(torch.float8_e8m0fnu)

        calls: list[_Call] = []
        for large, small in _tall_and_wide(a):
            calls.append(((large, of_ones(len(large)), b, of_ones(64)), (small, of_ones(_SMALL), b, of_ones(64))))
        return calls
    return []


def _far_problem(fn: Callable[..., Any], op: str, taken: list[dict[str, Any]], device: torch.device) -> str | None:
    """What is wrong with fn where offsets pass 2^31; None if nothing is. The end of each output is compared."""
    from mxspec.check import difference
    from mxspec.spec import outputs_of

    reference = dispatch.reference(op)
    by_layout = {(k.get("axis"), k.get("scale_layout")): k for k in reversed(taken)}
    for kwargs in by_layout.values() if op != "mx_gemm" else taken[:1]:
        for large, small in _far_calls(op, kwargs, device):
            try:
                with _only_the_ends() if device.type == "cpu" else contextlib.nullcontext(), _margins():
                    got = outputs_of(fn(*large, **kwargs))
            except NotImplementedError:
                continue
            expected = outputs_of(reference(*small, **kwargs))
            for g, e in zip(got, expected, strict=True):
                g, e = (g, e) if g.is_contiguous() else (g.mT, e.mT)  # column-major, in the order in which they lie
                if not (g.is_contiguous() and e.is_contiguous()):
                    continue
                equal = 512 if e.ndim == 1 else min(512, e.shape[-1])  # a tile of scales, or the end of a row
                tails = (g.view(-1)[-equal:],), (e.view(-1)[-equal:],)
                if problem := difference(*tails, reference.spec.min_sqnr_db):
                    return f"of the last {equal} elements, {problem}"
    return None


# --- speed ------------------------------------------------------------------------------------------------------


def race(
    contenders: Mapping[str, Callable[[Tensor], Any]], x: Tensor, *, flops: int = 0
) -> dict[str, tuple[float, float]]:
    """Time functions of one tensor in turn, and print how fast they are.

    Each call is a CUDA graph over inputs that are larger than the L2, as `python -m mxspec bench` times a kernel.
    Before a function is timed, it must leave the same bytes in its outputs over two poisons. The verdict says whether
    these bytes are right.

    Args:
        contenders: the functions, by the names that are printed.
        x: their argument.
        flops: the operations of a matmul, to print TFLOP/s. By default GB/s of bytes read and written are printed,
            beside the rates of a copy of x and, for bfloat16, of a bare cast to FP8.

    Returns:
        Microseconds of a call and the printed rate, by name.

    Raises:
        AssertionError: a function leaves bytes of its outputs unwritten, or changes its input.
    """
    from mxspec.bench.timing import MATMUL, MAX_SETS, MEMORY, Contender, baselines, bytes_of_call
    from mxspec.bench.timing import race as take_turns

    sets = 1
    if x.is_cuda:
        l2_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size
        sets = min(MAX_SETS, 1 + 4 * l2_bytes // x.nbytes)
    inputs = [(x.clone(),) for _ in range(sets)]
    racers = [Contender(name, fn, inputs) for name, fn in contenders.items()]
    for racer in racers:
        if problem := racer.prove(None):
            raise AssertionError(f"{racer.name}: {problem}")
    racers += [] if flops else baselines(inputs)
    take_turns(racers, MATMUL if flops else MEMORY)
    figures, unit = dict[str, tuple[float, float]](), "TFLOP/s" if flops else "GB/s"
    for racer in racers:
        rate = flops / racer.us / 1e6 if flops else bytes_of_call(racer) / racer.us / 1e3
        print(f"{racer.name:<24}{racer.us:>10.1f} us {f'{rate:.0f} {unit}':>14}")
        figures[racer.name] = racer.us, rate
    return figures


def stored(lesson: str, folder: Path = RESULTS) -> None:
    """Print what a lesson's kernels reached in the newest stored run of `benchmarks/lessons.py`.

    Args:
        lesson: the number of the notebook, such as "10".
        folder: where the runs are stored, as `lessons-*.json`.
    """
    runs = sorted(folder.glob("lessons-*.json"))
    if not runs:
        print("no run is stored yet; `python benchmarks/lessons.py` on a GPU stores one")
        return
    run = json.loads(runs[-1].read_text())
    print(f"{run['device']}, {run['date']}, " + ", ".join(f"{k} {v}" for k, v in run["versions"].items()))
    for entry in run["entries"]:
        if entry["lesson"] == lesson:
            rate = f"{entry['rate']:.0f} {entry['unit']}"
            print(f"{entry['shape']:<20}{entry['name']:<24}{entry['us']:>10.1f} us {rate:>14}")


# --- the lessons as files ---------------------------------------------------------------------------------------


def definitions(lesson: Path) -> dict[str, Any]:
    """The functions that a notebook defines and its imports, without its calls.

    Args:
        lesson: the notebook.

    Returns:
        Functions, kernels and modules by their names.
    """
    found: dict[str, Any] = {"__name__": lesson.stem}
    for i, cell in enumerate(json.loads(lesson.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            define("".join(cell["source"]), f"<{lesson.stem}, cell {i}>", found)
    return found


def define(source: str, name: str, found: dict[str, Any]) -> None:
    """Add the functions and the imports of a cell to what is found already.

    Args:
        source: the cell's code.
        name: what a traceback calls it.
        found: where the functions look for each other, and where they are put.
    """
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # Triton reads it there
    tree = ast.parse(source)
    tree.body = [s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.Import, ast.ImportFrom))]
    exec(compile(tree, name, "exec"), found)
