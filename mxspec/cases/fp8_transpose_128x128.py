"""The cases of fp8_transpose_128x128: calls written by hand, calls worth timing, and the dimensions of a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.codes import SCALE_STRIDES, SCALES, fp32_scale, scale_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import WHOLE_BOTH_WAYS, fits, shape_of
from mxspec.cases.common.requantizers import codes_far_apart
from mxspec.cases.common.space import Space
from mxspec.cases.common.tensors import BEGINS, EXPERT_STRIDES, STRIDES, laid
from mxspec.cases.fp8_dequantize import EXPERTS, room
from mxspec.cases.fp8_quantize_1x128 import TAILS
from mxspec.cases.mx_dequantize import SCALE_IMPOSSIBLE
from mxspec.formats import FP8_BLOCK_SIZE, FP8_SIZE_MULTIPLE
from mxspec.reference.fp8_quantize_128x128 import fp8_quantize_128x128
from mxspec.spec import Case, Shapes, random_bits, random_normal, these

E4M3 = torch.float8_e4m3fn


def cases() -> Iterator[Case]:
    def args(*shape: int) -> tuple[Tensor, Tensor]:
        return random_bits(*shape, dtype=E4M3), scales(*shape)

    for shape in [(272, 256), (128, 128), (256, 384), (128, 256), (576, 128), (2, 144, 208), (3, 256, 128)]:
        yield Case("x".join(map(str, shape)), partial(args, *shape))
    for shape in [(1, 128), (33, 16), (127, 144), (300, 256), (130, 2880), (3, 133, 128)]:  # N is no multiple of 16
        yield Case("x".join(map(str, shape)), partial(args, *shape), flags={"edge"})
    for K in TAILS:
        yield Case(f"144x{K}", partial(args, 144, K))

    def far_apart(rows: int, apart: int) -> tuple[Tensor, Tensor]:
        return codes_far_apart(rows, 64, apart), scales(rows, 64)

    def quantized(*shape: int, turned: bool = False) -> tuple[Tensor, Tensor]:
        w = random_normal(*shape)
        codes, scale = fp8_quantize_128x128(w.mT if turned else w)
        return (codes.mT, scale.mT) if turned else (codes, scale)

    yield Case("as quantized", partial(quantized, 2, 272, 256))
    yield Case("views of the transpose", partial(quantized, 2, 272, 256, turned=True))
    odd = these(random_bits(256, 250, dtype=E4M3).mT, scales(256, 250).mT)
    yield Case("views of the transpose, N = 250", odd, flags={"edge"})
    yield Case("some experts of a message", _in_a_message)
    yield Case("every second row", lambda: (random_bits(512, 256, dtype=E4M3)[::2], scales(512, 256)[::2]))
    yield Case("every second column", lambda: (random_bits(256, 512, dtype=E4M3)[:, ::2], scales(256, 256)))
    for rows, apart in ((144, 24), (16, 28)):  # offsets pass 2^31 from row 128 on, and from row 8 on
        yield Case(f"rows 2^{apart} apart", partial(far_apart, rows, 2**apart), flags={"edge"})
    every = torch.arange(256).to(torch.uint8).repeat(256, 1)
    every = (every + torch.arange(256).to(torch.uint8)[:, None]).view(E4M3)
    words = [0x7FC00000, 0xFFFFFFFF, 0x80000000, 0x00000001]  # two NaN, -0 and a subnormal number
    special = torch.tensor(words).to(torch.int32).view(torch.float32).view(2, 2)
    yield Case("every code at every place of 16", these(every, special), flags={"edge"})
    yield Case("no rows", these(*args(0, 256)), flags={"edge"})
    yield Case("no columns", these(*args(256, 0)), flags={"edge"})
    yield Case("no experts", these(*args(0, 130, 128)), flags={"edge"})
    large = these(random_bits(1, 2048, dtype=E4M3).expand(2**20 + 144, 2048), scales(1, 2048).expand(2**13 + 2, 16))
    yield Case("2^31 elements and more", large, flags={"large"})

    q, s = args(300, 256)

    def refused(name, error, match, q=q, s=s):
        return Case(name, these(q, s), raises=error, match=match)

    yield refused("e5m2 codes", TypeError, "qdata has dtype torch.float8_e5m2; needs", q.view(torch.float8_e5m2))
    yield refused("bytes", TypeError, "qdata has dtype torch.uint8; needs torch.float8_e4m3fn", q.view(torch.uint8))
    yield refused("bf16 scale", TypeError, "scale has dtype torch.bfloat16; needs torch.float32", s=s.bfloat16())
    yield refused("1-D", ValueError, "2-D or 3-D", q[0], s[0])
    yield refused("4-D", ValueError, "2-D or 3-D", q[None, None], s[None, None])
    yield refused("K = 100", ValueError, "K = 100 is not a multiple of 16; pad", q[:, :100], s[:, :1])
    yield refused("K = 8", ValueError, "K = 8 is not a multiple of 16; pad", q[:, :8], s[:, :1])
    of_rows = s.repeat_interleave(100, 0)
    yield refused("scales of 1x128", ValueError, "scale has shape (300, 2); needs (3, 2) (128x128", s=of_rows)
    yield refused("scale of the transpose", ValueError, "scale has shape (2, 3); needs (3, 2)", s=s.mT)
    yield refused("K = 144 with one scale", ValueError, "needs (3, 2) (128x128", q[:, :144], s[:, :1])
    yield refused("scale without experts", ValueError, "needs (1, 3, 2) (128x128", q[None])
    yield refused("scale elsewhere", ValueError, "needs one device", s=s.to("meta"))


def scales(*shape: int) -> Tensor:
    """fp32 scales of the blocks of codes of a shape."""
    *lead, N, K = shape
    return random_normal(*lead, -(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE), dtype=torch.float32, seed=1)


def _in_a_message() -> tuple[Tensor, Tensor]:
    """Two experts of four, whose codes and scales lie side by side in the memory of each expert."""
    N, K, count = 256, 144, 256 * 144
    message = random_bits(4, count + 16, dtype=torch.uint8)
    message[:, count:] = scales(4, N, K).view(torch.uint8).view(4, 16)
    mine = message[1:3]
    return mine[:, :count].view(E4M3).unflatten(1, (N, K)), mine[:, count:].view(torch.float32).unflatten(1, (2, 2))


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def operands(*shape: int) -> tuple[Tensor, Tensor]:
        *lead, N, K = shape
        codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(E4M3)
        return codes, torch.rand(*lead, -(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE))

    for shape in (*dict.fromkeys((N, K) for _, N, K in shapes.linear), *shapes.experts):
        yield Case("x".join(map(str, shape)), partial(operands, *shape))


def _scale_shape(choice: Choice) -> tuple[int, ...] | None:
    if not {"rows", "cols", "experts"} <= choice.keys():
        return None
    *lead, N, K = shape_of(choice)
    return (*lead, -(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE))


def _possible(choice: Choice) -> bool:
    shape = _scale_shape(choice)
    apart = "experts apart" in (choice.get("strides"), choice.get("scale strides"))
    if not fits(choice, 1, FP8_SIZE_MULTIPLE) or (apart and choice.get("rows") == 1):
        return False
    return scale_fits(choice, shape) and (shape is None or room(choice, shape))


def _make(choice: Choice) -> tuple[Tensor, Tensor]:
    shape = _scale_shape(choice)
    assert shape is not None
    codes = random_bits(*shape_of(choice), dtype=E4M3)
    return laid(codes, choice["strides"], choice["begins"]), fp32_scale(shape, choice)


DIMENSIONS: dict[str, Any] = {
    "rows": (0, 1, 144, 161, 1152, 4224),
    "cols": (0, 16, 144, 384, 1152, 4224),
    "experts": EXPERTS,
    "strides": (*STRIDES, *EXPERT_STRIDES, "experts apart"),
    "begins": BEGINS,
    **SCALES,
    "scale strides": (*SCALE_STRIDES, "experts apart"),
}
_PLAIN = {"scale values": "near 1", "scale strides": "row-major", "scale begins": "at 0"}
BEYOND = [{**choice, **_PLAIN} for choice in WHOLE_BOTH_WAYS]
SPACE = Space(DIMENSIONS, _make, {}, _possible, beyond=BEYOND)
IMPOSSIBLE = SCALE_IMPOSSIBLE
MOVES_BYTES = True
