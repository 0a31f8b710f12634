"""cache_weights: which changes of a weight it notices, and which layers use the codes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from mxspec.check import default_device
from mxspec.nn import Float8BlockwiseLinear, GroupedExperts, MXLinear, cache_weights

DEVICE = default_device()
WIDTH = 128
OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
if DEVICE.type == "cpu":  # some releases of PyTorch have no fused Adagrad for GPUs
    OPTIMIZERS.append(torch.optim.Adagrad)
changed = pytest.raises(RuntimeError, match="cache_weights: a weight has changed")


def layer(kind: type[nn.Linear] = MXLinear) -> nn.Linear:
    torch.manual_seed(0)
    module = kind(WIDTH, WIDTH, device=DEVICE)
    module(tokens()).sum().backward()
    return module


def tokens() -> torch.Tensor:
    return torch.ones(8, WIDTH, device=DEVICE)


@pytest.mark.parametrize("kind", [MXLinear, Float8BlockwiseLinear])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fused_step_in_the_block_is_a_change(optimizer, kind):
    module = layer(kind)
    step = optimizer(module.parameters(), lr=0.1, fused=True).step
    with changed as raised, cache_weights(module):  # raised by the forward
        step()
        module(tokens())
    assert "forward" in [entry.name for entry in raised.traceback]
    with changed, cache_weights(module):  # raised on leaving the block
        step()
    step()
    with cache_weights(module):
        module(tokens())


def test_a_fused_step_of_one_of_the_experts_weights_is_a_change():
    experts = GroupedExperts(2, WIDTH, WIDTH, device=DEVICE)
    offs = torch.tensor([3, 8], dtype=torch.int32, device=DEVICE)
    experts(tokens(), offs).sum().backward()
    step = torch.optim.SGD([experts.w_down], lr=0.1, fused=True).step
    with changed, cache_weights(experts):
        step()


def test_the_weights_memory_under_another_name_is_noticed():
    module = layer()
    alias = module.weight.detach()[WIDTH // 2 :]
    alias.grad = torch.ones_like(alias)
    with changed, cache_weights(module):
        torch.optim.SGD([alias], lr=0.1, fused=True).step()


def test_a_step_of_other_parameters_is_none():
    module, other = layer(), layer()
    flat = torch.zeros(2 * WIDTH * WIDTH, device=DEVICE)  # another optimizer steps its second half
    flat[: WIDTH * WIDTH].copy_(module.weight.detach().view(-1))
    module.weight.data, rest = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH), flat[WIDTH * WIDTH :]
    rest.grad = torch.ones_like(rest)
    with cache_weights(module):
        torch.optim.AdamW(other.parameters(), lr=0.1, fused=True).step()
        torch.optim.AdamW([rest], lr=0.1, fused=True).step()
        module(tokens())


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_is_a_change_also_one_compiled_before(fused):
    torch._dynamo.reset()
    module = layer()
    step = torch.compile(torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused).step, backend="aot_eager")
    step()
    with changed, cache_weights(module):
        step()
    step()
    with cache_weights(module):
        module(tokens())


def test_a_compiled_forward_cannot_look_but_the_block_does():
    torch._dynamo.reset()
    module = layer()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    step, ran = torch.optim.SGD(module.parameters(), lr=0.1, fused=True).step, []
    with changed, cache_weights(module):
        step()
        ran.append(compiled(tokens()))
    assert ran


def test_a_step_that_a_scaler_skips_is_none():
    module = layer()
    module.weight.grad.fill_(torch.inf)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.unscale_(optimizer)
    with cache_weights(module):
        scaler.step(optimizer)
        module(tokens())


def test_no_hook_stays():
    module, before = layer(), dict(torch_optimizer._global_optimizer_post_hooks)
    with cache_weights(module):
        assert len(torch_optimizer._global_optimizer_post_hooks) == len(before) + 1
    with pytest.raises(KeyError), cache_weights(module):
        raise KeyError
    with pytest.raises(RuntimeError, match="held already"), cache_weights(module), cache_weights(module):
        pass
    assert torch_optimizer._global_optimizer_post_hooks == before


def test_weights_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        module = MXLinear(WIDTH, WIDTH, device=DEVICE)
        module(tokens())
    words = "cache_weights: MXLinear has weights made in inference mode. PyTorch does not count their changes"
    with pytest.raises(TypeError, match=words), cache_weights(module):
        pass
    assert module._cached is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_codes_made_in_another_mode_train(mode):
    module = layer()
    expected = module.weight.grad.clone()
    module.zero_grad()
    held = cache_weights(module)
    with mode():
        held.__enter__()
    try:
        module(tokens().requires_grad_()).sum().backward()
    finally:
        held.__exit__(None, None, None)
    assert torch.equal(module.weight.grad, expected)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="the model is a list; needs an nn"), cache_weights([]):
        pass


def test_a_copy_from_within_the_block_quantizes_its_own_weights():
    module, file = layer(), io.BytesIO()
    with cache_weights(module):
        copied = copy.deepcopy(module)
        torch.save(module, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.weight.zero_()
        assert torch.equal(other(tokens()), other.bias.expand(8, WIDTH))
