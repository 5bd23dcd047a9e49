"""The implicit matrix product on tensor cores: products of values stored as one or two float16 words; tensor.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import floor, inf, log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering, image_step
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import ACTIVATIONS, FLOAT16, FLOAT32, Precision, Vec3

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device

SOURCE = "implicit_gemm/tensor.cu"
WARP = 32
CHUNK, PITCH, PIECE, TOP = 16, 24, 8, 14  # as in tensor.cu
MOST_FOLDED = 4  # maps in
SIZES_BYTES, PLANE_BYTES, OFFSET_BYTES, TABLES = 160, 40, 4, 3  # tensor.cu: Sizes, Plane, offsets, TABLES
MOST_SCALE = 100  # exponent of a power of two
WORDS: dict[Precision, int] = {"fp32": 2, "tf32": 1, "fp16": 1}
MOST_GROUP = 12  # taps between two barriers: with more, the region makes better use of shared memory
PRECISIONS: dict[str, Precision] = {word: word for word in WORDS}
SIDES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADED = 2.0  # cost of a row of the region, in products of a voxel: assumed
READ_CYCLES, PRODUCT_CYCLES = 4.0, 1.6  # per multiprocessor: for 512 bytes, and for one product of 16 x 8 x 16; assumed
LARGE = 227 * 2**10  # bytes of shared memory assumed for estimates of work
SLICE = 32  # cost of a slice of maps besides its products, in maps: assumed


@dataclass(frozen=True, slots=True)
class Block:
    """The matrices that a block multiplies at once."""

    warps: tuple[int, int]  # along voxels, along maps
    matrices: tuple[int, int]  # per warp: of 16 voxels, of 8 maps

    @property
    def voxels(self) -> int:
        return 16 * self.warps[0] * self.matrices[0]

    @property
    def maps(self) -> int:
        return 8 * self.warps[1] * self.matrices[1]

    @property
    def threads(self) -> int:
        return WARP * prod(self.warps)

    @property
    def resident(self) -> int:
        """The blocks that share a multiprocessor's registers, as in tensor.cu."""
        return 2 if prod(self.warps) <= 4 or prod(self.matrices) <= 2 else 1

    @property
    def registers(self) -> int:
        """The most registers per thread."""
        return min(255, 65536 // (self.resident * self.threads) // 8 * 8)

    def crowding(self, words: int) -> float:
        """Return the cycles of reading shared memory relative to those of products on an H200, at least 1."""
        along_voxels, along_maps = self.matrices
        reads, products = words * (along_voxels + along_maps / 2), along_voxels * along_maps * (3 if words == 2 else 1)
        return max(1.0, READ_CYCLES * reads / (PRODUCT_CYCLES * products))

    def kernel(self, precision: Precision, *, folded: bool) -> str:
        value = "half" if precision == "fp16" else "float"
        counts = ", ".join(map(str, (*self.warps, *self.matrices)))
        return f"gemm<{value}, {WORDS[precision]}, {counts}, {'true' if folded else 'false'}>"


BLOCKS = (  # widest first, which is chosen among equals
    *(Block((4, 2), (4, maps)) for maps in (8, 7, 6, 5, 4, 3, 2)),
    *(Block((8, 1), (2, maps)) for maps in (3, 2, 1)),
)
FOLDED_BLOCKS = tuple(Block((2, 2), (4, maps)) for maps in (5, 4, 3, 2, 1))  # two resident: one writes
WIDEST = {1: 128, 2: 80}  # most maps of a block by words, limited by registers


def block_of(fout: int, precision: Precision, *, folded: bool) -> Block:
    """Return the block of least cost, which includes padding maps and the data loaded again for every slice."""
    fitting = [block for block in FOLDED_BLOCKS if folded] or [
        block for block in BLOCKS if block.maps <= WIDEST[WORDS[precision]]
    ]
    return min(fitting, key=lambda block: -(-fout // block.maps) * (block.maps + SLICE))


def instances() -> list[KernelInstance]:
    """Return the narrowest block of each precision, the widest, and that of 80 maps: the registers of 256 threads."""
    blocks = {block.maps: block for block in BLOCKS}
    wanted = {(maps, precision) for precision in WORDS for maps in (8, 24, 80, WIDEST[WORDS[precision]])}
    kernels = [(blocks[maps], precision, False) for maps, precision in sorted(wanted)]
    kernels += [(FOLDED_BLOCKS[0], precision, True) for precision in WORDS]
    return [
        KernelInstance(
            SOURCE,
            block.kernel(precision, folded=folded),
            block.registers,
            stack_bytes=4 * FLOAT32 * prod(block.matrices) + 16 if WORDS[precision] == 2 else 0,  # for partial sums
            spilled_bytes=64 if WORDS[precision] == 2 else 0,  # outside of the loops
        )
        for block, precision, folded in kernels
    ]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The kernels as they are multiplied: a column of the lowered matrix is a tap and one of `depth` maps."""

    depth: int
    k: Vec3
    step: int = 1  # lines from one row of k to the next
    groups: int = 1  # groups of 8 voxels along x as maps

    @property
    def products(self) -> int:
        """The number of rows of 16 values."""
        return chunks_of(self.depth) * prod(self.k)


def matrix_of(fin: int, k: Vec3) -> Matrix:
    """Return the matrix unchanged or, if that takes fewer products, folded: voxels along x, and two lines, are maps."""
    kz, ky, kx = k
    groups = -(-kx // PIECE)
    found = [Matrix(fin, k)]
    if fin <= MOST_FOLDED:
        found += [
            Matrix(step * fin * groups * PIECE, (kz, -(-ky // step), 1), step, groups) for step in (1, 2) if step <= ky
        ]
    return min(found, key=lambda matrix: matrix.products)


def is_folded(matrix: Matrix, fin: int) -> bool:
    """Return whether the matrix has voxels along x, or lines, as maps."""
    return matrix.depth != fin


class Plan(NamedTuple):
    """The division of a problem: tile along (planes, y, x), and taps between two barriers."""

    matrix: Matrix
    block: Block
    tile: Vec3
    group: int


def region_rows(matrix: Matrix, stride: Vec3, tile: Vec3) -> int:
    """Return the rows of 16 values in the input region of a tile, for one dz."""
    _, ky, kx = matrix.k
    return tile[0] * ((tile[1] - 1) * stride[1] + (ky - 1) * matrix.step + 1) * ((tile[2] - 1) * stride[2] + kx)


def _shared_bytes(plan: Plan, stride: Vec3, precision: Precision) -> int:
    offsets = -(-plan.matrix.k[1] * plan.matrix.k[2] // 4) * 4
    rows = WORDS[precision] * (region_rows(plan.matrix, stride, plan.tile) + plan.group * plan.block.maps)
    planes = TABLES * PLANE_BYTES * (-(-plan.tile[0] // 2) * 2)
    return SIZES_BYTES + planes + OFFSET_BYTES * offsets + 2 * rows * PITCH * FLOAT16


@lru_cache(maxsize=256)  # for images of all sizes
def _fitting(
    fin: int, fout: int, k: Vec3, precision: Precision, stride: Vec3, shared: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Return tiles along y and x that fit with one tap, with the most planes and the region's rows of one plane."""
    matrix = matrix_of(fin, k)
    block, found = block_of(fout, precision, folded=is_folded(matrix, fin)), []
    for ty, tx in product(SIDES, SIDES):
        depths = range(block.voxels // (ty * tx), 0, -1)
        plans = (Plan(matrix, block, (depth, ty, tx), 1) for depth in depths)
        most = next((plan.tile[0] for plan in plans if _shared_bytes(plan, stride, precision) <= shared), 0)
        if most:
            found.append((ty, tx, most, region_rows(matrix, stride, (1, ty, tx))))
    return tuple(found)


@lru_cache(maxsize=4096)
def plan_of(problem: Lowering, images: int, shared: int) -> Plan | None:
    """Return the plan of least cost, which includes products of padding voxels and the data loaded.

    None if no tile with one tap fits `shared` bytes.
    """
    matrix, (mz, my, mx), stride = matrix_of(problem.fin, problem.k), problem.out, problem.sliding.stride
    block = block_of(problem.fout, problem.precision, folded=is_folded(matrix, problem.fin))
    taps, planes = matrix.k[1] * matrix.k[2], images * mz

    def fits(tile: Vec3, group: int = 1) -> bool:
        return _shared_bytes(Plan(matrix, block, tile, group), stride, problem.precision) <= shared

    best, least = None, inf
    for ty, tx, deepest, rows in _fitting(problem.fin, problem.fout, problem.k, problem.precision, stride, shared):
        if ty >= 2 * my or tx >= 2 * mx:
            continue
        depth = min(block.voxels // (ty * tx), planes)
        while depth > deepest:
            depth //= 2
        tiles = -(-planes // depth) * -(-my // ty) * -(-mx // tx)
        cost = tiles * (block.voxels * taps + LOADED * (depth * rows))
        if cost <= least:  # of two equal ones, take the one that is longer along x
            best, least = (depth, ty, tx), cost
    if best is None:
        return None
    most = min(taps, MOST_GROUP)
    while not fits(best, most):
        most -= 1
    rounds = -(-taps // most)
    return Plan(matrix, block, best, -(-taps // rounds))


def tiles_of(problem: Lowering, images: int, tile: Vec3) -> int:
    """Return the number of tiles of all images."""
    mz, my, mx = problem.out
    return -(-images * mz // tile[0]) * -(-my // tile[1]) * -(-mx // tile[2])


def flops_of(problem: Lowering, images: int, shared: int) -> float:
    """Return the flops of tensor cores, including padding voxels and maps, and waits for shared memory."""
    plan = plan_of(problem, images, shared)
    assert plan is not None, "a tile was found"
    products = tiles_of(problem, images, plan.tile) * plan.block.voxels * CHUNK * plan.matrix.products
    flops = 2.0 * products * columns_of(problem.fout, plan.block) * plan.block.crowding(WORDS[problem.precision])
    return flops * (3 if problem.precision == "fp32" else 1)


def chunks_of(fin: int) -> int:
    """Return the number of chunks of CHUNK maps."""
    return -(-fin // CHUNK)


def resident_bytes(fin: int, fout: int, k: Vec3, precision: Precision) -> int:
    """Return the bytes of weights on the device."""
    matrix = matrix_of(fin, k)
    columns = columns_of(fout, block_of(fout, precision, folded=is_folded(matrix, fin)))
    return FLOAT16 * WORDS[precision] * columns * CHUNK * matrix.products + FLOAT32 * columns


def columns_of(fout: int, block: Block) -> int:
    """Return the output maps, including padding of the last slice."""
    return -(-fout // block.maps) * block.maps


class TensorWeights(NamedTuple):
    """Weights on the device, with their scale."""

    kernels: Any  # [slice][chunk][dz][(dy, dx)][word][map][CHUNK] float16
    bias: Any  # (slices * maps,) float32
    unscale: float  # inverse of the kernels' scale


def prepare(weights: ConvWeights, precision: Precision, device: Device) -> TensorWeights:
    """Upload weights, scaled and split into words, in the layout of `TensorWeights`."""
    fout, fin, *k = weights.weight.shape
    matrix = matrix_of(fin, (k[0], k[1], k[2]))
    block = block_of(fout, precision, folded=is_folded(matrix, fin))
    columns, chunks, scale = columns_of(fout, block), chunks_of(matrix.depth), scale_of(weights.weight)
    padded = np.zeros((columns, chunks * CHUNK, k[0], prod(matrix.k[1:])), np.float32)
    padded[:fout, : matrix.depth] = scale * _folded(weights.weight, matrix)
    cut = padded.reshape(columns // block.maps, block.maps, chunks, CHUNK, *padded.shape[2:])
    cut = cut.transpose(0, 2, 4, 5, 1, 3)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity show in the result
        high = cut.astype(np.float16)
        words = [high, (cut - high).astype(np.float16)][: WORDS[precision]]
    bias = np.pad(weights.bias, (0, columns - fout)).astype(np.float32)
    return TensorWeights(
        device.put(np.ascontiguousarray(np.stack(words, axis=4)), "kernels of gpu.conv.implicit_gemm"),
        device.put(bias, "biases of gpu.conv.implicit_gemm"),
        float(1 / scale),
    )


def _folded(weight: npt.NDArray[np.float32], matrix: Matrix) -> npt.NDArray[np.float32]:
    """Return (f', depth, kz, taps of a plane)."""
    fout, fin, kz, ky, kx = weight.shape
    if not is_folded(matrix, fin):
        return weight.reshape(fout, fin, kz, ky * kx)
    rows, along_x = matrix.k[1], matrix.groups * PIECE
    whole = np.zeros((fout, fin, kz, rows * matrix.step, along_x), np.float32)
    whole[:, :, :, :ky, :kx] = weight
    split = whole.reshape(fout, fin, kz, rows, matrix.step, along_x)
    return split.transpose(0, 4, 1, 5, 2, 3).reshape(fout, matrix.depth, kz, rows)


def scale_of(weight: npt.NDArray[np.float32]) -> np.float32:
    """Return a power of two that scales the largest weight to less than 2^TOP."""
    largest = float(np.abs(weight).max())
    power = TOP - 1 - floor(log2(largest)) if 0 < largest < inf else 0
    return np.float32(2.0 ** max(-MOST_SCALE, min(MOST_SCALE, power)))


class TensorProduct:
    """One problem, ready to run on arrays of so many images."""

    def __init__(self, weights: TensorWeights, problem: Lowering, images: int, device: Device) -> None:
        plan = plan_of(problem, images, device.gpu.shared_block_bytes)
        assert plan is not None, f"no tile of {problem} fits {device.gpu.shared_block_bytes} bytes of shared memory"
        self._weights, self._problem, self._plan, self._device = weights, problem, plan, device
        name = plan.block.kernel(problem.precision, folded=is_folded(plan.matrix, problem.fin))
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(self, x: Any, out: Any, before: Any | None, x_peak: int, out_peak: int) -> None:
        """Compute the layer; see DeviceStep."""
        problem, (matrix, block, tile, group) = self._problem, self._plan
        old = x if before is None else before
        slices = -(-problem.fout // block.maps)
        at_once = max(1, block.resident * self._device.gpu.multiprocessors // slices)
        self._kernel(
            (min(tiles_of(problem, len(x), tile), at_once), slices),
            (block.threads,),
            *(old, image_step(old), x, image_step(x), out, image_step(out)),
            *self._weights,
            *(np.uint64(x_peak), np.uint64(out_peak)),
            *(len(x), problem.n[0] - x.shape[1], *problem.n, matrix.depth, *problem.out, problem.fout, *matrix.k),
            *(*problem.sliding.stride, *problem.sliding.padding, matrix.step, matrix.groups, problem.fin, problem.k[2]),
            *(*tile, group),
            *(whole(8, self._device, old, x), whole(2, self._device, out), ACTIVATIONS.index(problem.activation)),
            shared=_shared_bytes(self._plan, problem.sliding.stride, problem.precision),
        )


def whole(maps: int, device: Device, *arrays: Any) -> int:
    """Return 1 if so many maps of every voxel may be read or written at once (at most 16 bytes), else 0."""
    for array in arrays:
        itemsize = array.dtype.itemsize
        width = min(maps * itemsize, 16)
        steps = device.address(array), image_step(array) * itemsize, array.shape[-1] * itemsize
        if array.shape[-1] % maps or any(step % width for step in steps):
            return 0
    return 1
