"""Layers that train in low precision: autograd functions and modules, built on the public ops only."""

from mxspec.nn.float8_blockwise import Float8BlockwiseLinear, cache_weights

__all__ = ["Float8BlockwiseLinear", "cache_weights"]
