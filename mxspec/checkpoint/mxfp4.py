"""MXFP4 as FP8 with 128x128 blocks: lossless if the exponents of each tile lie close enough. Every value is checked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxspec.checkpoint.lossless import NotLossless, first_failed
from mxspec.formats import E2M1, E4M3FN, E8M0FNU, FP8_BLOCK_SIZE, MX_BLOCK_SIZE


def mxfp4_to_fp8_blocks(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | NotLossless:
    """MXFP4 as FP8 with 128x128 blocks and power-of-two scales, if every value can be kept.

    A 128x128 tile holds 512 MXFP4 blocks. Their exponents may differ by 14, because `6 * 2^6 <= 448` and `0.5 * 2^-8`
    is the smallest subnormal of e4m3fn. They may differ by more if the codes that occur allow it. The function chooses
    the scale, converts, and compares every value.

    Args:
        codes: `(N, K/2)` uint8 or float4_e2m1fn_x2, two e2m1 codes in a byte, the even K in the low nibble. On the CPU.
        scale: `(N, K/32)` uint8 or float8_e8m0fnu. K is a multiple of 32.

    Returns:
        `(qdata, scale)`, or a NotLossless that counts tiles as its blocks.

        - qdata: `(N, K)` float8_e4m3fn, contiguous.
        - scale: `(ceil(N/128), ceil(K/128))` float32 powers of two, contiguous.

    Special values: a byte 255 (NaN) makes its tile not lossless. Minus zero stays minus zero.

    Raises:
        TypeError: codes or scale is no tensor, or has another dtype.
        ValueError: the shapes do not fit, or a tensor is not on the CPU.

    Example:
        >>> codes, scale = torch.full((1, 16), 0x71, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8)
        >>> qdata, block_scale = mxfp4_to_fp8_blocks(codes, scale)  # 1 is the code of 0.5, 7 is the code of 6.0
        >>> qdata[0, :2].tolist(), block_scale.tolist()
        ([32.0, 384.0], [[0.015625]])

    Source: OCP MX v1.0, section 5.3.3 (e2m1); OFP8 v1.0, table 1 (e4m3).
    """
    codes, scale = in_bytes("mxfp4_to_fp8_blocks", codes, scale)
    N, K = codes.shape[0], codes.shape[1] * 2
    bytes_ = scale.int()
    out = torch.empty(N, K, dtype=E4M3FN.dtype)
    tiles = torch.empty(-(-N // FP8_BLOCK_SIZE), -(-K // FP8_BLOCK_SIZE), dtype=torch.float32)
    bad = torch.zeros(tiles.shape, dtype=torch.bool)
    for tile_row, start in enumerate(range(0, N, FP8_BLOCK_SIZE)):  # a strip of tiles, so that memory stays small
        rows = slice(start, start + FP8_BLOCK_SIZE)
        out[rows], tiles[tile_row], bad[tile_row] = _strip(codes[rows], bytes_[rows])
    if bool(bad.any()):
        why = "a byte 255 (NaN), or exponents too far apart for e4m3fn"
        return NotLossless(bad.numel(), int(bad.sum()), first_failed(bad), why)
    return out, tiles


def in_bytes(name: str, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales of an MXFP4 matrix in uint8. `name` is the function that checks its arguments here."""
    for what, t, other in (("codes", codes, E2M1.dtype), ("scale", scale, E8M0FNU.dtype)):
        came = t.dtype if isinstance(t, Tensor) else type(t).__name__
        if came not in (torch.uint8, other):
            raise TypeError(f"{name}: {what} is {came}; needs a tensor of uint8 or {other}")
        if t.device.type != "cpu":
            raise ValueError(f"{name}: {what} is on {t.device}; needs a tensor on the CPU")
    of_block, grid = MX_BLOCK_SIZE // 2, tuple(scale.shape)
    if codes.ndim != 2 or codes.shape[1] % of_block or grid != (codes.shape[0], codes.shape[1] // of_block):
        more = ". Call codes.flatten(-2) first" if codes.ndim == 4 else ""  # gpt-oss's blocks
        raise ValueError(
            f"{name}: codes are {tuple(codes.shape)} and scale is {grid}; needs (N, K/2) and (N, K/32){more}"
        )
    return codes.view(torch.uint8), scale.view(torch.uint8)


# For each magnitude of e2m1: the largest d with value * 2^d <= 448, and the exponent of its lowest set bit.
_MAGNITUDES = [E2M1.value(code) for code in range(8)]
_HIGHEST = torch.tensor([99, *(int(torch.tensor(E4M3FN.max / m).log2().floor()) for m in _MAGNITUDES[1:])])
_LOWEST_BIT = torch.tensor([99, -1, 0, -1, 1, 0, 2, 1])
_VALUES = torch.tensor([E2M1.value(code) for code in range(16)])


def _strip(codes: Tensor, bytes_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row of tiles: the codes of e4m3fn, the scales, and which tiles do not keep their values."""
    rows = codes.shape[0]
    nibbles = torch.stack([codes & 15, codes >> 4], -1).view(rows, -1, MX_BLOCK_SIZE).long()  # (rows, K/32, 32)
    magnitude = nibbles & 7
    exponent = bytes_ - E8M0FNU.bias
    per_tile = FP8_BLOCK_SIZE // MX_BLOCK_SIZE

    def reduced(values: Tensor, largest: bool) -> Tensor:
        """The largest or the smallest value of each tile: over its rows and its four blocks."""
        columns = values.amax(0) if largest else values.amin(0)
        extra = -len(columns) % per_tile
        columns = pad(columns, (0, extra), value=-999 if largest else 999).view(-1, per_tile)
        return columns.amax(-1) if largest else columns.amin(-1)

    at_least = reduced(exponent - _HIGHEST[magnitude].amin(-1), True)
    at_most = reduced(exponent + _LOWEST_BIT[magnitude].amin(-1) + 9, False)  # 2^-9 is the least value of e4m3fn
    usual = reduced(exponent, True) - 6
    chosen = usual.clamp(min=at_least).clamp(max=at_most).clamp(-127, 127)
    each = chosen.repeat_interleave(per_tile)[: exponent.shape[1]]  # (K/32,)

    value = _VALUES[nibbles]
    shift = torch.exp2((exponent - each).clamp(-126, 126).float()).unsqueeze(-1)
    stored = (value * shift).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype)
    differs = ((stored.float() / shift) != value).any(-1) | (bytes_ == E8M0FNU.nan_code)
    bad = reduced(differs.int(), True) > 0
    return stored.view(rows, -1), torch.exp2(chosen.float()), bad
