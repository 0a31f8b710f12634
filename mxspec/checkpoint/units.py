"""The weights of a checkpoint: which tensors belong to one weight, and the scheme they store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxspec.checkpoint.reading import Checkpoint, CheckpointError
from mxspec.checkpoint.schemes import SCHEMES, Blocks, strips, widened_scale

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
TENSOR_SCALE = {"weight_packed": ".weight_global_scale", "weight": ".weight_scale_2"}  # NVFP4's, by the name of codes
INPUT_SCALE = {"weight_packed": ".input_global_scale", "weight": ".input_scale"}  # of activations, which is optional
# Source: nvidia-modelopt 0.47.0, NVFP4_AWQ and NVFP4_SVD
CHANGES_OF_INPUTS = (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b")
GPTOSS_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True)
class Unit:
    """A weight of a checkpoint.

    Attributes:
        module: the name without the suffix; for gpt-oss's experts, the name of the fused parameter.
        codes: the name of the tensor of codes, or of the plain weight.
        scale: the name of the tensor of scales; None for a plain weight.
        scheme: a name in `SCHEMES`; None for a plain tensor.
        shape: `(N, K)`, or `(E, N, K)` for gpt-oss's experts, where K is the dimension of the blocks.
        packed: gpt-oss's storage: codes with 16 bytes for each block, or a plain weight that is stored transposed.
        tensor_scale: the name of the tensor scale of NVFP4; None for the other schemes.
        input_scale: the name of the tensor scale of NVFP4's activations; None if the checkpoint has none.
    """

    module: str
    codes: str
    scale: str | None
    scheme: str | None
    shape: tuple[int, ...]
    packed: bool = False
    tensor_scale: str | None = None
    input_scale: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.codes, self.scale, self.tensor_scale, self.input_scale) if name)

    @property
    def divides(self) -> bool:
        """Whether the tensor scale is a divisor, as in compressed-tensors."""
        return self.tensor_scale is not None and self.codes.endswith(".weight_packed")

    @property
    def matrices(self) -> int:
        """The number of (N, K) matrices: the experts of a fused weight."""
        return self.shape[0] if len(self.shape) == 3 else 1


def units(checkpoint: Checkpoint) -> list[Unit]:
    """All weights and other tensors, in the order of the checkpoint.

    Raises:
        CheckpointError: a tensor of codes has no scale, or its scale has an unknown grid.
    """
    found: list[Unit] = []
    used: set[str] = set()
    config = checkpoint.config.get("quantization_config") or {}
    for name, entry in checkpoint.tensors.items():
        unit = _quantized(checkpoint.tensors, name, entry, config)
        if unit:
            found.append(unit)
            used.update(unit.names)
    for name, entry in checkpoint.tensors.items():
        if name not in used:
            where = f"{name} in {entry.shard}"
            if entry.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise CheckpointError(f"{where}: FP8 codes without a scale that convert knows")
            if name.endswith((*SCALES[:2], *TENSOR_SCALE.values())):
                raise CheckpointError(f"{where}: scales without codes that convert knows")
            if name.endswith(".weight_packed"):
                raise CheckpointError(f"{where}: codes without a scale that convert knows; needs a .weight_scale")
            module = name.removesuffix(".weight")
            if name.endswith(GPTOSS_EXPERTS) and len(entry.shape) == 3:
                E, K, N = entry.shape
                found.append(Unit(name, name, None, None, (E, N, K), packed=True))
            else:
                found.append(Unit(module, name, None, None, tuple(entry.shape)))
    order = {name: i for i, name in enumerate(checkpoint.tensors)}
    return sorted(found, key=lambda unit: order[unit.codes])


def _quantized(tensors: Mapping[str, Any], name: str, entry: Any, config: Mapping[str, Any]) -> Unit | None:
    if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in tensors:
        module = name.removesuffix("_blocks")
        *lead, groups, size = entry.shape
        if size != 16 or tuple(tensors[f"{module}_scales"].shape) != (*lead, groups):
            raise CheckpointError(f"{name}: shape {tuple(entry.shape)} does not fit its scales")
        return Unit(module, name, f"{module}_scales", "mxfp4", (*lead, groups * 32), packed=True)
    module, dot, suffix = name.rpartition(".")
    if not dot or suffix not in ("weight", "weight_packed"):
        return None
    scale = next((module + end for end in SCALES if module + end in tensors), None)
    if scale is None:
        if entry.dtype in (torch.uint8, torch.int8) and module + TENSOR_SCALE[suffix] in tensors:
            raise CheckpointError(f"{name} in {entry.shard}: has no block scale; needs {module}.weight_scale")
        return None
    if len(entry.shape) != 2:
        if len(entry.shape) == 3 and entry.dtype == torch.uint8:
            raise CheckpointError(
                f"{name}: shape {tuple(entry.shape)} is a stack of experts; convert reads a tensor for each expert"
            )
        return None
    N, stored = entry.shape
    packed = entry.dtype in (torch.uint8, torch.int8)
    if not packed and entry.dtype != torch.float8_e4m3fn:
        return None
    grid, dtype = tuple(tensors[scale].shape), tensors[scale].dtype
    if packed and dtype == torch.float8_e4m3fn:
        return _nvfp4(tensors, name, scale, (N, SCHEMES["nvfp4"].element.held(stored)))
    known = ["fp8_128x128", "mxfp8", "mxfp8_32x32"]
    if packed:
        known = ["mxfp4", "mxfp6"] if suffix == "weight_packed" else ["mxfp4"]
    if config.get("weight_block_size") == [1, 32]:
        known.sort(key=lambda scheme: scheme != "mxfp8")
    for scheme in known:
        height, width = SCHEMES[scheme].block
        K = SCHEMES[scheme].element.held(stored)
        if SCHEMES[scheme].element.stored(K) != stored:
            continue
        bytes_ = dtype in (torch.uint8, torch.float8_e8m0fnu)
        if grid == (-(-N // height), -(-K // width)) and (bytes_ or scheme == "fp8_128x128"):
            return Unit(module, name, scale, scheme, (N, K))
    if packed and module + TENSOR_SCALE[suffix] in tensors:
        raise CheckpointError(f"{scale} in {entry.shard}: {dtype} {grid}; NVFP4 needs torch.float8_e4m3fn")
    raise CheckpointError(
        f"{name} in {entry.shard}: {entry.dtype} {tuple(entry.shape)} with {scale} {dtype} {grid} is no scheme that "
        f"convert knows; it knows {', '.join(known)}"
    )


def _nvfp4(tensors: Mapping[str, Any], name: str, scale: str, shape: tuple[int, int]) -> Unit:
    """An NVFP4 weight of compressed-tensors or of ModelOpt."""
    module, _, suffix = name.rpartition(".")
    (N, K), grid = shape, tuple(tensors[scale].shape)
    size = SCHEMES["nvfp4"].block[1]
    shard = tensors[name].shard
    if K % size:
        raise CheckpointError(f"{name} in {shard}: K = {K} is no multiple of {size}; NVFP4 has blocks of {size}")
    if grid != (N, K // size):
        raise CheckpointError(f"{name} in {shard}: {scale} is {grid}; NVFP4 of {shape} needs {(N, K // size)}")
    second, of_inputs = module + TENSOR_SCALE[suffix], module + INPUT_SCALE[suffix]
    if second not in tensors:
        raise CheckpointError(f"{name} in {shard} has no scale of the whole tensor; needs {second}")
    for change in CHANGES_OF_INPUTS:
        if module + change in tensors:
            raise CheckpointError(
                f"{name} in {shard} comes with {module + change}, which changes the layer's result; convert does not "
                "know it"
            )
    for one in (second, of_inputs):
        if one in tensors and (tensors[one].dtype != torch.float32 or tuple(tensors[one].shape) not in ((), (1,))):
            raise CheckpointError(
                f"{one} in {tensors[one].shard}: {tensors[one].dtype} {tuple(tensors[one].shape)}; needs one float32"
            )
    return Unit(module, name, scale, "nvfp4", shape, False, second, of_inputs if of_inputs in tensors else None)


def blocks(checkpoint: Checkpoint, unit: Unit, matrix: int = 0) -> Blocks:
    """The codes and scales of one matrix of a quantized unit."""
    assert unit.scheme is not None
    if unit.packed:
        codes, scale = (checkpoint.read_rows(str(name), matrix, matrix + 1)[0] for name in (unit.codes, unit.scale))
        codes = codes.flatten(1)
    else:
        codes, scale = (checkpoint.read(str(name)) for name in (unit.codes, unit.scale))
    if unit.tensor_scale is not None:
        return Blocks("nvfp4", codes.view(torch.uint8), scale, one_scale(checkpoint, unit.tensor_scale), unit.divides)
    codes = codes.view(SCHEMES[unit.scheme].stored)
    if unit.scheme != "fp8_128x128" or scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    return Blocks(unit.scheme, codes, scale)


def numbers(checkpoint: Checkpoint, unit: Unit, matrix: int = 0) -> Blocks:
    """The codes and scales of one matrix of a quantized unit.

    Raises:
        CheckpointError: a scale is NaN, or a block scale of NVFP4 is negative.
    """
    held = blocks(checkpoint, unit, matrix)
    _refuse(checkpoint, unit, matrix, widened_scale(held.scale).isnan(), "NaN", "numbers")
    if unit.scheme == "nvfp4":
        needs = "scales >= 0, because tensor cores read no sign of them"
        _refuse(checkpoint, unit, matrix, held.scale.float() < 0, "negative", needs)
    return held


def _refuse(checkpoint: Checkpoint, unit: Unit, matrix: int, wrong: Tensor, what: str, needs: str) -> None:
    """Raise if a scale is wrong."""
    if bool(wrong.any()):
        assert unit.scale is not None
        expert = f" of expert {matrix}" if unit.packed else ""
        raise CheckpointError(
            f"{unit.scale} in {checkpoint.tensors[unit.scale].shard}: {int(wrong.sum())} of {wrong.numel()} "
            f"scales{expert} are {what}, the first is {tuple(wrong.nonzero()[0].tolist())}; needs {needs}"
        )


def one_scale(checkpoint: Checkpoint, name: str) -> Tensor:
    """A scale of a whole tensor, `()`.

    Raises:
        CheckpointError: it is no positive finite number.
    """
    scale = checkpoint.read(name).reshape(())
    if not (scale.isfinite() and scale > 0):
        shard = checkpoint.tensors[name].shard
        raise CheckpointError(f"{name} in {shard} is {scale.item()}; needs a positive finite number")
    return scale


def plain_strips(checkpoint: Checkpoint, unit: Unit, matrix: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """The rows of one matrix of a plain unit, 128 at a time, with K as the last dimension."""
    if unit.packed:
        whole = checkpoint.read_rows(unit.codes, matrix, matrix + 1)[0].mT.contiguous()
    for rows in strips(unit.shape[-2]):
        yield rows, whole[rows] if unit.packed else checkpoint.read_rows(unit.codes, rows.start, rows.stop)
