"""Memory as steps ask for it: on the boundary of a cache line, and lines that do not meet in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.primitive import ALIGNMENT

if TYPE_CHECKING:
    from znnpy.kernels.crew import Crew
    from znnpy.kernels.primitive import Bytes

PAGE = 4096  # bytes, or a divisor of what a system takes for one


def aligned_bytes(nbytes: int) -> Bytes:
    """(nbytes,) uint8 that starts at a multiple of ALIGNMENT; its pages are touched when first written."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


def touch(block: Bytes, hands: Crew) -> None:
    """Write to every page of a block, which keeps its values: the system gives memory when it is first written to.

    By all threads: that is slow, most of all on a virtual machine, which has to ask its host for the memory.
    """
    pages = block[::PAGE]

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        pages[lo:hi] |= 0

    hands.each(piece, pages.size)


def odd_lines(count: int) -> int:
    """At least `count` complex64 that fill an odd number of cache lines: rows so far apart spread over a cache."""
    return 8 * (-(-count // 8) | 1)
