"""fp8_grouped_gemm: a matmul of FP8 operands with scales in blocks of 128, the tokens of each expert by its weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE
from mxspec.reference import _checks
from mxspec.reference._fp8_numerics import square_values, values
from mxspec.reference._groups import each_group, group_of_tokens
from mxspec.reference._groups_cases import grouped, offs_of
from mxspec.reference._mx_gemm_cases import bench_sizes
from mxspec.reference._numerics import round_once
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, codes, scales
from mxspec.reference.fp8_quantize_1x128 import fp8_quantize_1x128
from mxspec.reference.fp8_quantize_128x128 import fp8_quantize_128x128
from mxspec.reference.mx_dequantize import OUT_DTYPES
from mxspec.reference.pad_token_groups import pad_token_groups
from mxspec.spec import Case, Shapes, normal, spec, these


def check_operands(op: str, *operands: tuple[str, Tensor, Tensor, int]) -> None:
    """Dtypes, ranks and devices: each operand by its name, codes, scale, and how many dimensions both have."""
    first = operands[0][:2]
    for name, of_codes, scale, rank in operands:
        of_scale = f"{name}_scale"
        for each, tensor, dtype in ((name, of_codes, torch.float8_e4m3fn), (of_scale, scale, torch.float32)):
            _checks.tensor_dtype(op, each, tensor, (dtype,))
            _checks.rank(op, each, tensor, (rank,))
            _checks.same_device(op, first, (each, tensor))


def check_args(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> None:
    op = "fp8_grouped_gemm"
    check_operands(op, ("a", a, a_scale, 2), ("b", b, b_scale, 3))
    _checks.offsets(op, "offs", offs, ("a", a))
    (M, K), (E, N, _) = a.shape, b.shape
    _checks.shape(op, "b", b, (E, N, K), f"for a {(M, K)}")
    _checks.shape(op, "offs", offs, (E,), f"for {E} experts of b")
    _checks.multiple(op, "K", K, FP8_BLOCK_SIZE)
    _checks.choice(op, "out_dtype", out_dtype, OUT_DTYPES, TypeError)
    _checks.positive(op, "alignment", alignment)
    for name, operand in (("a", a), ("b", b)):
        if K > 1 and operand.stride(-1) != 1:
            last = operand.ndim - 1
            raise ValueError(f"{op}: {name} has strides {operand.stride()}; needs K-major rows: stride({last}) = 1")
    C = K // FP8_BLOCK_SIZE
    _checks.shape(op, "a_scale", a_scale, (M, C), f"(1x128 blocks) for a {(M, K)}")
    _checks.shape(op, "b_scale", b_scale, (E, -(-N // FP8_BLOCK_SIZE), C), f"(128x128 blocks) for b {(E, N, K)}")
    _checks.fits_int32(op, f"the padded rows of {E} groups", M + FP8_BLOCK_SIZE * E)
    if _checks.flag(op, "check_offs", check_offs):
        _checks.offs_in_order(op, offs, "M", M, alignment)


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def made(sizes: list[int], rest: int, N: int, K: int, spread: int = 1, major: str = "k") -> Arguments:
    """Tokens of each group, and rows that belong to none and hold nothing but NaN.

    Scales within a factor of two of 1 keep every element in sight of the SQNR.
    """
    M, E, C, blocks = sum(sizes) + rest, len(sizes), K // FP8_BLOCK_SIZE, -(-N // FP8_BLOCK_SIZE)
    a, a_scale = codes(M, K), scales(M, C, spread, major)
    if E:
        a[sum(sizes) :], a_scale[sum(sizes) :] = torch.nan, torch.nan
    b, b_scale = codes(E * N, K, seed=2), scales(E * blocks, C, spread, seed=3)
    return a, a_scale, b.view(E, N, K), b_scale.view(E, blocks, C), offs_of(sizes)


def quantized(sizes: list[int], N: int, K: int) -> Arguments:
    x, w = normal(sum(sizes), K).bfloat16(), normal(len(sizes), N, K, seed=1).bfloat16()
    b, b_scale, *_ = fp8_quantize_128x128(w)
    return *fp8_quantize_1x128(x, scale_major="mn"), b, b_scale, offs_of(sizes)


def of_dgrad(sizes: list[int], N: int, K: int) -> Arguments:
    """dy by the transposes of the weights."""
    dy, w = normal(sum(sizes), N).bfloat16(), normal(len(sizes), N, K, seed=1).bfloat16()
    *_, w_t, w_t_scale = fp8_quantize_128x128(w, with_transpose=True)
    return *fp8_quantize_1x128(dy, scale_major="mn"), w_t, w_t_scale, offs_of(sizes)


def special() -> Iterator[tuple[str, Arguments]]:
    """Special values, in one row of the tokens or in the weights of the last of three experts."""
    sizes, rest, N, K = [7, 11, 20], 12, 136, 256
    args = made(sizes, rest, N, K)
    args[0][3, 37] = torch.nan
    yield "a NaN code of a token: its row", args
    args = made(sizes, rest, N, K)
    args[1][9, 1] = torch.nan
    yield "a NaN scale of a token: its row", args
    args = made(sizes, rest, N, K)
    args[2][2, 5, 200] = torch.nan
    yield "a NaN code of a weight: its column of one group", args
    args = made(sizes, rest, N, K)
    args[3][2, 1, 0] = torch.nan
    yield "a NaN scale of weights: eight columns of one group", args
    args = made(sizes, rest, N, K)
    args[0][2, :128], args[1][4, 0], args[3][1] = 0, 0, 0
    yield "zeros", args
    args = made([20, 0, 18], rest, N, K)
    args[2][1], args[3][1] = torch.nan, torch.nan
    yield "an expert of NaN without tokens", args


def refused() -> Iterator[Case]:
    a, a_scale, b, b_scale, offs = made([5, 0, 40], 5, 200, 256)

    def case(name, error, match, a=a, a_scale=a_scale, b=b, b_scale=b_scale, offs=offs, **kwargs):
        return Case(name, these(a, a_scale, b, b_scale, offs), kwargs, raises=error, match=match)

    yield case("bf16 codes", TypeError, "b has dtype torch.bfloat16; needs torch.float8_e4m3fn", b=b.bfloat16())
    yield case("e5m2 codes", TypeError, "a has dtype torch.float8_e5m2; needs", a.view(torch.float8_e5m2))
    yield case("bf16 scale", TypeError, "a_scale has dtype torch.bfloat16", a_scale=a_scale.bfloat16())
    yield case("int64 offs", TypeError, "offs has dtype torch.int64; needs torch.int32", offs=offs.long())
    yield case("fp16 out", TypeError, "out_dtype = torch.float16", out_dtype=torch.float16)
    yield case("2-D b", ValueError, "b has shape (200, 256); needs a 3-D tensor", b=b[0])
    yield case("3-D a", ValueError, "a has shape (1, 50, 256); needs a 2-D tensor", a[None])
    yield case("an offs too few", ValueError, "offs has shape (2,); needs (3,) for 3 experts", offs=offs[:2])
    yield case("another K", ValueError, "needs (3, 200, 128) for a (50, 128)", a[:, :128])
    yield case("K = 200", ValueError, "K = 200 is not a multiple of block_size 128", a[:, :200], b=b[..., :200])
    yield case("a not K-major", ValueError, "a has strides (1, 50); needs K-major", a.t().contiguous().t())
    yield case("b not K-major", ValueError, "b has strides (51200, 1, 200); needs", b=b.mT.contiguous().mT)
    yield case("a_scale of 128x128", ValueError, "needs (50, 2) (1x128 blocks)", a_scale=a_scale[:1])
    yield case("b_scale of 1x128", ValueError, "needs (3, 2, 2) (128x128", b_scale=b_scale.repeat(1, 100, 1))
    yield case("offs elsewhere", ValueError, "needs one device", offs=offs.to("meta"))
    yield case("alignment 0", ValueError, "alignment = 0; needs at least 1", alignment=0)
    unaligned = "offs[0] = 5; needs multiples of 128"
    yield case("offs of 5 where 128 is said", ValueError, unaligned, alignment=128, check_offs=True)
    yield case("offs that decrease", ValueError, "offs[1] = 5 after 45", offs=offs.flip(0), check_offs=True)
    yield case("offs past M", ValueError, "offs[-1] = 51 is past M = 50", offs=offs + 6, check_offs=True)


def cases() -> Iterator[Case]:
    for out_dtype in OUT_DTYPES:
        kwargs, end = {"out_dtype": out_dtype}, str(out_dtype)[6:]
        for major in ("k", "mn"):
            yield Case(
                f"three groups, {major}-major, {end}", partial(made, [5, 33, 64], 10, 136, 384, 1, major), kwargs
            )
        yield Case(f"large groups, {end}", partial(made, [150, 129], 0, 264, 256, 1, "mn"), kwargs)
        aligned = partial(made, [128, 0, 256], 128, 256, 256, 1, "mn")
        yield Case(f"aligned groups, {end}", aligned, kwargs | {"alignment": 128})
        yield Case(f"as quantized, {end}", partial(quantized, [40, 0, 72], 200, 256), kwargs)
        yield Case(f"dgrad, {end}", partial(of_dgrad, [33, 91], 256, 128), kwargs)
    yield Case("few tokens and a long K", partial(made, [3, 1, 8], 0, 136, 2048, 1, "mn"))
    yield Case("checked", partial(made, [30, 0, 10], 3, 40, 128), {"check_offs": True})
    yield Case("checked, aligned", partial(made, [30, 0, 10], 3, 40, 128), {"alignment": 10, "check_offs": True})
    for name, sizes, M, _, _ in grouped():
        if len(sizes) < 300 and name not in ("three groups", "aligned groups"):
            yield Case(name, partial(made, sizes, M - sum(sizes), 40, 128), flags={"edge"})
    yield Case("one column", partial(made, [20, 12], 0, 1, 256), flags={"edge"})
    yield Case("no columns", partial(made, [20, 12], 0, 0, 256), flags={"edge"})
    yield Case("K = 0: sums of nothing", partial(made, [4, 3], 2, 40, 0), flags={"edge"})
    yield Case("ragged against every tile", partial(made, [129, 65, 63], 3, 131, 384), {"out_dtype": torch.float32})
    yield Case("scales of 2^-40 to 2^40", partial(made, [40, 24], 0, 256, 512, 40), flags={"edge"})
    for name, args in special():
        yield Case(name, these(*args), flags={"edge"})
    yield from refused()


def bench_cases(shapes: Shapes) -> Iterator[Case]:
    def args(M: int, N: int, K: int, E: int, ragged: bool) -> Arguments:
        sizes, rows = bench_sizes(M, E, ragged)
        x, offs = torch.randn(M, K, dtype=torch.bfloat16), offs_of(sizes)
        if ragged:
            padded, _, offs = pad_token_groups(x, offs, FP8_BLOCK_SIZE)
            x = padded[:rows]
        b, b_scale, *_ = fp8_quantize_128x128(torch.randn(E, N, K, dtype=torch.bfloat16))
        return *fp8_quantize_1x128(x, scale_major="mn"), b, b_scale, offs

    for M, N, K, E in shapes.grouped:
        blocks = {"alignment": FP8_BLOCK_SIZE}
        even = {} if M % (FP8_BLOCK_SIZE * E) else blocks
        yield Case(f"{M}x{N}x{K}, E {E}, even", partial(args, M, N, K, E, False), even)
        if E > 1:
            yield Case(f"{M}x{N}x{K}, E {E}, ragged, padded", partial(args, M, N, K, E, True), blocks)


@spec(
    cases=cases,
    check_args=check_args,
    min_sqnr_db=MIN_SQNR_DB,
    inf_is_free=True,
    flops=lambda args, outputs: 2 * args[0].shape[0] * args[2].shape[1] * args[0].shape[1],  # all M: offs is not read
    bench_cases=bench_cases,
)
def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    check_offs: bool = False,
) -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, FP8 with scales in blocks of 128.

    `out[m] = fp8_gemm(a[m], b[g])` where g is the group of row m, that is `offs[g-1] <= m < offs[g]`; 0 where m is in
    none. dgrad is the same op: dy by `fp8_quantize_128x128(w, with_transpose=True)`'s transpose, `(E, K, N)`.

    Args:
        a: `(M, K)` float8_e4m3fn, the tokens of each group together, K-major: `stride(1) = 1`; K a multiple of 128. M
            and N are free.
        a_scale: `(M, K/128)` float32, 1x128 blocks; any strides, as for `fp8_gemm`.
        b: `(E, N, K)` float8_e4m3fn, each matrix K-major: `stride(2) = 1`.
        b_scale: `(E, ceil(N/128), K/128)` float32, 128x128 blocks; any strides.
        offs: `(E,)` int32 on a's device, the exclusive end of each group, of any alignment. Never decreasing, the last
            at most M.
        out_dtype: torch.bfloat16 or torch.float32.
        alignment: what the caller says every end of offs is a multiple of. A backend that needs whole blocks of rows,
            as DeepGEMM, takes the call only then, and where it is not so gives values that mean nothing.
        check_offs: read offs on the host, which waits for the device, and raise if it is not in order or not of
            multiples of alignment. Without it nothing waits; an offs out of order gives values that mean nothing, and
            no access outside the operands and the result.

    Returns:
        `(M, N)` of out_dtype, contiguous. Rows from `offs[-1]` on are 0, whatever a and a_scale hold there. Rounding
        and how a kernel is judged: as for `fp8_gemm`.

    Special values: as for `fp8_gemm`, within a group: a NaN of an expert's weights reaches its own tokens only.

    Raises:
        TypeError: the dtype of an operand, of a scale or of offs; out_dtype.
        ValueError: a rank, K, E, an operand that is not K-major, a scale of another shape, alignment, two devices, 2^31
            padded rows or more; with check_offs, offs.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 128).to(torch.float8_e4m3fn)
        >>> b = torch.tensor([1.0, 0.5])[:, None, None].expand(2, 1, 128).to(torch.float8_e4m3fn)
        >>> offs = torch.tensor([1, 2], dtype=torch.int32)
        >>> fp8_grouped_gemm(a, torch.ones(3, 1), b, torch.tensor([[[1.0]], [[3.0]]]), offs).tolist()
        [[128.0], [384.0], [0.0]]

    Source: DeepSeek-V3 technical report, section 3.3.2; DeepGEMM, `m_grouped_fp8_gemm_nt_contiguous`.
    """
    check_args(a, a_scale, b, b_scale, offs, out_dtype=out_dtype, alignment=alignment, check_offs=check_offs)
    M, N = a.shape[0], b.shape[1]
    x, group = values(a, a_scale), group_of_tokens(offs, M)[:, None]
    product = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    for e in each_group(offs):  # every token by every expert: how many are an expert's, the host does not know
        product = torch.where(group == e, x @ square_values(b[e], b_scale[e]).t(), product)
    return round_once(product, out_dtype)
