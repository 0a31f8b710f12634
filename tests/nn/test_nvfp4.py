"""The recipes nvfp4: products of the values of NVFP4 codes, the transform of wgrad, and stochastic gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec.check import default_device, sqnr_db
from mxspec.nn import (
    RECIPES,
    GroupedExperts,
    MXLinear,
    NVFP4Linear,
    cache_weights,
    convert,
    mx_grouped_mm,
    nvfp4_grouped_mm,
)
from tests.helpers import ends

BF16, DEVICE = torch.bfloat16, default_device()
NAMES = [name for name, recipe in RECIPES.items() if recipe.format == "nvfp4"]
K, N = 64, 80
REFERENCE = {"backend": "reference"}


def read_back(codes: tuple[torch.Tensor, ...], axis: int) -> torch.Tensor:
    return mxspec.nvfp4_dequantize(*codes, axis=axis, out_dtype=torch.float32, **REFERENCE).double()


def rows_of(x: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """A group's values along the features. The random bytes are those of its padded rows."""
    padded, M = pad(x, (0, 0, 0, -x.shape[0] % 16)), x.shape[0]
    if state is None:
        return read_back(mxspec.nvfp4_quantize(x, **REFERENCE), -1)
    byte = bytes_of(state, padded)
    return read_back(mxspec.nvfp4_quantize_stochastic(padded, byte, x.abs().max().float(), **REFERENCE), -1)[:M]


def columns_of(x: torch.Tensor, state: torch.Tensor | None, hadamard: bool) -> torch.Tensor:
    """A group's values along the tokens, padded, and transformed with `hadamard`."""
    x = pad(x, (0, 0, 0, -x.shape[0] % 16))
    x = mxspec.hadamard_16(x, axis=-2, **REFERENCE) if hadamard else x
    if state is None:
        return read_back(mxspec.nvfp4_quantize(x, axis=-2, **REFERENCE), -2)
    return read_back(mxspec.nvfp4_quantize_stochastic(x, bytes_of(state, x), axis=-2, **REFERENCE), -2)


def bytes_of(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The bytes of elements of one group, whose blocks of 16 tokens are numbered token block by token block."""
    from mxspec.reference.common.philox import bytes_of_blocks

    return bytes_of_blocks(state, (x.shape[0] // 16, x.shape[1])).mT.flatten(0, 1).to(torch.uint8)


def weight_of(w: torch.Tensor) -> torch.Tensor:
    return read_back(mxspec.nvfp4_quantize(w, block="16x16", **REFERENCE), -1)


def by_hand(x, w, dy, recipe, state=None):
    """The output and the gradients of one group, in fp64."""
    along = None if state is None else state + torch.tensor([0, 1], device=state.device)
    wgrad = columns_of(dy, along, recipe.hadamard is not False).mT @ columns_of(x, None, recipe.hadamard is not False)
    return rows_of(x, None) @ weight_of(w).mT, rows_of(dy, state) @ weight_of(w), wgrad


def call(dtype=BF16, M=61, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(M, K, device=DEVICE, dtype=dtype, requires_grad=True)
    w = (torch.randn(N, K, device=DEVICE) / 8).to(dtype).requires_grad_()
    dy = (torch.randn(M, N, device=DEVICE) * torch.linspace(0.01, 3, N, device=DEVICE)).to(dtype)
    return x, w, dy


def state_of(seed: int, recipe) -> torch.Tensor | None:
    """The seed and the offset that a backward draws after this seed."""
    torch.manual_seed(seed)
    return torch.randint(2**62, (2,), device=DEVICE) if recipe.stochastic_rounding is not False else None


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_linear_multiplies_the_numbers_of_the_codes(name, dtype):
    x, w, dy = call(dtype)
    layer = NVFP4Linear(K, N, bias=False, device=DEVICE, dtype=dtype, recipe=name)
    layer.weight = nn.Parameter(w.detach())
    out = layer(x)
    expected = by_hand(x.detach(), w.detach(), dy, RECIPES[name], state_of(4, RECIPES[name]))
    torch.manual_seed(4)
    out.backward(dy)
    for what, got, hand in zip(("out", "dx", "dw"), (out.detach(), x.grad, layer.weight.grad), expected, strict=True):
        assert got.dtype == dtype, what
        assert sqnr_db(got, hand) > (50 if dtype == BF16 else 70), what


@pytest.mark.parametrize("name", NAMES)
def test_each_group_of_a_grouped_matmul_is_a_matrix_of_its_own(name):
    """With one group that has tokens, the bytes are those of one matrix. So the other groups here round to nearest."""
    recipe = replace(RECIPES[name], stochastic_rounding=False)
    x, _, dy = call(M=70)
    w = torch.randn(3, N, K, device=DEVICE, dtype=BF16, requires_grad=True)
    with torch.no_grad():
        x[33:] *= 1000  # the groups have tensor scales of their own
    out = nvfp4_grouped_mm(x, w, ends(33, 33, 67).to(DEVICE), recipe)
    out.backward(dy)
    for e, rows in ((0, slice(0, 33)), (2, slice(33, 67))):
        hand = by_hand(x.detach()[rows], w.detach()[e], dy[rows], recipe)
        for got, expected in zip((out.detach()[rows], x.grad[rows], w.grad[e]), hand, strict=True):
            assert sqnr_db(got, expected) > 50
    for nothing in (out.detach()[67:], x.grad[67:], w.grad[1]):
        assert not nothing.any()


def layers():
    torch.manual_seed(3)
    linear = partial(NVFP4Linear, K, N, device=DEVICE, dtype=BF16)
    experts = partial(GroupedExperts, 3, K, N, device=DEVICE, dtype=BF16)
    offs = ends(20, 20, 57).to(DEVICE)
    return {"Linear": (linear, ()), "GroupedExperts": (experts, (offs,))}


def trained(module, x, *offs, seed=1, run=None):
    x.grad = None
    module.zero_grad()
    out = (module if run is None else run)(x, *offs)
    torch.manual_seed(seed)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", ["Linear", "GroupedExperts"])
def test_a_backward_follows_the_generator_and_a_forward_draws_nothing(kind):
    made, offs = layers()[kind]
    module, (x, _, _) = made(recipe="nvfp4"), call()
    before = torch.get_rng_state()
    module(x, *offs)
    assert torch.get_rng_state().equal(before)
    first, again, other = (trained(module, x, *offs, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert first[0].equal(other[0])
    assert not first[1].equal(other[1])
    assert not first[2].equal(other[2])
    module = made(recipe="nvfp4_nearest")
    assert all(map(torch.equal, trained(module, x, *offs, seed=1), trained(module, x, *offs, seed=2)))


@pytest.mark.parametrize("kind", ["Linear", "GroupedExperts"])
@pytest.mark.parametrize("way", ["compiled", "checkpointed", "weights saved", "weights held", "autocast"])
def test_other_ways_give_the_same_bits(kind, way):
    torch._dynamo.reset()
    made, offs = layers()[kind]
    module, (x, _, _) = made(recipe="nvfp4"), call()
    expected = trained(module, x, *offs)
    if way == "compiled":
        got = trained(module, x, *offs, run=torch.compile(module, fullgraph=True, backend="aot_eager"))
    elif way == "checkpointed":
        got = trained(module, x, *offs, run=partial(checkpoint, module, use_reentrant=False))
    elif way == "weights saved":
        module.recipe = replace(module.recipe, save_weight_codes=False)
        got = trained(module, x, *offs)
    elif way == "weights held":
        with cache_weights(module):
            got = trained(module, x, *offs)
    else:
        with torch.autocast(DEVICE.type, BF16):
            got = trained(module, x, *offs, run=lambda x, *offs: module(x.float(), *offs))
    assert all(map(torch.equal, got, expected))


def test_stochastic_gradients_are_right_on_average():
    """The mean of n steps has the noise of one step divided by n, and no bias that the mean would not remove."""
    x, w, dy = call(M=48)
    layer = NVFP4Linear(K, N, bias=False, device=DEVICE, dtype=BF16, recipe="nvfp4")
    layer.weight = nn.Parameter(w.detach())
    quantized_x = columns_of(x.detach(), None, True)
    exact = mxspec.hadamard_16(dy, axis=-2, **REFERENCE).double().mT @ quantized_x, dy.double() @ weight_of(w.detach())
    n, sums = 64, [0.0, 0.0]
    one = []
    for seed in range(n):
        x.grad = layer.weight.grad = None
        out = layer(x)
        torch.manual_seed(seed)
        out.backward(dy)
        grads = layer.weight.grad.double(), x.grad.double()
        sums = [s + g / n for s, g in zip(sums, grads, strict=True)]
        one.append([sqnr_db(g, e) for g, e in zip(grads, exact, strict=True)])
    for of_one, mean, expected in zip(zip(*one, strict=True), sums, exact, strict=True):
        # 64 times less noise is 18 dB. A byte cuts a probability off at 1/256, which is a bias far below the noise.
        assert sqnr_db(mean, expected) - sum(of_one) / n > 15


def test_convert_names_the_layers_and_widths_of_16_are_enough():
    model = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 16), nn.Linear(16, 10)).to(DEVICE)
    report = convert(model, "nvfp4")
    assert [type(layer).__name__ for layer in model] == ["NVFP4Linear", "NVFP4Linear", "Linear"]
    assert report.left == {
        "2": "NVFP4Linear: out_features = 10 must be a multiple of 16. Use a PyTorch layer, or pad the model."
    }
    model(torch.randn(7, 48, device=DEVICE)).sum().backward()


def test_refusals():
    with pytest.raises(
        ValueError, match=r"NVFP4Linear: the recipe's format is mxfp8; needs nvfp4. Use MXLinear instead"
    ):
        NVFP4Linear(32, 32, recipe="mxfp8_rceil")
    with pytest.raises(
        ValueError, match=r"MXLinear: the recipe's format is nvfp4; needs mxfp8. Use NVFP4Linear instead"
    ):
        MXLinear(32, 32, recipe="nvfp4")
    with pytest.raises(ValueError, match=r"mx_grouped_mm: the recipe's format is nvfp4; .* Use nvfp4_grouped_mm"):
        mx_grouped_mm(torch.ones(3, 32), torch.ones(1, 32, 32), ends(3), "nvfp4")
    assert (
        GroupedExperts(2, 16, 32, "nvfp4").explain() == "GroupedExperts: nvfp4 multiplies the bf16 values of its codes"
    )
