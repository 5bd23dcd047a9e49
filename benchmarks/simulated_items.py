"""Work items that only take time, for workers of dask that are many in one process."""

from __future__ import annotations

import asyncio
import random
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack

import distributed

from znnpy.cluster.claims import ItemRecord
from znnpy.cluster.dask_workers import TaskResult
from znnpy.cluster.job import Job

SECONDS = 2.0  # that an item takes
FAIL = 0.02  # share of the items that fail, at their end
SLOW, SLOWER = 20, 2.0  # one worker in so many is slow, by this factor


def waited(job: Job, items: Sequence[int], attempt: str, only: int | None = None) -> TaskResult:
    """Wait for as long as items take, on a worker of dask; see `compute_task`."""
    del job, only
    address = str(distributed.get_worker().address)
    each = SECONDS * (SLOWER if zlib.crc32(address.encode()) % SLOW == 0 else 1.0)
    records: list[ItemRecord] = []
    for item in items:
        time.sleep(each)
        if random.random() < FAIL:
            return TaskResult(tuple(records), "it was made to fail", item=item)
        records.append(ItemRecord(item, attempt, address, 0, 1, each, 0))
    return TaskResult(tuple(records))


async def _serve(scheduler: str, count: int) -> None:
    """Run so many workers in this process until the scheduler is gone."""
    async with AsyncExitStack() as stack:
        workers = [distributed.Worker(scheduler, nthreads=1, memory_limit=0, dashboard=False) for _ in range(count)]
        await asyncio.gather(*(stack.enter_async_context(worker) for worker in workers))
        await asyncio.gather(*(worker.finished() for worker in workers))


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
