"""The implicit matrix product on tensor cores that read shared memory themselves: warpgroup.cu, for sm_90a."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.gpu.implicit_gemm.lowering import VALID, Lowering, image_step
from znnpy.kernels.gpu.implicit_gemm.tensor import (
    CHUNK,
    MOST_FOLDED,
    PIECE,
    PRECISIONS,
    WORDS,
    TensorWeights,
    chunks_of,
    scale_of,
    whole,
)
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import ACTIVATIONS, FLOAT16, FLOAT32, Precision, Vec3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Gpu

SOURCE = "implicit_gemm/warpgroup.cu"
CAPABILITY = (9, 0)  # the only one with these instructions
THREADS, WARPGROUPS, MATRIX, TILES = 256, 2, 64, 3  # as in warpgroup.cu
RESIDENT = 2  # blocks per multiprocessor: while one writes or waits, the other multiplies
SHARED = 228 * 1024 // RESIDENT - 1024  # bytes per block assumed for estimates of work
RESERVED = 1024  # bytes of shared memory per block for the system
SIZES_BYTES, POINTER, OFFSET_BYTES, ALIGNMENT = 224, 8, 4, 128  # as in warpgroup.cu
VALUE_BYTES = {"fp16": FLOAT16, "tf32": FLOAT32, "fp32": FLOAT32}  # size of an activation
MAPS = tuple(range(16, 129, 16))  # maps of a block
WIDEST_OF_TWO = 80  # maps with which a warpgroup holds two matrices of sums
MOST_WITH_CACHE = 97 * 1024  # bytes of shared memory that leave enough L1 for values loaded through registers
FEWEST_TAPS = 5  # fewest taps of a stage, if there are enough maps
# Taps between two barriers. In fp32 tensor cores add up no more of them, since they truncate sums.
MOST_GROUP = {"fp16": 16, "tf32": 16, "fp32": 5}
SLICE = 32  # cost of a slice of maps besides its products, in maps: assumed
ROWS: tuple[Vec3, ...] = ((0, 1, 0), (0, 0, 8), (1, 0, 0))  # from row to row of 8 voxels of a matrix
# Cycles, fitted to 80 to 80 and 1 to 80 maps on an H200, k = 1 to 9: cost of a matrix besides its products, of a group
# of taps, and of a piece of a region; benchmarks/results/layers_gemm-.. and layers_first-.. keep some of it.
MATRIX_CYCLES = {"fp16": 890, "tf32": 1150, "fp32": 1200}
ROUND_CYCLES = {"fp16": 450, "tf32": 150, "fp32": 1150}
PIECE_CYCLES = {"fp16": 1.4, "tf32": 3.0, "fp32": 0.5}
FOLDED_CYCLES = {"fp16": 2.4, "tf32": 2.8, "fp32": 0.5}
STACK_BYTES, SPILLED_BYTES = 96, 96  # per thread, outside of the loops, besides the partial sums
FLOPS_OF_CYCLE = 2867  # 0.7 of the rate of 64 x N x 16 products in N / 2 cycles, limited by a GPU's power


@dataclass(frozen=True, slots=True)
class Matrix:
    """The kernels as they are multiplied."""

    fin: int
    k: Vec3  # kernel size, in steps if folded
    folded: bool

    @classmethod
    def of(cls, fin: int, k: Vec3) -> Matrix:
        """Return the matrix, folded (2 lines of 8 voxels of a map as 16 maps) if that takes fewer products."""
        kz, ky, kx = k
        plain = cls(fin, k, False)
        folded = cls(fin, (kz, -(-ky // 2), -(-kx // PIECE)), True)
        return folded if fin <= MOST_FOLDED and folded.products < plain.products else plain

    @property
    def chunks(self) -> int:
        """The number of chunks of 16 values along the sums."""
        return self.fin if self.folded else chunks_of(self.fin)

    @property
    def products(self) -> int:
        return self.chunks * prod(self.k)

    @property
    def at_once(self) -> int:
        """The chunks of a stage: as few as possible with FEWEST_TAPS."""
        if self.folded:
            return 1
        stages = -(-self.chunks // -(-FEWEST_TAPS // prod(self.k)))
        return -(-self.chunks // stages)

    @property
    def stages(self) -> int:
        return -(-self.chunks // self.at_once)

    @property
    def steps(self) -> tuple[int, int]:
        """The lines and voxels from one k to the next."""
        return (2, PIECE) if self.folded else (1, 1)

    @property
    def pieces(self) -> int:
        """The pieces per stage and voxel."""
        return self.at_once * (1 if self.folded else 2)


class Plan(NamedTuple):
    """Division of a problem: maps of a block, tile (planes, y, x), row of a matrix, planes of k and taps at once."""

    matrix: Matrix
    maps: int
    tile: Vec3
    row: Vec3
    depth: int
    group: int
    staged: int = 1  # rows of 8 voxels per warp that are written out at once

    @property
    def region_rows(self) -> int:
        _, ky, kx = self.matrix.k
        step_y, step_x = self.matrix.steps
        lines = self.tile[1] + (ky - 1) * step_y + self.matrix.folded
        return (self.tile[0] + self.depth - 1) * lines * (self.tile[2] + (kx - 1) * step_x)

    @property
    def taps(self) -> int:
        """The taps of a stage."""
        return self.matrix.at_once * self.depth * prod(self.matrix.k[1:])

    @property
    def stages(self) -> int:
        return self.matrix.stages * (self.matrix.k[0] // self.depth)

    @property
    def remembers(self) -> bool:
        """Return whether origins of a tile's rows are stored, because stages have the same voxels."""
        return not self.matrix.folded and self.matrix.stages > 1 and self.depth == self.matrix.k[0]

    def shared_bytes(self, precision: Precision) -> int:
        tables = TILES * POINTER * (2 * self.tile[0] + self.matrix.k[0])
        if self.remembers:
            tables += POINTER * self.region_rows
        before = SIZES_BYTES + tables + OFFSET_BYTES * (self.taps + self.region_rows + 3 * 2 * WARPGROUPS)
        rows = 2 * self.matrix.pieces * self.region_rows + 2 * self.group * 2 * self.maps
        factors = WORDS[precision] * rows * PIECE * FLOAT16
        return -(-before // ALIGNMENT) * ALIGNMENT + factors + self.staged * staged_bytes(self.maps, precision)


def staged_bytes(maps: int, precision: Precision) -> int:
    """Return the staging bytes for a row of 8 voxels of every warp."""
    voxel = maps * VALUE_BYTES[precision]
    gap = 0 if voxel % 128 else 16  # otherwise all voxels of a row would be in the same banks
    return THREADS // 32 * 8 * (voxel + gap)


def maps_of(fout: int, precision: Precision) -> int:
    """Return the maps of a block of least cost, which includes padding maps and data loaded again per slice."""
    widest = WIDEST_OF_TWO if WORDS[precision] == 2 else MAPS[-1]
    fitting = [maps for maps in reversed(MAPS) if maps <= widest]
    return min(fitting, key=lambda maps: -(-fout // maps) * (maps + SLICE))


def matrices_of(maps: int, precision: Precision) -> int:
    """Return the matrices of a block, as in warpgroup.cu."""
    return WARPGROUPS * (2 if WORDS[precision] == 1 and maps <= WIDEST_OF_TWO else 1)


def tiles_of(problem: Lowering, images: int, tile: Vec3) -> Vec3:
    """Return the tiles along z of all images, y and x."""
    mz, my, mx = problem.out
    along_z = -(-images * mz // tile[0]) if is_flat(problem) else images * -(-mz // tile[0])
    return along_z, -(-my // tile[1]), -(-mx // tile[2])


def is_flat(problem: Lowering) -> bool:
    """Return whether planes of all images form one row: each output plane depends on one input plane."""
    return problem.k[0] == 1 and problem.sliding.padding[0] == 0


def applies(problem: Lowering, gpu: Gpu) -> bool:
    """Return whether this method computes `problem` on `gpu`."""
    plain = problem.sliding.stride == VALID.stride and problem.activation != "softmax"
    return plain and gpu.capability == CAPABILITY and plan_of(problem, 1, shared_of(gpu)) is not None


def shared_of(gpu: Gpu) -> int:
    """Return the bytes that a block may have."""
    return min(gpu.shared_block_bytes, gpu.shared_multiprocessor_bytes // RESIDENT - RESERVED)


@lru_cache(maxsize=4096)
def plan_of(problem: Lowering, images: int, shared: int) -> Plan | None:
    """Return the plan of least cost; None if no tile with one tap fits `shared` bytes."""
    best, least, (mz, my, mx), flat = None, inf, problem.out, is_flat(problem)
    for plan, each in _cuts(problem.fin, problem.fout, problem.k, problem.precision, shared):
        planes, lines, wide = plan.tile
        if planes > 2 * max(images, mz):
            continue
        along_z = -(-images * mz // planes) if flat else images * -(-mz // planes)
        cost = along_z * -(-my // lines) * -(-mx // wide) * each
        if cost < least:
            best, least = plan, cost
    return best


@lru_cache(maxsize=256)  # images of all sizes have the same plans
def _cuts(fin: int, fout: int, k: Vec3, precision: Precision, shared: int) -> tuple[tuple[Plan, float], ...]:
    """Return all plans that fit `shared` bytes, and the cycles of one tile."""
    matrix, maps, found = Matrix.of(fin, k), maps_of(fout, precision), []
    for row, counts in product(ROWS, _arranged(matrices_of(maps, precision))):
        extent = 7 * row[0] + 1, 7 * row[1] + 1, 64 if row[2] else 8
        tile = counts[0] * extent[0], counts[1] * extent[1], counts[2] * extent[2]
        # One plane of k at once: its kernels have the same order if a stage has one chunk.
        for depth in (matrix.k[0], 1)[: 2 if matrix.at_once == 1 < matrix.k[0] else 1]:
            plan = _grouped(Plan(matrix, maps, tile, row, depth, 1), precision, shared)
            if plan is not None:
                found.append((plan, _tile_cycles(plan, precision)))
    return tuple(found)


def _grouped(plan: Plan, precision: Precision, shared: int) -> Plan | None:
    """Return the plan with as many taps at once as fit, and as many rows staged; None if not one tap fits."""
    taps = WORDS[precision] * 2 * CHUNK * plan.maps * FLOAT16  # bytes of a tap, twice
    most = min(plan.taps, MOST_GROUP[precision], (shared - plan._replace(group=0).shared_bytes(precision)) // taps)
    if most < 1:
        return None
    grouped = plan._replace(group=-(-plan.taps // -(-plan.taps // most)))
    rows = 2 * matrices_of(plan.maps, precision) // WARPGROUPS
    plans = [grouped._replace(staged=staged) for staged in (4, 2) if staged <= rows]
    most = shared if precision == "fp16" else min(shared, MOST_WITH_CACHE)
    return next((plan for plan in plans if plan.shared_bytes(precision) <= most), grouped)


def cycles_of(plan: Plan, problem: Lowering, images: int) -> float:
    """Return the cycles of a multiprocessor for one slice of maps."""
    return prod(tiles_of(problem, images, plan.tile)) * _tile_cycles(plan, problem.precision)


def _tile_cycles(plan: Plan, precision: Precision) -> float:
    """Return the cycles of one tile."""
    matrices, folded = matrices_of(plan.maps, precision), plan.matrix.folded
    products = plan.matrix.products * matrices * (3 if precision == "fp32" else 1) * plan.maps / 2
    pieces = plan.stages * plan.matrix.pieces * plan.region_rows
    rounds = plan.stages * -(-plan.taps // plan.group)
    others = MATRIX_CYCLES[precision] * matrices + ROUND_CYCLES[precision] * rounds
    return products + others + pieces * (FOLDED_CYCLES if folded else PIECE_CYCLES)[precision]


def flops_of(problem: Lowering, images: int, shared: int) -> float:
    """Return the flops that tensor cores could do in the time of the problem."""
    plan = plan_of(problem, images, shared)
    assert plan is not None, "a tile was found"
    return FLOPS_OF_CYCLE * -(-problem.fout // plan.maps) * cycles_of(plan, problem, images)


def _arranged(count: int) -> Iterator[Vec3]:
    """Yield all boxes of so many matrices."""
    for z in (1, 2, 4):
        for y in (1, 2, 4):
            if count % (z * y) == 0:
                yield z, y, count // (z * y)


def instances() -> list[KernelInstance]:
    """Return all kernels: each has its own number of registers."""
    kinds = [(maps, word, folded) for maps, word, folded in product(MAPS, PRECISIONS.values(), (False, True))]
    return [
        KernelInstance(
            SOURCE,
            kernel_of(maps, precision, folded=folded),
            128,
            stack_bytes=STACK_BYTES + (FLOAT32 * maps // 2 if WORDS[precision] == 2 else 0),
            spilled_bytes=SPILLED_BYTES,
        )
        for maps, precision, folded in kinds
        if maps_of(maps, precision) == maps
    ]


def kernel_of(maps: int, precision: Precision, *, folded: bool) -> str:
    """Return the C++ name of the kernel."""
    value = "half" if precision == "fp16" else "float"
    return f"gemm_by_warpgroups<{value}, {WORDS[precision]}, {maps}, {'true' if folded else 'false'}>"


def resident_bytes(fin: int, fout: int, k: Vec3, precision: Precision) -> int:
    """Return the bytes of weights on the device."""
    matrix, maps = Matrix.of(fin, k), maps_of(fout, precision)
    columns, depth = -(-fout // maps) * maps, matrix.stages * matrix.at_once * CHUNK
    return FLOAT16 * WORDS[precision] * columns * depth * prod(matrix.k) + FLOAT32 * columns


def prepare(weights: ConvWeights, precision: Precision, device: Device) -> TensorWeights:
    """Upload weights; `kernels` is [slice][chunk][taps][word][2][map][8]."""
    fout, fin, kz, ky, kx = weights.weight.shape
    matrix, maps = Matrix.of(fin, (kz, ky, kx)), maps_of(fout, precision)
    slices, scale = -(-fout // maps), scale_of(weights.weight)
    if matrix.folded:  # (f', maps, kz, dy of 2, 2, dx of 8, 8) -> a chunk is a map's 2 lines of 8 voxels
        rows, groups = matrix.k[1:]
        padded = np.zeros((slices * maps, fin, kz, 2 * rows, PIECE * groups), np.float32)
        padded[:fout, :, :, :ky, :kx] = scale * weights.weight
        cut = padded.reshape(slices, maps, fin, kz, rows, 2, groups, PIECE).transpose(0, 2, 3, 4, 6, 5, 1, 7)
    else:
        padded = np.zeros((slices * maps, matrix.stages * matrix.at_once * CHUNK, kz, ky, kx), np.float32)
        padded[:fout, :fin] = scale * weights.weight
        cut = padded.reshape(slices, maps, -1, 2, PIECE, kz, ky, kx).transpose(0, 2, 5, 6, 7, 3, 1, 4)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity show in the result
        high = cut.astype(np.float16)
        words = [high, (cut - high).astype(np.float16)][: WORDS[precision]]
    bias = np.pad(weights.bias, (0, slices * maps - fout)).astype(np.float32)
    return TensorWeights(
        device.put(np.ascontiguousarray(np.stack(words, axis=5)), "kernels of gpu.conv.implicit_gemm"),
        device.put(bias, "biases of gpu.conv.implicit_gemm"),
        float(1 / scale),
    )


class WarpgroupProduct:
    """One problem, ready to run on arrays of so many images."""

    def __init__(self, weights: TensorWeights, problem: Lowering, images: int, device: Device) -> None:
        plan = plan_of(problem, images, shared_of(device.gpu))
        assert plan is not None, f"no tile of {problem} fits {shared_of(device.gpu)} bytes of shared memory"
        self._weights, self._problem, self._plan, self._device = weights, problem, plan, device
        name = kernel_of(plan.maps, problem.precision, folded=plan.matrix.folded)
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(self, x: Any, out: Any, before: Any | None, x_peak: int, out_peak: int) -> None:
        """Compute the layer; see DeviceStep."""
        problem, plan = self._problem, self._plan
        matrix, tiles = plan.matrix, tiles_of(problem, len(x), plan.tile)
        flat, old = is_flat(problem), x if before is None else before
        slices = -(-problem.fout // plan.maps)
        at_once = max(1, RESIDENT * self._device.gpu.multiprocessors // slices)
        kx = problem.k[2]
        self._kernel(
            (min(prod(tiles), at_once), slices),
            (THREADS,),
            *(old, image_step(old), x, image_step(x), out, image_step(out)),
            *self._weights,
            *(np.uint64(x_peak), np.uint64(out_peak)),
            *(len(x), problem.n[0] - x.shape[1], *problem.n, problem.fin, *problem.out, problem.fout, *matrix.k),
            *(*problem.sliding.padding, *plan.tile),
            *(tiles[0] if flat else tiles[0] // len(x), *tiles[1:]),
            *(*plan.row, *matrix.steps, plan.depth, matrix.pieces, matrix.at_once, plan.stages, plan.group),
            *(kx if matrix.folded and kx < PIECE else PIECE, int(flat), prod(tiles)),
            *(whole(8, self._device, old, x), plan.staged, whole(16 // out.dtype.itemsize, self._device, out)),
            ACTIVATIONS.index(problem.activation),
            shared=plan.shared_bytes(problem.precision),
        )
