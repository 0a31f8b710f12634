"""The cases of nvfp4_fake_quantize_rowcol_groups: calls written by hand, calls worth timing, and dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.cases.common.blocks import every_exponent
from mxspec.cases.common.groups import ARRANGED, BEYOND, GROUPS, groups_fit, offsets, padded_fits
from mxspec.cases.common.pairwise import Choice
from mxspec.cases.common.quantizers import MATRIX, REPEATED, fits, made, shape_of
from mxspec.cases.common.space import Space
from mxspec.cases.common.token_groups import far_apart, grouped, offs_of, random_offs
from mxspec.cases.nvfp4_quantize import codes_and_ties, scales_and_ties, ties_under_scales
from mxspec.formats import E4M3FN
from mxspec.reference.common import checks
from mxspec.reference.hadamard_16 import SIGNS
from mxspec.spec import Case, Shapes, normal, random_bits, random_normal, these

EDGE = {"edge"}
MASKS = (None, SIGNS, 0)  # None: signs is not given
STATES = {  # seed and offset, each of 64 bits
    "none": None,
    "small": (7, 0),
    "large": (-0x123456789ABCDEF0, 0x1FFFFFFFE),  # the offset of the columns changes its high word
    "last offset": (2**63 - 1, 2**63 - 1),  # the offset of the columns wraps around
}


def state_of(name: str) -> Tensor | None:
    return None if STATES[name] is None else torch.tensor(STATES[name])


def _said(signs: int | None) -> str:
    return "none" if signs is None else f"{signs:#x}"


def _given(signs: int | None) -> dict[str, Any]:
    return {} if signs is None else {"signs": signs}


def cases() -> Iterator[Case]:
    def args(sizes: list[int], M: int, K: int, dtype: torch.dtype = torch.bfloat16, state: str = "none") -> Any:
        return random_normal(M, K, dtype=dtype), offs_of(sizes), *([] if state == "none" else [state_of(state)])

    for i, (name, sizes, M, _, flags) in enumerate(grouped()):
        if len(sizes) < 300:  # more groups would take minutes in an interpreter
            kw: dict[str, Any] = _given(MASKS[i % 3])
            yield Case(name, partial(args, sizes, M, 80, state=("none", "small")[i % 2]), kw, flags=flags)
    for dtype, signs, state in product(checks.FLOAT_DTYPES, MASKS, STATES):
        name = f"{str(dtype)[6:]}, signs {_said(signs)}, random {state}"
        yield Case(f"33, 0 and 67 tokens, {name}", partial(args, [33, 0, 67], 110, 64, dtype, state), _given(signs))
    for dtype, signs in product(checks.FLOAT_DTYPES, (None, SIGNS)):
        bits = partial(lambda dtype: (random_bits(3 * 16, 48, dtype=dtype), offs_of([16, 0, 9, 23])), dtype)
        yield Case(f"random bit patterns, {str(dtype)[6:]}, signs {_said(signs)}", bits, _given(signs), flags=EDGE)
        for number in (torch.nan, torch.inf, -torch.inf):
            x = random_normal(40, 48, dtype=dtype)
            x[21, 17] = number
            name = f"{number} in a group, {str(dtype)[6:]}, signs {_said(signs)}"
            yield Case(name, these(x, offs_of([20, 5, 15])), _given(signs), flags=EDGE)
    for state in STATES:
        more = () if state == "none" else (state_of(state),)

        def alone(x: Tensor, more: tuple[Any, ...] = more) -> Any:
            """One group, whose largest magnitude is 2688, so that its tensor scale is 1."""
            x = torch.cat([x, torch.zeros(len(x), -x.shape[1] % 16)], 1)
            return these(torch.cat([torch.full((1, x.shape[1]), 2688.0), x]), offs_of([len(x) + 1]), *more)

        yield Case(f"every code and tie, random {state}", alone(codes_and_ties()), flags=EDGE)
        yield Case(f"just below each 512th, random {state}", alone(_below_each_512th()), flags=EDGE)
        yield Case(f"every scale and tie, random {state}", alone(scales_and_ties()), flags=EDGE)
        yield Case(f"ties of codes under every scale, random {state}", alone(ties_under_scales()), flags=EDGE)
        exponents = lambda more=more: (every_exponent(E4M3FN)[:250], offs_of([100, 55, 95]), *more)  # noqa: E731
        yield Case(f"every exponent, random {state}", exponents, flags=EDGE)
        yield Case(f"every exponent, transformed, random {state}", exponents, {"signs": SIGNS}, flags=EDGE)
    for shift in (-149, -140, -126, -117, -105, -60, 60, 120):
        x = (normal(70, 64) * 2.0 ** (shift // 2) * 2.0 ** (shift - shift // 2)).clamp(-torch.finfo(torch.float32).max)
        for signs in (None, SIGNS):
            name = f"magnitudes near 2^{shift}, signs {_said(signs)}"
            yield Case(name, these(x, offs_of([40, 30]), torch.tensor([3, 5])), _given(signs), flags=EDGE)
    overflow = these(torch.full((20, 32), 60000.0, dtype=torch.float16), offs_of([18, 2]))
    yield Case("a transform past float16", overflow, {"signs": 0}, flags=EDGE)
    cancel = these(torch.cat([torch.full((15, 16), 2.0**-24), torch.full((17, 16), 1.0)]), offs_of([32]))
    yield Case("the order of the sums of a transform", cancel, {"signs": SIGNS}, flags=EDGE)
    yield Case("one element of a block", lambda: (_unit(), offs_of([17, 16])), {"signs": SIGNS})
    for sizes in ([15], [16], [17], [64, 65], [1] * 33, [127, 128, 129]):
        name = f"groups of {sizes[0]} and more, {len(sizes)} groups"
        yield Case(name, partial(args, sizes, sum(sizes) + 2, 96, state="small"), {"signs": SIGNS})
    yield Case("zeros of both signs", these(torch.where(normal(70, 64) < 0, -0.0, 0.0), offs_of([40, 9])), flags=EDGE)
    yield Case("zeros, transformed", lambda: (-torch.zeros(70, 64), offs_of([40, 9])), {"signs": SIGNS}, flags=EDGE)
    for signs in (None, SIGNS):
        kw = _given(signs)
        yield Case(f"no columns, signs {_said(signs)}", partial(args, [3, 4], 7, 0), kw, flags=EDGE)
        yield Case(f"one block of columns, signs {_said(signs)}", partial(args, [3, 40], 43, 16), kw, flags=EDGE)
        yield Case(
            f"transposed input, signs {_said(signs)}", lambda: (random_normal(64, 210).mT, offs_of([130, 70])), kw
        )
        yield Case(
            f"every second row, signs {_said(signs)}", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])), kw
        )
        yield Case(
            f"every second column, signs {_said(signs)}", lambda: (random_normal(70, 128)[:, ::2], offs_of([9])), kw
        )
        yield Case(
            f"rows far apart, signs {_said(signs)}", lambda: (far_apart(140, 64), offs_of([100, 39])), kw, flags=EDGE
        )
    negated = lambda: (torch.complex(normal(40, 64), normal(40, 64, seed=1)).conj().imag, offs_of([17, 20]))  # noqa: E731
    yield Case("negated view", negated, {"signs": SIGNS}, flags=EDGE)
    yield Case("checked", partial(args, [30, 10], 41, 64), {"check_offs": True})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, {"signs": SIGNS}, flags={"large"})

    x, offs = args([5, 0, 40], 50, 64)
    seed = torch.tensor([1, 2])

    def refused(name: str, error: type[Exception], match: str, *args: Any, **kwargs: Any) -> Case:
        return Case(name, these(*(args or (x, offs))), kwargs, raises=error, match=match)

    yield refused("K = 100", ValueError, "K = 100 is not a multiple of 16, the block size", torch.zeros(50, 100), offs)
    yield refused("float64", TypeError, "torch.float64", x.double(), offs)
    yield refused("3-D", ValueError, "2-D", x[None], offs)
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", x, offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", x, offs[None])
    yield refused("offs elsewhere", ValueError, "one device", x, offs.to("meta"))
    yield refused("random bytes", TypeError, "random has dtype torch.uint8", x, offs, seed.to(torch.uint8))
    yield refused("a seed alone", ValueError, "random has shape (1,); needs (2,)", x, offs, seed[:1])
    yield refused("random elsewhere", ValueError, "one device", x, offs, seed.to("meta"))
    yield refused("signs of 17 bits", ValueError, "signs = 0x10000; needs a mask of 16 bits", signs=0x10000)
    yield refused("negative signs", ValueError, "signs = -0x1; needs a mask of 16 bits", signs=-1)
    yield refused("signs a float", TypeError, "signs = 1.0; needs an integer", signs=1.0)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", x, offs.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", x, offs + 6, check_offs=True)


def _below_each_512th() -> Tensor:
    """`(272, 16)` fp32, in blocks with the scale 1: the number just below each k / 512.

    These numbers are below 1/2. Some random bytes are too small by 1 to round them up.
    """
    k = torch.arange(4080) % 255 + 1
    below = (k / 512).nextafter(torch.zeros(1)).reshape(272, 15)
    return torch.cat([torch.full((272, 1), 6.0), below], 1)


def _unit() -> Tensor:
    """In each column, one element of each block of 16 tokens is not zero."""
    x = torch.zeros(33, 32)
    x[torch.arange(32) % 16, torch.arange(32)] = 1.0
    x[17 + torch.arange(32) % 16, torch.arange(32)] = torch.arange(1.0, 33.0)
    return x


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int, G: int, random: bool) -> tuple[Tensor, ...]:
        x = torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, G)
        return (*x, torch.tensor([1, 2])) if random else x

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            for name, random, signs in (
                ("", False, None),
                (", transformed", False, SIGNS),
                (", transformed, stochastic", True, SIGNS),
            ):
                yield Case(f"{M}x{K}, G 8{name}", partial(args, M, K, 8, random), _given(signs))


def _make(choice: Choice) -> tuple[Any, ...]:
    made_of = made(choice, shape_of(choice)), offsets(choice, choice["rows"])
    state = state_of(choice["random"])
    if state is None:
        return made_of
    if choice["random strides"] == "apart":
        state = torch.stack([state, torch.full_like(state, -1)], -1).flatten()[::2]
    return *made_of, state


def _possible(choice: Choice) -> bool:
    arranged = groups_fit(choice, choice.get("rows")) and padded_fits(choice, "rows", "cols", 16)
    if choice.get("random") == "none" and choice.get("random strides") not in (None, "none"):
        return False
    if choice.get("random", "none") != "none" and choice.get("random strides") == "none":
        return False
    return arranged and fits(choice, 1, 16)


def _blind(choice: Choice) -> bool:
    """A NaN makes every value of its group the same."""
    return choice.get("values") in ("special", "special, Inf first", "bits")


SPACE = Space(
    {
        "rows": MATRIX["rows"],
        "cols": MATRIX["cols"],
        **GROUPS,
        **MATRIX,
        "random": tuple(STATES),
        "random strides": ("none", "dense", "apart"),
    },
    _make,
    {"signs": (SIGNS, 0), "check_offs": (False, True)},
    _possible,
    [*(part for part in REPEATED if part.get("cols") != 1), *ARRANGED],
    _blind,
    implied=("none",),
    beyond=[{**choice, "random": "small", "random strides": "dense"} for choice in BEYOND if choice.get("cols") != 1],
)
TOKENS = "x.rows"
IMPOSSIBLE = (
    (r"random not given \| random\..*", "there is no seed"),
    (r"offs\.groups > 256 \| x\.cols > 4096", "more than 10 million elements once groups are padded"),
)
