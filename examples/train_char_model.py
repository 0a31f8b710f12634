"""Train a small character model in bfloat16 and in FP8 with 128-blocks, from the same seed, and compare the losses.

    python examples/train_char_model.py [--steps 1000] [--device cuda]

The text is the standard library's own documentation (`pydoc_data.topics`), in 7-bit characters. The model predicts a
character from the CONTEXT characters before it. It has an embedding and two Linear layers. Only the matmuls of the
Linear layers differ between the two runs. A final loss is the mean of the last tenth of the steps. The exit code is 1
if the two final losses differ by more than 1%.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mxspec.nn import Float8BlockwiseLinear

CONTEXT, WIDTH, HIDDEN, CHARACTERS = 16, 64, 1024, 128
WITHIN = 0.01


class Outcome(NamedTuple):
    first: float  # loss of the first step
    last: float  # mean loss of the last tenth of the steps


def text() -> Tensor:
    """All topics as one row of character codes."""
    characters = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.tensor(list(characters.encode("ascii", "replace")))


def model(layer: type[nn.Linear]) -> nn.Module:
    """The same parameters, in float32, whatever the kind of the layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(CHARACTERS, WIDTH),
        nn.Flatten(),
        layer(CONTEXT * WIDTH, HIDDEN),
        nn.GELU(),
        layer(HIDDEN, CHARACTERS),
    )


def train(layer: type[nn.Linear], characters: Tensor, steps: int, batch: int) -> Outcome:
    net = model(layer).to(characters.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    window = torch.arange(CONTEXT + 1, device=characters.device)
    losses = []
    for _ in track(range(steps), layer.__name__, transient=True):
        start = torch.randint(len(characters) - CONTEXT, (batch, 1), generator=generator).to(characters.device)
        samples = characters[start + window]
        with torch.autocast(characters.device.type, torch.bfloat16):
            logits = net(samples[:, :-1])
        loss = cross_entropy(logits.float(), samples[:, -1])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    values = torch.stack(losses)
    return Outcome(float(values[0]), float(values[-max(1, steps // 10) :].mean()))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--batch", type=int, default=1024)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args(argv)
    characters = text().to(options.device)
    bf16, fp8 = (train(layer, characters, options.steps, options.batch) for layer in (nn.Linear, Float8BlockwiseLinear))
    table = Table("Linear", "loss at the first step", f"at the end, step {options.steps}")
    for name, outcome in (("bfloat16", bf16), ("FP8, 128-blocks", fp8)):
        table.add_row(name, f"{outcome.first:.4f}", f"{outcome.last:.4f}")
    console = Console()
    console.print(table)
    apart = abs(fp8.last / bf16.last - 1)
    console.print(f"{apart:.2%} apart; needs {WITHIN:.0%}", highlight=False)
    return int(apart > WITHIN)


if __name__ == "__main__":
    raise SystemExit(main())
