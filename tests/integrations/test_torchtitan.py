"""Experts and Linears of torchtitan that train by a recipe.

The tests run on torchtitan if its main branch is importable. Otherwise they run on a stand-in, which has the names and
the calls that `mxspec.integrations.torchtitan` uses, as torchtitan's commit b5bcd76c6 has them.
"""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mxspec.check import default_device, sqnr_db
from mxspec.integrations.torchtitan import converter
from mxspec.nn import (
    RECIPES,
    Float8BlockwiseLinear,
    MXLinear,
    cache_weights,
    convert,
    fp8_grouped_mm,
    mx_grouped_mm,
    watch,
)

DEVICE = default_device()
E, D, INNER = 3, 128, 256
COUNTS = torch.tensor([5, 0, 9], dtype=torch.int64, device=DEVICE)
ROWS = int(COUNTS.sum()) + 2  # two rows belong to no expert


def stand_in() -> SimpleNamespace:
    class Configurable:
        @dataclass(kw_only=True, slots=True)
        class Config:
            _owner = None

            def traverse(self, wanted: type, name: str = "") -> Any:
                if isinstance(self, wanted):
                    yield name, self, None, None
                    return
                for each in fields(self):
                    value, fqn = getattr(self, each.name), f"{name}.{each.name}".lstrip(".")
                    many = value if isinstance(value, list) else [value]
                    for at, item in enumerate(many):
                        place = (f"{fqn}.{at}", item, value, at) if many is value else (fqn, item, self, each.name)
                        if isinstance(item, wanted):
                            yield place
                        elif hasattr(item, "traverse"):
                            yield from item.traverse(wanted, place[0])

            def build(self) -> Any:
                return self._owner(config=replace(self))

        def __init_subclass__(cls) -> None:
            if "Config" in vars(cls):
                assert "__slots__" in vars(cls.Config)
                assert all(each.kw_only for each in fields(cls.Config))
                cls.Config._owner = cls

    class Module(nn.Module, Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            param_init: dict | None = None

            def build(self) -> Any:
                built = Configurable.Config.build(self)
                built._param_init = self.param_init
                return built

    class Linear(nn.Linear, Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            in_features: int
            out_features: int
            bias: bool = False

        def __init__(self, config: Any) -> None:
            super().__init__(config.in_features, config.out_features, bias=config.bias)

    class GroupedExperts(Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            dim: int
            hidden_dim: int
            num_experts: int

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, inner, dim = config.num_experts, config.hidden_dim, config.dim
            for name, shape in (("w1_EFD", (inner, dim)), ("w2_EDF", (dim, inner)), ("w3_EFD", (inner, dim))):
                setattr(self, name, nn.Parameter(torch.empty(self.num_experts, *shape)))

        def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
            offs = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
            gate, up, down = (w.bfloat16().transpose(-2, -1) for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
            hidden = F.silu(self._grouped_mm(A=x_RD.bfloat16(), B_t=gate, offs=offs))
            hidden = hidden * self._grouped_mm(A=x_RD.bfloat16(), B_t=up, offs=offs)
            return self._grouped_mm(A=hidden, B_t=down, offs=offs).type_as(x_RD)

        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(A, B_t, offs=offs)

    class QuantizationConverter(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            model_compile_enabled: bool = False

    for kind, module in ((Linear, "models.common.linear"), (GroupedExperts, "models.common.moe")):
        kind.__module__, kind.__qualname__ = f"torchtitan.{module}", kind.__name__
    return SimpleNamespace(**{kind.__name__: kind for kind in (Module, Linear, GroupedExperts, QuantizationConverter)})


try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.protocols.module import Module
except ImportError:
    made = stand_in()
    Module, Linear, GroupedExperts = made.Module, made.Linear, made.GroupedExperts
    QuantizationConverter = made.QuantizationConverter
    IS_STAND_IN = True
else:
    IS_STAND_IN = False


@pytest.fixture(autouse=True)
def _torchtitan(monkeypatch):
    if not IS_STAND_IN:
        return
    for name, values in {
        "torchtitan": (), "torchtitan.models": (), "torchtitan.models.common": (), "torchtitan.components": (),
        "torchtitan.components.quantization": (QuantizationConverter,),
        "torchtitan.models.common.linear": (Linear,), "torchtitan.models.common.moe": (GroupedExperts,),
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update({kind.__name__: kind for kind in values})
        monkeypatch.setitem(sys.modules, name, module)


class Block(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention: Linear.Config
        gate: Linear.Config
        experts: list[GroupedExperts.Config]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention, self.gate = config.attention.build(), config.gate.build()
        self.experts = nn.ModuleList(each.build() for each in config.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        for experts in self.experts:
            x = experts(x, COUNTS) * (1 + self.gate(x).mean())
        return x


def tree(dim: int = D, inner: int = INNER, kind: Any = GroupedExperts, layers: int = 2) -> Any:
    one = {"dim": dim, "hidden_dim": inner, "num_experts": E}
    return Block.Config(
        attention=Linear.Config(in_features=dim, out_features=dim, bias=True),
        gate=Linear.Config(in_features=dim, out_features=E),
        experts=[kind.Config(**one, param_init={"w1_EFD": torch.nn.init.ones_}) for _ in range(layers)],
    )


def built(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = config.build().to(DEVICE, dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def by_hand(recipe: str, experts: Any, x: torch.Tensor) -> torch.Tensor:
    product = fp8_grouped_mm if recipe == "fp8_128" else mx_grouped_mm
    offs = COUNTS.cumsum(0, dtype=torch.int32)
    w1, w2, w3 = (weight.bfloat16() for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
    hidden = F.silu(product(x.bfloat16(), w1, offs, recipe)) * product(x.bfloat16(), w3, offs, recipe)
    return product(hidden, w2, offs, recipe).to(x.dtype)


def tokens(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(ROWS, D, device=DEVICE, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128", "bf16"])
def test_converted_experts_are_torchtitans_experts_by_the_recipe(recipe, dtype):
    experts = built(converter(recipe).build().convert(tree()), dtype).experts[0]
    plain, x, rows = built(tree(), dtype).experts[0], tokens(dtype), int(COUNTS.sum())
    assert list(dict(experts.named_parameters())) == list(dict(plain.named_parameters()))
    outs = {"ours": experts(x, COUNTS), "hand": by_hand(recipe, experts, x), "theirs": plain(x, COUNTS)}
    grad = torch.randn(ROWS, D, device=DEVICE, dtype=dtype)
    grad[rows:] = 0
    got = {}
    for of, out in outs.items():
        names, leaves = zip(*(plain if of == "theirs" else experts).named_parameters(), strict=True)
        found = torch.autograd.grad(out, [x, *leaves], grad)
        # torchtitan's own values in the rows that belong to no expert are undefined
        got[of] = {"out": out[:rows], "x": found[0][:rows], **dict(zip(names, found[1:], strict=True))}
        assert of == "theirs" or not (out[rows:].any() or found[0][rows:].any())
    for name, ours in got["ours"].items():
        assert torch.equal(ours, got["hand"][name]), name
        assert sqnr_db(ours.detach(), got["theirs"][name].detach()) >= (40 if recipe == "bf16" else 20), name


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
def test_a_converted_model_trains_as_layers_built_by_hand(recipe):
    entry, linear = converter(recipe, linears=["attention"]), Float8BlockwiseLinear if recipe == "fp8_128" else MXLinear
    model, plain = built(entry.build().convert(tree())), built(tree())
    assert type(model.gate) is Linear
    assert [isinstance(each, GroupedExperts) for each in model.experts] == [True, True]
    assert isinstance(model.attention, (Linear, linear))
    plain.attention = linear.from_linear(plain.attention)
    for experts in plain.experts:
        experts.forward = lambda x, counts, experts=experts: by_hand(recipe, experts, x)
    x = tokens()
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            each(x)[: COUNTS.sum()].float().square().mean().backward()
            optimizer.step()
    start, trained, by = built(tree()).state_dict(), model.state_dict(), plain.state_dict()
    assert list(start) == list(trained)
    for name, value in trained.items():
        assert torch.equal(value, by[name]), name
        assert not torch.equal(value, start[name]), name


def test_the_rest_of_a_config_stays_and_a_second_converter_replaces_the_recipe():
    config = tree()
    assert converter("mxfp8_rceil").build().convert(config) is config
    converter("fp8_128", linears=["attention"]).build().convert(config)
    new = converter("mxfp8_floor", linears=["att"]).build().convert(config)
    assert isinstance(new.experts[1], GroupedExperts.Config)
    model = built(new)
    assert model.experts[1]._param_init == {"w1_EFD": nn.init.ones_}
    for layer in (model.attention, *model.experts):
        assert layer.recipe == RECIPES["mxfp8_floor"]
    assert "scaling='floor'" in repr(model.experts[0])
    assert isinstance(model.attention, MXLinear)
    one = converter("mxfp8_rceil").build().convert(config.experts[0])  # the root of the tree itself
    assert one.build().recipe == RECIPES["mxfp8_rceil"]


def test_an_entry_is_a_config_of_torchtitans_converters():
    entry = converter(replace(RECIPES["mxfp8_rceil"], wgrad_bf16=True))
    assert isinstance(entry, QuantizationConverter.Config)  # torchtitan wants these before LoRA's
    assert built(entry.build().convert(tree())).experts[0].recipe.wgrad_bf16


def test_what_an_entry_cannot_do_is_said():
    with pytest.raises(TypeError, match="linears is the str 'attention'; needs a list of parts of names"):
        converter("mxfp8_rceil", linears="attention")
    with pytest.raises(ValueError, match="converter: unknown recipe 'fp4'"):
        converter("fp4")
    with pytest.raises(ValueError, match="the recipe bf16 takes no linears"):
        converter("bf16", linears=["attention"])
    for match, entry, config in (
        ("no Linear has 'wq' in its name", converter("fp8_128", linears=["attention", "wq"]), tree()),
        ("the model has no experts, and linears names no Linear", converter("fp8_128"), tree(layers=0)),
        (r"experts\.0: .* out_features of w1_EFD = 72 must be a multiple of 16", converter("fp8_128"), tree(inner=72)),
        ("gate: .* out_features = 3 must be a multiple of 32", converter("mxfp8_rceil", linears=["gate"]), tree()),
    ):
        with pytest.raises(ValueError, match=match):
            entry.build().convert(config)


class OtherMatmul(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def _grouped_mm(self, *, A, B_t, offs):
        return F.grouped_mm(A.half(), B_t.half(), offs=offs).bfloat16()


class OtherForward(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD, num_tokens_per_expert_E):
        return x_RD @ self.w1_EFD[0].T @ self.w2_EDF[0].T


class Scaled(GroupedExperts):
    """A subclass of a user, with a bias of each expert and a forward that calls torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config):
        super().__init__(config)
        self.bias_ED = nn.Parameter(torch.ones(config.num_experts, config.dim))

    def forward(self, x_RD, num_tokens_per_expert_E):
        return super().forward(x_RD, num_tokens_per_expert_E) * self.bias_ED[0]


class OtherLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input):
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (OtherMatmul, "OtherMatmul already has another grouped matmul, from OtherMatmul"),
        (OtherForward, "OtherForward has its own forward, which does not call _grouped_mm"),
    ],
)
def test_experts_that_compute_something_else_are_refused(kind, match):
    with pytest.raises(TypeError, match=rf"converter: experts\.0: {match}"):
        converter("mxfp8_rceil").build().convert(tree(kind=kind))
    model = built(tree(kind=kind))
    assert match in convert(model, "mxfp8_rceil").left["experts.0"]
    assert type(model.experts[0]) is kind


def test_a_linear_with_its_own_forward_is_refused():
    config = tree()
    config.attention = OtherLinear.Config(in_features=D, out_features=D)
    with pytest.raises(TypeError, match="attention: OtherLinear has its own forward"):
        converter("mxfp8_rceil", linears=["attention"]).build().convert(config)


def test_a_users_experts_convert_with_their_own_forward():
    model, plain = built(converter("mxfp8_rceil").build().convert(tree(kind=Scaled))), built(tree(kind=Scaled))
    experts, x, rows = model.experts[0], tokens(), int(COUNTS.sum())
    assert experts.weight_names == ("w1_EFD", "w2_EDF", "w3_EFD")
    assert torch.equal(experts(x, COUNTS), by_hand("mxfp8_rceil", experts, x) * experts.bias_ED[0])
    assert sqnr_db(experts(x, COUNTS)[:rows].detach(), plain.experts[0](x, COUNTS)[:rows].detach()) >= 20


def test_convert_takes_a_model_that_is_built():
    model, x = built(tree()), tokens()
    weights = list(model.parameters())
    report = convert(model, "mxfp8_rceil")
    assert {"experts.0", "experts.1"} <= report.swapped.keys()
    assert {"attention", "gate"} <= report.left.keys()
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model.experts[0](x, COUNTS), by_hand("mxfp8_rceil", model.experts[0], x))
    convert(model, "fp8_128")
    assert torch.equal(model.experts[0](x, COUNTS), by_hand("fp8_128", model.experts[0], x))
    narrow = built(tree(inner=72))
    assert "out_features of w1_EFD = 72 must be a multiple of 16" in convert(narrow, "fp8_128").left["experts.0"]
    assert type(narrow.experts[0]) is GroupedExperts
    with (
        pytest.raises(TypeError, match="cache_weights: GroupedExperts of torchtitan casts its weights"),
        cache_weights(model),
    ):
        pass


def test_a_converted_model_is_copied_pickled_and_compiled():
    model, x = built(converter("mxfp8_rceil", linears=["attention"]).build().convert(tree())), tokens()
    compiled = torch.compile(model.experts[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, COUNTS), model.experts[0](x, COUNTS))
    for layer, call in ((model.experts[0], (x, COUNTS)), (model.attention, (x,))):
        out = layer(*call)
        assert torch.equal(copy.deepcopy(layer)(*call), out)
        again = pickle.loads(pickle.dumps(layer))
        assert type(again) is type(layer)
        assert torch.equal(again(*call), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_watch_counts_the_three_matmuls_of_the_experts_by_name(dtype):
    model = built(converter("fp8_128").build().convert(tree(layers=1)), dtype)
    with watch(model) as seen:
        model(tokens(dtype)).sum().backward()
    rows = int(COUNTS.sum())
    counted = {row.name: row.elements for row in seen.rows() if (row.tensor, row.matmul) == ("activation", "wgrad")}
    widths = {"w1_EFD": D, "w3_EFD": D, "w2_EDF": INNER}
    assert counted == {f"experts.0.{name}": rows * width for name, width in widths.items()}
    assert set(seen.unwatched()) == {"attention", "gate"}
