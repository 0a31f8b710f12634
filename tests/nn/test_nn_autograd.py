"""The layers refuse a second derivative, and a checkpointed forward runs again on the right backend."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec import nn as low
from mxspec.check import default_device, sqnr_db
from mxspec.nn import RECIPES, Float8BlockwiseLinear, GroupedExperts, MXLinear, NVFP4Linear, checkpoint_context

DEVICE = default_device()
M, WIDTH = 8, 128
REFUSED = "{}: has no second derivative, because autograd cannot differentiate its backward"


def offs() -> torch.Tensor:
    return torch.tensor([3, M], dtype=torch.int32, device=DEVICE)


class Grouped(nn.Module):
    """A module that calls a function for grouped matmuls with its own weights."""

    def __init__(self, name: str, recipe: str) -> None:
        super().__init__()
        self.fn, self.recipe = name, recipe
        self.w = nn.Parameter(torch.randn(2, WIDTH, WIDTH, device=DEVICE) / 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(low, self.fn)(x, self.w, offs(), self.recipe)


class Experts(GroupedExperts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, offs())


Experts.__name__ = "GroupedExperts"
SAVES_WEIGHTS = {r.format: replace(r, save_weight_codes=False) for r in map(RECIPES.get, ("mxfp8_rceil", "fp8_128"))}
MAKE = {
    "MXLinear": lambda: MXLinear(WIDTH, WIDTH, device=DEVICE),
    "MXLinear wgrad_bf16": lambda: MXLinear(WIDTH, WIDTH, device=DEVICE, recipe="mxfp8_rceil_wgrad_bf16"),
    "Float8BlockwiseLinear": lambda: Float8BlockwiseLinear(WIDTH, WIDTH, device=DEVICE),
    "GroupedExperts": lambda: Experts(2, WIDTH, WIDTH, device=DEVICE),
    "GroupedExperts fp8": lambda: Experts(2, WIDTH, WIDTH, "fp8_128", device=DEVICE),
    "GroupedExperts bf16": lambda: Experts(2, WIDTH, WIDTH, "bf16", device=DEVICE),
    "mx_grouped_mm": lambda: Grouped("mx_grouped_mm", "mxfp8_rceil"),
    "mx_grouped_mm bf16": lambda: Grouped("mx_grouped_mm", "bf16"),
    "fp8_grouped_mm": lambda: Grouped("fp8_grouped_mm", "fp8_128"),
    "NVFP4Linear": lambda: NVFP4Linear(WIDTH, WIDTH, device=DEVICE, recipe="nvfp4_nearest"),
    "GroupedExperts nvfp4": lambda: Experts(2, WIDTH, WIDTH, "nvfp4_nearest", device=DEVICE),
    "nvfp4_grouped_mm": lambda: Grouped("nvfp4_grouped_mm", "nvfp4_nearest"),
    "Float8BlockwiseLinear saves its weight": lambda: Float8BlockwiseLinear(
        WIDTH, WIDTH, device=DEVICE, recipe=SAVES_WEIGHTS["fp8_128"]
    ),
    "GroupedExperts saves its weights": lambda: Experts(2, WIDTH, WIDTH, SAVES_WEIGHTS["mxfp8"], device=DEVICE),
    "GroupedExperts fp8 saves its weights": lambda: Experts(2, WIDTH, WIDTH, SAVES_WEIGHTS["fp8_128"], device=DEVICE),
}
each_layer = pytest.mark.parametrize("made", MAKE)


def layer(made: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKE[made]()


def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(M, WIDTH, device=DEVICE, requires_grad=True)


def same(got: torch.Tensor, expected: torch.Tensor, made: str) -> bool:
    """Whether the bits are the same. For experts only close: create_graph=True changes silu's gradient."""
    return sqnr_db(got.detach(), expected) >= 30 if "Experts" in made else torch.equal(got, expected)


# --- the second derivative ----------------------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"])
def test_a_gradient_penalty_is_refused_by_name(made, loss):
    module, x = layer(made), tokens()
    (once,) = torch.autograd.grad(loss(module(x)), x)
    (penalized,) = torch.autograd.grad(loss(module(x)), x, create_graph=True)
    assert same(penalized, once, made)
    with pytest.raises(RuntimeError, match=REFUSED.format(made.split()[0])):
        penalized.square().sum().backward()


@each_layer
def test_so_is_the_gradient_of_the_weights_gradient(made):
    module, x = layer(made), tokens()
    for gradient in torch.autograd.grad(
        module(x).sum(), [p for p in module.parameters() if p.ndim > 1], create_graph=True
    ):
        with pytest.raises(RuntimeError, match=REFUSED.format(made.split()[0])):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("made", ["MXLinear", "Float8BlockwiseLinear", "mx_grouped_mm", "fp8_grouped_mm"])
def test_what_does_not_depend_on_anything_is_not_refused(made):
    """With frozen weights the gradient of x is a constant, so a penalty on another layer of the model must work."""
    module, x = layer(made).requires_grad_(False), tokens()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert not gradient.requires_grad
    first = nn.Linear(WIDTH, WIDTH, device=DEVICE)
    (gradient,) = torch.autograd.grad(module(first(x)).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert first.weight.grad.any()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@each_layer
def test_gradients_of_create_graph_that_nothing_differentiates_train(made):
    module, x = layer(made), tokens()
    module(x).sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x).sum().backward(create_graph=True)
    assert all(same(p.grad, e, made) for p, e in zip(module.parameters(), expected, strict=True))
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    torch.optim.AdamW(module.parameters()).step()
    module.zero_grad(set_to_none=False)


@each_layer
def test_a_checkpointed_layer_refuses_too(made):
    module, x = layer(made), tokens()
    (gradient,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED.format(made.split()[0])):
        gradient.square().sum().backward()


@each_layer
def test_torch_func_gives_the_first_derivative_and_no_second(made):
    module, x = layer(made), tokens()
    parameters = dict(module.named_parameters())

    def loss(x, parameters=parameters):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    loss(x).backward()
    gradient = torch.func.grad(loss)(x.detach())
    assert same(gradient.detach(), x.grad, made)
    of_parameters = torch.func.grad(lambda p: loss(x.detach(), p))(parameters)
    assert all(same(of_parameters[name].detach(), p.grad, made) for name, p in parameters.items())
    frozen = {name: p.detach() for name, p in parameters.items()}
    assert not torch.func.grad(lambda x: loss(x, frozen))(x.detach()).requires_grad
    refused = pytest.raises(RuntimeError, match=REFUSED.format(made.split()[0]))
    with refused:
        gradient.square().sum().backward()
    with refused:
        torch.func.grad(lambda x: module(x).sum())(x.detach()).square().sum().backward()
    with refused:
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x.detach())
    with refused:
        torch.func.grad(lambda p: torch.func.grad(loss)(x.detach(), p).square().sum())(parameters)


@pytest.mark.parametrize("made", ["MXLinear", "Float8BlockwiseLinear", "GroupedExperts", "GroupedExperts bf16"])
def test_compiled_pytorch_refuses(made):
    torch._dynamo.reset()
    module, x = torch.compile(layer(made), backend="aot_eager", fullgraph=True), tokens()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    # In PyTorch 2.11, this gradient requires no gradient itself.
    with pytest.raises(RuntimeError, match=r"does not currently support double backward|does not require grad"):
        gradient.square().sum().backward()


@each_layer
def test_a_step_in_fake_tensor_mode_has_the_shapes_of_a_step(made):
    """The backward compares the backends of two forwards, and no tensor may be read in this mode."""
    with FakeTensorMode():
        module, x = layer(made), torch.empty(M, WIDTH, device=DEVICE, requires_grad=True)
        ends = torch.empty(2, dtype=torch.int32, device=DEVICE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "offs", lambda: ends)
            out = module(x)
        out.sum().backward()
        assert (out.shape, x.grad.shape) == ((M, WIDTH), (M, WIDTH))
        assert all(p.grad.shape == p.shape for p in module.parameters())


# --- checkpointing -----------------------------------------------------------------------------------------------

LOW = [made for made in MAKE if "bf16" not in made]
QUANTIZERS = [
    "mx_quantize_rowcol",
    "mx_quantize_groups",
    "fp8_quantize_1x128",
    "fp8_quantize_rowcol_groups",
    "swiglu_fp8_quantize_rowcol_groups",
    "fp8_gemm",
    "nvfp4_fake_quantize",
    "nvfp4_fake_quantize_rowcol_groups",
    "nvfp4_gemm",
    "nvfp4_grouped_gemm",
    "nvfp4_grouped_gemm_wgrad",
]


@pytest.fixture
def ran_by(monkeypatch) -> list[str]:
    """A list that records the backend of each op that runs from now on."""
    seen: list[str] = []
    for name in QUANTIZERS:
        op = getattr(mxspec, name)
        monkeypatch.setattr(mxspec, name, lambda *a, op=op, **kw: seen.append(kw["backend"]) or op(*a, **kw))
    return seen


def backward_elsewhere(out: torch.Tensor) -> None:
    """Run the backward on a thread that sees no with-block, as on a GPU. Its errors are raised here."""
    errors = []

    def run() -> None:
        try:
            out.sum().backward()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("made", LOW)
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_second_run_has_the_first_ones_backend(made, reentrant, ran_by):
    module, x = layer(made), tokens()
    with mxspec.use_backend("reference"):
        out = checkpoint(module, x, use_reentrant=reentrant)
    first = len(ran_by)
    with mxspec.use_backend("auto"):
        backward_elsewhere(out)
    assert len(ran_by) > first > 0
    assert set(ran_by) == {"reference"}


def test_nor_does_a_block_around_the_backward_or_an_inner_checkpoint_change_it(ran_by):
    module, x = layer("MXLinear"), tokens()
    with mxspec.use_backend("reference"):
        out = checkpoint(lambda x: checkpoint(module, x.relu(), use_reentrant=False), x, use_reentrant=False)
    with mxspec.use_backend("auto"):
        out.sum().backward()
    assert set(ran_by) == {"reference"}


def test_a_block_within_what_is_checkpointed_holds_in_the_second_run(ran_by):
    module, x = layer("MXLinear"), tokens()

    def inside(x):
        with mxspec.use_backend("reference"):
            return module(x)

    out = checkpoint(inside, x, use_reentrant=False)
    module(x)  # a later forward, on `auto`
    ran_by.clear()
    out.sum().backward()
    assert set(ran_by) == {"reference"}


@pytest.mark.parametrize("made", LOW)
def test_forwards_by_several_backends_are_refused_or_carried_by_the_context(made, ran_by):
    module, x = layer(made), tokens()

    def two(**options):
        with mxspec.use_backend("reference"):
            out = checkpoint(module, x, use_reentrant=False, **options)
        module(x)
        ran_by.clear()
        return out

    words = (
        f"{made.split()[0]}: checkpointing ran the forward again on the backend 'auto', but the first run was on "
        "'reference'. "
    )
    with pytest.raises(RuntimeError, match=words + "Pass context_fn=mxspec.nn.checkpoint_context to checkpoint"):
        backward_elsewhere(two())
    carried = two(context_fn=checkpoint_context)
    carried.sum().backward(retain_graph=True)
    backward_elsewhere(carried)
    assert set(ran_by) == {"reference"}
    assert mxspec.current_backend() == "auto"


def test_without_a_block_several_devices_or_threads_need_nothing():
    module, x = layer("MXLinear"), tokens()
    expected = module(x)
    expected.sum().backward()
    kept, x.grad = x.grad, None
    with torch.autograd.graph.save_on_cpu():
        module(x).sum().backward()
    assert torch.equal(x.grad, kept)
