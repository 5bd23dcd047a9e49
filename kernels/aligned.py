"""Memory as steps ask for it: on the boundary of a cache line, and lines that do not meet in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.primitive import ALIGNMENT

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Bytes


def aligned_bytes(nbytes: int) -> Bytes:
    """(nbytes,) uint8 that starts at a multiple of ALIGNMENT; its pages are touched when first written."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


def odd_lines(count: int) -> int:
    """At least `count` complex64 that fill an odd number of cache lines: rows so far apart spread over a cache."""
    return 8 * (-(-count // 8) | 1)
