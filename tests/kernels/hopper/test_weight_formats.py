"""The PTX that turns codes of weights into bf16, run by a model of its instructions: every code, every scale byte."""

import re

import numpy as np
import pytest
import torch

from mxspec.machine_code.fake_gpu import unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.formats import E2M1
from mxspec.reference.common.numerics import decoded, unpacked
from mxspec.triton_kernels.hopper.weights import formats

CODES, SCALES = (n.ravel().astype(np.uint32) for n in np.meshgrid(np.arange(256), np.arange(256), indexing="ij"))
OTHER = (CODES * 7 + 3) % 256  # the byte beside a byte


def halves(x):
    return (np.asarray(x) & 0xFFFF).astype(np.uint32), (np.asarray(x) >> 16).astype(np.uint32)


def numbers(half):
    """The bf16 numbers of 16 bits, in fp64."""
    return torch.from_numpy(half.astype(np.int32).astype(np.int16)).view(torch.bfloat16).double()


def bits(number):
    return number.float().bfloat16().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)


def by_half(fn, *operands):
    low, high = (fn(*of) for of in zip(*map(halves, np.broadcast_arrays(*operands)), strict=True))
    return low | high << 16


def picked(a, b, places):
    """`prmt`: four bytes of the eight of two words."""
    eight = [(n >> 8 * i) & 0xFF for n in np.broadcast_arrays(a, b) for i in range(4)]
    return sum(eight[int(places) >> 4 * i & 7] << 8 * i for i in range(4))


def product(a, b, c=None):
    exact = numbers(a) * numbers(b)
    return bits(exact if c is None else exact + numbers(c))


MODEL = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": picked,
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[int(table)],
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "min.u16x2": lambda a, b: by_half(np.minimum, a, b),
    "mul.rn.bf16x2": lambda a, b: by_half(product, a, b),
    "fma.rn.bf16x2": lambda a, b, c: by_half(product, a, b, c),
}


def run(text, **registers):
    """The registers after some PTX. `mov` also takes a register apart, or puts two halves together."""
    for line in text.value.split(";"):
        op, _, rest = line.lstrip("{} ").partition(" ")
        if op in ("", ".reg"):
            continue
        names = [name.strip() for name in re.split(r",(?![^{]*})", rest)]
        if names[0].startswith("{"):
            registers.update(zip(re.findall(r"[\w$]+", names[0]), halves(registers[names[1]]), strict=True))
            continue
        if names[1].startswith("{"):
            low, high = (registers[name] for name in re.findall(r"\w+", names[1]))
            registers[names[0]] = low | high << 16
            continue
        values = [registers[n] if n in registers else np.uint32(int(n, 0)) for n in names[1:]]
        registers[names[0]] = values[0] if op == "mov.b32" else MODEL[op](*values).astype(np.uint32)
    return registers


def expected(scales, shift, codes):
    """The low and the high codes of bytes, `(2, n)`, times scales times 2^shift, in fp64."""
    of = decoded(unpacked(torch.from_numpy(codes.astype(np.uint8))[:, None], E2M1), E2M1).double().T
    dtype = torch.float8_e8m0fnu if scales == "e8m0" else torch.float8_e4m3fn
    return of * torch.from_numpy(SCALES.astype(np.uint8)).view(dtype).double() * 2.0**shift


def check(got, expected, scales):
    large = torch.from_numpy(SCALES >= 133) if scales == "e8m0" else torch.zeros(len(SCALES), dtype=torch.bool)
    assert not got[large].isfinite().any()  # so the sums say that they need the exact pass
    got, expected = got[~large], expected[~large]
    assert torch.equal(got.isnan(), expected.isnan())
    got, expected = got[~got.isnan()], expected[~expected.isnan()]
    assert len(got)
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("scales", "shift"), [("e8m0", -4), ("e4m3", -7)])
def test_every_code_under_every_scale_byte_is_its_weight(scales, shift, place):
    """`place` is that of the scale byte in its word. The bytes beside it are others."""
    rest = 0x5A3C9681 & ~(0xFF << 8 * place) & 0xFFFFFFFF
    word = SCALES << 8 * place | np.uint32(rest)
    factors = formats._OF_E8M0 if scales == "e8m0" else formats._OF_E4M3
    factor = run(factors.value[place % 2], **{"$1": word})["$0"]
    found = run(formats._EVEN_FIRST.value[place // 2], **{"$4": CODES | OTHER << 8, "$5": factor})
    for i, byte in enumerate((CODES, OTHER)):
        for number, code in zip(("$0", "$2"), expected(scales, shift, byte), strict=True):
            check(numbers(found[f"${int(number[1]) + i}"]), code, scales)
    found = run(formats._IN_ORDER.value[place // 2], **{"$2": CODES, "$3": factor})
    for number, code in zip(("$0", "$1"), expected(scales, shift, CODES), strict=True):
        check(numbers(found[number]), code, scales)
