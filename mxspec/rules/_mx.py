"""Code that the MX rules share: blocks of 32 in the contract's layouts, with a peer's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mxspec.formats import E8M0FNU, MX_BLOCK_SIZE, ElementFormat, element
from mxspec.reference.mx_quantize import check_args
from mxspec.reference.to_blocked import to_blocked
from mxspec.rules import _recorded

# A rule takes blocks `(..., K/32, 32)`. It returns codes of the same shape and scale bytes `(..., K/32, 1)`.
Rule = Callable[[Tensor, ElementFormat], tuple[Tensor, Tensor]]


@torch.no_grad()
def quantize(
    x: Tensor,
    axis: int,
    elem_dtype: torch.dtype | str,
    scaling: str,
    scale_layout: str,
    rule: Rule,
    peer: str,
    recorded: Mapping[str, Mapping[str, str]] | None,
) -> tuple[Tensor, Tensor]:
    """`mx_quantize` with a peer's rule, in the contract's layouts.

    `recorded` is the section mx of the peer's RECORDED. The function refuses a scaling or an element format that no
    recorded entry shows, because nothing proves the peer's result there. `recorded` is None if the peer is a text, such
    as a standard, and has no code.
    """
    check_args(x, axis=axis, elem_dtype=elem_dtype, scale_layout=scale_layout)
    if recorded is not None:
        only(peer, scaling, *dict.fromkeys(options["scaling"] for options in recorded.values()))
        entries = tuple(entry for entry, options in recorded.items() if options["scaling"] == scaling)
        formats = _recorded.formats("mx", entries)
        if element(elem_dtype).name not in formats:
            raise NotImplementedError(
                f"mx_quantize: {peer} has no recorded result for {element(elem_dtype).name} elements with scaling = "
                f"{scaling!r}; needs {' or '.join(formats)}"
            )
    if axis == -2:
        x = x.mT
    blocks = x.contiguous().unflatten(-1, (x.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))  # (..., K/32, 32)
    codes, byte = rule(blocks, element(elem_dtype))
    qdata, scale = codes.flatten(-2), byte.squeeze(-1).to(torch.uint8).view(torch.float8_e8m0fnu)
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    return qdata.mT if axis == -2 else qdata, scale


def only(peer: str, scaling: str, *known: str) -> None:
    """Refuse a scaling that a peer does not have."""
    if scaling not in known:
        needs = " or ".join(map(repr, known))
        raise NotImplementedError(f"mx_quantize: {peer} has no scaling = {scaling!r}; needs {needs}")


def floor_byte(amax: Tensor, fmt: ElementFormat, ceil: bool = False) -> Tensor:
    """The bytes of the contract's `floor` or `ceil`, except that Inf counts as 2^128 (byte 247 for e4m3); int32."""
    bits = amax.view(torch.int32)
    byte = (bits >> 23) - fmt.emax
    if ceil:
        byte = byte + ((bits & 0x7FFFFF) != 0)
    return torch.where(amax.isnan(), E8M0FNU.nan_code, byte.clamp(0, E8M0FNU.nan_code))


def divide(blocks: Tensor, byte: Tensor) -> Tensor:
    """`x / 2^(byte - 127)`, except that byte 0 divides by 2^-126, which is twice its meaning, and byte 255 by Inf."""
    scale = (byte.to(torch.int32) << 23).view(torch.float32).clamp(min=torch.finfo().tiny)
    return blocks / scale
