"""The ring of shared-memory stages through which producer warps hand blocks of K to the math warpgroups."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mxspec.triton_kernels.hopper.names import aggregate


@aggregate
class Pipeline:
    """Two mbarriers guard each stage: `full` (its block has been written) and `empty` (its block has been read).

    `i` counts blocks of K since the program began, over all its tiles. Each warp counts for itself. Block i uses stage
    `i % NUM_STAGES`, in phase `i // NUM_STAGES % 2`.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NUM_STAGES: gl.constexpr

    @gluon.jit
    def after(self, stage):
        """The next stage. Whoever counts stages one by one needs no division, whose instructions delay a matmul."""
        return gl.where(stage == self.NUM_STAGES - 1, 0, stage + 1)

    @gluon.jit
    def wait_empty(self, i):
        """Wait until block i may be written. Returns its stage.

        The stages begin empty, but the last one counts as empty only while block 0 runs: each block frees the stage
        before its own, and block 0 frees the last. So the last stage is one phase ahead of the others.
        """
        stage = i % self.NUM_STAGES
        mbarrier.wait(self.empty.index(stage), (i + 1) // self.NUM_STAGES & 1 ^ 1)
        return stage

    @gluon.jit
    def wait_full(self, i, stage):
        """Wait until block i may be read. The caller passes the block's stage, which it has computed."""
        mbarrier.wait(self.full.index(stage), i // self.NUM_STAGES & 1)

    @gluon.jit
    def fill_one_more(self, i):
        """Mark the block after the last block as full, because the math warpgroups wait one block ahead."""
        stage = self.wait_empty(i)
        mbarrier.arrive(self.full.index(stage), count=1)


@gluon.jit
def make_pipeline(NUM_STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=PRODUCERS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return Pipeline(full, empty, NUM_STAGES)
