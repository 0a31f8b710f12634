"""What a GPU can do at most, by its data sheet: the roof over every figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peaks of one GPU: memory in GB/s, dense matrix rates (no sparsity) in TFLOP/s."""

    memory_gbps: float
    bf16_tflops: float
    fp8_tflops: float


DEVICES = {
    "NVIDIA H100 80GB HBM3": Device(3350, 989, 1979),  # NVIDIA H100 data sheet, SXM column, halved for dense
    "NVIDIA H200": Device(4800, 989, 1979),  # NVIDIA H200 data sheet, SXM column, halved for dense
    "NVIDIA B200": Device(8000, 2250, 4500),  # NVIDIA DGX B200 data sheet, an eighth, halved for dense
}


def device(name: str) -> Device | None:
    """The peaks of the GPU that `torch.cuda.get_device_name()` names; None where they are not known here."""
    return DEVICES.get(name)
