"""mx_quantize_groups: token groups padded, quantized and their scales laid out for a grouped matmul, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_DTYPES, MX_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._groups import padded_rows
from mxspec.reference._groups_cases import far_apart, grouped, offs_of, random_offs
from mxspec.reference._mx_cases import edge_blocks
from mxspec.reference._numerics import SCALINGS
from mxspec.reference.mx_quantize import SCALE_LAYOUTS, mx_quantize
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups
from mxspec.reference.to_blocked_m_groups import to_blocked_m_groups
from mxspec.spec import Case, Shapes, per_element, random_bits, random_normal, spec, these

ELEM_CHOICES = (*FP8_DTYPES, "e4m3fn", "e5m2")


def check_args(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> None:
    op = "mx_quantize_groups"
    _checks.tensor_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.rank(op, "x", x, (2,))
    _checks.offsets(op, "offs", offs, ("x", x))
    _checks.choice(op, "axis", axis, (-1, -2))
    _checks.positive(op, "pad_to", pad_to)
    if pad_to % 128:
        raise ValueError(f"{op}: pad_to = {pad_to}; needs a multiple of 128, the rows of a tile of scales")
    _checks.choice(op, "elem_dtype", elem_dtype, ELEM_CHOICES, TypeError)
    _checks.choice(op, "scaling", scaling, SCALINGS)
    _checks.choice(op, "scale_layout", scale_layout, SCALE_LAYOUTS)
    if axis == -1:
        _checks.multiple(op, "K", x.shape[1], MX_BLOCK_SIZE)
    rows = padded_rows(x.shape[0], offs.shape[0], pad_to) + 128 * offs.shape[0]
    _checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", x.shape[0])


def cases() -> Iterator[Case]:
    def args(sizes, M, K, dtype=torch.bfloat16):
        return random_normal(M, K, dtype=dtype), offs_of(sizes)

    for axis, (name, sizes, M, _, flags) in product((-1, -2), grouped()):
        if len(sizes) < 300:  # more would be minutes of interpreted padding
            yield Case(f"{name}, axis {axis}", partial(args, sizes, M, 96), {"axis": axis}, flags=flags)
    # Every value of an option meets every value of every other.
    for i, (axis, layout, scaling) in enumerate(product((-1, -2), SCALE_LAYOUTS, SCALINGS)):
        dtype, elem = _checks.FLOAT_DTYPES[i % 3], ("e4m3fn", "e5m2")[(i + i // 4 + i // 8) % 2]
        name = f"random bit patterns, {str(dtype)[6:]}, {elem}, {scaling}, axis {axis}, {layout}"
        bits = partial(lambda dtype: (random_bits(110, 64, dtype=dtype), offs_of([100])), dtype)
        options = {"axis": axis, "scale_layout": layout, "scaling": scaling, "elem_dtype": elem}
        yield Case(name, bits, options)
    for axis, pad_to, layout in product((-1, -2), (128, 384), SCALE_LAYOUTS):
        kw = {"axis": axis, "pad_to": pad_to, "scale_layout": layout}
        yield Case(f"pad_to {pad_to}, axis {axis}, {layout}", partial(args, [140, 1], 150, 160), kw)
    for axis in (-1, -2):
        kw = {"axis": axis}
        turned = lambda: (random_normal(64, 210).mT, offs_of([130, 70]))  # noqa: E731
        yield Case(f"transposed input, axis {axis}", turned, kw)
        strided = lambda: (random_normal(300, 64)[::2], offs_of([130, 9]))  # noqa: E731
        yield Case(f"every second row, axis {axis}", strided, kw)
        edge = lambda: (edge_blocks(), offs_of([edge_blocks().shape[0]]))  # noqa: E731
        yield Case(f"edge blocks, axis {axis}", edge, kw, flags={"edge"})
        far = lambda: (far_apart(140, 64), offs_of([100, 39]))  # noqa: E731
        yield Case(f"rows far apart, axis {axis}", far, kw, flags={"edge"})
        yield Case(f"no columns, axis {axis}", partial(args, [3, 4], 7, 0), kw, flags={"edge"})
        yield Case(f"checked, axis {axis}", partial(args, [30, 10], 41, 64), {"check_offs": True, **kw})
        large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
        yield Case(f"2^31 elements and more, axis {axis}", large, kw, flags={"large"})
    yield Case("odd K, axis -2", partial(args, [30, 200], 230, 333), {"axis": -2}, flags={"edge"})

    x, offs = args([5, 0, 40], 50, 64)

    def refused(name, error, match, x=x, offs=offs, **kwargs):
        return Case(name, these(x, offs), kwargs, raises=error, match=match)

    yield refused("K = 100", ValueError, "K = 100 is not a multiple of block_size 32", torch.zeros(50, 100))
    yield refused("float64", TypeError, "torch.float64", x.double())
    yield refused("3-D", ValueError, "2-D", x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("pad_to 64", ValueError, "pad_to = 64; needs a multiple of 128", pad_to=64)
    yield refused("pad_to 0", ValueError, "pad_to = 0; needs at least 1", pad_to=0)
    yield refused("pad_to 128.0", TypeError, "pad_to = 128.0", pad_to=128.0)
    yield refused("axis 0", ValueError, "axis = 0", axis=0)
    yield refused("unknown scaling", ValueError, "'nearest'", scaling="nearest")
    yield refused("unknown layout", ValueError, "'swizzled'", scale_layout="swizzled")
    yield refused("int8 elements", TypeError, "int8", elem_dtype=torch.int8)
    yield refused("e2m1 elements", TypeError, "float4_e2m1fn_x2; needs one of", elem_dtype=torch.float4_e2m1fn_x2)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, K: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, K, dtype=torch.bfloat16), random_offs(M, 8)  # torchao's table has eight groups

    for M, K in shapes.matrices:
        if M >= 1024 and M * K < 2**30:
            rules = ("rceil", "floor") if M * K >= 2**26 else ("rceil",)  # where a rule's arithmetic could show at all
            for axis, scaling in product((-1, -2), rules):
                name = f"{M}x{K}, G 8, {scaling}, blocked" + (", axis -2" if axis == -2 else "")
                yield Case(name, partial(args, M, K), {"axis": axis, "scaling": scaling})


@spec(cases=cases, check_args=check_args, flops=per_element(2), bench_cases=bench_cases)
def mx_quantize_groups(
    x: Tensor,
    offs: Tensor,
    *,
    axis: int = -1,
    pad_to: int = 128,
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
    scaling: str = "rceil",
    scale_layout: str = "blocked",
    check_offs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to MX as a grouped matmul wants them: padded, with each group's scales tiled by itself.

    Byte for byte `pad_token_groups(x, offs, pad_to)`, then `mx_quantize` along `axis`, then for blocked scales
    `to_blocked_m_groups` under `end` for axis -1, the operand of the forward pass and of dgrad, or
    `to_blocked_k_groups` under `end / 32` for axis -2, an operand of wgrad, whose matmul runs along the tokens.

    Args:
        x: `(M, K)`, the tokens of each group together; bfloat16, float16 or float32; any strides. K is a multiple of
            32 for axis -1.
        offs: `(G,)` int32 on x's device, the exclusive end of each group. Never decreasing, the last at most M; rows
            from there on belong to no group and are dropped.
        axis: -1 for 1x32 blocks along K, -2 for 32x1 blocks along the tokens, padding included.
        pad_to: rows, a multiple of 128.
        elem_dtype, scaling: as for `mx_quantize`.
        scale_layout: `blocked` or `plain`.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order. Without it
            nothing waits; an offs out of order gives bytes that mean nothing, and no access outside x and the results.

    Returns:
        `(qdata, scale, start, end)`. With `R` the multiple of pad_to at or above `M + G*pad_to`: qdata `(R, K)`,
        elem_dtype, contiguous for axis -1 and column-major, strides `(1, R)`, for axis -2. scale: float8_e8m0fnu;
        blocked, `(R + 128*G, Cp)` with `Cp = 4*ceil(K/128)` for axis -1, and `(Kp, R/32 + 4*G)` with
        `Kp = 128*ceil(K/128)` for axis -2, in both of which the bytes of group g begin at `start[g] * Cp`; plain,
        `(R, K/32)` and `(K, R/32)`. start, end: `(G,)` int32, the rows of qdata at which a group begins, and ends with
        its padding. Codes of padding are 0, except beside a NaN or an Inf in a block along the tokens; scale bytes of
        blocks without a token are 0.

    Special values: as for `mx_quantize`. Padding never changes a scale: it is never larger than what stands
        beside it. It is quantized as zeros are, so that a NaN in its block makes it NaN.

    Raises:
        TypeError: the dtype of x or offs, elem_dtype; pad_to is no integer.
        ValueError: a rank, a device, axis, pad_to, scaling, scale_layout, K for axis -1, 2^31 padded rows or more;
            with check_offs, offs.

    Example:
        >>> x = torch.full((3, 32), 2.0)
        >>> qdata, scale, start, end = mx_quantize_groups(x, torch.tensor([1, 3], dtype=torch.int32))
        >>> qdata.shape, scale.shape, start.tolist(), end.tolist()
        (torch.Size([384, 32]), torch.Size([640, 4]), [0, 128], [128, 256])
        >>> qdata[[0, 1, 128, 129, 130], 0].float().tolist()
        [256.0, 0.0, 256.0, 256.0, 0.0]

    Source: OCP MX v1.0, section 6.3; PyTorch, `torch.nn.functional.scaled_grouped_mm`, for what it reads.
    """
    check_args(
        x, offs, axis=axis, pad_to=pad_to, elem_dtype=elem_dtype, scaling=scaling, scale_layout=scale_layout,
        check_offs=check_offs,
    )  # fmt: skip
    padded, start, end = pad_token_groups(x, offs, pad_to)
    qdata, scale = mx_quantize(padded, axis=axis, elem_dtype=elem_dtype, scaling=scaling)
    if scale_layout == "blocked":
        rearrange: Any = to_blocked_m_groups if axis == -1 else to_blocked_k_groups
        scale, _ = rearrange(scale, end if axis == -1 else end // MX_BLOCK_SIZE)
    return qdata, scale, start, end
