"""What a GPU can do at most, by its data sheet: the roof over every figure."""

from __future__ import annotations

from dataclasses import dataclass

# The shares of the data sheet that an H200 reaches, from benchmarks/results: memory, a bare cast of 131072 x 7168;
# bf16 and FP8 (DeepGEMM), matmuls of 8192^3 at its power limit. And what a kernel takes beside its bytes.
MEMORY_SHARE = 0.91
BF16_SHARE = 0.68
FP8_SHARE = 0.62
KERNEL_US = 2.0


@dataclass(frozen=True)
class Device:
    """Peaks of one GPU: memory in GB/s, dense matrix rates (no sparsity) in TFLOP/s."""

    memory_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    mx: bool = False  # whether its tensor cores take MX codes with their scales
    measured: bool = False  # whether the shares above were read on it; on the others they are a guess

    def is_matmul(self, flops: float, bytes_moved: float) -> bool:
        """Whether a call is bound by its matrix operations, in bf16 already, rather than by its bytes."""
        return flops / self.bf16_tflops > 1e3 * bytes_moved / self.memory_gbps


DEVICES = {
    "NVIDIA H100 80GB HBM3": Device(3350, 989, 1979),  # NVIDIA H100 data sheet, SXM column, halved for dense
    "NVIDIA H200": Device(4800, 989, 1979, measured=True),  # NVIDIA H200 data sheet, SXM column, halved for dense
    "NVIDIA B200": Device(8000, 2250, 4500, mx=True),  # NVIDIA DGX B200 data sheet, an eighth, halved for dense
}


def named(name: str) -> Device | None:
    """The peaks of the GPU that `torch.cuda.get_device_name()` names; None where they are not known here."""
    return DEVICES.get(name)


def balance(name: str) -> Device:
    """The same, or an H200's for a device that is not known here: what bounds a call seldom depends on which."""
    return DEVICES.get(name, DEVICES["NVIDIA H200"])
