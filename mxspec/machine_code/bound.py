"""What bounds a quantizer's speed: its bytes or its instructions, from the machine code and the GPU's data sheet.

A multiprocessor of Hopper or Blackwell issues at most 4 instructions a cycle, each for the 32 threads of a warp. So the
number of instructions of all warps gives a time, as the number of bytes does. The longer time is an estimate of the
bound. A run may be slower, because threads also wait for memory.

The count reads SASS, the code that the GPU runs. It takes each instruction of a kernel once, in both arms of a branch.
So it is too high where warps skip an arm. It is too low for a loop that writes memory, which a report marks. Kernels of
PyTorch inside a call are not counted. The clock is that of the data sheet's bf16 rate; a card may run some percent
faster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mxspec import devices
from mxspec.devices import Device
from mxspec.dispatch import kernel_module, reference
from mxspec.machine_code.fake_gpu import fake_gpu
from mxspec.machine_code.measure import dumped
from mxspec.machine_code.planner import has_no_code, promises_bytes
from mxspec.shapes import Shapes
from mxspec.spec import Case, meta

DEVICE = {"sm90": "NVIDIA H200", "sm100": "NVIDIA B200"}
SHAPES = Shapes(matrices=((32768, 7168),), experts=((8, 7168, 2048),), padding=((32768, 7168, 8),))
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\s+(?:[!~]?\w+, )?0x([0-9a-f]+)$")
SMALL = 0.05  # a kernel with a smaller share of the instructions does not change the bound


@dataclass(frozen=True)
class Bound:
    """The bound of one call: its instructions, its bytes, and their times on one GPU.

    Attributes:
        elements: the number of elements of the largest input or output.
        instructions: the instructions of all threads of all kernels, each counted once.
        loops: the kernels whose main loop writes memory. Its instructions are counted once and run more often.
        bytes_moved: the bytes of inputs and outputs.
    """

    op: str
    backend: str
    target: str
    case: str
    elements: int
    instructions: int
    loops: tuple[str, ...]
    bytes_moved: int

    @property
    def device(self) -> Device:
        return devices.DEVICES[DEVICE[self.target]]

    @property
    def an_element(self) -> float:
        """The instructions for an element."""
        return self.instructions / self.elements

    @property
    def issue_us(self) -> float:
        return self.instructions / (self.device.issue_gips * 1e3)

    @property
    def memory_us(self) -> float:
        """The time of the bytes at the data sheet's rate."""
        return self.bytes_moved / (self.device.memory_gbps * 1e3)

    @property
    def us(self) -> float:
        """The longer of the two times."""
        return max(self.issue_us, self.memory_us)

    @property
    def binds(self) -> str:
        return "memory" if self.memory_us >= self.issue_us else "instructions"


def sass_of(cubin: bytes) -> list[tuple[int, str]]:
    """The address and the text of each instruction, without the padding after the code."""
    found = [(int(address, 16), code) for address, code in _INSTRUCTION.findall(dumped(cubin, "--dump-sass"))]
    return [(at, code) for at, code in found if code not in ("NOP", f"BRA 0x{at:x}")]  # the last branch is to itself


def has_loop(sass: Sequence[tuple[int, str]]) -> bool:
    """Whether an instruction branches back, and to code that writes memory."""
    for at, code in sass:
        target = _BRANCH.search(code)
        if target and int(target[1], 16) < at:
            body = [text for place, text in sass if int(target[1], 16) <= place <= at]
            if any("STG" in text or "UBLKCP" in text or "UTMASTG" in text for text in body):
                return True
    return False


def cases_of(op: str) -> list[Case]:
    """One large call for each way of an op's options, of those that are worth timing."""
    with FakeTensorMode():
        return list(reference(op).spec.bench_cases(SHAPES))


def bounds(op: str, backend: str, target: str) -> Iterator[Bound]:
    """The bound of each large call of an op that the backend supports. A matmul has none: tensor cores bound it."""
    module = kernel_module(op, backend)
    if isinstance(module, str) or has_no_code(module) or not promises_bytes(op):
        return
    ref, supports = reference(op), getattr(module, "supports", None)
    for case in cases_of(op):
        with FakeTensorMode():
            args = case.args()
            if supports and supports(*args, **case.kwargs):
                continue
            outputs = ref.spec.outputs(args, ref(*args, **case.kwargs))
            moved = ref.spec.bytes_moved(args, outputs)
        with fake_gpu(target) as compiled:
            getattr(module, op)(*map(meta, args), **case.kwargs)
            launches = list(zip(compiled, compiled.grids, strict=True))
        counts, loops = [], []
        for kernel, grid in launches:
            sass = sass_of(kernel.asm["cubin"])
            counts.append(len(sass) * 32 * kernel.metadata.num_warps * math.prod(grid))
            loops.append(kernel.metadata.name if has_loop(sass) else "")
        instructions = sum(counts)
        loops = [name for name, count in zip(loops, counts, strict=True) if name and count > SMALL * instructions]
        largest = max(t.numel() for t in (*args, *outputs) if isinstance(t, Tensor))  # two e2m1 codes are one element
        yield Bound(op, backend, target, case.name, largest, instructions, tuple(dict.fromkeys(loops)), moved)


def table(found: Sequence[Bound]) -> Any:
    from rich.table import Table

    shown = Table(
        "op",
        "backend",
        "case",
        "GPU",
        title="Bounds, from the data sheet and the machine code. Compiled, not run.",
        caption="instructions: for an element of the largest tensor; +: a loop is counted once and runs more often",
    )
    for column in ("instructions", "us to issue them", "us to move the bytes", "bound by"):
        shown.add_column(column, justify="right")
    for b in found:
        shown.add_row(
            b.op, b.backend, b.case, DEVICE[b.target].removeprefix("NVIDIA "),
            f"{b.an_element:.1f}{'+' if b.loops else ''}", f"{b.issue_us:.0f}{'+' if b.loops else ''}",
            f"{b.memory_us:.0f}", b.binds + ("?" if b.loops and b.binds == "memory" else ""),
        )  # fmt: skip
    return shown
