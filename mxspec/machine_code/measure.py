"""The result of compiling one kernel: registers, memory, instructions."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel.

    `local_bytes` counts, for each thread, spilled registers and arrays that found no register.
    """

    kernel: str
    target: str
    registers: int
    local_bytes: int
    shared_bytes: int
    load_bytes: int  # the widest access to global memory by one thread
    store_bytes: int
    has_sum_of_product: bool  # outside of matrix instructions
    loses_inf: bool  # converts e5m2 to bfloat16 as Triton does, by a product that makes Inf and NaN finite
    dropped_matmuls: int  # Hopper's: how many of the PTX are not in the machine code
    lost_sums: int  # Hopper's: how many instructions compute with 0, where the PTX computes with the sums of matmuls
    instructions: tuple[str, ...]  # the instructions that convert to narrow floats, multiply matrices or copy tiles
    ptx: str = field(repr=False)


# _PRODUCT and _SUM are for LLVM's code, _INSTRUCTION is for PTX. LLVM writes a negation as `-0.0 - x`, which is no sum.
_PRODUCT = re.compile(r"(%[\w.]+) = fmul ")
_SUM = re.compile(r"= f(?:add|sub) [a-z ]*?(?:float|<\d+ x float>) (?!-?0\.0+e\+00,)(\S+), (\S+)")
_INSTRUCTION = re.compile(r"\b(?:cvt\.r\w+\.satfinite|wgmma\.mma|tcgen05|mma\.sync|cp\.async\.bulk)[.\w:]*")


def _widest(access: str, ptx: str) -> int:
    """The largest number of bytes that one `ld.global`, `st.global` or `cp.async` moves."""
    plain = re.findall(rf"\b{access}\.global(?:\.(?!v\d)[\w:]+)*?(?:\.v(\d))?\.[bsuf](\d+)\s", ptx)
    sizes = [int(lanes or 1) * int(bits) // 8 for lanes, bits in plain]
    if access == "ld":
        sizes += [int(size, 16) for size in re.findall(r"\bcp\.async\.c[ag]\..*?\], 0x(\w+)", ptx)]
    return max(sizes, default=0)


def _has_sum_of_product(llir: str) -> bool:
    """Whether a sum has a product as a term, so that a compiler that fuses the two would round once and not twice."""
    for function in llir.split("\ndefine "):
        products = set(_PRODUCT.findall(function))
        if any(products & set(terms) for terms in _SUM.findall(function)):
            return True
    return False


def _dropped_matmuls(ptx: str, cubin: bytes) -> int:
    """How many `wgmma` of the PTX the assembler left out.

    `ptxas` has left out matmuls whose sums a kernel selected where earlier sums were not finite. In the machine code, a
    matmul without operands stands for the matmuls that are missing.
    """
    asked = len(re.findall(r"\bwgmma\.mma_async", ptx))
    return max(asked - matmuls(cubin), 0) if asked else 0


# Hopper's instructions HGMMA (bfloat16, float16, tf32) and QGMMA (FP8). The lowest 9 bits are the opcode. Bits 16 to
# 23 are the number of the first register that the matmul writes. RZ is register 255.
_GMMA, _RZ = (0x1F0, 0x1F3), 0xFF
# VIMNMX, VIMNMX3, FMNMX, FMUL, FADD and FFMA of registers, with the 3 bits that say so. Bits 24 to 31 and 32 to 39 are
# the numbers of the first two operands.
_ARITHMETIC = (0x248, 0x20F, 0x209, 0x220, 0x221, 0x223)


def _lost_sums(ptx: str, cubin: bytes) -> int:
    """How many instructions of a kernel with matmuls compute with nothing but 0.

    The assembler computes what is constant. So such an instruction is one for which it learned too late that its
    operands are 0. `ptxas` of CUDA 12.8 and 13.3 took sums that begin with 0 for 0, also after the matmuls.
    """
    if "wgmma.mma_async" not in ptx:
        return 0
    words = _instructions(cubin)
    zeros = (words >> 24 & 0xFF == _RZ) & (words >> 32 & 0xFF == _RZ)
    return int((np.isin(words & 0xFFF, _ARITHMETIC) & zeros).sum())


def matmuls(cubin: bytes) -> int:
    """The number of Hopper's matrix instructions with operands in a cubin."""
    words = _instructions(cubin)
    return int((np.isin(words & 0x1FF, _GMMA) & (words >> 16 & 0xFF != _RZ)).sum())


def _instructions(cubin: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The lower 8 bytes of each instruction of a cubin.

    The instructions are read as they are. `nvdisasm` takes 0.3 s for a cubin, and there are hundreds of cubins.
    """
    # The header and the sections of an ELF file of 64 bits, and an instruction, 16 bytes.
    (table,), (size, count, _) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    found = [np.empty(0, "<u8")]
    for header in range(table, table + size * count, size):
        kind, flags, _, begin, length = struct.unpack_from("<I4Q", cubin, header + 4)
        if kind == 1 and flags & 4:  # a section with contents that are executable
            found.append(np.frombuffer(cubin, "<u8", length // 8, begin)[::2])
    return np.concatenate(found)


_measured: dict[str, MachineCode] = {}


def dumped(cubin: bytes, option: str) -> str:
    """What `cuobjdump`, which comes with Triton, prints of a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure(kernel: Any, target: str) -> MachineCode:
    if kernel.hash not in _measured:
        usage = dumped(kernel.asm["cubin"], "--dump-resource-usage")
        most = {what: max(map(int, re.findall(rf"\b{what}:(\d+)", usage))) for what in ("REG", "STACK", "LOCAL")}
        ptx = kernel.asm["ptx"]
        _measured[kernel.hash] = MachineCode(
            kernel.metadata.name, target, most["REG"], most["STACK"] + most["LOCAL"], kernel.metadata.shared,
            _widest("ld", ptx), _widest("st", ptx), _has_sum_of_product(kernel.asm["llir"]),
            "mov.u32 e112, 0x77807780" in ptx, _dropped_matmuls(ptx, kernel.asm["cubin"]),
            _lost_sums(ptx, kernel.asm["cubin"]),
            tuple(sorted(set(_INSTRUCTION.findall(ptx)))), ptx,
        )  # fmt: skip
    return _measured[kernel.hash]
