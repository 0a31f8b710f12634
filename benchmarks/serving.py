"""Generates with an FP8 checkpoint on mxspec's matmuls, beside transformers' dequantized bfloat16.

    python benchmarks/serving.py [--json FILE]

The model has the widths and experts of Qwen3-30B-A3B, two of its layers and random weights. `checkpoint.convert` writes
it in the family `fp8_block`. transformers loads it twice: as FP8, which `serve` runs on mxspec's matmuls, and
dequantized to bfloat16.

1. The logits of both are compared. The experts that the dequantized model chose are replayed in the FP8 model, because
   the routers of random weights have near ties. The share of choices that would differ is printed.
2. Both generate the same number of tokens greedily, in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig

from mxspec.check import sqnr_db
from mxspec.checkpoint import convert
from mxspec.console import console
from mxspec.integrations.transformers import serve

MIN_SQNR_DB = 25
BATCHES, PROMPT, NEW, ROUNDS = (1, 16, 128), 128, 32, 3
SIZES: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "vocab_size": 151936,
}  # fmt: skip
CONFIG = Qwen3MoeConfig(**SIZES)


def load(directory: Path, dequantize: bool) -> Any:
    quantization = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if dequantize else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map="cuda", **quantization)


class Routers:
    """The experts that the routers of a model choose: recorded, or replaced by recorded ones."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.chosen: list[Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _, __, out: self.chosen.append(out[2]))
            for layer in self.model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()

    @contextmanager
    def replayed(self, chosen: list[Tensor]) -> Iterator[None]:
        """Each router uses its own weights for the experts that another model chose."""
        hooks = []
        for layer, experts in zip(self.model.model.layers, chosen, strict=True):

            def of_experts(_: Any, __: Any, out: Any, experts: Tensor = experts) -> Any:
                self.chosen.append(out[2])
                weights = out[0].float().softmax(-1).gather(-1, experts)
                return out[0], (weights / weights.sum(-1, keepdim=True)).to(out[1].dtype), experts

            hooks.append(layer.mlp.gate.register_forward_hook(of_experts))
        yield
        for hook in hooks:
            hook.remove()


def compare(served: Any, plain: Any, prompt: Tensor) -> tuple[float, float, float]:
    """The SQNR of the logits with replayed choices and without, and the share of choices that differ."""
    theirs, ours = Routers(plain), Routers(served)
    with torch.no_grad():
        with theirs.recorded():
            expected = plain(prompt).logits
        with ours.replayed(theirs.chosen):
            replayed = served(prompt).logits
        free = served(prompt).logits
    same = [
        (a[:, :, None] == b[:, None, :]).any(-1).float().mean() for a, b in zip(ours.chosen, theirs.chosen, strict=True)
    ]
    flipped = 1 - float(torch.stack(same).mean())
    return sqnr_db(replayed, expected), sqnr_db(free, expected), flipped


def tokens_per_second(model: Any, prompt: Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert out.shape[1] == prompt.shape[1] + NEW
    return len(prompt) * NEW / (time.perf_counter() - start)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="store the figures in this file")
    options = p.parse_args(argv)
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device("cuda"):
            made = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
        size = sum(parameter.numel() * 2 for parameter in made.parameters())
        made.cpu().save_pretrained(Path(folder) / "bf16")
        del made
        start = time.perf_counter()
        convert(Path(folder) / "bf16", Path(folder) / "fp8", to="fp8_block")
        seconds = time.perf_counter() - start
        console.print(f"convert: {size / 1e9:.2f} GB of bf16 in {seconds:.1f} s, {size / seconds / 1e6:.0f} MB/s")
        served, plain = load(Path(folder) / "fp8", False), load(Path(folder) / "fp8", True)
    fp8 = sum(parameter.dtype == torch.float8_e4m3fn for parameter in served.parameters())
    prompt = torch.randint(CONFIG.vocab_size, (max(BATCHES), PROMPT), device="cuda")
    with serve(), torch.no_grad():
        replayed, free, flipped = compare(served, plain, prompt[:8])
        console.print(
            f"{fp8} FP8 weights; logits against the dequantized model: {replayed:.1f} dB with its experts replayed, "
            f"{free:.1f} dB without; {flipped:.2%} of the choices differ",
            highlight=False,
            soft_wrap=True,
        )
        if replayed < MIN_SQNR_DB:
            raise AssertionError(f"the logits have {replayed:.1f} dB; needs {MIN_SQNR_DB} dB or more")
        rows.append({"sqnr_db": replayed, "sqnr_db without replay": free, "choices that differ": flipped})
        table = Table("sequences", "mxspec FP8", "dequantized bf16", "times", title="tokens per second")
        for column in table.columns:
            column.justify = "right"
        for batch in BATCHES:
            rates: dict[str, list[float]] = {"fp8": [], "bf16": []}
            for turn in range(ROUNDS + 1):
                for name, model in (("fp8", served), ("bf16", plain)):
                    rate = tokens_per_second(model, prompt[:batch])
                    if turn:  # the first turn compiles kernels
                        rates[name].append(rate)
            ours, theirs = median(rates["fp8"]), median(rates["bf16"])
            rows.append({"sequences": batch, "fp8 tokens/s": ours, "bf16 tokens/s": theirs})
            table.add_row(str(batch), f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")
        console.print(table)
    if options.json:
        versions = {library: metadata.version(library) for library in ("torch", "triton", "transformers")}
        run = {"device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
        command = "python benchmarks/serving.py"
        options.json.write_text(
            json.dumps({**run, "command": command, "versions": versions, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
