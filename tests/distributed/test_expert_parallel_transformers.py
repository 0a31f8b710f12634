"""Converted experts of transformers on 2 and 4 ranks, on CPUs or GPUs, give the bits of one process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from mxspec.check import sqnr_db
from mxspec.distributed import ExpertParallel, _exchange, wire_reference
from mxspec.distributed._wire import Wire
from mxspec.nn import cache_weights, convert
from mxspec.nn.experts import QuantizedExperts
from tests.helpers import error_on_every_rank, here, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra [transformers])")
from tests.distributed import routed_experts
from tests.distributed.routed_experts import (
    INNER,
    PARTS,
    ROUTINGS,
    TOP,
    H,
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


def with_codes(layer: Any) -> Any:
    """The layer of one process, with what a wire of codes changes."""
    run_experts = layer.run_experts

    def run(rows: Tensor, offs: Tensor) -> Tensor:
        out = run_experts(wire_reference(rows, layer.recipe), offs)
        return wire_reference(out, layer.recipe, of_gradient=True)

    layer.run_experts = run
    return layer


def cases() -> list[tuple[str, str, str, torch.dtype, str]]:
    """The family, the recipe, the routing, the dtype of tokens and weights, and the wire."""
    single, half = torch.float32, torch.bfloat16
    return [
        *(
            ("qwen3_moe", recipe, "skewed", half, "values")
            for recipe in ("bf16", "fp8_128", "fp8_128_pow2", "mxfp8_floor")
        ),
        *(("qwen3_moe", "mxfp8_rceil", kind, single, "values") for kind in ROUTINGS),
        *(("qwen3_moe", "mxfp8_rceil", kind, single, "codes") for kind in ROUTINGS),
        *(("mixtral", recipe, "skewed", half, "codes") for recipe in ("fp8_128", "fp8_128_pow2")),
        ("mixtral", "bf16", "top-1", single, "values"),
        ("deepseek_v3", "fp8_128", "a part without tokens", half, "values"),
        ("deepseek_v3", "mxfp8_rceil", "skewed", half, "codes"),
        *(("gpt_oss", recipe, "skewed", half, "values") for recipe in ("bf16", "fp8_128", "mxfp8_rceil")),
        *(("gpt_oss", "fp8_128_pow2", kind, half, "codes") for kind in ("skewed", "pairs without an expert")),
        ("gpt_oss", "mxfp8_rceil", "a part without tokens", single, "codes"),
    ]


def on_one(family: str, recipe: str, kind: str, dtype: torch.dtype, wire: str) -> dict[str, Tensor]:
    """What one process computes on the tokens of all parts."""
    layer = layer_of(family, recipe, dtype)
    whole = joined([part_of(kind, number, dtype) for number in range(PARTS)])
    return step(with_codes(layer) if wire == "codes" else layer, whole)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """A file of what one process computes in each case."""
    of_case = {case: on_one(*case) for case in cases()}
    torch.save(of_case, path := tmp_path_factory.mktemp("one_process") / "expected.pt")
    return path


def differing(of_case: Any, case: tuple[str, str, str, torch.dtype, str]) -> list[str]:
    """Which results of this rank do not have the bits of one process."""
    family, recipe, kind, dtype, wire = case
    own, place = my_parts(kind, dtype)
    got, found = step(sharded(layer_of(family, recipe, dtype), wire=wire), own), []
    for name, whole in of_case[case].items():
        mine = got[name].to_local() if isinstance(got[name], DTensor) else got[name]
        part = whole[place] if name in ("out", "x", "weights") else local(whole)
        if name.endswith("bias"):
            # A matmul of PyTorch gives a bias's gradient. Its order of the sums depends on the number of the rows.
            if not sqnr_db(mine.float(), part.float()) >= (120 if dtype == torch.float32 else 45):
                found.append(name)
        elif not same_bits(mine, part):
            found.append(name)
    return found


def _cases_on_rank(expected: Path, chosen: list[Any]) -> None:
    of_case = torch.load(expected)
    for case in chosen:
        assert not (found := differing(of_case, case)), (case, found)


def _another_order_is_found(expected: Path) -> None:
    """Rows sorted by (expert, source rank backwards): the comparison sees it in the gradients of the weights."""
    orders = _exchange._orders

    def backwards(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        sources = torch.arange(len(counts)).repeat_interleave(counts.sum(1))
        expert = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
        order = (expert * len(counts) - sources).argsort(stable=True)
        return order, order.argsort(), orders(counts, rows)[2]

    case = ("qwen3_moe", "mxfp8_floor", "skewed", torch.bfloat16, "values")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_exchange, "_orders", backwards)
        found = differing(torch.load(expected), case)
    # Blocks along the tokens have other tokens, so other scales, and `floor` saturates other elements.
    assert found == ["gate_up_proj", "down_proj"]


def _a_token_is_quantized_once() -> None:
    """Before it is copied to its experts. The gradient of the results is another one for each pair."""
    seen: list[tuple[int, int]] = []
    encode, exchange = Wire.encode, dist.all_to_all_single

    def noted(self: Wire, x: Tensor) -> Tensor:
        seen.append(("quantized", len(x)))
        return encode(self, x)

    def sent(out: Tensor, given: Tensor, *args: Any) -> None:
        seen.append((str(given.dtype), len(given)))
        exchange(out, given, *args)

    own, _ = my_parts("skewed", torch.bfloat16)
    layer = sharded(layer_of("mixtral", "fp8_128", torch.bfloat16), wire="codes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "encode", noted)
        patch.setattr(dist, "all_to_all_single", sent)
        step(layer, own)
    tokens, pairs = len(own.x), TOP * len(own.x)
    assert seen[:2] == [("quantized", tokens), ("torch.uint8", pairs)]
    assert seen[3:5] == [("quantized", pairs), ("torch.uint8", pairs)]
    assert [kind for kind, _ in (seen[2], seen[5])] == ["torch.bfloat16"] * 2
    assert len(seen) == 6


class OfAnotherLibrary(QuantizedExperts):
    weight_names = ()


def _refusals(rank: int) -> None:
    mesh = init_device_mesh(here().type, (2,))
    layer, lora = layer_of("mixtral", "fp8_128"), layer_of("mixtral", "fp8_128")
    parametrize.register_parametrization(lora, "down_proj", nn.Identity())
    odd = layer_of("qwen3_moe", "fp8_128")
    for name in ("gate_up_proj", "down_proj"):
        setattr(odd, name, nn.Parameter(getattr(odd, name).detach()[:3]))
    unconverted = plain("gpt_oss").model.layers[0].mlp.experts
    for module, message in [
        (unconverted, "TypeError: rank 0: ExpertParallel: the module is a GptOssExperts; needs a GroupedExperts, or"),
        (unconverted, "experts of transformers that are converted. Call mxspec.nn.convert(model, recipe) first."),
        (unconverted if rank else layer, "TypeError: rank 1: ExpertParallel: the module is a GptOssExperts"),
        (odd, "ValueError: rank 0: ExpertParallel: Qwen3MoeExperts has 3 experts, which 2 ranks cannot share evenly"),
        (sharded(layer_of("gpt_oss", "bf16")), "RuntimeError: rank 0: ExpertParallel: GptOssExperts is sharded alre"),
        (lora, "TypeError: rank 0: ExpertParallel: ParametrizedMixtralExperts has other parameters than those of"),
        (OfAnotherLibrary(), "TypeError: rank 0: ExpertParallel: the module is a OfAnotherLibrary that its own libr"),
        (layer_of(("mixtral", "qwen3_moe")[rank], "bf16"), "ValueError: ExpertParallel: the layer must be the same"),
    ]:
        assert message in error_on_every_rank(lambda module=module: parallelize_module(module, mesh, ExpertParallel()))
    with cache_weights(layer):
        held = error_on_every_rank(lambda: parallelize_module(layer, mesh, ExpertParallel()))
    assert held.startswith("RuntimeError: rank 0: ExpertParallel: cache_weights holds codes of MixtralExperts")
    codes = error_on_every_rank(lambda: sharded(layer_of("mixtral", "bf16"), wire="codes"))
    assert codes.startswith("ValueError: rank 0: ExpertParallel: wire='codes' sends the codes of the recipe, and bf16")
    assert type(layer.down_proj) is nn.Parameter  # a refused layer stays as it was
    assert same_bits(layer.down_proj.detach(), layer_of("mixtral", "fp8_128").down_proj.detach())


def _refusals_of_a_forward(rank: int) -> None:
    """A rank's wrong argument is an error on both ranks. The next forward is right."""
    layer, (own, _) = sharded(layer_of("gpt_oss", "mxfp8_rceil")), my_parts("skewed")
    x, index, weights = own[:3]
    expected = layer(x, index, weights)
    assert same_bits(layer(hidden_states=x, top_k_index=index, top_k_weights=weights), expected)
    for on, given, message in [
        (1, (x[:, :32], index, weights), "ValueError: rank 1: GptOssExperts: input has shape (81, 32); needs"),
        (0, (x.half(), index, weights), "TypeError: rank 0: GptOssExperts: input has dtype torch.float16"),
        (1, (x, index.tolist(), weights), "TypeError: rank 1: GptOssExperts: top_k_index is a list; needs a tensor"),
        (1, (x, index.float(), weights), "TypeError: rank 1: GptOssExperts: top_k_index has dtype torch.float32; n"),
        (
            0,
            (x, index[:5], weights[:5]),
            "ValueError: rank 0: GptOssExperts: top_k_index has shape (5, 2); needs (69, t",
        ),
        (1, (x, index[0, 0], weights), "ValueError: rank 1: GptOssExperts: top_k_index has shape (); needs (81, top_"),
        (0, (x, index, weights[:, :1]), "ValueError: rank 0: GptOssExperts: top_k_weights has shape (69, 1); needs"),
        (0, (x.bfloat16(), index, weights), "dtype must be the same on every rank, but rank 0 has torch.bfloat16"),
        (1, (DTensor.from_local(x, layer.expert_mesh), index, weights), "TypeError: rank 1: GptOssExperts: hidden_st"),
    ]:
        arguments = given if on == rank else (x, index, weights)
        assert message in (found := error_on_every_rank(lambda arguments=arguments: layer(*arguments))), found
        assert same_bits(layer(x, index, weights), expected)
    layer.down_proj_bias.requires_grad_(rank == 0)
    assert "requires_grad of the weights must be the same" in error_on_every_rank(lambda: layer(x, index, weights))
    layer.down_proj_bias.requires_grad_()
    with pytest.raises(TypeError, match="has sharded weights"), cache_weights(layer):
        pass
    with pytest.raises(RuntimeError, match="already wrapped by a DTensor of its parameters"):
        convert(nn.ModuleDict({"experts": layer}), "bf16")


def _copies_checkpointing_and_the_mean() -> None:
    layer, (own, _) = sharded(layer_of("gpt_oss", "fp8_128_pow2"), wire="codes"), my_parts("skewed")
    once = step(layer, own)
    assert all(placed.placements == (Shard(0),) for placed in layer.parameters())
    assert {name: tuple(each.to_local().shape) for name, each in layer.named_parameters()} == {
        "gate_up_proj": (2, H, 2 * INNER), "gate_up_proj_bias": (2, 2 * INNER), "down_proj": (2, INNER, H),
        "down_proj_bias": (2, H),
    }  # fmt: skip
    again = step(layer, own, lambda *given: checkpoint(layer, *given, use_reentrant=False))
    of_copy = step(copy.deepcopy(layer), own)
    mean = step(sharded(layer_of("gpt_oss", "fp8_128_pow2"), wire="codes", gradients="mean"), own)
    for name, value in once.items():
        each = [t.to_local() if isinstance(t, DTensor) else t for t in (value, again[name], of_copy[name], mean[name])]
        assert same_bits(each[0], each[1]), name
        assert same_bits(each[0], each[2]), name
        assert same_bits(each[0], each[3] * (2 if isinstance(value, DTensor) else 1)), name
    assert "wire='codes', rank" in repr(layer)
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(layer)


def _compiled() -> None:
    """`torch.compile` compiles the experts and the sum of a token's results, between and after the exchanges."""
    torch.compiler.reset()
    counter, (own, _) = CompileCounterWithBackend("aot_eager"), my_parts("skewed", torch.bfloat16)
    layer = sharded(layer_of("qwen3_moe", "bf16", torch.bfloat16))
    compiled = torch.compile(layer, backend=counter)
    once, again = step(layer, own), step(layer, own, lambda *given: compiled(*given))
    for name, value in once.items():
        each = [t.to_local() if isinstance(t, DTensor) else t for t in (value, again[name])]
        assert same_bits(*each), name
    assert counter.frame_count == 2


def _on_two_ranks(rank: int, expected: Path) -> None:
    _cases_on_rank(expected, cases())
    _another_order_is_found(expected)
    _a_token_is_quantized_once()
    _refusals(rank)
    _refusals_of_a_forward(rank)
    _copies_checkpointing_and_the_mean()
    _compiled()


def _on_two_gpus(rank: int) -> None:
    """Each rank also computes what one process with one GPU does. The rows of an expert go over the edges of tiles."""
    routed_experts.TOKENS = 300
    wrong = {case: found for case in cases() if (found := differing({case: on_one(*case)}, case))}
    assert not wrong, wrong
    routed_experts.TOKENS = 33
    _a_token_is_quantized_once()
    _refusals(rank)
    _refusals_of_a_forward(rank)
    _copies_checkpointing_and_the_mean()
    _compiled()


def test_two_gpus_give_the_bits_of_one_gpu():
    on_ranks(2, _on_two_gpus, timeout_s=300, backend="nccl")


@pytest.mark.turns(3)
def test_outputs_and_gradients_are_the_bits_of_one_process_and_errors_are_those_of_every_rank(expected):
    on_ranks(2, _on_two_ranks, expected)


def _on_four_ranks(rank: int, expected: Path) -> None:
    _cases_on_rank(expected, [case for case in cases() if case[4] == "codes" and case[0] in ("qwen3_moe", "gpt_oss")])


@pytest.mark.turns(3)
def test_four_ranks_give_the_bits_of_one_process_too(expected):
    on_ranks(4, _on_four_ranks, expected)
