"""Conversion from any layout to any other, through plain scales."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mxspec.layouts._table import E8M0, FP32, LAYOUTS, Shape, layout_named
from mxspec.reference.common import checks


def _converted(plain: Tensor, dtype: torch.dtype, to: str) -> Tensor:
    """The same scales in another dtype, exactly. uint8 holds the bytes of E8M0."""
    if {plain.dtype, dtype} <= set(E8M0):
        return plain.view(dtype)
    if plain.dtype == torch.uint8:
        plain = plain.view(torch.float8_e8m0fnu)
    if plain.dtype == dtype:
        return plain
    if dtype in FP32:
        return plain.to(dtype)
    scales = plain.to(torch.float8_e8m0fnu)  # rounds numbers that E8M0 does not have: those are found below
    wrong = (scales.float() != plain) & ~plain.isnan()
    if not wrong.is_meta and wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"layouts.convert: scale{at} = {plain[tuple(at)].item()} is no power of two from 2^-127 to 2^127; "
            f"{to} of {dtype} needs such scales, or NaN"
        )
    return scales.view(dtype)


def _shape_of(op: str, shape: Sequence[int], layouts: Sequence[str]) -> Shape:
    """Check that all these layouts can hold scales of this shape, and return the shape as a tuple."""
    only_matrices = any(LAYOUTS[name].groups for name in layouts)
    needs = "(R, C)" if only_matrices else "(R, C) or (E, R, C)"
    if not isinstance(shape, Sequence):
        raise TypeError(f"{op}: shape = {shape!r}; needs {needs}")
    for n in shape:
        checks.size(op, "shape", n)
    if len(shape) not in ((2,) if only_matrices else (2, 3)):
        raise ValueError(f"{op}: the scales in {' and '.join(layouts)} have shape {tuple(shape)}; needs {needs}")
    return tuple(shape)


def _check_offs(op: str, offs: Tensor | None, shape: Shape, scale: Tensor, layouts: Sequence[str]) -> None:
    """Check that offs is given exactly if a layout has groups, and that it is in order."""
    names, groups = " and ".join(layouts), [along for name in layouts for along in LAYOUTS[name].groups]
    if offs is None:
        if groups:
            raise ValueError(f"{op}: offs = None; needs the end of each group for {names}")
        return
    if not groups:
        raise ValueError(f"{op}: offs is given, but there are no groups in {names}; needs offs = None")
    checks.offsets(op, "offs", offs, ("scale", scale))
    for along in groups:
        checks.offs_in_order(op, offs, along, shape["RC".index(along)])


def _check_stored(stored: Tensor, name: str, shape: Shape, offs: Tensor | None) -> None:
    """Check that a tensor has the dtype, shape and strides of the layout, which `write` of a meta tensor shows."""
    held = stored.dtype if stored.dtype in LAYOUTS[name].dtypes else LAYOUTS[name].dtypes[0]
    on_meta = None if offs is None else offs.to("meta")
    needed = LAYOUTS[name].write(torch.empty(shape, dtype=held, device="meta"), on_meta)
    what = f"layouts.convert: scale, {name} of {shape},"
    if stored.dtype != needed.dtype:
        taken = LAYOUTS[name].dtypes if needed.dtype == held else (needed.dtype,)  # packed words have their own dtype
        raise TypeError(f"{what} has dtype {stored.dtype}; needs {' or '.join(map(str, taken))}")
    if stored.shape != needed.shape:
        raise ValueError(f"{what} has shape {tuple(stored.shape)}; needs {tuple(needed.shape)}")
    strides = zip(stored.shape, stored.stride(), needed.stride(), strict=True)
    if stored.numel() and any(got != need for n, got, need in strides if n > 1):
        raise ValueError(f"{what} has strides {stored.stride()}; needs {needed.stride()}")


def convert(
    scale: Tensor,
    from_: str = "plain",
    to: str = "blocked",
    *,
    shape: Sequence[int] | None = None,
    offs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the same scales in another layout.

    The function `read` of the layout `from_` gives the plain scales, and the function `write` of the layout `to` writes
    them. Converting back gives the original scale, except what a layout loses (see `explain`). If the layout `to` holds
    only E8M0, float32 becomes E8M0. If it holds only float32, E8M0 becomes float32. The values never change: a value
    that the other dtype does not have raises an error. The conversion calls mxspec's ops, so it runs on the current
    backend.

    Args:
        scale: scales in the layout `from_`; float32, float8_e8m0fnu, or uint8 (the bytes of E8M0); int32 for
            `deepgemm_packed`.
        from_, to: names in `LAYOUTS`; `print(mxspec.layouts.explain())` describes them.
        shape: the shape of the scales without padding, `(R, C)` or `(E, R, C)`. Needed if the layout `from_` does not
            keep it.
        offs: `(G,)` int32, the exclusive end of each group, read on the host. Only for layouts with groups.
        dtype: the dtype of the scales in `to`. By default the dtype of scale if that layout has it, or else the first
            dtype of the layout.

    Returns:
        A tensor in the layout `to`. Every byte of it is defined: padding is 0.

    Special values: an E8M0 NaN becomes an fp32 NaN. An fp32 NaN becomes the byte 255, so its payload is lost. 2^-127 is
        subnormal in fp32, and DeepGEMM's own packing refuses it. Layouts with groups drop the scales after the last
        group and read them back as bytes 0.

    Raises:
        TypeError: the layout does not have this dtype.
        ValueError: a layout's name is unknown; scale does not have the rank, shape or strides of `from_`; shape or offs
            is missing, or is given but not used; or a float32 scale for a layout of E8M0 is not a power of two.

    Example:
        >>> scale = torch.tensor([[1.0, 2.0], [4.0, 0.5], [8.0, 1.0]])
        >>> packed = convert(scale, to="deepgemm_packed")
        >>> [hex(word) for word in packed[:, 0].tolist()], packed.shape, packed.stride()
        (['0x807f', '0x7e81', '0x7f82'], torch.Size([3, 1]), (1, 4))
        >>> convert(packed, "deepgemm_packed", "plain", shape=(3, 2), dtype=torch.float32).equal(scale)
        True

    Source: the source of each layout, in `explain()`.
    """
    op = "layouts.convert"
    source, target = layout_named(op, "from_", from_), layout_named(op, "to", to)
    checks.dense(op, "scale", scale)
    if shape is None:
        if not source.holds_shape:
            raise ValueError(
                f"{op}: {from_} has shape {tuple(scale.shape)}, with padding; needs shape=, the shape without padding"
            )
        shape = tuple(scale.shape)
    shape = _shape_of(op, shape, (from_, to))
    _check_offs(op, offs, shape, scale, (from_, to))
    _check_stored(scale, from_, shape, offs if source.groups else None)
    if dtype is None:
        held = scale.dtype if scale.dtype in source.dtypes else source.dtypes[0]
        dtype = held if held in target.dtypes else target.dtypes[0]
    elif dtype not in target.dtypes:
        raise TypeError(f"{op}: dtype = {dtype!r}; {to} needs one of {', '.join(map(str, target.dtypes))}")

    plain = source.read(scale, shape, offs).contiguous()
    return target.write(_converted(plain, dtype, to), offs)


def _memory(stored: Tensor) -> Tensor:
    """All places of a tensor that `write` gave, padding included, in the order of memory."""
    places = max((n * s for n, s in zip(stored.shape, stored.stride(), strict=True)), default=0)
    return stored.as_strided((places if stored.numel() else 0,), (1,))


def _width(layout: str, stored: Tensor) -> int:
    """The number of places in a line of memory."""
    scales_each = stored.element_size() // LAYOUTS[layout].dtypes[0].itemsize
    return LAYOUTS[layout].line or max(max(stored.stride()[-2:]) * scales_each, 1)


def sent(
    op: str, layout: str, shape: Sequence[int], offs: Tensor | None, device: torch.device | str | None
) -> tuple[Tensor, int]:
    """The result of `scale_at`, and the number of places in a line."""
    layout_named(op, "layout", layout)
    shape = _shape_of(op, shape, [layout])
    try:
        device = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # a torch without CUDA raises AssertionError
        raise ValueError(f"{op}: device = {device!r}; needs a device that torch has here") from error
    if device.type == "meta":
        raise ValueError(f"{op}: device = meta; needs a device whose tensors have bytes")
    numbers = torch.arange(1, 1 + prod(shape), dtype=torch.int32, device=device).reshape(shape)
    _check_offs(op, offs, shape, numbers, [layout])
    held, width = _held(layout, numbers, offs)
    return held.cpu() - 1, width


def _held(layout: str, numbers: Tensor, offs: Tensor | None) -> tuple[Tensor, int]:
    """The number at each place of memory after numbers went through `convert`, and the number of places in a line."""
    if LAYOUTS[layout].dtypes[0] in FP32:
        stored = convert(numbers.view(torch.float32), to=layout, offs=offs)
        return _memory(stored).view(torch.int32).long(), _width(layout, stored)
    held, width = torch.zeros(1, dtype=torch.int64, device=numbers.device), 1
    # A place holds one byte, so send the numbers byte by byte.
    for i, part in enumerate(numbers.unsqueeze(-1).view(torch.uint8).unbind(-1)):
        stored = convert(part.clone(memory_format=torch.contiguous_format), to=layout, offs=offs)
        held, width = held + (_memory(stored).view(torch.uint8).long() << 8 * i), _width(layout, stored)
    return held, width


def scale_at(
    layout: str, shape: Sequence[int], *, offs: Tensor | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Return which scale lies at each place of memory.

    The function sends the numbers 1, 2, 3, ... through `convert` as scales of this shape, so the result shows the real
    conversion.

    Args:
        layout: a name in `LAYOUTS`.
        shape: the shape of the scales, `(R, C)` or `(E, R, C)`.
        offs: `(G,)` int32, the exclusive end of each group; only for layouts with groups.
        device: the device on which `convert` runs.

    Returns:
        `(places,)` int64 on the CPU. A place is one byte for E8M0 and 4 bytes for fp32. Each entry is the number of the
        scale in row-major order, `C * r + c`, or -1 for padding.

    Example:
        >>> scale_at("deepgemm_packed", (3, 5)).view(2, 16).tolist()
        [[0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, -1, -1, -1, -1],
         [4, -1, -1, -1, 9, -1, -1, -1, 14, -1, -1, -1, -1, -1, -1, -1]]
    """
    return sent("layouts.scale_at", layout, shape, offs, device)[0]
