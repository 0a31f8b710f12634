"""Whole models of transformers, checkpoints and FSDP2, with experts on 2 and 4 ranks, which are processes on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mxspec.check import sqnr_db
from mxspec.distributed import ExpertParallel
from mxspec.nn import convert
from tests.helpers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")
from tests.distributed.routed_experts import (
    PARTS,
    VOCAB,
    Part,
    joined,
    layer_of,
    local,
    my_parts,
    part_of,
    plain,
    same_bits,
    sharded,
    step,
)

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def experts_in(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".experts." in name}


def _batch(number: int) -> Tensor:
    """Two sequences of 17 ids, so that a loss is the mean over a power of two."""
    return torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(number))


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in float64, for the router and the output head. In float32 some processors sum by the number of rows."""
    out = x.double() @ weight.double().mT
    return (out if bias is None else out + bias).to(x.dtype)


def _trained(model: nn.Module, whole: bool, mine: slice) -> None:
    """Two steps of AdamW of the experts, or of SGD of the whole model, whose dense gradients are then averaged."""
    trains = dict(model.named_parameters()) if whole else experts_in(model)
    model.requires_grad_(False)
    for parameter in trains.values():
        parameter.requires_grad_()
    optimizer = (torch.optim.SGD if whole else torch.optim.AdamW)(trains.values(), lr=1e-2)
    for number in range(2):
        ids = _batch(number)[mine]
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        for parameter in trains.values() if len(ids) == 1 else ():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()


def _compared(rank: int, everything: nn.Module, whole: bool) -> nn.Module:
    """Train a model on this rank's half of the batch. Returns the model, after a comparison with one process."""
    alone, model = (copy.deepcopy(everything) for _ in range(2))
    for each in (alone, model):
        convert(each, "mxfp8_rceil")
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
    _trained(alone, whole, slice(None))
    if not whole:
        model.gradient_checkpointing_enable()
    _trained(model.train(), whole, slice(rank, rank + 1))
    for name, parameter in alone.named_parameters():
        mine, expected = model.get_parameter(name).detach(), parameter.detach()
        if isinstance(mine, DTensor):
            mine, expected = mine.to_local(), local(expected)
            assert not torch.equal(expected, local(everything.get_parameter(name))), name
        if whole:  # the gradients of the router and the dense layers are sums over the ranks
            assert sqnr_db(mine, expected) >= 90, name
        else:
            assert same_bits(mine, expected), name
    return model


def _a_whole_model(rank: int, folder: Path) -> None:
    """The batch is split. Experts that train alone get the bits of one process; a whole model is close to it."""
    everything = plain("qwen3_moe", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", _exact)
        _compared(rank, everything, whole=False)
        model = _compared(rank, everything, whole=True)
    _whole_state_dicts(rank, folder, model)


def _whole_state_dicts(rank: int, folder: Path, model: nn.Module) -> None:
    """`save_pretrained` of a sharded model raises. A whole state dict loads into plain transformers, bit for bit."""
    with pytest.raises(RuntimeError, match="invalid python storage") if rank == 0 else nullcontext():
        model.save_pretrained(folder / "sharded")  # rank 0 writes
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(folder / "whole", state_dict=state)
    dist.barrier()
    kind = type(plain("qwen3_moe", 2))
    loaded, info = kind.from_pretrained(folder / "whole", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    copied = copy.deepcopy(plain("qwen3_moe", 2))
    copied.load_state_dict(state)
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        for other in (loaded, copied):
            assert same_bits(other.get_parameter(name).detach(), whole), name


def _adamw_steps(layer: Any, optimizer: torch.optim.Optimizer, steps: range, tokens: Callable[[int], Part]) -> None:
    for number in steps:
        step(layer, tokens(number))
        optimizer.step()


def _adamw(layer: Any) -> torch.optim.Optimizer:
    """For the weights. The sums of the biases' gradients have another order."""
    return torch.optim.AdamW([layer.gate_up_proj, layer.down_proj], lr=0.01)


def _saved_and_loaded(rank: int, folder: Path, load: bool, after: list[dict[str, Tensor]]) -> None:
    """Two steps from the beginning, and save; or load, and one more step."""
    layer = sharded(layer_of("gpt_oss", "mxfp8_rceil"))
    optimizer = _adamw(layer)
    if load:
        nn.init.zeros_(layer.down_proj)
        state = dict(zip(("model", "optimizer"), get_state_dict(layer, optimizer), strict=True))
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(layer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps = range(2, 3) if load else range(2)
    _adamw_steps(layer, optimizer, steps, lambda number: my_parts("skewed", step=number)[0])
    for name, parameter in layer.named_parameters():
        assert same_bits(parameter.detach().to_local(), local(after[load][name])), (load, name)
    if not load:
        state = dict(zip(("model", "optimizer"), get_state_dict(layer, optimizer), strict=True))
        dcp.save(state, checkpoint_id=str(folder))


def _fsdp(rank: int) -> None:
    """Experts on 2 of 4 ranks, twice. FSDP2 shards each rank's experts, and averages over the other two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    alone, layer = (layer_of("gpt_oss", "fp8_128") for _ in range(2))
    fully_shard(sharded(layer, mesh["ep"], gradients="mean"), mesh=mesh["fsdp"])
    step(layer, part_of("skewed", rank))
    grads: dict[str, Tensor] = {}
    for pair in ((0, 1), (2, 3)):  # an FSDP rank is a micro-batch of the one process
        whole = joined([part_of("skewed", number) for number in pair])
        for name, grad in step(alone, whole._replace(grad=whole.grad / PARTS)).items():
            grads[name] = grads[name] + grad if name in grads and grad.shape == grads[name].shape else grad
    for name, parameter in layer.named_parameters():
        mine = parameter.grad.full_tensor()
        assert sqnr_db(mine, grads[name]) >= 120 if name.endswith("bias") else same_bits(mine, grads[name]), name
    state = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    assert all(same_bits(state[name], value) for name, value in layer_of("gpt_oss", "fp8_128").state_dict().items())


def _on_two_ranks(rank: int, folder: Path, after: list[dict[str, Tensor]]) -> None:
    _a_whole_model(rank, folder)
    _saved_and_loaded(rank, folder / "dcp", False, after)


def _on_four_ranks(rank: int, folder: Path, after: list[dict[str, Tensor]]) -> None:
    _fsdp(rank)
    _saved_and_loaded(rank, folder / "dcp", True, after)


@pytest.mark.turns(3)
def test_models_train_are_saved_and_go_on_at_another_number_of_ranks(tmp_path):
    layer, after = layer_of("gpt_oss", "mxfp8_rceil"), []
    optimizer = _adamw(layer)
    for steps in (range(2), range(2, 3)):
        parts = [joined([part_of("skewed", number, step=each) for number in range(PARTS)]) for each in range(3)]
        _adamw_steps(layer, optimizer, steps, lambda number, parts=parts: parts[number])
        after.append({name: parameter.detach().clone() for name, parameter in layer.named_parameters()})
    on_ranks(2, _on_two_ranks, tmp_path, after)
    on_ranks(4, _on_four_ranks, tmp_path, after)
