"""Checks of the arguments of layers and functions, and the cast of an input under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)


def as_autocast(name: str, x: Tensor) -> Tensor:
    """Under autocast, cast x as `nn.Linear` casts its input: every floating-point dtype except float64."""
    kind = x.device.type
    casts = x.dtype.is_floating_point and x.dtype != torch.float64
    if casts and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):  # the meta device has no autocast
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in DTYPES:
            raise TypeError(
                f"{name}: torch.autocast casts the input from {x.dtype} to {dtype}; needs an autocast to "
                f"torch.bfloat16: torch.autocast({kind!r}, dtype=torch.bfloat16)"
            )
        return x.to(dtype)
    return x


def check_tensors(name: str, **values: object) -> None:
    for what, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {what} is a {type(value).__name__}; needs a tensor")


def check_devices(name: str, x: Tensor, **others: Tensor | None) -> None:
    for what, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: {what} is on {tensor.device}, but the input is on {x.device}; needs one device")


def check_input(name: str, x: Tensor, features: int) -> None:
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"{name}: input is {'nested' if x.is_nested else x.layout}; needs a dense tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: input has dtype {x.dtype}; needs {_names(DTYPES)}")
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"{name}: input has shape {tuple(x.shape)}; needs (..., {features})")


def check_sizes(name: str, **sizes: object) -> None:
    for what, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name}: {what} = {size!r}; needs an int")


def check_features(name: str, multiple: int, **sizes: int) -> None:
    for what, size in sizes.items():
        if size % multiple or size <= 0:
            raise ValueError(
                f"{name}: {what} = {size} must be a {'positive ' if size <= 0 else ''}multiple of {multiple}. "
                "Use a PyTorch layer, or pad the model."
            )


def check_parameters(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{name}: parameters have dtype {dtype}; needs {_names(DTYPES)}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
