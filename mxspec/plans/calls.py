"""The description of a call, and the plans that are known for descriptions."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mxspec.plans.plan import Plan

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack
_deterministic = torch._C._get_deterministic_algorithms  # torch.empty then fills the memory
# Options of these types are part of a description. A call with any other option has no plan.
_OPTIONS = frozenset((int, bool, str, torch.dtype, type(None)))
_off, _blocks = threading.local(), list[None]()  # `turned_off`: whether this thread is in a block; all open blocks
_enabled = os.environ.get("MXSPEC_LAUNCH_PLANS", "1") != "0" and os.environ.get("TRITON_INTERPRET") != "1"
Description = tuple[tuple[Hashable, ...], list[int]]


@contextlib.contextmanager
def turned_off() -> Iterator[None]:
    """Inside the block, this thread records no plan and uses none."""
    before = getattr(_off, "on", False)
    _off.on = True
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()
        _off.on = before


def described(name: str, asked: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Description | None:
    """All facts that the ordinary path of a call depends on, and the addresses of the call's tensors.

    None if the call cannot have a plan: plans are off, a mode or a transform of torch sees the call, or an argument is
    neither a plain tensor nor a plain option. A flag such as `check_offs=True` makes the ordinary path read the values
    of a tensor. The recorder refuses such a call.

    Helion's dispatch reads a few more facts, such as whether two arguments are one tensor. They choose how a kernel is
    compiled, and a plan launches the kernel that was compiled for its recorded call.

    The description holds the type of each option too, because 1 == True == 1.0. The storage offset of a tensor is not
    needed: kernels get addresses, and the address modulo 16 is part of the description.
    """
    if not _enabled or _dispatch_modes() or _functorch_transform() is not None:
        return None
    if _deterministic() or (_blocks and getattr(_off, "on", False)):
        return None
    facts: list[Any] = [name, asked]
    addresses: list[int] = []
    try:
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if (value.requires_grad and torch.is_grad_enabled()) or value.is_neg():
                    return None
                address = value.data_ptr()
                addresses.append(address)
                facts += value.shape, value.stride(), value.dtype, value.get_device(), address & 15
            elif kind in _OPTIONS:
                facts += kind, value
            elif kind is float:
                facts += kind, value.hex()  # 0.0 == -0.0
            else:
                return None
    except RuntimeError:  # a tensor without strides or without memory
        return None
    if kwargs:
        facts += kwargs
    return tuple(facts), addresses


class Plans:
    """The plans of this process. `most` limits their number, and the number of descriptions that were seen once.

    The oldest plan makes room for a new one. A plan that is still needed is recorded again. Reading takes no lock.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._plans: dict[Hashable, Plan | str] = {}
        self._seen: set[Hashable] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, facts: Hashable) -> Plan | str | None:
        """The plan of a description, or the reason why it has none, or None if it was not recorded yet."""
        return self._plans.get(facts)

    def is_due(self, facts: Hashable) -> bool:
        """Whether to record a call of a description that was not recorded yet: from its second call on.

        The first call is not recorded, because sizes that never come again would each pay for a recording.
        """
        return facts in self._seen

    def see(self, facts: Hashable) -> None:
        """Remember that a call of this description was made and was not refused."""
        with self._lock:
            if len(self._seen) >= self.most:
                self._seen.clear()
            self._seen.add(facts)

    def keep(self, facts: Hashable, plan: Plan | str) -> None:
        """Remember a plan, or the reason why there is none."""
        with self._lock:
            self._seen.discard(facts)
            if len(self._plans) >= self.most:
                del self._plans[next(iter(self._plans))]
            self._plans[facts] = plan

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self._seen.clear()


PLANS = Plans(most=4096)
