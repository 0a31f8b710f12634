"""Gates, ups and biases for the cases of the clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.groups import arranged_groups, groups_fit, offsets
from mxspec.cases.common.impossible import PADDED_GROUPS
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import REPEATED, fits, made, shape_of
from mxspec.cases.common.rowcol_groups import ALSO, BEYOND, dimensions, possible
from mxspec.cases.common.space import Space
from mxspec.cases.common.swiglu import with_subnormal
from mxspec.cases.common.tensors import BEGINS, STRIDES, VALUES
from mxspec.cases.common.token_groups import SIZES, far_apart, offs_of
from mxspec.cases.fp8_quantize_1x128 import tokens_of
from mxspec.formats import FP8_SIZE_MULTIPLE
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.spec import Case, normal, random_bits, random_normal

OF_H = ("gate_up", "bias")
OF_GRADIENT = ("gate_up", "bias", "dh")


def operands(M: int, columns: int, sizes: list[int], names: tuple[str, ...] = OF_GRADIENT) -> tuple[Tensor, ...]:
    """gate_up, bias, dh and offs: gates between -12 and 12, ups of many sizes, and biases around 1."""
    gate_up = random_normal(M, columns)
    gate_up[:, ::2] = (normal(M, columns // 2, seed=7) * 4.0).bfloat16()
    bias = normal(len(sizes), columns, seed=5).bfloat16()
    of = {"gate_up": gate_up, "bias": bias, "dh": random_normal(M, columns // 2, seed=3)}
    return *(of[name] for name in names), offs_of(sizes)


def no_bias(gate_up: Tensor, dh: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """All rows in two groups, with biases of -0."""
    M = len(gate_up)
    of = {"gate_up": gate_up, "bias": -gate_up.new_zeros(2, gate_up.shape[1]), "dh": dh}
    return *(of[name] for name in names), offs_of([M // 3, M - M // 3])


def every_gate(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """512 rows: each bit pattern of bfloat16 as a gate, beside an up between 1 and 2 and a dh between 1 and 2."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(128, 512).mT
    up = (1 + torch.arange(512)[:, None] * torch.arange(1, 129) % 128 / 128).bfloat16()
    dh = (1 + torch.arange(512)[:, None] * torch.arange(3, 131) % 128 / 128).bfloat16()
    return no_bias(torch.stack([gate, up], -1).flatten(1), dh, names)


def every_up(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """512 rows: each bit pattern of bfloat16 as an up, beside a gate between 1 and 2 and a dh between 1 and 2."""
    gate_up = every_gate(OF_H)[0]
    dh = (1 + torch.arange(512)[:, None] * torch.arange(3, 131) % 128 / 128).bfloat16()
    return no_bias(gate_up.unflatten(1, (-1, 2)).flip(-1).flatten(1), dh, names)


def limits(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """4 rows: gates and ups at the limits and one number beyond, and sums that reach a limit by their rounding."""
    numbers = torch.tensor([6.96875, 7.0, 7.03125, -6.96875, -7.0, -7.03125, torch.inf, -3.0]).bfloat16()
    gate_up = torch.stack([numbers[:, None].expand(8, 8), numbers.expand(8, 8)], -1).reshape(1, 128)
    gate_up = torch.cat([gate_up, gate_up, gate_up, -gate_up])
    M = 4
    bias = torch.stack([torch.full((128,), v) for v in (0.0, 0.015625, -0.015625)]).bfloat16()
    of = {"gate_up": gate_up, "bias": bias, "dh": random_normal(M, 64, seed=3)}
    return *(of[name] for name in names), offs_of([1, 1, 1])


def kinds(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """22 groups of one row: every kind of number beside every other kind, and every kind as a bias."""
    some = (torch.nan, torch.inf, 0.0, 2.0**-133, 2.0**-126, 2.0**-64, 1.0, 7.0, 51.25, 51.5, 3.3895e38)
    numbers = torch.tensor([sign * kind for kind in some for sign in (1.0, -1.0)]).bfloat16()
    pairs = torch.stack(torch.meshgrid(numbers, numbers, indexing="ij"), -1).reshape(1, -1)
    gate_up = torch.cat([pairs, pairs.new_zeros(1, -pairs.shape[1] % 32)], 1).expand(22, -1)
    of = {
        "gate_up": gate_up,
        "bias": numbers[:, None].repeat(1, gate_up.shape[1]),
        "dh": numbers.flip(0)[:, None].repeat(1, gate_up.shape[1] // 2),
    }
    return *(of[name] for name in names), offs_of([1] * 22)


def _bits(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    of = {
        "gate_up": random_bits(200, 512, dtype=torch.bfloat16, seed=1),
        "bias": random_bits(2, 512, dtype=torch.bfloat16, seed=2),
        "dh": random_bits(200, 256, dtype=torch.bfloat16, seed=3),
    }
    return *(of[name] for name in names), offs_of([140, 50])


def _of_width(names: tuple[str, ...], width: int) -> tuple[Tensor, ...]:
    M, offs = tokens_of(width)
    return operands(M, 2 * width, offs.diff(prepend=offs.new_zeros(1)).tolist(), names)


def _changed(names: tuple[str, ...], M: int, columns: int, sizes: list[int], change: Any) -> tuple[Tensor, ...]:
    *tensors, offs = operands(M, columns, sizes, names)
    return *(change(t) for t in tensors), offs


def _far_apart(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    *_, offs = operands(140, 256, [100, 39])
    of = {"gate_up": far_apart(140, 256), "bias": far_apart(2, 256), "dh": far_apart(140, 128)}
    return *(of[name] for name in names), offs


def _large(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    M = 2**20 + 256
    of = {
        "gate_up": random_normal(1, 4096).expand(M, 4096),
        "bias": random_normal(1, 4096, seed=1),
        "dh": random_normal(1, 2048, seed=2).expand(M, 2048),
    }
    return *(of[name] for name in names), offs_of([M])


def valid(names: tuple[str, ...]) -> Iterator[Case]:
    """The valid cases of both ops, written by hand."""
    for name, (sizes, rest, edge) in SIZES.items():
        if len(sizes) < 300:
            flags = frozenset({"edge"} if edge else ())
            yield Case(name, partial(operands, sum(sizes) + rest, 256, sizes, names), flags=flags)
    yield Case("ragged against every tile", partial(operands, 560, 256, [129, 300, 128], names))
    yield Case("power-of-two scales", partial(operands, 140, 256, [130, 0, 7], names), {"scale_format": "pow2"})
    yield Case("checked", partial(operands, 41, 256, [30, 10], names), {"check_offs": True})
    yield Case("not checked", partial(operands, 41, 256, [30, 10], names), {"check_offs": False})
    yield Case("every gate", partial(every_gate, names), flags={"edge"})
    yield Case("every up", partial(every_up, names), flags={"edge"})
    yield Case("at the limits", partial(limits, names), flags={"edge"})
    yield Case("every kind of number", partial(kinds, names), flags={"edge"})
    for scale_format in SCALE_FORMATS:
        kw = {"scale_format": scale_format}
        yield Case(f"random bit patterns, {scale_format}", partial(_bits, names), kw, flags={"edge"})
    yield Case("no columns", partial(operands, 139, 0, [130, 9], names), flags={"edge"})
    turned = partial(_changed, names, 210, 256, [130, 70], lambda t: t.mT.contiguous().mT)
    yield Case("transposed input", turned)
    second = partial(_changed, names, 139, 256, [130, 9], lambda t: t.repeat_interleave(2, 1)[:, ::2])
    yield Case("every second column", second)
    apart = partial(_changed, names, 139, 256, [130, 9], lambda t: torch.cat([t, t], 1)[:, : t.shape[1]])
    yield Case("rows apart", apart)
    for i, width in enumerate((16, 64, 144, 576, 1440, 2880)):
        yield Case(f"2I = {2 * width}", partial(_of_width, names, width), {"scale_format": SCALE_FORMATS[i % 2]})
    subnormal = partial(_changed, names, 40, 256, [33, 7], with_subnormal)
    yield Case("subnormal values", subnormal, flags={"edge"})
    zeros = partial(_changed, names, 150, 256, [140, 9], lambda t: -torch.zeros_like(t))
    yield Case("zeros", zeros, flags={"edge"})
    yield Case("rows far apart", partial(_far_apart, names), flags={"edge"})
    yield Case("2^31 elements and more", partial(_large, names), flags={"large"})


def refused(names: tuple[str, ...]) -> Iterator[Case]:
    """The refusals of both ops."""
    tensors = dict(zip((*names, "offs"), operands(50, 256, [5, 0, 40], names), strict=True))
    offs, bias = tensors["offs"], tensors["bias"]

    def case(
        name: str, error: type[Exception], match: str, options: dict[str, Any] | None = None, **other: Any
    ) -> Case:
        args = tuple({**tensors, **other}.values())
        return Case(name, lambda: args, options or {}, raises=error, match=match)

    for wide in (16, 240):
        other: dict[str, Any] = {"gate_up": tensors["gate_up"][:, :wide], "bias": bias[:, :wide]}
        yield case(f"2I = {wide}", ValueError, f"2I = {wide} is not a multiple of 32; pad", **other)
    yield case("float32", TypeError, "gate_up has dtype torch.float32", gate_up=tensors["gate_up"].float())
    yield case("3-D", ValueError, "2-D", gate_up=tensors["gate_up"][None])
    yield case("a float32 bias", TypeError, "bias has dtype torch.float32", bias=bias.float())
    yield case("one bias", ValueError, "bias has shape (256,); needs a 2-D", bias=bias[0])
    yield case("a group without a bias", ValueError, "bias has shape (2, 256); needs (3, 256)", bias=bias[:2])
    yield case("a bias of the gate", ValueError, "bias has shape (3, 128); needs (3, 256)", bias=bias[:, ::2])
    yield case("a bias elsewhere", ValueError, "one device", bias=bias.to("meta"))
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield case("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield case("unknown scale format", ValueError, "'ue8m0'", {"scale_format": "ue8m0"})
    yield case("offs that decrease", ValueError, "offs[1] = 5 after 45", {"check_offs": True}, offs=offs.flip(0))
    yield case("offs past M", ValueError, "offs[-1] = 51 is past M = 50", {"check_offs": True}, offs=offs + 6)


_OWN = {"strides": STRIDES, "values": VALUES, "begins": BEGINS, "negated": (False, True)}


def _of(name: str, choice: Choice) -> Choice:
    """The choice of another tensor's strides, values and place, under the names of a matrix."""
    own = {key.removeprefix(f"{name} "): value for key, value in choice.items() if key.startswith(f"{name} ")}
    if name == "bias":
        groups, half = arranged_groups(choice), 1
        rows = {} if groups is None else {"rows": groups}
    else:
        half = 2
        rows = {"rows": choice["rows"]} if "rows" in choice else {}
    cols = {"cols": choice["cols"] // half} if "cols" in choice else {}
    return {"experts": None, "negated": False, "dtype": torch.bfloat16, **rows, **cols, **own}


def _make(names: tuple[str, ...], choice: Choice) -> tuple[Tensor, ...]:
    others = [_of(name, choice) for name in names[1:]]
    tensors = [made(choice, shape_of(choice)), *(made(other, shape_of(other)) for other in others)]
    return *tensors, offsets(choice, choice["rows"])


def _possible(names: tuple[str, ...], choice: Choice) -> bool:
    whole = possible(choice, cols=2 * FP8_SIZE_MULTIPLE) and groups_fit(choice, choice.get("rows"))
    return whole and all(fits(_of(name, choice)) for name in names[1:])


def space(names: tuple[str, ...]) -> Space:
    of_others = {f"{name} {key}": values for name in names[1:] for key, values in _OWN.items()}
    plain = {f"{name} {key}": value for name in names[1:] for key, value in _PLAIN.items()}
    return Space(
        {**dimensions((0, 256, 288, 1280, 4352), (torch.bfloat16,)), **of_others},
        partial(_make, names),
        {"scale_format": SCALE_FORMATS, "check_offs": (False, True)},
        partial(_possible, names),
        [*(part for part in REPEATED if part.get("cols") not in (1, 1056)), *ALSO],
        beyond=[{**plain, **choice} for choice in BEYOND],
    )


_PLAIN = {"strides": "row-major", "values": "finite", "begins": "at 0", "negated": False}
_OF_VALUES = r"(?:strides|begins|sign|values|[+-]?Inf|NaN|-0|subnormal|largest|negative|tie|saturating|block) ?.*"
IMPOSSIBLE = (
    (r"gate_up\.cols = 0 \| bias\." + _OF_VALUES, "the bias is empty too"),
    (r"offs\.groups = 0 \| bias\." + _OF_VALUES, "the bias is empty too"),
    (r"offs\.groups = 1 \| bias\.strides (?:column-major|one row repeated|rows apart)", "one row has no stride"),
    *PADDED_GROUPS,
)
IMPOSSIBLE_OF_GRADIENT = (
    (r"gate_up\.(?:rows|cols) = 0 \| dh\." + _OF_VALUES, "dh is empty too"),
    (r"gate_up\.rows = 1 \| dh\.strides (?:column-major|one row repeated|rows apart)", "one row has no stride"),
    *IMPOSSIBLE,
)
