"""Describe (transposed) convolutions alike for the unit for bfloat16, and divide their places among threads.

Outputs lie on a grid of places. A tap reads the input at place * stride + its position - lead. A transposed convolution
has a phase for each remainder of its outputs by the stride; the result of a phase at a place is one output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from znnpy.geometry import vector
from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.layers import ONE, ZERO
from znnpy.machine import AMX, AVX512_BF16
from znnpy.shapes import FLOAT16, FLOAT32, ConvShape, Vec3

STEP = 32  # products of a step of the unit, as in bf16_unit.hpp
ROWS = {AMX: 32, AVX512_BF16: 12}  # places of a block
WIDTH = 32  # maps of a block: two panels
STEP_CYCLES = {AMX: 2.0, AVX512_BF16: 16.0}  # of a core, for a step of one place of a block
PACK_CYCLES = {1: 4.0, 2: 12.0, 3: 18.0}  # to pack the words of a step of a voxel
PIECE_CYCLES = 2.0  # to gather neighbours along x for a place
ROW_CYCLES = 150.0  # to begin a packed row: memory is read ahead within rows alone
PLANE_CYCLES = 1000.0  # to begin a plane of a unit
RING_BYTES = 512 * 1024  # of the packed planes of a thread: they stay in L2 beside kernels
MOST_ROWS, MOST_RUN = 32, 128  # places of a unit of work along y and x
MOST_TAPS = 4096  # of a phase, as in bf16_conv.cpp
MOST_SIDES = 16  # as in bf16_conv.hpp
MOST_PLANES = 64  # as in bf16_conv.cpp
FOLD_MAPS = 16  # most maps of an input whose taps are gathered
UNITS_A_THREAD = 4  # units of work for each thread, so that all end at about the same time
LEAST_THICK = 4  # places along z of a unit, for each plane that a place reads


@dataclass(frozen=True, slots=True)
class Phase:
    """The taps of one phase, their places in the kernel, and its outputs."""

    taps: tuple[Vec3, ...]
    kernel: tuple[Vec3, ...]
    at: Vec3 = ZERO  # its output at place 0
    lo: Vec3 = ZERO  # the places whose outputs are wanted
    hi: Vec3 = ZERO


@dataclass(frozen=True)
class Problem:
    """A convolution on a grid of places."""

    fins: tuple[int, ...]
    fout: int
    places: Vec3
    lead: Vec3  # planes of zeros before the input
    held: Vec3  # voxels of the input
    phases: tuple[Phase, ...]
    k: Vec3
    images: int = 1
    stride: Vec3 = ONE
    dilation: Vec3 = ONE
    step: Vec3 = ONE  # outputs from place to place
    pool: Vec3 = ONE  # window of a pooling into fragments

    @cached_property
    def windows(self) -> Vec3:
        """Positions of the window of a pooling; without one, the places."""
        return vector(places - p + 1 for places, p in zip(self.places, self.pool, strict=True))

    @cached_property
    def fin(self) -> int:
        """Maps of all inputs."""
        return sum(self.fins)

    @cached_property
    def reach(self) -> Vec3:
        """The last position of a tap along each axis."""
        taps = [tap for phase in self.phases for tap in phase.taps]
        return vector(max((tap[axis] for tap in taps), default=0) for axis in range(3))

    @cached_property
    def taps(self) -> int:
        """Taps of all phases."""
        return sum(len(phase.taps) for phase in self.phases)

    @cached_property
    def blocks(self) -> int:
        """Blocks of maps of the output: of two panels, and perhaps one of one."""
        return -(-self.fout // WIDTH)

    @cached_property
    def width(self) -> int:
        """Maps of the panels."""
        return 16 * -(-self.fout // 16)

    def sides(self, axis: int) -> tuple[int, ...]:
        """Return the remainders of the taps' positions along an axis by the stride."""
        return tuple(sorted({tap[axis] % self.stride[axis] for phase in self.phases for tap in phase.taps} or {0}))


@lru_cache(maxsize=256)
def problem_of(shape: ConvShape | GraphConvShape | TransposeShape) -> Problem:
    """Return a layer as a problem."""
    if isinstance(shape, TransposeShape):
        return _transposed(shape)
    k = _positions(*map(range, shape.k))
    if isinstance(shape, ConvShape):
        phase = Phase(k, k, hi=shape.unpooled)
        return Problem(
            (shape.fin,), shape.fout, shape.unpooled, ZERO, shape.n, (phase,), shape.k, shape.batch, pool=shape.pool
        )
    taps = tuple(vector(d * times for d, times in zip(tap, shape.dilation, strict=True)) for tap in k)
    return Problem(
        shape.fins, shape.fout, shape.out, shape.before, shape.n, (Phase(taps, k, hi=shape.out),), shape.k,
        stride=shape.stride, dilation=shape.dilation,
    )  # fmt: skip


@lru_cache(maxsize=64)
def remainders(k: int, stride: int, dilation: int) -> tuple[tuple[int, ...], ...]:
    """Return the places of a transposed kernel along an axis that reach outputs of each remainder by the stride."""
    return tuple(tuple(d for d in range(k) if d * dilation % stride == r) for r in range(stride))


def kernel_phases(k: Vec3, stride: Vec3, dilation: Vec3) -> list[tuple[Vec3, ...]]:
    """Return the places of a transposed kernel that each phase sums, in the order of its taps."""
    axes = (remainders(*axis) for axis in zip(k, stride, dilation, strict=True))
    return [_positions(*along) for along in product(*axes)]


def _positions(z: Iterable[int], y: Iterable[int], x: Iterable[int]) -> tuple[Vec3, ...]:
    """Return all positions with these places along each axis."""
    return tuple(product(z, y, x))


def _transposed(shape: TransposeShape) -> Problem:
    """Return a transposed convolution: output j of place q and remainder r is q * stride + r - first.

    It sums the inputs q - e over all places d of the kernel with d * dilation = r + e * stride.
    """
    axes = list(zip(shape.first, shape.stride, strict=True))
    begin = vector(first // stride for first, stride in axes)
    most = vector(
        (k - 1) * dilation // stride for k, dilation, stride in zip(shape.k, shape.dilation, shape.stride, strict=True)
    )
    places = vector(
        (first + m - 1) // stride - there + 1 for (first, stride), m, there in zip(axes, shape.m, begin, strict=True)
    )
    phases = []
    kernels = kernel_phases(shape.k, shape.stride, shape.dilation)
    for r, kernel in zip(product(*map(range, shape.stride)), kernels, strict=True):
        taps = tuple(
            vector(
                reach - d * dilation // stride
                for reach, d, dilation, stride in zip(most, tap, shape.dilation, shape.stride, strict=True)
            )
            for tap in kernel
        )
        at = vector(there * stride + rest - first for (first, stride), there, rest in zip(axes, begin, r, strict=True))
        lo = vector(max(0, -(one // stride)) for one, stride in zip(at, shape.stride, strict=True))
        hi = vector(
            min(count, -(-(m - one) // stride))
            for count, m, one, stride in zip(places, shape.m, at, shape.stride, strict=True)
        )
        phases.append(Phase(taps, kernel, at, lo, hi))
    lead = vector(reach - there for reach, there in zip(most, begin, strict=True))
    return Problem((shape.fin,), shape.fout, places, lead, shape.n, tuple(phases), shape.k, step=shape.stride)


class Division(NamedTuple):
    """The units of work of a problem, and what a thread packs for one."""

    unit: Vec3  # windows along z, y and x
    units: int
    flat: bool  # whether blocks go on from row to row
    fold: bool  # whether the inputs of all taps are gathered place by place
    steps: int  # of a tap
    depth: int  # planes in the ring
    height: int  # rows of a packed lattice
    pitch: int  # voxels of a row
    voxel: int  # bytes of a step of a packed voxel, or of a gathered place
    slot: int  # bytes of a packed plane
    before_pool: int  # bytes of scratch before what a pooling needs
    worker_bytes: int  # scratch of a thread
    multiplied: float  # places times steps, of all blocks and maps
    packed: float  # cycles of packing


def products_of(words: int) -> int:
    """Return how often a value is multiplied that is divided into words."""
    return words * (words + 1) // 2


@lru_cache(maxsize=1024)
def division(problem: Problem, words: int, fold: bool, unit: str, threads: int) -> Division:
    """Return the division that takes the least cycles with its ring in L2; if none has, that of the smallest ring."""
    best: tuple[tuple[bool, float], Division] | None = None
    _, along_y, along_x = problem.windows
    for rows in _sizes(along_y, MOST_ROWS):
        for run in _sizes(along_x, MOST_RUN):
            found = _division(problem, words, fold, unit, threads, rows, run)
            cycles = found.multiplied * products_of(words) * STEP_CYCLES[unit] + found.packed
            large = found.worker_bytes > RING_BYTES
            key = (True, float(found.worker_bytes)) if large else (False, cycles)
            if best is None or key < best[0]:
                best = key, found
    assert best is not None, "there is a size along each axis"
    return best[1]


def _sizes(count: int, most: int) -> list[int]:
    """Return the sizes of equal parts of an axis, at most so large."""
    return sorted({-(-count // parts) for parts in range(-(-count // most), count + 1)})


def folds(problem: Problem, words: int, unit: str) -> bool:
    """Return whether gathering the inputs of all taps takes less time than multiplying the zeros of each tap."""
    fin, taps, (kz, ky, _) = problem.fin, problem.taps, problem.k
    alone = len(problem.phases) == 1 and problem.step == ONE and problem.dilation[2] == 1
    if not alone or fin > FOLD_MAPS or kz > MOST_PLANES or taps == 1:
        return False
    each = products_of(words) * STEP_CYCLES[unit] * problem.width / WIDTH
    steps, gathered = -(-fin // STEP), -(-fin * taps // STEP)
    pieces = kz * ky * PIECE_CYCLES * words * -(-2 * problem.k[2] * fin // STEP)
    return gathered * each + pieces < taps * steps * each


def _division(problem: Problem, words: int, fold: bool, unit: str, threads: int, rows: int, run: int) -> Division:
    """Return the division into units of so many windows along y and x."""
    (sz, sy, sx), (rz, ry, rx), (pz, py, px) = problem.stride, problem.reach, problem.pool
    depth, high, wide = rz + 1, rows + py - 1, run + px - 1  # high, wide: places of a unit
    if fold:
        steps = -(-problem.fin * problem.taps // STEP)
        height, pitch = (high - 1) * sy + ry + 1, (wide - 1) * sx + rx + 1
        voxel, lattices = 2 * words * steps * STEP, 1
        slot, gathered, across = 2 * words * height * pitch * problem.fin, high * wide * voxel, wide
    else:
        steps, height, pitch = -(-problem.fin // STEP), high + ry // sy, wide + rx // sx
        voxel, lattices = 2 * STEP, len(problem.sides(1)) * len(problem.sides(2))
        slot, gathered, across = words * steps * lattices * height * pitch * voxel, 0, pitch
    size = ROWS[unit]
    by_row, flat = high * -(-wide // size), -(-((high - 1) * across + wide) // size)
    blocks = min(by_row, flat)
    planes, along_y, along_x = problem.windows
    columns = problem.images * -(-along_y // rows) * -(-along_x // run)
    parts = min(max(1, -(-UNITS_A_THREAD * threads // columns)), max(1, planes // (LEAST_THICK * depth)))
    thick = -(-planes // parts)
    units = columns * -(-planes // thick)
    computed = columns * (planes + -(-planes // thick) * (pz - 1))
    read = units * depth + (computed - units) * min(sz, depth)  # planes
    if fold:
        pieces = problem.k[0] * problem.k[1] * -(-2 * problem.k[2] * problem.fin // STEP)
        packed = read * height * (pitch * PACK_CYCLES[words] / 4 + ROW_CYCLES)
        packed += computed * high * wide * pieces * PIECE_CYCLES * words
    else:
        packed = read * lattices * height * (pitch * steps * PACK_CYCLES[words] + ROW_CYCLES)
    packed += computed * PLANE_CYCLES
    pooled = (high * wide + pz * rows * run) * problem.fout * (FLOAT16 if words == 1 else FLOAT32)
    before_pool = -(-(depth * slot + gathered + size * voxel + 64) // 64) * 64
    multiplied = float(computed) * blocks * size * steps * (1 if fold else problem.taps) * problem.width / WIDTH
    return Division(
        (thick, rows, run), units, flat < by_row, fold, steps, depth, height, pitch, voxel, slot, before_pool,
        before_pool + (pooled if problem.pool != ONE else 0), multiplied, packed,
    )  # fmt: skip
