"""The traps: the cases in which a loader does not read a checkpoint as it is meant, each with its source."""

from __future__ import annotations

from collections.abc import Callable

from mxspec.checkpoint.families import SQUARE, quantization
from mxspec.checkpoint.loaders import (
    CAUTION,
    CHANGES,
    CT,
    RAISES,
    READERS,
    SGLANG,
    T517,
    T523,
    TRANSFORMERS,
    VLLM,
    WRONG,
    Facts,
    Test,
    Trap,
)

STORED = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def _guessed(wrong: bool) -> Test:
    def test(f: Facts) -> str | None:
        if f.family.method != "fp8" or f.family.block != SQUARE:
            return None
        for size, count, side, block in zip(f.shape[-2:], f.grid[-2:], ("rows", "columns"), SQUARE, strict=True):
            if size % count and not wrong:
                return f"{size} {side}: transformers raises, because they are no multiple of {count} scales"
            if wrong and not size % count and count > 1 and size // count != block:
                return f"{size} {side}: transformers reads the block as {size // count}"
        return None

    return test


def _requantized(f: Facts) -> str | None:
    if f.family.block != SQUARE or f.scales.powers_of_two:
        return None
    return (
        f"{STORED[f.scale_stored]} scales are no powers of two: vLLM and SGLang requantize to powers of two when they "
        "use DeepGEMM, relative error 0.037 instead of 0.027"
    )


def _when(families: tuple[str, ...], said: str, also: Callable[[Facts], bool] = lambda f: True) -> Test:
    return lambda f: said if f.family.name in families and also(f) else None


def _spread(f: Facts) -> str | None:
    if f.family.element != "e2m1" or f.scale_stored not in ("U8", "F8_E8M0") or not f.scales.largest:
        return None
    spread = round(f.scales.largest / f.scales.least).bit_length() - 1
    if spread > 14:
        return (
            f"exponents spread by {spread}: MXFP4 to FP8 with 128x128 blocks may lose values if the spread in one "
            "tile is above 14"
        )
    if f.scales.bytes_ff:
        return f"{f.scales.bytes_ff} scales are NaN: MXFP4 to FP8 with 128x128 blocks cannot keep their tiles"
    return None


def _parallel(f: Facts) -> str | None:
    wrong = [n for n in f.shape[-2:] if n % 128]
    if f.family.block != SQUARE or not wrong:
        return None
    return f"{wrong[0]} is no multiple of 128: vLLM refuses to split it by tensor parallelism"


def _fp4_key(place: str) -> Test:
    def test(f: Facts) -> str | None:
        at = f.config if place == "top" else quantization(f.config)
        if f.family.name != "deepseek_v4_fp4" or "expert_dtype" in at:
            return None
        where = "at the top level of config.json" if place == "top" else "inside quantization_config"
        return f"expert_dtype is not {where}, where this release reads it"

    return test


DEEPSEEK, E8M0 = ("fp8_block", "deepseek_v4"), ("U8", "F8_E8M0")
CT_ALL = tuple(name for name in READERS if name.startswith("ct_"))
MODELOPT_ALL = tuple(name for name in READERS if name.startswith("modelopt_"))
FP4_EXPERTS = ("gptoss_mxfp4", "ct_mxfp4", "deepseek_v4_fp4")

SHARED = "vllm and sglang, `process_weights_after_loading` of their NVFP4 linears"  # of `fused.differing`

# A source is either a release in which the trap was seen, or a thread of users and maintainers.
TRAPS = (
    Trap(TRANSFORMERS, WRONG, "NVIDIA/TensorRT-Model-Connect#1115", _guessed(wrong=True)),
    Trap(TRANSFORMERS, RAISES, "axolotl#3486", _guessed(wrong=False)),
    Trap((VLLM, SGLANG), CHANGES, "vllm#58157, sglang#13067", _requantized),
    Trap(
        (T517,),
        WRONG,
        "transformers 5.17.0",
        _when(
            ("ct_fp8_block",),
            "fp32 scales are rounded to bfloat16 when they are loaded",
            lambda f: f.scale_stored == "F32" and not f.scales.exact_in_bf16,
        ),
    ),
    Trap(
        (CT, *TRANSFORMERS),
        RAISES,
        "transformers 5.17.0",
        _when(("ct_fp8_block",), "K is no multiple of 128: forward raises", lambda f: bool(f.shape[-1] % 128)),
    ),
    Trap(
        (CT, *TRANSFORMERS),
        WRONG,
        "transformers 5.23.0",
        _when(CT_ALL, "experts are loaded as raw codes, or the load raises", lambda f: ".experts." in f.name),
    ),
    Trap(
        TRANSFORMERS,
        CAUTION,
        "transformers 5.23.0",
        _when(DEEPSEEK, "loading dequantized and saving changes fp32 scales", lambda f: not f.scales.powers_of_two),
    ),
    Trap(
        TRANSFORMERS,
        CAUTION,
        "transformers 5.23.0",
        _when(
            ("gptoss_mxfp4",),
            "save_pretrained assumes 90 blocks of 32; another width cannot be saved",
            lambda f: f.shape[-1] != 90 * 32,
        ),
    ),
    Trap(
        (*TRANSFORMERS, VLLM),
        WRONG,
        "docs/guides/checkpoints.md, Who reads what",
        _when(
            ("gptoss_mxfp4",),
            "only gpt_oss has such experts; another model is loaded without them",
            lambda f: f.config.get("model_type") not in (None, "gpt_oss"),
        ),
    ),
    Trap(
        TRANSFORMERS,
        WRONG,
        "transformers#46772",
        _when(MODELOPT_ALL, "quant_method modelopt is unknown: raw codes are loaded as weights"),
    ),
    Trap(
        (VLLM,),
        CAUTION,
        "vllm#51946, vllm#43416",
        _when(
            (*DEEPSEEK, "mxfp8"),
            "E8M0 bytes: some versions cast the byte to a number",
            lambda f: f.scale_stored in E8M0,
        ),
    ),
    Trap(
        (SGLANG,),
        CAUTION,
        "sglang#33541",
        _when(FP4_EXPERTS, "some versions leave the scales of experts zero", lambda f: ".experts." in f.name),
    ),
    Trap((VLLM, SGLANG), CAUTION, "vllm#53709", _spread),
    Trap((VLLM,), CAUTION, "vllm#54178", _parallel),
    Trap((T517,), WRONG, "transformers 5.17.0", _fp4_key("top")),
    Trap((T523,), WRONG, "transformers 5.23.0", _fp4_key("inside")),
    Trap(
        (VLLM, SGLANG),
        CAUTION,
        "modular#6600, kekzl/imp#1433",
        _when(("ct_nvfp4",), "weight_global_scale divides; a reader that multiplies gives garbage"),
    ),
)
