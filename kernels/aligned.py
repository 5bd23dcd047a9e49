"""Memory as steps ask for it: on the boundary of a cache line, and lines that do not meet in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.primitive import ALIGNMENT

if TYPE_CHECKING:
    from znnpy.kernels.crew import Crew
    from znnpy.kernels.primitive import Bytes

PAGE = 4096  # bytes, or a divisor of what a system takes for one
TOUCHED = 2**28  # bytes, a multiple of it: a quarter of a second on a slow virtual machine


def aligned_bytes(nbytes: int) -> Bytes:
    """(nbytes,) uint8 that starts at a multiple of ALIGNMENT; its pages are touched when first written."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


def touch(block: Bytes, hands: Crew, told: Callable[[int], None] | None = None) -> None:
    """Write to every page of a block, which keeps its values: the system gives memory when it is first written to.

    By all threads: that is slow, most of all on a virtual machine, which has to ask its host for the memory. Ctrl-C is
    answered after each TOUCHED bytes.

    told  called with the bytes that were written to since the last call, as often.
    """
    for start in range(0, block.size, TOUCHED):
        part = block[start : start + TOUCHED]
        pages = part[::PAGE]
        hands.each(partial(_write, pages), pages.size)
        if told is not None:
            told(part.size)


def _write(pages: Bytes, lo: int, hi: int, worker: int) -> None:
    del worker
    pages[lo:hi] |= 0


def odd_lines(count: int) -> int:
    """At least `count` complex64 that fill an odd number of cache lines: rows so far apart spread over a cache."""
    return 8 * (-(-count // 8) | 1)
