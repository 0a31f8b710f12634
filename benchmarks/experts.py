"""Times grouped matmuls that train, and compares them with bfloat16.

    python benchmarks/experts.py --model mixtral|deepseek-v3|qwen3-30b|gpt-oss-20b|all [--json FILE]
    python benchmarks/experts.py [--recipe fp8_128] [--even] [MxNxKxE ...]

With `--model`, the call is one step, forward and backward, of the SwiGLU experts of a real model. The experts get
uneven numbers of tokens, which fall as rank^-0.3. All contenders take turns in one loop, as plain eager calls.
PyTorch's `grouped_mm` in bfloat16, with three separate weights, is the reference for speed and for values. First, each
contender's output and gradients are compared with the reference. A second step, whose new tensors start full of a
poison, must give the same bits. The contender "weights quantized again" is the recipe with save_weight_codes=False, and
must give the bits of fp8_128. For gpt-oss-20b, the contenders are transformers' own experts layer, with its experts
implementation `grouped_mm`, and the same layer converted to each recipe. A step then includes sorting the tokens by
expert, the activation with its biases, and the sum of each token's four experts. After the race, each kernel of the
fp8_128 step is timed alone. "saved" counts the bytes that the forward saves for the backward, without the parameters,
which are in memory anyway.

Without `--model`, the calls are the forward and backward of one grouped linear, and of SwiGLU experts with hidden width
N. There are M tokens of width K, E experts, and weights `(E, N, K)`.

1. The outputs and gradients are compared with the outputs and gradients of bfloat16.
2. The whole step is timed as a program runs it, with quantizing and padding. In the same race are PyTorch's grouped
   matmul in bfloat16, the experts' own module with the recipe bf16, and torchao in the recipe's format, if it can be
   imported.
3. Each kernel of the step is timed alone, with the operands that it had in the step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import grouped_mm, silu
from torch.utils._python_dispatch import TorchDispatchMode

from mxspec.bench.timing import Contender, Pace, race
from mxspec.cases.common.mx_operands import bench_sizes
from mxspec.check import poisoned, sqnr_db
from mxspec.console import console
from mxspec.nn import RECIPES, GroupedExperts, Recipe, cache_weights, fp8_grouped_mm, mx_grouped_mm

# Tokens, hidden width, intermediate width, experts. DeepSeek-V3: the 32 experts of one rank.
MODELS = {
    "mixtral": (16384, 4096, 14336, 8),
    "deepseek-v3": (32768, 7168, 2048, 32),
    "qwen3-30b": (65536, 2048, 768, 128),
    "gpt-oss-20b": (65536, 2880, 2880, 32),  # 16384 tokens, each with four experts
}
TOP = 4  # gpt-oss's experts for each token
KEPT, AGAIN = ", weights' codes kept", ", weights quantized again"
SHAPES = ["32768x2048x7168x8", "32768x8192x5120x8"]  # from torchao's benchmarks: DeepSeek-V3, and Llama 4
MIN_SQNR_DB = {"grouped linear": 25, "SwiGLU experts": 20}  # against bfloat16; in experts the noise of matmuls adds up
STEPS, PARTS = Pace(0.3, 60_000, 1_000, 60_000), Pace(0.3, 30_000, 500, 30_000, rounds=3)
REST = "the rest: activations, sums, zeros"
Layer = Callable[[Tensor, Tensor], Tensor]  # a function of tokens and offs
GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens, weights, offs


class Result(NamedTuple):
    times_as_fast: dict[str, float]  # how many times as fast as bfloat16, and as torchao
    quantizing: float  # the share of quantizing in the time of the step


def linear(mm: GroupedMM, weights: list[Tensor]) -> Layer:
    return lambda x, offs: mm(x, weights[0], offs)


def experts(mm: GroupedMM, weights: list[Tensor]) -> Layer:
    gate_up, down = weights

    def layer(x: Tensor, offs: Tensor) -> Tensor:
        gate, up = mm(x, gate_up, offs).chunk(2, -1)
        return mm(silu(gate) * up, down, offs)

    return layer


def bf16(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return grouped_mm(x, w.mT, offs=offs)


def torchao(recipe: Recipe) -> GroupedMM:
    """torchao's grouped matmul for a recipe, emulated if torchao's kernels need Blackwell or DeepGEMM's K-groups."""
    if recipe.format == "fp8_128":
        from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm as fp8

        return lambda x, w, offs: fp8._to_fp8_blockwise_then_scaled_grouped_mm(x, w.mT, offs)
    from torchao.prototype.moe_training import mxfp8_grouped_mm as mx

    options: dict[str, Any] = {
        "kernel_preference": mx.KernelPreference.EMULATED,
        "wgrad_with_hp": recipe.wgrad_bf16,
        "scale_calculation_mode": mx.ScaleCalculationMode[recipe.scaling.upper()],
        "pad_token_groups_for_grouped_mm": True,
    }
    return lambda x, w, offs: mx._to_mxfp8_then_scaled_grouped_mm(x, w.mT, offs, **options)


def step(layer: Layer, x: Tensor, weights: list[Tensor], offs: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of one forward and backward."""
    leaves = [x, *weights]
    for leaf in leaves:
        leaf.grad = None
    out = layer(x, offs)
    out.backward(dy)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(got: list[Tensor], expected: list[Tensor], least: float) -> None:
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if (measured := sqnr_db(mine, theirs)) < least:
            what = ("y", "dx")[i] if i < 2 else f"dw {i - 1}"
            raise AssertionError(f"{what}: {measured:.1f} dB against bfloat16; needs {least} dB of SQNR or more")


class Calls(TorchDispatchMode):
    """Records every kernel that runs, with its operands.

    Equal kernels share a name. Kernels that neither quantize nor multiply have the name REST. On a GPU, the backward's
    thread sees the mode too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[partial[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        result = call()
        self.found.setdefault(self._name(call, result), []).append(call)
        return result

    def _name(self, call: partial[Any], result: Any) -> str:
        name = call.func.name().split("::")[1]  # type: ignore[attr-defined]
        if call.func.namespace != "mxspec" and "grouped_mm" not in name:  # type: ignore[attr-defined]
            return REST
        first = result[0] if isinstance(result, (tuple, list)) else result
        shapes = " -> ".join("x".join(map(str, t.shape)) for t in (call.args[0], first))
        axis = f", axis {call.keywords['axis']}" if "axis" in call.keywords else ""
        return f"{name.removesuffix('.default')} {shapes}{axis}"


def parts(calls: Calls, anything: Tensor) -> Iterator[Contender]:
    """A contender for each kernel: one call of it, or for REST all calls."""
    for what, found in calls.found.items():

        def run(_: Tensor, found: list[partial[Any]] = found if what == REST else found[:1]) -> Tensor:
            for call in found:
                call()
            return anything

        yield Contender(what, run, [(anything,)], waits=what == REST)


def raced(
    kind: str, layers: dict[str, Layer], x: Tensor, weights: list[Tensor], offs: Tensor, dy: Tensor, pace: Pace
) -> list[Contender]:
    """Race the steps. Each step is first compared with the first step, bfloat16's. If torchao fails, it is left out."""
    found: list[Contender] = []
    expected: list[Tensor] = []
    for name, layer in layers.items():
        run = partial(step, layer, x, weights, offs)
        try:
            expected = expected or run(dy)
            compare(run(dy), expected, MIN_SQNR_DB[kind])
            found.append(Contender(name, run, [(dy,)], waits=True))
        except Exception as error:
            if name != "torchao":
                raise
            console.print(f"torchao is not in the race: {type(error).__name__}: {error}", markup=False)
    expected.clear()
    race(found, pace)
    return found


def measure(
    kind: str, recipe: Recipe, shape: str, device: torch.device, paces: tuple[Pace, Pace], ragged: bool = True
) -> Result:
    """Time one layer of one shape, and print the figures."""
    M, N, K, E = map(int, shape.split("x"))
    torch.manual_seed(0)
    dtype, is_linear = torch.bfloat16, kind == "grouped linear"
    module = GroupedExperts(E, K, N, recipe, device, dtype)
    first = module.w_gate.detach().clone().requires_grad_()
    weights: list[Tensor] = [first] if is_linear else list(module.parameters())
    x = torch.randn(M, K, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(M, N if is_linear else K, device=device, dtype=dtype)
    offs = torch.tensor(bench_sizes(M, E, ragged)[0], device=device).cumsum(0, dtype=torch.int32)
    of = linear if is_linear else experts
    own = fp8_grouped_mm if recipe.format == "fp8_128" else mx_grouped_mm
    layers = {"bf16": of(bf16, weights), "mxspec": of(partial(own, recipe=recipe), weights) if is_linear else module}
    if not is_linear:
        plain = copy.copy(module)  # the same parameters
        plain.set_recipe("bf16")
        layers["mxspec in bf16"] = plain
    try:
        layers["torchao"] = of(torchao(recipe), weights)
    except ImportError as error:
        console.print(f"torchao is not in the race: {error}", markup=False)

    steps = {c.name: c.us for c in raced(kind, layers, x, weights, offs, dy, paces[0])}
    with Calls() as calls:
        step(layers["mxspec"], x, weights, offs, dy)
    with torch.no_grad():
        kernels = list(parts(calls, x))
        race(kernels, paces[1])

    title = f"{kind}, {shape}, {'ragged' if ragged else 'even'}"
    return report(title, steps, kernels, calls, M, 2 * M * N * K * (1 if is_linear else 3))


def matmul_flops(name: str, tokens: int) -> int:
    """The operations of a matmul, from the shapes in its name. A matmul with three dimensions of output is a wgrad."""
    a, out = (tuple(map(int, shape.split("x"))) for shape in name.split(",")[0].split(" ", 1)[1].split(" -> "))
    return 2 * tokens * (out[-2] * out[-1] if len(out) == 3 else a[-1] * out[-1])


def report(
    title: str, steps: dict[str, float], kernels: list[Contender], calls: Calls, tokens: int, flops: int
) -> Result:
    """Print each kernel's share of the step, and the steps. `flops` are those of the forward, without padding."""
    table, us = Table("kernel", "calls", "us", "share", "TFLOP/s", title=title), steps["mxspec"]
    for column in table.columns[1:]:
        column.justify = "right"
    quantizing = total = 0.0
    for kernel in kernels:
        count = 1 if kernel.name == REST else len(calls.found[kernel.name])
        part = count * kernel.us
        total += part
        quantizing += part if "quantize" in kernel.name else 0
        multiplies = "grouped_gemm" in kernel.name or "grouped_mm" in kernel.name
        rate = f"{matmul_flops(kernel.name, tokens) / kernel.us / 1e6:.0f}" if multiplies else ""
        table.add_row(kernel.name, str(count), f"{part:.1f}", f"{part / us:.1%}", rate)
    table.add_row("between them", "", f"{us - total:.1f}", f"{1 - total / us:.1%}", "")
    table.add_section()
    for name, other in steps.items():
        table.add_row(name, "", f"{other:.1f}", f"{other / us:.1%}", f"{3 * flops / other / 1e6:.0f}")
    console.print(table)
    result = Result({name: other / us for name, other in steps.items() if name != "mxspec"}, quantizing / us)
    for name, times in result.times_as_fast.items():
        console.print(f"{times:.2f} times as fast as {name}")
    console.print(f"quantizing: {result.quantizing:.1%} of the step\n")
    return result


def uneven(M: int, E: int) -> Tensor:
    """The ends of E groups of M tokens whose sizes fall as rank^-0.3, in a fixed random order."""
    shares = torch.arange(1, E + 1).float()[torch.randperm(E, generator=torch.Generator().manual_seed(1))] ** -0.3
    offs = (shares.cumsum(0) / shares.sum() * M).to(torch.int32)
    offs[-1] = M
    return offs


class StepOf:
    """One step of a layer: its output and the gradients of x and of the weights, w_gate and w_up as one."""

    def __init__(self, layer: Layer, x: Tensor, weights: list[Tensor], offs: Tensor, dy: Tensor) -> None:
        self.layer, self.x, self.weights, self.offs, self.dy = layer, x, weights, offs, dy

    def __call__(self, _: Tensor | None = None) -> Tensor:
        return step(self.layer, self.x, self.weights, self.offs, self.dy)[0]

    def all(self) -> list[Tensor]:
        out, grad_x, *grads = step(self.layer, self.x, self.weights, self.offs, self.dy)
        if grads[-1].ndim == 2:  # biases: gate and up are one weight already
            return [out, grad_x, *grads]
        return [out, grad_x, torch.cat(grads[:-1], 1), grads[-1]]

    def saved_bytes(self) -> int:
        """The bytes that the forward saves for the backward. Weights do not count, because they live anyway.

        x counts if the forward saves it.
        """
        known = {t.untyped_storage().data_ptr() for t in self.weights}
        saved: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            self.layer(self.x, self.offs)
        return sum(saved.values())

    def host_us(self, steps: int = 5) -> float:
        """The time in which the host issues one step. It never waits for the device."""
        start = time.perf_counter()
        for _ in range(steps):
            self()
        return (time.perf_counter() - start) / steps * 1e6


Contenders = tuple[dict[str, StepOf], dict[str, Any], Tensor, Tensor]  # steps, modules with a recipe, x, dy


def swiglu_steps(M: int, H: int, inner: int, E: int, device: torch.device) -> Contenders:
    """The steps of `GroupedExperts` by each recipe, and of three grouped matmuls in PyTorch."""
    module = GroupedExperts(E, H, inner, "fp8_128", device, torch.bfloat16)
    apart = [w.detach().clone().requires_grad_() for w in (module.w_gate, module.w_up)]
    x = torch.randn(M, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy, offs = torch.randn(M, H, device=device, dtype=torch.bfloat16), uneven(M, E).to(device)

    def own(recipe: Recipe | str) -> GroupedExperts:
        other = copy.copy(module)  # the same parameters
        other.set_recipe(recipe)
        return other

    def three(x: Tensor, offs: Tensor) -> Tensor:
        return bf16(silu(bf16(x, apart[0], offs)) * bf16(x, apart[1], offs), module.w_down, offs)

    steps = {"PyTorch bf16": StepOf(three, x, [*apart, module.w_down], offs, dy)}
    modules = {"bf16": own("bf16"), "fp8_128": own("fp8_128"), "mxfp8": own("mxfp8_rceil")}
    modules |= {recipe + KEPT: copy.copy(modules[recipe]) for recipe in ("fp8_128", "mxfp8")}
    modules["fp8_128" + AGAIN] = own(replace(RECIPES["fp8_128"], save_weight_codes=False))
    steps |= {what: StepOf(m, x, list(module.parameters()), offs, dy) for what, m in modules.items()}
    return steps, modules, x, dy


def gpt_oss_steps(M: int, H: int, inner: int, E: int, device: torch.device) -> Contenders:
    """The steps of gpt-oss's experts in transformers, and of the same layer converted to each recipe."""
    from torch import nn
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from mxspec.nn import convert

    tokens, offs = M // TOP, uneven(M, E).to(device)
    config = GptOssConfig(hidden_size=H, intermediate_size=inner, num_local_experts=E, num_experts_per_tok=TOP)
    config._experts_implementation = "grouped_mm"
    with device:
        theirs = GptOssExperts(config).to(torch.bfloat16)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=H**-0.5 if parameter.ndim == 3 else 0.1)
        x = torch.randn(tokens, H, dtype=torch.bfloat16, requires_grad=True)
        dy, scores = torch.randn(tokens, H, dtype=torch.bfloat16), torch.randn(tokens, TOP).softmax(-1).bfloat16()
        # Every TOP-th part of the sorted pairs belongs to other experts, so a token's experts differ.
        pairs = torch.searchsorted(offs, torch.arange(M, dtype=torch.int32), right=True)
        index = pairs.view(TOP, tokens).mT[torch.randperm(tokens)].contiguous()

    def run(layer: nn.Module) -> StepOf:
        return StepOf(lambda x, offs: layer(x, index, scores), x, list(theirs.parameters()), offs, dy)

    def own(recipe: str) -> nn.Module:
        around = nn.ModuleDict({"experts": copy.copy(theirs)})  # the same parameters
        convert(around, recipe)
        return around["experts"]

    modules = {"bf16": own("bf16"), "fp8_128": own("fp8_128"), "mxfp8": own("mxfp8_rceil")}
    modules["fp8_128" + KEPT] = copy.copy(modules["fp8_128"])
    steps = {"PyTorch bf16": run(theirs)} | {what: run(layer) for what, layer in modules.items()}
    return steps, modules, x, dy


def measure_model(name: str, device: torch.device, pace: Pace) -> list[dict[str, Any]]:
    """Race the steps of a model's experts, and print the table. Gives a row for each contender."""
    M, H, inner, E = shape = MODELS[name]
    torch.manual_seed(0)
    contenders_of = gpt_oss_steps if name.startswith("gpt-oss") else swiglu_steps
    steps, modules, x, dy = contenders_of(M, H, inner, E, device)
    with contextlib.ExitStack() as held:
        for what, m in modules.items():
            if what.endswith(KEPT):
                held.enter_context(cache_weights(m))
        expected = steps["PyTorch bf16"].all()
        for what, run in steps.items():
            got = run.all()
            compare(got, expected, MIN_SQNR_DB["SwiGLU experts"])
            with poisoned(0xFF):
                if not all(map(torch.equal, run.all(), got)):
                    raise AssertionError(f"{name}: a step in poisoned memory gives other values")
            if what.endswith(AGAIN) and not all(map(torch.equal, steps["fp8_128"].all(), got)):
                raise AssertionError(f"{name}: quantizing the weights again gives other values")
        del expected, got
        contenders = [Contender(what, run, [(dy,)], waits=True) for what, run in steps.items()]
        race(contenders, pace)
        rows, first = list[dict[str, Any]](), contenders[0].us
        for contender, run in zip(contenders, steps.values(), strict=True):
            peak = peak_bytes(run) if device.type == "cuda" else 0
            rows.append(
                {
                    "model": name, "shape": list(shape), "contender": contender.name, "us": contender.us,
                    "times PyTorch bf16": first / contender.us, "host us": run.host_us(), "peak bytes": peak,
                    "saved bytes": run.saved_bytes(),
                }
            )  # fmt: skip
    title = f"{name}: {M} tokens x {H} x {inner}, {E} experts"
    table = Table("step", "us", "times PyTorch", "host us", "peak GiB", "saved GiB", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        gib = [f"{row[what] / 2**30:.2f}" for what in ("peak bytes", "saved bytes")]
        table.add_row(
            row["contender"], f"{row['us']:.0f}", f"{row['times PyTorch bf16']:.3f}", f"{row['host us']:.0f}", *gib
        )
    console.print(table)
    with Calls() as calls:
        steps["fp8_128"]()
    with torch.no_grad():
        kernels = list(parts(calls, x))
        race(kernels, Pace(0.1, 20_000, 500, 20_000, rounds=3) if device.type == "cuda" else pace)
    us = {row["contender"]: row["us"] for row in rows}
    report(f"{name}: the step of fp8_128", {"mxspec": us.pop("fp8_128"), **us}, kernels, calls, M, 6 * M * H * inner)
    return rows


def peak_bytes(run: StepOf) -> int:
    """The peak memory of a step, above the memory that is in use before the step."""
    for leaf in (run.x, *run.weights):
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_models(names: list[str], device: torch.device, store: Path | None, pace: Pace = STEPS) -> None:
    rows = list[dict[str, Any]]()
    for name in names:
        rows += measure_model(name, device, pace)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if store:
        versions = {library: metadata.version(library) for library in ("torch", "triton")}
        command = f"python benchmarks/experts.py --model {names[0] if len(names) == 1 else 'all'}"
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        run = {"device": gpu, "date": datetime.date.today().isoformat(), "command": command}
        store.write_text(json.dumps({**run, "versions": versions, "rows": rows}, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=[*MODELS, "all"], help="the experts of a real model; shapes are then left out")
    p.add_argument("--json", type=Path, help="with --model: store the figures in this file")
    p.add_argument("shapes", nargs="*", default=SHAPES, metavar="MxNxKxE")
    p.add_argument("--recipe", choices=[name for name in RECIPES if name != "bf16"], default="mxfp8_rceil")
    p.add_argument("--even", action="store_true", help="give all experts equally many tokens; default: ragged groups")
    options = p.parse_args(argv)
    if options.model:
        measure_models(list(MODELS) if options.model == "all" else [options.model], torch.device("cuda"), options.json)
        return
    for shape in options.shapes:
        for kind in MIN_SQNR_DB:
            measure(kind, RECIPES[options.recipe], shape, torch.device("cuda"), (STEPS, PARTS), not options.even)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
