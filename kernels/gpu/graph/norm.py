"""Norms over a whole image on a GPU, and means and maxima of one.

Method   The first pass finds mean and squared deviations of each map in each of some blocks; a small kernel joins them
         in double and turns them into a shift, a factor and an offset for each map; the second pass applies these, and
         the function. An image of few voxels is read once: the threads of one block hold all of some maps. norm.cu.
Memory   The moments of all blocks, up to MOST_VALUES of them.
Bound    Memory: the input is read twice, or once if it is small, and the output is written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Chan, Golub and LeVeque 1979.
Tested   tests/kernels/gpu/graph/test_norm.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import GlobalPoolShape, NormShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph.inputs import TRIPLE, one_input, triple
from znnpy.kernels.gpu.graph.layer import GpuLayer, MovingLayer, given, why_not_here
from znnpy.kernels.gpu.graph.lines import VECTOR_BYTES, Widths, grid_of, lanes_for, line_instances
from znnpy.kernels.gpu.graph.point import Resident, upload_terms
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

SOURCE = "graph/norm.cu"
THREADS, MOST_THREADS = 256, 1024  # of a block: as in norm.cu; of a block that joins moments
THREADS_AT_ONCE, BATCH = 512, 8  # of a block that holds all voxels, and the voxels of a thread: as in norm.cu
SMALL = ("terms", "means", "largest")  # kernels of few values
FLOAT64, SUMS, WARP = 8, 24, 32  # bytes of a double and of Sums in norm.cu; threads
BLOCK_VALUES = 8192  # values of a block, if there are not too many
MOST_BLOCKS, MOST_VALUES = 1024, 2**17  # blocks; moments of all blocks
RESIDENT = 2  # blocks of a multiprocessor that find moments or maxima
WAVES = 4  # blocks of a multiprocessor that normalise: all run together, so they pass through the image together
NORMAL = np.dtype([("n", TRIPLE), ("maps", "i4"), ("function", "i4"), ("a", "f4"), ("b", "f4")])


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    each = (("moments", 128), ("maxima", 128), ("normalise", 64), ("at_once", 128), ("softmax", 64))
    lines = [instance for name, registers in each for instance in line_instances(SOURCE, name, registers)]
    return lines + [KernelInstance(SOURCE, name, 64) for name in SMALL]


def blocks_of(shape: NormShape | GlobalPoolShape) -> int:
    """Return the blocks into which an image is divided."""
    most = max(1, min(MOST_BLOCKS, MOST_VALUES // shape.f))
    return max(1, min(most, prod(shape.n) * shape.f // BLOCK_VALUES))


def moments_scratch(maps: int, blocks: int) -> Scratch:
    """Return the memory for the moments of so many maps in so many blocks of an image, as in norm.cu."""
    return Scratch("moments", FLOAT64 * blocks * (2 * maps + 1))


def terms_scratch(maps: int) -> Scratch:
    """Return the memory for what is computed from moments: a shift, a factor and an offset of each map."""
    return Scratch("terms", 3 * FLOAT32 * maps)


def _memory(width: int, threads: int) -> int:
    """Return the bytes of shared memory in which a block finds moments: shared_doubles of norm.cu."""
    return FLOAT64 * (2 * width + 3) * threads


class _Blocks:
    """The first pass over an image, block by block."""

    def __init__(self, shape: NormShape | GlobalPoolShape, name: str, device: Device) -> None:
        self._shape, self._device = shape, device
        self._sums = name == "moments"
        self._kernels = Widths(device, SOURCE, name, shape, [shape.f])

    def run(self, x: Any, found: Any) -> int:
        """Queue the kernel on an image; `found` is memory for its results. Return the number of blocks."""
        shape = self._shape
        width, kernel = self._kernels.widest(x)
        vectors = shape.f // width
        columns = next(lanes for lanes in (32, 16, 8, 4, 2, 1) if vectors % lanes == 0)
        if columns == 1:
            columns = lanes_for(shape.f, width)
        slices = -(-vectors // columns)
        count = min(blocks_of(shape), max(1, RESIDENT * self._device.gpu.multiprocessors // slices))
        kernel(
            *((count, slices), (THREADS,), one_input(self._device, x), triple(shape.n), found, columns),
            shared=_memory(width, THREADS) if self._sums else 0,
        )
        return count


def slice_of(shape: NormShape, width: int) -> int:
    """Return the maps of a block that holds all voxels: whole vectors and whole groups; 0 if it cannot."""
    maps = lcm(shape.f // shape.groups, width)
    lanes = lanes_for(maps, width)
    holds = THREADS_AT_ONCE // lanes * BATCH
    return maps if lanes * width >= maps and prod(shape.n) <= holds and shape.activation != "softmax" else 0


def _threads(values: int) -> int:
    """Return the threads that join so many values, a power of two."""
    threads = 32
    while threads < min(values, MOST_THREADS):
        threads *= 2
    return threads


@dataclass(frozen=True, slots=True)
class NormPasses(GpuLayer):
    """Norms over a whole image."""

    name: str = "gpu.norm.passes"
    kind: Kind = "norm"
    version: int = 1
    summary: str = "norms over a whole image in two passes"
    source: str = "Welford 1962; Chan, Golub and LeVeque 1979"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_here(shape, machine, NormShape, "norms over a whole image")

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = given(shape, NormShape)
        scratch = (moments_scratch(shape.f, blocks_of(shape)), terms_scratch(shape.f))
        return Footprint(resident=2 * FLOAT32 * shape.f if shape.affine else 0, scratch=scratch, raises_peak=True)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, NormShape)
        width = next(w for w in (8, 4, 2, 1) if w * shape.itemsize <= VECTOR_BYTES and shape.f % w == 0)
        reads = 1.0 if slice_of(shape, width) else 2.0
        return (Work("gpu_stream", 0.0, reads * shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident | None:
        del variant
        return upload_terms(weights, device, self.name)

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _NormStep:
        del variant
        return _NormStep(resident, given(shape, NormShape), device)


class SecondPass:
    """The kernels that run once the moments of an image are known: one joins them, one normalises its values."""

    def __init__(self, resident: Resident | None, shape: NormShape, device: Device) -> None:
        self._shape, self._device = shape, device
        self.weights = (None, None) if resident is None else resident
        self._soft = shape.activation == "softmax"
        self._kernels = Widths(device, SOURCE, "softmax" if self._soft else "normalise", shape, [shape.f])
        self._terms = device.kernels(SOURCE, SMALL)["terms"]
        found = np.zeros((), NORMAL)
        found["n"], found["maps"] = shape.n, shape.f
        found["function"], found["a"], found["b"] = numbers_of(shape.activation, shape.parameters)
        self.normal = found[()]

    def run(self, x: Any, count: int, scratch: Mapping[str, Any], out: Any, out_peak: int) -> None:
        """Queue the kernels; `count`: blocks whose moments are known. `out` may be `x`, but for a softmax."""
        shape, device = self._shape, self._device
        each = shape.f // shape.groups
        threads = _threads(count * each)
        self._terms(
            *((shape.groups,), (threads,), scratch["moments"], count, shape.f, each, float(shape.epsilon)),
            *(*self.weights, scratch["terms"]),
            shared=SUMS * threads // WARP,
        )
        width, kernel = self._kernels.widest(x, out)
        lanes = lanes_for(shape.f, width) if self._soft else shape.f // width
        kernel(
            *grid_of(device, shape.n[2] * lanes, shape.n, WAVES),
            *(one_input(device, x), self.normal, scratch["terms"], out, np.uint64(out_peak)),
            *((lanes,) if self._soft else ()),
        )


class _NormStep:
    """A GraphDeviceStep."""

    def __init__(self, resident: Resident | None, shape: NormShape, device: Device) -> None:
        self._shape, self._device = shape, device
        self._blocks = _Blocks(shape, "moments", device)
        self._second = SecondPass(resident, shape, device)
        soft = shape.activation == "softmax"
        self._at_once = None if soft else Widths(device, SOURCE, "at_once", shape, [shape.f])

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        shape, device, second = self._shape, self._device, self._second
        if self._at_once is not None:
            width, kernel = self._at_once.widest(inputs[0], out)
            if maps := slice_of(shape, width):
                each = shape.f // shape.groups
                kernel(
                    *((shape.f // maps,), (THREADS_AT_ONCE,), one_input(device, inputs[0]), second.normal, out),
                    *(np.uint64(out_peak), maps, lanes_for(maps, width), each, float(shape.epsilon), *second.weights),
                    shared=_memory(width, THREADS_AT_ONCE),
                )
                return
        count = self._blocks.run(inputs[0], scratch["moments"])
        second.run(inputs[0], count, scratch, out, out_peak)


@dataclass(frozen=True, slots=True)
class GlobalPoolPasses(MovingLayer):
    """The mean or the maximum of each map over a whole image."""

    name: str = "gpu.global_pool.passes"
    kind: Kind = "global_pool"
    version: int = 1
    summary: str = "means and maxima over a whole image"
    source: str = "Welford 1962; Chan, Golub and LeVeque 1979"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_here(shape, machine, GlobalPoolShape, "means and maxima over a whole image")

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = given(shape, GlobalPoolShape)
        if shape.how == "max":
            return Footprint(scratch=(Scratch("maxima", FLOAT32 * blocks_of(shape) * shape.f),))
        return Footprint(scratch=(moments_scratch(shape.f, blocks_of(shape)),), raises_peak=True)

    def bind(self, resident: None, shape: Sized, variant: Variant, device: Device) -> _PoolStep:
        del resident, variant
        return _PoolStep(given(shape, GlobalPoolShape), device)


class _PoolStep:
    """A GraphDeviceStep."""

    def __init__(self, shape: GlobalPoolShape, device: Device) -> None:
        self._shape = shape
        self._blocks = _Blocks(shape, "maxima" if shape.how == "max" else "moments", device)
        self._small = device.kernels(SOURCE, SMALL)

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        shape, blocks = self._shape, self._blocks
        halves = int(shape.itemsize == 2)
        if shape.how == "max":
            count = blocks.run(inputs[0], scratch["maxima"])
            self._small["largest"]((-(-shape.f // 128),), (128,), scratch["maxima"], count, shape.f, out, halves)
            return
        count = blocks.run(inputs[0], scratch["moments"])
        threads = _threads(count)
        self._small["means"](
            *((shape.f,), (threads,), scratch["moments"], count, shape.f, out, halves, np.uint64(out_peak)),
            shared=SUMS * threads // WARP,
        )
