"""Train a small mixture of experts in bfloat16 and by each recipe, from the same seeds, and compare the losses.

    python examples/train_moe.py [--steps 1000] [--seeds 3] [--recipes mxfp8_rceil bf16 ...] [--plot differences.png]

The text is the text of `train_char_model.py`. The model predicts a character from the CONTEXT characters before it. It
has an embedding, a Linear, layers of EXPERTS experts, and a Linear. In each layer a router takes TOP experts for each
token. `mxspec.nn.convert` makes the Linears and experts train by the recipe. The modules that it leaves out stay
bfloat16, and are printed. The recipes of NVFP4 convert the experts alone, and train the last 18% of the steps in
bfloat16. NVIDIA's recipe, too, leaves some layers, above all the last ones, and changes to bfloat16 late in a training.
`--bf16-end 0` trains all steps in NVFP4. With `--layers 6 --bf16-layers 1` the last of six layers of experts stays
bfloat16.

With several processes, each process has a part of the experts and a part of each batch. FSDP2 shards the other layers:

    torchrun --nproc-per-node 2 examples/train_moe.py --expert-parallel [values|codes] [...]
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from statistics import mean, median
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy

from mxspec.distributed import ExpertParallel
from mxspec.nn import RECIPES, Conversion, GroupedExperts, convert

CONTEXT, WIDTH, DIM, HIDDEN, LAYERS, CHARACTERS = 16, 64, 256, 512, 2, 128
EXPERTS, TOP = 8, 2


class Outcome(NamedTuple):
    losses: list[float]
    seconds: float  # a step, the first one not counted
    report: Conversion

    @property
    def last(self) -> float:
        """The mean loss of the last tenth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


class Mixture(nn.Module):
    """`x + sum of weight * expert(norm(x))` over the TOP experts that the router takes; `(T, DIM)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM, elementwise_affine=False)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = GroupedExperts(EXPERTS, DIM, HIDDEN, recipe="bf16")

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        weight, expert = self.router(tokens).float().softmax(-1).topk(TOP)  # (T, TOP)
        # The experts get each token TOP times, sorted by expert. `offs` is the end of each expert's tokens. All of this
        # is computed on the device.
        of_expert, order = expert.flatten().sort(stable=True)
        numbers = torch.arange(EXPERTS, device=x.device)
        offs = torch.searchsorted(of_expert, numbers, right=True, out_int32=True)
        out = self.experts(tokens[order // TOP], offs)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = out[back].view(-1, TOP, DIM)
        return x + (out * weight[..., None].to(out.dtype)).sum(1)


def text() -> Tensor:
    """All topics as one row of character codes."""
    characters = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.tensor(list(characters.encode("ascii", "replace")))


def model(seed: int, layers: int | None = None) -> nn.Sequential:
    """The same parameters, in float32, whatever the recipe will be. Without `layers`, there are LAYERS."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(CHARACTERS, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, DIM),
        *(Mixture() for _ in range(layers or LAYERS)),
        nn.RMSNorm(DIM, elementwise_affine=False),
        nn.Linear(DIM, CHARACTERS),
    )


def shard(net: nn.Module, wire: str) -> None:
    """Give each rank a part of the experts, and a shard of every other parameter."""
    mesh = init_device_mesh(next(net.parameters()).device.type, (dist.get_world_size(),))
    # bf16 has no codes: its tokens travel as they are
    bf16 = any(layer.recipe.format == "bf16" for layer in net.modules() if isinstance(layer, GroupedExperts))
    parallelize_module(net, mesh, {"*.experts": ExpertParallel(wire="values" if bf16 else wire)})
    experts = [p for layer in net.modules() if isinstance(layer, GroupedExperts) for p in layer.parameters()]
    fully_shard(net, mesh=mesh, ignored_params=set(experts))


def converted(net: nn.Sequential, recipe: str, bf16_layers: int) -> Conversion:
    """Convert the model. NVFP4's recipes convert experts only. The last `bf16_layers` mixtures stay as they are."""
    mixtures = [layer for layer in net if isinstance(layer, Mixture)]
    kept = {layer for mixture in mixtures[len(mixtures) - bf16_layers :] for layer in mixture.modules()}
    only_experts = "nvfp4" in recipe

    def is_chosen(layer: nn.Module, name: str) -> bool:
        return layer not in kept and (isinstance(layer, GroupedExperts) or not only_experts)

    return convert(net, recipe, is_chosen if kept or only_experts else None, experts_per_token=TOP)


def train(
    recipe: str, characters: Tensor, steps: int, batch: int, seed: int = 0, wire: str | None = None,
    layers: int | None = None, bf16_layers: int = 0, bf16_from: int | None = None,
) -> Outcome:  # fmt: skip
    """Train by a recipe, and from the step `bf16_from` on in bfloat16.

    With a wire, train on several ranks, each with a part of the experts and of the batch.
    """
    device, net = characters.device, model(seed, layers).to(characters.device)
    report = converted(net, recipe, bf16_layers)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if wire else (0, 1)
    if wire:
        shard(net, wire)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed + 1)
    window = torch.arange(CONTEXT + 1, device=device)
    losses: list[Tensor] = []
    began = time.perf_counter()
    for step in track(range(steps), f"{recipe}, seed {seed}", transient=True, disable=rank > 0):
        if step == bf16_from:
            for layer in net.modules():
                if isinstance(layer, GroupedExperts):
                    layer.set_recipe("bf16")
        start = torch.randint(len(characters) - CONTEXT, (batch, 1), generator=generator).to(device)
        samples = characters[start + window].chunk(ranks)[rank]
        with torch.autocast(device.type, torch.bfloat16):
            logits = net(samples[:, :-1])
        loss = cross_entropy(logits.float(), samples[:, -1])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if wire:
            dist.all_reduce(losses[-1].div_(ranks))
        if step == 0:  # the first step compiles kernels, so it is not timed
            float(losses[0])
            began = time.perf_counter()
    values = torch.stack(losses).tolist()
    return Outcome(values, (time.perf_counter() - began) / max(1, steps - 1), report)


def plot(apart: dict[str, list[float]], steps: int, file: str) -> None:
    """Draw the difference of each recipe's loss to that of bf16, a point for each seed and a line at their mean."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.55 * len(apart)))
    for row, each in enumerate(apart.values()):
        percent = [100 * a for a in each]
        axes.plot(percent, [row] * len(percent), "o", color="#0072B2", markersize=7, alpha=0.7)
        axes.plot([mean(percent)] * 2, [row - 0.3, row + 0.3], color="#D55E00", linewidth=2)
        axes.annotate(f"{mean(percent):+.2f}%", (mean(percent), row - 0.35), ha="center", fontsize=9)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(apart)), apart)
    axes.set(ylim=(len(apart) - 0.5, -0.8), xlabel=f"loss after {steps} steps, difference to bf16 in percent")
    axes.set_title("Points: seeds. Lines: their means.", fontsize=10, loc="left")
    axes.grid(True, axis="x", alpha=0.25)
    figure.savefig(file, dpi=150, bbox_inches="tight")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--batch", type=int, default=1024)
    p.add_argument("--seeds", type=int, default=1, help="the number of seeds; a seed sets parameters and batches")
    p.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="RECIPE")
    p.add_argument("--layers", type=int, default=LAYERS, help="the number of layers of experts")
    p.add_argument("--bf16-layers", type=int, default=0, help="how many of them, the last ones, stay bfloat16")
    p.add_argument(
        "--bf16-end", type=float, default=0.18, metavar="SHARE",
        help="the share of the steps, the last ones, that the recipes of NVFP4 train in bfloat16; default 0.18",
    )  # fmt: skip
    p.add_argument("--plot", metavar="FILE", help="a picture of the differences to bf16; needs matplotlib")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--expert-parallel",
        nargs="?",
        const="values",
        choices=["values", "codes"],
        help="train on the processes of torchrun; tokens travel as values, or as codes of the recipe",
    )
    options = p.parse_args(argv)
    if options.seeds < 1 or options.steps < 1:
        p.error(f"--seeds {options.seeds} --steps {options.steps}; needs at least 1")
    if not 0 <= options.bf16_layers <= options.layers or options.layers < 1:
        p.error(f"--layers {options.layers} --bf16-layers {options.bf16_layers}; needs 1 or more, and at most as many")
    if not 0 <= options.bf16_end <= 1:
        p.error(f"--bf16-end {options.bf16_end}; needs a share of 0 to 1")
    if options.expert_parallel:
        dist.init_process_group("nccl" if options.device.startswith("cuda") else "gloo")
        if options.device == "cuda":
            options.device = f"cuda:{dist.get_node_local_rank()}"
            torch.cuda.set_device(options.device)
        if options.batch % dist.get_world_size():
            p.error(f"--batch {options.batch}; needs a multiple of the {dist.get_world_size()} processes")
    characters = text().to(options.device)
    console = Console(quiet=bool(options.expert_parallel) and dist.get_rank() > 0)
    recipes = ["bf16", *(name for name in options.recipes if name != "bf16")]  # what the others are compared with
    bf16_from = {recipe: round(options.steps * (1 - options.bf16_end)) for recipe in recipes if "nvfp4" in recipe}
    outcomes: dict[str, list[Outcome]] = {recipe: [] for recipe in recipes}
    for seed in range(options.seeds):
        for recipe in recipes:
            given = options.steps, options.batch, seed, options.expert_parallel, options.layers, options.bf16_layers
            outcomes[recipe].append(train(recipe, characters, *given, bf16_from.get(recipe)))
    table = Table("recipe", f"loss at step {options.steps}", "against bf16", "seed by seed", "seconds per step")
    differences: dict[str, list[float]] = {}
    for recipe, each in outcomes.items():
        apart = [mine.last / bf16.last - 1 for mine, bf16 in zip(each, outcomes["bf16"], strict=True)]
        differences[recipe] = apart
        loss, seconds = mean(outcome.last for outcome in each), median(outcome.seconds for outcome in each)
        every = " ".join(f"{a:+.2%}" for a in apart)
        table.add_row(recipe, f"{loss:.4f}", f"{mean(apart):+.2%}", every, f"{seconds:.4f}")
    console.print(table)
    for recipe, (outcome, *_) in outcomes.items():
        if recipe != "bf16":
            console.print(f"{recipe}: {outcome.report}", highlight=False, soft_wrap=True)
            if (last := options.steps - bf16_from.get(recipe, options.steps)) > 0:
                console.print(f"  the last {last} of {options.steps} steps in bfloat16", highlight=False)
    if options.expert_parallel:
        dist.destroy_process_group()
    if options.plot and not console.quiet:
        del differences["bf16"]
        plot(differences, options.steps, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
