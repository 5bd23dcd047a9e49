"""Divide a task-parallel FFT convolution into tasks: blocks of maps, slabs of frequencies, parts of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from znnpy.kernels.aligned import odd_lines
from znnpy.kernels.contract import ALIGNMENT
from znnpy.kernels.cpu.fft import good_size
from znnpy.kernels.cpu.task_graph import Task, TaskGraph
from znnpy.shapes import COMPLEX64, FLOAT32, ConvShape, Vec3

WIDTHS = 16, 32  # maps of a block, or more: fewer fill no vector; more make faster products and fewer tasks
KERNEL_BYTES = 4 * 2**20  # a primary worker's kernels: 0.2 ms to transform, and they stay in the chip's cache
PRODUCT_BYTES = 2 * 2**20  # a worker's product before it is added
LINES_BYTES = 256 * 1024  # a worker's lines in transforms, which stay in L2
TASK_VALUES = 100_000  # values of a task of transforms: small images share one, so that it takes 0.2 ms


class Block(NamedTuple):
    """A block of maps, and the position of the spectra of a batch of them."""

    lo: int  # first map
    width: int  # maps
    row: int  # complex numbers from line y to line y
    image: int  # complex numbers from image to image
    start: int  # position of the first image
    lines: int  # lines y transformed at once


class KernelBytes(NamedTuple):
    """Bytes in a primary worker's buffer, for the largest pair of blocks and the largest slab of kernels."""

    whole: int
    along_xy: int  # kernels of one x, transformed along x and y
    along_x: int  # kernels of one x, transformed along x
    real: int  # kernels of one x, real and imaginary parts separate


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of spectra, tasks and buffers."""

    padded: Vec3  # the transform's size
    half: int  # frequencies along x
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    batch: int
    slabs: tuple[int, int]  # along x, y
    tasks: TaskGraph
    input_bytes: int  # spectra of all input maps
    output_bytes: int
    lines_bytes: int  # per worker, in transforms of input maps
    kernels: KernelBytes
    product_bytes: int  # per worker; 0 if nothing is added
    planes_bytes: int  # per worker, in inverse transforms

    @property
    def kernel_bytes(self) -> int:
        """The size of a primary worker's buffer."""
        return sum(self.kernels)

    def images(self, task: Task) -> range:
        """Return the images that a task computes."""
        parts = self.tasks.products if task.kind == "multiply" else self.tasks.transforms
        return range(self.batch * task.part // parts, self.batch * (task.part + 1) // parts)

    def slab(self, task: Task) -> tuple[slice, slice]:
        """Return the frequencies x, y that a task computes."""
        x, y = divmod(task.slab, self.slabs[1])
        (across, down), gy = self.slabs, self.padded[1]
        return (
            slice(self.half * x // across, self.half * (x + 1) // across),
            slice(gy * y // down, gy * (y + 1) // down),
        )


def sizes(shape: ConvShape, width: int) -> Sizes:
    """Return all sizes. They and the order of sums depend on the shape and the block width, not on the threads."""
    gz, gy, gx = padded = good_size(shape.n[0]), good_size(shape.n[1]), good_size(shape.n[2])
    (kz, ky, _), half, batch = shape.k, gx // 2 + 1, shape.batch
    inputs = _blocks(bounds(shape.fin, width), batch, padded, shape.n)
    outputs = _blocks(bounds(shape.fout, width), batch, padded, shape.out)
    widest_in, widest_out = max(b.width for b in inputs), max(b.width for b in outputs)
    pairs = widest_in * widest_out

    line = COMPLEX64 * gz * pairs
    down = -(-gy // max(1, min(gy, KERNEL_BYTES // line)))
    across = half if down > 1 else -(-half // max(1, min(half, KERNEL_BYTES // (line * gy))))
    slab_x, slab_y = -(-half // across), -(-gy // down)

    product = COMPLEX64 * slab_x * slab_y * gz * widest_out
    products = -(-batch // max(1, min(batch, PRODUCT_BYTES // product)))
    together = max(1, min(batch, TASK_VALUES // (prod(padded) * max(widest_in, widest_out))))
    tasks = TaskGraph(len(inputs), len(outputs), across * down, -(-batch // together), products)
    lines = max(FLOAT32 * b.lines * shape.n[0] * gx * b.width for b in inputs)
    planes = max(FLOAT32 * b.lines * shape.out[0] * gx * b.width for b in outputs)
    return Sizes(
        padded=padded,
        half=half,
        inputs=inputs,
        outputs=outputs,
        batch=batch,
        slabs=(across, down),
        tasks=tasks,
        input_bytes=COMPLEX64 * (inputs[-1].start + batch * inputs[-1].image),
        output_bytes=COMPLEX64 * (outputs[-1].start + batch * outputs[-1].image),
        lines_bytes=_aligned(lines),
        kernels=KernelBytes(
            _aligned(slab_x * slab_y * line),
            _aligned(COMPLEX64 * slab_y * kz * pairs),
            _aligned(COMPLEX64 * ky * kz * pairs),
            _aligned(2 * FLOAT32 * ky * kz * pairs),
        ),
        product_bytes=_aligned(product * -(-batch // products)) if len(inputs) > 1 else 0,
        planes_bytes=_aligned(planes),
    )


def _blocks(maps: Sequence[tuple[int, int]], batch: int, padded: Vec3, n: Vec3) -> tuple[Block, ...]:
    """Return the positions of the spectra of `maps`; n is the size of a map, before or after its transform."""
    gz, gy, gx = padded
    found: list[Block] = []
    start = 0
    for lo, hi in maps:
        width = hi - lo
        row = odd_lines(gz * width)
        image = odd_lines((gx // 2 + 1) * gy * row)
        lines = min(n[1], max(1, LINES_BYTES // (FLOAT32 * n[0] * gx * width)))
        found.append(Block(lo, width, row, image, start, lines))
        start += batch * image
    return tuple(found)


def bounds(maps: int, width: int) -> Sequence[tuple[int, int]]:
    """Return the range of maps of every block of `width` or more.

    All but the last are a multiple of 8 wide: a cache line of complex numbers.
    """
    count, eights = max(1, maps // width), maps // 8
    first = [8 * (eights * i // count) for i in range(count)]
    return list(zip(first, [*first[1:], maps], strict=True))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
