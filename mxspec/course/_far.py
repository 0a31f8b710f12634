"""Calls whose offsets have more than 31 bits, for a verdict."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxspec import dispatch

FAR = 2**31  # the first offset that does not fit into a signed integer of 32 bits


@contextlib.contextmanager
def counted_launches() -> Iterator[list[None]]:
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
            # The stubs of torch have no set_ of an untyped storage.
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


def far_problem(fn: Callable[..., Any], op: str, taken: list[dict[str, Any]], device: torch.device) -> str | None:
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
