"""The stages of Hopper's matmuls are handed round without a deadlock, and none is overwritten before it has been read.

`Pipeline` is the kernels' own. The barriers are modelled, and so is the order in which the warps of `fp8/gemm.py` wait
and arrive.
"""

from types import SimpleNamespace

import pytest

from mxspec.machine_code.fake_gpu import unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from mxspec.triton_kernels.hopper import pipeline as module

METHODS = {name: getattr(module.Pipeline, name).fn for name in ("after", "wait_empty", "wait_full")}


class Waits(Exception):
    """A warp would wait here."""


class Barrier:
    """An mbarrier of PTX: `count` arrivals complete a phase. Its phases are numbered from 0."""

    def __init__(self):
        self.count = self.arrived = self.phase = 0

    def arrive(self, count):
        self.arrived += count
        assert self.arrived <= self.count, "more arrivals than a phase has"
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1


class Barriers(list):
    index = list.__getitem__


def wait(barrier, parity):
    if barrier.phase % 2 == parity:  # the phase of this parity has not completed
        raise Waits


def make(stages, consumers, monkeypatch):
    made = [Barriers(Barrier() for _ in range(stages)) for _ in range(2)]
    gl = SimpleNamespace(
        constexpr=int, int64=None, static_range=range, where=lambda c, a, b: a if c else b,
        allocate_shared_memory=lambda *_: made.pop(0),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        init=lambda barrier, count: setattr(barrier, "count", count), wait=wait, MBarrierLayout=lambda: None,
        arrive=lambda barrier, count: barrier.arrive(count),
    )  # fmt: skip
    monkeypatch.setattr(module, "gl", gl)
    monkeypatch.setattr(module, "mbarrier", mbarrier)
    monkeypatch.setattr(module, "fence_async_shared", lambda: None)

    class Model:
        def __init__(self, full, empty, NUM_STAGES):
            self.full, self.empty, self.NUM_STAGES = full, empty, NUM_STAGES

    for name, method in METHODS.items():
        setattr(Model, name, method)
    monkeypatch.setattr(module, "Pipeline", Model)
    return module.make_pipeline.fn(stages, 1, consumers)


def producer(ring, blocks, held):
    for i in range(blocks + 1):  # the block after the last is marked as full, too
        while True:
            try:
                stage = ring.wait_empty(i)
                break
            except Waits:
                yield False
        assert held[stage] is None, f"block {i} overwrites block {held[stage]}"
        held[stage] = i
        ring.full[stage].arrive(1)
        yield True


def consumer(ring, blocks, held, readers, me):
    stage, before = 0, ring.NUM_STAGES - 1
    for i in range(blocks):
        while True:
            try:
                ring.wait_full(i, stage)
                break
            except Waits:
                yield False
        assert held[stage] == i
        # Block i is being read. Block i - 1 has been read.
        readers[before].discard(me)
        if i and not readers[before]:
            held[before] = None
        ring.empty[before].arrive(1)
        readers[stage].add(me)
        yield True
        stage, before = ring.after(stage), stage


def consumer_of_pairs(ring, blocks, held, readers, me):
    """As `_multiply_few`: two blocks are read at the same time."""

    def full(i, stage):
        while True:
            try:
                ring.wait_full(i, stage)
                return
            except Waits:
                yield False

    def release(stage, was_read):
        if was_read:
            held[stage] = None
        ring.empty[stage].arrive(1)

    i, stage, before = 0, 0, ring.NUM_STAGES - 1
    yield from full(0, 0)
    while i + 1 < blocks:
        release(before, i > 0)
        after = ring.after(stage)
        yield from full(i + 1, after)
        assert (held[stage], held[after]) == (i, i + 1)
        release(stage, True)
        yield True
        before, stage = after, ring.after(after)
        yield from full(i + 2, stage)
        assert held[before] == i + 1
        i += 2
    if i < blocks:
        release(before, i > 0)
        assert held[stage] == i
        yield from full(i + 1, ring.after(stage))


@pytest.mark.parametrize("consumers", [1, 2, "pairs"])
@pytest.mark.parametrize("stages", [2, 3, 4, 6, 16])
def test_every_block_is_read_before_it_is_overwritten(stages, consumers, monkeypatch):
    for blocks in (1, 2, stages - 1, stages, stages + 1, 5 * stages + 2):
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            read, count = (consumer_of_pairs, 1) if consumers == "pairs" else (consumer, consumers)
            ring = make(stages, count, monkeypatch)
            held = [None] * stages
            readers = [set(range(count)) for _ in range(stages)]
            warps = [producer(ring, blocks, held), *(read(ring, blocks, held, readers, me) for me in range(count))]
            warps = [warps[k] for k in order if k < len(warps)]
            while warps:
                moved = False
                for warp in list(warps):
                    try:
                        moved |= next(warp)
                    except StopIteration:
                        warps.remove(warp)
                        moved = True
                assert moved, f"{blocks} blocks: every warp waits"
