"""Run one primitive on one layer, prepared once, on the CPU or on a GPU; they differ in the place of their arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

import znnpy
from benchmarks.harness.inputs import Vec3, random_kernels, relu_of_noise
from benchmarks.harness.machine import copy_rate, product_rates, torch_sees_a_gpu
from benchmarks.harness.timing import DeviceClock, Rotation, WallClock
from znnpy.machine import this_machine

ALIGNMENT = 256  # bytes, of scratch and of arrays on the CPU
VARIANTS = 6  # variants of a method that are tried
HOPELESS = 2.0  # a variant this many times slower than the best runs once: a first run touches memory
OPERATIONS = {
    "product": 1.0,
    "fft": 5.0,
    "copy": 8.0,
    "pool": 8.0,
    "lane_product": 0.8,
    "lane_bf16_product": 0.4,
    "lane_amx_product": 0.1,
    "lane_fft": 1.3,
}  # in products; fmt: skip
CORNER = 4  # output voxels along an axis of the boxes that are compared with the definition
Shape = Any  # znnpy.ConvShape, PoolShape or FilterShape
Floats = npt.NDArray[np.float64]


class Host:
    """The CPU with a thread pool."""

    device = "cpu"
    opened = None

    def __init__(self, pool: Any) -> None:
        self._pool, self.threads = pool, pool.threads
        self.machine, self.clock = this_machine(), WallClock()

    def put(self, array: npt.NDArray[Any]) -> Any:
        """Return a copy of an array, aligned to ALIGNMENT."""
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an aligned array, filled so that its memory is touched, with NaN if it holds floats."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        block = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        made = block[start : start + nbytes].view(dtype).reshape(shape)
        made.fill(np.nan if made.dtype.kind == "f" else 0)
        return made

    def get(self, array: Any) -> npt.NDArray[Any]:
        """Return the array."""
        return np.asarray(array)

    def bind(self, primitive: Any, shape: Shape, variant: Any, weights: Any) -> Any:
        """Prepare the weights and return a step for the shape."""
        return primitive.bind(primitive.prepare(weights, variant, self._pool), shape, variant, self._pool)

    def peaks(self, footprint: Any, largest: float) -> dict[str, int]:
        """Return no arguments: steps on the CPU take no peaks."""
        return {}

    @property
    def free_bytes(self) -> int:
        """Return half of the machine's memory."""
        return self.machine.ram_bytes // 2


class OnGpu:
    """A GPU, or a device that emulates one."""

    device = "gpu"
    threads = 1

    def __init__(self, device: Any) -> None:
        self.opened, self.clock = device, DeviceClock(device)
        self.machine = replace(this_machine(), gpu=device.gpu)
        self._values: Any = None

    def put(self, array: npt.NDArray[Any]) -> Any:
        """Return a copy in the memory of the device."""
        return self.opened.put(array, "an array of the benchmark")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array of the device, filled with NaN if it is of floats."""
        device, kind = self.opened, np.dtype(dtype)
        made = device.view(device.allocate(prod(shape) * kind.itemsize, "an array of the benchmark"), shape, kind)
        if kind.kind == "f":
            made.fill(np.nan)
            device.synchronize()
        return made

    def get(self, array: Any) -> npt.NDArray[Any]:
        """Wait for the device and return a copy of the array in the host's memory."""
        self.opened.synchronize()
        return np.asarray(self.opened.get(array))

    def bind(self, primitive: Any, shape: Shape, variant: Any, weights: Any) -> Any:
        """Prepare the weights and return a step for the shape."""
        return primitive.bind(primitive.prepare(weights, variant, self.opened), shape, variant, self.opened)

    def peaks(self, footprint: Any, largest: float) -> dict[str, int]:
        """Return the addresses of the peaks of input and output as arguments, if the footprint requests them."""
        self._values = self.opened.put(np.array([largest, 0], np.float32), "largest values")
        first = self.opened.address(self._values)
        peaks = {"x_peak": first} if footprint.reads_peak else {}
        return peaks | ({"out_peak": first + 4} if footprint.raises_peak else {})

    @property
    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        return int(self.opened.free_bytes())


Place = Host | OnGpu


@contextmanager
def place_of(device: str, threads: int | None = None) -> Iterator[Place]:
    """Open the CPU with `threads` threads, by default one for each core, or the first GPU."""
    if device == "gpu":
        with znnpy.Device(znnpy.find_gpu()) as opened:
            yield OnGpu(opened)
    else:
        with znnpy.ThreadPool(threads or this_machine().cores) as pool:
            yield Host(pool)


def limits_of(place: Place) -> dict[str, Any]:
    """Return the limits of the machine: bytes per second of a copy, operations per second of products."""
    device = place.opened
    if device is not None:
        found = {"copy": copy_rate(device, min(2**30, device.gpu.memory_bytes // 16))}
        return found | (product_rates() if torch_sees_a_gpu() else {})
    source, target = (np.full(2**25, 0.5, np.float32) for _ in range(2))
    a = np.full((1024, 1024), 0.5, np.float32)
    copied = median(place.clock.seconds(lambda: np.copyto(target, source)) for _ in range(3))
    multiplied = median(place.clock.seconds(lambda: a @ a) for _ in range(3))
    return {"copy": 2 * source.nbytes / copied, "fp32": 2 * 1024**3 / multiplied}


@dataclass
class Problem:
    """A layer with input and weights, on the device and in host memory.

    x  arrays that are the input in rotation, together larger than the cache of a GPU; all hold the same values.
    """

    shape: Shape
    place: Place
    values: npt.NDArray[np.float32]
    weights: Any
    x: Rotation
    out: Any
    _exact: dict[Vec3, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, place: Place) -> Problem:
        """Make input and weights."""
        values = relu_of_noise(shape.in_shape)
        kept = np.float16 if shape.precision == "fp16" else np.float32
        cache = place.machine.gpu.l2_bytes if place.machine.gpu is not None else 0
        count = Rotation.count(shape.in_bytes, cache) if cache else 1
        arrays = [place.put(values.astype(kept)) for _ in range(count)]
        weights = random_kernels(shape.fin, shape.fout, shape.k) if shape.kind == "conv" else None
        return cls(shape, place, values, weights, Rotation(arrays), place.empty(shape.out_shape, kept))

    def bound(self, primitive: Any, variant: Any) -> Callable[[], None]:
        """Return a function that runs the primitive once, or queues it; MemoryError if its scratch does not fit."""
        footprint = primitive.footprint(self.shape, variant, self.place.threads)
        needed = sum(one.nbytes for one in footprint.scratch) + footprint.allowance + 2 * footprint.resident
        if needed > 0.9 * self.place.free_bytes:
            raise MemoryError(f"{primitive.name} {variant} takes {needed:,} bytes besides input and output")
        step = self.place.bind(primitive, self.shape, variant, self.weights)
        scratch = {one.name: self.place.empty((one.nbytes,), np.uint8) for one in footprint.scratch}
        peaks = self.place.peaks(footprint, float(self.values.max()) * (1 + 2**-10))

        def run() -> None:
            step.run(self.x(), self.out, scratch, **peaks)

        return run

    def error(self, crop: Callable[[tuple[slice, ...]], npt.NDArray[Any]]) -> float:
        """Return the rms error of boxes of an output, over the rms of the definition in float64.

        crop  gives a box of the output (S, z, y, x, f).
        """
        size: Any = tuple(min(CORNER, n) for n in self.shape.out_shape[1:4])
        last = tuple(n - m for n, m in zip(self.shape.out_shape[1:4], size, strict=True))
        wrong = right = 0.0
        for lo in {(0, 0, 0), last, (last[0] // 2, last[1] // 3, 2 * last[2] // 3)}:
            if lo not in self._exact:
                self._exact[lo] = self._definition(lo, size)
            exact = self._exact[lo]
            box = _box(lo, size)
            wrong += float(np.square(crop(box).astype(np.float64) - exact).sum())
            right += float(np.square(exact).sum())
        return float(np.sqrt(wrong / right)) if right else float("nan")

    def error_of(self, run: Callable[[], None]) -> float:
        """Run with an output filled with NaN, so that missing values are found, and return the error."""
        self.place.get(self.out[:1, :1, :1, :1])  # waits for earlier work
        self.out.fill(np.nan)
        run()
        return self.error(lambda box: self.place.get(self.out[box]))

    def _definition(self, lo: Vec3, size: Vec3) -> Floats:
        """Return a box of the layer's output, of all images, by its definition: (S, z, y, x, f) float64."""
        shape = self.shape
        p = shape.pool if shape.kind == "conv" else shape.p
        if shape.kind == "maxfilter":
            return _maxima(self.values[_box(lo, _sum(size, p, -1))], p)
        start = tuple(a * b for a, b in zip(lo, p, strict=True))
        count = _sum(tuple(a * b for a, b in zip(size, p, strict=True)), p, -1)
        if shape.kind == "conv":
            return _fragments(_maxima(np.maximum(self._sums(start, count), 0), p), p)
        found: Any = _maxima(self.values[_box(start, count)], p)
        return np.asarray(_fragments(found, p) if shape.fragments else found[:, :: p[0], :: p[1], :: p[2]])

    def _sums(self, lo: tuple[int, ...], size: tuple[int, ...]) -> Floats:
        """Return a box of the convolution's sums and biases, before activation and pooling."""
        total: Floats = np.zeros((self.shape.batch, *size, self.shape.fout)) + self.weights.bias
        for tap in product(*map(range, self.shape.k)):
            part = self.values[_box(_sum(lo, tap), size)].astype(np.float64)
            total += part @ self.weights.weight[(..., *tap)].T.astype(np.float64)
        return total


def _sum(a: Sequence[int], b: Sequence[int], more: int = 0) -> tuple[int, ...]:
    return tuple(x + y + more for x, y in zip(a, b, strict=True))


def _box(lo: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return (slice(None), *(slice(a, a + n) for a, n in zip(lo, size, strict=True)))


def _maxima(x: Any, p: Vec3) -> Floats:
    """Return the maximum of the window p at every position of (S, z, y, x, f)."""
    size = tuple(n - w + 1 for n, w in zip(x.shape[1:4], p, strict=True))
    found: Any = x[_box((0, 0, 0), size)].astype(np.float64)
    for tap in product(*map(range, p)):
        found = np.maximum(found, x[_box(tap, size)])
    return np.asarray(found)


def _fragments(x: Floats, p: Vec3) -> Floats:
    """Return every offset of (S, z, y, x, f) as an image of its own: S * product(p) images."""
    parts = [x[:, a :: p[0], b :: p[1], c :: p[2]] for a, b, c in product(*map(range, p))]
    size = tuple(n // w for n, w in zip(x.shape[1:4], p, strict=True))
    return np.stack([part[_box((0, 0, 0), size)] for part in parts], 1).reshape(-1, *size, x.shape[4])


def smaller(shape: Shape) -> Shape:
    """Return the same layer on about an eighth of the volume."""
    if shape.kind == "conv":
        step = shape.pool
        out = tuple(max(p, (n - k + 1) // 2 // p * p) for n, k, p in zip(shape.n, shape.k, step, strict=True))
        less = 1 if shape.pools else 0
        n = tuple(o + k - 1 + (p - 1) * less for o, k, p in zip(out, shape.k, step, strict=True))
        return replace(shape, n=n)
    return replace(shape, n=tuple(max(p, n // 2 // p * p) + p - 1 for n, p in zip(shape.n, shape.p, strict=True)))


def ratio(shape: Shape, other: Shape) -> float:
    """Return how many times the output voxels of another a shape has."""
    return float(prod(shape.out_shape[:4]) / prod(other.out_shape[:4]))


def likely(primitive: Any, shape: Shape, place: Place) -> list[Any]:
    """Return the variants that are probably the fastest, judged by their work."""
    offered = primitive.variants(shape, place.machine)
    return sorted(offered, key=lambda variant: effort(primitive.work(shape, variant)))[:VARIANTS]


def effort(work: Sequence[Any]) -> float:
    """Return a number that grows with the time of all stages: operations of a product, roughly."""
    return float(sum(max(OPERATIONS.get(stage.unit, 1.0) * stage.flops, 16 * stage.nbytes) for stage in work))


def fastest(problem: Problem, primitive: Any, variants: Sequence[Any], seconds: float) -> tuple[float, Any]:
    """Return seconds and variant of the fastest; RuntimeError or MemoryError if none of them runs.

    seconds  time after which no other variant is tried.
    """
    end = time.monotonic() + seconds
    clock, found = problem.place.clock, list[tuple[float, int]]()
    failed: Exception | None = None
    for number, variant in enumerate(variants):
        if found and time.monotonic() > end:
            break
        try:
            run = problem.bound(primitive, variant)
            spent = clock.seconds(run)
            if not found or spent < HOPELESS * min(found)[0]:
                spent = min(spent, clock.seconds(run))
            found.append((spent, number))
        except (RuntimeError, MemoryError, znnpy.ZnnpyError) as error:
            failed = error
    if not found:
        raise failed or RuntimeError(f"{primitive.name} has no variant")
    best, number = min(found)
    return best, variants[number]
