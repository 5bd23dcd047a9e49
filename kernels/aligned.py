"""Memory as steps ask for it: on the boundary of a cache line."""

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
