"""The peak rates of GPUs, from their data sheets: the upper bound of every figure."""

from __future__ import annotations

from dataclasses import dataclass

# The shares of the data sheet that an H200 reaches, from benchmarks/results. Memory: the bare cast of a tensor
# of 131072 x 7168. bf16 and FP8 (DeepGEMM): matmuls of 8192^3 at the GPU's power limit. KERNEL_US is the time that a
# kernel takes besides moving its bytes.
MEMORY_SHARE = 0.91
BF16_SHARE = 0.68
FP8_SHARE = 0.62
KERNEL_US = 2.0


@dataclass(frozen=True)
class Device:
    """Peak rates of one GPU: memory in GB/s, dense matrix operations (no sparsity) in TFLOP/s."""

    memory_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    processors: int  # streaming multiprocessors
    bf16_flops_a_cycle: int  # of the tensor cores of one multiprocessor
    mx: bool = False  # whether its tensor cores take MX codes with their scales
    measured: bool = False  # whether the shares above were measured on it; for other GPUs they are a guess

    @property
    def issue_gips(self) -> float:
        """The instructions of single threads that the GPU can issue, in billions a second.

        A multiprocessor issues 4 a cycle, for 32 threads each. The data sheet's rate of bf16 gives the clock.
        """
        return 4 * 32 * self.bf16_tflops * 1e3 / self.bf16_flops_a_cycle

    def is_matmul(self, flops: float, bytes_moved: float) -> bool:
        """Whether the matrix operations of a call, in bf16, take longer than its bytes."""
        return flops / self.bf16_tflops > 1e3 * bytes_moved / self.memory_gbps


DEVICES = {
    "NVIDIA H100 80GB HBM3": Device(3350, 989, 1979, 132, 4096),  # H100 data sheet, SXM column, halved for dense
    "NVIDIA H200": Device(4800, 989, 1979, 132, 4096, measured=True),  # H200 data sheet, SXM column, halved for dense
    "NVIDIA B200": Device(8000, 2250, 4500, 148, 8192, mx=True),  # DGX B200 data sheet, 1 of 8 GPUs, halved for dense
}


def named(name: str) -> Device | None:
    """The peaks of the GPU that `torch.cuda.get_device_name()` names; None if the table does not have it."""
    return DEVICES.get(name)


def balance(name: str) -> Device:
    """The peaks of the named GPU, or of an H200 if it is unknown: what bounds a call seldom depends on the device."""
    return DEVICES.get(name, DEVICES["NVIDIA H200"])
