"""Images and weights of the papers' layers, and what is right of their outputs: once for all batches and precisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from gpu_card import Device
from layer_entries_gpu import CORNER, SEED, Entry, Input, corners, random_values
from numpy.lib.stride_tricks import sliding_window_view

from znnpy.kernels.contract import ConvWeights
from znnpy.shapes import ConvShape, Precision, Vec3

if TYPE_CHECKING:
    from papers_cases import Layer

    from znnpy.kernels.contract import Array

VALUES = 2**22 - 3  # random ones, again and again; a prime number of them meets no axis
IMAGES = 7  # different ones; a batch repeats them
KEPT_BYTES = 2**31  # of the host, for images of layers that may come again


@dataclass(slots=True)
class Images(Input):
    """An input of a few padded images, again and again: image i is `some[i % len(some)]`.

    some   (up to IMAGES, z, y, x, f) float32
    right  of image i of these: the definition's output in boxes at its `corners`, (boxes, z, y, x, f') float64
    """

    right: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)

    def expected(self) -> npt.NDArray[np.float64]:
        """Of the first and the last image, of values before they were rounded: (1 or 2, boxes, z, y, x, f')."""
        ends = [image % len(self.some) for image in sorted({0, self.shape.in_shape[0] - 1})]
        for image in ends:
            if image not in self.right:
                self.right[image] = self._boxes(image)
        return np.stack([self.right[image] for image in ends])

    def _boxes(self, image: int) -> npt.NDArray[np.float64]:
        shape = self.shape
        assert isinstance(shape, ConvShape)
        assert self.weights is not None
        depth, rows, columns = (min(CORNER, m) + k - 1 for m, k in zip(shape.out, shape.k, strict=True))
        parts = [self.some[image, z : z + depth, y : y + rows, x : x + columns] for z, y, x in corners(shape.out)]
        return definition(np.stack(parts), self.weights)


def definition(x: Array, weights: ConvWeights) -> npt.NDArray[np.float64]:
    """What `reference.convolve` gives for small boxes, in one product: (S, z, y, x, f) to (S, .., f') float64."""
    maps = weights.weight.shape[0]
    windows = sliding_window_view(x.astype(np.float64), weights.weight.shape[2:], axis=(1, 2, 3))  # (S, m, f, k)
    matrix = weights.weight.reshape(maps, -1).T.astype(np.float64)
    sums = windows.reshape(-1, len(matrix)) @ matrix + weights.bias
    return np.asarray(sums).reshape(*windows.shape[:4], maps)


def ends(images: int) -> slice:
    """The first and the last."""
    return slice(None, None, max(1, images - 1))


def box(images: int, corner: Vec3) -> tuple[slice, ...]:
    """Of an output (S, z, y, x, f'): CORNER voxels or less from a corner on, of the first and the last image."""
    return (ends(images), *(slice(at, at + CORNER) for at in corner))


def rms_error(entry: Entry) -> float:
    """Of the boxes, over the rms of the definition. `entry.crop` gives them of the first and the last image alone."""
    assert isinstance(entry.given, Images)
    expected = entry.given.expected()
    found = np.stack([entry.crop(corner) for corner in corners(entry.measured.out)], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = np.square(found.astype(np.float64) - expected).sum()
    return float(np.sqrt(wrong / np.square(expected).sum()))


@dataclass(slots=True)
class _Made:
    some: Array
    weights: ConvWeights
    right: dict[int, npt.NDArray[np.float64]]


class Inputs:
    """What layers convolve, on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Layer, _Made] = {}

    def of(self, layer: Layer, batch: int, precision: Precision) -> Images:
        """ReLUs of normal numbers, with zeros around every image, which the shape counts; no bias."""
        shape, device = layer.shape(batch, precision), self._device
        made = self._ready(layer, shape)
        few = min(IMAGES, batch)
        dtype = np.float16 if shape.itemsize == 2 else np.float32
        block = device.put(made.some[:few].astype(dtype, copy=False), "images")
        values = device.view(device.allocate(shape.in_bytes, "the input"), shape.in_shape, block.dtype)
        for first in range(0, shape.batch, few):
            part = values[first : first + few]
            device.copy_async(part, block[: len(part)], device.stream)
        device.synchronize()
        return Images(shape, made.some[:few], values, made.weights, right=made.right)

    def _ready(self, layer: Layer, shape: ConvShape) -> _Made:
        few = min(IMAGES, shape.batch)
        made = self._made.pop(layer, None)
        if made is None:
            made = _Made(padded_images(shape, layer.padding, few), random_weights(shape), {})
        elif len(made.some) < few:
            made.some = padded_images(shape, layer.padding, few)
        while self._made and made.some.nbytes + sum(one.some.nbytes for one in self._made.values()) > KEPT_BYTES:
            del self._made[next(iter(self._made))]
        self._made[layer] = made
        return made


def padded_images(shape: ConvShape, padding: int, count: int) -> Array:
    """(count, z, y, x, f) float32; each image is the same whatever their count."""
    rows, columns = (slice(padding, size - padding) for size in shape.n[1:])
    some = np.zeros((count, *shape.n, shape.fin), np.float32)
    room = some[:, :, rows, columns]
    room[...] = np.resize(random_values(VALUES), room.shape)
    return some


def random_weights(shape: ConvShape) -> ConvWeights:
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weight = np.random.default_rng(SEED + 1).standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale
    return ConvWeights(weight, np.zeros(shape.fout, np.float32))
