"""`set_recipe` of the low-precision Linears: a training ends in bfloat16, or goes on by another recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from mxspec.nn import (
    RECIPES,
    Float8BlockwiseLinear,
    GroupedExperts,
    MXLinear,
    NVFP4Linear,
    Recipe,
    cache_weights,
    convert,
    watch,
)
from tests.helpers import DEVICE, on_ranks, step, tokens

KINDS = {MXLinear: "mxfp8_floor", Float8BlockwiseLinear: "fp8_128_pow2", NVFP4Linear: "nvfp4_nearest"}
each = pytest.mark.parametrize("kind", KINDS)


def layer(kind: type[nn.Linear], recipe: Recipe | str) -> nn.Linear:
    torch.manual_seed(0)
    return kind(128, 96, device=DEVICE, recipe=recipe)


def plain(module: nn.Linear) -> nn.Linear:
    """An `nn.Linear` with the same parameters."""
    linear = nn.Linear(module.in_features, module.out_features, device=module.weight.device)
    linear.weight, linear.bias = module.weight, module.bias
    return linear


def same(got, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@each
@pytest.mark.parametrize("autocast", [False, True])
def test_with_bf16_a_layer_is_an_nn_linear_and_goes_back(kind, autocast):
    module = layer(kind, KINDS[kind])
    x, linear = tokens(45, module.in_features), plain(module)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        before = step(module, x)
        module.set_recipe("bf16")
        assert same(step(module, x), step(linear, x))
        assert not same(before, step(module, x))
        module.set_recipe(KINDS[kind])
        assert same(step(module, x), before)


@each
def test_a_compiled_layer_changes_too(kind):
    module = layer(kind, KINDS[kind])
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    x = tokens(45, module.in_features)
    before = compiled(x)
    module.set_recipe("bf16")
    assert torch.equal(compiled(x), plain(module)(x))
    module.set_recipe(KINDS[kind])
    assert torch.equal(compiled(x), before)


@each
def test_what_set_recipe_refuses(kind):
    module, name = layer(kind, KINDS[kind]), kind.__name__
    for other in RECIPES.values():
        if other.format not in (module.recipe.format, "bf16"):
            words = f"{name}: the recipe's format is {other.format}; needs {module.recipe.format} or bf16"
            with pytest.raises(ValueError, match=words):
                module.set_recipe(other)
    with pytest.raises(ValueError, match=f"{name}: unknown recipe 'bfloat16'"):
        module.set_recipe("bfloat16")
    with pytest.raises(TypeError, match=f"{name}: recipe is a NoneType"):
        module.set_recipe(None)
    recipe = module.recipe
    held = pytest.raises(RuntimeError, match=f"{name}: cache_weights holds the codes of its recipe. Leave its with-")
    with held, cache_weights(module):
        module.set_recipe("bf16")
    assert module.recipe is recipe


@each
@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_bf16_takes_the_inputs_that_the_layers_format_takes(kind, x_dtype, dtype):
    module = layer(kind, KINDS[kind]).to(dtype)
    x = tokens(45, module.in_features, dtype=x_dtype)
    module(x)
    module.set_recipe("bf16")
    out, grad_x, grad_w, grad_b = step(module, x)
    assert [t.dtype for t in (out, grad_x, grad_w, grad_b)] == [x_dtype, x_dtype, dtype, dtype]
    expected = step(plain(module).to(x_dtype), x)
    assert same([out, grad_x, grad_w, grad_b], [expected[0], expected[1], *(g.to(dtype) for g in expected[2:])])


def test_experts_of_every_width_of_nvfp4_change_to_bf16():
    experts = GroupedExperts(2, 48, 80, "nvfp4").to(DEVICE)
    experts.set_recipe("bf16")
    x, offs = tokens(20, 48), torch.tensor([8, 20], dtype=torch.int32, device=DEVICE)
    out = experts(x, offs)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert experts.w_down.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="GroupedExperts: dim = 48 must be a multiple of 32"):
        experts.set_recipe("mxfp8_rceil")


def test_layers_of_bf16_hold_no_codes():
    module = layer(MXLinear, "mxfp8_rceil")
    module.set_recipe("bf16")
    x = tokens(4, module.in_features)
    with cache_weights(module), torch.no_grad():
        before = module(x)
        module.weight.mul_(2)
        module.bias.mul_(2)
        assert torch.equal(module(x), 2 * before)
        module.set_recipe("mxfp8_rceil")


@pytest.mark.parametrize("kind", [NVFP4Linear, GroupedExperts])
def test_another_recipe_between_a_checkpointed_forward_and_its_backward_raises(kind):
    sizes = (2, 32, 64) if kind is GroupedExperts else (32, 64)
    module = kind(*sizes, recipe="nvfp4_nearest", device=DEVICE)
    x, offs = tokens(20, 32), torch.tensor([8, 20], dtype=torch.int32, device=DEVICE)
    given = (x, offs) if kind is GroupedExperts else (x,)
    out = checkpoint(module, *given, use_reentrant=False)
    module.set_recipe("nvfp4_nearest_no_hadamard")
    words = f"{kind.__name__}: checkpointing ran the forward again by another recipe than the first run"
    with pytest.raises(RuntimeError, match=words):
        out.sum().backward()
    checkpoint(module, *given, use_reentrant=False).sum().backward()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 10))
    return made.to(DEVICE)


def test_convert_ends_a_training_in_bfloat16():
    net, untouched, x = model(), model(), tokens(45, 128)
    convert(net, "nvfp4")
    kind = type(net[0])
    report = convert(net, "bf16")
    assert report.swapped == dict.fromkeys("01", "NVFP4Linear of bf16")
    assert report.share_of_parameters == report.share_of_flops == 0
    assert report.left == {"2": "for bf16, nn.Linear is enough: give it bfloat16, or use autocast"}
    assert same(step(net, x), step(untouched, x))
    with watch(net) as seen:
        net(x)
    assert seen.unwatched()["0"] == "NVFP4Linear has the recipe bf16, which quantizes nothing"
    assert "Recipe(format='bf16')" in repr(net[0])
    assert convert(net, "fp8_128").left["0"] == "it is a NVFP4Linear of bf16 already, and takes only nvfp4 and bf16"
    assert convert(net, "nvfp4_nearest").swapped == dict.fromkeys("01", "NVFP4Linear")
    assert type(net[0]) is kind
    assert net[0].recipe == RECIPES["nvfp4_nearest"]


def sharded(rank: int) -> None:
    net, untouched = model().cpu(), model().cpu()
    convert(net, "nvfp4")
    mesh, x, results = init_device_mesh("cpu", (2,)), torch.randn(45, 128), []
    for whole in (net, untouched):
        fully_shard(whole, mesh=mesh)
    assert not torch.equal(net(x), untouched(x))
    for module in net.modules():
        if hasattr(module, "set_recipe"):
            module.set_recipe("bf16")
    for whole in (net, untouched):
        out = whole(x)
        out.square().sum().backward()
        results.append([out, *(p.grad.full_tensor() for p in whole.parameters())])
    assert same(*results)


def test_layers_of_a_sharded_model_change():
    on_ranks(2, sharded)
