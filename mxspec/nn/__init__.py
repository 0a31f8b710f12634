"""Layers that train in low precision: modules and autograd functions, built only on the public ops."""

from mxspec.nn._autograd import checkpoint_context
from mxspec.nn._cache import cache_weights
from mxspec.nn.conversion import Conversion, convert
from mxspec.nn.experts import GroupedExperts
from mxspec.nn.float8_blockwise import Float8BlockwiseLinear
from mxspec.nn.grouped_mm import fp8_grouped_mm, mx_grouped_mm, nvfp4_grouped_mm
from mxspec.nn.mx_linear import MXLinear
from mxspec.nn.nvfp4_linear import NVFP4Linear
from mxspec.nn.recipe import RECIPES, Recipe
from mxspec.nn.watching import WatchedOperand, WatchReport, watch
from mxspec.nn.weight_only import QuantizedWeights, quantize_weights

__all__ = [
    "RECIPES",
    "Conversion",
    "Float8BlockwiseLinear",
    "GroupedExperts",
    "MXLinear",
    "NVFP4Linear",
    "QuantizedWeights",
    "Recipe",
    "WatchReport",
    "WatchedOperand",
    "cache_weights",
    "checkpoint_context",
    "convert",
    "fp8_grouped_mm",
    "mx_grouped_mm",
    "nvfp4_grouped_mm",
    "quantize_weights",
    "watch",
]
