"""Primitives for an emulated GPU that compute the definition, and look closely at what a session gives them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights, Footprint, Kind, Primitive, Scratch, Variant, Work
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine
from znnpy.run.backend import dtype_of
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape

SCRATCH = 100  # bytes


def word_at(address: int) -> ctypes.c_float:
    """Return a float32 in what an emulator calls device memory."""
    return ctypes.c_float.from_address(address)


@dataclass(frozen=True, slots=True)
class StandIn:
    """One kind of layer, by the definition in float64."""

    name: str
    kind: Kind
    pools: bool = False  # a convolution that pools too
    reads_carried: bool = False
    reads_peak: bool = False
    raises_peak: bool = False
    in_place: bool = False  # input and output may share memory
    version: int = 1
    summary: str = "computes the definition"
    source: str = "kernels/reference.py"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        pools = isinstance(shape, ConvShape) and shape.pools
        return None if pools == self.pools else "the other way"

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        return Footprint(
            stages=2,
            input_until=0 if self.in_place else 1,
            output_from=1 if self.in_place else 0,
            scratch=(Scratch("first", SCRATCH, 0, 0), Scratch("last", SCRATCH, 0, 1)),
            reads_carried=self.reads_carried,
            reads_peak=self.reads_peak,
            raises_peak=self.raises_peak,
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        return (Work("gpu_direct", 1.0, 1.0),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Any) -> ConvWeights | None:
        return weights

    def bind(self, resident: ConvWeights | None, shape: LayerShape, variant: Variant, device: Any) -> _Step:
        return _Step(self, resident, shape, device)


@dataclass(frozen=True, slots=True)
class _Step:
    primitive: StandIn
    weights: ConvWeights | None
    shape: LayerShape
    device: Any

    def run(
        self,
        x: npt.NDArray[Any],
        out: npt.NDArray[Any],
        scratch: Mapping[str, npt.NDArray[np.uint8]],
        before: npt.NDArray[Any] | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        kind, dtype = self.primitive, dtype_of(self.shape)
        assert x.dtype == out.dtype == dtype
        assert (x_peak > 0) == kind.reads_peak
        assert (out_peak > 0) == kind.raises_peak
        assert before is None or kind.reads_carried
        assert {name: array.nbytes for name, array in scratch.items()} == {"first": SCRATCH, "last": SCRATCH}
        planes = x.shape[1] + (0 if before is None else before.shape[1])
        assert (len(x), planes, *x.shape[2:]) == self.shape.in_shape
        assert out.shape == self.shape.out_shape

        def work() -> None:
            whole = x.copy() if before is None else np.concatenate((before, x), axis=1)
            if x_peak and not np.abs(whole).max() <= word_at(x_peak).value:
                raise AssertionError(f"a peak of {word_at(x_peak).value}, and |x| is up to {np.abs(whole).max()}")
            for array in scratch.values():
                array[:] = 0xFF
            with np.errstate(all="ignore"):
                result = self._result(whole)
                out[...] = result
                largest = np.float32(np.abs(result).max())
            if out_peak and not largest <= word_at(out_peak).value:
                word_at(out_peak).value = float(largest)

        self.device.stream.queue(work)

    def _result(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        match self.shape:
            case ConvShape():
                assert self.weights is not None
                y = reference.convolve(x, self.weights.weight, self.weights.bias, self.shape.activation)
                return reference.fragments(y, self.shape.pool) if self.shape.pools else y
            case PoolShape():
                return reference.fragments(x, self.shape.p)
            case FilterShape():
                return reference.max_filter(x, self.shape.p)
            case MaxoutShape():
                return reference.maxout(x, self.shape.of)
            case _:
                raise TypeError(f"no stand-in computes {self.shape}")


STAND_INS: tuple[Primitive, ...] = (
    StandIn("gpu.conv.plain", "conv"),
    StandIn("gpu.conv.carries", "conv", reads_carried=True, raises_peak=True),
    StandIn("gpu.conv.peaks", "conv", reads_peak=True, raises_peak=True, in_place=True),
    StandIn("gpu.conv.pools", "conv", pools=True, reads_peak=True, reads_carried=True),
    StandIn("gpu.pool.plain", "pool", in_place=True),
    StandIn("gpu.pool.carries", "pool", reads_carried=True),
    StandIn("gpu.maxfilter.plain", "maxfilter"),
    StandIn("gpu.maxout.plain", "maxout"),
)
