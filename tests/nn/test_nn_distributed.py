"""The layers under DDP and FSDP2, with two processes on a CPU that communicate through gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec import use_backend
from mxspec.check import sqnr_db
from mxspec.nn import GroupedExperts, MXLinear, cache_weights

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
TOKENS, WORLD = 32, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = MXLinear(64, 128)
        self.experts = GroupedExperts(2, 128, 32)
        self.fp8_experts = GroupedExperts(2, 128, 128, "fp8_128")

    def forward(self, x, offs):
        x = self.experts(self.linear(x).relu(), offs)
        return x + self.fp8_experts(x, offs)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + rank)
    return torch.randn(TOKENS, 64), torch.tensor([10 + 5 * rank, TOKENS], dtype=torch.int32)


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(*batch(rank)).square().sum()


def alone() -> dict[str, torch.Tensor]:
    """The parameters after a step with the mean of both processes' gradients."""
    model = Model()
    for rank in range(WORLD):
        (loss_of(model, rank) / WORLD).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _wrapped(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (model.linear, model.experts, model.fp8_experts, model):
        fully_shard(part, mesh=mesh)
    with pytest.raises(TypeError, match="has sharded weights"), cache_weights(model):
        pass
    return model


def _saves_weights(rank: int) -> None:
    """With save_weight_codes=False, FSDP2 frees the saved weights after the forward. The gradients are the same."""
    grads, bytes_left = [], []
    for saves_codes in (True, False):
        model = Model()
        for part in (model.linear, model.experts, model.fp8_experts):
            part.recipe = replace(part.recipe, save_weight_codes=saves_codes)
        wrapped, kept, (x, offs) = _wrapped(model, "fsdp2"), [], batch(rank)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            loss = wrapped(x.requires_grad_(), offs).square().sum()
        of_weights = [t for t in kept if t.ndim == 3 or t.shape in ((64, 128), (128, 64))]
        # The codes of five weights, and the scales of two; mxfp8's scales of experts have two dimensions.
        assert len(of_weights) == (7 if saves_codes else 5), len(of_weights)
        bytes_left.append(sum(t.untyped_storage().nbytes() for t in of_weights))
        loss.backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    assert bytes_left[0] > 0 == bytes_left[1], bytes_left
    assert all(map(torch.equal, *grads))


def _checks(model: nn.Module, wrapped: nn.Module, kind: str, rank: int) -> None:
    """A wrapped layer behaves like a layer without a wrapper."""
    x, offs = batch(rank)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(wrapped(x, offs).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradient.square().sum().backward()
    model.zero_grad()
    with use_backend("reference"):
        out = checkpoint(wrapped, x, offs, use_reentrant=False)
    with pytest.MonkeyPatch.context() as patch:
        asked, quantize = [], mxspec.mx_quantize_rowcol
        patch.setattr(mxspec, "mx_quantize_rowcol", lambda *a, **k: asked.append(k["backend"]) or quantize(*a, **k))
        out.sum().backward()
    assert set(asked) == {"reference"}, kind
    if kind == "ddp":
        step = torch.optim.SGD(wrapped.parameters(), 0.0, fused=True).step
        with pytest.raises(RuntimeError, match="a weight has changed"), cache_weights(wrapped):
            step()


def _worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    expected = alone()
    for kind in ("ddp", "fsdp2"):
        model = Model()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        wrapped = _wrapped(model, kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of(wrapped, rank).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            whole = parameter.detach() if kind == "ddp" else parameter.full_tensor().detach()
            # Only the order of the sum over the processes differs, in fp32.
            assert sqnr_db(whole - before[name], expected[name] - before[name]) >= 80, (kind, name)
        _checks(model, wrapped, kind, rank)
    _saves_weights(rank)
    dist.destroy_process_group()


@pytest.mark.turns(3)
def test_under_ddp_and_fsdp2_two_processes_step_as_one_does(tmp_path):
    torch.multiprocessing.spawn(_worker, (str(tmp_path / "store"),), nprocs=WORLD)
