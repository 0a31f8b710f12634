"""Writing a shard: the works of its tensors, on threads or one after another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from mxspec.checkpoint.shards import ShardWriter
from mxspec.checkpoint.work import Work


def write_shard(path: Path, works: Sequence[Work]) -> dict[str, str]:
    """Write a shard, which has its name only when it is whole. Returns the SHA-256 of each tensor, by name."""
    return dict(fill_shard(path, works).finish())


def fill_shard(path: Path, works: Sequence[Work], pool: ThreadPoolExecutor | None = None) -> ShardWriter:
    """Write all tensors of a shard. Its `finish` waits for the disk, and gives the file its name.

    Args:
        path: the file.
        works: the weights; the tensors that they plan are all of the file's.
        pool: threads that run the works, the largest first, so that they end together. None runs them in order on this
            thread.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # an index may name a shard in a folder
    writer = ShardWriter(path, [planned for w in works for planned in w.planned])
    running = []
    try:
        if pool is None:
            for w in works:
                w.run(writer.write)
        else:
            ordered = sorted(works, key=lambda w: -sum(p.nbytes for p in w.planned))
            running = [pool.submit(w.run, writer.write) for w in ordered]
            for one in running:
                one.result()
    except BaseException:
        for one in running:
            one.cancel()
        wait(running)  # no thread may write to a file that is closed
        writer.abandon()
        raise
    return writer
