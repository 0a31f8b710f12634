"""Times the experts of gpt-oss with weights in MXFP4 (`mxspec.nn.quantize_weights`) beside bfloat16 weights.

    python benchmarks/weight_only.py [--json FILE]

One experts layer of gpt-oss-120b: 128 experts of 2880 x 2880, four for a token, with random MXFP4 weights and biases.
The time is that of the whole layer: the sorting by expert, two grouped matmuls, biases, the activation, and the
weighted sum. The contenders take turns: transformers' `grouped_mm` and `convert(model, "bf16")`, both with bfloat16
weights, and MXFP4.
Without a GPU it checks a small layer, and its times say nothing.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import mxspec
from mxspec.bench.timing import Contender, Pace, race
from mxspec.check import sqnr_db
from mxspec.console import console
from mxspec.nn import convert, quantize_weights

COMMAND = "python benchmarks/weight_only.py"
MIN_SQNR_DB = 40  # of the layer's bfloat16 result against transformers': the sums have another order
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
PACE = Pace(0.1, 40_000, 20_000, settle_us=40_000, rounds=5)
SIZES = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}


def experts(gpu: bool) -> Any:
    """A model with one experts layer of random MXFP4 numbers."""
    sizes: dict[str, Any] = SIZES if gpu else SMALL
    config = GptOssConfig(num_hidden_layers=1, **sizes)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        layer: Any = GptOssExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(std=0.02)
            for w in () if "bias" in name else parameter.mT:  # MXFP4 numbers, one expert after the other
                codes, scale = mxspec.mx_quantize(w.contiguous(), elem_dtype="e2m1")
                w.copy_(mxspec.mx_dequantize(codes, scale))
    return nn.ModuleDict({"experts": layer}).requires_grad_(False)


def routed(tokens: int, layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    device = layer.gate_up_proj_bias.device
    x = torch.randn(tokens, layer.hidden_size, device=device, dtype=torch.bfloat16)
    logits = torch.randn(tokens, layer.num_experts, device=device)
    weights, index = logits.topk(4)
    return x, index, weights.softmax(-1).bfloat16()


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="store the figures in this file")
    options = p.parse_args(argv)
    gpu = torch.cuda.is_available()
    theirs = experts(gpu)
    ours, held = copy.deepcopy(theirs), copy.deepcopy(theirs)
    convert(ours, "bf16")
    console.print(str(report := quantize_weights(held)), highlight=False)
    assert report.held, "the weights are MXFP4 numbers, so they must be held"
    names = {"transformers bf16": theirs, "mxspec bf16": ours, "mxspec MXFP4": held}
    table = Table("tokens", *(f"{name}: us, plain call" for name in names), "to transformers", title="one layer")
    rows = list[dict[str, Any]]()
    with torch.no_grad():
        for tokens in TOKENS if gpu else (4,):
            args = routed(tokens, theirs["experts"])
            expected = theirs["experts"](*args)
            for name, model in names.items():
                if (found := sqnr_db(model["experts"](*args), expected)) < MIN_SQNR_DB:
                    raise AssertionError(f"{name}, {tokens} tokens: {found:.1f} dB; needs {MIN_SQNR_DB}")
            contenders = [Contender(name, model["experts"], [args]) for name, model in names.items()]
            race(contenders, PACE)
            times = {c.name: {"us": c.us, "call_us": c.call_us, "spread": c.spread} for c in contenders}
            ratio = contenders[0].us / contenders[-1].us
            cells = [f"{c.us:.0f}, {c.call_us:.0f}" for c in contenders]
            table.add_row(str(tokens), *cells, f"{ratio:.2f}, {contenders[0].call_us / contenders[-1].call_us:.2f}")
            rows.append({"tokens": tokens, "times": times})
    console.print(table)
    if options.json:
        versions = {library: metadata.version(library) for library in ("torch", "triton", "transformers")}
        device = torch.cuda.get_device_name() if gpu else "CPU"
        run = {
            "device": device,
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/weight_only.py",
        }
        sizes = {"bytes in bf16": report.bytes_before, "bytes in MXFP4": report.bytes_after}
        options.json.write_text(json.dumps({**run, "versions": versions, **sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
