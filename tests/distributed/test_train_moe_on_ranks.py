"""examples/train_moe.py on two processes: the losses of one process."""

from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from mxspec.nn import GroupedExperts
from tests.helpers import ROOT, module_of, on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
STEPS = 4


def example() -> ModuleType:
    moe = module_of(ROOT / "examples" / "train_moe.py")
    for name, size in {"WIDTH": 16, "DIM": 128, "HIDDEN": 128, "LAYERS": 2, "EXPERTS": 4}.items():
        setattr(moe, name, size)
    return moe


def train(recipe: str, wire: str | None = None) -> list[float]:
    moe, nets = example(), []
    model = moe.model
    moe.model = lambda *given: nets.append(model(*given)) or nets[-1]
    losses = moe.train(recipe, moe.text()[:10_000], STEPS, 64, wire=wire).losses
    experts = [layer for layer in nets[0].modules() if isinstance(layer, GroupedExperts)]
    held = 4 // dist.get_world_size() if wire else 4
    assert [len(layer._weights()[0]) for layer in experts] == [held, held]
    return losses


def _on_two_ranks(rank: int, expected: dict[str, list[float]]) -> None:
    for recipe, losses in expected.items():
        found = torch.tensor([train(recipe, wire) for wire in ("values", "codes")])
        # The first forward is the same. Then the gradients of the other layers are sums in another order.
        assert torch.allclose(found[:, 0], torch.tensor(losses[0]), rtol=1e-5, atol=0)
        assert torch.allclose(found, torch.tensor(losses), rtol=2e-3, atol=0), (recipe, found, losses)
    assert losses[-1] < 0.99 * losses[0]


@pytest.mark.turns(3)
def test_the_losses_are_those_of_one_process():
    recipes = ("bf16", "mxfp8_rceil")
    on_ranks(2, _on_two_ranks, {recipe: train(recipe) for recipe in recipes})
