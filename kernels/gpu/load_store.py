"""Move the data of a GPU session between its layers: patches in and out, carried planes, peaks.

Arrays are in device memory. Addresses are integers; 0 means that the value is not wanted. All calls are queued on
`device.stream` and return at once:

    LoadStore(device, raw=, values=, out=, windows=, normalise=)   compiles, uploads its tables (`nbytes` bytes)
    load(raw, x, peak)                     a raw patch -> normalised activations
    store(first, fragments, out, peak)     a part of the last fragments -> their places in the dense patch
    keep(kept, x, join=)                   the last planes of every image, for the next step of a column
    clear(x)                               zeros
    peak(x, peak)                          the largest |x|

Bound    Memory: everything is read once and written once.
Tested   tests/kernels/gpu/test_load_store.py
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.shapes import FLOAT32, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.network import Normalise

SOURCE = "load_store.cu"
THREADS = 256
TILE = 1024  # voxels of a tile that is transposed in shared memory
NARROW = 32  # voxels along each side of a tile if input and output are contiguous along different axes
CHANNELS, MAPS = 4, 8  # as in load_store.cu
WAVES = 16  # blocks per multiprocessor: enough to hide each other's latency

C_NAMES = {
    "uint8": "unsigned char",
    "int8": "signed char",
    "uint16": "unsigned short",
    "int16": "short",
    "uint32": "unsigned int",
    "int32": "int",
    "uint64": "unsigned long long",
    "int64": "long long",
    "float16": "half",
    "float32": "float",
    "float64": "double",
}
WORDS = {2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}  # types that planes are moved as, by bytes


def kernel_names(raw: str, values: str, out: str) -> list[str]:
    """Return the C++ names of all kernels that `LoadStore` runs, for numpy's names of the types."""
    raw, values, out = C_NAMES[raw], C_NAMES[values], C_NAMES[out]
    words = [f"{kernel}<{word}>" for kernel in ("keep", "clear") for word in WORDS.values()]
    return [
        f"convert<{raw}, {values}>",
        f"load<{raw}, {values}>",
        f"store<{values}, {out}>",
        *words,
        *(f"peak_of<{values}, {width}>" for width in (1, 4)),
    ]


class LoadStore:
    """The kernels of one session, compiled for its types.

    raw        type that the volume stores: any real dtype
    values     float32, or float16 in precision fp16
    out        float32, float16 or uint8
    windows    the network's poolings in order, with axes in the session's order
    normalise  normalisation of the network; None: values enter as they are
    """

    def __init__(
        self,
        device: Device,
        *,
        raw: npt.DTypeLike,
        values: npt.DTypeLike,
        out: npt.DTypeLike,
        windows: Sequence[Vec3] = (),
        normalise: Normalise | None = None,
    ) -> None:
        self._device = device
        names = (np.dtype(raw).name, np.dtype(values).name, np.dtype(out).name)
        self._raw, self._values, self._out = (C_NAMES[name] for name in names)
        self._kernels = device.kernels(SOURCE, kernel_names(*names))
        self._period, fragment_of = _fragment_of(windows)
        self._fragment_of = device.put(fragment_of, "the places of fragments")
        self._mean = self._std = None
        self.nbytes = fragment_of.nbytes  # bytes held in device memory
        if normalise is not None:
            mean, std = np.array(normalise.mean, np.float64), np.array(normalise.std, np.float32)
            self._mean, self._std = device.put(mean, "the mean of the volume"), device.put(std, "its deviation")
            self.nbytes += mean.nbytes + std.nbytes

    def load(self, raw: Any, x: Any, peak: int = 0) -> None:
        """Normalise a patch into activations, rounded as on the CPU: the mean of wide types is subtracted in float64.

        raw   (c, z, y, x) as the volume stores it, any strides that are multiples of its itemsize; read only.
        x     (z, y, x, c), strides along z and y that are multiples of its itemsize, lines in C order; overwritten.
        peak  address of a float32, raised to the largest |x| before rounding to float16; infinity and NaN count as
              larger than every number.
        """
        channels, nz, ny, nx = raw.shape
        d, itemsize = self._device, raw.dtype.itemsize
        tables = (self._mean, self._std, np.uint64(peak))
        dense = raw.strides[1:] == (ny * nx * itemsize, nx * itemsize, itemsize)
        aligned = d.address(raw) % (4 * itemsize) == 0 and d.address(x) % (4 * x.itemsize) == 0
        if channels == 1 and dense and aligned and x.flags.c_contiguous:
            kernel = self._kernels[f"convert<{self._raw}, {self._values}>"]
            kernel(self._grid(1, raw.size // 4), (THREADS,), raw, x, int(raw.size), *tables)
            return
        sc, sz, sy, sx = (stride // itemsize for stride in raw.strides)
        o, r = _nearest(sz, sy)
        n, steps, lines = (nz, ny, nx), (sz, sy, sx), _lines(x)
        across = abs(steps[o]) < abs(sx)
        to, tx = (NARROW, NARROW) if across else (4, TILE // 4)
        self._kernels[f"load<{self._raw}, {self._values}>"](
            (n[r] * -(-n[o] // to) * -(-nx // tx),),
            (THREADS,),
            *(raw, sc, steps[r], steps[o], sx),
            *(x, lines[r], lines[o]),
            *(channels, n[o], nx, to, tx, int(across)),
            *tables,
            shared=FLOAT32 * min(channels, CHANNELS) * to * (tx + 1),
        )

    def store(self, first: int, fragments: Any, out: Any, peak: int = 0) -> None:
        """Write a part of the last layer's fragments to their places in the dense patch; other voxels are not touched.

        first      index of the first of `fragments` among all.
        fragments  (S, z, y, x, f), strides along S, z and y that are multiples of its itemsize, lines in C order; read
                   only.
        out        (f, z, y, x) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`, half to even), any strides.
        peak       address of a float32, raised to the largest |value| before conversion: beyond 65520 it does not fit a
                   float16.
        """
        itemsize, (images, *m, maps), (pz, py, px) = out.dtype.itemsize, fragments.shape, self._period
        sf, sz, sy, sx = (stride // itemsize for stride in out.strides)
        o, r = _nearest(sz, sy)
        n, period, steps = (m[0] * pz, m[1] * py, m[2] * px), (pz, py, px), (sz, sy, sx)
        lines = _lines(fragments[0])
        across = abs(steps[o]) < abs(sx)
        tx = px * -(-NARROW // px) if across else px * -(-TILE // (4 * px))
        # Fewer for a long period, so that the tile fits any GPU.
        to = min(NARROW, max(1, 2 * TILE // tx)) if across else 4
        table = (py * px, px)
        self._kernels[f"store<{self._values}, {self._out}>"](
            (n[r] * -(-n[o] // to) * -(-n[2] // tx),),
            (THREADS,),
            *(fragments, fragments.strides[0] // fragments.dtype.itemsize, lines[r], lines[o]),
            *(self._fragment_of, table[r], table[o], first, images),
            *(out, sf, steps[r], steps[o], sx),
            *(maps, n[o], n[2], period[r], period[o], px, to, tx, int(across), np.uint64(peak)),
            shared=FLOAT32 * min(maps, MAPS) * to * (tx + 1),
        )

    def keep(self, kept: Any, x: Any, *, join: bool) -> None:
        """Keep the last planes of every image for the next step of a column.

        kept  (S, carried, y, x, f), the planes of the previous step, C order within an image; overwritten.
        x     (S, new, y, x, f), strides as `kept`. If `join`, (S, carried + new, ..), and `kept` is first copied to its
              first planes; else read only.
        """
        images, carried = kept.shape[:2]
        word = self._word(kept, x, prod(kept.shape[2:]) * kept.dtype.itemsize)
        plane = prod(kept.shape[2:]) * kept.dtype.itemsize // word
        self._kernels[f"keep<{WORDS[word]}>"](
            self._grid(images, plane),
            (THREADS,),
            *(kept, kept.strides[0] // word, x, x.strides[0] // word),
            *(images, carried, x.shape[1], plane, int(join)),
        )

    def clear(self, x: Any) -> None:
        """Set every image of x (S, ..) to zero; C order within an image."""
        image = prod(x.shape[1:]) * x.dtype.itemsize
        word = self._word(x, x, image)
        count = image // word
        self._kernels[f"clear<{WORDS[word]}>"](
            self._grid(len(x), count), (THREADS,), x, x.strides[0] // word, len(x), count
        )

    def peak(self, x: Any, peak: int) -> None:
        """Raise the float32 at address `peak` to the largest |x|; infinity and NaN count as larger than every number.

        x  (S, ..) float32 or float16, C order within an image; read only.
        """
        count, itemsize = prod(x.shape[1:]), x.dtype.itemsize
        width = 4 if self._word(x, x, count * itemsize) >= 4 * itemsize else 1
        self._kernels[f"peak_of<{self._values}, {width}>"](
            self._grid(len(x), count // width),
            (THREADS,),
            *(x, x.strides[0] // itemsize, len(x), count, np.uint64(peak)),
        )

    def _grid(self, images: int, threads: int) -> tuple[int, int]:
        """Return a grid for so many threads per image; loops in the kernels do the rest once the device is full."""
        most = WAVES * self._device.gpu.multiprocessors
        along = max(1, min(-(-threads // THREADS), most))
        return along, max(1, min(images, -(-most // along)))

    def _word(self, a: Any, b: Any, nbytes: int) -> int:
        """Return the bytes of the widest word that divides `nbytes` and the addresses and strides of both arrays."""
        meets = (nbytes, a.strides[0], b.strides[0], self._device.address(a), self._device.address(b))
        return max(word for word in WORDS if all(number % word == 0 for number in meets))


def _nearest(sz: int, sy: int) -> tuple[int, int]:
    """Return which of the axes z and y has the smaller stride, and the other one."""
    return (0, 1) if abs(sz) < abs(sy) else (1, 0)


def _lines(x: Any) -> tuple[int, int]:
    """Return the values from one plane of activations (z, y, x, f) to the next, and from line to line."""
    return x.strides[0] // x.dtype.itemsize, x.strides[1] // x.dtype.itemsize


def _fragment_of(windows: Sequence[Vec3]) -> tuple[Vec3, npt.NDArray[np.int32]]:
    """Return the product of all windows, and which fragment has the voxels at each offset within it: (z, y, x), flat.

    Voxel i of fragment o1 of the first pooling, o2 of the second, .. is voxel o1 + p1 * (o2 + p2 * (.. + i)), and the
    last pooling's offset varies fastest.
    """
    place = np.zeros((1, 3), np.int64)  # offset of each fragment
    period = np.ones(3, np.int64)
    for window in windows:
        offsets = np.indices(window).reshape(3, -1).T
        place = (place[:, None] + period * offsets).reshape(-1, 3)
        period *= window
    z, y, x = period.tolist()
    fragment_of = np.empty((z, y, x), np.int32)
    fragment_of[tuple(place.T)] = np.arange(len(place))
    return (z, y, x), fragment_of.reshape(-1)
