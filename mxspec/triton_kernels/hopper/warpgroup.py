"""The work of a math warpgroup apart from its matmuls: it promotes partial sums, takes turns, and writes the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from mxspec.triton_kernels.hopper.names import Value, aggregate, async_add, async_store


@gluon.jit
def promote(partial, of_row, of_column, acc, VECTOR: gl.constexpr):
    """acc + partial * scale, in inline assembly, so that the instructions stay in place.

    LLVM would move them behind the next wgmma. That wgmma needs the registers of the partial sum, so LLVM would spill.
    """
    of_row = gl.expand_dims(of_row, 1).broadcast_to(partial.shape[0], partial.shape[1])
    if VECTOR:
        of_column = gl.expand_dims(of_column, 0).broadcast_to(partial.shape[0], partial.shape[1])
        return gl.inline_asm_elementwise(
            "{ .reg .f32 s; mul.rn.f32 s, $2, $3; fma.rn.f32 $0, $1, s, $4; }",
            "=f,f,f,f,f", [partial, of_row, of_column, acc], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f", [partial, of_row, acc], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def my_turn(WARPGROUP: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the other warpgroup has issued its matmul, so that one adds while the matmul of the other runs."""
    if TURNS:
        gl.inline_asm_elementwise(
            "bar.sync 8, 256; mov.u32 $0, 0;" if WARPGROUP == 0 else "bar.sync 9, 256; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def your_turn(WARPGROUP: gl.constexpr, TURNS: gl.constexpr):
    """Tell the other warpgroup that it may issue its matmul."""
    if TURNS:
        gl.inline_asm_elementwise(
            "bar.arrive 9, 256; mov.u32 $0, 0;" if WARPGROUP == 0 else "bar.arrive 8, 256; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _halves(acc):
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def parts(acc, WIDTH: gl.constexpr):
    """A tile as one, two or four parts along N, each WIDTH columns wide."""
    if acc.shape[1] == WIDTH:
        return (acc,)
    elif acc.shape[1] == 2 * WIDTH:
        return _halves(acc)
    else:
        left, right = _halves(acc)
        return _halves(left) + _halves(right)


@aggregate
class Output:
    """The destination of 64 rows of a block of the output.

    The rows pass through shared memory and TMA, whole or in chunks along N, which are as wide as the box of `desc`.

    If the 64 rows do not all belong to the group, TMA must not write them. Then plain stores through `pointer` write
    the group's rows, and `stride` is the stride of a row. Each warpgroup has BUFFERS tiles. With ACCUMULATE, the block
    is added to the output.
    """

    desc: tma.tensor_descriptor
    pointer: gl.tensor
    stride: Value
    N: Value
    tiles: gl.shared_memory_descriptor
    BUFFERS: gl.constexpr
    ACCUMULATE: gl.constexpr

    @gluon.jit
    def chunks(self, acc):
        """How many chunks a tile has."""
        return acc.shape[1] // self.desc.block_shape[1]

    @gluon.jit
    def fill(self, acc, CHUNK: gl.constexpr, buffer):
        """Copy a chunk of 64 rows to shared memory, in the output's dtype. Returns the tile there."""
        WIDTH: gl.constexpr = self.desc.block_shape[1]
        part = parts(acc, WIDTH)[CHUNK]
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
        target = self.tiles.index(buffer + CHUNK % self.BUFFERS)
        target.store(gl.convert_layout(part, mma).to(self.desc.dtype))
        return target

    @gluon.jit
    def write(self, row, column, acc, buffer):
        """Write 64 rows of the output by TMA. All of them are within the output, or past its end.

        With ACCUMULATE, the L2 cache adds. To read the output first would take time in the loop, or registers, and
        no registers are left. The L2 cache flushes a sum that is a subnormal fp32 to 0.
        """
        WIDTH: gl.constexpr = self.desc.block_shape[1]
        for c in gl.static_range(acc.shape[1] // WIDTH):
            tma.store_wait(self.BUFFERS - 1)  # wait for the store that last read this buffer
            target = self.fill(acc, c, buffer)
            fence_async_shared()
            if self.ACCUMULATE:
                async_add(self.desc, [row, column + c * WIDTH], target)
            else:
                async_store(self.desc, [row, column + c * WIDTH], target)

    @gluon.jit
    def write_rows(self, above, row, end, column, acc, buffer):
        """`write` for 64 rows of a group. The group's first row is row `above` of the output.

        Rows from `end` on, and columns from N on, belong to another group.
        """
        if row + 64 <= end:
            self.write(above + row, column, acc, buffer)
        else:
            tma.store_wait(0)  # this call skips its buffer, so the next write may reuse a buffer one turn earlier
            if row < end:
                self.write_part(above, row, end, column, acc, buffer)

    @gluon.jit
    def write_part(self, above, row, end, column, acc, buffer):
        """`write_rows` by plain stores. No store by TMA may still read the buffer.

        A thread holds two neighbours of a row, and four threads hold eight. As fp32 these are 32 bytes, which memory
        takes at once. As two bytes each they are half as much. So such rows pass through shared memory, after which a
        thread stores eight elements.
        """
        if self.desc.dtype.primitive_bitwidth == 32:
            self.write_elements(above, row, end, column, acc)
        else:
            WIDTH: gl.constexpr = self.desc.block_shape[1]
            OF_ROW: gl.constexpr = min(WIDTH // 8, 32)
            by_row: gl.constexpr = gl.BlockedLayout([1, 8], [32 // OF_ROW, OF_ROW], [4, 1], [1, 0])
            for c in gl.static_range(acc.shape[1] // WIDTH):
                target = self.fill(acc, c, buffer)
                self.write_elements(above, row, end, column + c * WIDTH, target.load(by_row))

    @gluon.jit
    def write_elements(self, above, row, end, column, elements):
        """Write the elements that belong to the group and to the output, by plain stores."""
        r = row + gl.arange(0, 64, gl.SliceLayout(1, elements.type.layout))
        c = column + gl.arange(0, elements.shape[1], gl.SliceLayout(0, elements.type.layout))
        at = self.pointer + ((above + r).to(gl.int64) * self.stride)[:, None] + c[None, :]
        there = (r < end)[:, None] & (c < self.N)[None, :]
        if self.ACCUMULATE:
            elements += gl.load(at, mask=there, other=0.0)
        gl.store(at, elements.to(self.pointer.dtype.element_ty), mask=there)

    @gluon.jit
    def fill_turned(self, acc, CHUNK: gl.constexpr, buffer):
        """`fill` for the output's transpose. It first waits for the store that last read the buffer."""
        WIDTH: gl.constexpr = self.desc.block_shape[0]
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
        target = self.tiles.index(buffer)
        tma.store_wait(0)
        target.permute((1, 0)).store(gl.convert_layout(parts(acc, WIDTH)[CHUNK], mma).to(self.desc.dtype))
        return target

    @gluon.jit
    def write_turned(self, row, column, acc, buffer):
        """Write 64 rows of the output's transpose. Its columns are rows of the output."""
        WIDTH: gl.constexpr = self.desc.block_shape[0]
        for c in gl.static_range(acc.shape[1] // WIDTH):
            target = self.fill_turned(acc, c, buffer)
            fence_async_shared()
            async_store(self.desc, [column + c * WIDTH, row], target)

    @gluon.jit
    def write_turned_columns(self, row, column, end, acc, buffer):
        """`write_turned` for the columns before `end`. The columns from `end` on belong to another group.

        A chunk leaves by TMA if all its columns are before `end`. If not, a thread stores eight elements of a column
        at once.
        """
        WIDTH: gl.constexpr = self.desc.block_shape[0]
        by_column: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        for chunk in gl.static_range(acc.shape[1] // WIDTH):
            first = column + chunk * WIDTH
            if first < end:
                target = self.fill_turned(acc, chunk, buffer)
                if first + WIDTH <= end:
                    fence_async_shared()
                    async_store(self.desc, [first, row], target)
                else:
                    r = row + gl.arange(0, 64, gl.SliceLayout(0, by_column))
                    c = first + gl.arange(0, WIDTH, gl.SliceLayout(1, by_column))
                    at = self.pointer + (c.to(gl.int64) * self.stride)[:, None] + r[None, :]
                    gl.store(at, target.load(by_column), mask=(c < end)[:, None] & (r < self.N)[None, :])
