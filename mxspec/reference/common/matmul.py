"""Code that the MX matmuls share: argument checks, and the values of codes with plain or blocked scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.formats import BY_DTYPE, E2M1, FP8_DTYPES, MX_BLOCK_SIZE, element
from mxspec.reference.common import checks
from mxspec.reference.common.groups import bounds, padded_rows, round_up
from mxspec.reference.common.numerics import widened
from mxspec.reference.from_blocked import from_blocked
from mxspec.reference.mx_quantize import SCALE_LAYOUTS
from mxspec.reference.to_blocked_k_groups import tile_places
from mxspec.reference.unpad_token_groups import unpad_token_groups

# The thresholds for kernels. Dequantized operands are exact in bfloat16 unless their exponents are extreme, so a kernel
# loses precision only in its sums. Emulations of fp32 sums, and of sums with the 14 bits that Hopper's fp8 tensor cores
# keep, pass both thresholds. An output with one wrong scale among 4096 fails them (see
# benchmarks/results/decisions.md).
MIN_SQNR_DB = {torch.float32: 70.0, torch.bfloat16: 55.0}
# Of the tokens and of the weights.
B_DTYPES = (*FP8_DTYPES, torch.float4_e2m1fn_x2)
A_DTYPES = (*B_DTYPES, torch.bfloat16)


def check_dtypes(op: str, *operands: tuple[str, Tensor, Tensor, int]) -> None:
    """Check dtypes, ranks and devices. Each operand is given as its name, codes, scale, and the rank of its codes."""
    first = operands[0][:2]
    for name, codes, scale, rank in operands:
        checks.tensor_dtype(op, name, codes, FP8_DTYPES)
        checks.tensor_dtype(op, f"{name}_scale", scale, (torch.float8_e8m0fnu,))
        checks.rank(op, name, codes, (rank,))
        checks.same_device(op, first, (name, codes))
        checks.same_device(op, first, (f"{name}_scale", scale))


def check_operands(
    op: str, a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, ranks: tuple[int, int]
) -> tuple[int, int, str]:
    """Check dtypes, ranks and devices of tokens and weights, and K.

    Returns K, the length that a row of b needs, and words about a for the error of another length. e2m1 codes and
    bfloat16 meet e2m1 codes only. bfloat16 has no scales.
    """
    checks.tensor_dtype(op, "b", b, B_DTYPES)
    checks.dense(op, "a", a)
    packed = b.dtype == E2M1.dtype
    if not packed and a.dtype in (E2M1.dtype, torch.bfloat16):
        raise TypeError(
            f"{op}: a has dtype {a.dtype} and b has dtype {b.dtype}; "
            f"needs {' or '.join(map(str, FP8_DTYPES))} for a, or {E2M1.dtype} for b"
        )
    checks.tensor_dtype(op, "a", a, A_DTYPES if packed else FP8_DTYPES)
    for (name, operand, scale), rank in zip((("a", a, a_scale), ("b", b, b_scale)), ranks, strict=True):
        checks.rank(op, name, operand, (rank,))
        checks.same_device(op, ("a", a), (name, operand))
        if operand.dtype == torch.bfloat16:
            if scale is not None:
                raise TypeError(f"{op}: {name} is bfloat16 and {name}_scale is a tensor; needs None for {name}_scale")
            continue
        if scale is None:
            raise TypeError(f"{op}: {name} has dtype {operand.dtype} and {name}_scale is None; needs its scales")
        checks.tensor_dtype(op, f"{name}_scale", scale, (torch.float8_e8m0fnu,))
        checks.same_device(op, ("a", a), (f"{name}_scale", scale))
    K = elements_of_row(a)
    checks.multiple(op, "K", K, MX_BLOCK_SIZE, quantized=True)
    of_a = f"for a {tuple(a.shape)}" + (f" of {a.dtype}" if packed else "")
    return K, K // element(b.dtype).per_byte, of_a


def elements_of_row(x: Tensor) -> int:
    """The number of elements of a row: an e2m1 byte holds two."""
    fmt = BY_DTYPE.get(x.dtype)
    return x.shape[-1] * (fmt.per_byte if fmt else 1)


def check_unit_stride(op: str, name: str, codes: Tensor, dim: int, what: str) -> None:
    if codes.shape[dim] > 1 and codes.stride(dim) != 1:
        raise ValueError(f"{op}: {name} has strides {codes.stride()}; needs {what}, that is stride({dim}) = 1")


def check_layout(op: str, scale_layout: str) -> None:
    checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)


def check_scale(
    op: str, name: str, scale: Tensor, plain: tuple[int, ...], blocked: tuple[int, ...], scale_layout: str, of: Tensor
) -> None:
    """Check a scale's shape. A plain scale may have any strides; a blocked scale must be contiguous."""
    needed, other = (plain, blocked) if scale_layout == "plain" else (blocked, plain)
    because = f"({scale_layout}) for codes {tuple(of.shape)}"
    if tuple(scale.shape) == other:
        because += f"; this is the shape of scale_layout={'blocked' if scale_layout == 'plain' else 'plain'!r}"
    checks.shape(op, name, scale, needed, because)
    if scale_layout == "blocked" and not scale.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {scale.stride()}; needs contiguous blocked scales")


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return `code * 2^(byte - 127)`, exact in fp64; blocks of 32 lie along the last dimension."""
    elements = widened(codes, element(codes.dtype)).double()  # two for each byte of e2m1
    blocks = elements.unflatten(-1, (scale.shape[-1], MX_BLOCK_SIZE))  # (..., K/32, 32)
    return (blocks * scale.double().unsqueeze(-1)).flatten(-2)


def from_blocked_m_groups(blocked: Tensor, offs: Tensor, M: int, C: int) -> Tensor:
    """The inverse of `to_blocked_m_groups`. Returns `(M, C)`; rows that belong to no group have the byte 0."""
    rows = round_up(blocked.shape[0], 128)
    tiles = pad(blocked.view(torch.uint8), (0, 0, 0, rows - blocked.shape[0]))
    start, _ = bounds(offs, 128)
    return unpad_token_groups(from_blocked(tiles.flatten(), rows, C), offs, start, M).view(blocked.dtype)


def from_blocked_k_groups(blocked: Tensor, offs: Tensor, R: int, C: int) -> Tensor:
    """The inverse of `to_blocked_k_groups`. Returns `(R, C)`; columns that belong to no group have the byte 0."""
    row_tiles, cols = -(-R // 128), padded_rows(C, offs.shape[0], 4)
    flat = blocked.view(torch.uint8).flatten()
    tiles = pad(flat, (0, 128 * row_tiles * cols - flat.shape[0])).view(-1, 512)
    start, end = bounds(offs, 4)
    in_rows = tiles[tile_places(end, row_tiles, cols // 4)]
    padded = from_blocked(in_rows.flatten(), R, cols)  # (R, columns of the padded groups)
    return unpad_token_groups(padded.mT, offs, start, C).mT.view(blocked.dtype)
