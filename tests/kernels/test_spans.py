"""Quantizers whose programs own several neighbouring tiles, on small matrices.

A GPU gives a program several tiles only if the matrix is large. So the cases of the ops, which are small, do not reach
the later tiles of a program there.
"""

import importlib

import pytest
import torch

from mxspec import check, dispatch

DEVICE = check.default_device()
MODULES = (
    "mx_quantize", "mx_quantize_groups", "nvfp4_quantize", "nvfp4_quantize_groups", "tiles.nvfp4_columns",
    "tiles.nvfp4_columns_of_groups",
)  # fmt: skip
SEED = torch.tensor([5, 2**32 + 7])
if DEVICE.type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters():
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)


def numbers(dtype: torch.dtype, axis: int) -> torch.Tensor:
    """A NaN, zeros of both signs, and a range of magnitudes. The tiles are no whole number of programs of three."""
    M, K = (176, 1568) if axis == -1 else (272, 288)
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1))
    x *= 2.0 ** torch.arange(M).remainder(9)[:, None]
    x[::7, ::5], x[1::7, ::5], x[11, 200] = 0.0, -0.0, float("nan")
    return x.to(dtype)


def calls(op: str, x: torch.Tensor, axis: int, scale_layout: str):
    """The arguments of each call. NVFP4 is called with an amax of few bits, with one of many bits, and without one."""
    options = {"axis": axis, "scale_layout": scale_layout}
    amax, offs = torch.tensor([1024.0, 1023.7]), torch.tensor([130, 130, len(x) - 22], dtype=torch.int32)
    if op == "mx_quantize":
        yield (x[: len(x) // 32 * 32],), {**options, "elem_dtype": torch.float4_e2m1fn_x2}
    elif op == "mx_quantize_groups":
        yield (x, offs), {**options, "elem_dtype": torch.float4_e2m1fn_x2}
        yield (x.nan_to_num(), offs), options  # FP8 codes of a NaN have either sign
    elif op == "nvfp4_quantize_groups":
        for one in amax:
            yield (x, offs, one.expand(3).contiguous()), options
    elif op == "nvfp4_quantize_stochastic":
        yield (x, SEED, amax[0]), options
        yield (x, (x.float().abs() * 77).nan_to_num().to(torch.uint8), amax[0]), options
    else:
        for one in (*amax, None):
            yield (x, one), options


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int32)


@pytest.mark.turns(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale_layout", ["plain", "blocked"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "op",
    ["mx_quantize", "mx_quantize_groups", "nvfp4_quantize", "nvfp4_quantize_groups", "nvfp4_quantize_stochastic"],
)
def test_programs_of_three_tiles(monkeypatch, op, axis, scale_layout, dtype):
    for module in MODULES:
        monkeypatch.setattr(importlib.import_module(f"mxspec.triton_kernels.{module}"), "span", lambda *_: 3)
    kernel = getattr(importlib.import_module(f"mxspec.triton_kernels.{op}"), op)
    for args, options in calls(op, numbers(dtype, axis), axis, scale_layout):
        on_device = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
        found, expected = kernel(*on_device, **options), dispatch.reference(op)(*args, **options)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(bits(a).cpu(), bits(b))
