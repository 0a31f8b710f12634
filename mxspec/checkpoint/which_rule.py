"""Which rule makes the codes and scales of one side from the values of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxspec import rules
from mxspec.checkpoint.schemes import CONTRACT, SCHEMES, Blocks, quantizer, strips, widened_scale
from mxspec.checkpoint.sides import Weight
from mxspec.rules import vllm_requant


def names() -> list[str]:
    """The names of all rules, in the order in which they are tried."""
    found = []
    for rule in (CONTRACT, *rules.peers()):
        found += [rule, f"{rule} with ue8m0"]
    return [*dict.fromkeys([*found, "vllm_requant through bfloat16"])]


def rules_of(a: Weight, b: Weight, layer: Sequence[Weight] = ()) -> tuple[str, ...]:
    """The rules that make the codes and scales of A from the values of B, strip by strip.

    Args:
        a, b: the weights.
        layer: the weights of B that engines fuse with b, and b. In NVFP4 they may share a tensor scale.
    """
    assert a.blocks is not None
    want = a.blocks()
    if want.scheme == "nvfp4":
        return _nvfp4_rules_of(want, b, layer)
    height = SCHEMES[want.scheme].block[0]
    left = dict(_candidates(want, b))
    for rows in strips(want.shape[0]):
        x = b.rows(rows)
        codes = want.codes[rows].contiguous().view(torch.uint8)
        scale = widened_scale(want.scale[rows.start // height : -(-rows.stop // height)])
        for name, rule in list(left.items()):
            made = _made(rule, x)
            if made is None or not (made[0].equal(codes) and made[1].equal(scale)):
                del left[name]
        if not left:
            return ()
    return tuple(left)


def _candidates(want: Blocks, b: Weight) -> Iterable[tuple[str, Any]]:
    for rule in (CONTRACT, *rules.peers()):
        for scales in ("fp32", "ue8m0") if want.scheme == "fp8_128x128" else ("ue8m0",):
            try:
                made = quantizer(want.scheme, rule, scales)
            except (ValueError, KeyError):  # the rule does not quantize to this scheme
                continue
            yield rule if scales == "fp32" or want.scheme != "fp8_128x128" else f"{rule} with ue8m0", made
    if b.blocks is not None and want.scheme == "fp8_128x128":
        yield "vllm_requant", _requantized(torch.float32)
        yield "vllm_requant through bfloat16", _requantized(torch.bfloat16)


def _nvfp4_rules_of(want: Blocks, b: Weight, layer: Sequence[Weight]) -> tuple[str, ...]:
    """The rules, with the largest magnitude of the whole layer or, if it is another one, of the weight alone."""
    own, left = _amax(b), list[tuple[str, Any, Tensor]]()
    for amax in dict.fromkeys((own, max([own, *map(_amax, layer)]))):
        if not amax.isfinite():
            return ()
        left += [(name, quantize, amax) for name, quantize in _candidates(want, b)]
    for rows in strips(want.shape[0]):
        x = b.rows(rows)
        left = [one for one in left if _is_nvfp4_of(want, rows, one[1], x, one[2].to(x.dtype))]
        if not left:
            return ()
    return tuple(dict.fromkeys(name for name, _, _ in left))


def _amax(weight: Weight) -> Tensor:
    found = [weight.rows(rows).abs().amax() for rows in strips(weight.shape[0])]
    return torch.stack(found).amax() if found else torch.zeros(())


def _is_nvfp4_of(want: Blocks, rows: slice, quantize: Any, x: Tensor, amax: Tensor) -> bool:
    assert want.tensor_scale is not None
    try:
        codes, scale, multiplier, divisor = quantize(x, amax)
    except (ValueError, NotImplementedError, TypeError):  # the peer has no rule for these numbers
        return False
    if not want.tensor_scale.equal(divisor if want.divides else multiplier):
        return False
    same = codes.equal(want.codes[rows])
    return same and scale.view(torch.uint8).equal(want.scale[rows].contiguous().view(torch.uint8))


def _requantized(dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The second half of the requantization by vLLM and SGLang. Its first half, reading the values, is done already."""

    def quantize(x: Tensor) -> tuple[Tensor, ...]:
        return vllm_requant.quantize(x.to(dtype))

    return quantize


def _made(rule: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
    try:
        codes, scale = rule(x)
    except (ValueError, NotImplementedError, TypeError):  # the peer has no rule for these numbers
        return None
    return codes.contiguous().view(torch.uint8), widened_scale(scale)
