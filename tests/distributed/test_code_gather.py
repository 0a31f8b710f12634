"""FSDP2 that gathers codes trains with the bits of FSDP2 that gathers values, on 1 and 2 processes: CPUs or GPUs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mxspec.distributed import gather_codes
from mxspec.distributed.code_gather import Gathered, Master
from mxspec.nn import RECIPES, Float8BlockwiseLinear, GroupedExperts, MXLinear, Recipe
from tests.helpers import here, on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
STEPS, WIDTH = 3, 144  # a block of K that is shorter
OFFS = torch.tensor([10, 10, 30, 40], dtype=torch.int32)
WEIGHTS = ("linear.weight", "experts.w_gate_up", "experts.w_down")


class Model(nn.Module):
    def __init__(self, recipe: Recipe = RECIPES["fp8_128"]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = Float8BlockwiseLinear(WIDTH, 256, recipe=recipe)
        self.experts = GroupedExperts(4, 256, 64, recipe)
        self.head = nn.Linear(256, 8)

    def forward(self, x, offs):
        return self.head(self.experts(self.linear(x), offs))


def sharded(model: Model, codes: bool, reshard: bool = True, dtype: torch.dtype | None = None) -> Model:
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    if codes:
        assert gather_codes(model, mesh) == dict.fromkeys(WEIGHTS, "codes")
    for part in (model.linear, model.experts, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return model


def trained(model: Model) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 + 10 * step + dist.get_rank())
        loss = model(torch.randn(40, WIDTH).to(here()), OFFS.to(here())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(type(t.to_local()) is torch.Tensor for t in optimizer.state[model.experts.w_down].values() if t.ndim)
    return losses


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: t.full_tensor() for name, t in model.state_dict().items()}
    assert all(type(t) is torch.Tensor for t in state.values())
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _trains(rank: int) -> None:
    fp8 = RECIPES["fp8_128"]
    recipes = fp8, replace(fp8, save_weight_codes=False), RECIPES["fp8_128_pow2"]
    some = [*itertools.product(recipes, (True, False), (None,)), (fp8, True, torch.bfloat16)]
    for recipe, *how in some:
        by_values, by_codes = (sharded(Model(recipe).to(here()), codes, *how) for codes in (False, True))
        assert trained(by_values) == trained(by_codes), (recipe, how)
        assert same(state_of(by_values), state_of(by_codes)), (recipe, how)
        assert not same(state_of(by_codes), dict(Model(recipe).to(here()).state_dict()))


@pytest.mark.turns(3)
@pytest.mark.parametrize(("world", "backend"), [(1, "gloo"), (2, "gloo"), (1, "nccl"), (2, "nccl")])
def test_it_trains_with_the_bits_of_gathered_values(world, backend):
    on_ranks(world, _trains, timeout_s=60 if backend == "gloo" else 300, backend=backend)


def _is_short(rank: int) -> None:
    model, seen = sharded(Model(), codes=True), []

    def look(module, args):
        seen.extend(p.data for p in module.parameters(recurse=False) if p.ndim > 1)

    for layer in (model.linear, model.experts):
        layer.register_forward_pre_hook(look)
    model(torch.randn(40, WIDTH), OFFS).sum().backward()
    assert [type(t) for t in seen] == [Gathered] * 3
    for gathered, blocks in zip(seen, (2 * 2, 4 * 1 * 2, 4 * 2 * 1), strict=True):
        assert sum(share.nbytes for share in gathered.shares) == gathered.numel() + 4 * blocks
        with pytest.raises(RuntimeError, match="codes and no values in a forward, so only the matmuls of its recipe"):
            gathered.norm()
    model.experts.recipe = RECIPES["fp8_128_pow2"]
    with pytest.raises(RuntimeError, match=r"have scale_format fp32 .* asks for pow2 .* recipe before gather_codes"):
        model(torch.randn(40, WIDTH), OFFS)


def test_a_gather_moves_a_byte_an_element_and_only_matmuls_read_it():
    on_ranks(2, _is_short)


def _is_saved(rank: int, folder: Path) -> None:
    model = sharded(Model().to(here()), codes=True)
    trained(model)
    state = model.state_dict()
    assert {type(t.to_local()) for t in state.values()} == {torch.Tensor}
    dcp.save(state, checkpoint_id=folder)
    for codes in (True, False):
        other = sharded(Model(RECIPES["fp8_128"]).to(here()), codes)
        found = other.state_dict()
        dcp.load(found, checkpoint_id=folder)
        other.load_state_dict(found)
        assert same(state_of(other), state_of(model)), codes


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_checkpoint_has_values_and_any_model_loads_it(tmp_path, backend):
    on_ranks(2, _is_saved, tmp_path, backend=backend)


def _is_refused(rank: int) -> None:
    mesh, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    uneven = nn.ModuleDict(
        {
            "mx": MXLinear(128, 256),
            "rows": Float8BlockwiseLinear(128, 384),
            "experts": GroupedExperts(3, 128, 64, "fp8_128"),
            "bf16": GroupedExperts(2, 128, 64, "bf16"),
        }
    )
    before = {name: p.data_ptr() for name, p in uneven.named_parameters()}
    assert gather_codes(uneven, mesh) == {
        "mx.weight": "values, because the layer is a MXLinear",
        "rows.weight": "values, because 384 rows are no multiple of 256 for 2 ranks",
        **dict.fromkeys(
            ("experts.w_gate_up", "experts.w_down"), "values, because 3 experts are no multiple of 2 for 2 ranks"
        ),
        **dict.fromkeys(("bf16.w_gate_up", "bf16.w_down"), "values, because the recipe's format is bf16"),
    }
    assert before == {name: p.data_ptr() for name, p in uneven.named_parameters()}
    with pytest.raises(TypeError, match=r"the model is a int; needs an nn\.Module"):
        gather_codes(3, mesh)
    with pytest.raises(ValueError, match="gather_codes: the mesh has 2 dimensions; needs 1"):
        gather_codes(Model(), two)
    model = Model()
    gather_codes(model, mesh)
    with pytest.raises(RuntimeError, match=r"linear\.weight is a Master already\. Call it once"):
        gather_codes(model, mesh)
    with pytest.raises(RuntimeError, match=r"experts\.w_gate_up is a DTensor already"):
        gather_codes(nn.ModuleDict({"experts": sharded(Model(), codes=False).experts}), mesh)


def test_what_it_leaves_and_refuses_is_said():
    on_ranks(2, _is_refused)


def _starts_on_meta(rank: int) -> None:
    with torch.device("meta"):
        model = Model()
    sharded(model, codes=True)
    model.to_empty(device=here())
    whole = Model().state_dict()
    with torch.no_grad():
        for name, t in model.state_dict().items():
            assert isinstance(t, DTensor)
            t.to_local().copy_(whole[name].chunk(2)[rank])
    assert isinstance(model.linear.weight.to_local(), Master)
    assert trained(model) == trained(sharded(Model().to(here()), codes=True))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_model_that_is_made_on_the_meta_device_trains_too(backend):
    on_ranks(2, _starts_on_meta, backend=backend)
