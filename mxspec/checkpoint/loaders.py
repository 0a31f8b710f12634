"""The known loaders, and which families each of them reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mxspec.checkpoint.families import Family
from mxspec.checkpoint.statistics import Scales

T517, T523, CT, VLLM, SGLANG, MODELOPT = LOADERS = (
    "transformers 5.17",
    "transformers 5.23",
    "compressed-tensors",
    "vLLM",
    "SGLang",
    "ModelOpt",
)
TRANSFORMERS = (T517, T523)
WRONG, RAISES, CHANGES, CAUTION = EFFECTS = "reads wrong", "raises", "changes", "caution"

# The loaders that were seen to read each family. transformers needs the library compressed-tensors for the families
# `ct_*`, and the library torchao for the families `torchao_*`.
READERS: dict[str, tuple[str, ...]] = {
    "fp8_block": (*TRANSFORMERS, VLLM, SGLANG),
    "mxfp8": (*TRANSFORMERS, SGLANG),
    "deepseek_v4": (*TRANSFORMERS, VLLM, SGLANG),
    "deepseek_v4_fp4": (*TRANSFORMERS, VLLM, SGLANG),
    "gptoss_mxfp4": (*TRANSFORMERS, VLLM),
    "ct_fp8_block": (*TRANSFORMERS, CT, VLLM, SGLANG),
    **dict.fromkeys(("ct_mxfp8", "ct_mxfp4", "ct_mxfp6"), (*TRANSFORMERS, CT, VLLM)),
    "ct_nvfp4": (*TRANSFORMERS, CT, VLLM, SGLANG),
    **dict.fromkeys(("modelopt_mxfp8", "modelopt_nvfp4"), (VLLM, SGLANG, MODELOPT)),
    "modelopt_mxfp4": (MODELOPT,),
    "torchao_mxfp8": TRANSFORMERS,
    "torchao_mxfp4": TRANSFORMERS,
    "torchao_nvfp4": TRANSFORMERS,
}


@dataclass(frozen=True)
class Facts:
    """What the test of a trap gets: a group of weights with the same family, shape and kind of scales."""

    family: Family
    name: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    scale_stored: str
    scales: Scales
    config: Mapping[str, Any]


Test = Callable[[Facts], str | None]


@dataclass(frozen=True)
class Trap:
    """A trap: a case in which a loader does not read weights as they are meant.

    Attributes:
        loaders: the loaders that have it.
        effect: `reads wrong`, `raises`, `changes` (the weights are quantized again) or `caution`.
        source: the thread that reports it, or the release that showed it in a run.
        test: a function of `Facts`. It returns a message that says what happens to these weights, or None if nothing
            happens.
    """

    loaders: tuple[str, ...]
    effect: str
    source: str
    test: Test
