"""Whether a rule is a fixed point: quantize, dequantize, quantize, for every mantissa that an amax can have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import E4M3FN, E8M0FNU, ElementFormat, element
from mxspec.reference.common.fp8_numerics import quantization_scale
from mxspec.reference.common.numerics import reciprocal_scale, saturating_cast, shared_exponent, widened
from mxspec.rules import _fp8

CHUNK = 1 << 20
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7}
# Codes, and the scale that reads them back, of blocks `(n, 2)`.
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RoundTrips:
    """What a second quantization changes: among `blocks` amaxes, how many scales, and how many largest values."""

    blocks: int
    scales: int
    values: int
    first: float | None  # the first amax whose scale moves


def fixed_points(module: ModuleType | None, op: str, dtype: torch.dtype, options: dict[str, Any]) -> RoundTrips:
    """`mxspec.rules.fixed_points` for the module of a peer, or for the contract, which is None."""
    if dtype not in MANTISSA_BITS:
        raise TypeError(f"fixed_points: dtype is {dtype}; needs torch.float32 or torch.bfloat16")
    fmt, quantize = _quantizer(module, op, options)
    scales = values = blocks = 0
    first: float | None = None
    for amax in _amaxes(dtype):
        codes, scale = quantize(torch.stack([amax, torch.zeros_like(amax)], -1))
        stored = _read(codes, scale, fmt, dtype)
        again, moved_to = quantize(stored)
        moved = (scale != moved_to).flatten()
        if first is None and moved.any():
            first = amax[moved][0].item()
        scales += int(moved.sum())
        values += int((_read(again, moved_to, fmt, dtype) != stored)[:, 0].sum())
        blocks += len(amax)
    return RoundTrips(blocks, scales, values, first)


def _amaxes(dtype: torch.dtype) -> Iterator[Tensor]:
    """Every number of the dtype from 1 up to 2, in chunks."""
    bits = MANTISSA_BITS[dtype]
    for start in range(0, 1 << bits, CHUNK):
        mantissas = torch.arange(start, min(start + CHUNK, 1 << bits), dtype=torch.int32)
        yield (0x3F800000 + (mantissas << (23 - bits))).view(torch.float32).to(dtype)


def _read(codes: Tensor, scale: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    return (widened(codes, fmt) * scale).to(dtype)


def _quantizer(module: ModuleType | None, op: str, options: dict[str, Any]) -> tuple[ElementFormat, Quantizer]:
    """The element format, and a rule of a peer on blocks of two elements."""
    options = dict(options)
    if op == "mx_quantize":
        fmt = element(options.pop("elem_dtype", E4M3FN.name))
        scaling = options.pop("scaling", "rceil")
        _none_left(op, options)
        rule = _contract_mx(scaling) if module is None else getattr(module, "_rule", None)
        return fmt, _mx_quantizer(_known(rule, module, op), fmt)
    if op not in ("fp8_quantize_1x128", "fp8_quantize_128x128"):
        raise ValueError(f"fixed_points: op is {op!r}; needs mx_quantize, fp8_quantize_1x128 or fp8_quantize_128x128")
    scale_format = options.pop("scale_format", "fp32")
    _none_left(op, options)
    factor = _known(_contract_factor if module is None else getattr(module, "_factor", None), module, op)
    scaled = getattr(module, "_scaled", _fp8.multiplied)
    function = getattr(module, op, None)
    eps = inspect.signature(function).parameters["eps"].default if function else 1e-12

    def quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
        by, stored = factor(blocks, (-1,), scale_format, eps)
        return saturating_cast(scaled(blocks, by), E4M3FN), stored

    return E4M3FN, quantize


def _mx_quantizer(rule: Callable[..., Any], fmt: ElementFormat) -> Quantizer:
    def quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
        codes, byte = rule(blocks, fmt)
        return codes, torch.exp2(byte.float() - E8M0FNU.bias)

    return quantize


def _contract_mx(scaling: str) -> Callable[[Tensor, ElementFormat], tuple[Tensor, Tensor]]:
    def rule(blocks: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
        blocks = blocks.float()
        byte = shared_exponent(blocks.abs().amax(-1, keepdim=True), fmt, scaling)
        return saturating_cast(blocks * reciprocal_scale(byte), fmt), byte

    return rule


def _contract_factor(blocks: Tensor, dims: tuple[int, ...], scale_format: str, eps: float) -> tuple[Tensor, Tensor]:
    s = quantization_scale(blocks.float().abs().amax(dims, keepdim=True), scale_format, eps)
    return s, s.reciprocal()


def _known(rule: Any, module: ModuleType | None, op: str) -> Callable[..., Any]:
    if rule is None:
        name = module.__name__.rpartition(".")[2] if module else "contract"
        raise NotImplementedError(f"fixed_points: rules.{name} has no block rule for {op}; needs another peer or op")
    return rule  # type: ignore[no-any-return]


def _none_left(op: str, options: dict[str, Any]) -> None:
    if options:
        raise TypeError(f"fixed_points: {op} has no option {', '.join(options)} that changes numbers")
