"""Whole-image FFT convolution, task parallel (ZNNi algorithm 3): each transform is one worker's task.

Method   There are five kinds of tasks (`task_graph.py`); the most distant from the end go first (`scheduler.py`):
         input     transforms of a block of input maps: x and z of some lines y, then y; lines of padding are skipped;
         kernel    pruned transforms (`pruned.py`) of the kernels from a block of input to a block of output maps, for a
                   slab of frequencies (some x, some y, all z), into a primary worker's buffer;
         multiply  for such a slab and some images: per frequency a product [images x in] @ [in x out], added to the
                   output's;
         output    inverse transforms along y, z and x, bias, activation, into the output;
         sync      between the stages: the only tasks that allocate and free, within the layer's part of the arena.
         Blocks have 16 maps or more: FFTW's vector loop runs over them, and BLAS computes the products. The paper's
         tasks are of one map and all frequencies: here kernel and product stay in the caches of the chip.
Layout   A block's spectra are (x, y, z, maps) complex64, so that slabs are nearly contiguous. Lines y and images are an
         odd number of cache lines apart, otherwise values would collide in a few sets of the cache.
Memory   Table II of the paper: input + its spectra, then both spectra + a buffer for each primary worker, then spectra
         of the output + output.
Bound    S = 1: transforms of kernels; large S: products.
Source   Zlateski, Lee, Seung, ZNNi (SC16), IV-A.3 and Fig. 3.
Tested   tests/kernels/cpu/test_conv.py, tests/kernels/cpu/test_conv_fft_tasks.py, tests/kernels/cpu/test_scheduler.py
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_fp32, why_not_plain
from znnpy.kernels.cpu.epilogue import Epilogue, apply_epilogue, quiet
from znnpy.kernels.cpu.fft import Transform, like, planning
from znnpy.kernels.cpu.pinning import pinned, place_workers
from znnpy.kernels.cpu.pruned import twiddles
from znnpy.kernels.cpu.scheduler import Event, Observer, Scheduler
from znnpy.kernels.cpu.task_graph import Task
from znnpy.kernels.cpu.task_sizes import WIDTHS, Block, Sizes, bounds, sizes
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import COMPLEX64, FLOAT32, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

    Complex = npt.NDArray[np.complex64]

# Memory of the libraries, fitted to random shapes of 20 to 80 MiB with 1 to 3 threads (2026-11-21); measured, not
# derived.
LIBRARY_BYTES = 15 * 2**16  # per thread: packed by BLAS and copied by FFTW
COPIED_BYTES = 3 * 2**18  # per thread: copied by FFTW in addition, if columns along y are longer than LONG_COLUMN
LONG_COLUMN = 96
INPUT_BYTES = 2**16  # per task that transforms input maps
CHAIN_BYTES = 8  # size of a run's counter for one chain of multiply-adds
# Costs fitted to 32 and 80 maps, k = 5, S = 1 and 8, on 2 Zen 5 cores (2026-11-21).
THIN = 10  # a product over k values takes the time of k + 10 at full rate
NARROW = {16: (4.0, 2.3), 32: (2.1, 1.5)}  # time of a product relative to full rate: per image, and per product
SLOW = 2.0  # average time of a transform here relative to one of 80 maps innermost

_log = logging.getLogger(__name__)


class _Spectra(NamedTuple):
    """Two views of the spectra of a block of maps, for all images."""

    columns: Complex  # (S, x, y, z * maps)
    voxels: Complex  # (S, x, y, z, maps)


class _Resident(NamedTuple):
    kernels: Array  # (fin * fout * k^3,): for each pair of blocks, output blocks innermost, (kx, ky, kz, in, out)
    bias: Array


@dataclass(frozen=True, slots=True)
class ConvFftTasks:
    """Whole-image FFT convolution as a graph of tasks: for many maps in and out, or many images."""

    name: str = "cpu.conv.fft_tasks"
    kind: Kind = "conv"
    version: int = 1
    summary: str = (
        "many maps and large kernels if the spectra of all kernels do not fit: faster than fft_data, more memory"
    )
    source: str = "ZNNi IV-A.3 (algorithm 3) with the pruned transforms of III"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_fp32(shape) or why_not_plain(shape):
            return reason
        shape = as_conv(shape)
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see cpu.conv.direct"
        for maps, where in ((shape.fin, "input"), (shape.fout, "output")):
            if maps < WIDTHS[0]:
                return f"a task is {WIDTHS[0]} maps wide, and there are {maps} {where} maps: see cpu.conv.fft_data"
            if shape.batch * maps < machine.cores:
                return (
                    f"{shape.batch} images of {maps} {where} maps are too few tasks for {machine.cores} cores: "
                    "see cpu.conv.fft_data"
                )
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        shape = as_conv(shape)
        # Use wider blocks only if the transforms still keep every core busy.
        least = min(shape.fin, shape.fout)
        wide = [width for width in WIDTHS if shape.batch * (least // width) >= machine.cores] or WIDTHS[:1]
        return tuple(Variant.of(width=width) for width in wide)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        shape = as_conv(shape)
        t = sizes(shape, variant.count("width"))
        (gz, gy, _), (kz, ky, kx) = t.padded, shape.k
        library = LIBRARY_BYTES + (COPIED_BYTES if gy > LONG_COLUMN else 0)
        counters = CHAIN_BYTES * t.tasks.columns * t.tasks.slabs * t.tasks.products
        scratch = [
            Scratch("input spectra", t.input_bytes, 0, 1),
            Scratch("lines", min(threads, t.tasks.inputs) * t.lines_bytes, 0, 0),
            Scratch("output spectra", t.output_bytes, 1, 2),
            Scratch("kernels", _primaries(shape, t, threads) * t.kernel_bytes, 1, 1),
            Scratch("products", threads * t.product_bytes, 1, 1),
            Scratch("planes", min(threads, t.tasks.outputs) * t.planes_bytes, 2, 2),
        ]
        return Footprint(
            resident=shape.weight_bytes
            + Epilogue.nbytes(shape.fout, shape.activation, shape.out[2])
            + COMPLEX64 * (gz * kz + gy * ky + t.half * kx),  # twiddles
            input_until=0,
            output_from=2,
            stages=3,
            scratch=tuple(s for s in scratch if s.nbytes),
            allowance=threads * library + INPUT_BYTES * t.tasks.inputs + counters,
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        t = sizes(shape, variant.count("width"))
        gz, gy, gx = t.padded
        image, pairs = t.half * gy * gz, shape.fin * shape.fout
        maps = shape.batch * (shape.fin + shape.fout)
        transforms = SLOW * 2.5 * prod(t.padded) * (2 * log2(gx) + log2(gy) + log2(gz)) * maps
        kernels = 8.0 * image * pairs * (shape.k[0] + THIN)
        per_image, per_product = NARROW[variant.count("width")]
        products = 8.0 * image * pairs * (per_image * shape.batch + per_product * t.tasks.products)
        moved = float(shape.in_bytes + shape.out_bytes + 4 * COMPLEX64 * image * maps)
        return (
            Work("fft", transforms, 0.0),
            Work("product", kernels + products, 0.0),
            Work("copy", 0.0, moved),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> _Resident:
        assert weights is not None
        width = variant.count("width")
        fout, fin = weights.weight.shape[:2]
        kernels = np.empty(weights.weight.size, np.float32)
        for lo, hi in bounds(fin, width):
            for first, last in bounds(fout, width):
                pool.check()
                of_pair = weights.weight[first:last, lo:hi].transpose(4, 3, 2, 1, 0)
                _pair(kernels, fout, of_pair.shape, lo, first)[...] = of_pair
        return _Resident(kernels, weights.bias)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        return _Step(resident, as_conv(shape), variant, pool)


def _primaries(shape: ConvShape, t: Sizes, threads: int) -> int:
    """Return how many workers transform kernels: one per output map, as in the paper, and no more than kernels."""
    return min(threads, shape.fout, t.tasks.kernels)


def _pair(kernels: Array, fout: int, size: tuple[int, ...], lo: int, first: int) -> Array:
    """Return the kernels from the block of input maps starting at `lo` to the block of output maps starting at `first`.

    size  (kx, ky, kz, maps in, maps out), also of the result, which is a view.
    """
    *taps, wide_in, _ = size
    start = prod(taps) * (lo * fout + wide_in * first)
    return kernels[start : start + prod(size)].reshape(size)


class _Plans:
    """The transforms of one worker, by the width of a block and the lines at once."""

    def __init__(self, shape: ConvShape, t: Sizes) -> None:
        (gz, gy, gx), half = t.padded, t.half
        self.along_x: dict[tuple[int, int], Transform] = {}
        self.along_z: dict[tuple[int, int], Transform] = {}
        self.along_y: dict[int, Transform] = {}
        self.along_x_back: dict[tuple[int, int], Transform] = {}
        self.along_z_back: dict[tuple[int, int], Transform] = {}
        self.along_y_back: dict[int, Transform] = {}

        def planes(block: Block, count: int, depth: int) -> npt.NDArray[Any]:
            """Return a layout (x, y, z, maps)."""
            strides = (COMPLEX64 * size for size in (gy * block.row, block.row, block.width, 1))
            return like((half, count, depth, block.width), tuple(strides), np.complex64)

        def real(block: Block, count: int, depth: int) -> npt.NDArray[Any]:
            """Return a layout (y, z, x, maps)."""
            strides = (FLOAT32 * size for size in (depth * gx * block.width, gx * block.width, block.width, 1))
            return like((count, depth, gx, block.width), tuple(strides), np.float32, place=1)

        def columns(block: Block) -> npt.NDArray[Any]:
            """Return a layout (y, z and maps) of one x."""
            return like((gy, gz * block.width), (COMPLEX64 * block.row, COMPLEX64), np.complex64)

        for block in t.inputs:
            for count in {block.lines, shape.n[1] % block.lines} - {0}:
                key = block.width, count
                lines, whole = planes(block, count, shape.n[0]), planes(block, count, gz)
                self.along_x[key] = Transform(real(block, count, shape.n[0]), lines.transpose(1, 2, 0, 3), (2,))
                self.along_z[key] = Transform(whole, whole, (2,))
            self.along_y[block.width] = Transform(columns(block), columns(block), (0,))
        for block in t.outputs:
            for count in {block.lines, shape.out[1] % block.lines} - {0}:
                key = block.width, count
                lines, whole = planes(block, count, shape.out[0]), planes(block, count, gz)
                target = real(block, count, shape.out[0])
                self.along_z_back[key] = Transform(whole, whole, (2,), "FFTW_BACKWARD")
                self.along_x_back[key] = Transform(lines.transpose(1, 2, 0, 3), target, (2,), "FFTW_BACKWARD")
            self.along_y_back[block.width] = Transform(columns(block), columns(block), (0,), "FFTW_BACKWARD")


class _Step:
    """The convolution of one shape, planned.

    observe     if set, is called with every task's begin and end and every allocation of synchronisations, one at a
                time.
    placements  the cores of the workers, or the reason why they are not pinned.
    """

    def __init__(self, resident: _Resident, shape: ConvShape, variant: Variant, pool: ThreadPool) -> None:
        self.observe: Observer | None = None
        self.sizes = t = sizes(shape, variant.count("width"))
        self.placements = place_workers(pool.threads, _primaries(shape, t, pool.threads))
        if self.placements.unpinned and pool.threads > 1:
            _log.info("%s: workers are not pinned to cores: %s", shape, self.placements.unpinned)
        self.shape, self.pool, self.kernels = shape, pool, resident.kernels
        with planning():
            self.plans = [_Plans(shape, t) for _ in range(pool.threads)]
        gz, gy, gx = t.padded
        self.along_z, self.along_y = twiddles(gz, shape.k[0]), twiddles(gy, shape.k[1])
        # Real and imaginary parts are separate: kernels are real, so their first transform is a real product.
        self.along_x = (
            twiddles(gx, shape.k[2], t.half).view(np.float32).reshape(t.half, -1, 2).transpose(0, 2, 1).copy()
        )
        mx, activation = shape.out[2], shape.activation
        self._softmax = Epilogue(resident.bias, activation, mx) if activation == "softmax" else None  # over all maps
        self.epilogues = (
            [Epilogue(resident.bias[b.lo : b.lo + b.width], activation, mx) for b in t.outputs]
            if self._softmax is None
            else []
        )

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        run = _Run(self, x, out, scratch)

        @quiet()
        def work(lo: int, hi: int, worker: int) -> None:
            del worker  # a thread of the pool; the place holds the worker's number
            for place in self.placements.places[lo:hi]:
                with pinned(place.core):
                    run.scheduler.work(place)

        self.pool.each(work, self.pool.threads)
        if self._softmax is not None:
            apply_epilogue(self._softmax, out, self.pool)


class _Run:
    """One run: the work of every task, in buffers that synchronisations allocate."""

    def __init__(self, step: _Step, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        self._step, self._shape, self._sizes = step, step.shape, step.sizes
        self._given: dict[str, Any] = {"input": x, "output": out, **scratch}  # used by synchronisations only
        self._held: dict[str, Any] = {}  # buffers that tasks may use now
        t = step.sizes
        self.scheduler = Scheduler(t.tasks, step.placements.places, self._execute, step.pool.check, step.observe)

    def _execute(self, task: Task, worker: int, owner: int) -> None:
        match task.kind:
            case "input":
                self._input(task, worker)
            case "kernel":
                self._kernel(task, owner)
            case "multiply":
                self._multiply(task, worker, owner)
            case "output":
                self._output(task, worker)
            case "sync":
                self._synchronise(task, worker)

    def _synchronise(self, task: Task, worker: int) -> None:
        """Free the buffers that the next stage does not use, and allocate those it needs."""
        stages = (
            ("input", "input spectra", "lines"),
            ("input spectra", "output spectra", "kernels", "products"),
            ("output spectra", "planes", "output"),
            (),
        )
        for name in [name for name in self._held if name not in stages[task.part]]:
            del self._held[name]
            self._report("free", task, worker, name)
        for name in stages[task.part]:
            if name in self._given and name not in self._held:
                self._held[name] = self._shaped(name)
                self._report("allocate", task, worker, name)

    def _report(self, what: Literal["allocate", "free"], task: Task, worker: int, name: str) -> None:
        if self._step.observe is not None:
            self._step.observe(Event(what, worker, task, name, worker))

    def _shaped(self, name: str) -> Any:
        """Return a buffer in the form that tasks use."""
        t, given = self._sizes, self._given[name]
        match name:
            case "input spectra":
                return [self._spectra(given, block) for block in t.inputs]
            case "output spectra":
                return [self._spectra(given, block) for block in t.outputs]
            case "kernels":
                return given.reshape(-1, t.kernel_bytes)
            case "lines":
                return given.reshape(-1, t.lines_bytes)
            case "planes":
                return given.reshape(-1, t.planes_bytes)
            case "products":
                return given.reshape(-1, t.product_bytes)
            case _:
                return given

    def _spectra(self, store: Bytes, block: Block) -> _Spectra:
        t = self._sizes
        gz, gy, _ = t.padded
        size, start = (self._shape.batch, t.half, gy, gz, block.width), COMPLEX64 * block.start
        strides = tuple(COMPLEX64 * stride for stride in (block.image, gy * block.row, block.row, block.width, 1))
        return _Spectra(
            np.ndarray((*size[:3], gz * block.width), np.complex64, store, start, (*strides[:3], COMPLEX64)),
            np.ndarray(size, np.complex64, store, start, strides),
        )

    def _buffer(self, name: str, worker: int, number: int) -> Bytes:
        """Return the worker's buffer, or that of task `number` if there are fewer tasks (and buffers) than workers."""
        buffers = self._held[name]
        found: Bytes = buffers[worker if len(buffers) == self._step.pool.threads else number]
        return found

    def _input(self, task: Task, worker: int) -> None:
        """Transform a block of maps of some images."""
        shape, t, plans = self._shape, self._sizes, self._step.plans[worker]
        block, (nz, ny, nx), gx = t.inputs[task.row], shape.n, t.padded[2]
        width = block.width
        maps, spectra = self._held["input"][..., block.lo : block.lo + width], self._held["input spectra"][task.row]
        store = self._buffer("lines", worker, task.part * t.tasks.rows + task.row)
        for s in t.images(task):
            for y in range(0, ny, block.lines):
                self.scheduler.check()
                count = min(block.lines, ny - y)
                lines = np.ndarray((count, nz, gx, width), np.float32, store)
                lines[:, :, :nx] = maps[s, :, y : y + count].transpose(1, 0, 2, 3)
                lines[:, :, nx:] = 0
                whole = spectra.voxels[s, :, y : y + count]
                plans.along_x[width, count](lines, whole[:, :, :nz].transpose(1, 2, 0, 3))
                whole[:, :, nz:] = 0
                plans.along_z[width, count](whole, whole)
            spectra.columns[s, :, ny:] = 0
            for columns in spectra.columns[s]:
                self.scheduler.check()
                plans.along_y[width](columns, columns)

    def _kernel(self, task: Task, owner: int) -> None:
        """Compute pruned transforms along x, y, z of a pair of blocks, for a slab, in the owner's buffer."""
        shape, t, step = self._shape, self._sizes, self._step
        (kz, ky, kx), gz = shape.k, t.padded[0]
        into, out_of = t.outputs[task.column], t.inputs[task.row]
        size = kx, ky, kz, out_of.width, into.width
        pairs = out_of.width * into.width
        kernels = _pair(step.kernels, shape.fout, size, out_of.lo, into.lo).reshape(kx, -1)
        whole = self._slab_kernels(task, owner)
        store, (whole_bytes, xy_bytes, x_bytes, _) = self._held["kernels"][owner], t.kernels
        lines = whole.shape[1]
        plane = np.ndarray((lines, kz, pairs), np.complex64, store, whole_bytes)
        line = np.ndarray((ky, kz * pairs), np.complex64, store, whole_bytes + xy_bytes)
        parts = np.ndarray((2, ky * kz * pairs), np.float32, store, whole_bytes + xy_bytes + x_bytes)
        xs, ys = t.slab(task)
        for target, along_x in zip(whole, step.along_x[xs], strict=True):
            self.scheduler.check()
            np.matmul(along_x, kernels, out=parts)
            line.real = parts[0].reshape(line.shape)
            line.imag = parts[1].reshape(line.shape)
            np.matmul(step.along_y[ys], line, out=plane.reshape(lines, -1))
            np.matmul(step.along_z, plane, out=target.reshape(lines, gz, pairs))

    def _slab_kernels(self, task: Task, owner: int) -> Complex:
        """Return the kernels that the owner holds for `task`: (x, y, z, maps in, maps out)."""
        t = self._sizes
        xs, ys = t.slab(task)
        size = xs.stop - xs.start, ys.stop - ys.start, t.padded[0], t.inputs[task.row].width
        return np.ndarray((*size, t.outputs[task.column].width), np.complex64, self._held["kernels"][owner])

    def _multiply(self, task: Task, worker: int, owner: int) -> None:
        """Multiply a slab of some images with a pair of blocks and add the product to the sum of earlier rows."""
        t = self._sizes
        (xs, ys), images = t.slab(task), t.images(task)
        part = slice(images.start, images.stop)
        factor = self._held["input spectra"][task.row].voxels[part, xs, ys]
        total = self._held["output spectra"][task.column]
        target = total.voxels[part, xs, ys]
        if task.row:
            target = np.ndarray(target.shape, np.complex64, self._held["products"][worker])
        np.matmul(_by_frequency(factor), self._slab_kernels(task, owner), out=_by_frequency(target))
        if task.row:
            sums = total.columns[part, xs, ys]
            np.add(sums, target.reshape(sums.shape), out=sums)

    def _output(self, task: Task, worker: int) -> None:
        """Transform a block of maps of some images back, apply bias and activation, and write it to the output."""
        shape, t, plans = self._shape, self._sizes, self._step.plans[worker]
        block, (mz, my, mx), gx = t.outputs[task.column], shape.out, t.padded[2]
        width = block.width
        maps, spectra = (
            self._held["output"][..., block.lo : block.lo + width],
            self._held["output spectra"][task.column],
        )
        store = self._buffer("planes", worker, task.part * t.tasks.columns + task.column)
        for s in t.images(task):
            for columns in spectra.columns[s]:
                self.scheduler.check()
                plans.along_y_back[width](columns, columns)
            for y in range(0, my, block.lines):
                self.scheduler.check()
                count = min(block.lines, my - y)
                whole = spectra.voxels[s, :, y : y + count]
                planes = np.ndarray((count, mz, gx, width), np.float32, store)
                plans.along_z_back[width, count](whole, whole)
                plans.along_x_back[width, count](whole[:, :, :mz].transpose(1, 2, 0, 3), planes)
                if self._step.epilogues:
                    rows = planes.reshape(count, mz, -1)[..., : mx * width]
                    self._step.epilogues[task.column](rows, rows)
                maps[s, :, y : y + count] = planes[:, :, :mx].transpose(1, 0, 2, 3)


def _by_frequency(spectra: Complex) -> Complex:
    """Return (S, x, y, z, maps) as a view (x, y, z, S, maps)."""
    return spectra.transpose(1, 2, 3, 0, 4)
