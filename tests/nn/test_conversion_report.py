"""What `convert` leaves by default, and a report that hides no part of a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mxspec.nn import GroupedExperts, MXLinear, Recipe, convert
from mxspec.nn._report import collapsed


class Moe(nn.Module):
    """A router that is a plain Linear, experts, and a shared expert with a gate of its own."""

    def __init__(self, experts: nn.Module, router: str = "router", num_experts: int = 4) -> None:
        super().__init__()
        self.add_module(router, nn.Linear(64, num_experts, bias=False))
        self.experts = experts
        self.gate_proj = nn.Linear(64, 96, bias=False)


class Model(nn.Module):
    """An embedding, two layers and an output head."""

    def __init__(self, layers: list[nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(160, 64)
        self.layers = nn.ModuleList(layers)
        self.output = nn.Linear(64, 160, bias=False)
        if tied:
            self.output.weight = self.embed.weight


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("nvfp4_nearest", "nvfp4_nearest"),
        (Recipe("nvfp4", hadamard=False), "nvfp4_no_hadamard"),
        (Recipe(grad_dtype=torch.float8_e5m2), repr(Recipe(grad_dtype=torch.float8_e5m2))),
    ],
)
def test_the_first_line_names_the_recipe(recipe, name):
    report = convert(nn.Sequential(nn.Linear(64, 64)), recipe)
    assert str(report).startswith(f"1 swapped to {name}, 0 left\n")


HEAD = "it is the output head, whose logits are sensitive to quantization; include= converts it"
ROUTER = "it is a router, whose logits are sensitive to quantization; include= converts it"


def test_the_shares_are_those_of_the_weights_and_of_a_tokens_operations():
    model = Model([Moe(GroupedExperts(4, 64, 32)) for _ in range(2)])
    report = convert(model, "mxfp8_rceil", experts_per_token=2)
    expert, dense, head, router = 3 * 64 * 32, 64 * 96, 64 * 160, 64 * 4
    low, every = 2 * (4 * expert + dense) + head, 2 * (4 * expert + dense + router) + 2 * head
    assert report.share_of_parameters == low / every
    met = 2 * (2 * expert + dense) + head
    assert report.share_of_flops == met / (met + 2 * router)
    assert not report.unknown_flops
    assert report.left == {
        **{f"layers.{i}.router": ROUTER for i in (0, 1)},
        "embed.weight": "an embedding is a lookup and no matmul",
    }
    assert str(report).splitlines()[1] == (
        f"in low precision: {100 * low / every:.1f}% of the parameters, "
        f"{100 * report.share_of_flops:.1f}% of a token's matmul operations"
    )


def test_without_the_number_of_experts_of_a_token_the_share_of_operations_is_unknown():
    model = Model([Moe(GroupedExperts(4, 64, 32))])
    report = convert(model, "mxfp8_rceil")
    assert report.share_of_flops is None
    assert list(report.unknown_flops) == ["layers.0.experts.w_gate_up", "layers.0.experts.w_down"]
    assert "an unknown share of a token's matmul operations" in str(report)
    assert "Pass experts_per_token= to convert" in str(report)
    model.config = SimpleNamespace(num_experts_per_tok=1)
    assert (
        convert(model, "mxfp8_rceil").share_of_flops
        == convert(model, "mxfp8_rceil", experts_per_token=1).share_of_flops
    )


def test_the_recipe_bf16_runs_nothing_in_low_precision():
    report = convert(Model([Moe(GroupedExperts(4, 64, 32))]), "bf16", experts_per_token=2)
    assert "layers.0.experts" in report.swapped
    assert (report.share_of_parameters, report.share_of_flops) == (0, 0)
    assert "in low precision: 0% of the parameters, 0% of" in str(report)


@pytest.mark.parametrize("router", ["router", "gate", "w_g"])
def test_a_list_of_experts_counts_the_experts_that_a_token_meets(router):
    def expert() -> nn.Module:
        return nn.ModuleDict({"w1": nn.Linear(64, 32, bias=False), "w2": nn.Linear(32, 64, bias=False)})

    model = Moe(nn.ModuleList([expert() for _ in range(4)]), router)
    report = convert(model, "mxfp8_rceil", experts_per_token=1)
    assert report.left == {router: ROUTER}
    met = 2 * 64 * 32 + 64 * 96
    assert report.share_of_flops == met / (met + 64 * 4)
    assert "experts.{0..3}.w1: MXLinear" in str(report)


def test_a_router_inside_a_module_is_left_and_a_dense_gate_is_not():
    moe = Moe(GroupedExperts(64, 64, 32))
    moe.router = nn.ModuleDict({"proj": nn.Linear(64, 32)})  # not as many outputs as experts
    dense = nn.ModuleDict({"gate": nn.Linear(64, 64), "router": nn.Linear(64, 64)})
    report = convert(Model([moe, dense]), "mxfp8_rceil")
    assert report.left["layers.0.router.proj"] == ROUTER
    assert report.swapped["layers.0.gate_proj"] == report.swapped["layers.1.gate"] == "MXLinear"
    assert report.swapped["layers.1.router"] == "MXLinear"


def test_a_router_with_a_weight_of_its_own_is_named():
    moe = Moe(GroupedExperts(4, 64, 32))
    moe.router = nn.ParameterDict({"weight": torch.ones(4, 64)})  # its first size is the number of experts
    report = convert(moe, "mxfp8_rceil")
    assert report.left == {"router.weight": "it is a router, whose logits are sensitive to quantization"}


@pytest.mark.parametrize("by", ["embeddings", "tied"])
def test_the_output_head_is_left_and_can_be_included(by):
    model = Model([nn.Linear(64, 64)], tied=by == "tied")
    if by == "embeddings":
        model.get_output_embeddings = lambda: model.output
    report = convert(model, "mxfp8_rceil")
    assert report.left["output"] == HEAD
    assert report.swapped == {"layers.0": "MXLinear"}
    asked = []
    report = convert(model, "mxfp8_rceil", lambda layer, name: bool(asked.append(name)), include=["output"])
    assert asked == ["layers.0", "output"]
    assert report.left["output"] == "filter_fn returned false"  # it decides last
    assert convert(model, "mxfp8_rceil", include="out*").swapped == {"output": "MXLinear"}
    assert isinstance(model.output, MXLinear)
    assert (model.output.weight is model.embed.weight) == (by == "tied")


def test_a_model_that_has_no_head_says_so_by_an_error():
    model = Model([nn.Linear(64, 64)])

    def no_head() -> nn.Module:
        raise NotImplementedError

    model.get_output_embeddings = no_head
    assert list(convert(model, "mxfp8_rceil").swapped) == ["layers.0", "output"]


def test_a_parameter_that_no_rule_knows_is_named_and_its_operations_are_unknown():
    model = Model([nn.Conv2d(3, 64, 3), nn.ParameterList([torch.ones(2, 3), torch.ones(3)])])
    report = convert(model, "mxfp8_rceil")
    assert report.left["layers.0.weight"] == "convert does not know how Conv2d uses this parameter"
    assert report.left["layers.1.0"] == "convert does not know how ParameterList uses this parameter"
    assert list(report.unknown_flops) == ["layers.0.weight"]


def test_a_convolution_is_no_experts():
    model = nn.ModuleDict(
        {"conv": nn.Conv1d(64, 64, 4, groups=64), "gate": nn.Linear(64, 32), "proj": nn.Linear(32, 64)}
    )
    report = convert(model, "mxfp8_rceil")
    assert report.swapped == {"gate": "MXLinear", "proj": "MXLinear"}
    assert report.left == {"conv.weight": "convert does not know how Conv1d uses this parameter"}
    assert report.share_of_flops == 2 * 64 * 32 / (2 * 64 * 32 + 64 * 4)  # each token meets each weight once
    model.decay = nn.ParameterDict({"log": torch.ones(1, 1, 64, 1)})  # a vector, so it is in no matmul
    assert convert(model, "mxfp8_rceil").share_of_flops == report.share_of_flops
    strided = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(64, 64, 4, stride=2))
    assert convert(strided, "mxfp8_rceil").unknown_flops == {"1.weight": report.left["conv.weight"]}


def test_the_weights_of_unknown_experts_are_no_routers():
    moe = Moe(nn.ParameterDict({"w1": torch.ones(4, 64, 32), "w1_bias": torch.ones(4, 32)}))
    moe.more = nn.ParameterDict({"w2": torch.ones(4, 32, 64)})
    report = convert(moe, "mxfp8_rceil", experts_per_token=2)
    unknown = "convert does not know how ParameterDict uses this parameter"
    assert report.left == {
        "router": ROUTER, "experts.w1": unknown, "more.w2": unknown,
        "experts.w1_bias": "a bias is added and not multiplied",
    }  # fmt: skip
    assert report.share_of_flops == 64 * 96 / (64 * 96 + 64 * 4 + 2 * 2 * 64 * 32)


def test_what_is_wrong_with_include_and_experts_per_token_is_said():
    model = Model([nn.Linear(64, 64)])
    with pytest.raises(ValueError, match="include has 'embed', which matches no Linear and no experts of the model"):
        convert(model, "mxfp8_rceil", include=["output", "embed"])
    with pytest.raises(ValueError, match="experts_per_token = 0; needs an int of at least 1"):
        convert(model, "mxfp8_rceil", experts_per_token=0)
    assert type(model.output) is nn.Linear


def test_a_wrapped_model_is_refused_with_the_order():
    order = "Convert the plain model first, then call fully_shard or DDP, and torch.compile last"
    with pytest.raises(RuntimeError, match=f"the model is already wrapped by torch.compile. {order}"):
        convert(torch.compile(Model([nn.Linear(64, 64)])), "mxfp8_rceil")
    wrapped = object.__new__(DistributedDataParallel)  # its constructor needs a process group
    nn.Module.__init__(wrapped)
    with pytest.raises(RuntimeError, match=rf"the module 'layers.0' is already wrapped by DistributedData.*{order}"):
        convert(Model([wrapped]), "mxfp8_rceil")


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["a.0.w", "a.1.w", "a.2.w"], ["a.{0..2}.w"]),
        (["a.0.w", "a.2.w", "a.3.w"], ["a.{0,2,3}.w"]),
        (["0", "1"], ["{0,1}"]),
        (["a.7.w"], ["a.7.w"]),
        ([f"a.{i}.b.{j}" for i in range(3) for j in range(2)], ["a.{0..2}.b.{0,1}"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.1"], ["a.0.b.{0,1}", "a.1.b.1"]),
        (["a.x1.w", "a.x2.w"], ["a.x1.w", "a.x2.w"]),
        (["lm_head", "{}"], ["lm_head", "{}"]),
    ],
)
def test_names_that_differ_in_numbers_are_one_line(names, lines):
    assert collapsed(dict.fromkeys(names, "why")) == [(line, "why") for line in lines]
