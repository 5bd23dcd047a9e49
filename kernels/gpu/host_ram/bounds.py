"""Compute lower bounds for the time of all divisions in a space at once, as arrays by chunk, order, maps in and out.

Link       This bound counts no computing. An output of a chunk is complete once the data uploaded until then have
           arrived, and from then on all following outputs are downloaded. If parts of the input wait for the buffers of
           others, the downloads until those are done do not overlap uploads.
Computing  This bound computes groups of maps for all images and planes at once, which takes no longer than computing
           parts of them. The first part is uploaded before, and the last output is downloaded afterwards.
Memory     Buffers count without alignment gaps between them, and kernels, which do not depend on images and planes.

Source  First principles: each is the length of a path through the dependencies.
Tested  tests/kernels/gpu/host_ram/test_division.py, against a simulation of all candidates
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, prod

import numpy as np
import numpy.typing as npt

from znnpy.kernels.gpu.host_ram.division import STAGED, Divided, Division, Inner
from znnpy.kernels.gpu.host_ram.space import Space
from znnpy.kernels.gpu.host_ram.timeline import Speeds
from znnpy.shapes import FLOAT32, ConvShape

_Grid = npt.NDArray[np.float64]  # sizes, counts, bytes or seconds, along the axes they depend on
_ONE: _Grid = np.ones(1)


def _along(axis: int, values: Sequence[int]) -> _Grid:
    shape = [1] * 4
    shape[axis] = len(values)
    return np.array(values, np.float64).reshape(shape)


class _Cut:
    """An axis divided into parts."""

    def __init__(self, length: int, size: _Grid) -> None:
        self.length, self.size = length * _ONE, size
        self.count: _Grid = np.ceil(length / size)
        self.last: _Grid = length - (self.count - 1) * size


class Bounds:
    """The lower bounds of all divisions in `space`.

    seconds  (chunks, orders, maps in, maps out) float64; infinite if buffers do not fit, or if the division was
             removed.
    """

    def __init__(self, shape: ConvShape, vram_bytes: int, speeds: Speeds, space: Space, inner: Inner) -> None:
        self._shape, self._space, self._inner = shape, space, inner
        self._link = _link(shape, vram_bytes, speeds, space)
        self._computed = np.zeros((len(space.maps_in), len(space.maps_out)), np.bool_)
        self.seconds = self._link.seconds.copy()

    def least(self) -> tuple[float, tuple[int, ...]]:
        """Return the smallest bound and its position; of several the first."""
        at = int(self.seconds.argmin())
        return float(self.seconds.flat[at]), tuple(int(n) for n in np.unravel_index(at, self.seconds.shape))

    def division(self, at: tuple[int, ...]) -> Division:
        chunk, order, into, out_of = at
        space = self._space
        return Division(*space.chunks[chunk], space.maps_in[into], space.maps_out[out_of], space.orders[order])

    def compute(self, at: tuple[int, ...]) -> bool:
        """Add computing and kernels to the bounds of all divisions with these groups of maps; False if already done.

        A part that the primitive cannot compute counts as zero, since the primitive may compute smaller ones.
        """
        into, out_of = at[2:]
        if self._computed[into, out_of]:
            return False
        self._computed[into, out_of] = True
        space, shape, link = self._space, self._shape, self._link
        divided = Divided(shape, Division(shape.batch, shape.out[0], space.maps_in[into], space.maps_out[out_of]))
        computing, kernels = 0.0, 0
        for part, count in divided.shapes():
            sublayer = self._inner(part)
            if sublayer is not None:
                computing += count * sublayer.seconds
                kernels += count * sublayer.footprint.resident
        bounds, fits = self.seconds[:, :, into, out_of], link.free[:, :, into, out_of] >= kernels
        least = link.first[:, :, into, 0] + computing + link.end[:, :, 0, out_of]
        bounds[...] = np.where(fits, np.maximum(bounds, least), inf)
        return True


class _Link:
    """Bounds that are independent of the primitive for the sub-layers.

    free        bytes that buffers leave free
    first, end  seconds to upload the first part of the input, and to download the last output
    """

    def __init__(self, shape: ConvShape, vram_bytes: int, speeds: Speeds, space: Space) -> None:
        self._shape = shape
        self._inputs = _along(1, [int(order == "inputs") for order in space.orders]) > 0
        self._images = _Cut(shape.batch, _along(0, [images for images, _ in space.chunks]))
        self._planes = _Cut(shape.out[0], _along(0, [planes for _, planes in space.chunks]))
        self._into = _Cut(shape.fin, _along(2, space.maps_in))
        self._out_of = _Cut(shape.fout, _along(3, space.maps_out))
        self._plane_in, self._plane_out = (shape.itemsize * prod(n[1:]) for n in (shape.n, shape.out))  # one map
        self._upload, self._download = self._plane_in / speeds.upload, self._plane_out / speeds.download
        self.free = vram_bytes - self._buffers()
        self.first = self._read(self._images.size, self._planes.size) * self._into.size * self._upload
        self.end = self._images.last * self._planes.last * self._out_of.last * self._download
        self.seconds = np.where(self.free >= 0, np.maximum(self._overlapping(), self._sequential()), inf)

    def _read(self, images: _Grid, planes: _Grid, chunks: _Grid = _ONE) -> _Grid:
        """Return the input planes of so many images, whose output planes are in so many chunks."""
        return images * (planes + chunks * (self._shape.k[0] - 1))

    def _overlapping(self) -> _Grid:
        """Return the seconds of uploads until an output is complete, plus all downloads from then on.

        The largest bounds come from the first and the last output of a chunk, and from the first and the last of equal
        chunks.
        """
        images, planes = self._images, self._planes
        up, down = self._shape.fin * self._upload, self._shape.fout * self._download
        again = 1 + self._repeated() / self._shape.fin
        late = np.where(again > 1, 1 - self._out_of.last / self._shape.fout, 0.0)  # not in the last output of a chunk
        longest: _Grid = np.zeros(1)
        for image in (0 * _ONE, images.count - 1):
            some_images = np.where(image < images.count - 1, images.size, images.last)
            for plane in (0 * _ONE, np.maximum(planes.count - 2, 0), planes.count - 1):
                some_planes = np.where(plane < planes.count - 1, planes.size, planes.last)
                before = image * self._read(images.size, planes.length, planes.count)
                before = up * (before + plane * self._read(some_images, planes.size))
                own = up * self._read(some_images, some_planes)
                done = image * images.size * planes.length + plane * some_images * planes.size
                left = down * (images.length * planes.length - done)
                longest = np.maximum(longest, again * before + own + left)
                longest = np.maximum(longest, again * (before + own) + left - late * down * some_images * some_planes)
        return longest

    def _repeated(self) -> _Grid:
        """Return the input maps uploaded again per chunk: all per group of output maps, except two resident groups.

        Nothing is uploaded again if sums stay on the device.
        """
        into, passes = self._into, self._out_of.count - 1
        above, below = np.ceil(passes / 2), np.floor(passes / 2)  # ends of passes
        again = above * (into.length - into.size - into.last) + below * (into.length - STAGED * into.size)
        return np.where(self._inputs | (into.count <= STAGED), 0.0, again)

    def _sequential(self) -> _Grid:
        """Return the seconds of uploads and downloads that cannot overlap each other.

        If sums stay, all groups of input maps but two wait until all outputs of the previous chunk are downloaded. If
        they do not, the next chunk waits for the last pass, which waits for the downloads of all passes but two.
        """
        images, planes, into, out_of = self._images, self._planes, self._into, self._out_of
        up, down = self._shape.fin * self._upload, self._shape.fout * self._download
        uploads = up * self._read(images.length, planes.length, planes.count)
        first, last = up * self._read(images.size, planes.size), up * self._read(images.last, planes.last)
        downloads, end = down * images.length * planes.length, down * images.last * planes.last
        waiting = np.maximum(into.length - STAGED * into.size, 0) / into.length
        passed = (out_of.count - STAGED) * out_of.size / out_of.length
        stay = np.where(into.count > STAGED, first + downloads + waiting * (uploads - first), 0.0)
        go = uploads + waiting * (uploads - last) + passed * (downloads - end) + end
        go = np.where((into.count > 1) & (out_of.count > STAGED), go, 0.0)
        return np.where(self._inputs, stay, go)

    def _buffers(self) -> _Grid:
        """Return the bytes for input, outputs and sums."""
        chunks, into, out_of = self._images.count * self._planes.count, self._into, self._out_of
        slots = np.where(self._inputs, out_of.count, np.minimum(STAGED, chunks * out_of.count))
        wide = FLOAT32 // self._shape.itemsize
        totals = np.where(self._inputs, out_of.count, 1.0) * (wide if wide > 1 else 0)
        sums = np.where(into.count > 1, 1 + totals, 0.0)
        x = self._read(self._images.size, self._planes.size) * into.size * self._plane_in
        out = self._images.size * self._planes.size * out_of.size * self._plane_out
        nbytes: _Grid = np.minimum(STAGED, chunks * into.count) * x + (slots + sums) * out
        return nbytes


_link = lru_cache(maxsize=4)(_Link)  # the planner requests many primitives for one layer
