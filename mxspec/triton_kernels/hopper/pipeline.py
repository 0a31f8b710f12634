"""The stages of shared memory through which producer warps hand blocks of K to the math warpgroups."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mxspec.triton_kernels.hopper.names import aggregate


@aggregate
class Pipeline:
    """Two barriers a stage: `full`, its block has been written, and `empty`, its block has been read.

    `i` counts blocks of K since the program began, over all its tiles. Each warp counts for itself. Block i has stage
    `i % NUM_STAGES`, in the phase `i // NUM_STAGES % 2`.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NUM_STAGES: gl.constexpr

    @gluon.jit
    def stages(self, i):
        """The stages of the block before i, of block i, and of the block after it."""
        n: gl.constexpr = self.NUM_STAGES
        stage, before, after = i % n, (i + n - 1) % n, (i + 1) % n
        return before, stage, after

    @gluon.jit
    def wait_empty(self, i):
        """Wait until block i may be written; gives its stage."""
        stage = i % self.NUM_STAGES
        mbarrier.wait(self.empty.index(stage), i // self.NUM_STAGES & 1)
        return stage

    @gluon.jit
    def wait_full(self, i, stage):
        """Wait until block i may be read; `stage` is its stage, which the caller has computed already."""
        mbarrier.wait(self.full.index(stage), i // self.NUM_STAGES & 1)

    @gluon.jit
    def fill_one_more(self, i):
        """Say that the block after the last one is full: the math warpgroups look one block ahead."""
        stage = self.wait_empty(i)
        mbarrier.arrive(self.full.index(stage), count=1)


@gluon.jit
def make_pipeline(NUM_STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=PRODUCERS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for stage in gl.static_range(NUM_STAGES - 1):  # all but the last are free; that one is when block 0 runs
        mbarrier.arrive(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return Pipeline(full, empty, NUM_STAGES)
