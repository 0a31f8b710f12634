"""Under which of torch's modes a call is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_plain_eager(values: Iterable[Any]) -> bool:
    """Whether a call has nothing that only the operator can serve, and may so save the dispatcher's time.

    That is: no tracing or dispatch mode, no functorch transform, no tensor that is a subclass, on the meta device,
    in need of a gradient, or a view whose sign is yet to be flipped.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for value in values:
        if type(value) is Tensor:
            if value.is_meta or value.requires_grad or value.is_neg():
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def is_differentiated_by_functorch(values: Iterable[Any]) -> bool:
    """Whether a call lies within `torch.func.grad`, `jvp` or their like, and is to be differentiated."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
