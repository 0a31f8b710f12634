"""Blocks whose results differ between MX rules."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, ElementFormat

# The fp32 bits of a block's largest magnitude. The comment beside a value says what it is, and what it tests.
EDGE_AMAX_BITS = (
    0x00000000,  # zero
    0x80000000,  # minus zero keeps its sign
    0x00000001,  # smallest subnormal
    0x00400000,  # 2^-127: byte 0 is 2^-127, its reciprocal 2^127
    0x00800000,  # 2^-126, smallest normal: elements 2.0, byte 0
    0x04600000,  # 448 * 2^-127: near here the byte of e4m3 rceil changes from 0 to 1
    0x04600001,
    0x04E00000,  # 448 * 2^-126
    0x3F800000,  # 1
    0x43E00000,  # 448, the largest e4m3fn
    0x43E00001,  # one ulp above: rceil goes up, floor saturates
    0x43E80000,  # 464, the tie between 448 and 480
    0x43F00000,  # 480: floor saturates
    0x43F80000,  # 496: `even` carries into the exponent
    0x447FFFFF,  # 2^10 less one ulp: floor(log2) is off by one
    0x48E00001,  # 448 * 2^10 and one ulp: ceil(log2(a / 448)) is off by one
    0x47600000,  # 57344, the largest e5m2
    0x47600001,
    0x47700000,  # 61440: torch's cast gives Inf for e5m2
    0x7F600000,  # 448 * 2^119
    0x7F7F0000,  # bfloat16 max: finite under every rule
    0x7F7FFFFF,  # fp32 max
    0x7F800000,  # Inf
    0xFF800000,  # -Inf
    0x7FC00000,  # NaN
    0xFFC00001,  # NaN with sign and payload
)
# The other elements of each block, as fractions of amax: ties of the e4m3 and e5m2 grids, subnormals, signs.
FRACTIONS = (1.0, -1.0, 0.53125, -0.59375, 0.5625, 0.6875, 2**-8, -(2**-9), 3 * 2**-10, 2**-17, 2**-24, -0.0, 0.3)


def every_exponent(fmt: ElementFormat = E4M3FN) -> Tensor:
    """`(255, 128)` fp32: one row per exponent field, with four blocks whose largest magnitudes differ in the mantissa.

    The mantissas are 1, the mantissa of the format's largest value, the next mantissa above it (from which rceil rounds
    up), and the largest mantissa. The largest values of e4m3fn and e5m2 have the same mantissa, 1.75.
    """
    largest = int((fmt.max / 2.0**fmt.emax - 1) * 2**23)
    mantissas = torch.tensor([0x000000, largest, largest + 1, 0x7FFFFF])
    bits = torch.arange(255).unsqueeze(1) << 23 | mantissas  # (255, 4)
    amax = bits.to(torch.int32).view(torch.float32).unsqueeze(-1)
    fractions = torch.cat([torch.ones(1), torch.tensor(FRACTIONS), torch.zeros(31 - len(FRACTIONS))])
    return (amax * fractions).flatten(1)


def edge_blocks() -> Tensor:
    """`(26, 64)` fp32: each row holds a block with its largest magnitude first and the same block reversed."""
    bits = torch.tensor(EDGE_AMAX_BITS, dtype=torch.int64).to(torch.int32)
    amax = bits.view(torch.float32).unsqueeze(1)
    rest = amax * torch.tensor(FRACTIONS)
    rest = torch.where(amax.isfinite(), rest, 1.0)  # 0 * Inf would put a NaN into every block that has an Inf
    block = torch.cat([amax, rest, torch.zeros(len(bits), 31 - len(FRACTIONS))], dim=1)
    return torch.cat([block, block.flip(1)], dim=1)


def above_powers_of_two() -> Tensor:
    """`(16, 32)` fp32: blocks whose largest magnitude is the next number above a power of two. There ceil rounds up."""
    amax = 2.0 ** torch.arange(-120, 121, 16) * (1 + 2.0**-23)
    return amax[:, None] * torch.cat([torch.tensor([1.0, *FRACTIONS[2:]]), torch.zeros(33 - len(FRACTIONS))])


def subnormals(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Numbers of a dtype that are 0, -0 or subnormal, up to the smallest normal one."""
    numbers = torch.arange(rows * columns).remainder(129).sub(64).view(rows, columns).double()
    return torch.where(numbers == 0, -0.0, numbers * torch.finfo(dtype).tiny / 64).to(dtype)


def rare_numbers(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """`subnormals`, of which three are replaced: by Inf, -Inf and NaN."""
    x = subnormals(dtype, rows, columns)
    x[0, 5], x[rows // 3, columns // 2], x[rows - 2, columns - 1] = torch.inf, -torch.inf, torch.nan
    return x


def subnormal_amaxes() -> Tensor:
    """`(n, 32)` fp32: blocks of subnormal numbers, near the amaxes at which a byte of int8 changes.

    `127/64 * 2^-127` has the bits 0x7F0000. int8 is the only format for which such an amax may have a byte above 0.
    """
    ends = torch.tensor([0x000001, 0x200000, 0x3F0000, 0x3F8000, 0x400000, 0x7E0000, 0x7F0000, 0x7F8000, 0x800000])
    bits = (ends.unsqueeze(1) + torch.arange(-2, 3)).flatten().clamp(min=1)
    amax = bits.to(torch.int32).view(torch.float32).unsqueeze(1)
    return torch.cat([amax, amax * torch.tensor(FRACTIONS), torch.zeros(len(bits), 31 - len(FRACTIONS))], dim=1)


def codes_and_ties(fmt: ElementFormat) -> Tensor:
    """`(rows, 32)` fp32: each block begins with the format's largest value, so its scale is 1.

    The other elements are every value of the format that is not negative, the midpoints between neighbouring values and
    the two fp32 neighbours of each midpoint. All of these are sorted, and their negatives follow.
    """
    grid = torch.tensor([fmt.value(code) for code in range(fmt.largest_code + 1)])
    ties = (grid[1:] + grid[:-1]) / 2
    beside = [ties.nextafter(torch.tensor(end)) for end in (-float("inf"), float("inf"))]
    values = torch.cat([grid, ties, *beside]).sort().values
    values = torch.cat([values, -values])
    rest = torch.cat([values, torch.zeros(-len(values) % 31)]).unflatten(0, (-1, 31))
    return torch.cat([torch.full((len(rest), 1), fmt.max), rest], dim=1)
