"""NVFP4 weights: the scale of the tensor as a multiplier or a divisor, quantizing by strips, and MXFP4 as NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mxspec import dispatch, rules
from mxspec.checkpoint.lossless import NotLossless, first_failed
from mxspec.checkpoint.mxfp4 import in_bytes
from mxspec.formats import E2M1, E4M3FN, E8M0FNU, MX_BLOCK_SIZE, NVFP4_BLOCK_SIZE, NVFP4_LARGEST

OP = "nvfp4_quantize"
ROWS = 128  # rows that are converted at once. A bound on the memory of temporary tensors
LOWEST, HIGHEST = -9, 8  # the exponents of the smallest and the largest power of two of e4m3fn
EXPONENTS = (-126, 126)  # of a tensor scale: it and its reciprocal are normal numbers of fp32


def divisor_of(multiplier: Tensor) -> Tensor | None:
    """The fp32 number whose reciprocal, rounded to fp32, is the multiplier; None if there is no such number.

    If there is one, the rounded reciprocal is one: no other fp32 number is closer to the exact reciprocal.
    """
    near = multiplier.reciprocal()
    return near if near.isfinite() and near.reciprocal().equal(multiplier) else None


def changed_direction(scale: Tensor, to_divisor: bool) -> tuple[Tensor, bool]:
    """The reciprocal of a scale, and whether engines multiply by the same number before and after.

    Engines multiply. If the file holds a divisor, they multiply by its reciprocal, rounded to fp32.
    """
    if not to_divisor:
        return scale.reciprocal(), True
    exact = divisor_of(scale)
    return (scale.reciprocal(), False) if exact is None else (exact, True)


def quantizer(rule: Callable[..., Any], name: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The function of a rule that quantizes `(R, K)` rows of a matrix with the largest magnitude `amax`.

    It returns `(codes, scale, multiplier, divisor)`. The rule sees one row more, which holds amax. So it computes the
    tensor scale as for the whole matrix, in the dtype of x. If amax is 0, the tensor scale is 1 for every rule.
    """
    contract = dispatch.reference(OP)

    def quantize(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        amax = x.abs().amax() if amax is None else amax
        if not amax:
            codes, scale, _ = contract(x)
            one = torch.ones((), dtype=torch.float32)
            return codes.view(torch.uint8), scale, one, one
        row = torch.zeros_like(x[:1])
        row[:, 0] = amax
        codes, scale, multiplier = rule(torch.cat([x, row]))
        if name == "compressed_tensors":
            divisor = rules.compressed_tensors.global_scale(amax)
        else:
            divisor = NVFP4_LARGEST / amax.float()
        return codes.view(torch.uint8)[:-1], scale[:-1], multiplier, divisor

    return quantize


def mxfp4_to_nvfp4(
    codes: Tensor, scale: Tensor, *, exponent: int | None = None
) -> tuple[Tensor, Tensor, Tensor] | NotLossless:
    """MXFP4 as NVFP4, if every value can be kept.

    A block of 32 becomes two blocks of 16. The tensor scale is a power of two, `2^t`. A block scale is then a power of
    two of e4m3fn, subnormal numbers included: from 2^-9 to 2^8. So the exponents of a tensor may differ by 17. They may
    differ by more if the codes that occur allow it: 6 * 2^-10 is 3 * 2^-9. Blocks of zeros have any exponent. The
    function chooses t, converts, and compares every value.

    Args:
        codes: `(N, K/2)` uint8 or float4_e2m1fn_x2, two e2m1 codes in a byte, the even K in the low nibble. On the CPU.
            Or `(E, N, K/2)`, the weights of experts.
        scale: `(N, K/32)`, or `(E, N, K/32)`, uint8 or float8_e8m0fnu. K is a multiple of 32.
        exponent: t, from -126 to 126, for tensors that share a tensor scale. None chooses it from `exponents`, for each
            expert.

    Returns:
        `(qdata, scale, tensor_scale)`, or a NotLossless that counts the blocks of MXFP4.

        - qdata: `(N, K/2)` or `(E, N, K/2)`, in the dtype of codes.
        - scale: `(N, K/16)` or `(E, N, K/16)`, float8_e4m3fn powers of two.
        - tensor_scale: float32, `()` or `(E,)`: `2^t`, a multiplier. Its reciprocal is exact too.

    Special values: a block with the byte 255 (NaN) is not lossless. Minus zero stays minus zero.

    Raises:
        TypeError: codes or scale is no tensor, or has another dtype; exponent is no integer.
        ValueError: the shapes do not fit, a tensor is not on the CPU, or exponent is out of range.

    Example:
        >>> codes, scale = torch.full((1, 16), 0x71, dtype=torch.uint8), torch.tensor([[120]], dtype=torch.uint8)
        >>> qdata, block_scale, tensor_scale = mxfp4_to_nvfp4(codes, scale)
        >>> qdata.equal(codes), block_scale.tolist(), tensor_scale.item()  # 256 * 2^-15 is 2^(120 - 127)
        (True, [[256.0, 256.0]], 3.0517578125e-05)

    Source: OCP MX v1.0, section 5.3.3 (e2m1); OFP8 v1.0, table 1 (e4m3).
    """
    if isinstance(codes, Tensor) and codes.ndim == 3:
        return _of_experts(codes, scale, exponent)
    packed, scale = in_bytes("mxfp4_to_nvfp4", codes, scale)
    if exponent is not None and (not isinstance(exponent, int) or isinstance(exponent, bool)):
        raise TypeError(f"mxfp4_to_nvfp4: exponent is {exponent!r}; needs an integer or None")
    if exponent is not None and not EXPONENTS[0] <= exponent <= EXPONENTS[1]:
        raise ValueError(f"mxfp4_to_nvfp4: exponent is {exponent}; needs a number from -126 to 126")
    t = chosen(exponents(packed, scale)) if exponent is None else exponent
    out, failed = torch.empty_like(packed), torch.zeros(scale.shape, dtype=torch.bool)
    scales = torch.empty(scale.shape[0], scale.shape[1] * MX_BLOCK_SIZE // NVFP4_BLOCK_SIZE, dtype=E4M3FN.dtype)
    for rows in _strips(packed):
        out[rows], scales[rows], failed[rows] = _strip(packed[rows], scale[rows], t)
    if bool(failed.any()):
        return NotLossless(failed.numel(), int(failed.sum()), first_failed(failed), _why(packed, scale))
    return out.view(codes.dtype), scales, torch.exp2(torch.tensor(float(t)))


def _of_experts(codes: Tensor, scale: Tensor, exponent: int | None) -> tuple[Tensor, Tensor, Tensor] | NotLossless:
    """`mxfp4_to_nvfp4` of a stack of matrices."""
    if not isinstance(scale, Tensor):
        raise TypeError(f"mxfp4_to_nvfp4: scale is {type(scale).__name__}; needs a tensor of uint8 or {E8M0FNU.dtype}")
    (E, N, stored), of_block = codes.shape, MX_BLOCK_SIZE // 2
    if E == 0 or stored % of_block or tuple(scale.shape) != (E, N, stored // of_block):
        raise ValueError(
            f"mxfp4_to_nvfp4: codes are {(E, N, stored)} and scale is {tuple(scale.shape)}; needs (E, N, K/2) and "
            "(E, N, K/32), with at least one expert and K a multiple of 32"
        )
    made = [mxfp4_to_nvfp4(q, s, exponent=exponent) for q, s in zip(codes, scale, strict=True)]
    failed = [(e, one) for e, one in enumerate(made) if isinstance(one, NotLossless)]
    if failed:
        e, first = failed[0]
        return NotLossless(scale.numel(), sum(one.failed for _, one in failed), (e, *first.first), first.why)
    q, s, t = zip(*(one for one in made if not isinstance(one, NotLossless)), strict=True)
    return torch.stack([x.view(torch.uint8) for x in q]).view(codes.dtype), torch.stack(s), torch.stack(t)


def exponents(codes: Tensor, scale: Tensor) -> tuple[int, int, int]:
    """The least and the greatest t with which `2^t` keeps every value, and the t that leaves every code as it is.

    If the least is above the greatest, no t keeps every value. Tensors that share a tensor scale need the largest
    least, the smallest greatest and the largest third number. Blocks with the byte 255 are not counted.
    """
    codes, scale = in_bytes("mxfp4_to_nvfp4", codes, scale)
    least, greatest, usual = -999, 999, -999
    for rows in _strips(codes):
        e, lo, hi, counts = _allowed(codes[rows], scale[rows])
        if bool(counts.any()):
            least = max(least, int((e - hi)[counts].amax()) - HIGHEST)
            greatest = min(greatest, int((e - lo)[counts].amin()) - LOWEST)
            usual = max(usual, int(e[counts].amax()) - HIGHEST)
    return least, greatest, 0 if usual == -999 else usual


def chosen(found: tuple[int, int, int]) -> int:
    """The t for the numbers of `exponents`. If no t keeps every value, the largest values are kept."""
    least, greatest, usual = found
    return min(max(min(usual, greatest), least, EXPONENTS[0]), EXPONENTS[1])


def _strips(codes: Tensor) -> Iterator[slice]:
    for start in range(0, codes.shape[0], ROWS):
        yield slice(start, start + ROWS)


# For each code: the number of times that its value can be doubled or halved, and stay a value of e2m1. A zero: always.
ALWAYS = 999
_DOUBLED = (ALWAYS, 3, 2, 2, 1, 1, 0, 0)
_HALVED = (ALWAYS, 0, 1, 0, 2, 1, 3, 2)
_VALUES = [E2M1.value(code) for code in range(16)]


def _of_sets(of_code: tuple[int, ...]) -> Tensor:
    """For each set of magnitudes, a bit for each, the smallest of their numbers."""
    return torch.tensor([min([ALWAYS, *(n for m, n in enumerate(of_code) if s >> m & 1)]) for s in range(256)])


def _shifted() -> Tensor:
    """For d from -3 to 3 and each byte: the byte of the values times 2^d. Values that e2m1 lacks become zeros."""
    magnitudes = _VALUES[:8]
    code = [[magnitudes.index(m * 2.0**d) if m * 2.0**d in magnitudes else 0 for m in magnitudes] for d in range(-3, 4)]
    both = [[of[b & 7] | b & 0x88 | of[b >> 4 & 7] << 4 for b in range(256)] for of in code]
    return torch.tensor(both, dtype=torch.uint8)


_DOUBLED_OF, _HALVED_OF, _SHIFTED = _of_sets(_DOUBLED), _of_sets(_HALVED), _shifted()
_PAIRS = torch.tensor([[_VALUES[b & 15], _VALUES[b >> 4]] for b in range(256)])


def _allowed(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each block of 16: its exponent, the least and the greatest shift of its codes, and whether it counts."""
    one = torch.ones_like(codes)
    occurring = (one << (codes & 7) | one << (codes >> 4 & 7)).unflatten(1, (-1, NVFP4_BLOCK_SIZE // 2))
    while occurring.shape[-1] > 1:  # (rows, K/16, 8), halved to one byte for a block
        half = occurring.shape[-1] // 2
        occurring = occurring[..., :half] | occurring[..., half:]
    sets = occurring.squeeze(-1).long()
    hi, lo = _DOUBLED_OF[sets], -_HALVED_OF[sets]
    bytes_ = scale.long().repeat_interleave(MX_BLOCK_SIZE // NVFP4_BLOCK_SIZE, 1)
    return bytes_ - E8M0FNU.bias, lo, hi, (hi != ALWAYS) & (bytes_ != E8M0FNU.nan_code)


def _strip(codes: Tensor, scale: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows: the codes, the scales, and the blocks of MXFP4 that do not keep their values."""
    e, _, hi, _ = _allowed(codes, scale)
    power = (e - t).clamp(LOWEST, HIGHEST)
    shift = (e - t - power).clamp(-3, 3).masked_fill(hi == ALWAYS, 0)  # of the codes; a larger shift is no value's
    relative, stored = torch.exp2((e - t).clamp(-60, 60).float()), torch.exp2(power.float()).to(E4M3FN.dtype)
    if bool(shift.any()):
        per_block = codes.long().unflatten(1, (-1, NVFP4_BLOCK_SIZE // 2))
        new = _SHIFTED.flatten()[(shift + 3).unsqueeze(-1) * 256 + per_block]
        scaled = (stored.float()[..., None, None], relative[..., None, None])
        same = (_PAIRS[new.long()] * scaled[0] == _PAIRS[per_block] * scaled[1]).flatten(-2).all(-1)
    else:  # every code stays, so that the scales say whether the values do
        new, same = codes, (stored.float() == relative) | (hi == ALWAYS)
    bad = ~same.unflatten(1, (-1, MX_BLOCK_SIZE // NVFP4_BLOCK_SIZE)).all(-1)
    return new.flatten(1), stored, bad | (scale == E8M0FNU.nan_code)


def _why(codes: Tensor, scale: Tensor) -> str:
    if bool((scale == E8M0FNU.nan_code).any()):
        return "a byte 255 (NaN)"
    seen = torch.cat([e[counts] for e, _, _, counts in (_allowed(codes[r], scale[r]) for r in _strips(codes))])
    least, most = int(seen.amin()), int(seen.amax())
    return (
        f"the exponents go from {least} to {most}, a spread of {most - least}; with one tensor scale, e4m3fn holds 17, "
        "or more if the codes allow it"
    )
