"""Hold what the primitives of graphs' layers on a GPU have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Variant, Work, why_not_normed
from znnpy.shapes import GPU_PRECISIONS, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

Shape = TypeVar("Shape")
MOST_BLOCKS = 2**31 - 1  # blocks of a grid along x


class GpuLayer:
    """The common part of the primitives: one variant."""

    __slots__ = ()

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)


class MovingLayer(GpuLayer):
    """The common part of the primitives of layers without weights, which memory binds."""

    __slots__ = ()

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> None:
        """Return None: there are no weights."""
        del weights, variant, device

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        return Footprint(raises_peak=computes(shape))

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        return (Work("gpu_stream", 0.0, shape.in_bytes + shape.out_bytes),)


def computes(shape: Sized) -> bool:
    """Return whether a layer computes new values, rather than passing on those of its input."""
    return getattr(shape, "how", "") not in ("max", "nearest", "zeros", "reflect", "replicate")


def given(shape: Sized, kind: type[Shape]) -> Shape:
    """Return `shape` as one of its kind; TypeError if it is another."""
    if not isinstance(shape, kind):
        raise TypeError(f"a primitive of {kind.__name__} was given {shape}; ask why_not first")
    return shape


def why_not_here(shape: Sized, machine: Machine, kind: type[Any], what: str) -> str | None:
    """Return None if there is a GPU and `shape` is of this kind and in one of its precisions, else a reason.

    what  the kind in words
    """
    if machine.gpu is None:
        return "needs a CUDA device"
    if not isinstance(shape, kind):
        return f"computes {what}, not {shape}"
    if shape.precision not in GPU_PRECISIONS:
        return f"computes in fp32, tf32 and fp16, not in {shape.precision}"
    if isinstance(shape, GraphConvShape) and shape.pooled is not None:
        return "takes no maxima of its output: a pooling of its own does"
    return why_not_normed(shape)


def value_type(shape: Sized) -> str:
    """Return the C++ type of a layer's values."""
    return "half" if shape.itemsize == 2 else "float"
