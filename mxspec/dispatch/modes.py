"""The modes of torch under which a call is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


def is_forward_mode() -> bool:
    """Whether a call is made under `torch.autograd.forward_ad.dual_level` or `torch.func.jvp`: tensors may be dual."""
    return forward_ad._current_level >= 0


def is_plain_eager(values: Iterable[Any]) -> bool:
    """Whether a call can skip the torch.library operator. Skipping it saves the dispatcher's time.

    It can if no tracing mode, no dispatch mode, no functorch transform and no forward mode is active, and if each of
    its tensors

    - is a plain tensor or a parameter, and no other subclass,
    - does not lie on the meta device,
    - requires no gradient while gradients are recorded,
    - is not a view with a pending negation (`is_neg`).
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if is_forward_mode():
        return False
    for value in values:
        if type(value) is Tensor or type(value) is Parameter:
            if value.is_meta or (value.requires_grad and torch.is_grad_enabled()) or value.is_neg():
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def is_differentiated_by_a_transform(values: Iterable[Any]) -> bool:
    """Whether `torch.func.grad`, `jvp` or a similar transform differentiates a call, or forward mode does."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if is_forward_mode() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return True
    by_functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return by_functorch and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
