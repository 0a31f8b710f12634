"""Recipes: the format of a layer's matmuls, and how the layer quantizes its operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxspec.formats import (
    FP8_DTYPES,
    FP8_SCALE_FORMATS,
    FP8_SIZE_MULTIPLE,
    MX_BLOCK_SIZE,
    NVFP4_BLOCK_SIZE,
    SCALINGS,
)

# N and K must be multiples of the format's number. The last block of fp8_128 may be shorter. bf16 has the smallest
# number of the others, so that every model can change to it.
SIZE_MULTIPLES = {
    "mxfp8": MX_BLOCK_SIZE,
    "fp8_128": FP8_SIZE_MULTIPLE,
    "nvfp4": NVFP4_BLOCK_SIZE,
    "bf16": min(MX_BLOCK_SIZE, FP8_SIZE_MULTIPLE, NVFP4_BLOCK_SIZE),
}


# The options that one format alone has
_OPTIONS = {
    "mxfp8": ("scaling", "grad_dtype", "wgrad_bf16"),
    "fp8_128": ("scale_format",),
    "nvfp4": ("hadamard", "stochastic_rounding"),
}


@dataclass(frozen=True, repr=False)
class Recipe:
    """How a layer trains in low precision. `RECIPES` has the named recipes; `dataclasses.replace` makes variants.

    Args:
        format: `mxfp8` (blocks of 32 with an E8M0 scale), `fp8_128` (e4m3fn with fp32 scales in blocks of 128),
            `nvfp4` (e2m1 with an e4m3 scale in blocks of 16 and an fp32 scale for a matrix) or `bf16` (no
            quantization). The matmuls of nvfp4 multiply the bfloat16 values of the codes.
        scaling: for mxfp8, the rule that computes the scale, as for `mx_quantize`: `rceil`, `floor`, `ceil` or `even`.
        grad_dtype: for mxfp8, the element dtype of gradients: torch.float8_e4m3fn or torch.float8_e5m2. Activations and
            weights are always e4m3fn.
        wgrad_bf16: for mxfp8, whether the gradient of a weight is computed from bfloat16 operands.
        save_weight_codes: for all formats but bf16, whether the forward quantizes a weight in both directions and saves
            the codes for dgrad. If False, the forward saves the weight itself, as `nn.Linear` does, and dgrad quantizes
            it. A parameter is in memory anyway, so this saves one byte for each weight, or two for nvfp4. It costs
            memory traffic, because the weight is read twice. The results are the same bits.
        scale_format: for fp8_128, `fp32` or `pow2`, as for `fp8_quantize_1x128`: `pow2` makes each scale a power of
            two. Values that were quantized once in blocks along the features are then quantized along the tokens
            without another loss, except for elements that only one of the two scales makes subnormal.
        hadamard: for nvfp4, whether both operands of wgrad are transformed along the tokens by `hadamard_16` before
            they are quantized. The two transforms cancel in the sum over the tokens. None is True for nvfp4.
        stochastic_rounding: for nvfp4, whether the codes of gradients are rounded stochastically. Each backward draws
            from PyTorch's generator of the device, which `torch.manual_seed` sets. None is True for nvfp4.

    Raises:
        TypeError: grad_dtype is not one of the two dtypes, or wgrad_bf16, save_weight_codes, hadamard or
            stochastic_rounding is not a bool.
        ValueError: the format, the scaling or the scale_format is unknown, or an option is set for a format that does
            not have it.

    Example:
        >>> from dataclasses import replace
        >>> replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2)
        Recipe(format='mxfp8', scaling='rceil', grad_dtype=torch.float8_e5m2, wgrad_bf16=False, save_weight_codes=True)

    Source: OCP MX v1.0, section 6.3 (floor); NVIDIA, "Recipes for Pre-training LLMs with MXFP8", 2025 (rceil, e4m3 for
        gradients too); DeepSeek-V3 technical report, section 3.3 (fp8_128); NVIDIA, "Pretraining Large Language Models
        with NVFP4" (arXiv 2509.25149), section 4 (nvfp4).
    """

    format: str = "mxfp8"
    scaling: str = "rceil"
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    wgrad_bf16: bool = False
    save_weight_codes: bool = True
    scale_format: str = "fp32"
    hadamard: bool | None = None
    stochastic_rounding: bool | None = None

    def __post_init__(self) -> None:
        options = ("format", SIZE_MULTIPLES), ("scaling", SCALINGS), ("scale_format", FP8_SCALE_FORMATS)
        for what, known in options:
            if not isinstance(value := getattr(self, what), str) or value not in known:
                raise ValueError(f"Recipe: unknown {what} {value!r}; needs one of {', '.join(known)}")
        if self.grad_dtype not in FP8_DTYPES:
            raise TypeError(f"Recipe: grad_dtype = {self.grad_dtype}; needs {' or '.join(map(str, FP8_DTYPES))}")
        for what in ("wgrad_bf16", "save_weight_codes", "hadamard", "stochastic_rounding"):
            flag = getattr(self, what)
            if not isinstance(flag, bool) and not (flag is None and what in ("hadamard", "stochastic_rounding")):
                raise TypeError(f"Recipe: {what} = {flag!r}; needs True or False")
        for format, names in _OPTIONS.items():
            if self.format != format and any(getattr(self, name) != getattr(Recipe, name) for name in names):
                *first, last = names
                listed, them = (f"{', '.join(first)} or {last}", "them") if first else (last, "it")
                raise ValueError(f"Recipe: {self.format} has no {listed}. Leave {them} out, or use {format}.")
        if self.format == "bf16" and not self.save_weight_codes:
            raise ValueError("Recipe: bf16 has no save_weight_codes, because it quantizes no weight. Leave it out.")

    def __repr__(self) -> str:
        """The format and the options that it has."""
        shown = ["format", *_OPTIONS.get(self.format, ()), *(["save_weight_codes"] if self.format != "bf16" else [])]
        return f"Recipe({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


RECIPES = {
    "mxfp8_rceil": Recipe(),
    "mxfp8_floor": Recipe(scaling="floor"),
    "mxfp8_rceil_wgrad_bf16": Recipe(wgrad_bf16=True),
    "fp8_128": Recipe("fp8_128"),
    "fp8_128_pow2": Recipe("fp8_128", scale_format="pow2"),
    "nvfp4": Recipe("nvfp4"),
    "nvfp4_no_hadamard": Recipe("nvfp4", hadamard=False),
    "nvfp4_nearest": Recipe("nvfp4", stochastic_rounding=False),
    "nvfp4_nearest_no_hadamard": Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
    "bf16": Recipe("bf16"),
}


def name_of(recipe: Recipe) -> str:
    """The name of a recipe in `RECIPES`. A recipe without a name is shown with its options."""
    return next((name for name, named in RECIPES.items() if named == recipe), repr(recipe))


def recipe_of(recipe: Recipe | str, asked_by: str) -> Recipe:
    """The recipe itself, or the recipe with that name."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"{asked_by}: recipe is a {type(recipe).__name__}; needs a Recipe or one of {', '.join(RECIPES)}"
        )
    if recipe not in RECIPES:
        raise ValueError(f"{asked_by}: unknown recipe {recipe!r}; needs a Recipe or one of {', '.join(RECIPES)}")
    return RECIPES[recipe]
