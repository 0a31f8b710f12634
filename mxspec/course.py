"""What the lessons share, notebooks 10 to 15: where they run, what the checker says, how fast a kernel is.

device = course.start()                          # the GPU, or an interpreter
course.verdict(my_quantize, op="mx_quantize")    # is it right?
course.race({"mine": my_quantize}, x)            # how close to the memory's speed?
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mxspec import dispatch, interpreters
from mxspec.spec import Case


def start() -> torch.device:
    """Choose where kernels run: on the GPU, or, where there is none or an interpreter is asked for, on the CPU.

    There Triton's interpreter runs Triton's kernels and the Triton that Helion generates, tile by tile. Helion's own
    knows no tiles, and Helion refuses both in one process. Triton is told by an environment variable that it reads
    when it is imported.

    Returns:
        The device for the tensors of a lesson.

    Raises:
        RuntimeError: Triton was imported before, to compile, and there is nothing to compile for.
    """
    if torch.cuda.is_available() and not dispatch.interpreters():
        return torch.device("cuda")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("start: triton was imported before, to compile; call start() first, in a fresh process")
    os.environ.pop("HELION_INTERPRET", None)
    os.environ["TRITON_INTERPRET"] = "1"
    interpreters.install()
    return torch.device("cpu")


def verdict(fn: Callable[..., Any], *, op: str, case: str | None = None) -> None:
    """Run the conformance engine on a function, and print what it says in words that are the same on every machine.

    A function may raise NotImplementedError, with its reason, for what it does not take: those cases are left out. If
    it takes none, nobody has done the exercise yet. The first failure is shown. The verdict leaves three kinds
    of cases to `check.assert_conforms` and `python -m mxspec check`: calls that must be refused, tensors of more than
    2^31 elements, and generated cases of more than 2^18 elements, for which an interpreter takes many seconds.

    Args:
        fn: a function with the op's signature.
        op: the op whose contract it is to keep.
        case: the name of the one case to run; all by default.

    Raises:
        ValueError: op, or a name that no case has.
    """
    from mxspec.check import cases_of, check_case, default_device  # triton is interpreted from this import on, or not

    left_out, passed = dict[str, None](), 0
    for each in cases_of(op, case):
        if case is None and (each.raises or "large" in each.flags or _is_slow(each)):
            continue
        result = check_case(op, each, fn, default_device(), name=fn.__name__)
        if result.status == "failed":
            print(f"wrong in the case {each.name!r}")
            print("\n".join(line for line in result.message.splitlines() if not line.startswith("reproduce: ")))
            return
        if result.status == "skipped":
            left_out[result.message.removeprefix(f"{fn.__name__}: ")] = None
        passed += result.status == "passed"
    if not passed:
        print(f"not yet: {'; '.join(left_out)}")
        return
    where = "in every case that it takes" if case is None else f"in the case {case!r}"
    print(f"right: {fn.__name__} keeps the contract of {op} {where}")
    if left_out:
        print(f"left out, as it says: {'; '.join(left_out)}")


def _is_slow(case: Case) -> bool:
    sizes = (x.numel() for x in case.args() if isinstance(x, Tensor)) if "generated" in case.flags else ()
    return sum(sizes) > 2**18


def race(contenders: Mapping[str, Callable[[Tensor], Any]], x: Tensor, *, flops: int = 0) -> None:
    """Time functions of one tensor in turn, and print how fast they are.

    Each is a CUDA graph over inputs that pass the L2, as `python -m mxspec bench` times a kernel; two poisons must
    have left the same bytes in all of its outputs first. What is right is the verdict's to say.

    Args:
        contenders: the functions, by the names that are printed.
        x: their argument.
        flops: of a matmul, to print TFLOP/s; else it is GB/s of bytes read and written, beside those of a copy of x
            and, for bfloat16, of its bare cast to FP8.

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
    for racer in racers:
        rate = f"{flops / racer.us / 1e6:.0f} TFLOP/s" if flops else f"{bytes_of_call(racer) / racer.us / 1e3:.0f} GB/s"
        print(f"{racer.name:<24}{racer.us:>10.1f} us {rate:>14}")
