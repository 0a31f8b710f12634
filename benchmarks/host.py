"""Times the host's part of a plain call, with and without launch plans: `python benchmarks/host.py [OP ...]`.

The tensors are so small that the GPU is faster than the host. A loop makes calls and does not wait for the GPU, so the
time of a call is the time that the host needs. Each figure is the best of several loops, and all calls take turns.

The bar is the longest time that a call should take: 1.5 times the time of `torch.matmul`, plus `torch.empty` for each
further output, plus 10 us for each further launch.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import mxspec
from mxspec import plans
from mxspec.console import console

LOOPS, CALLS = 7, 200
PLAIN = "without plans"
Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]  # what it is, the op, and its arguments


def calls(device: torch.device) -> Iterator[Call]:
    """The calls to time. Groups of tokens are uneven."""
    torch.manual_seed(0)
    bf16 = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, w, experts = bf16(8, 2048), bf16(7168, 2048), bf16(4, 512, 512)
    tokens = bf16(512, 512)
    offs = torch.tensor([100, 130, 400, 512], dtype=torch.int32, device=device)
    rows = mxspec.fp8_quantize_1x128(x, scale_major="mn")
    squares = mxspec.fp8_quantize_128x128(w)
    yield "fp8_gemm", "fp8_gemm", (*rows, *squares), {}
    acc = torch.zeros(8, 7168, device=device)
    columns = mxspec.fp8_quantize_1x128(w)
    yield "fp8_gemm_", "fp8_gemm_", (acc, *mxspec.fp8_quantize_1x128(x), *columns), {}
    of_tokens, of_experts = mxspec.fp8_quantize_1x128(tokens), mxspec.fp8_quantize_128x128(experts)
    yield "fp8_grouped_gemm", "fp8_grouped_gemm", (*of_tokens, *of_experts, offs), {}
    q, scale, _, end = mxspec.fp8_quantize_k_groups(tokens, offs)
    yield "fp8_grouped_gemm_wgrad", "fp8_grouped_gemm_wgrad", (q, scale, q.clone(), scale.mT.clone().mT, end), {}
    yield "fp8_quantize_1x128", "fp8_quantize_1x128", (x,), {}
    yield "fp8_quantize_1x128, axis -2", "fp8_quantize_1x128", (tokens,), {"axis": -2}
    yield "fp8_quantize_128x128", "fp8_quantize_128x128", (tokens,), {}
    yield "fp8_quantize_128x128, both", "fp8_quantize_128x128", (tokens,), {"with_transpose": True}
    yield "fp8_quantize_k_groups", "fp8_quantize_k_groups", (tokens, offs), {}
    yield "mx_quantize", "mx_quantize", (x,), {}
    yield "mx_quantize, blocked", "mx_quantize", (x,), {"scale_layout": "blocked"}
    yield "mx_quantize_rowcol", "mx_quantize_rowcol", (tokens,), {}
    yield "mx_quantize_groups", "mx_quantize_groups", (tokens, offs), {}
    yield "to_blocked", "to_blocked", (mxspec.mx_quantize(tokens)[1],), {}
    of_x, of_w = mxspec.mx_quantize(x), mxspec.mx_quantize(tokens)
    yield "mx_gemm", "mx_gemm", (of_x[0][:, :512].contiguous(), of_x[1][:, :16].contiguous(), *of_w), {}


def us_of(contenders: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The host's time of each call in microseconds. The contender named PLAIN runs without plans."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(LOOPS):
        for name, call in contenders.items():
            with plans.turned_off() if name == PLAIN else contextlib.nullcontext():
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                best[name] = min(best[name], (time.perf_counter() - begin) / CALLS * 1e6)
                torch.cuda.synchronize()
    return best


def measure(chosen: list[str], device: torch.device) -> None:
    """Time the calls and print a table."""
    x, w = torch.randn(8, 2048, device=device).bfloat16(), torch.randn(7168, 2048, device=device).bfloat16()
    empty = partial(torch.empty, (8, 7168), dtype=torch.bfloat16, device=device)
    base = us_of({"matmul": lambda: torch.matmul(x, w.T), "empty": empty})
    console.print(f"torch.matmul {base['matmul']:.1f} us, torch.empty {base['empty']:.1f} us")
    table = Table("call", PLAIN, "with a plan", "of torch.matmul", "outputs", "steps", "bar", "")
    for column in table.columns[1:]:
        column.justify = "right"
    for what, op, args, kwargs in calls(device):
        if chosen and op not in chosen:
            continue
        call = partial(getattr(mxspec, op), *args, **kwargs)
        for _ in range(3):
            result = call()
        found = plans.described(op, mxspec.current_backend(), args, kwargs)
        plan = found and plans.PLANS.find(found[0])
        us = us_of({"plan": call, PLAIN: call, "matmul": lambda: torch.matmul(x, w.T), "empty": empty})
        if not isinstance(plan, plans.Plan):
            table.add_row(what, f"{us[PLAIN]:.1f}", f"none: {plan}")
            continue
        outputs = 1 if result is None or isinstance(result, Tensor) else len(result)
        bar = 1.5 * us["matmul"] + (outputs - 1) * us["empty"] + 10 * (len(plan.launches) - 1)
        verdict = "within" if us["plan"] <= bar else "above"
        share = f"{us['plan'] / us['matmul']:.2f}"
        counts = str(outputs), str(len(plan.launches))
        table.add_row(what, f"{us[PLAIN]:.1f}", f"{us['plan']:.1f}", share, *counts, f"{bar:.1f}", verdict)
    console.print(table)


def parts(device: torch.device) -> None:
    """Where the time of a planned `fp8_gemm` goes."""
    what, op, args, kwargs = next(calls(device))
    call = partial(getattr(mxspec, op), *args, **kwargs)
    for _ in range(3):
        call()
    found = plans.described(op, mxspec.current_backend(), args, kwargs)
    plan = found and plans.PLANS.find(found[0])
    if found is None or not isinstance(plan, plans.Plan):
        console.print(f"{what} has no plan: {plan}")
        return
    if len(plan.memory) != 1 or len(plan.launches) != 1:
        console.print(
            f"{what} has {len(plan.launches)} steps and {len(plan.memory)} tensors in memory; needs one of each"
        )
        return
    facts, addresses = found
    launch: Any = plan.launches[0]
    out = plans.Device.empty(plan.memory[0])
    places, stream = [*addresses, out.data_ptr()], plans.Device.stream(plan.device)
    us = us_of(
        {
            "the description": lambda: plans.described(op, "auto", args, kwargs),
            "the look-up": lambda: plans.PLANS.find(facts),
            "whether a hook is set": plan.watched,
            "the output's memory": lambda: plans.Device.empty(plan.memory[0]),
            "the launch": lambda: launch(stream, places),
            "the plan (memory and launch)": lambda: plan.run([*addresses]),
            "the whole call": call,
        }
    )
    for part, time_us in us.items():
        console.print(f"  {part:30} {time_us:6.1f} us")


def main(chosen: list[str]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        measure(chosen, torch.device("cuda"))
        parts(torch.device("cuda"))


if __name__ == "__main__":
    main(sys.argv[1:])
