"""Stream kernel spectra that do not fit the GPU from pinned host memory through two device buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from znnpy.kernels.gpu.fft_tiled.spectra import KernelSpectra, slab_frequencies


class KernelStream:
    """Slabs of frequencies in transit: one is copied to the device while the previous one is used.

    A buffer is refilled when the products with its previous content are done; the first copy waits for the work queued
    so far, because the buffers' memory may belong to another step until then.
    """

    def __init__(self, resident: KernelSpectra, device: Any) -> None:
        self._device = device
        words, self._count, *maps = resident.packed.shape
        self._host = resident.packed.reshape(words, self._count, maps[0] * maps[1])
        self._slab = slab_frequencies(self._count)
        self._begun = device.event()
        self._there, self._free = ([device.event() for _ in range(2)] for _ in range(2))

    def slabs(self, buffers: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield first and end frequency and (word, slab, row) float16 on the device, filled up to the end frequency.

        A slab is valid for the work that the caller queues on `device.stream` before requesting the next one.
        """
        device, (words, _, row) = self._device, self._host.shape
        device.stream.record(self._begun)
        device.uploads.wait_event(self._begun)
        for number, lo in enumerate(range(0, self._count, self._slab)):
            hi, half = min(lo + self._slab, self._count), number % 2
            whole = words * self._slab * row * 2
            slab = device.view(buffers, (words, self._slab, row), np.float16, offset=half * whole)
            if number > 1:
                device.uploads.wait_event(self._free[half])
            device.copy_async(slab[:, : hi - lo], self._host[:, lo:hi], device.uploads)
            device.uploads.record(self._there[half])
            device.stream.wait_event(self._there[half])
            yield lo, hi, slab
            device.stream.record(self._free[half])
