"""Converted experts of tiny models of transformers, and tokens with a router's choice, for several test files."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from mxspec.distributed import ExpertParallel
from mxspec.nn import convert
from tests.helpers import here

E, H, INNER, TOP, VOCAB, TOKENS, PARTS = 4, 64, 32, 2, 64, 33, 4
COMMON = {
    "vocab_size": VOCAB, "hidden_size": H, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
    "num_experts_per_tok": TOP, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {  # the names of the classes without Config and ForCausalLM, and the sizes
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": INNER, "num_experts": E, "head_dim": 32}),
    "mixtral": ("Mixtral", {"intermediate_size": INNER, "num_local_experts": E}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "moe_intermediate_size": INNER, "intermediate_size": INNER, "n_routed_experts": E,
            "first_k_dense_replace": 0, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32, "v_head_dim": 32, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        },
    ),
    "gpt_oss": ("GptOss", {"intermediate_size": INNER, "num_local_experts": E, "head_dim": 32}),
}  # fmt: skip
ROUTINGS = ("skewed", "top-1", "a part without tokens", "no tokens", "pairs without an expert", "all to one")


@functools.cache
def plain(family: str, layers: int = 1) -> nn.Module:
    """A tiny model of the family with random weights, in float32. The tests copy it."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON | sizes | {"num_hidden_layers": layers})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias" in key or "experts" in key:  # transformers starts biases at 0, and large models' experts small
                parameter.normal_(std=0.1)
    return model


def layer_of(family: str, recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    around = nn.ModuleDict({"experts": copy.deepcopy(plain(family).model.layers[0].mlp.experts).to(here(), dtype)})
    convert(around, recipe)
    return around["experts"]


class Part(NamedTuple):
    """A part of the batch. With R ranks, a rank has `PARTS / R` consecutive parts."""

    x: Tensor  # (T, H)
    index: Tensor  # (T, k), the experts that the router chose
    weights: Tensor  # (T, k)
    grad: Tensor  # (T, H), the gradient of the output


def part_of(kind: str, number: int, dtype: torch.dtype = torch.float32, step: int = 0) -> Part:
    g = torch.Generator().manual_seed(1000 * step + 10 * number + ROUTINGS.index(kind))
    T = 0 if kind == "no tokens" or (kind == "a part without tokens" and number in (0, 1)) else TOKENS + 3 * number
    scores = torch.randn(T, E, generator=g) - 0.7 * torch.arange(E)
    weights, index = scores.softmax(-1).topk(1 if kind == "top-1" else TOP)
    if kind == "pairs without an expert":
        index = torch.where(torch.rand(index.shape, generator=g) < 0.3, E, index)
    if kind == "all to one":
        index = torch.full_like(index, E - 1)
    x, grad = (torch.randn(T, H, generator=g).to(dtype) for _ in range(2))
    return Part(*(t.to(here()) for t in (x, index, weights.to(dtype), grad)))


def joined(parts: list[Part]) -> Part:
    return Part(*map(torch.cat, zip(*parts, strict=True)))


def step(layer: Any, part: Part, run: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """The output, and the gradients of the tokens, of the routing weights and of the experts' parameters."""
    x, weights = part.x.clone().requires_grad_(), part.weights.clone().requires_grad_()
    layer.zero_grad()
    out = (run or layer)(x, part.index, weights)
    out.backward(part.grad)
    of_experts = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **of_experts}


def sharded(layer: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    mesh = mesh or init_device_mesh(here().type, (dist.get_world_size(),))
    return parallelize_module(layer, mesh, ExpertParallel(**{"gradients": "sum"} | options))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def my_parts(kind: str, dtype: torch.dtype = torch.float32, step: int = 0) -> tuple[Part, slice]:
    """This rank's tokens, and which tokens of the whole batch they are."""
    parts, each = [part_of(kind, number, dtype, step) for number in range(PARTS)], PARTS // dist.get_world_size()
    first = dist.get_rank() * each
    before = sum(len(part.x) for part in parts[:first])
    own = joined(parts[first : first + each])
    return own, slice(before, before + len(own.x))


def local(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]
