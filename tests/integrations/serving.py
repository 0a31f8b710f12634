"""Generate with FP8 checkpoints on mxspec's matmuls, and report logits and the calls of the ops.

As a program it prints the report as JSON: `python serving.py DIRECTORY...`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import mxspec
from mxspec.integrations.transformers import serve

OPS = ("fp8_quantize_1x128", "fp8_gemm", "fp8_grouped_gemm")
TOKENS = 6  # that are generated
PROMPT = [[1, 17, 42, 99, 3]]


def load(directory: str, dequantize: bool, device: str = "cpu") -> Any:
    """A model with FP8 layers, or with plain ones. transformers has FP8 layers on a GPU only, so its check is left."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": device}
    if dequantize:
        return AutoModelForCausalLM.from_pretrained(
            directory, quantization_config=FineGrainedFP8Config(dequantize=True), **options
        )
    if device != "cpu":
        return AutoModelForCausalLM.from_pretrained(directory, **options)
    check = FineGrainedFP8HfQuantizer.validate_environment
    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **kwargs: None
    try:
        return AutoModelForCausalLM.from_pretrained(directory, **options)
    finally:
        FineGrainedFP8HfQuantizer.validate_environment = check


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of the ops in the block."""
    calls: Counter[str] = Counter()
    ops = {name: getattr(mxspec, name) for name in OPS}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return ops[name](*args, **kwargs)

        return call

    for name in OPS:
        setattr(mxspec, name, counting(name))
    try:
        yield calls
    finally:
        for name, op in ops.items():
            setattr(mxspec, name, op)


def sqnr_db(signal: torch.Tensor, other: torch.Tensor) -> float:
    noise = (signal.double() - other.double()).square().sum()
    return float(10 * torch.log10(signal.double().square().sum() / noise))


def report(directory: str, experts: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """The SQNR of the logits against the dequantized model, the calls of one forward, and what `generate` gives."""
    model, plain = load(directory, False, device), load(directory, True, device)
    prompt = torch.tensor(PROMPT, device=device)
    if experts is not None:
        model.set_experts_implementation(experts)
    with serve(), torch.no_grad():
        with counted() as calls:
            logits = model(prompt).logits
        with counted() as of_generate:
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
    with torch.no_grad():
        want = plain(prompt).logits
    fp8 = [name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn]
    return {
        "sqnr_db": sqnr_db(want, logits),
        "calls": dict(calls),
        "calls_of_generate": dict(of_generate),
        "tokens": tokens.shape[1],
        "fp8_weights": len(fp8),
    }


if __name__ == "__main__":
    import transformers

    print(json.dumps({"version": transformers.__version__, "served": {d: report(d) for d in sys.argv[1:]}}))
