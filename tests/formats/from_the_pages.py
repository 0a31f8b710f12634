"""The formats, implemented from docs/formats alone.

Nothing of mxspec is imported here. torch only carries tensors in and bytes out: numpy computes every number. Comments
name the rules of the pages. The code is written to be compared with the pages, and not to be fast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Refused(Exception):
    """COMMON-12: a call that the rules do not describe."""


def need(condition: bool, words: str) -> None:
    if not condition:
        raise Refused(words)


# --- COMMON: number formats


@dataclass(frozen=True)
class Elements:
    """A row of the table of COMMON-1."""

    dtype: torch.dtype
    bits: int
    W: int
    bias: int
    max: float
    emax: int  # of the table of mx.md
    inf: int | None
    first_nan: int | None


E4M3FN = Elements(torch.float8_e4m3fn, 8, 3, 7, 448.0, 8, None, 0x7F)
E5M2 = Elements(torch.float8_e5m2, 8, 2, 15, 57344.0, 15, 0x7C, 0x7D)
E2M3 = Elements(torch.uint8, 6, 3, 1, 7.5, 2, None, None)
E3M2 = Elements(torch.uint8, 6, 2, 3, 28.0, 4, None, None)
E2M1 = Elements(torch.float4_e2m1fn_x2, 4, 1, 1, 6.0, 2, None, None)
INT8 = Elements(torch.int8, 8, 6, 1, 127 / 64, 0, None, None)
BY_NAME = {"e4m3fn": E4M3FN, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1, "int8": INT8}
BY_DTYPE = {fmt.dtype: fmt for fmt in BY_NAME.values() if fmt.dtype != torch.uint8}
NAN = np.uint32(0x7FC00000).view(np.float32)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def up(i: int, n: int) -> int:
    return -(-i // n) * n


def raw(t: Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned integers, row-major."""
    integers = t.resolve_neg().view(INTEGERS[t.dtype.itemsize]).contiguous().numpy()
    return integers.view(f"u{t.dtype.itemsize}")


def tensor(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of these bits, in memory of its own."""
    signed = np.array(bits, order="C").view("u1" if bits.itemsize == 1 else f"i{bits.itemsize}")
    return torch.from_numpy(signed).view(dtype)


def widened(x: Tensor) -> np.ndarray:
    """COMMON-4."""
    bits = raw(x)
    if x.dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if x.dtype == torch.float16 else bits.view(np.float32)


def cast(v: np.ndarray, fmt: Elements) -> np.ndarray:
    """COMMON-5, on the bits of fp32."""
    bits = v.view(np.uint32)
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    t = np.minimum(magnitude, np.float32(fmt.max).view(np.uint32)).view(np.int32)
    exponent = np.maximum(t >> 23, 1) - 127
    significand = (t & 0x7FFFFF) | np.where(t >> 23 > 0, 0x800000, 0)  # t = significand * 2^(exponent - 23)
    E = np.maximum(exponent, 1 - fmt.bias)
    drop = np.minimum(23 - fmt.W + E - exponent, 30)
    n, rest, half = significand >> drop, significand & ((1 << drop) - 1), 1 << (drop - 1)
    n = n + ((rest > half) | ((rest == half) & (n % 2 == 1)))
    code = ((E + fmt.bias - 1) << fmt.W) + n + (sign.view(np.int32) << (fmt.bits - 1))
    if fmt is INT8:
        code = np.where(sign > 0, -n, n)  # E is 0
    nan = {4: 0x7, 6: 0x1F, 8: 0x7F}[fmt.bits]
    return np.where(magnitude > 0x7F800000, nan, code).astype(np.uint8)


def value(fmt: Elements) -> np.ndarray:
    """COMMON-1: the value of every code of a format, as fp32."""
    values = []
    for code in range(2**fmt.bits):
        s, rest = divmod(code, 2 ** (fmt.bits - 1))
        e, m = divmod(rest, 2**fmt.W)
        size = 2.0 ** (e - fmt.bias) * (1 + m / 2**fmt.W) if e else 2.0 ** (1 - fmt.bias) * (m / 2**fmt.W)
        if rest == fmt.inf:
            size = float("inf")
        if fmt.first_nan is not None and rest >= fmt.first_nan:
            size = float("nan")
        if fmt is INT8:
            s, size = 0, (code - 256 * (code > 127)) / 64
        values.append(-size if s else size)
    return np.array(values, np.float32)


def power(exponent: np.ndarray) -> np.ndarray:
    """2^exponent as fp32, down to the subnormal 2^-127."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32))


def rounded(v: np.ndarray, out_dtype: torch.dtype) -> Tensor:
    """fp32 numbers as fp32 or as bfloat16, to nearest, ties to even."""
    bits = v.view(np.uint32)
    if out_dtype == torch.float32:
        return tensor(bits, torch.float32)
    up_or_down = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tensor(np.where(np.isnan(v), 0x7FC0, up_or_down).astype(np.uint16), torch.bfloat16)


# --- COMMON-12: refusals


def check_tensor(name: str, t: Any, dtypes: Collection[torch.dtype], ranks: Collection[int]) -> None:
    need(isinstance(t, Tensor), f"{name} is no tensor")
    need(t.layout == torch.strided, f"{name} is sparse")
    need(t.dtype in dtypes, f"dtype of {name}")
    need(t.ndim in ranks, f"dimensions of {name}")


def check_device(*tensors: Tensor) -> None:
    need(len({t.device for t in tensors}) == 1, "two devices")


def check_choice(name: str, given: Any, allowed: Sequence[Any]) -> None:
    need(any(type(given) is type(one) and given == one for one in allowed), f"{name} = {given!r}")


def check_integer(name: str, given: Any, least: int) -> None:
    need(type(given) is int and given >= least, f"{name} = {given!r}")


def check_options(axis: Any, scaling: Any, scale_layout: Any) -> None:
    check_choice("axis", axis, (-1, -2))
    check_choice("scaling", scaling, ("rceil", "floor", "ceil", "even"))
    check_choice("scale_layout", scale_layout, ("plain", "blocked"))


def elements(elem_dtype: Any, *known: Elements) -> Elements:
    for fmt in known:
        if (elem_dtype is fmt.dtype and fmt.dtype != torch.uint8) or (
            type(elem_dtype) is str and BY_NAME.get(elem_dtype) is fmt
        ):
            return fmt
    raise Refused(f"elem_dtype = {elem_dtype!r}")


# --- COMMON-13 and COMMON-14: token groups


def check_ends(offs: Any, beside: Tensor, M: int, read: Any) -> None:
    check_tensor("offs", offs, (torch.int32,), (1,))
    check_device(offs, beside)
    need(type(read) is bool, f"check_offs = {read!r}")
    if read:
        ends = offs.tolist()
        need(all(a <= b for a, b in zip([0, *ends], ends, strict=False)), "offs decreases, or is negative")
        need(not ends or ends[-1] <= M, "offs past the last row")


def groups(offs: Sequence[int]) -> tuple[list[int], list[int]]:
    """`first` and `m` of each group."""
    first = [0, *offs][: len(offs)]
    return first, [end - begin for begin, end in zip(first, offs, strict=True)]


def starts(m: Sequence[int], multiple: int) -> list[int]:
    """The sums of the sizes, rounded up, of the groups before each; G + 1 numbers, the last of all groups."""
    found = [0]
    for size in m:
        found.append(found[-1] + up(size, multiple))
    return found


# --- MX


def scale_bytes(a: np.ndarray, fmt: Elements, scaling: str) -> np.ndarray:
    """MX-4 to MX-7: from the largest magnitudes, given as bits of fp32, finite."""
    if scaling == "rceil":
        d = (a.view(np.float32) / np.float32(fmt.max)).view(np.uint32).astype(np.int64)
        field, mantissa = d >> 23, d % 2**23
        return np.minimum(np.where(field == 0, mantissa > 0x400000, field + (mantissa > 0)), 254)
    bits = a.astype(np.int64)
    if scaling == "even":
        bits = bits + 2 ** (22 - fmt.W)
    byte = bits // 2**23 - fmt.emax
    if scaling == "ceil":
        byte = byte + (bits % 2**23 > 0)
    return np.clip(byte, 0, 254)


def mx_codes(x: np.ndarray, fmt: Elements, scaling: str) -> tuple[np.ndarray, np.ndarray]:
    """MX-1 to MX-10, with blocks along the last dimension: the codes, a byte each, and the scale bytes."""
    blocks = np.ascontiguousarray(x).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    a = (blocks.view(np.uint32) & 0x7FFFFFFF).max(-1, initial=0)  # MX-2; NaN and Inf are largest as integers
    special = a >= 0x7F800000
    byte = np.where(special, 255, scale_bytes(np.where(special, 0, a).astype(np.uint32), fmt, scaling))
    factor = np.where(special, NAN, power(127 - byte))  # MX-3, MX-9
    return scaled_codes(blocks, factor, a > 0, fmt).reshape(x.shape), byte.astype(np.uint8)


def scaled_codes(blocks: np.ndarray, factor: np.ndarray, some: np.ndarray, fmt: Elements) -> np.ndarray:
    """`cast(fp32(x * factor))` with a factor for each block. Blocks without `some` are zeros: most of padding is."""
    signs = 0 if fmt is INT8 else blocks.view(np.uint32) >> 31 << (fmt.bits - 1)
    codes = np.broadcast_to(signs, blocks.shape).astype(np.uint8)  # MX-8, FP8-6
    codes[some] = cast(blocks[some] * factor[some][:, None], fmt)
    return codes


def mx_both(x: np.ndarray, axis: int, fmt: Elements, scaling: str) -> tuple[Tensor, np.ndarray]:
    """MX-11 and MX-13: the codes as they lie in memory; the plain scale bytes."""
    codes, byte = mx_codes(x if axis == -1 else x.swapaxes(-1, -2), fmt, scaling)
    if fmt is E2M1:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    elif fmt.bits == 6:
        a, b, c, d = (codes[..., i::4] for i in range(4))
        three = (a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2)
        codes = np.stack(three, -1).reshape(*codes.shape[:-1], codes.shape[-1] * 3 // 4)
    qdata = tensor(codes, fmt.dtype)
    return qdata if axis == -1 else qdata.mT, byte


def mx_quantize(
    x: Any,
    *,
    axis: Any = -1,
    elem_dtype: Any = "e4m3fn",
    scaling: Any = "rceil",
    scale_layout: Any = "plain",
) -> tuple[Tensor, Tensor]:
    """MX-12 to MX-14."""
    check_tensor("x", x, FLOATS, (2, 3))
    check_options(axis, scaling, scale_layout)
    fmt = elements(elem_dtype, *BY_NAME.values())
    need(x.shape[axis] % 32 == 0, "no multiple of 32")
    qdata, byte = mx_both(widened(x), axis, fmt, scaling)
    return qdata, tensor(blocked_bytes(byte) if scale_layout == "blocked" else byte, torch.float8_e8m0fnu)


def mx_quantize_rowcol(
    x: Any, *, elem_dtype: Any = "e4m3fn", scaling: Any = "rceil", scale_layout: Any = "plain"
) -> tuple[Tensor, ...]:
    """MX-15."""
    outputs: tuple[Tensor, ...] = ()
    for axis in (-1, -2):
        outputs += mx_quantize(x, axis=axis, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout)
    return outputs


def mx_quantize_groups(
    x: Any,
    offs: Any,
    *,
    axis: Any = -1,
    pad_to: Any = 128,
    elem_dtype: Any = "e4m3fn",
    scaling: Any = "rceil",
    scale_layout: Any = "blocked",
    check_offs: Any = False,
) -> tuple[Tensor, ...]:
    """MX-16 to MX-19."""
    check_tensor("x", x, FLOATS, (2,))
    check_ends(offs, x, x.shape[0], check_offs)
    check_options(axis, scaling, scale_layout)
    check_integer("pad_to", pad_to, 1)
    need(pad_to % 128 == 0, "pad_to is no multiple of 128")
    fmt = elements(elem_dtype, E4M3FN, E5M2, E2M1)
    need(axis == -2 or x.shape[1] % 32 == 0, "K is no multiple of 32")
    G = len(offs)
    need(up(x.shape[0] + G * pad_to, pad_to) + 128 * G < 2**31, "too many rows")
    padded, start, end = padded_groups(widened(x), offs.tolist(), pad_to)
    qdata, byte = mx_both(padded, axis, fmt, scaling)
    if scale_layout == "blocked" and axis == -1:
        byte, _ = blocked_m_groups(byte, end)
    elif scale_layout == "blocked":
        byte, _ = blocked_k_groups(byte, [row // 32 for row in end])
    return qdata, tensor(byte, torch.float8_e8m0fnu), int32(start), int32(end)


def mx_quantize_rowcol_groups(
    x: Any,
    offs: Any,
    *,
    pad_to: Any = 128,
    elem_dtype: Any = "e4m3fn",
    scaling: Any = "rceil",
    scale_layout: Any = "blocked",
    check_offs: Any = False,
) -> tuple[Tensor, ...]:
    """MX-31 to MX-33."""
    rows, columns = (
        mx_quantize_groups(
            x, offs, axis=axis, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout,
            check_offs=check_offs,
        )
        for axis in (-1, -2)
    )  # fmt: skip
    return *rows[:2], *columns


def mx_fake_quantize_rowcol_groups(
    x: Any, offs: Any, *, elem_dtype: Any = "e4m3fn", scaling: Any = "rceil", check_offs: Any = False
) -> tuple[Tensor, Tensor]:
    """MX-29 and MX-30."""
    check_tensor("x", x, FLOATS, (2,))
    check_ends(offs, x, x.shape[0], check_offs)
    check_options(-1, scaling, "plain")
    elements(elem_dtype, E4M3FN, E5M2)
    (M, K), ends = x.shape, offs.tolist()
    need(K % 32 == 0, "K is no multiple of 32")
    need(up(M + len(ends) * 128, 128) < 2**31, "too many rows")
    options = {"elem_dtype": elem_dtype, "scaling": scaling}
    rows = mx_dequantize(*mx_quantize(x, **options))
    columns, begin = x.new_zeros((M, K), dtype=torch.bfloat16), 0
    for end in ends:
        group = x.new_zeros((up(end - begin, 32), K))
        group[: end - begin] = x[begin:end]
        columns[begin:end] = mx_dequantize(*mx_quantize(group, axis=-2, **options), axis=-2)[: end - begin]
        begin = end
    return rows, columns


def mx_dequantize(
    qdata: Any,
    scale: Any,
    *,
    axis: Any = -1,
    out_dtype: Any = torch.bfloat16,
    scale_layout: Any = "plain",
    elem_dtype: Any = None,
) -> Tensor:
    """MX-20 to MX-22."""
    check_tensor("qdata", qdata, (*BY_DTYPE, torch.uint8), (2, 3))
    check_tensor("scale", scale, (torch.float8_e8m0fnu,), (1, 2, 3))
    check_device(qdata, scale)
    check_options(axis, "rceil", scale_layout)
    check_choice("out_dtype", out_dtype, (torch.bfloat16, torch.float32))
    need(elem_dtype is not None or qdata.dtype != torch.uint8, "no elem_dtype")
    fmt = BY_DTYPE[qdata.dtype] if elem_dtype is None else elements(elem_dtype, *BY_NAME.values())
    need(fmt.dtype == qdata.dtype, "elem_dtype of another dtype")
    codes = raw(qdata) if axis == -1 else raw(qdata).swapaxes(-1, -2)
    if fmt is E2M1:
        codes = np.stack([codes & 0xF, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    elif fmt.bits == 6:
        need(codes.shape[-1] % 3 == 0, "a part of three bytes")
        a, b, c = (codes[..., i::3] for i in range(3))
        four = (a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2)
        codes = np.stack(four, -1).reshape(*codes.shape[:-1], codes.shape[-1] // 3 * 4)
    *lead, R, n = codes.shape
    need(n % 32 == 0, "no multiple of 32")
    plain = (*lead, R, n // 32)
    needed = plain if scale_layout == "plain" else (*lead, up(R, 128) * up(n // 32, 4))
    need(tuple(scale.shape) == needed, "shape of scale")
    byte = raw(scale)
    if scale_layout == "blocked":
        byte = byte[..., places(R, n // 32)].reshape(plain)
    factor = np.where(byte == 255, NAN, power(byte.astype(np.int32) - 127))
    out = (value(fmt)[codes].reshape(*plain, 32) * factor[..., None]).reshape(codes.shape)
    return rounded(np.ascontiguousarray(out if axis == -1 else out.swapaxes(-1, -2)), out_dtype)


def e4m3_scale(plain: np.ndarray, scale_layout: str) -> Tensor:
    """NVFP4-11."""
    return tensor(blocked_bytes(plain) if scale_layout == "blocked" else plain, torch.float8_e4m3fn)


def nvfp4_quantize(
    x: Any, tensor_amax: Any = None, *, axis: Any = -1, block: Any = "1x16", scale_layout: Any = "plain"
) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4-1 to NVFP4-12."""
    check_tensor("x", x, FLOATS, (2, 3))
    check_options(axis, "rceil", scale_layout)
    check_choice("block", block, ("1x16", "16x16"))
    for dim in (-1, -2) if block == "16x16" else (axis,):
        need(x.shape[dim] % 16 == 0, "no multiple of 16")
    if tensor_amax is not None:
        check_tensor("tensor_amax", tensor_amax, (torch.float32,), (x.ndim - 2,))
        check_device(x, tensor_amax)
        need(tensor_amax.shape == x.shape[:-2], "shape of tensor_amax")
    v = widened(x) if axis == -1 else np.ascontiguousarray(widened(x).swapaxes(-1, -2))
    s, y, T = nvfp4_parts(v, None if tensor_amax is None else raw(tensor_amax).view(np.float32), block)
    qdata = nvfp4_pairs(cast(y, E2M1))
    return qdata if axis == -1 else qdata.mT, e4m3_scale(s, scale_layout), T


def nvfp4_parts(v: np.ndarray, A: Any, block: str = "1x16") -> tuple[np.ndarray, np.ndarray, Tensor]:
    """NVFP4-3 to NVFP4-8: the scales, the numbers that become codes (NaN gives the code 7), and T."""
    *lead, R, n = v.shape
    if A is None:
        A = np.abs(v).max((-2, -1), initial=np.float32(0))
        A = np.asarray(np.where(np.isnan(v).any((-2, -1)), NAN, A), np.float32)
    A = np.where(np.isfinite(A) & (A >= 0), np.abs(A), NAN).astype(np.float32)
    h = (A * np.float32(2.0**-12))[..., None, None]
    blocks = v.reshape(*lead, R, n // 16, 16)
    b = np.abs(blocks).max(-1)
    b = np.where(np.isfinite(blocks).all(-1), b, NAN)
    if block == "16x16":
        b = b.reshape(*lead, R // 16, 16, n // 16).max(-2).repeat(16, -2)
    bad = np.isnan(b) | np.isnan(h)
    quotient = np.where((b == 0) | (h == 0), np.float32(0), b * np.float32(7 / 64) / h)
    s = np.where(bad, 0x7F, cast(quotient, E4M3FN)).astype(np.uint8)
    d = (value(E4M3FN)[s] * h)[..., None]
    zero = np.where(np.signbit(blocks), np.float32(-0.0), np.float32(0))
    y = np.where(d == 0, zero, blocks * np.float32(21 / 32) / d)
    y = np.where(bad[..., None], NAN, y).astype(np.float32)
    return s, y, tensor(np.asarray(A / np.float32(2688)).view(np.uint32), torch.float32)


def nvfp4_pairs(codes: np.ndarray) -> Tensor:
    """NVFP4-10: codes of blocks, two in a byte."""
    codes = codes.reshape(*codes.shape[:-2], codes.shape[-2] * 16)
    return tensor(codes[..., 0::2] | codes[..., 1::2] << 4, torch.float4_e2m1fn_x2)


def philox(seed: int, offset: int, n: np.ndarray) -> list[np.ndarray]:
    """NVFP4-19, with words in uint64, whose products do not wrap around."""
    word = np.uint64(2**32 - 1)
    c = [np.full(n.shape, number, np.uint64) for number in (offset % 2**32, offset % 2**64 >> 32)]
    c += [n.astype(np.uint64) & word, n.astype(np.uint64) >> np.uint64(32)]
    k0, k1 = seed % 2**32, seed % 2**64 >> 32
    for _ in range(10):
        two, zero = np.uint64(0xCD9E8D57) * c[2], np.uint64(0xD2511F53) * c[0]
        high = np.uint64(32)
        c = [two >> high ^ c[1] ^ np.uint64(k0), two & word, zero >> high ^ c[3] ^ np.uint64(k1), zero & word]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def nvfp4_quantize_stochastic(
    x: Any, random: Any, tensor_amax: Any = None, *, axis: Any = -1, scale_layout: Any = "plain"
) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4-15 to NVFP4-19."""
    check_tensor("random", random, (torch.uint8, torch.int64), (1, 2, 3))
    check_tensor("x", x, FLOATS, (2, 3))
    check_device(x, random)
    need(random.shape == (x.shape if random.dtype == torch.uint8 else (2,)), "shape of random")
    _, scale, T = nvfp4_quantize(x, tensor_amax, axis=axis, scale_layout=scale_layout)
    v = widened(x) if axis == -1 else np.ascontiguousarray(widened(x).swapaxes(-1, -2))
    s, y, _ = nvfp4_parts(v, None if tensor_amax is None else raw(tensor_amax).view(np.float32))
    if random.dtype == torch.uint8:
        r = (raw(random) if axis == -1 else raw(random).swapaxes(-1, -2)).reshape(y.shape)
    else:
        words = philox(*random.tolist(), np.arange(s.size).reshape(s.shape))
        r = np.stack([word >> np.uint64(shift) & np.uint64(255) for word in words for shift in (0, 8, 16, 24)], -1)
    t = np.minimum(np.abs(np.where(np.isnan(y), np.float32(0), y)), np.float32(6))
    E = np.maximum(np.frexp(t)[1] - 1, 0)
    magnitude = 2 * E + (np.floor(np.ldexp(t, 9 - E)).astype(np.int64) + r.astype(np.int64)) // 256
    codes = np.where(np.isnan(y), 7, magnitude + 8 * np.signbit(y)).astype(np.uint8)
    qdata = nvfp4_pairs(codes)
    return qdata if axis == -1 else qdata.mT, scale, T


def nvfp4_quantize_groups(
    x: Any,
    offs: Any,
    tensor_amax: Any = None,
    *,
    axis: Any = -1,
    pad_to: Any = 128,
    scale_layout: Any = "blocked",
    check_offs: Any = False,
) -> tuple[Tensor, ...]:
    """NVFP4-20 to NVFP4-22."""
    check_tensor("x", x, FLOATS, (2,))
    check_ends(offs, x, x.shape[0], check_offs)
    check_options(axis, "rceil", scale_layout)
    check_integer("pad_to", pad_to, 1)
    need(pad_to % 128 == 0, "pad_to is no multiple of 128")
    need(axis == -2 or x.shape[1] % 16 == 0, "K is no multiple of 16")
    G = len(offs)
    need(up(x.shape[0] + G * pad_to, pad_to) + 128 * G < 2**31, "too many rows")
    if tensor_amax is not None:
        check_tensor("tensor_amax", tensor_amax, (torch.float32,), (1,))
        check_device(x, tensor_amax)
        need(len(tensor_amax) == G, "shape of tensor_amax")
    padded, start, end = padded_groups(widened(x), offs.tolist(), pad_to)
    v = padded if axis == -1 else np.ascontiguousarray(padded.T)
    R, C = len(v), v.shape[1] // 16
    s, codes, T = np.zeros((R, C), np.uint8), np.zeros((R, C, 16), np.uint8), np.zeros(G, np.float32)
    for g in range(G):
        at = slice(start[g], end[g]) if axis == -1 else np.s_[:, start[g] // 16 : end[g] // 16]
        A = None if tensor_amax is None else np.asarray(raw(tensor_amax).view(np.float32)[g])
        rows = v[at] if axis == -1 else np.ascontiguousarray(v[:, start[g] : end[g]])
        s[at], y, of_group = nvfp4_parts(rows, A)
        codes[at], T[g] = cast(y, E2M1), of_group.item()
    if scale_layout == "blocked" and axis == -1:
        s, _ = blocked_m_groups(s, end)
    elif scale_layout == "blocked":
        s, _ = blocked_k_groups(s, [row // 16 for row in end])
    qdata = nvfp4_pairs(codes)
    qdata = qdata if axis == -1 else qdata.mT
    return qdata, tensor(s, torch.float8_e4m3fn), torch.from_numpy(T), int32(start), int32(end)


def hadamard_16(x: Any, *, axis: Any = -1, signs: Any = 0xD7E8) -> Tensor:
    """NVFP4-23 and NVFP4-24."""
    check_tensor("x", x, FLOATS, (2, 3))
    check_choice("axis", axis, (-1, -2))
    check_integer("signs", signs, 0)
    need(signs < 2**16, "signs")
    need(x.shape[axis] % 16 == 0, "no multiple of 16")
    v = widened(x) if axis == -1 else np.ascontiguousarray(widened(x).swapaxes(-1, -2))
    blocks = v.reshape(-1, 16).copy()
    for j in range(16):
        if signs >> j & 1:
            blocks[:, j] = -blocks[:, j]
    for D in (1, 2, 4, 8):
        for j in range(16):
            if not j & D:
                a, b = blocks[:, j].copy(), blocks[:, j + D].copy()
                blocks[:, j], blocks[:, j + D] = a + b, a - b
    out = (blocks * np.float32(0.25)).reshape(v.shape)
    out = np.ascontiguousarray(out if axis == -1 else out.swapaxes(-1, -2))
    if x.dtype == torch.float16:
        return tensor(out.astype(np.float16).view(np.uint16), torch.float16)
    return rounded(out, x.dtype)


def philox_bytes(random: Any, more: int, blocks: int) -> np.ndarray:
    """NVFP4-32: 16 bytes of Philox4x32-10 for each block, `(blocks, 16)`, from a seed and an offset plus `more`."""
    seed, offset = random.tolist()
    c = philox(seed, offset + more, np.arange(blocks, dtype=np.uint64))
    return np.stack(c, -1).astype("<u4").view(np.uint8)


def nvfp4_fake_quantize(x: Any, *, axis: Any = -1, block: Any = "1x16") -> tuple[Tensor, Tensor]:
    """NVFP4-33 and NVFP4-34."""
    codes, scale, T = nvfp4_quantize(x, axis=axis, block=block)
    return nvfp4_dequantize(codes, scale, torch.from_numpy(np.ones(T.shape, np.float32)), axis=axis), T


def nvfp4_fake_quantize_rowcol_groups(
    x: Any, offs: Any, random: Any = None, *, signs: Any = None, check_offs: Any = False
) -> tuple[Tensor, ...]:
    """NVFP4-30 to NVFP4-32."""
    check_tensor("x", x, FLOATS, (2,))
    check_ends(offs, x, x.shape[0], check_offs)
    if random is not None:
        check_tensor("random", random, (torch.int64,), (1,))
        check_device(x, random)
        need(random.shape == (2,), "shape of random")
    if signs is not None:
        need(type(signs) is int and 0 <= signs < 2**16, "signs")
    (M, K), ends = x.shape, offs.tolist()
    need(K % 16 == 0, "K is no multiple of 16")
    R = up(M + len(ends) * 16, 16)
    need(R < 2**31, "too many rows")
    rows, columns = (x.new_zeros((n, K), dtype=torch.bfloat16) for n in (M, R))
    scales: tuple[list[Tensor], list[Tensor]] = ([], [])
    byte = []
    for more in (0, 1) if random is not None else ():
        of_blocks = philox_bytes(random, more, R // 16 * K).reshape(R // 16, K, 16)
        byte.append(np.ascontiguousarray(of_blocks.swapaxes(1, 2)).reshape(R, K))
    begin, places = 0, [0]
    for end in ends:
        place = slice(places[-1], places[-1] + up(end - begin, 16))
        group = x.new_zeros((place.stop - place.start, K))
        group[: end - begin] = x[begin:end]
        turned = group if signs is None else hadamard_16(group, axis=-2, signs=signs)
        for way, (matrix, axis) in enumerate(((group, -1), (turned, -2))):
            if random is None:
                codes, scale, T = nvfp4_quantize(matrix, axis=axis)
            else:
                codes, scale, T = nvfp4_quantize_stochastic(matrix, torch.from_numpy(byte[way][place]), axis=axis)
            values = nvfp4_dequantize(codes, scale, torch.from_numpy(np.ones((), np.float32)), axis=axis)
            scales[way].append(T)
            if way:
                columns[place] = values
            else:
                rows[begin:end] = values[: end - begin]
        begin = end
        places.append(place.stop)
    row_scale, column_scale = (torch.from_numpy(np.array([float(T) for T in s], np.float32)) for s in scales)
    start, stop = int32(places[:-1]), int32(places[1:])
    return rows, row_scale, columns, column_scale, start, stop


def nvfp4_dequantize(
    qdata: Any, scale: Any, tensor_scale: Any, *, axis: Any = -1, out_dtype: Any = torch.bfloat16,
    scale_layout: Any = "plain",
) -> Tensor:  # fmt: skip
    """NVFP4-13 and NVFP4-14."""
    check_tensor("qdata", qdata, (torch.float4_e2m1fn_x2,), (2, 3))
    check_tensor("scale", scale, (torch.float8_e4m3fn,), (1, 2, 3))
    check_tensor("tensor_scale", tensor_scale, (torch.float32,), (qdata.ndim - 2,))
    check_device(qdata, scale, tensor_scale)
    check_options(axis, "rceil", scale_layout)
    check_choice("out_dtype", out_dtype, (torch.bfloat16, torch.float32))
    octets = raw(qdata) if axis == -1 else raw(qdata).swapaxes(-1, -2)
    codes = np.stack([octets & 0xF, octets >> 4], -1).reshape(*octets.shape[:-1], 2 * octets.shape[-1])
    *lead, R, n = codes.shape
    need(n % 16 == 0, "no multiple of 16")
    need(list(tensor_scale.shape) == lead, "shape of tensor_scale")
    plain = (*lead, R, n // 16)
    needed = plain if scale_layout == "plain" else (*lead, up(R, 128) * up(n // 16, 4))
    need(tuple(scale.shape) == needed, "shape of scale")
    s = raw(scale)
    if scale_layout == "blocked":
        s = s[..., places(R, n // 16)].reshape(plain)
    T = raw(tensor_scale).view(np.float32)[..., None, None, None]
    out = (value(E2M1)[codes].reshape(*plain, 16) * value(E4M3FN)[s][..., None] * T).reshape(codes.shape)
    return rounded(np.ascontiguousarray(out if axis == -1 else out.swapaxes(-1, -2)), out_dtype)


def mx_requantize_groups(
    qdata: Any,
    scale: Any,
    offs: Any,
    *,
    dtype: Any = torch.float32,
    pad_to: Any = 128,
    elem_dtype: Any = "e4m3fn",
    scaling: Any = "rceil",
    scale_layout: Any = "blocked",
    check_offs: Any = False,
) -> tuple[Tensor, ...]:
    """MX-38 to MX-40."""
    check_tensor("qdata", qdata, (torch.float8_e4m3fn, torch.float8_e5m2), (2,))
    elements(elem_dtype, E4M3FN, E5M2)
    x = mx_dequantize(qdata, scale, out_dtype=dtype)
    return mx_quantize_groups(
        x, offs, axis=-2, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout,
        check_offs=check_offs,
    )  # fmt: skip


# --- FP8


def check_fp8(scale_format: Any, eps: Any) -> None:
    """FP8-9."""
    check_choice("scale_format", scale_format, ("fp32", "pow2"))
    need(type(eps) in (int, float) and 1e-35 <= eps <= 1e35, f"eps = {eps!r}")


def fp8_factor(amax: np.ndarray, scale_format: str, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """FP8-2, FP8-3, FP8-5 and FP8-7: the factor s, and the stored scale. amax as bits of fp32."""
    special = amax >= 0x7F800000
    finite = np.where(special, 0, amax).astype(np.uint32).view(np.float32)
    s = np.float32(448) / np.maximum(finite, np.float32(eps))
    if scale_format == "pow2":
        s = (s.view(np.uint32) & 0x7F800000).view(np.float32)
    s = np.where(special, NAN, s)
    return s, np.float32(1) / s


def fp8_codes(x: np.ndarray, scale_format: str, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """FP8-1 to FP8-8, with blocks of 128 along the last dimension, of which the last may be shorter."""
    C = up(x.shape[-1], 128) // 128
    codes, scale = np.zeros(x.shape, np.uint8), np.zeros((*x.shape[:-1], C), np.float32)
    for j in range(C):
        block = np.ascontiguousarray(x[..., 128 * j : 128 * j + 128])[..., None, :]
        amax = (block.view(np.uint32) & 0x7FFFFFFF).max(-1, initial=0)
        s, of_block = fp8_factor(amax, scale_format, eps)
        scale[..., j] = of_block[..., 0]
        codes[..., 128 * j : 128 * j + 128] = scaled_codes(block, s, amax > 0, E4M3FN)[..., 0, :]
    return codes, scale


def fp8_quantize_1x128(
    x: Any, *, axis: Any = -1, scale_format: Any = "fp32", scale_major: Any = "k", eps: Any = 1e-12
) -> tuple[Tensor, Tensor]:
    """FP8-8 to FP8-10."""
    check_tensor("x", x, FLOATS, (2,))
    check_choice("axis", axis, (-1, -2))
    check_choice("scale_major", scale_major, ("k", "mn"))
    check_fp8(scale_format, eps)
    need(x.shape[axis] % 16 == 0, "no multiple of 16")
    codes, scale = fp8_codes(widened(x) if axis == -1 else widened(x).T, scale_format, eps)
    qdata = tensor(codes, torch.float8_e4m3fn)
    stored = tensor(scale.T, torch.float32).mT if scale_major == "mn" else tensor(scale, torch.float32)
    return qdata if axis == -1 else qdata.mT, stored


def fp8_quantize_128x128(
    w: Any, *, scale_format: Any = "fp32", eps: Any = 1e-12, with_transpose: Any = False
) -> tuple[Tensor, ...]:
    """FP8-11 to FP8-13."""
    check_tensor("w", w, FLOATS, (2, 3))
    check_fp8(scale_format, eps)
    need(type(with_transpose) is bool, f"with_transpose = {with_transpose!r}")
    *lead, N, K = w.shape
    need(K % 16 == 0, "no multiple of 16")
    x = widened(w)
    codes = np.zeros(x.shape, np.uint8)
    scale = np.zeros((*lead, up(N, 128) // 128, up(K, 128) // 128), np.float32)
    for i, j in [(i, j) for i in range(0, N, 128) for j in range(0, K, 128)]:
        block = np.ascontiguousarray(x[..., i : i + 128, j : j + 128])
        amax = (block.view(np.uint32) & 0x7FFFFFFF).max((-2, -1), initial=0)
        s, scale[..., i // 128, j // 128] = fp8_factor(amax, scale_format, eps)
        codes[..., i : i + 128, j : j + 128] = cast(block * s[..., None, None], E4M3FN)
    outputs = tensor(codes, torch.float8_e4m3fn), tensor(scale, torch.float32)
    if not with_transpose:
        return outputs
    turned = tensor(codes.swapaxes(-1, -2), torch.float8_e4m3fn), tensor(scale.swapaxes(-1, -2), torch.float32)
    return (*outputs, *turned)


def fp8_quantize_k_groups(
    x: Any, offs: Any, *, scale_format: Any = "fp32", eps: Any = 1e-12, check_offs: Any = False
) -> tuple[Tensor, ...]:
    """FP8-14 to FP8-17."""
    check_tensor("x", x, FLOATS, (2,))
    check_ends(offs, x, x.shape[0], check_offs)
    check_fp8(scale_format, eps)
    D, R = x.shape[1], up(x.shape[0] + 128 * len(offs), 128)
    need(R < 2**31, "too many rows")
    padded, start, end = padded_groups(widened(x), offs.tolist(), 128)
    codes, scale = fp8_codes(padded.T, scale_format, eps)  # (D, R), (D, R / 128)
    flat = np.zeros(D * R, np.uint8)
    for begin, stop in zip(start, end, strict=True):
        flat[D * begin : D * stop] = codes[:, begin:stop].reshape(-1)
    scale[:, (end[-1] if end else 0) // 128 :] = 0
    qdata = tensor(flat.reshape(D, R), torch.float8_e4m3fn)
    return qdata, tensor(scale.T, torch.float32).mT, int32(start), int32(end)


def fp8_quantize_rowcol_groups(
    x: Any, offs: Any, *, scale_format: Any = "fp32", eps: Any = 1e-12, check_offs: Any = False
) -> tuple[Tensor, ...]:
    """FP8-29 to FP8-32."""
    options = {"scale_format": scale_format, "eps": eps}
    columns = fp8_quantize_k_groups(x, offs, check_offs=check_offs, **options)
    return *fp8_quantize_1x128(x, scale_major="mn", **options), *columns


def fp8_requantize_k_groups(
    qdata: Any,
    scale: Any,
    offs: Any,
    *,
    dtype: Any = torch.float32,
    scale_format: Any = "fp32",
    eps: Any = 1e-12,
    check_offs: Any = False,
) -> tuple[Tensor, ...]:
    """FP8-50 to FP8-52."""
    check_tensor("qdata", qdata, (torch.float8_e4m3fn,), (2,))
    check_tensor("scale", scale, (torch.float32,), (2,))
    need(tuple(scale.shape) == (qdata.shape[0], up(qdata.shape[1], 128) // 128), "shape of scale")
    x = fp8_dequantize(qdata, scale, out_dtype=dtype)
    return fp8_quantize_k_groups(x, offs, scale_format=scale_format, eps=eps, check_offs=check_offs)


def fp8_transpose_128x128(qdata: Any, scale: Any) -> tuple[Tensor, Tensor]:
    """FP8-53, FP8-54."""
    check_tensor("qdata", qdata, (torch.float8_e4m3fn,), (2, 3))
    check_tensor("scale", scale, (torch.float32,), (2, 3))
    check_device(qdata, scale)
    *lead, N, K = qdata.shape
    need(K % 16 == 0, "no multiple of 16")
    need(tuple(scale.shape) == (*lead, up(N, 128) // 128, up(K, 128) // 128), "shape of scale")
    turned = tensor(raw(qdata).swapaxes(-1, -2), torch.float8_e4m3fn)
    return turned, tensor(raw(scale).swapaxes(-1, -2), torch.float32)


def sigmoid(gate: np.ndarray) -> np.ndarray:
    """FP8-34, of fp32 numbers."""
    x = gate.astype(np.float64)
    s = np.where(np.abs(x) < 2.0**-12, 0.5 + x * (0.25 - 2.0**-26), 1 / (1 + np.exp(-x))).astype(np.float32)
    return np.where(s < power(np.array(-126)), np.float32(0), s)


def bf16(v: np.ndarray) -> np.ndarray:
    """Numbers of fp32 rounded to bfloat16, as fp32."""
    return widened(rounded(v, torch.bfloat16))


def halves(gate_up: Any, offs: Any, check_offs: Any) -> tuple[np.ndarray, np.ndarray]:
    """FP8-33: gate and up as fp32."""
    check_tensor("gate_up", gate_up, (torch.bfloat16,), (2,))
    need(gate_up.shape[1] % 32 == 0, "no multiple of 32")
    check_ends(offs, gate_up, gate_up.shape[0], check_offs)
    both, middle = widened(gate_up), gate_up.shape[1] // 2
    return both[:, :middle], both[:, middle:]


def silu_times(gate: np.ndarray, up_: np.ndarray) -> Tensor:
    """FP8-35: h."""
    return rounded(bf16(gate * sigmoid(gate)) * up_, torch.bfloat16)


def silu_gradients(gate: np.ndarray, up_: np.ndarray, of_h: np.ndarray) -> Tensor:
    """FP8-38, and the matrix of FP8-39."""
    s, one = sigmoid(gate), np.float32(1)
    d_up, d_silu = of_h * bf16(gate * s), bf16(of_h * up_)
    d_gate = (d_silu * s) * (one + gate * (one - s))
    return rounded(np.concatenate([d_gate, d_up], 1), torch.bfloat16)


def of_one_shape(**tensors: Any) -> list[np.ndarray]:
    """FP8-40: bfloat16 matrices of one shape on one device, as fp32."""
    first = next(iter(tensors.values()))
    for name, t in tensors.items():
        check_tensor(name, t, (torch.bfloat16,), (2,))
        check_device(first, t)
        need(t.shape == first.shape, f"shape of {name}")
    return [widened(t) for t in tensors.values()]


def swiglu(gate: Any, up_: Any) -> Tensor:
    """FP8-40 and FP8-41."""
    return silu_times(*of_one_shape(gate=gate, up=up_))


def swiglu_backward(gate: Any, up_: Any, dh: Any) -> Tensor:
    """FP8-40 and FP8-42."""
    return silu_gradients(*of_one_shape(gate=gate, up=up_, dh=dh))


def swiglu_fp8_quantize_rowcol_groups(
    gate_up: Any, offs: Any, *, scale_format: Any = "fp32", check_offs: Any = False
) -> tuple[Tensor, ...]:
    """FP8-33 to FP8-36."""
    h = silu_times(*halves(gate_up, offs, check_offs))
    return fp8_quantize_rowcol_groups(h, offs, scale_format=scale_format)


def swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Any, dh: Any, offs: Any, *, scale_format: Any = "fp32", check_offs: Any = False
) -> tuple[Tensor, ...]:
    """FP8-37 to FP8-39."""
    gate, up_ = halves(gate_up, offs, check_offs)
    check_tensor("dh", dh, (torch.bfloat16,), (2,))
    check_device(gate_up, dh)
    need(dh.shape == gate.shape, "shape of dh")
    gradient = silu_gradients(gate, up_, widened(dh))
    return fp8_quantize_rowcol_groups(gradient, offs, scale_format=scale_format)


def swiglu_mx_quantize_rowcol_groups(gate_up: Any, offs: Any, *, check_offs: Any = False, **options: Any) -> Any:
    """MX-34 and MX-35."""
    gate, up_ = halves(gate_up, offs, check_offs)
    need(gate_up.shape[1] % 64 == 0, "no multiple of 64")
    elements(options.get("elem_dtype", "e4m3fn"), E4M3FN, E5M2)
    return mx_quantize_rowcol_groups(silu_times(gate, up_), offs, **options)


def swiglu_backward_mx_quantize_rowcol_groups(
    gate_up: Any, dh: Any, offs: Any, *, check_offs: Any = False, **options: Any
) -> Any:
    """MX-36 and MX-37."""
    gate, up_ = halves(gate_up, offs, check_offs)
    need(gate_up.shape[1] % 64 == 0, "no multiple of 64")
    check_tensor("dh", dh, (torch.bfloat16,), (2,))
    check_device(gate_up, dh)
    need(dh.shape == gate.shape, "shape of dh")
    elements(options.get("elem_dtype", "e4m3fn"), E4M3FN, E5M2)
    return mx_quantize_rowcol_groups(silu_gradients(gate, up_, widened(dh)), offs, **options)


def with_bias(gate_up: Any, bias: Any, offs: Any, check_offs: Any) -> tuple[np.ndarray, np.ndarray]:
    """FP8-43 and FP8-44: the gates and the ups, as fp32."""
    for name, t in (("gate_up", gate_up), ("bias", bias)):
        check_tensor(name, t, (torch.bfloat16,), (2,))
    need(gate_up.shape[1] % 32 == 0, "no multiple of 32")
    check_ends(offs, gate_up, gate_up.shape[0], check_offs)
    need(bias.shape == (offs.shape[0], gate_up.shape[1]), "shape of bias")
    check_device(gate_up, bias)
    total, biases = widened(gate_up).copy(), widened(bias)
    ends = offs.numpy()
    for m, row in enumerate(total):
        g = int((ends <= m).sum())
        if g < len(ends):
            total[m] = bf16(row + biases[g])
    return total[:, ::2], total[:, 1::2]


def parts_of_gpt_oss(gate: np.ndarray, up_: np.ndarray) -> tuple[np.ndarray, ...]:
    """FP8-45 and FP8-48: glu, u + 1, and slope."""
    x = np.minimum(gate, np.float32(7)).astype(np.float64)
    u = np.maximum(np.minimum(up_, np.float32(7)), np.float32(-7))
    s = (1 / (1 + np.exp(-1.702 * x))).astype(np.float32)
    s = np.where(s < power(np.array(-126)), np.float32(0), s)
    real = s.astype(np.float64)
    slope = (real + 1.702 * x * real * (1 - real)).astype(np.float32)
    return bf16(x.astype(np.float32) * s), bf16(u + np.float32(1)), bf16(slope)


def clamped_swiglu_fp8_quantize_rowcol_groups(
    gate_up: Any, bias: Any, offs: Any, *, scale_format: Any = "fp32", check_offs: Any = False
) -> tuple[Tensor, ...]:
    """FP8-43 to FP8-46."""
    glu, up_1, _ = parts_of_gpt_oss(*with_bias(gate_up, bias, offs, check_offs))
    return fp8_quantize_rowcol_groups(rounded(glu * up_1, torch.bfloat16), offs, scale_format=scale_format)


def clamped_swiglu_backward_fp8_quantize_rowcol_groups(
    gate_up: Any, bias: Any, dh: Any, offs: Any, *, scale_format: Any = "fp32", check_offs: Any = False
) -> tuple[Tensor, ...]:
    """FP8-47 to FP8-49."""
    gate, up_ = with_bias(gate_up, bias, offs, check_offs)
    check_tensor("dh", dh, (torch.bfloat16,), (2,))
    check_device(gate_up, dh)
    need(dh.shape == gate.shape, "shape of dh")
    glu, up_1, slope = parts_of_gpt_oss(gate, up_)
    of_h, zero = widened(dh), np.float32(0)
    d_up = np.where(np.abs(up_) <= 7, of_h * glu, zero)
    d_gate = np.where(gate <= 7, bf16(of_h * up_1) * slope, zero)
    gradient = np.stack([d_gate, d_up], -1).reshape(gate_up.shape)
    return fp8_quantize_rowcol_groups(rounded(gradient, torch.bfloat16), offs, scale_format=scale_format)


def fp8_dequantize(qdata: Any, scale: Any, *, axis: Any = -1, out_dtype: Any = torch.bfloat16) -> Tensor:
    """FP8-18 to FP8-20."""
    check_tensor("qdata", qdata, (torch.float8_e4m3fn,), (2, 3))
    check_tensor("scale", scale, (torch.float32,), (2, 3))
    check_device(qdata, scale)
    check_choice("axis", axis, (-1, -2))
    check_choice("out_dtype", out_dtype, (torch.bfloat16, torch.float32))
    codes = raw(qdata) if axis == -1 else raw(qdata).swapaxes(-1, -2)
    *lead, R, C = codes.shape
    need(C % 16 == 0, "no multiple of 16")
    factors, blocks = raw(scale).view(np.float32), up(C, 128) // 128
    if factors.shape != (*lead, R, blocks):
        need(factors.shape == (*lead, up(R, 128) // 128, blocks), "shape of scale")
        factors = factors[..., np.arange(R) // 128, :]
    out = value(E4M3FN)[codes] * factors[..., np.arange(C) // 128]
    return rounded(np.ascontiguousarray(out if axis == -1 else out.swapaxes(-1, -2)), out_dtype)


# --- LAYOUT: blocked scales


def places(R: int, C: int) -> np.ndarray:
    """LAYOUT-2: the byte of each scale, row by row."""
    r, c, Cp = np.arange(R)[:, None], np.arange(C), up(C, 4)
    place = (r // 128) * 128 * Cp + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return place.reshape(-1)


def blocked_bytes(plain: np.ndarray) -> np.ndarray:
    """LAYOUT-2 to LAYOUT-4."""
    *lead, R, C = plain.shape
    out = np.zeros((*lead, up(R, 128) * up(C, 4)), np.uint8)
    out[..., places(R, C)] = plain.reshape(*lead, R * C)
    return out


def to_blocked(scale: Any) -> Tensor:
    check_tensor("scale", scale, BYTES, (2, 3))
    return tensor(blocked_bytes(raw(scale)), scale.dtype)


def from_blocked(blocked: Any, rows: Any, cols: Any) -> Tensor:
    """LAYOUT-5."""
    check_tensor("blocked", blocked, BYTES, (1, 2))
    check_integer("rows", rows, 0)
    check_integer("cols", cols, 0)
    need(blocked.shape[-1] == up(rows, 128) * up(cols, 4), "size of blocked")
    out = raw(blocked)[..., places(rows, cols)]
    return tensor(out.reshape(*blocked.shape[:-1], rows, cols), blocked.dtype)


def blocked_m_groups(plain: np.ndarray, offs: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """LAYOUT-6 and LAYOUT-7."""
    (R, C), (first, m) = plain.shape, groups(offs)
    start, Cp = starts(m, 128), up(C, 4)
    out = np.zeros((R + 128 * len(m)) * Cp, np.uint8)
    for g, size in enumerate(m):
        tiles = blocked_bytes(plain[first[g] : first[g] + size])
        out[start[g] * Cp : start[g] * Cp + len(tiles)] = tiles
    return out.reshape(R + 128 * len(m), Cp), start


def blocked_k_groups(plain: np.ndarray, offs: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """LAYOUT-8 and LAYOUT-9."""
    (R, C), (first, c) = plain.shape, groups(offs)
    start, Rp = starts(c, 4), up(R, 128)
    out = np.zeros(Rp * (C + 4 * len(c)), np.uint8)
    for g, size in enumerate(c):
        tiles = blocked_bytes(plain[:, first[g] : first[g] + size])
        out[start[g] * Rp : start[g] * Rp + len(tiles)] = tiles
    return out.reshape(Rp, C + 4 * len(c)), start


def _to_blocked_groups(scale: Any, offs: Any, read: Any, along: int, multiple: int, move: Any) -> tuple[Tensor, Tensor]:
    check_tensor("scale", scale, BYTES, (2,))
    check_ends(offs, scale, scale.shape[along], read)
    need(up(scale.shape[along] + multiple * len(offs), multiple) < 2**31, "too many rows or columns")
    out, start = move(raw(scale), offs.tolist())
    return tensor(out, scale.dtype), torch.from_numpy(np.array(start, np.int64))


def to_blocked_m_groups(scale: Any, offs: Any, *, check_offs: Any = False) -> tuple[Tensor, Tensor]:
    return _to_blocked_groups(scale, offs, check_offs, 0, 128, blocked_m_groups)


def to_blocked_k_groups(scale: Any, offs: Any, *, check_offs: Any = False) -> tuple[Tensor, Tensor]:
    return _to_blocked_groups(scale, offs, check_offs, 1, 4, blocked_k_groups)


# --- LAYOUT: token groups


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, np.int32))


def placed(x: np.ndarray, offs: Sequence[int], start: Sequence[int], num_rows: int) -> np.ndarray:
    """LAYOUT-11."""
    out = np.zeros((num_rows, x.shape[1]), x.dtype)
    for first, m, begin in zip(*groups(offs), start, strict=True):
        i, stop = max(0, -begin), min(m, num_rows - begin)
        if i < stop:
            out[begin + i : begin + stop] = x[first + i : first + stop]
    return out


def padded_groups(x: np.ndarray, offs: Sequence[int], alignment: int) -> tuple[np.ndarray, list[int], list[int]]:
    """LAYOUT-12 and LAYOUT-13: the padded matrix, `start` and `end`."""
    _, m = groups(offs)
    start = starts(m, alignment)[:-1]
    end = [begin + up(size, alignment) for begin, size in zip(start, m, strict=True)]
    return placed(x, offs, start, up(len(x) + len(m) * alignment, alignment)), start, end


def check_rows(name: str, t: Any) -> None:
    """LAYOUT-10."""
    need(isinstance(t, Tensor), f"{name} is no tensor")
    need(t.layout == torch.strided, f"{name} is sparse")
    need(t.dtype.itemsize in INTEGERS and not t.is_complex(), f"dtype of {name}")
    need(t.ndim == 2, f"dimensions of {name}")


def check_places(x: Any, offs: Any, start: Any, num: Any, rows: int, read: Any) -> None:
    check_integer("number of rows", num, 0)
    need(num < 2**31, "too many rows")
    check_ends(offs, x, rows, read)
    check_tensor("start", start, (torch.int32,), (1,))
    check_device(x, start)
    need(start.shape == offs.shape, "start and offs differ in size")


def place_token_groups(x: Any, offs: Any, start: Any, num_rows: Any, *, check_offs: Any = False) -> Tensor:
    check_rows("x", x)
    check_places(x, offs, start, num_rows, x.shape[0], check_offs)
    return tensor(placed(raw(x), offs.tolist(), start.tolist(), num_rows), x.dtype)


def pad_token_groups(x: Any, offs: Any, alignment: Any, *, check_offs: Any = False) -> tuple[Tensor, Tensor, Tensor]:
    check_rows("x", x)
    check_ends(offs, x, x.shape[0], check_offs)
    check_integer("alignment", alignment, 1)
    need(up(x.shape[0] + len(offs) * alignment, alignment) < 2**31, "too many rows")
    padded, start, end = padded_groups(raw(x), offs.tolist(), alignment)
    return tensor(padded, x.dtype), int32(start), int32(end)


def unpad_token_groups(padded: Any, offs: Any, start: Any, num_tokens: Any, *, check_offs: Any = False) -> Tensor:
    """LAYOUT-15."""
    check_rows("padded", padded)
    check_places(padded, offs, start, num_tokens, num_tokens, check_offs)
    x = raw(padded)
    out = np.zeros((num_tokens, x.shape[1]), x.dtype)
    for first, m, begin in zip(*groups(offs.tolist()), start.tolist(), strict=True):
        i, stop = max(0, -begin), min(m, len(x) - begin)
        if i < stop:
            out[first + i : first + stop] = x[begin + i : begin + stop]
    return tensor(out, padded.dtype)


# --- LAYOUT: layouts of other libraries. name -> Rp, Cp, the places of a matrix, the place of scale (r, c)

OTHER_LAYOUTS: dict[str, Any] = {
    "blocked_5d": (128, 4, lambda R, C, Rp, Cp: (Rp * Cp, places(R, C))),
    "te_rowwise": (128, 4, lambda R, C, Rp, Cp: (Rp * Cp, _grid(R, C, Cp, 1))),
    "te_columnwise": (128, 4, lambda R, C, Rp, Cp: (Rp * Cp, _grid(R, C, 1, Rp))),
    "mn_major": (1, 1, lambda R, C, Rp, Cp: (R * C, _grid(R, C, 1, R))),
    "mn_major_tma_aligned": (4, 1, lambda R, C, Rp, Cp: (Rp * C, _grid(R, C, 1, Rp))),
    "deepgemm_packed": (4, 4, lambda R, C, Rp, Cp: (Rp * Cp, _words(R, C, Rp))),
    "cublas_128x128": (1, 4, lambda R, C, Rp, Cp: (R * Cp, _grid(R, C, Cp, 1))),
}  # fmt: skip


def _grid(R: int, C: int, of_row: int, of_column: int) -> np.ndarray:
    return (of_row * np.arange(R)[:, None] + of_column * np.arange(C)).reshape(-1)


def _words(R: int, C: int, Rp: int) -> np.ndarray:
    r, c = np.arange(R)[:, None], np.arange(C)
    return ((c // 4) * 4 * Rp + 4 * r + c % 4).reshape(-1)


def other_layout(plain: np.ndarray, name: str) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """LAYOUT-16 to LAYOUT-18: memory as numbers, and the shape and strides of the tensor in it.

    plain: `(R, C)` or `(E, R, C)`, of uint8 for e8m0fnu and of uint32, the bits, for fp32.
    """
    *lead, R, C = plain.shape
    row, col, find = OTHER_LAYOUTS[name]
    Rp, Cp = up(R, row), up(C, col)
    size, place = find(R, C, Rp, Cp)
    memory = np.zeros((*lead, size), plain.dtype)
    memory[..., place] = plain.reshape(*lead, R * C)
    if name == "deepgemm_packed":
        memory, size = memory.view(np.uint32), size // 4
    shape: tuple[int, ...]
    shape, strides = {
        "blocked_5d": ((Rp // 128, Cp // 4, 32, 4, 4), (Cp // 4 * 512, 512, 16, 4, 1)),
        "te_rowwise": ((Rp, Cp), (Cp, 1)),
        "te_columnwise": ((Cp, Rp), (Rp, 1)),
        "mn_major": ((R, C), (1, R)),
        "mn_major_tma_aligned": ((R, C), (1, Rp)),
        "deepgemm_packed": ((R, Cp // 4), (1, Rp)),
        "cublas_128x128": ((R, Cp), (Cp, 1)),
    }[name]
    return memory.reshape(-1), (*lead, *shape), (*([size] if lead else []), *strides)


def fp32_of(byte: np.ndarray) -> np.ndarray:
    """LAYOUT-19: bytes of e8m0fnu as fp32."""
    return np.where(byte == 255, NAN, power(byte.astype(np.int32) - 127))


def e8m0_of(scale: np.ndarray) -> np.ndarray:
    """LAYOUT-19: fp32 as bytes of e8m0fnu."""
    bits = scale.view(np.uint32)
    field, mantissa = bits >> 23, bits % 2**23
    nan, normal = np.isnan(scale), (field > 0) & (field < 255) & (mantissa == 0)
    need(bool((nan | normal | (bits == 0x400000)).all()), "no power of two")
    return np.where(nan, 255, np.where(normal, field, 0)).astype(np.uint8)
