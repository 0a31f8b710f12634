"""Models of Hugging Face transformers: experts that train by a recipe, and FP8 checkpoints that run on our matmuls.

transformers runs experts through an interface: `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS` is a table of
functions, and `config._experts_implementation` is the name of one of them. `adapt` adds the function `mxspec` to the
table, and gives a converted layer its own copy of the config, with this name. The model's config stays as it is. So
`save_pretrained` writes nothing of mxspec, and layers that were not converted run as before.

A converted layer keeps its parameters, hooks and methods. Its class becomes a subclass of its old class and of
`QuantizedExperts`. So `cache_weights` works, and transformers still recognizes the layer.

The interface came with transformers 5.0.0 (huggingface/transformers#42697). Tested with 5.17.0 and 5.23.0.

`serve` runs the FP8 layers of a checkpoint that is already quantized. It does not train.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from mxspec.integrations import _transformers_serving
from mxspec.integrations._transformers_experts import IMPLEMENTATION, Experts, WeightOnly, class_of
from mxspec.integrations._transformers_serving import Serving
from mxspec.nn.recipe import Recipe

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


def is_experts(layer: nn.Module) -> bool:
    """Whether a module is an experts layer of transformers' experts interface."""
    # transformers' decorator gives every experts layer these attributes
    return all(hasattr(layer, name) for name in ("is_transposed", "has_bias", "config"))


def adapt(layer: Any, name: str, recipe: Recipe) -> nn.Module:
    """Make experts of transformers train by a recipe, in place.

    Args:
        layer: an experts layer of transformers' experts interface.
        name: its name in the model, for error texts.
        recipe: the `Recipe`.

    Returns:
        The layer itself.

    Raises:
        TypeError: the layer does not run through the interface, or its weights are not bfloat16 or float32.
        ValueError: the recipe cannot run the layer's widths.
        RuntimeError: `cache_weights` holds codes of the layer's weights.
    """
    if isinstance(layer, WeightOnly):
        raise TypeError("it holds its weights in MXFP4, for inference")
    _check_experts(layer)
    kind: Any = type(layer)
    if isinstance(layer, Experts):
        layer.set_recipe(recipe)
        return layer
    layer.__class__ = class_of(kind, weight_names(layer), Experts)
    try:
        layer.set_recipe(recipe)
    except (TypeError, ValueError):
        layer.__class__ = kind
        raise
    layer.is_swiglu, layer.is_clamped_swiglu = _is_swiglu(layer), _is_clamped_swiglu(layer)
    _run_by_us(layer)
    return layer


def weights_to_hold(layer: Any) -> dict[str, Tensor]:
    """The weights of experts for `quantize_weights`, by name: `(E, N, K)`. Raises TypeError if they cannot be held."""
    _check_experts(layer)
    return {key: getattr(layer, key).mT if layer.is_transposed else getattr(layer, key) for key in weight_names(layer)}


def hold(layer: Any) -> None:
    """Make experts of transformers run by the codes that `quantize_weights` gives them next."""
    if isinstance(layer, Experts):  # `convert` had given them a recipe
        layer.__class__ = layer.their_class
        del layer.recipe
    layer.is_swiglu, layer.is_clamped_swiglu = _is_swiglu(layer), False
    layer.__class__ = class_of(type(layer), weight_names(layer), WeightOnly)
    _run_by_us(layer)


def after_hold(model: nn.Module) -> list[str]:
    """Let the config of each gpt-oss say that its experts are MXFP4, and say how other models can be stored.

    With this config, `save_pretrained` writes a checkpoint as gpt-oss has it. It is a copy, because another model may
    share the config of before.
    """
    from transformers import PreTrainedModel

    notes = []
    own: list[Any] = []
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in models:
        config: Any = module.config
        layers = [layer for layer in module.modules() if is_experts(layer)]
        whole = all(isinstance(layer, WeightOnly) for layer in layers)
        if whole and config.model_type == "gpt_oss":
            plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            if not any(config is of_ours for of_ours in own):
                own.append(config := _own_config(module))
            config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
        elif layers:
            kind = config.model_type
            why = f"no loader reads MXFP4 experts of {kind}" if whole else "not all of its experts hold MXFP4"
            stored = "save_pretrained would write a folder that loads with random experts"
            notes.append(f"{stored}, because {why}; store the state_dict")
    if not models:
        notes.append(
            "no config of a model says that the experts hold MXFP4; call quantize_weights of the whole model before "
            "save_pretrained"
        )
    return list(dict.fromkeys(notes))


def _own_config(model: Any) -> Any:
    """Give a model, and each part that shares its config, a copy of the config. Returns the copy."""
    shared, own = model.config, copy.deepcopy(model.config)
    for part in model.modules():
        if getattr(part, "config", None) is shared:
            part.config = own
    return own


def _check_experts(layer: Any) -> None:
    """Raise TypeError if a layer does not run through transformers' interface, or its weights are no parameters."""
    from transformers.integrations import moe

    kind: Any = layer.their_class if isinstance(layer, Experts) else type(layer)
    if getattr(kind.forward, "__globals__", {}).get("__name__") != moe.__name__ or "forward" in vars(layer):
        raise TypeError(f"{kind.__name__} has its own forward, which does not call transformers' experts interface")
    parameters = dict(layer.named_parameters(recurse=False))
    for weight in weight_names(layer):
        if type(stored := parameters.get(weight)) is not nn.Parameter or stored.ndim != 3:
            raise TypeError(
                f"{kind.__name__}: {weight} must be a plain parameter of three dimensions. Convert a model before it "
                "is sharded, quantized or parametrized."
            )


def _run_by_us(layer: Any) -> None:
    layer.config = copy.deepcopy(layer.config)
    layer.config._experts_implementation = IMPLEMENTATION


def experts_per_token(layer: Any) -> int | None:
    """The number of experts that a token goes to, or None if the config does not say it."""
    return next((found for key in TOP_K if isinstance(found := getattr(layer.config, key, None), int)), None)


def weight_names(layer: nn.Module) -> tuple[str, str]:
    """The names of the two weights. Experts without a gate have `up_proj` in place of `gate_up_proj`."""
    return "gate_up_proj" if getattr(layer, "has_gate", True) else "up_proj", "down_proj"


def _is_swiglu(layer: Any) -> bool:
    """Whether the layer computes `silu(first half) * second half` between its matmuls, without a bias."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    activation = getattr(layer, "act_fn", None)  # experts with their own gate may have none
    if layer.has_bias or not getattr(layer, "has_gate", True) or type(activation) not in (nn.SiLU, SiLUActivation):
        return False
    return type(layer)._apply_gate is _default_apply_gate and "_apply_gate" not in vars(layer)


def _is_clamped_swiglu(layer: Any) -> bool:
    """Whether the layer adds a bias and then computes gpt-oss's activation of interleaved gates and ups."""
    gate = getattr(type(layer), "_apply_gate", None)  # experts without a gate may have none
    place = getattr(gate, "__module__", None), getattr(gate, "__qualname__", None)
    gpt_oss = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts._apply_gate")
    return bool(layer.has_bias) and place == gpt_oss and "_apply_gate" not in vars(layer)


def serve() -> Serving:
    """Run the FP8 layers of transformers on mxspec's matmuls, until the handle is undone.

    This is for checkpoints in FP8 blocks of 128 x 128 (`quant_method: fp8`, the family `fp8_block`). transformers gets
    its dense, batched and grouped matmul from the package `kernels`, which downloads them. `serve` puts mxspec's ops in
    their place: `fp8_quantize_1x128`, `fp8_gemm` and `fp8_grouped_gemm`, on the backend that is chosen at each call.
    Neither `kernels` nor a download is needed. FP8 Linears no longer try DeepGEMM first. The call changes no model. It
    holds for the whole process, for models that are loaded before and after it.

    transformers has no public place for this. `serve` replaces `_FINEGRAINED_FP8` of
    `transformers.integrations.finegrained_fp8`, and sets the environment variable
    `TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR`. Tested with transformers 5.17.0 and 5.23.0 on a CPU, with the reference
    backend, and with 5.17.0 on an H200.

    transformers computes with FP8 codes on a GPU only. On a CPU it dequantizes the weights when it loads them, and
    `serve` has no effect. Experts run on mxspec for the experts implementations `grouped_mm` (transformers' default),
    `batched_mm` and `eager`, and not for `deepgemm`.

    Returns:
        A handle. Its `undo()` gives transformers its own kernels back. It is also a context manager. Calls may be
        nested, in any order and from several threads: the last handle that is undone ends it.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: this release of transformers keeps its matmuls elsewhere.

    A layer raises ValueError in its forward if mxspec does not compute it: another block size, FP4 weights, a static
    scale of the activations, or an input dimension that is no multiple of 16. It raises TypeError if its scales have
    another dtype than float32, bfloat16 and float8_e8m0fnu.

    On a GPU::

        from mxspec.integrations.transformers import serve
        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B-FP8", device_map="cuda")
        with serve():
            tokens = model.generate(**inputs)

    Source: transformers 5.17.0 and 5.23.0, integrations/finegrained_fp8.py.
    """
    return _transformers_serving.install()
