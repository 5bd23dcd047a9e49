"""Stand-ins for cuFFT and cuDNN compute by numpy in the memory of an emulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from znnpy.kernels import reference
from znnpy.kernels.gpu.libraries import Convolution, Kind, RefusedError, work_bytes


class HasStream(Protocol):
    """An emulated device."""

    @property
    def stream(self) -> Any: ...


@dataclass(frozen=True)
class Offer:
    """A plan that the emulated cuDNN has."""

    name: str = "plain"
    workspace_bytes: int = 0
    finishes: bool = True  # it does bias and activation too
    fault: float = 0.0  # relative error of its results, of those that
    faulty: Callable[[Convolution], bool] = lambda problem: True
    clamps: bool = False  # results are finite: the least one where they would be -infinity
    refuses: Callable[[Convolution], bool] = lambda problem: False  # to run
    takes: Callable[[Convolution], bool] = lambda problem: True


class NumpyLibraries:
    """`Libraries` over numpy: see there."""

    def __init__(self, device: HasStream) -> None:
        self._device = device
        self.offers = [Offer()]
        self.asked: list[Convolution] = []

    def convolutions(self, problem: Convolution) -> Iterator[NumpyConvolution]:
        self.asked.append(problem)
        for offer in self.offers:
            if (offer.finishes or problem.finish is None) and offer.takes(problem):
                yield NumpyConvolution(self._device, problem, offer)

    def same(self, problem: Convolution, plan: Any) -> NumpyConvolution | None:
        offer: Offer = plan.offer
        return NumpyConvolution(self._device, problem, offer) if offer.takes(problem) else None

    def lines(self, kind: Kind, n: int, count: int) -> NumpyLines:
        return NumpyLines(self._device, kind, n, count)


class NumpyLines:
    def __init__(self, device: HasStream, kind: Kind, n: int, count: int) -> None:
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


class NumpyConvolution:
    def __init__(self, device: HasStream, problem: Convolution, offer: Offer) -> None:
        self._device, self._problem, self.offer = device, problem, offer
        self.name, self.workspace_bytes = offer.name, offer.workspace_bytes

    def run(self, x: Any, kernels: Any, bias: Any, out: Any, workspace: Any) -> None:
        p = self._problem
        assert x.shape == (p.batch, *p.n, p.fin)
        assert out.shape == (p.batch, *p.m, p.fout)
        assert kernels.shape == (p.fout, *p.k, p.fin)
        assert p.batch == 1 or (x.strides[0], out.strides[0]) == (p.x_step * x.itemsize, p.out_step * out.itemsize)
        steps = (*p.steps, p.fin, 1)
        for step, stride, size in zip(steps, x.strides[1:], x.shape[1:], strict=True):
            assert stride == step * x.itemsize or size == 1
        assert out[0].flags.c_contiguous
        for array in (x, out):
            assert array.ctypes.data % 16 == 0, "plans expect arrays aligned to 16 bytes"
            assert prod(array.shape) < 2**31
        assert p.n[0] * p.steps[0] < 2**31
        if self.offer.refuses(p):
            raise RefusedError("too large")
        fault = self.offer.fault if self.offer.faulty(p) else 0.0
        assert (0 if workspace is None else workspace.nbytes) >= self.workspace_bytes

        def work() -> None:
            if self.workspace_bytes:
                workspace[: self.workspace_bytes].fill(0x7F)
            with np.errstate(over="ignore", invalid="ignore"):
                sums = _sums(p, x, kernels) * (1 + fault)
                found = sums if p.finish is None else reference.activate(sums + bias, p.finish)
                out[...] = np.maximum(found, np.finfo(out.dtype).min) if self.offer.clamps else found

        self._device.stream.queue(work)


def _sums(p: Convolution, x: Any, kernels: Any) -> Any:
    """Convolution without bias in float64: of the image with its zeros, by the kernel with zeros between its taps."""
    around = np.pad(x, ((0, 0), *zip(p.before, p.behind, strict=True), (0, 0)))
    reach = [d * (k - 1) + 1 for d, k in zip(p.dilation, p.k, strict=True)]
    spread = np.zeros((p.fout, *reach, p.fin))
    dz, dy, dx = p.dilation
    spread[:, ::dz, ::dy, ::dx] = kernels
    sz, sy, sx = p.stride
    return reference.convolve(around, spread.transpose(0, 4, 1, 2, 3), np.zeros(p.fout))[:, ::sz, ::sy, ::sx]
