"""The block of the output that a program computes next, with its rows and its part of K.

GROUPED says which dimension `offs` divides into the experts' token groups:

| GROUPED | a | b | out |
|---|---|---|---|
| "" | one matrix | one matrix | one matrix |
| "M" | the rows of the experts, one group after the other | one matrix for each expert | as a |
| "N" | one matrix for each expert | the rows of the experts, one group after the other | a column for each row of b |
| "K" | the columns of the experts, one group after the other | as a | one matrix for each expert |
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from mxspec.triton_kernels.hopper.names import Value, aggregate, swizzle

# The ends of groups that a warp reads at once, before it needs them. If it read them one by one, or on demand, it would
# wait for memory before each tile.
AT_ONCE = gl.constexpr(8)


@aggregate
class Scheduler:
    """The blocks of an output. Persistent programs share them: program p computes p, p + num_programs, ...

    `offs` counts rows of a (GROUPED "M") or columns of K (GROUPED "K"). `K` and an expert's part of K count units of
    K_UNIT columns. For GROUPED "N", `offs` is a plan instead: four numbers for each column of blocks, namely the expert
    or -1, the first column, the end of the group's columns, and a number for the caller.

    With OVERLAP, the last row of blocks of one matrix ends where the matrix ends. It repeats some rows of the blocks
    above it, and writes the same bits to them. TMA takes longer for rows past the end of a matrix.
    """

    offs: Value
    offs_stride: Value
    num_experts: Value
    num_blocks: Value
    M: Value
    N: Value
    K: Value  # in units of K_UNIT
    m_blocks: Value
    n_blocks: Value
    BLOCK_M: gl.constexpr
    SWIZZLE: gl.constexpr
    GROUPED: gl.constexpr
    K_UNIT: gl.constexpr
    OVERLAP: gl.constexpr

    @gluon.jit
    def ends_after(self, expert):
        """The ends of the next AT_ONCE groups, which `get_next_group` will need."""
        ends = ()
        for ahead in gl.static_range(AT_ONCE):
            at = expert + 1 + ahead
            end = self.M
            if self.GROUPED == "M":
                end = gl.load(self.offs + at * self.offs_stride, mask=at < self.num_experts, other=self.M)
            ends = ends + (end,)
        return ends

    @gluon.jit
    def get_next_group(self, block, group, ends):
        """The group of rows that `block` belongs to, and its `ends_after`, found from those of an earlier block.

        A group is a tuple: the expert, the expert's first block, its first row, and the end of its rows. The rows of no
        expert are one more group, `num_experts`. After it comes the group `num_experts + 1`, which has no rows. No row
        is outside of a, whatever `offs` holds.
        """
        if self.GROUPED == "M":
            expert, first, begin, end = group
            while (expert <= self.num_experts) & (block >= first + gl.cdiv(end - begin, self.BLOCK_M) * self.n_blocks):
                for ahead in gl.static_range(AT_ONCE):
                    after = first + gl.cdiv(end - begin, self.BLOCK_M) * self.n_blocks
                    past = (expert <= self.num_experts) & (block >= after)
                    expert += past
                    first = gl.where(past, after, first)
                    begin = gl.where(past, end, begin)
                    end = gl.where(past, gl.minimum(gl.maximum(ends[ahead], end), self.M), end)
                ends = self.ends_after(expert)
            group = expert, first, begin, end
        return group, ends

    @gluon.jit
    def next_block(self, block, expert):
        """The program's block after `block`, which belongs to `expert`. Past the last row it is `num_blocks`.

        The host does not know how many blocks the groups have, so `num_blocks` is their largest possible number.
        """
        block += gl.num_programs(0)
        if self.GROUPED == "M":
            block = gl.where(expert > self.num_experts, self.num_blocks, block)
        return block

    @gluon.jit
    def k_range(self, expert):
        """The begin and the end of an expert's part of K, in units of K_UNIT.

        Both are within a and b, whatever `offs` holds.
        """
        begin = gl.load(self.offs + (expert - 1) * self.offs_stride, mask=expert > 0, other=0) // self.K_UNIT
        end = gl.load(self.offs + expert * self.offs_stride) // self.K_UNIT
        begin = gl.minimum(gl.maximum(begin, 0), self.K)
        return begin, gl.maximum(gl.minimum(end, self.K), begin)

    @gluon.jit
    def columns(self, n_block_idx, BLOCK_N: gl.constexpr):
        """The first column of a column of blocks, and the end of the columns that it may have."""
        if self.GROUPED == "N":
            at = self.offs + 4 * n_block_idx
            return gl.load(at + 1), gl.load(at + 2)
        else:
            return n_block_idx * BLOCK_N, self.N

    @gluon.jit
    def get_block(self, block, group):
        """A block's expert, row and column among blocks, first row, end of its group's rows, and part of K."""
        if self.GROUPED == "M":
            expert, first, begin, row_end = group
            rows = gl.maximum(gl.cdiv(row_end - begin, self.BLOCK_M), 1)
            m_block_idx, n_block_idx = swizzle(block - first, rows, self.n_blocks, self.SWIZZLE)
            row = begin + m_block_idx * self.BLOCK_M
            k_end = self.K * (expert < self.num_experts)
            return expert, m_block_idx, n_block_idx, row, row_end, 0, k_end
        elif self.GROUPED == "N":
            m_block_idx, n_block_idx = swizzle(block, self.m_blocks, self.n_blocks, self.SWIZZLE)
            expert = gl.load(self.offs + 4 * n_block_idx)
            row, k_end = m_block_idx * self.BLOCK_M, self.K * (expert >= 0)
            return expert, m_block_idx, n_block_idx, row, self.M, 0, k_end
        elif self.GROUPED == "K":
            of_expert = self.m_blocks * self.n_blocks
            expert = block // of_expert
            m_block_idx, n_block_idx = swizzle(block % of_expert, self.m_blocks, self.n_blocks, self.SWIZZLE)
            k_begin, k_end = self.k_range(expert)
            return expert, m_block_idx, n_block_idx, m_block_idx * self.BLOCK_M, self.M, k_begin, k_end
        else:
            if self.SWIZZLE:
                m_block_idx, n_block_idx = swizzle(block, self.m_blocks, self.n_blocks, self.SWIZZLE)
            else:
                m_block_idx, n_block_idx = 0, block
            row = m_block_idx * self.BLOCK_M
            if self.OVERLAP:
                row = gl.minimum(row, self.M - self.BLOCK_M)
            return 0, m_block_idx, n_block_idx, row, self.M, 0, self.K
