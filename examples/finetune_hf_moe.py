"""Train a mixture of experts of Hugging Face transformers in bfloat16 and by recipes, and compare losses and time.

    python examples/finetune_hf_moe.py [--model qwen3-30b-a3b] [--steps 200] [--seeds 3] [--recipes fp8_128 ...]

The model is built from a configuration of transformers, with random weights in bfloat16. `tiny` is a small Qwen3-MoE,
for a CPU. The other models have the widths and experts of the real ones, and LAYERS of their layers. The text is
Python's help topics. A byte is a token, so the vocabulary has 256 tokens. `bf16` is the model as transformers runs it.
`mxspec.nn.convert` makes the Linears and the experts of the other runs train by a recipe. `mxspec.nn.watch` shows which
of their operands lose most.

The loss of a short run also changes with every rounding. So `mxspec bf16` is the same model by the recipe bf16, which
quantizes nothing and sums in another order than transformers. Its difference to `bf16` shows how far two runs drift
apart without quantization. With `--seeds`, each seed has its own weights and batches.
"""

from __future__ import annotations

import argparse
import gc
import pydoc_data.topics
import time
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from mxspec.nn import RECIPES, Conversion, convert, watch

VOCABULARY, LAYERS = 256, 4
WORST = 6  # operands in the table of `watch`
PLAIN, UNQUANTIZED = "bf16", "mxspec bf16"


class Model(NamedTuple):
    config: PreTrainedConfig
    steps: int
    batch: int  # sequences in a step
    length: int  # tokens in a sequence
    rate: float
    whole: str  # the layers of the real model, or nothing


def sizes(**own: Any) -> dict[str, Any]:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"vocab_size": VOCABULARY, "use_cache": False, **ids, **own}


def tiny() -> Model:
    heads = sizes(num_attention_heads=4, num_key_value_heads=4, head_dim=32)
    experts = sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    return Model(Qwen3MoeConfig(hidden_size=128, num_hidden_layers=2, **heads | experts), 10, 4, 32, 1e-3, "")


def qwen3_30b_a3b() -> Model:
    heads = sizes(num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    experts = sizes(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
    config = Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=LAYERS, **heads | experts)
    return Model(config, 200, 8, 2048, 3e-4, "the 48 layers of Qwen3-30B-A3B")


def gpt_oss_20b() -> Model:
    heads = sizes(num_attention_heads=64, num_key_value_heads=8, head_dim=64)
    experts = sizes(num_local_experts=32, num_experts_per_tok=4, intermediate_size=2880)
    config = GptOssConfig(hidden_size=2880, num_hidden_layers=LAYERS, **heads | experts)
    return Model(config, 200, 16, 512, 3e-4, "the 24 layers of gpt-oss-20b")  # its attention writes all scores


MODELS = {"tiny": tiny, "qwen3-30b-a3b": qwen3_30b_a3b, "gpt-oss-20b": gpt_oss_20b}


class Outcome(NamedTuple):
    losses: list[float]
    seconds: float  # per step; the first step is not counted
    memory: float  # GiB, the peak of the device's memory; 0 on a CPU
    report: Conversion | None
    watched: Table | None  # what quantization loses, in the layers that lose most
    experts: str  # the experts implementation of transformers

    @property
    def last(self) -> float:
        """The mean loss of the last tenth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


def text() -> Tensor:
    """All topics as one row of bytes."""
    topics = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.tensor(list(topics.encode()))


def train(recipe: str, model: Model, tokens: Tensor, seed: int = 0) -> Outcome:
    """Train from the same weights on the same batches, whichever the recipe is."""
    device = tokens.device
    gc.collect()  # the model before this one holds itself, and would count as memory
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(seed)
    with device:
        net = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).train()
    report = None if recipe == PLAIN else convert(net, "bf16" if recipe == UNQUANTIZED else recipe)
    optimizer = torch.optim.AdamW(net.parameters(), lr=model.rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator, window = torch.Generator().manual_seed(seed + 1), torch.arange(model.length, device=device)
    losses: list[Tensor] = []
    began = time.perf_counter()
    for step in track(range(model.steps), f"{recipe}, seed {seed}", transient=True):
        start = torch.randint(len(tokens) - model.length, (model.batch, 1), generator=generator).to(device)
        samples = tokens[start + window]
        loss = net(samples, labels=samples).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step == 0:  # which compiles kernels
            float(loss.detach())
            began = time.perf_counter()
    values = torch.stack(losses).tolist()
    seconds = (time.perf_counter() - began) / max(1, model.steps - 1)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    watched = None
    if report is not None and recipe != UNQUANTIZED:  # one more step, which is not timed
        with watch(net) as seen:
            net(samples, labels=samples).loss.backward()
        watched = seen.table(WORST)
    return Outcome(values, seconds, memory, report, watched, net.config._experts_implementation)


def plot(outcomes: dict[str, list[Outcome]], file: str) -> None:
    """Draw the loss of each recipe over the steps, of the first seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for recipe, (outcome, *_) in outcomes.items():
        axes.plot(outcome.losses, label=recipe, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    axes.grid(True, alpha=0.25)
    figure.savefig(file, dpi=150, bbox_inches="tight")


def not_run(model: Model, device: str) -> list[str]:
    """What the run leaves open."""
    missing = ["pretrained weights and their tokenizer: the weights are random, and a byte is a token"]
    if model.whole:
        missing.append(f"{model.whole}: the model has {LAYERS} of them, and a small vocabulary")
    if device == "cpu":
        missing.append("a GPU: the times are those of mxspec's references, and say nothing about its kernels")
    return [*missing, "an evaluation: the losses are those of the training batches"]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=list(MODELS), default="tiny")
    p.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=["fp8_128", "mxfp8_rceil"], metavar="RECIPE")
    for name in ("steps", "batch", "length"):
        p.add_argument(f"--{name}", type=int, help="left out: a number that suits the model")
    p.add_argument("--seeds", type=int, default=1, help="the number of seeds; a seed sets weights and batches")
    p.add_argument("--plot", metavar="FILE", help="a picture of the first seed's losses; needs matplotlib")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args(argv)
    asked = {name: value for name in ("steps", "batch", "length") if (value := getattr(options, name)) is not None}
    if any(value < 1 for value in (options.seeds, *asked.values())):
        p.error(f"{asked | {'seeds': options.seeds}}; needs at least 1 each")
    model, console = MODELS[options.model]()._replace(**asked), Console()
    tokens = text().to(options.device)
    recipes = [PLAIN, UNQUANTIZED, *(name for name in options.recipes if name != "bf16")]
    outcomes: dict[str, list[Outcome]] = {recipe: [] for recipe in recipes}
    for seed in range(options.seeds):
        for recipe in recipes:
            outcomes[recipe].append(train(recipe, model, tokens, seed))
    table = Table("recipe", f"loss, step {model.steps}", "against bf16", "seed by seed", "s per step", "GiB")
    for recipe, each in outcomes.items():
        apart = [mine.last / bf16.last - 1 for mine, bf16 in zip(each, outcomes[PLAIN], strict=True)]
        loss, seconds = mean(outcome.last for outcome in each), median(outcome.seconds for outcome in each)
        memory, every = max(outcome.memory for outcome in each), " ".join(f"{a:+.2%}" for a in apart)
        figures = f"{loss:.4f}", f"{mean(apart):+.2%}", every, f"{seconds:.4f}", f"{memory:.1f}" if memory else "-"
        table.add_row(recipe, *figures)
    console.print(table)
    console.print(
        f"bf16 runs the experts by transformers' {outcomes[PLAIN][0].experts!r}", highlight=False, soft_wrap=True
    )
    for recipe, (outcome, *_) in outcomes.items():
        if outcome.watched is not None:
            console.print(f"{recipe}: {outcome.report}", highlight=False, soft_wrap=True, markup=False)
            console.print(f"{recipe}: the operands that lose most, of one more step:")
            console.print(outcome.watched)
    for missing in not_run(model, tokens.device.type):
        console.print(f"Not run: {missing}.", highlight=False, soft_wrap=True)
    if options.plot:
        plot(outcomes, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
