"""Argument checks that several ops share. Each error is one sentence: the op, the argument as given, and the need."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mxspec.formats import FP8_BLOCK_SIZE, FP8_SIZE_MULTIPLE
from mxspec.reference.common.fp8_numerics import SCALE_FORMATS
from mxspec.reference.common.groups import padded_rows

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What checkpoints store as uint8.
_STORED = {
    torch.float4_e2m1fn_x2: "packed e2m1 codes",
    torch.float8_e8m0fnu: "E8M0 scales",
    torch.float8_e4m3fn: "e4m3 numbers",
}


def dense(op: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}; needs a tensor")
    if tensor.is_nested:
        raise ValueError(f"{op}: {name} is a nested tensor; needs a dense, strided tensor")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {tensor.layout}; needs a dense, strided tensor")


def tensor_dtype(op: str, name: str, tensor: Tensor, allowed: Collection[torch.dtype]) -> None:
    dense(op, name, tensor)
    if tensor.dtype not in allowed:
        needs = " or ".join(map(str, allowed))
        if tensor.dtype == torch.uint8:
            view = (f"; view bytes of {what} as {dtype}" for dtype, what in _STORED.items() if dtype in allowed)
            needs += next(view, "")
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}; needs {needs}")


def choice(op: str, name: str, value: Any, allowed: Collection[Any], error: type[Exception] = ValueError) -> None:
    if value not in allowed or type(value) is float:  # -1.0 == -1, so `in` alone would accept a float
        raise error(f"{op}: {name} = {value!r}; needs one of {', '.join(map(repr, allowed))}")


def boolean(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} = {value!r}; needs True or False")


def flag(op: str, name: str, value: bool) -> bool:
    """Check that `value` is a bool and return it. Without the check, an `if` would read the text "no" as true."""
    boolean(op, name, value)
    return value


def rank(op: str, name: str, tensor: Tensor, allowed: Collection[int]) -> None:
    if tensor.ndim not in allowed:
        needs = " or ".join(f"{n}-D" for n in allowed)
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; needs a {needs} tensor")


def multiple(
    op: str, name: str, size: int, number: int, of: str = ", the block size", quantized: bool = False
) -> None:  # fmt: skip
    """Check a size. If the operands are `quantized`, only their values can be padded, because codes have scales."""
    if size % number:
        padded = size + -size % number
        advice = f"pad with torch.nn.functional.pad to {padded}"
        if quantized:
            advice = f"pad the values to {padded} before they are quantized"
        raise ValueError(f"{op}: {name} = {size} is not a multiple of {number}{of}; {advice}")


def whole_blocks(op: str, along: str, stored: int, block: int, bits: int) -> None:
    """Check how many bytes of codes of so many bits qdata stores along a dimension."""
    unit = block * bits // 8
    if stored % unit:
        raise ValueError(
            f"{op}: qdata has {stored} bytes along {along}; needs a multiple of {unit}, "
            f"the bytes of a block of {block} elements"
        )


def fp8_size(op: str, name: str, size: int) -> None:
    """Check the size of a dimension along which FP8 blocks lie. The last block may be shorter."""
    multiple(op, name, size, FP8_SIZE_MULTIPLE, of="")


def shape(op: str, name: str, tensor: Tensor, needed: tuple[int, ...], because: str) -> None:
    if tuple(tensor.shape) != needed:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; needs {needed} {because}")


def same_device(op: str, first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
    if first[1].device != second[1].device:
        raise ValueError(
            f"{op}: {first[0]} is on {first[1].device} and {second[0]} on {second[1].device}; needs one device"
        )


def size(op: str, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} = {value!r}; needs an integer")
    if value < 0:
        raise ValueError(f"{op}: {name} = {value}; needs a size >= 0")


def eps(op: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: eps = {value!r}; needs a number")
    if not 1e-35 <= value <= 1e35:
        raise ValueError(f"{op}: eps = {value}; needs 1e-35 to 1e35, for 448 / eps and eps / 448 to be normal in fp32")


def offsets(op: str, name: str, tensor: Tensor, beside: tuple[str, Tensor]) -> None:
    """Check `offs` or `start`: one int32 per token group, on the same device as the tensor `beside`."""
    tensor_dtype(op, name, tensor, (torch.int32,))
    rank(op, name, tensor, (1,))
    same_device(op, beside, (name, tensor))


def offs_in_order(op: str, offs: Tensor, name: str, size: int, multiple: int = 1) -> None:
    """Check the values of `offs` for `check_offs=True`, which waits for the device. Fake tensors have no values."""
    if type(offs) is not Tensor or offs.is_meta:
        return
    before = 0
    for g, end in enumerate(offs.tolist()):
        if end < before:
            raise ValueError(f"{op}: offs[{g}] = {end} after {before}; needs ends that never decrease, from 0 on")
        if end % multiple:
            raise ValueError(f"{op}: offs[{g}] = {end}; needs multiples of {multiple}")
        before = end
    if before > size:
        raise ValueError(f"{op}: offs[-1] = {before} is past {name} = {size}")


def fits_int32(op: str, name: str, value: int) -> None:
    if value >= 2**31:
        raise ValueError(f"{op}: {name} = {value}; needs fewer than 2^31, because row numbers are int32")


def fp8_groups(op: str, beside: tuple[str, Tensor], offs: Tensor, scale_format: str, check_offs: bool) -> None:
    """The token groups of a named matrix, quantized in FP8 blocks of 128 tokens."""
    offsets(op, "offs", offs, beside)
    choice(op, "scale_format", scale_format, SCALE_FORMATS)
    M, G = beside[1].shape[0], offs.shape[0]
    fits_int32(op, f"the padded rows of {G} groups", padded_rows(M, G, FP8_BLOCK_SIZE))
    if flag(op, "check_offs", check_offs):
        offs_in_order(op, offs, "M", M)


def token_rows(op: str, name: str, tensor: Tensor) -> None:
    """Check a matrix whose rows the op moves as bytes."""
    dense(op, name, tensor)
    if tensor.dtype.itemsize not in (1, 2, 4) or tensor.is_complex() or tensor.is_quantized:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}; needs real numbers of 1, 2 or 4 bytes")
    rank(op, name, tensor, (2,))


def positive(op: str, name: str, value: int) -> None:
    size(op, name, value)
    if value < 1:
        raise ValueError(f"{op}: {name} = {value}; needs at least 1")


def rows_apart(op: str, name: str, tensor: Tensor) -> None:
    """Check a matrix, or a stack of matrices, that an op changes in place.

    A row lies without gaps. Rows and matrices do not overlap. The stride of a dimension of one element has no meaning.
    A kernel writes values, so the memory must not hold their negatives.
    """
    if tensor.is_neg():
        raise ValueError(f"{op}: {name} is a negated view; needs a tensor whose memory holds its own values")
    strides, rows, cols = f"{op}: {name} has strides {tensor.stride()}", tensor.shape[-2], tensor.shape[-1]
    if cols > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{strides}; needs row-major rows, that is stride({tensor.ndim - 1}) = 1")
    if rows > 1 and tensor.stride(-2) < cols:
        raise ValueError(f"{strides}; needs rows that do not overlap, stride({tensor.ndim - 2}) >= {cols}")
    extent = (rows - 1) * tensor.stride(-2) + cols if rows else 0  # of one matrix, with the gaps between its rows
    if tensor.ndim == 3 and tensor.shape[0] > 1 and tensor.stride(0) < extent:
        raise ValueError(f"{strides}; needs matrices that do not overlap, stride(0) >= {extent}")
