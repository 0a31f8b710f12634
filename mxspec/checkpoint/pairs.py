"""Which loaders read a model in a family. A pair that no loader reads is refused; other pairs may have warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mxspec.checkpoint.fused import differing
from mxspec.checkpoint.targets import SQUARE, TARGETS
from mxspec.checkpoint.units import Unit

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def refusal(config: Mapping[str, Any], family: str) -> str | None:
    """Why no loader reads this model in this family, or None if a loader reads it."""
    gptoss = config.get("model_type") == "gpt_oss"
    if TARGETS[family].packed and not gptoss:
        return (
            f"{family} of model_type {config.get('model_type')!r}: transformers and vLLM read it for gpt_oss alone, "
            "and load raw codes otherwise"
        )
    if gptoss and family not in ("bf16", "gptoss_mxfp4"):
        return f"{family} of gpt_oss: transformers loads the raw codes of the fused experts; needs gptoss_mxfp4 or bf16"
    return None


def refusal_of_source(config: Mapping[str, Any], units: Iterable[Unit]) -> str | None:
    """Why the weights of this checkpoint have no known form, or None."""
    kind = config.get("model_type")
    packed = next((unit for unit in units if unit.packed and unit.scheme), None)
    if packed is None or kind in (None, "gpt_oss"):
        return None
    return (
        f"{packed.codes} are MXFP4 experts as gpt_oss has them, whose plain weights are transposed, but the model_type "
        f"is {kind!r}, and its own may lie otherwise. Load the state_dict after mxspec.nn.quantize_weights."
    )


def warnings(
    config: Mapping[str, Any],
    family: str,
    scales: str,
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    input_scales: bool = False,
) -> list[str]:
    """The traps of the loaders that read a family, for the quantized weights with these names and shapes."""
    target, said = TARGETS[family], []
    shapes = list(shapes)
    # A model with images has the configuration of its language model one level down.
    configs = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    experts = any(of.get(key) for of in configs for key in EXPERT_KEYS) or any(
        ".experts." in name for name, _ in shapes
    )
    if target.method == "compressed-tensors" and experts:
        said.append(
            f"transformers with compressed-tensors does not read {family} experts of {config.get('model_type')}: it "
            "loads raw codes or raises; vLLM reads them"
        )
    if target.method == "modelopt":
        readers = "vLLM, SGLang and TensorRT-LLM read it"
        if target.scheme == "mxfp4":
            readers = "no loader is known that reads quant_algo mxfp4; ModelOpt's own tensor class does"
        said.append(f"transformers has no loader of {family}; {readers}")
    if target.scheme == "nvfp4" and not input_scales:
        said.append(
            f"{family} without input scales: the configuration says that only weights are quantized (W4A16), so "
            "engines multiply in bfloat16"
        )
    if target.scheme == SQUARE:
        wrong = [(name, shape) for name, shape in shapes if any(n > 128 and n % 128 for n in shape[-2:])]
        if wrong and target.method == "fp8":
            name, shape = wrong[0]
            said.append(
                f"{counted(len(wrong), 'weight', 'have')} a partial block, the first is {name} {tuple(shape[-2:])}: "
                "transformers takes the block from the shape of the scales, and reads such a weight wrong or raises"
            )
        if wrong and target.method != "fp8":
            few = counted(len(wrong), "weight", "have")
            said.append(f"{few} a partial block: the first is {wrong[0][0]}; forward may raise")
        if scales == "fp32":
            said.append(
                "vLLM and SGLang quantize fp32 scales again to powers of two when they use DeepGEMM; scales ue8m0 are "
                "taken unchanged"
            )
    return said


def of_tensors(family: str, tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The warnings for the tensors of a manifest: several tensor scales in a layer, roundings, what is left out."""
    target, said = TARGETS[family], []
    codes = target.codes.removeprefix("{}")
    scales = {name.removesuffix(codes): t["tensor_scale"] for name, t in tensors.items() if "tensor_scale" in t}
    if layers := differing({module: scale for module, scale in scales.items() if module + codes in tensors}):
        said.append(several_scales(layers))
    counts = {t["from"][0]: t["bf16_values_that_differ"] for t in tensors.values() if "bf16_values_that_differ" in t}
    if counts:
        changed, others = sum(counts.values()), counted(len(counts), "weight")
        are = "is another number" if changed == 1 else "are other numbers"
        said.append(
            f"compressed-tensors divides by its tensor scale, ModelOpt multiplies: after the change, "
            f"{counted(changed, 'value')} of {others} {are} of bfloat16, the first weight is {next(iter(counts))}"
        )
    for why, scale in (("why", "the tensor scale"), ("why_input_scale", "the scale of activations")):
        of = (t for t in tensors.values() if why in t and (t["how"] == "rounded" or why == "why_input_scale"))
        if rounded := list(dict.fromkeys(t["from"][0] for t in of)):
            said.append(f"{scale} of {counted(len(rounded), 'weight')} is rounded, the first is {rounded[0]}")
    left = dict.fromkeys(t["left_out"] for t in tensors.values() if "left_out" in t)
    if left:
        said.append(f"{counted(len(left), 'scale of activations', 'are')} left out, the first is {next(iter(left))}")
    return said


def counted(count: int, noun: str, verb: str = "") -> str:
    """A number, a noun and a verb in the right form: `1 weight has`, `2 scales of activations are`."""
    first, of, rest = noun.partition(" of ")
    if count == 1:
        verb = {"have": "has", "are": "is"}.get(verb, verb)
    return f"{count} {first}{'' if count == 1 else 's'}{of}{rest} {verb}".rstrip()


def several_scales(layers: list[tuple[str, ...]]) -> str:
    """What engines do with fused layers whose weights have several tensor scales."""
    return (
        f"{counted(len(layers), 'fused layer', 'have')} several tensor scales, the first is {', '.join(layers[0])}: "
        "vLLM and SGLang use the largest stored scale for the whole layer, so the other weights are read wrong"
    )
