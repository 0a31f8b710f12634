"""Grouped matmuls that train in low precision: the tokens of each expert times the expert's own weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.nn._autograd import backend_now
from mxspec.nn._checks import (
    as_autocast,
    check_devices,
    check_features,
    check_input,
    check_parameters,
    check_tensors,
)
from mxspec.nn._formats import format_of, refusal_of_values
from mxspec.nn._product import grouped_product
from mxspec.nn.recipe import SIZE_MULTIPLES, Recipe, recipe_of

_NAMES = {"mxfp8": "mx_grouped_mm", "fp8_128": "fp8_grouped_mm", "nvfp4": "nvfp4_grouped_mm"}


def mx_grouped_mm(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe | str = "mxfp8_rceil") -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, with gradients, in MXFP8.

    `out[m] = x[m] @ w[g]^T`, with g the group of token m: `offs[g-1] <= m < offs[g]`. The output of a token in no group
    is 0. Each operand of the forward, dgrad and wgrad is quantized in blocks of 32 along the dimension that its matmul
    sums over. For this, the tokens of each group are padded. The host never waits for the device.

    Args:
        x: `(M, K)`, bfloat16 or float32. The tokens of each group lie together. Under autocast, x is cast first.
        w: `(E, N, K)`, bfloat16 or float32; N and K are multiples of 32.
        offs: `(E,)` int32 on x's device, the exclusive end of each group. An end may be any number, not only a
            multiple of 32. The ends never decrease, and the last end is at most M.
        recipe: an mxfp8 `Recipe` or its name, or `bf16`. `bf16` casts the operands to bfloat16 and runs PyTorch's
            grouped matmul. With `wgrad_bf16`, only the gradient of w is a bfloat16 matmul, rounded to bfloat16.

    Returns:
        `(M, N)` in x's dtype, contiguous. Rows from `offs[-1]` on are 0, and so are their gradients. The gradient of w
        is summed in fp32 and rounded once, to w's dtype. The gradient of an expert without tokens is 0.

    Special values: as for `mx_grouped_gemm`: a NaN stays within its group.

    Raises:
        TypeError: x, w or offs is not a tensor or has another dtype.
        ValueError: a rank, a shape, a device, N or K does not fit, or the recipe is fp8_128 (use `fp8_grouped_mm`) or
            nvfp4 (use `nvfp4_grouped_mm`).
        RuntimeError: a gradient is differentiated, as a gradient penalty does, or a checkpointed forward ran again on
            another backend.

    Example:
        >>> x, w = torch.ones(3, 32), torch.stack([torch.ones(32, 32), -torch.ones(32, 32)])
        >>> mx_grouped_mm(x, w, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
        [32.0, -32.0, 0.0]

    Source: PyTorch, `torch.nn.functional.grouped_mm`; torchao, `prototype/moe_training`.
    """
    return _grouped_mm("mxfp8", x, w, offs, recipe)


def fp8_grouped_mm(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe | str = "fp8_128") -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, with gradients, in FP8 with 128-blocks.

    It computes the matmul of `mx_grouped_mm` in another format. x and the gradient of the output are in 1x128 blocks
    along the dimension that the matmul sums over, and w is in 128x128 blocks. Tokens are padded only for the gradient
    of w, by the op that quantizes them. The host never waits for the device.

    Args:
        x, offs: as for `mx_grouped_mm`. An end may be any number, not only a multiple of 128.
        w: `(E, N, K)`, bfloat16 or float32; N and K are multiples of 16.
        recipe: `fp8_128` or its `Recipe`, or `bf16`, as for `mx_grouped_mm`.

    Returns:
        `(M, N)` in x's dtype, as `mx_grouped_mm` returns it.

    Special values: as for `fp8_grouped_gemm`: a NaN stays within its group.

    Raises:
        TypeError: x, w or offs is not a tensor or has another dtype.
        ValueError: a rank, a shape, a device, N or K does not fit, or the recipe is an mxfp8 recipe (use
            `mx_grouped_mm`) or nvfp4 (use `nvfp4_grouped_mm`).
        RuntimeError: as for `mx_grouped_mm`.

    Example:
        >>> x, w = torch.ones(3, 128), torch.stack([torch.ones(128, 128), -torch.ones(128, 128)])
        >>> fp8_grouped_mm(x, w, torch.tensor([1, 2], dtype=torch.int32))[:, 0].round().tolist()
        [128.0, -128.0, 0.0]

    Source: DeepSeek-V3 technical report, section 3.3; DeepGEMM's grouped matmuls.
    """
    return _grouped_mm("fp8_128", x, w, offs, recipe)


def nvfp4_grouped_mm(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe | str = "nvfp4") -> Tensor:
    """Multiply the tokens of each group by the weights of its expert, with gradients, in NVFP4.

    It computes the matmul of `mx_grouped_mm` in another format. x and the gradient of the output are in 1x16 blocks
    along the dimension that the matmul sums over. w is in 16x16 blocks, so the forward and dgrad multiply the same
    values. Each group has its own tensor scale in each direction, and each matrix of w has one. The matmuls multiply
    the bfloat16 values of the codes, which are exact, on every GPU. The host never waits for the device.

    With the recipe's `hadamard`, both operands of the gradient of w are transformed along the tokens before they are
    quantized. With `stochastic_rounding`, the backward rounds the gradient of the output stochastically. It draws a
    seed from PyTorch's generator of the device.

    Args:
        x, offs: as for `mx_grouped_mm`. An end may be any number, not only a multiple of 16.
        w: `(E, N, K)`, bfloat16 or float32; N and K are multiples of 16.
        recipe: an nvfp4 `Recipe` or its name, or `bf16`, as for `mx_grouped_mm`.

    Returns:
        `(M, N)` in x's dtype, as `mx_grouped_mm` returns it.

    Special values: a NaN or an Inf in a token makes all results of its group NaN, because it makes the group's tensor
        scale NaN. In a weight it makes all results of its expert NaN.

    Raises:
        TypeError: x, w or offs is not a tensor or has another dtype.
        ValueError: a rank, a shape, a device, N or K does not fit, or the recipe has another format.
        RuntimeError: as for `mx_grouped_mm`.

    Example:
        >>> x, w = torch.ones(3, 16), torch.stack([torch.ones(16, 16), -torch.ones(16, 16)])
        >>> nvfp4_grouped_mm(x, w, torch.tensor([1, 2], dtype=torch.int32))[:, 0].round(decimals=3).tolist()
        [16.0, -16.0, 0.0]

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4; TransformerEngine,
        `NVFP4BlockScaling`.
    """
    return _grouped_mm("nvfp4", x, w, offs, recipe)


def _grouped_mm(format: str, x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe | str) -> Tensor:
    name = _NAMES[format]
    found = recipe_of(recipe, name)
    check_tensors(name, x=x, w=w, offs=offs)
    x = as_autocast(name, x)
    if found.format not in (format, "bf16"):
        raise ValueError(
            f"{name}: the recipe's format is {found.format}; needs {format} or bf16. "
            f"Use {_NAMES[found.format]} for this recipe."
        )
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, w {tuple(w.shape)}; needs (M, K) and (E, N, K)")
    check_parameters(name, w.dtype)
    check_input(name, x, w.shape[2])
    check_features(name, SIZE_MULTIPLES[found.format], N=w.shape[1], K=w.shape[2])
    check_offs(name, offs, w.shape[0])
    check_devices(name, x, w=w, offs=offs)
    backend = backend_now(w)
    by_values = refusal_of_values(found, backend, w, x.dtype) is None
    by = format_of(found, backend, name, by_values=by_values)
    weight = None if by is None else by.weight(w.detach())
    tokens = None if by is None else by.activations(x, offs, w.requires_grad)
    return grouped_product(x, w, offs, tokens, weight, by, name)


def check_offs(name: str, offs: Tensor, experts: int) -> None:
    if offs.dtype != torch.int32:
        raise TypeError(f"{name}: offs has dtype {offs.dtype}; needs torch.int32")
    if not experts:
        raise ValueError(f"{name}: w has 0 experts; needs at least 1")
    if offs.shape != (experts,):
        raise ValueError(f"{name}: offs has shape {tuple(offs.shape)}; needs ({experts},) for {experts} experts")
