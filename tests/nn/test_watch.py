"""watch: what it counts, for which layers, and that the host never waits."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mxspec
from mxspec import nn as low
from mxspec.check import default_device
from mxspec.nn import (
    RECIPES,
    Float8BlockwiseLinear,
    GroupedExperts,
    MXLinear,
    NVFP4Linear,
    WatchedOperand,
    _counters,
    _formats,
    _watch_log,
    cache_weights,
    watch,
)

DEVICE = default_device()
E5M2 = replace(RECIPES["mxfp8_floor"], grad_dtype=torch.float8_e5m2)


class Grouped(nn.Module):
    """A module that calls the functions for grouped matmuls with its own weights, as other libraries' experts do."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = getattr(low, function)
        self.w1, self.w2 = (nn.Parameter(torch.randn(2, 128, 128, device=DEVICE) / 11) for _ in range(2))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.function(self.function(x, self.w1, offs), self.w2.mT.bfloat16().mT, offs)


def experts(recipe: str, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    return GroupedExperts(2, 128, 128, recipe, DEVICE, dtype)


MAKE = {
    "MXLinear": lambda: MXLinear(128, 128, device=DEVICE),
    "MXLinear wgrad_bf16": lambda: MXLinear(128, 128, device=DEVICE, recipe="mxfp8_rceil_wgrad_bf16"),
    "Float8BlockwiseLinear": lambda: Float8BlockwiseLinear(128, 128, device=DEVICE),
    "GroupedExperts mxfp8": lambda: experts("mxfp8_rceil"),
    "GroupedExperts fp8": lambda: experts("fp8_128"),
    "GroupedExperts fp8 fused": lambda: experts("fp8_128", torch.bfloat16),
    "mx_grouped_mm": lambda: Grouped("mx_grouped_mm"),
    "fp8_grouped_mm": lambda: Grouped("fp8_grouped_mm"),
    "NVFP4Linear": lambda: NVFP4Linear(128, 128, device=DEVICE),
    "NVFP4Linear nearest": lambda: NVFP4Linear(128, 128, device=DEVICE, recipe="nvfp4_nearest_no_hadamard"),
    "GroupedExperts nvfp4": lambda: experts("nvfp4"),
    "GroupedExperts nvfp4 fused": lambda: experts("nvfp4_no_hadamard", torch.bfloat16),
    "nvfp4_grouped_mm": lambda: Grouped("nvfp4_grouped_mm"),
}
each_layer = pytest.mark.parametrize("made", MAKE)
M = 100  # tokens; the last 10 belong to no group


def offs() -> Tensor:
    return torch.tensor([7, 90], dtype=torch.int32, device=DEVICE)


def layer_and_tokens(made: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    layer = MAKE[made]()
    x = many_magnitudes(M, 128).to(next(layer.parameters()).dtype).requires_grad_()
    return layer, (x,) if isinstance(layer, nn.Linear) else (x, offs())


def many_magnitudes(*shape: int) -> Tensor:
    """Numbers of so many magnitudes that some underflow in every block."""
    return torch.randn(shape, device=DEVICE) * 10 ** torch.empty(shape, device=DEVICE).uniform_(-9, 3)


def step(layer: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    inputs[0].grad = None
    layer.zero_grad()
    out = layer(*inputs)
    torch.manual_seed(1)
    out.backward(many_magnitudes(*out.shape).to(out.dtype))
    return [out.detach(), inputs[0].grad, *(p.grad for p in layer.parameters())]


def by_operand(seen: low.WatchReport) -> dict[tuple[str, str, str], WatchedOperand]:
    rows = {(row.weight, row.tensor, row.matmul): row for row in seen.rows()}
    assert len(rows) == len(seen.rows())
    return rows


def of_one_forward(layer: nn.Module, x: Tensor) -> WatchedOperand:
    """The counts of the activation in the forward."""
    with watch(layer) as seen, torch.no_grad():
        layer(x.to(DEVICE))
    return by_operand(seen)["weight", "activation", "forward"]


# --- the numbers, by hand -------------------------------------------------------------------------------------------


def test_golden_inf_nan_zeros_and_a_huge_beside_a_tiny_element():
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    x[0, 1] = 1e-30  # its block has an Inf, so it is no underflow
    x[3, :3] = torch.tensor([448 * 2.0**10, 2.0**-10, 1.5])  # scale 2^10; 1.5 is read back as 2, 2^-10 as 0
    row = of_one_forward(MXLinear(32, 32, device=DEVICE), x)
    assert (row.elements, row.saturated, row.underflowed) == (128, 0, 1)
    assert (row.blocks, row.zero_blocks, row.nonfinite_blocks) == (4, 1, 2)
    assert (row.scale_min, row.scale_max) == (1024, 1024)
    signal, noise = (448 * 1024) ** 2 + 2.0**-20 + 1.5**2, 2.0**-20 + 0.5**2
    assert row.sqnr_db == pytest.approx(10 * math.log10(signal / noise))
    assert row.loss == math.inf


def test_golden_the_bound_of_an_underflow():
    """With scale 1, half of the smallest subnormal 2^-9 rounds to the even code 0, and the next number does not."""
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([448, 2.0**-10, -(2.0**-10), 2.0**-10 + 2.0**-20, -0.0])
    row = of_one_forward(MXLinear(32, 32, device=DEVICE), x)
    assert (row.underflowed, row.scale_max) == (2, 1)
    assert row.loss == 2 / 32


def test_golden_floor_saturates_what_is_larger_than_the_largest_value():
    x = torch.zeros(2, 32)
    x[0, :5] = torch.tensor([500.0, 450, 448, 440, -500])  # scale 1; all five codes are that of 448 or -448
    layer = MXLinear(32, 32, device=DEVICE, recipe="mxfp8_floor")
    row = of_one_forward(layer, x)
    assert (row.saturated, row.underflowed, row.scale_min, row.zero_blocks) == (3, 0, 1, 1)
    assert row.sqnr_db == pytest.approx(10 * math.log10(1096804 / 5476))  # 52^2 + 2^2 + 8^2 + 52^2
    assert of_one_forward(MXLinear(32, 32, device=DEVICE), x).saturated == 0  # rceil: scale 2


def test_golden_gradients_in_e5m2():
    layer = MXLinear(32, 32, device=DEVICE, recipe=E5M2)
    gradient = torch.zeros(1, 32, device=DEVICE)
    gradient[0, :3] = torch.tensor([60000, 2.0**-17, 2.0**-16])  # largest value 57344, smallest subnormal 2^-16
    x = torch.ones(1, 32, device=DEVICE, requires_grad=True)
    with watch(layer) as seen:
        layer(x).backward(gradient)
    rows = by_operand(seen)
    along_features, along_tokens = (rows["weight", "gradient", matmul] for matmul in ("dgrad", "wgrad"))
    assert (along_features.saturated, along_features.underflowed, along_features.blocks) == (1, 1, 1)
    assert (along_features.scale_min, along_features.scale_max) == (1, 1)
    # Each feature is a block of its own, with one token and padding. Floor: scale 2^(exponent - 15).
    assert (along_tokens.saturated, along_tokens.underflowed) == (1, 0)
    assert (along_tokens.elements, along_tokens.blocks, along_tokens.zero_blocks) == (32, 32, 29)
    assert (along_tokens.scale_min, along_tokens.scale_max) == (2.0**-32, 1)
    assert along_tokens.sqnr_db == pytest.approx(20 * math.log10(60000 / 2656), abs=1e-6)


def test_golden_a_weight_along_k_for_the_forward_and_along_n_for_dgrad():
    layer = MXLinear(64, 32, bias=False, device=DEVICE)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, :3] = torch.tensor([448, 2.0**-10, -(2.0**-10)])  # one block along K, three along N
    with watch(layer) as seen:
        layer(torch.ones(1, 64, device=DEVICE, requires_grad=True))
    rows = by_operand(seen)
    for matmul, underflowed, zero_blocks, scale_min in [("forward", 2, 63, 1), ("dgrad", 0, 61, 2.0**-18)]:
        row = rows["weight", "weight", matmul]
        assert (row.elements, row.blocks, row.zero_blocks) == (32 * 64, 64, zero_blocks)
        assert (row.underflowed, row.scale_min, row.scale_max) == (underflowed, scale_min, 1)


def test_golden_squares_of_a_weight():
    layer = Float8BlockwiseLinear(128, 384, bias=False, device=DEVICE)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0], layer.weight[127, 127], layer.weight[130, 5] = 896.0, 2.0**-9, torch.inf
    with watch(layer) as seen:
        layer(torch.ones(1, 128, device=DEVICE, requires_grad=True))
    row = by_operand(seen)["weight", "weight", "forward, dgrad"]
    assert (row.elements, row.saturated, row.underflowed) == (384 * 128, 0, 1)
    assert (row.blocks, row.zero_blocks, row.nonfinite_blocks) == (3, 1, 1)
    assert (row.scale_min, row.scale_max) == (2, 2)


def test_golden_the_two_scales_of_nvfp4():
    x = torch.zeros(4, 16)
    x[0, 0] = 2688  # the tensor scale is 1, and the scale of this block 448
    x[1, :6] = torch.tensor([6.0, 0.25, 0.26, -0.2, 2.3, -0.0])  # scale 1; read back as 6, 0, 0.5, 0, 2
    x[2, 0] = 6.375  # 1.0625 is a tie of e4m3, and 1 is the even scale; the code 6 is read back as 6
    row = of_one_forward(NVFP4Linear(16, 16, device=DEVICE), x)
    assert (row.elements, row.saturated, row.underflowed) == (64, 1, 2)
    assert (row.blocks, row.zero_blocks, row.nonfinite_blocks) == (4, 1, 0)
    assert (row.scale_min, row.scale_max) == (1, 448)
    noise = 0.25**2 + 0.24**2 + 0.2**2 + 0.3**2 + 0.375**2
    assert row.sqnr_db == pytest.approx(10 * math.log10(x.double().square().sum().item() / noise), abs=1e-6)
    x[0, 0] = 2688 * 3  # the tensor scale is 3; a block of amax 6 has the scale 0.34375 * 3
    row = of_one_forward(NVFP4Linear(16, 16, device=DEVICE), x[:2])
    assert (row.scale_min, row.scale_max) == (0.34375 * 3, 448 * 3)
    x[1] *= 2.0**-12  # its scale rounds to 0, so all of its numbers are read back as 0
    row = of_one_forward(NVFP4Linear(16, 16, device=DEVICE), x[:2])
    assert (row.underflowed, row.scale_min) == (5, 0)
    x[3, 15] = torch.nan
    row = of_one_forward(NVFP4Linear(16, 16, device=DEVICE), x)
    assert (row.blocks, row.nonfinite_blocks, row.underflowed) == (4, 4, 0)  # all blocks share the tensor scale


def test_golden_nvfp4_squares_of_a_weight():
    layer = NVFP4Linear(32, 32, bias=False, device=DEVICE)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0], layer.weight[15, 15], layer.weight[16, 0] = 2688, 100, 12
    with watch(layer) as seen:
        layer(torch.ones(1, 32, device=DEVICE, requires_grad=True))
    row = by_operand(seen)["weight", "weight", "forward, dgrad"]
    assert (row.elements, row.saturated, row.underflowed) == (32 * 32, 0, 1)  # 100 is less than a quarter of 448
    assert (row.blocks, row.zero_blocks) == (4, 2)
    assert (row.scale_min, row.scale_max) == (2, 448)


def test_golden_the_transform_of_nvfp4():
    """One token and 15 rows of padding. The transform makes 16 elements of plus or minus 2 from an 8."""
    for recipe, elements, zeros, scale in [
        ("nvfp4_nearest", 16, 15, 2 / 6),
        ("nvfp4_nearest_no_hadamard", 1, 15, 8 / 6),
    ]:
        layer = NVFP4Linear(16, 16, device=DEVICE, recipe=recipe)
        x = torch.zeros(1, 16, device=DEVICE, requires_grad=True)
        with torch.no_grad():
            x[0, 3] = 8
        with watch(layer) as seen:
            layer(x).sum().backward()
        rows = by_operand(seen)
        row = rows["weight", "activation", "wgrad"]
        assert (row.elements, row.blocks, row.zero_blocks) == (16 * elements, 16, zeros)
        assert (row.scale_min, row.scale_max) == pytest.approx((scale, scale))
        row = rows["weight", "gradient", "dgrad"]
        assert (row.elements, row.blocks, row.scale_max) == (16, 1, pytest.approx(1 / 6))


def test_stochastic_gradients_count_the_codes_of_the_backward():
    """0.1 becomes 0.5 or 0, and only the bytes of the backward say which."""
    layer = NVFP4Linear(16, 1024, bias=False, device=DEVICE, recipe="nvfp4_no_hadamard")
    gradient = torch.full((16, 1024), 0.1, device=DEVICE)
    gradient[:, ::16] = 6.0
    x, counts = torch.ones(16, 16, device=DEVICE, requires_grad=True), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        random = torch.randint(2**62, (2,), device=DEVICE)
        ends = torch.tensor([16], dtype=torch.int32, device=DEVICE)
        values = mxspec.nvfp4_fake_quantize_rowcol_groups(gradient, ends, random, backend="reference")[0]
        torch.manual_seed(seed)
        with watch(layer) as seen:
            layer(x).backward(gradient)
        row = by_operand(seen)["weight", "gradient", "dgrad"]
        assert row.underflowed == (values == 0).sum().item()
        counts.append(row.underflowed)
    assert counts[0] == counts[1] != counts[2]
    share = counts[0] / (16 * 960)
    assert 0.75 < share < 0.85  # 51 of 256 bytes round 0.1 up
    # Each 0.1 becomes 0.5 with the probability 0.2: a noise of 0.04 beside a signal of 0.01, and 6 is exact.
    signal, noise = 64 * 36 + 960 * 0.01, 960 * 0.04
    assert row.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=0.5)


def test_fp8_never_saturates_by_the_rounding_of_its_scale():
    x = torch.zeros(128, 128)
    x[:, 0] = 1 + torch.arange(128) / 128  # each mantissa of bfloat16 is an amax
    codes, scale = mxspec.fp8_quantize_1x128(x, backend="reference")
    assert (mxspec.fp8_dequantize(codes, scale, out_dtype=torch.float32)[:, 0] < x[:, 0]).any()
    assert of_one_forward(Float8BlockwiseLinear(128, 128, device=DEVICE), x).saturated == 0


def test_the_sample_is_every_third_of_130_rows():
    layer = MXLinear(32, 32, device=DEVICE)
    for place, db in [(3, 20 * math.log10(1.0625 / 0.0625)), (129, 20 * math.log10(1.0625 / 0.0625)), (4, math.nan)]:
        x = torch.zeros(130, 32)
        x[place, 0] = 1.0625  # lies between two codes, and 1 is the even one
        assert of_one_forward(layer, x).sqnr_db == pytest.approx(db, nan_ok=True)


@each_layer
def test_pieces_add_up(made, monkeypatch):
    layer, inputs = layer_and_tokens(made)
    seen = []
    for elements in (2**24, 1000):
        monkeypatch.setattr(_counters, "PIECE", elements)
        with watch(layer) as counted:
            step(layer, inputs)
        seen.append(counted.rows())
    assert seen[0] == seen[1]


# --- the layer's own codes ------------------------------------------------------------------------------------------


@each_layer
def test_the_layers_own_codes_have_as_many_zeros(made, monkeypatch):
    """Count the codes that are not zero in what the matmuls read, whatever their layout."""
    layer, inputs = layer_and_tokens(made)
    if not isinstance(layer, nn.Linear):  # fp8_128 also quantizes tokens of no group
        inputs[1][-1] = M
    own, counted = [], []

    def nonzero_codes(codes: Tensor) -> int:
        if codes.dtype == torch.bfloat16:  # the values of nvfp4
            return int(codes.count_nonzero())
        return int(codes.view(torch.uint8).bitwise_and(0x7F).count_nonzero())

    def noting(method):
        def noted(*args):
            out = method(*args)
            parts = [part for part in out[:2] if part] if isinstance(out, _formats.Tokens) else [out]
            own.extend(nonzero_codes(part.codes) for part in parts)
            if isinstance(out, _formats.Weight) and isinstance(args[0], _formats.MX):
                own.append(nonzero_codes(out.codes_t))
            return out

        return noted

    def add_blocks(sums, piece, rounding, add=_counters._add_blocks):
        add(sums, piece, rounding)
        counted.append(int((piece.values != 0).sum() - sums.counts[2]))

    for kind in (_formats.MX, _formats.FP8Blocks):
        for name in ("weight", "tokens", "swiglu", "swiglu_backward"):
            monkeypatch.setattr(kind, name, noting(getattr(kind, name)))
    for name in ("weight", "_tokens"):
        monkeypatch.setattr(_formats.NVFP4Values, name, noting(getattr(_formats.NVFP4Values, name)))
    monkeypatch.setattr(_counters, "_add_blocks", add_blocks)
    with watch(layer) as seen:
        step(layer, inputs)
    assert sorted(counted) == sorted(own)
    assert len(counted) == len(seen.rows())
    assert all(row.underflowed for row in seen.rows() if row.tensor == "activation" and row.weight in ("weight", "w1"))
    assert sum(row.underflowed for row in seen.rows() if row.tensor == "gradient")


@each_layer
def test_the_results_are_the_same_bits(made):
    layer, inputs = layer_and_tokens(made)
    expected = step(layer, inputs)
    with watch(layer):
        got = step(layer, inputs)
    assert all(map(torch.equal, got, expected))


def test_rows_of_no_group_count_nothing():
    layer, (x, ends) = layer_and_tokens("GroupedExperts fp8")
    seen = []
    for rest in (0.0, torch.nan):
        with torch.no_grad():
            x[90:] = rest
        with watch(layer) as counted:
            layer(x, ends)[:90].sum().backward()
        seen.append({(r.weight, r.tensor, r.matmul): r for r in counted.rows() if r.tensor == "activation"})
    assert seen[0] == seen[1]
    row = seen[0]["w_gate_up", "activation", "forward"]
    assert (row.elements, row.blocks) == (90 * 128, 90)
    row = seen[0]["w_gate_up", "activation", "wgrad"]
    assert (row.elements, row.blocks) == (90 * 128, 2 * 128)  # 7 and 83 tokens: one block each


@pytest.mark.parametrize("hadamard", [True, False])
def test_groups_of_nvfp4_count_their_own_blocks(hadamard):
    layer = experts("nvfp4" if hadamard else "nvfp4_no_hadamard")
    _, (x, ends) = layer_and_tokens("GroupedExperts nvfp4")
    seen = []
    for first, rest in ((1.0, 0.0), (1.0, torch.nan), (torch.nan, 0.0)):
        with torch.no_grad():
            x[3], x[90:] = first, rest
        with watch(layer) as counted:
            layer(x, ends)[:90].sum().backward()
        seen.append({(r.weight, r.tensor, r.matmul): r for r in counted.rows() if r.tensor == "activation"})
    assert seen[0] == seen[1]
    row, bad = (of["w_gate_up", "activation", "forward"] for of in seen[1:])
    assert (row.elements, row.blocks, row.nonfinite_blocks) == (90 * 128, 90 * 8, 0)
    assert (bad.blocks, bad.nonfinite_blocks) == (90 * 8, 7 * 8)  # the 7 tokens of the first group
    row, bad = (of["w_gate_up", "activation", "wgrad"] for of in seen[1:])
    padded = 16 + 96  # 7 and 83 tokens
    assert (row.elements, row.blocks) == ((padded if hadamard else 90) * 128, padded // 16 * 128)
    assert (bad.blocks, bad.nonfinite_blocks) == (padded // 16 * 128, 128)


# --- the host never waits -------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Note the ops that make the host wait for the device, if the tensors were on one."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        moves = name == "_to_copy" and (kwargs or {}).get("device", args[0].device) != args[0].device
        if masks or moves or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))


def test_reads_are_noted():
    x = torch.ones(3)
    reads = [lambda: x[0].item(), lambda: bool(x[0]), x.nonzero, lambda: x[x > 0], lambda: x.to("meta")]
    for read in reads:
        with Reads() as reads_of:
            read()
        assert reads_of.ops


@each_layer
def test_a_watch_reads_no_value_in_the_forward_and_backward(made):
    """The references and autograd read values of host tensors, with a watch as often as without one."""
    layer, inputs = layer_and_tokens(made)
    with Reads() as plain:
        step(layer, inputs)
    with watch(layer) as seen, Reads() as watched:
        step(layer, inputs)
    assert watched.ops == plain.ops
    assert seen.rows()


@pytest.mark.parametrize("recipe", ["mxfp8_floor", "fp8_128", "nvfp4", "nvfp4_nearest_no_hadamard"])
def test_counting_needs_no_values(recipe):
    """A tensor on the meta device raises when it is read."""
    by = _formats.format_of(RECIPES[recipe], "reference", "test")
    x, w = torch.empty(M, 128, device="meta"), torch.empty(2, 128, 128, device="meta")
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    for along_tokens in (False, True):
        for groups in (None, ends):
            made = _counters.count_tokens(by, x, groups, torch.float8_e4m3fn, along_tokens)
            made.add(_counters.count_weight(by, w, -1))
            assert made.counts.is_meta
            with pytest.raises(NotImplementedError):
                made.counts.tolist()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@each_layer
def test_a_gpu_is_not_waited_for(made):
    layer, inputs = layer_and_tokens(made)
    with watch(layer) as seen:
        step(layer, inputs)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(layer, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    assert {row.calls for row in seen.rows()} == {2}


# --- which calls count, and under which name ------------------------------------------------------------------------


def operands(seen: low.WatchReport) -> list[str]:
    return [f"{row.name} {row.tensor} {row.matmul} {row.calls}" for row in seen.rows()]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            "MXLinear",
            "activation forward, activation wgrad, weight forward, weight dgrad, gradient dgrad, gradient wgrad",
        ),
        ("MXLinear wgrad_bf16", "activation forward, weight forward, weight dgrad, gradient dgrad"),
        (
            "Float8BlockwiseLinear",
            "activation forward, activation wgrad, weight forward+dgrad, gradient dgrad, gradient wgrad",
        ),
        (
            "NVFP4Linear",
            "activation forward, activation wgrad, weight forward+dgrad, gradient dgrad, gradient wgrad",
        ),
    ],
)  # fmt: skip
def test_the_operands_of_a_linear(made, expected):
    layer, inputs = layer_and_tokens(made)
    model = nn.Sequential(nn.Identity(), layer)
    with watch(model) as seen:
        step(model, inputs)
    said = [f"1 {operand} 1".replace("+", ", ") for operand in expected.split(", ")]
    assert operands(seen) == said


@pytest.mark.parametrize(
    "made",
    ["GroupedExperts mxfp8", "GroupedExperts fp8", "GroupedExperts fp8 fused", "GroupedExperts nvfp4",
     "GroupedExperts nvfp4 fused"],
)  # fmt: skip
def test_the_operands_of_experts(made):
    layer, inputs = layer_and_tokens(made)
    model = nn.ModuleDict({"experts": layer})
    with watch(model) as seen:
        step(layer, inputs)
    weights = ["weight forward", "weight dgrad"] if "mx" in made else ["weight forward, dgrad"]
    each = ["activation forward", "activation wgrad", *weights, "gradient dgrad", "gradient wgrad"]
    assert operands(seen) == [f"experts.{weight} {one} 1" for weight in ("w_gate_up", "w_down") for one in each]
    assert seen.unwatched() == {}


def test_the_fused_experts_count_as_the_others():
    """The same experts by ops that write the hidden tensor give the same counts."""
    layer, inputs = layer_and_tokens("GroupedExperts fp8 fused")
    with watch(layer) as fused:
        step(layer, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_formats.FP8Blocks, "fuses_swiglu", lambda self, x: False)
        with watch(layer) as plain:
            step(layer, inputs)
    assert fused.rows() == plain.rows()


def test_the_gradient_of_a_layer_with_frozen_weights_and_the_weight_of_a_first_layer():
    layer, inputs = layer_and_tokens("GroupedExperts fp8 fused")
    layer.w_gate_up.requires_grad_(False)
    x = inputs[0].detach()
    with watch(layer) as seen:
        layer(x, inputs[1]).sum().backward()
    assert [operand for operand in operands(seen) if "grad" in operand] == [
        "w_down activation wgrad 1",
        "w_down gradient wgrad 1",
    ]
    with watch(layer) as seen, torch.no_grad():
        layer(x, inputs[1])
    assert {row.matmul for row in seen.rows()} == {"forward"}


@pytest.mark.parametrize("function", ["mx_grouped_mm", "fp8_grouped_mm", "nvfp4_grouped_mm"])
def test_a_function_counts_for_the_module_that_calls_it(function):
    layer, inputs = layer_and_tokens(function)
    model = nn.ModuleDict({"theirs": nn.Sequential(), "moe": layer})
    with watch(model) as seen:
        step(layer, inputs)
        assert getattr(low, function)(inputs[0], layer.w1, inputs[1]).requires_grad  # in no module
    assert {row.name for row in seen.rows()} == {"moe.w1", "moe.w2"}  # a cast of w2
    assert {row.calls for row in seen.rows()} == {1}
    with watch(model) as seen, torch.no_grad():
        layer(*inputs)
    assert {row.name for row in seen.rows()} == {"moe.w1", "moe.matmul 2"}  # no graph says where the cast is from


def test_calls_add_up_and_a_closed_watch_counts_nothing():
    layer, inputs = layer_and_tokens("Float8BlockwiseLinear")
    with watch(layer) as once:
        out = layer(*inputs)
    out.sum().backward()
    assert {row.tensor for row in once.rows()} == {"activation", "weight"}
    with watch(layer) as seen:
        for _ in range(2):
            out = layer(*inputs)
            out.sum().backward()
    step(layer, inputs)
    with seen:
        step(layer, inputs)
    assert {row.calls for row in seen.rows()} == {3}
    first, later = (by_operand(counted)["weight", "activation", "forward"] for counted in (once, seen))
    assert (later.elements, later.underflowed) == (3 * first.elements, 3 * first.underflowed)
    assert later.sqnr_db == pytest.approx(first.sqnr_db)
    assert (later.scale_min, later.scale_max) == (first.scale_min, first.scale_max)


def test_nested_watches_count_for_themselves_and_an_exception_closes():
    layer, inputs = layer_and_tokens("MXLinear")
    model = nn.Sequential(layer)
    with watch(model) as outer:
        with contextlib.suppress(KeyError), watch(layer) as inner:
            layer(*inputs)
            raise KeyError
        layer(*inputs)
        with pytest.raises(RuntimeError, match="watch: this watch is open already"):
            outer.__enter__()
    assert {row.name for row in inner.rows()} == {"weight"}
    assert {(row.calls, row.elements) for row in inner.rows()} == {(1, M * 128), (1, 128 * 128)}
    assert {row.name for row in outer.rows()} == {"0"}
    assert {(row.calls, row.elements) for row in outer.rows()} == {(2, 2 * M * 128), (2, 2 * 128 * 128)}


def test_nothing_stays_after_a_block_even_if_a_forward_raises_in_it():
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)
    layer, (x, ends) = layer_and_tokens("mx_grouped_mm")
    with watch(nn.Sequential(layer)) as seen:
        with pytest.raises(TypeError):
            layer(x, ends.long())
        assert not _watch_log.running.calls
        layer(x, ends)
    assert seen.rows()
    assert (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)) == before
    assert not _watch_log.open_logs
    assert layer.state_dict().keys() == {"w1", "w2"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_counts_its_forward_twice(use_reentrant):
    layer, inputs = layer_and_tokens("MXLinear")
    with watch(layer) as seen:
        checkpoint(layer, *inputs, use_reentrant=use_reentrant).sum().backward()
    rows = by_operand(seen)
    assert rows["weight", "activation", "forward"].calls == rows["weight", "weight", "forward"].calls == 2
    assert rows["weight", "gradient", "dgrad"].calls == rows["weight", "gradient", "wgrad"].calls == 1


@pytest.mark.parametrize("outside", [watch, cache_weights])
def test_a_forward_counts_the_weight_whose_codes_are_held(outside):
    layer, inputs = layer_and_tokens("GroupedExperts mxfp8")
    inside = {watch: cache_weights, cache_weights: watch}[outside]
    with outside(layer) as first, inside(layer) as second:
        for _ in range(2):
            layer(*inputs)
    rows = by_operand(first or second)
    assert rows["w_down", "weight", "dgrad"].calls == rows["w_down", "weight", "forward"].calls == 2


def test_inference_mode_and_training_add_to_the_same_counts():
    layer, inputs = layer_and_tokens("MXLinear")
    with watch(layer) as seen:
        with torch.inference_mode():
            layer(inputs[0].detach())
        step(layer, inputs)
        with torch.inference_mode():
            layer(inputs[0].detach())
    assert by_operand(seen)["weight", "activation", "forward"].calls == 3


def test_a_layer_of_two_names_counts_under_the_first_and_a_copy_not_at_all():
    layer, inputs = layer_and_tokens("MXLinear")
    model = nn.Sequential(layer, layer)
    with watch(model) as seen, torch.no_grad():
        model(*inputs)
        copy.deepcopy(model)(*inputs)
    assert operands(seen) == ["0 activation forward 2", "0 weight forward 2"]


def test_no_token_and_a_gradient_without_memory():
    layer = MXLinear(32, 32, device=DEVICE)
    x = torch.ones(0, 32, device=DEVICE, requires_grad=True)
    with watch(layer) as seen:
        layer(x).sum().backward()
        layer(torch.ones(3, 32, device=DEVICE)).sum().backward()  # the gradient has strides 0
    row = by_operand(seen)["weight", "gradient", "wgrad"]
    assert (row.calls, row.elements, row.blocks, row.sqnr_db) == (2, 96, 32, math.inf)


def test_modules_that_are_not_watched_are_named():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(4, 128),
            "norm": nn.LayerNorm(128),
            "attention": nn.MultiheadAttention(128, 2),
            "experts": GroupedExperts(2, 128, 128, "bf16"),
            "idle": MXLinear(128, 128),
            "lazy": nn.LazyLinear(3),
        }
    ).to(DEVICE)
    with watch(model) as seen:
        model["experts"](torch.ones(M, 128, device=DEVICE), offs())
        model["late"] = MXLinear(128, 128, device=DEVICE)
        model["late"](torch.ones(M, 128, device=DEVICE))
    nothing = "ran no matmul of low precision in the block"
    assert seen.unwatched() == {
        "embedding": f"Embedding {nothing}",
        "attention": f"MultiheadAttention {nothing}",
        "attention.out_proj": f"NonDynamicallyQuantizableLinear {nothing}",
        "experts": "GroupedExperts has the recipe bf16, which quantizes nothing",
        "idle": "MXLinear ran no forward in the block",
        "lazy": f"LazyLinear {nothing}",
        "late": "MXLinear joined the model after the block began",
    }
    assert str(seen).startswith("0 operands of 0 layers counted\nmodules not watched: 7\n  embedding: Embedding ran no")


# --- modes that cannot be watched -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_what_was_compiled_before_runs_uncompiled_in_the_block():
    torch._dynamo.reset()
    layer, inputs = layer_and_tokens("MXLinear")
    runs = []

    def backend(graph, example_inputs):
        return lambda *args: runs.append(1) or graph(*args)

    compiled = torch.compile(layer, backend=backend)
    with torch.no_grad():
        expected = compiled(*inputs)
        before = len(runs)
        with watch(compiled) as seen:
            assert torch.equal(compiled(*inputs), expected)
        assert len(runs) == before
        compiled(*inputs)
    assert len(runs) == 2 * before > 0
    assert {row.calls for row in seen.rows()} == {1}


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_graph_that_is_compiled_in_the_block_is_refused():
    torch._dynamo.reset()
    layer, inputs = layer_and_tokens("MXLinear")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with (
        watch(layer),
        torch.compiler.set_stance("default"),
        pytest.raises(Exception, match=r"watch: torch.compile trac"),
    ):
        compiled(*inputs)


def test_a_transform_is_refused_and_a_tensor_without_values_counts_nothing():
    layer, inputs = layer_and_tokens("MXLinear")
    with watch(layer), pytest.raises(RuntimeError, match=r"watch: MXLinear runs under a torch.func transform"):
        torch.func.grad(lambda x: layer(x).sum())(inputs[0])
    meta = MXLinear(32, 32, device="meta")
    with watch(meta) as seen:
        meta(torch.empty(3, 32, device="meta")).sum().backward()
    assert seen.rows() == []


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"watch: the model is a list; needs an nn.Module"):
        watch([])


# --- the views ------------------------------------------------------------------------------------------------------


def of_a_bad_layer() -> low.WatchReport:
    torch.manual_seed(0)
    model = nn.Sequential(*(MXLinear(64, 64, device=DEVICE) for _ in range(3)))
    model[1].register_forward_pre_hook(lambda module, inputs: inputs[0] * outliers)
    outliers = torch.ones(64, device=DEVICE)
    outliers[5] = 1e6
    with watch(model) as seen, torch.no_grad():
        model(torch.randn(50, 64, device=DEVICE))
    return seen


def test_the_views_name_the_layer_that_loses_most():
    seen = of_a_bad_layer()
    worst = seen.worst(1)
    assert [(row.name, row.tensor) for row in worst] == [("1", "activation")]
    assert seen.worst() == sorted(seen.rows(), key=lambda row: -row.loss)
    table = seen.table(2)
    assert table.row_count == 2
    assert next(iter(table.columns[0].cells)).plain == "1"
    assert seen.table().row_count == len(seen.rows()) == 6
    lines = str(seen).splitlines()
    assert lines[0] == "6 operands of 3 layers counted, most loss first:"
    assert lines[3].startswith("1     activation for forward    3,200")
    assert lines[-1] == "modules not watched: 0"


def test_a_picture_names_the_layers_that_lose_most():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    figure = of_a_bad_layer().draw(1)
    try:
        figure.canvas.draw()
        said = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert "1. 1\n    activation for forward\n" in said[-1]
        assert "2. " not in said[-1]
    finally:
        plt.close(figure)
    with pytest.raises(ValueError, match=r"WatchReport.draw: nothing was counted"):
        watch(nn.Identity()).draw()


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"WatchReport.draw: needs matplotlib: pip install 'mxspec\[notebooks\]'"):
        of_a_bad_layer().draw()
