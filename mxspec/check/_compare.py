"""Compares outputs with the reference's: first the form, then the bytes or, for a matmul, the SQNR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import BY_DTYPE, INT_OF_BYTES, MX_BLOCK_SIZE, same_bits
from mxspec.spec import MinSqnr, Reference, answer_of


def _form_problem(i: int, got: Tensor, expected: Tensor) -> str | None:
    for attribute in ("shape", "dtype", "device"):
        if getattr(got, attribute) != getattr(expected, attribute):
            return f"output {i}: {attribute} {getattr(got, attribute)}; needs {getattr(expected, attribute)}"
    # A stride has a meaning only if its dimension has more than one element and the tensor is not empty.
    strides = [
        [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]
        for t in (got, expected)
    ]
    return None if strides[0] == strides[1] else f"output {i}: strides {got.stride()}; needs {expected.stride()}"


def form_difference(got: tuple[Any, ...], expected: tuple[Tensor, ...]) -> str | None:
    """How the outputs differ from the reference's in number, shape, dtype, device or strides. None if they do not."""
    if len(got) != len(expected):
        return f"{len(got)} outputs; needs {len(expected)}"
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        problem = _form_problem(i, g, e) if isinstance(g, Tensor) else f"output {i}: {type(g).__name__}; needs a tensor"
        if problem:
            return problem
    return None


def difference(
    got: tuple[Any, ...],
    expected: tuple[Tensor, ...],
    min_sqnr_db: MinSqnr = math.inf,
    magnitudes: tuple[Tensor, ...] | None = None,
    inf_is_free: bool = False,
) -> str | None:
    """How the outputs differ from the reference's. None if they do not.

    With an infinite bound, bytes are compared, and all NaN codes count as equal. With a finite bound, the SQNR must
    reach it.

    min_sqnr_db: the bound, or a bound for each dtype.
    magnitudes: for each output, the sums of the magnitudes of its products. They bound the error of each element.
    inf_is_free: whether an output that depends on an Inf of an operand may be Inf of either sign or NaN.
    """
    got = tuple(t.resolve_neg() if isinstance(t, Tensor) else t for t in got)
    if problem := form_difference(got, expected):
        return problem
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        bound = min_sqnr_db[e.dtype] if isinstance(min_sqnr_db, Mapping) else min_sqnr_db
        if math.isinf(bound):
            problem = _byte_problem(i, g, e)
        else:
            problem = _sum_problem(i, g, e, bound, magnitudes[i] if magnitudes else None, inf_is_free)
        if problem:
            return problem
    return None


def minus_zero_problem(
    got: Tensor, before: Tensor, reference: Reference[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """What is wrong with the zeros of an op in place that had nothing to add. There a -0 must stay -0.

    A kernel that adds an empty sum makes `-0 + 0 = +0`, which is wrong. If there was something to add, the sign of a
    zero is free: even if every product is -0, a sum that begins at +0 is +0. An op that is judged byte for byte adds
    nothing, and the comparison of its bytes has covered the signs of its zeros.
    """
    if reference.spec.min_sqnr_db == math.inf:
        return None
    wrong = (before == 0) & before.signbit() & (got == 0) & ~got.signbit()
    if not wrong.any():
        return None
    # With NaN as every scale, each sum of at least one product is NaN. The other elements had nothing to add.
    nans = (torch.full_like(a, math.nan) if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args[1:])
    reference(summed := before.clone(), *nans, **kwargs)
    wrong &= ~summed.isnan()
    if not wrong.any():
        return None
    return f"output 0: {int(wrong.sum())} of {wrong.numel()} elements are +0, first at {list(_first(wrong))}; needs -0"


def _byte_problem(i: int, got: Tensor, expected: Tensor) -> str | None:
    if not expected.ndim:
        got, expected = got[None], expected[None]
    wrong = ~same_bits(got, expected)
    if not wrong.any():
        return None
    bits, index = INT_OF_BYTES[expected.element_size()], _first(wrong)
    # Show the block: the aligned run of 32 elements that holds the index, along the dimension of stride 1.
    fmt = BY_DTYPE.get(expected.dtype)
    size = fmt.stored(MX_BLOCK_SIZE) if fmt else MX_BLOCK_SIZE
    along = next((d for d, stride in enumerate(expected.stride()) if stride == 1), expected.ndim - 1)
    start = index[along] // size * size
    block: tuple[Any, ...] = (*index[:along], slice(start, start + size), *index[along + 1 :])
    shown = ", ".join(map(str, (*index[:along], f"{start}:{start + size}", *index[along + 1 :])))
    one, run = ([_hex(t.view(bits)[where]) for t in (got, expected)] for where in (index, block))
    return (
        f"output {i}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {list(index)}: "
        f"got {one[0]}, expected {one[1]}\n  block [{shown}]\n  got      {run[0]}\n  expected {run[1]}"
    )


def _first(found: Tensor) -> tuple[int, ...]:
    """The index of the first element that is true."""
    first = int(found.reshape(-1).to(torch.uint8).argmax())
    return tuple(int(n) for n in torch.unravel_index(torch.tensor(first), found.shape))


def _hex(bits: Tensor) -> str:
    digits = 2 * bits.element_size()
    return " ".join(f"{value & (16**digits - 1):0{digits}x}" for value in bits.reshape(-1).tolist())


def sqnr_db(got: Tensor, expected: Tensor) -> float:
    """Signal-to-quantization-noise ratio in float64: `10 log10(sum e^2 / sum (g - e)^2)`. `inf` if they are equal."""
    g, e = got.double(), expected.double()
    noise, signal = float((g - e).square().sum()), float(e.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


# The allowed error of an element of a matmul, as a share of the sum of its products' magnitudes. Tensor cores that keep
# 14 bits of a sum lose at most a share of 2^-9, and rounding to bfloat16 loses another 2^-9.
_OF_MAGNITUDES = 2.0**-7
_PAST_FP32 = 2.0**127  # from this sum of magnitudes on, some order of summation may leave fp32's range


def _sum_problem(
    i: int, got: Tensor, expected: Tensor, min_sqnr_db: float, magnitude: Tensor | None, inf_is_free: bool
) -> str | None:
    """Compare a matmul's output: NaN and Inf in the same places, each other element close, and the SQNR high enough."""
    zero = torch.zeros((), dtype=got.dtype, device=got.device)
    near = torch.ones_like(got, dtype=torch.bool)
    free = torch.zeros_like(near)  # the elements for which a non-finite result is right too
    if magnitude is not None:
        near = ((got.double() - expected.double()).abs() <= _OF_MAGNITUDES * magnitude.double()) | (got == expected)
        past = (magnitude >= _PAST_FP32) & ~magnitude.isnan()
        free = past & expected.isfinite() & ~got.isfinite()
        if inf_is_free:
            free |= ~magnitude.isnan() & ~expected.isfinite() & ~got.isfinite()
    finite = got.isfinite() & expected.isfinite()
    wrong = ~finite & ~free & (got != expected) & ~(got.isnan() & expected.isnan())
    if wrong.any():
        index = _first(wrong)
        values = f"got {float(got[index])}, expected {float(expected[index])}"
        return f"output {i}: {int(wrong.sum())} of {wrong.numel()} NaN or Inf differ, first at {list(index)}: {values}"
    far = finite & ~near
    if magnitude is not None and far.any():
        index = _first(far)
        return (
            f"output {i}: {int(far.sum())} of {far.numel()} elements are further off than their sums explain, first at "
            f"{list(index)}: got {float(got[index])}, expected {float(expected[index])}, where the magnitudes of all "
            f"products sum to {float(magnitude[index]):.4g}"
        )
    got, expected = got.where(finite, zero), expected.where(finite, zero)
    measured = sqnr_db(got, expected)
    if measured >= min_sqnr_db or _rounded_once(got, expected, min_sqnr_db):
        return None
    return f"output {i}: {measured:.1f} dB; needs {min_sqnr_db} dB"


def _rounded_once(got: Tensor, expected: Tensor, min_sqnr_db: float) -> bool:
    """Whether the SQNR is enough if one sum may be rounded the other way, by one unit in its last place.

    A small output needs this tolerance. In an output of 36 bfloat16 numbers, one unit of the largest number alone
    lowers the SQNR to 51 dB. A sum may stand in the output many times, because the rows of b or of a may be one row
    repeated. Its scales may differ, and are powers of two. So equal significands in a row or in a column are one sum,
    and so are those of all rows, or columns, that have the same significands.
    """
    g, e = (t.double().reshape(-1, t.shape[-1] if t.ndim else 1) for t in (got, expected))
    wrong = (g - e).abs()
    significand, exponent = torch.frexp(e.abs())
    exponent -= ((significand == 0.5) & (g.abs() < e.abs())).int()  # below a power of two, units are half as large
    unit = torch.ldexp(torch.full_like(e, torch.finfo(expected.dtype).eps), exponent - 1)
    noise, once = wrong.square(), (e != 0) & (wrong == unit)
    of_one_sum = 0.0
    if once.any():
        _, number = significand.unique(return_inverse=True)
        for numbers, in_once, of in ((number, once, noise), (number.mT, once.mT, noise.mT)):
            _, kind = numbers.unique(dim=0, return_inverse=True)
            sums = (kind[:, None] * (int(number.max()) + 1) + numbers)[in_once]
            _, sums = sums.unique(return_inverse=True)
            of_sums = torch.zeros_like(noise.view(-1)[: int(sums.max()) + 1]).index_add(0, sums, of[in_once])
            of_one_sum = max(of_one_sum, float(of_sums.max()))
    return (float(noise.sum()) - of_one_sum) * 10 ** (min_sqnr_db / 10) <= float(e.square().sum())


def magnitude_of(t: Tensor) -> Tensor:
    """The magnitudes of an operand, in its dtype. Inf becomes the largest number, and NaN stays.

    The result has the operand's order of dimensions in memory.
    """
    if fmt := BY_DTYPE.get(t.dtype):
        bits = t.view(torch.uint8) & (0x77 if fmt.per_byte > 1 else 0x7F)
        found = bits.where(bits != fmt.inf_code, fmt.largest_code) if fmt.inf_code else bits
    elif t.dtype in (torch.float32, torch.bfloat16):
        found = t.abs().nan_to_num(torch.nan, torch.finfo(t.dtype).max)
    else:
        return t
    order = sorted(range(t.ndim), key=lambda d: t.stride(d) or math.inf, reverse=True)
    return found.permute(order).contiguous().permute([order.index(d) for d in range(t.ndim)]).view(t.dtype)


def magnitudes_of(
    reference: Reference[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """The outputs of the reference on the magnitudes of the operands, which bound the error. None for a byte op."""
    if reference.spec.min_sqnr_db == math.inf:
        return None
    return answer_of(reference, tuple(magnitude_of(a) if isinstance(a, Tensor) else a for a in args), kwargs)
