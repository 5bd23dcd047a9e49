"""What cuFFT computes, by numpy, over the memory of an emulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.gpu.libraries import Kind, work_bytes

if TYPE_CHECKING:
    from emulated import EmulatedDevice


class NumpyLibraries:
    """`Libraries` over numpy: see there."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def lines(self, kind: Kind, n: int, count: int) -> NumpyLines:
        return NumpyLines(self._device, kind, n, count)


class NumpyLines:
    def __init__(self, device: EmulatedDevice, kind: Kind, n: int, count: int) -> None:
        self._device, self._kind, self._n = device, kind, n
        self._shape = (count, n // 2 + 1 if kind == "real" else n)

    def forward(self, values: Any, work: Any) -> None:
        real, complex_ = self._views(values, work)
        if self._kind == "real":
            self._device.stream.queue(lambda: np.copyto(complex_, np.fft.rfft(real, axis=1)))
        else:
            self._device.stream.queue(lambda: np.copyto(complex_, np.fft.fft(complex_, axis=1)))

    def backward(self, values: Any, work: Any) -> None:
        real, complex_ = self._views(values, work)
        if self._kind == "real":
            self._device.stream.queue(lambda: np.copyto(real, np.fft.irfft(complex_, self._n, axis=1) * self._n))
        else:
            self._device.stream.queue(lambda: np.copyto(complex_, np.fft.ifft(complex_, axis=1) * self._n))

    def _views(self, values: Any, work: Any) -> tuple[Any, Any]:
        """Real and complex values; the work area is overwritten, as cuFFT might."""
        needed = work_bytes(self._kind, self._n, self._shape[0])
        assert work.nbytes >= needed, f"a work area of {work.nbytes} bytes, and {needed} were promised"
        self._device.stream.queue(lambda: work[:needed].fill(0x7F))
        assert values.shape == self._shape, f"{values.shape} values for a plan of {self._shape}"
        assert values.dtype == np.complex64
        assert values.flags.c_contiguous
        return values.view(np.float32)[:, : self._n], values
