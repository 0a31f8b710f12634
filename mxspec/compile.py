"""Machine code without a GPU: every kernel of an op, compiled for Hopper and Blackwell, and looked at.

The op's cases are the inputs and the kernel's own host function is the launcher: it is called on meta tensors, and
what it would launch is compiled instead, with the signature, the alignments and the options of the real launch.

A kernel module says with `PTX` what its machine code must show: regular expressions that are searched in the PTX of
every case with contiguous, 16-byte aligned tensors and without the flag `edge`; a tuple for both targets or a dict by
target. `PTX = "no: reason"` is said by a module that has no machine code of its own. In all cases no kernel may touch
local memory, which is also where registers are spilled to, and none whose bytes are promised may have a sum of floats,
whose rounding would depend on whether the compiler fuses it with a product.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxspec.covering import covering, recorded
from mxspec.dispatch import backends, has_kernel, interpreters, kernel_module, ops, reference
from mxspec.spec import Case

TARGETS = {"sm90": 90, "sm100": 100}
_SM_COUNT = {"sm90": 132, "sm100": 148}  # H200, B200; a persistent kernel's grid, which no machine code depends on


def unavailable() -> str | None:
    """Why nothing can be compiled in this process; None where it can."""
    if variables := interpreters():
        return f"{variables[0]}=1 runs kernels without compiling them"
    try:
        import triton  # noqa: F401  # only whether it can be imported is asked
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


# --- a GPU that is not there --------------------------------------------------------------------------------------


def _forget_devices() -> None:
    """Empty the caches in which kernels, and Helion, keep what they have asked a device."""
    for name, module in list(sys.modules.items()):
        if name == "helion._compat" or re.match(r"mxspec\.\w+_kernels\b", name):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _fake_helion(target: str, properties: Any) -> contextlib.ExitStack:
    """Make a Helion kernel take meta tensors as CUDA tensors, and run every one of its configurations."""
    import torch._inductor.runtime.hints as hints
    import torch._subclasses.fake_tensor as fake_tensor
    from helion._compiler.compile_environment import CompileEnvironment

    runtime = sys.modules["helion.runtime.kernel"]  # the attribute of that name is the decorator
    cuda = torch.device("cuda:0")
    hint = hints.DeviceProperties(
        "cuda", 0, properties.multi_processor_count, TARGETS[target], properties.major, warp_size=32
    )
    to_fake_tensor = CompileEnvironment._to_fake_tensor

    def to_cuda(self: Any, tensor: Tensor, source: Any) -> Any:
        fake = to_fake_tensor(self, tensor, source)
        if fake.device.type == "meta":
            fake.fake_device = cuda
        return fake

    def describe(device: torch.device) -> Any:
        return hint

    @functools.cache
    def twin(kernel: Any) -> Any:  # with caches of its own, so that no real launch finds what is compiled here
        return type(kernel)(kernel.fn, configs=kernel.configs, settings=kernel.settings, key=kernel._key_fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = twin(self)
        args = kernel.normalize_args(*args, **kwargs)
        bound = kernel.bind(args)
        for config in kernel.configs or [bound.config_spec.default_config()]:
            result = bound.compile_config(config)(*args)
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(runtime, _find_device=lambda args: cuda))
        stack.enter_context(mock.patch.multiple(runtime.Kernel, __call__=call))
        stack.enter_context(mock.patch.multiple(CompileEnvironment, _to_fake_tensor=to_cuda))
        stack.enter_context(mock.patch.object(hints.DeviceProperties, "create", describe))
        if hasattr(fake_tensor, "init_gpu_context"):  # a CUDA build of torch would look for the device
            stack.enter_context(mock.patch.multiple(fake_tensor, init_gpu_context=lambda device: None))
        return stack.pop_all()


@contextlib.contextmanager
def fake_gpu(target: str) -> Iterator[list[Any]]:
    """Pretend that the current CUDA device is a `target`, and compile where a kernel would be launched.

    Gives the list of what Triton compiled, which grows with each launch on meta tensors. Nothing that is cached
    within is found without, by a real launch on a real device.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    arch = TARGETS[target]
    compiled: list[Any] = []
    real_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(real_run(self, *args, grid=grid, warmup=True, **kwargs))  # a warm-up stops before the launch
        return compiled[-1]

    device = SimpleNamespace(
        get_current_device=lambda: target,  # the key of Triton's cache; a real device is a number
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    properties = SimpleNamespace(
        name=target, major=arch // 10, minor=0, multi_processor_count=_SM_COUNT[target], warp_size=32,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        _forget_devices()
        stack.callback(_forget_devices)
        stack.enter_context(mock.patch.dict(os.environ))  # Helion moves Triton's cache directory
        stack.enter_context(mock.patch.multiple(driver, _active=device))
        stack.enter_context(mock.patch.multiple(JITFunction, run=run))
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda,
                is_available=lambda: True,
                current_device=lambda: 0,
                get_device_capability=lambda device=None: (arch // 10, 0),
                get_device_properties=lambda device=None: properties,
                get_device_name=lambda device=None: target,
            )
        )
        if "helion" in sys.modules:
            stack.enter_context(_fake_helion(target, properties))
        yield compiled


# --- what came out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel. `local_bytes` are per thread: spilled registers and arrays that found no register."""

    kernel: str
    target: str
    registers: int
    local_bytes: int
    shared_bytes: int
    load_bytes: int  # the widest access to global memory by one thread
    store_bytes: int
    has_float_sum: bool  # one outside of matrix instructions
    instructions: tuple[str, ...]  # those that convert to narrow floats, multiply matrices or copy tiles
    ptx: str = field(repr=False)


_FLOAT_SUM = re.compile(r"= f(?:add|sub) (?!float -?0\.0+e\+00,)")  # of LLVM's, which negates by a difference to 0
_INSTRUCTION = re.compile(r"\b(?:cvt\.r\w+\.satfinite|wgmma\.mma|tcgen05|mma\.sync|cp\.async\.bulk)[.\w:]*")


def _widest(access: str, ptx: str) -> int:
    """The most bytes that one `ld.global`, `st.global` or `cp.async` moves."""
    plain = re.findall(rf"\b{access}\.global(?:\.(?!v\d)[\w:]+)*?(?:\.v(\d))?\.[bsuf](\d+)\s", ptx)
    sizes = [int(lanes or 1) * int(bits) // 8 for lanes, bits in plain]
    if access == "ld":
        sizes += [int(size, 16) for size in re.findall(r"\bcp\.async\.c[ag]\..*?\], 0x(\w+)", ptx)]
    return max(sizes, default=0)


_measured: dict[str, MachineCode] = {}


def _measure(kernel: Any, target: str) -> MachineCode:
    if kernel.hash not in _measured:
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"])
            cubin.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
            usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        most = {what: max(map(int, re.findall(rf"\b{what}:(\d+)", usage))) for what in ("REG", "STACK", "LOCAL")}
        ptx = kernel.asm["ptx"]
        _measured[kernel.hash] = MachineCode(
            kernel.metadata.name, target, most["REG"], most["STACK"] + most["LOCAL"], kernel.metadata.shared,
            _widest("ld", ptx), _widest("st", ptx), bool(_FLOAT_SUM.search(kernel.asm["llir"])),
            tuple(sorted(set(_INSTRUCTION.findall(ptx)))), ptx,
        )  # fmt: skip
    return _measured[kernel.hash]


def _meta(value: Any) -> Any:
    """A tensor's shape, strides and place in its storage, without the storage; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    storage = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device="meta")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def _compile(compiled: list[Any], target: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[MachineCode]:
    compiled.clear()
    fn(*args, **kwargs)
    return [_measure(kernel, target) for kernel in dict.fromkeys(compiled)]


def compile_call(fn: Callable[..., Any], *args: Any, target: str, **kwargs: Any) -> list[MachineCode]:
    """Compile what `fn(*args, **kwargs)` would launch on a GPU; of the tensors only the metadata is read."""
    with fake_gpu(target) as compiled:
        return _compile(compiled, target, fn, map(_meta, args), {name: _meta(arg) for name, arg in kwargs.items()})


def compile_case(op: str, backend: str, case: Case, target: str) -> list[MachineCode]:
    """Compile what a backend would launch for one case of an op."""
    return compile_call(getattr(kernel_module(op, backend), op), *case.args(), target=target, **case.kwargs)


# --- the checks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    op: str
    backend: str
    case: str
    target: str
    code: tuple[MachineCode, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: str = ""


def _expected(module: ModuleType, target: str) -> tuple[str, ...]:
    ptx = getattr(module, "PTX", ())
    if isinstance(ptx, str):
        raise TypeError(f"{module.__name__}: PTX is a tuple, a dict by target, or a string that begins with 'no: '")
    return tuple(ptx.get(target, ()) if isinstance(ptx, Mapping) else ptx)


def is_searched(args: Iterable[Any], edge: bool) -> bool:
    """Whether a case must have its kernel's instructions: `PTX`."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return not edge and all(t.is_contiguous() and t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)


def problems(code: Sequence[MachineCode], expected: Sequence[str], args: Sequence[Any], edge: bool) -> list[str]:
    """What is wrong with the machine code of one case."""
    found = [f"{c.kernel} keeps {c.local_bytes} bytes a thread in local memory" for c in code if c.local_bytes]
    if not code and not edge:
        found.append("launches nothing")
    elif is_searched(args, edge):
        ptx = "\n".join(c.ptx for c in code)
        found += [f"no {regex!r} in the PTX of {code[0].kernel}" for regex in expected if not re.search(regex, ptx)]
    return found


@dataclass(frozen=True)
class _Call:
    """A case as it is compiled, or why it is not."""

    case: Case
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""


def _call(case: Case, module: ModuleType, covering: bool = False) -> _Call:
    if case.raises:
        return _Call(case, skipped="is refused")
    if covering and "generated" in case.flags:  # an op's own cases have every option; tracing these takes minutes
        return _Call(case, skipped="is generated, and compiled where all cases are")
    args, kwargs = [_meta(arg) for arg in case.args()], {k: _meta(v) for k, v in case.kwargs.items()}
    reason = module.supports(*args, **kwargs) if hasattr(module, "supports") else None
    return _Call(case, args, kwargs, reason or "")


def _is_edge(case: Case) -> bool:
    """Whether a case may launch nothing or lack an instruction: it is at a limit, or it is generated."""
    return bool(set(case.flags) & {"edge", "generated"})


def _covered(calls: Sequence[_Call], fn: Callable[..., Any], together: int) -> list[_Call]:
    """The calls, of which those are skipped that would compile nothing but what others show."""
    launches = []
    with recorded() as seen:
        for call in calls:
            seen.clear()
            with contextlib.suppress(Exception):  # it is raised again when the call is compiled
                fn(*call.args, **call.kwargs) if not call.skipped else None
            searched = is_searched((*call.args, *call.kwargs.values()), _is_edge(call.case))
            # What has its instructions searched is covered by itself: no other case shows that of its options.
            launches.append(
                (*seen, *(dataclasses.replace(one, kernel=f"{one.kernel}, searched") for one in seen if searched))
            )
    enough = covering(launches, together)
    shown = "shows no options that other cases do not"
    return [
        call if call.skipped or i in enough or not launches[i] else dataclasses.replace(call, skipped=shown)
        for i, call in enumerate(calls)
    ]


def compile_op(op: str, backend: str, target: str, cover: int | None = None) -> list[Result]:
    """Compile and check every case of an op, or as many as show any `cover` options together (`covering.py`).

    With 0 that is each kernel once.
    """
    module = kernel_module(op, backend)
    ptx = getattr(module, "PTX", None)
    if isinstance(module, str) or (isinstance(ptx, str) and ptx.startswith("no: ")):
        return [Result(op, backend, "all", target, skipped=module if isinstance(module, str) else str(ptx))]
    fn, expected, results = getattr(module, op), _expected(module, target), []
    exact = reference(op).spec.min_sqnr_db == math.inf
    with fake_gpu(target) as compiled:
        calls = [_call(case, module, cover is not None) for case in reference(op).spec.cases()]
        for call in _covered(calls, fn, cover) if cover is not None else calls:
            result = functools.partial(Result, op, backend, call.case.name, target)
            if call.skipped:
                results.append(result(skipped=call.skipped))
                continue
            try:
                code = _compile(compiled, target, fn, call.args, call.kwargs)
            except Exception as error:  # whatever a compiler raises; the other cases still have something to say
                causes = [error, *([error.__cause__] if error.__cause__ else [])]
                results.append(result(problems=tuple(f"{type(e).__name__}: {e}" for e in causes)))
                continue
            wrong = problems(code, expected, [*call.args, *call.kwargs.values()], _is_edge(call.case))
            wrong += [f"{c.kernel} has a sum of floats, and promises bytes" for c in code if exact and c.has_float_sum]
            results.append(result(code=tuple(code), problems=tuple(wrong)))
    return results


def kernels() -> list[tuple[str, str]]:
    """Every `(op, backend)` that has a kernel file."""
    return [(op, backend) for op in ops() for backend in backends() if has_kernel(op, backend)]


def compile_all(jobs: Sequence[tuple[str, str, str, int | None]]) -> list[Result]:
    """`compile_op` on each `(op, backend, target, cover)`, as many at a time as there are cores."""
    spawn, handler = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_DFL)
    # Ctrl-C reaches the workers too. The default handler ends them without a traceback.
    with ProcessPoolExecutor(mp_context=spawn, initializer=signal.signal, initargs=handler) as pool:
        return [result for results in pool.map(compile_op, *zip(*jobs, strict=True)) for result in results]


# --- the command line ---------------------------------------------------------------------------------------------


def _table(results: Sequence[Result]) -> Any:
    from rich.table import Table

    table = Table("kernel", "case", "target", title="machine code; bytes a thread, shared: bytes a program")
    for column in ("registers", "local", "shared", "load", "store"):
        table.add_column(column, justify="right")
    cases: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        for c in result.code:
            numbers = (c.registers, c.local_bytes, c.shared_bytes, c.load_bytes, c.store_bytes)
            cases.setdefault((f"{result.backend} {c.kernel}", c.target, *map(str, numbers)), []).append(result.case)
    for (kernel, target, *cells), names in cases.items():
        table.add_row(kernel, names[0] + (f" (+{len(names) - 1})" if names[1:] else ""), target, *cells)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mxspec compile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", choices=ops())
    parser.add_argument("--backend", choices=[b for b in backends() if b != "reference"])
    parser.add_argument("--target", choices=TARGETS)
    cover_help = "only cases that show each kernel (0), each option (1) or any two options (2)"
    parser.add_argument("--cover", type=int, choices=(0, 1, 2), help=cover_help)
    parser.add_argument("--json", action="store_true", help="everything but the PTX, as JSON")
    asked = parser.parse_args(argv)
    if reason := unavailable():
        parser.error(reason)
    jobs = [
        (op, backend, target, asked.cover)
        for op, backend in kernels()
        for target in TARGETS
        if asked.op in (None, op) and asked.backend in (None, backend) and asked.target in (None, target)
    ]
    if not jobs:
        parser.error("no kernel is of that op and that backend")
    results = compile_all(jobs)
    failed = [result for result in results if result.problems]
    if asked.json:
        import triton

        rows = [dataclasses.asdict(result) for result in results]
        for row in rows:
            for code in row["code"]:
                del code["ptx"]
        print(json.dumps({"triton": triton.__version__, "results": rows}))
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
        console.print(_table(results))
        cases: dict[str, list[str]] = {}
        for r in failed:
            cases.setdefault(f"{r.op}, {r.backend}, {r.target}: " + "\n".join(r.problems), []).append(r.case)
        for problem, names in cases.items():
            console.print(f"{problem}\n  in: {'; '.join(names)}")
        skipped = sum(bool(r.skipped) for r in results)
        console.print(f"{len(results) - skipped - len(failed)} cases are right, {len(failed)} wrong, {skipped} skipped")
    if all(r.skipped for r in results):
        print("mxspec: compile: nothing was compiled: every case is skipped", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
