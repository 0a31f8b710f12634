"""Times four decoder layers of a Hugging Face MoE model, forward and backward, in bfloat16 and by recipes.

    python benchmarks/decoder_layers.py [--model qwen3-30b-a3b|gpt-oss-20b] [--json FILE]

The model has the widths and experts of the real one, random weights in bfloat16, and four of its layers. A step takes
random embeddings through the layers, and a random gradient back. It has no output head and no optimizer. All contenders
take turns in one loop, as plain eager calls. Each contender is a model of its own with the same weights. First, its
output is compared with bfloat16's. The comparison replays bfloat16's routing, because routers of random weights have
near ties.

- `transformers, X`: the model as transformers runs it, with the experts implementation X.
- `without experts`: the same model, whose experts return their input. It shows how much time the experts can save: no
  recipe of the experts alone is faster than bound = the time of the fastest transformers step / this time.
- the recipes: `mxspec.nn.convert(model, recipe)`.

Then the output head with its loss, and a step of AdamW are timed alone, for the share of a whole training step.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from mxspec.bench.timing import Contender, Pace, race
from mxspec.check import sqnr_db
from mxspec.console import console
from mxspec.nn import RECIPES, convert

LAYERS = 4
MIN_SQNR_DB = 15  # the outputs of four layers against bfloat16's, with bfloat16's routing
AGAIN = replace(RECIPES["fp8_128"], save_weight_codes=False)
# `deepgemm` and `sonicmoe` need packages that are not installed. `batched_mm` copies a weight for each token.
IMPLEMENTATIONS = ("grouped_mm", "eager")
PACE = Pace(0.5, 150_000, 1_000, 100_000, rounds=5)


class Model(NamedTuple):
    config: PreTrainedConfig
    batch: int
    length: int
    vocabulary: int  # of the real model, for its output head


def sizes(**own: Any) -> dict[str, Any]:
    return own


def qwen3_30b_a3b() -> Model:
    config = Qwen3MoeConfig(**sizes(
        hidden_size=2048, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, vocab_size=256,
    ))  # fmt: skip
    return Model(config, 4, 4096, 151936)


def gpt_oss_20b() -> Model:
    config = GptOssConfig(**sizes(
        hidden_size=2880, num_hidden_layers=LAYERS, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        num_local_experts=32, num_experts_per_tok=4, intermediate_size=2880, vocab_size=256,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    ))  # fmt: skip
    return Model(config, 16, 1024, 201088)  # its attention writes all scores


def tiny() -> Model:
    config = Qwen3MoeConfig(**sizes(
        hidden_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, vocab_size=256,
        initializer_range=0.1,  # large, so that the experts change the output
    ))  # fmt: skip
    return Model(config, 2, 32, 512)


MODELS = {"qwen3-30b-a3b": qwen3_30b_a3b, "gpt-oss-20b": gpt_oss_20b, "tiny": tiny}


class Step:
    """Forward and backward of the decoder layers of a model."""

    def __init__(self, model: Any, x: Tensor, dy: Tensor) -> None:
        self.model, self.x, self.dy = model, x, dy

    def __call__(self, _: Tensor | None = None) -> Tensor:
        self.clear()
        out = self.model(inputs_embeds=self.x, use_cache=False).last_hidden_state
        out.backward(self.dy)
        return out.detach()

    @contextmanager
    def routed(self, choices: list[Any]) -> Iterator[None]:
        """Record what the routers return, or if there are records, return these in its place."""
        routers = [getattr(layer.mlp, "gate", None) or layer.mlp.router for layer in self.model.layers]
        replayed = iter(choices[:])

        def replace(_: nn.Module, __: Any, out: Any) -> Any:
            if found := next(replayed, None):
                return found
            choices.append(tuple(t.detach() for t in out))
            return out

        hooks = [router.register_forward_hook(replace) for router in routers]
        yield
        for hook in hooks:
            hook.remove()

    def clear(self) -> None:
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)

    def peak_bytes(self) -> int:
        """The peak memory of a step with its gradients, above the memory that is in use before the step."""
        self.clear()
        if not self.x.is_cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def contenders_of(model: Model, device: torch.device) -> tuple[dict[str, Step], nn.Module]:
    torch.manual_seed(0)
    with device:
        whole = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).train()
    shape = model.batch, model.length, model.config.hidden_size
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(shape, device=device, dtype=torch.bfloat16)
    steps: dict[str, Step] = {}
    for name in IMPLEMENTATIONS:
        own = copy.deepcopy(whole)
        own.set_experts_implementation(name)
        steps[f"transformers, {name}"] = Step(own.model, x, dy)
    bare = copy.deepcopy(whole)
    for layer in bare.model.layers:
        layer.mlp.experts.forward = lambda hidden, *_: hidden
    steps["without experts"] = Step(bare.model, x, dy)
    recipes = {name: RECIPES[name] for name in ("bf16", "fp8_128", "mxfp8_rceil")}
    for name, recipe in (recipes | {"fp8_128, weights quantized again": AGAIN}).items():
        own = copy.deepcopy(whole)
        report = convert(own, recipe)
        console.print(f"{name}: {report}", highlight=False, soft_wrap=True, markup=False)
        steps[f"mxspec, {name}"] = Step(own.model, x, dy)
    return steps, whole


def rest_of_a_step(model: Model, whole: nn.Module, device: torch.device) -> list[Contender]:
    """The output head with its loss, and a step of AdamW over the four layers."""
    hidden = model.config.hidden_size
    x = torch.randn(model.batch * model.length, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(hidden, model.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    labels = torch.randint(model.vocabulary, (len(x),), device=device)

    def loss(_: Tensor) -> Tensor:
        x.grad = head.weight.grad = None
        out = nn.functional.cross_entropy(head(x), labels)
        out.backward()
        return out.detach()

    for p in whole.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(whole.parameters(), fused=device.type == "cuda")

    def update(_: Tensor) -> Tensor:
        optimizer.step()
        return labels

    named: dict[str, Callable[[Tensor], Tensor]] = {"output head and loss": loss, "AdamW": update}
    return [Contender(name, call, [(labels,)], waits=True) for name, call in named.items()]


def measure(name: str, device: torch.device, pace: Pace = PACE) -> list[dict[str, Any]]:
    """Race the steps, and print the tables. Gives a row for each contender and each other part of a training step."""
    model = MODELS[name]()
    steps, whole = contenders_of(model, device)
    choices = list[Any]()
    with (first := next(iter(steps.values()))).routed(choices):
        expected = first()
    for what, step in steps.items():
        with step.routed(choices):
            measured = sqnr_db(step(), expected)
        console.print(f"{what}: {measured:.1f} dB against bfloat16", highlight=False)
        if what != "without experts" and measured < MIN_SQNR_DB:
            raise AssertionError(f"{what}: the output has {measured:.1f} dB; needs {MIN_SQNR_DB} dB or more")
    for step in steps.values():
        step.clear()
    found = [Contender(what, step, [(step.dy,)], waits=True) for what, step in steps.items()]
    race(found, pace)
    us = {c.name: c.us for c in found}
    fastest = min((what for what in us if what.startswith("transformers")), key=us.__getitem__)
    peaks = {}
    for step in steps.values():
        step.clear()
    for what, step in steps.items():
        peaks[what] = step.peak_bytes()
        step.clear()
    tokens = model.batch * model.length
    title = f"{name}: {LAYERS} decoder layers, {model.batch} x {model.length} tokens, forward and backward"
    table = Table("step", "ms", f"times {fastest}", "peak GiB", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = list[dict[str, Any]]()
    for what, time in us.items():
        rows.append({"model": name, "tokens": tokens, "step": what, "us": time, "peak bytes": peaks[what]})
        table.add_row(what, f"{time / 1e3:.2f}", f"{us[fastest] / time:.3f}", f"{peaks[what] / 2**30:.2f}")
    console.print(table)
    steps.clear()
    found.clear()
    gc.collect()
    others = rest_of_a_step(model, whole, device)
    race(others, pace)
    rest = sum(c.us for c in others)
    table = Table("part of a training step", "ms", "share", title=f"{name}: a whole step, by {fastest}")
    for column in table.columns[1:]:
        column.justify = "right"
    bare, all_of_it = us["without experts"], us[fastest] + rest
    parts = {"the layers without experts": bare, "the experts": us[fastest] - bare} | {c.name: c.us for c in others}
    for what, time in parts.items():
        table.add_row(what, f"{time / 1e3:.2f}", f"{time / all_of_it:.1%}")
    console.print(table)
    rows += [{"model": name, "tokens": tokens, "part": c.name, "us": c.us} for c in others]
    console.print(
        f"bound if the experts took no time: {us[fastest] / bare:.2f} for the layers, {all_of_it / (bare + rest):.2f} "
        f"for the whole step; fp8_128: {us[fastest] / us['mxspec, fp8_128']:.3f} and "
        f"{all_of_it / (us['mxspec, fp8_128'] + rest):.3f}",
        highlight=False,
        soft_wrap=True,
    )
    return rows


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=list(MODELS), default="qwen3-30b-a3b")
    p.add_argument("--json", type=Path, help="store the figures in this file")
    options = p.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(options.model, device, PACE if device.type == "cuda" else Pace(0, 1, 1, rounds=1))
    if options.json:
        versions = {library: metadata.version(library) for library in ("torch", "triton", "transformers")}
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        run = {"device": gpu, "date": datetime.date.today().isoformat(), "versions": versions}
        command = f"python benchmarks/decoder_layers.py --model {options.model}"
        options.json.write_text(json.dumps({**run, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
