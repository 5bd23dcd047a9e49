"""Prepare one layer with random values and with buffers like those of a session, to be timed or checked."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.graph_shapes import GraphConvShape, GraphShape, NormShape, PointShape, TransposeShape
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ConvWeights, Primitive, Variant
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.run.backend import dtype_of
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device

BLOCK = 2**20  # random numbers that are repeated to fill an input; zeros would be multiplied faster
LARGEST = 8.0  # at least as large as each of them

Position = tuple[int, int, int, int]


class Values:
    """The input of a layer, (S, z, y, x, f), and weights with which values neither grow nor shrink much."""

    def __init__(self, shape: LayerShape) -> None:
        rng = np.random.default_rng(20261121)
        self.shape, self.weights = shape, _weights(shape, rng)
        count = min(BLOCK, shape.in_bytes // shape.itemsize)
        self.block = rng.standard_normal(count, np.float32).astype(dtype_of(shape))

    def window(self, corner: Position, size: tuple[int, int, int]) -> npt.NDArray[np.float64]:
        """Return a part of one image, (1, *size, f)."""
        _, _, ny, nx, maps = self.shape.in_shape
        image, *low = corner
        z, y, x = np.ix_(*(np.arange(lo, lo + length) for lo, length in zip(low, size, strict=True)))
        voxels = (image * self.shape.in_shape[1] + z) * ny * nx + y * nx + x
        flat = voxels[None, ..., None] * maps + np.arange(maps)
        window: npt.NDArray[np.float64] = self.block[flat % self.block.size].astype(np.float64)
        return window


class HostLayer:
    """A layer on a processor; it holds as many bytes as the footprint of the primitive says, and the plain weights."""

    def __init__(self, pool: ThreadPool, primitive: Primitive, shape: LayerShape, variant: Variant) -> None:
        self.values = Values(shape)
        resident = primitive.prepare(self.values.weights, variant, pool)
        self._step = primitive.bind(resident, shape, variant, pool)
        self._x, self._out = _tensors(self.values)
        footprint = primitive.footprint(shape, variant, pool.threads)
        self._scratch = {s.name: aligned_bytes(s.nbytes) for s in footprint.scratch}

        self._inputs = inputs_of(shape, self._x) if isinstance(shape, GraphShape) else None
        self._pooled: list[npt.NDArray[Any]] = []
        if isinstance(shape, GraphConvShape) and shape.pooled is not None:
            pooled = aligned_bytes(shape.pooled_bytes).view(self._out.dtype)
            self._pooled.append(pooled.reshape(shape.pooled_shape))

    def run(self) -> None:
        if self._inputs is None:
            self._step.run(self._x, self._out, self._scratch)
        else:
            self._step.run(self._inputs, self._out[0], self._scratch, *self._pooled)

    def at(self, position: Position) -> npt.NDArray[np.float64]:
        """Return all maps of one output voxel; those of a second output are in an image behind the others."""
        image, *voxel = position
        array = self._out[image] if image < len(self._out) else self._pooled[0]
        maps: npt.NDArray[np.float64] = array[tuple(voxel)].astype(np.float64)
        return maps


def inputs_of(shape: GraphShape, x: Any) -> list[Any]:
    """Return the inputs (z, y, x, f) of a layer of a graph, one after the other in the memory of `x`.

    x  an array of numpy's, or of a Device
    """
    fins = shape.fins if isinstance(shape, GraphConvShape | PointShape) else (shape.in_shape[4],)
    sizes = [(*shape.n, maps) for maps in fins]
    if isinstance(shape, GraphConvShape | PointShape):
        sizes = [(*shape.size_of(index), maps) for index, maps in enumerate(fins)]
    if isinstance(shape, GraphConvShape) and shape.addend:
        sizes.append((*shape.out, shape.fout))
    flat, found, first = x.reshape(-1), list[Any](), 0
    for size in sizes:
        found.append(flat[first : first + prod(size)].reshape(size))
        first += prod(size)
    return found


class DeviceLayer:
    """A layer on a GPU: `run` queues the work and returns. DeviceError if the device refuses the layer."""

    def __init__(self, device: Device, primitive: Primitive, shape: LayerShape, variant: Variant) -> None:
        self.values, self._device = Values(shape), device
        dtype = dtype_of(shape)
        footprint = primitive.footprint(shape, variant, 1)
        resident = primitive.prepare(self.values.weights, variant, device)
        self._step = primitive.bind(resident, shape, variant, device)
        of_graph = isinstance(shape, GraphShape)
        size = (shape.in_bytes // dtype.itemsize,) if of_graph else shape.in_shape
        x = device.view(device.allocate(shape.in_bytes, "a layer's input"), size, dtype)
        self._fill(x)
        self._x: Any = inputs_of(shape, x) if isinstance(shape, GraphShape) else x
        self._out = device.view(device.allocate(shape.out_bytes, "a layer's output"), shape.out_shape, dtype)
        self._scratch: Mapping[str, Any] = {s.name: device.allocate(s.nbytes, s.name) for s in footprint.scratch}
        self._peaks = device.put(np.array([LARGEST, 0.0], np.float32), "largest values")
        self._words = {"out_peak": device.address(self._peaks) + self._peaks.itemsize if footprint.raises_peak else 0}
        if not of_graph:
            self._words["x_peak"] = device.address(self._peaks) if footprint.reads_peak else 0
        self._target = self._out[0] if of_graph else self._out

    def run(self) -> None:
        self._step.run(self._x, self._target, self._scratch, **self._words)

    def at(self, position: Position) -> npt.NDArray[np.float64]:
        """Return all maps of one output voxel."""
        return self._device.get(self._out[position]).astype(np.float64)

    def _fill(self, x: Any) -> None:
        device, flat = self._device, x.reshape(-1)
        block = device.put(self.values.block, "random numbers")
        for start in range(0, flat.size, block.size):
            part = flat[start : start + block.size]
            device.copy_async(part, block[: part.size], device.stream)
        device.synchronize(device.stream)


class HostRamLayer:
    """A layer on a GPU with its tensors in the memory of the host. DeviceError if the device refuses the layer.

    pool  threads that copy
    """

    def __init__(
        self, device: Device, pool: ThreadPool, primitive: Primitive, shape: LayerShape, variant: Variant
    ) -> None:
        self.values, self._pool = Values(shape), pool
        resident = primitive.prepare(self.values.weights, variant, device)
        self._step = primitive.bind(resident, shape, variant, device)
        self._x, self._out = _tensors(self.values)
        footprint = primitive.footprint(shape, variant, pool.threads)
        self._scratch: Mapping[str, Any] = {s.name: device.allocate(s.nbytes, s.name) for s in footprint.scratch}

    def run(self) -> None:
        """Run the layer to its end."""
        self._step.run(self._x, self._out, self._scratch, self._pool)

    def at(self, position: Position) -> npt.NDArray[np.float64]:
        """Return all maps of one output voxel."""
        maps: npt.NDArray[np.float64] = self._out[position].astype(np.float64)
        return maps


def _tensors(values: Values) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return input and output in the memory of the host, (S, z, y, x, f), as a session has them there.

    The inputs of a layer of a graph are one after the other, without axes.
    """
    shape, block = values.shape, values.block
    x = aligned_bytes(shape.in_bytes).view(block.dtype)
    for start in range(0, x.size, block.size):
        x[start : start + block.size] = block[: x.size - start]
    out = aligned_bytes(shape.out_bytes).view(block.dtype)
    return x if isinstance(shape, GraphShape) else x.reshape(shape.in_shape), out.reshape(shape.out_shape)


def _weights(shape: LayerShape, rng: np.random.Generator) -> ConvWeights | None:
    match shape:
        case GraphConvShape():
            kernels = rng.standard_normal((shape.fout, shape.fin // shape.groups, *shape.k), np.float32)
            norm = None if shape.norm_shape is None else _weights(shape.norm_shape, rng)
            return ConvWeights(kernels / np.float32(np.sqrt(kernels[0].size)), np.zeros(shape.fout, np.float32), norm)
        case TransposeShape():
            kernels = rng.standard_normal((shape.fin, shape.fout // shape.groups, *shape.k), np.float32)
            return ConvWeights(kernels / np.float32(np.sqrt(shape.fin)), np.zeros(shape.fout, np.float32))
        case PointShape() | NormShape():
            return ConvWeights(np.ones(shape.f, np.float32), np.zeros(shape.f, np.float32))
    if not isinstance(shape, ConvShape):
        return None
    kernels = rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32)
    kernels /= np.float32(np.sqrt(kernels[0].size))
    return ConvWeights(kernels, rng.standard_normal(shape.fout, np.float32) / np.float32(8))
