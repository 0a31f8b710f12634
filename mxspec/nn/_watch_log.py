"""The open watches, their records, and the modules whose forward runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mxspec.nn._counters import Counters

Key = tuple[str, str, str, str]  # the layer's name, its weight's name, the tensor, the matmuls that read it


@dataclass
class Sums:
    """The counters of one operand, on each device, and how often it was quantized."""

    calls: int = 0
    on: dict[torch.device, Counters] = field(default_factory=dict)


@dataclass(eq=False)
class Log:
    """The record of one watch."""

    names: dict[nn.Module, str]
    sums: dict[Key, Sums] = field(default_factory=dict)

    def add(self, key: Key, counters: Counters) -> None:
        sums = self.sums.setdefault(key, Sums())
        sums.calls += 1
        device = counters.counts.device
        if device not in sums.on:
            sums.on[device] = Counters(device)
        sums.on[device].add(counters)


@dataclass(eq=False)
class Call:
    """A running forward of a module."""

    module: nn.Module
    products: int = 0


class _Running(threading.local):
    """The forwards that run on this thread, the innermost last. `mx_grouped_mm` finds its module here, for example."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


open_logs: list[Log] = []
_hooks: list[Any] = []
running = _Running()


def open_log(log: Log) -> None:
    if not open_logs:
        _hooks.append(register_module_forward_pre_hook(_begin))
        _hooks.append(register_module_forward_hook(_end, always_call=True))
    open_logs.append(log)


def close_log(log: Log) -> None:
    open_logs.remove(log)
    while not open_logs and _hooks:
        _hooks.pop().remove()


def is_open(log: Log) -> bool:
    return log in open_logs


def _begin(module: nn.Module, inputs: Any) -> None:
    running.calls.append(Call(module))


def _end(module: nn.Module, inputs: Any, output: Any) -> None:
    if running.calls and running.calls[-1].module is module:  # not so if the watch opened during the forward
        running.calls.pop()
