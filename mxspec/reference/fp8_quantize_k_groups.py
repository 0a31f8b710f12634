"""fp8_quantize_k_groups: token groups padded and quantized along the tokens, each group a matrix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._fp8_numerics import SCALE_FORMATS
from mxspec.reference._groups import first_tokens, flat_places, padded_rows
from mxspec.reference._groups_cases import far_apart, grouped, offs_of, random_offs
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.spec import Case, Shapes, per_element, random_bits, random_normal, spec, these


def check_args(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> None:
    op = "fp8_quantize_k_groups"
    _checks.tensor_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.rank(op, "x", x, (2,))
    _checks.offsets(op, "offs", offs, ("x", x))
    _checks.choice(op, "scale_format", scale_format, SCALE_FORMATS)
    _checks.eps(op, eps)
    rows = padded_rows(x.shape[0], offs.shape[0], FP8_BLOCK_SIZE)
    _checks.fits_int32(op, f"the padded rows of {offs.shape[0]} groups", rows)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", x.shape[0])


def cases() -> Iterator[Case]:
    def args(sizes, M, D, dtype=torch.bfloat16):
        return random_normal(M, D, dtype=dtype), offs_of(sizes)

    for name, sizes, M, _, flags in grouped():
        if len(sizes) < 300:  # more would be minutes of interpreted padding
            yield Case(name, partial(args, sizes, M, 96), flags=flags)
    for dtype in _checks.FLOAT_DTYPES:
        for scale_format in SCALE_FORMATS:
            bits = partial(lambda dtype: (random_bits(200, 64, dtype=dtype), offs_of([140, 50])), dtype)
            name = f"random bit patterns, {str(dtype)[6:]}, {scale_format}"
            yield Case(name, bits, {"scale_format": scale_format}, flags={"edge"})
            name = f"{str(dtype)[6:]}, {scale_format}"
            yield Case(name, partial(args, [130, 0, 7], 140, 128, dtype), {"scale_format": scale_format})
    yield Case("ragged against every tile", partial(args, [129, 300, 128], 560, 176))
    yield Case("odd D", partial(args, [130, 9], 139, 333), flags={"edge"})
    yield Case("one column", partial(args, [130, 9], 139, 1), flags={"edge"})
    yield Case("no columns", partial(args, [130, 9], 139, 0), flags={"edge"})
    yield Case("transposed input", lambda: (random_normal(64, 210).mT, offs_of([130, 70])))
    yield Case("every second row", lambda: (random_normal(300, 64)[::2], offs_of([130, 9])))
    yield Case("every second column", lambda: (random_normal(150, 128)[:, ::2], offs_of([130, 9])))
    yield Case("rows far apart", lambda: (far_apart(140, 64), offs_of([100, 39])), flags={"edge"})
    yield Case("larger eps", lambda: (random_normal(150, 64) * 2**-30, offs_of([140, 10])), {"eps": 1e-4})
    yield Case("zeros", lambda: (-torch.zeros(150, 64), offs_of([140, 9])), flags={"edge"})
    yield Case("checked", partial(args, [30, 10], 41, 64), {"check_offs": True})
    large = these(random_normal(1, 2048).expand(2**20 + 256, 2048), offs_of([2**20 + 256]))
    yield Case("2^31 elements and more", large, flags={"large"})

    x, offs = args([5, 0, 40], 50, 64)

    def refused(name, error, match, x=x, offs=offs, **kwargs):
        return Case(name, these(x, offs), kwargs, raises=error, match=match)

    yield refused("float64", TypeError, "torch.float64", x.double())
    yield refused("3-D", ValueError, "2-D", x[None])
    yield refused("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield refused("2-D offs", ValueError, "offs has shape (1, 3); needs a 1-D", offs=offs[None])
    yield refused("offs elsewhere", ValueError, "one device", offs=offs.to("meta"))
    yield refused("unknown scale format", ValueError, "'ue8m0'", scale_format="ue8m0")
    yield refused("eps 0", ValueError, "eps = 0.0", eps=0.0)
    yield refused("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield refused("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, D: int) -> tuple[Tensor, Tensor]:
        return torch.randn(M, D, dtype=torch.bfloat16), random_offs(M, 8)

    for M, D in shapes.matrices:
        if M >= 1024 and M * D < 2**30:
            yield Case(f"{M}x{D}, G 8", partial(args, M, D))


@spec(
    cases=cases,
    check_args=check_args,
    flops=per_element(2),  # a maximum and a multiply
    bench_cases=bench_cases,
)
def fp8_quantize_k_groups(
    x: Tensor, offs: Tensor, *, scale_format: str = "fp32", eps: float = 1e-12, check_offs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize token groups to e4m3fn along the tokens, as the gradient of each expert's weights takes them.

    `pad_token_groups(x, offs, 128)`, then `fp8_quantize_1x128` along the tokens. Then the codes of each group are
    transposed by themselves: with `w = end[g] - start[g]`, code d of the group's token t lies at
    `D * start[g] + d * w + t` of the flat codes, so that a group is a row-major `(D, w)` and the groups follow one
    another. Its scale is `scale[d, (start[g] + t) // 128]`.

    Args:
        x: `(M, D)`, the tokens of each group together; bfloat16, float16 or float32; any strides.
        offs: `(G,)` int32 on x's device, the exclusive end of each group, of any alignment. Never decreasing, the last
            at most M; rows from there on belong to no group and are dropped.
        scale_format, eps: as for `fp8_quantize_1x128`.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order. Without it
            nothing waits; an offs out of order gives bytes that mean nothing, and no access outside x and the results.

    Returns:
        `(qdata, scale, start, end)`. With `R` the multiple of 128 at or above `M + G*128`, qdata: `(D, R)`
        float8_e4m3fn, contiguous, whose own rows and columns only say how many there are: the first `D * end[-1]` codes
        hold the groups, the rest are 0. scale: `(D, R/128)` float32, MN-major (strides `(1, D)`), as DeepGEMM wants it;
        0 from column `end[-1] / 128` on. start, end: `(G,)` int32, the tokens at which a group begins, and ends with
        its padding; empty groups take none. Codes of padding are 0, except beside a NaN or an Inf.

    Special values: as for `fp8_quantize_1x128`. Padding never changes a scale: it is never larger than what stands
        beside it. It is quantized as zeros are, so that a NaN in its block makes it NaN.

    Raises:
        TypeError: the dtype of x or offs.
        ValueError: a rank, a device, scale_format, eps, 2^31 padded rows or more; with check_offs, offs.

    Example:
        >>> x = torch.tensor([[448.0, 1.0], [224.0, 2.0], [-896.0, 0.0]])
        >>> qdata, scale, start, end = fp8_quantize_k_groups(x, torch.tensor([2, 3], dtype=torch.int32))
        >>> qdata.shape, scale.shape, start.tolist(), end.tolist()
        (torch.Size([2, 384]), torch.Size([2, 3]), [0, 128], [128, 256])
        >>> first, second = qdata.flatten()[: 2 * 256].float().view(2, 2, 128)
        >>> first[:, :3].tolist(), second[:, :3].tolist()
        ([[448.0, 224.0, 0.0], [224.0, 448.0, 0.0]], [[-448.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> scale[0].tolist(), scale.stride()
        ([1.0, 2.0, 0.0], (1, 2))

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `k_grouped_fp8_gemm_nt_contiguous`, for the codes.
    """
    check_args(x, offs, scale_format=scale_format, eps=eps, check_offs=check_offs)
    padded, start, end = pad_token_groups(x, offs, FP8_BLOCK_SIZE)  # (R, D)
    options: dict[str, Any] = {"scale_format": scale_format, "scale_major": "mn", "eps": eps}
    codes, scale = fp8_quantize_1x128(padded, axis=-2, **options)  # (R, D), (D, R/128)
    R, D = padded.shape

    qdata = torch.zeros(D, R, dtype=torch.uint8, device=x.device)
    qdata.view(-1)[flat_places(end, D, R)] = codes.mT.view(torch.uint8)

    unused = torch.arange(0, R, FP8_BLOCK_SIZE, device=x.device) >= first_tokens(end)[-1]
    scale.masked_fill_(unused, 0.0)
    return qdata.view(torch.float8_e4m3fn), scale, start, end
