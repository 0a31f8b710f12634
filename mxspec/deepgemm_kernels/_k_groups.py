"""The K-grouped matmul of DeepGEMM on Hopper: the sum over each group's tokens, added to fp32 in place.

DeepGEMM also needs the sizes of the groups as a list on the host, so a call waits for the device to read offs. In the
builds that have this function, some shapes make it hang, crash or return wrong values. `reason_against` refuses those
shapes.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from mxspec.deepgemm_kernels._library import absent, given, layout_reason, library, mn_major, processors
from mxspec.formats import FP8_BLOCK_SIZE

HOST_SYNC = "it needs the sizes of the groups on the host"
FUNCTION = "k_grouped_fp8_gemm_nt_contiguous"
_TILE = 128, 160  # the largest tile that DeepGEMM takes


def reason_against(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor) -> str | None:
    if reason := absent(dy.device, FUNCTION):
        return reason
    (N, R), K, E = dy.shape, x.shape[0], offs.shape[0]
    if not N * R * K * E:
        return "takes no empty matrices"
    if K % 4:  # TMA writes rows that begin at multiples of 16 bytes
        return f"needs K in multiples of 4, not K = {K}"
    # If N is no multiple of a tile's rows, a group's last tile reaches into the next group's matrix, and adds 0 or NaN
    # times 0 there. If two programs share loads and the number of tiles is odd, one program waits forever at the end
    # (DeepGEMM, #415).
    if N % (2 * _TILE[0]):
        return f"needs N in multiples of {2 * _TILE[0]}, not N = {N}"
    tiles, programs = N // _TILE[0] * -(-K // _TILE[1]), processors(dy.device)
    # A program that skips a group loads tiles that do not exist (DeepGEMM, #237, #405).
    if tiles < programs:
        return f"needs {programs} tiles of {_TILE[0]} x {_TILE[1]} in a group's matrix; {N} x {K} has {tiles}"
    return layout_reason(
        ("dy", dy, (R, 1)), ("dy_scale", dy_scale, mn_major(N)), ("x", x, (R, 1)), ("x_scale", x_scale, mn_major(K))
    )


def add(op: str, acc: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor) -> None:
    """`acc[e] += dy^T x` over the tokens of group e."""
    ends = offs.tolist()
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    # With other offs, DeepGEMM would hang or corrupt memory.
    if any(size < 0 or size % FP8_BLOCK_SIZE for size in sizes) or ends[-1] > dy.shape[1]:
        raise ValueError(
            f"{op}: offs = {ends}; DeepGEMM needs multiples of {FP8_BLOCK_SIZE} that never decrease, "
            f"up to R = {dy.shape[1]}"
        )
    operands = []
    for codes, scale in ((dy, dy_scale), (x, x_scale)):
        D = len(codes)
        used = codes.view(-1)[: D * ends[-1]], scale[:, : ends[-1] // FP8_BLOCK_SIZE]
        operands.append((used[0], given(used[1], mn_major(D))))
    on_device = offs.diff(prepend=offs.new_zeros(1))
    getattr(library(), FUNCTION)(*operands, acc, sizes, on_device, c=acc, recipe=(1, 1, FP8_BLOCK_SIZE))
