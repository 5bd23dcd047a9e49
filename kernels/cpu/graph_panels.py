"""Hold what the direct convolutions of graphs in compiled code have in common: kernels in panels."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.cpu.native.library import LANES, blocks
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array

MOST_TAPS = 2048  # over all inputs, as in strided.cpp and transpose.cpp
CALL_BYTES = 2**17  # Python memory and stack of calls into the library, per worker
CALL_FLOPS = 10e9  # per call into the library; the stop flag is checked between calls


class Panels(NamedTuple):
    """The kernels in the order they are read."""

    kernels: Array  # panel by panel (z, y, x, f, lane)
    bias: Array  # padded to whole panels


def panels_of(kernels: Array, bias: Array) -> Panels:
    """Return the panels of kernels (z, y, x, f, f')."""
    fout, count = len(bias), blocks(len(bias))
    inner = kernels.shape[:4]
    store = aligned_bytes(FLOAT32 * prod(inner) * count * LANES).view(np.float32)
    store[...] = 0
    padded = np.zeros(LANES * count, np.float32)
    padded[:fout] = bias
    for panel, block in enumerate(store.reshape(count, *inner, LANES)):
        maps = kernels[..., panel * LANES : (panel + 1) * LANES]
        block[..., : maps.shape[4]] = maps
    return Panels(store, padded)
