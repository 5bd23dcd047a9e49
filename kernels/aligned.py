"""Buffers for steps: aligned to cache lines, touched in parallel, with rows that do not collide in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.contract import ALIGNMENT

if TYPE_CHECKING:
    from znnpy.kernels.contract import Bytes
    from znnpy.kernels.thread_pool import ThreadPool

PAGE = 4096  # bytes; equal to the system's page size or a divisor of it
TOUCHED = 2**28  # bytes, a multiple of PAGE; takes a quarter of a second on a slow virtual machine


def aligned_bytes(nbytes: int) -> Bytes:
    """Return (nbytes,) uint8 aligned to ALIGNMENT; its pages are touched when first written."""
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes]


def touch(block: Bytes, pool: ThreadPool, progress: Callable[[int], None] | None = None) -> None:
    """Write to every page of a block without changing its values, so that the system commits the memory.

    All threads share the work: committing is slow, most of all on a virtual machine, which has to ask its host for the
    memory. Ctrl-C is handled after each TOUCHED bytes.

    progress  called after each TOUCHED bytes with the number of bytes touched since the last call.
    """
    for start in range(0, block.size, TOUCHED):
        part = block[start : start + TOUCHED]
        pages = part[::PAGE]
        pool.each(partial(_write, pages), pages.size)
        if progress is not None:
            progress(part.size)


def _write(pages: Bytes, lo: int, hi: int, worker: int) -> None:
    del worker
    pages[lo:hi] |= 0


def odd_lines(count: int) -> int:
    """Round `count` complex64 up to an odd number of cache lines, so that rows spread over the sets of a cache."""
    return 8 * (-(-count // 8) | 1)
