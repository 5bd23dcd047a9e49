"""NVIDIA's libraries behind one seam: batched transforms by cuFFT, convolutions by cuDNN.

A device offers them as `device.libraries`; tests offer the same over numpy (tests/emulator/libraries.py). CuPy and
cuDNN's frontend are imported when a library is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from znnpy.errors import DeviceError
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device

Kind = Literal["real", "complex"]


class Lines(Protocol):
    """A planned batch of one-dimensional transforms of neighbouring lines, in place, unnormalised.

    real      line of n float32 in n // 2 + 1 complex64: `forward` to as many frequencies, `backward` from them; n even
    complex   line of n complex64
    work      bytes that the library may use meanwhile, `work_bytes(..)` of them; on 256 bytes
    """

    def forward(self, values: Any, work: Any) -> None:
        """Transform `values`, (lines, n or n // 2 + 1) complex64 without gaps; queued on the device's stream."""

    def backward(self, values: Any, work: Any) -> None:
        """The same with the other sign."""


class Libraries(Protocol):
    """What a device has beside kernels of ours."""

    def lines(self, kind: Kind, n: int, count: int) -> Lines:
        """Transforms of `count` lines of `n` points. DeviceError if the library refuses."""


def work_bytes(kind: Kind, n: int, count: int) -> int:
    """What cuFFT may use beside `count` lines.

    cuFFT 12.0, 2026-11-21, one H200: nothing, for any complex n up to 2048 with factors 2, 3, 5, 7 alone, and for even
    real ones but multiples of 98 and 250: there, as many bytes as there are values times 4, and at most 1024 more.
    """
    return FLOAT32 * n * count + 1024 if kind == "real" else 0


class CudaLibraries:
    """cuFFT on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def lines(self, kind: Kind, n: int, count: int) -> Lines:
        return _CufftLines(self._device, kind, n, count)


class _CufftLines:
    """Plans of cuFFT; where one needs a work area, one for each address it is given."""

    def __init__(self, device: Device, kind: Kind, n: int, count: int) -> None:
        self._device, self._kind, self._n, self._count = device, kind, n, count
        self._plans: dict[tuple[bool, int], Any] = {}
        self._needs = {back: self._plan(back, None) for back in ((False, True) if kind == "real" else (False,))}

    def forward(self, values: Any, work: Any) -> None:
        self._run(values, work, back=False)

    def backward(self, values: Any, work: Any) -> None:
        self._run(values, work, back=True)

    def _run(self, values: Any, work: Any, *, back: bool) -> None:
        from cupy.cuda import cufft

        kind = back and self._kind == "real"  # a complex plan serves both directions
        address = self._device.address(work) if self._needs[kind] else 0
        if (kind, address) not in self._plans:
            self._plan(kind, work)
        with self._device.stream:
            self._plans[kind, address].fft(values, values, cufft.CUFFT_INVERSE if back else cufft.CUFFT_FORWARD)

    def _plan(self, back: bool, work: Any) -> int:
        """Plan with this work area; gives the bytes that cuFFT wants of it. Without one, keep it if it wants none."""
        from cupy import cuda
        from cupy.cuda import cufft

        n, count, half = self._n, self._count, self._n // 2 + 1
        before, after, kind = {
            ("complex", False): (n, n, cufft.CUFFT_C2C),
            ("real", False): (2 * half, half, cufft.CUFFT_R2C),
            ("real", True): (half, 2 * half, cufft.CUFFT_C2R),
        }[self._kind, back]
        address = self._device.address(work) if work is not None else 256  # any: it is not run
        asked = [0]

        def area(nbytes: int) -> Any:
            asked.append(nbytes)
            return cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, work, 0), 0)

        try:
            with cuda.using_allocator(area):
                plan = cufft.PlanNd((n,), (before,), 1, before, (after,), 1, after, kind, count, "C", 0, n)
        except cufft.CuFFTError as error:
            raise DeviceError(
                f"cuFFT refused to plan {count} transforms of {n} {self._kind} points: {error}"
            ) from error
        if sum(asked) > (work_bytes(self._kind, n, count) if work is None else work.nbytes):
            raise DeviceError(
                f"cuFFT wants {sum(asked)} bytes beside {count} lines of {n} points, more than was promised"
            )
        if not any(asked):
            self._plans[back, 0] = plan
        elif work is not None:
            self._plans[back, address] = plan
        return sum(asked)
