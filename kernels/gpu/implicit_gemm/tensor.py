"""The implicit matrix product on tensor cores: tensor.cu, in float16 products of values as one or two words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import floor, inf, log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering, image_step
from znnpy.kernels.gpu.modules import Instance
from znnpy.shapes import ACTIVATIONS, FLOAT16, FLOAT32, Precision, Vec3

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.primitive import ConvWeights

SOURCE = "implicit_gemm/tensor.cu"
WARP = 32
CHUNK, PITCH, TOP = 16, 24, 14  # tensor.cu
SIZES_BYTES, PLANE_BYTES, OFFSET_BYTES, TABLES = 144, 40, 4, 3  # tensor.cu: Sizes, Plane, offsets, TABLES
MOST_SCALE = 100  # of a power of two
WORDS: dict[Precision, int] = {"fp32": 2, "tf32": 1, "fp16": 1}
MOST_GROUP = 12  # taps between two barriers: with more, shared memory serves the region better
PRECISIONS: dict[str, Precision] = {word: word for word in WORDS}
SIDES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADED = 0.25  # what a row of the region costs, in products of a voxel: assumed
READ_CYCLES, PRODUCT_CYCLES = 4.0, 1.6  # of a multiprocessor: 512 bytes, and one product of 16 x 8 x 16: assumed
LARGE = 227 * 2**10  # bytes of shared memory: what work is estimated with
SLICE = 32  # what a slice of maps costs beside its products, in maps: assumed
MOST_REGION = 2**19  # rows: what tensor.cu divides by reciprocals


@dataclass(frozen=True, slots=True)
class Block:
    """What a block multiplies at once."""

    warps: tuple[int, int]  # along voxels, along maps
    matrices: tuple[int, int]  # of a warp: of 16 voxels, of 8 maps

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
        """Blocks that a multiprocessor has registers for, about."""
        return 1 if prod(self.matrices) >= 8 else 2

    @property
    def crowding(self) -> float:
        """Cycles that reading shared memory takes, of those that products take on an H200, where it is the more."""
        along_voxels, along_maps = self.matrices
        reads, products = along_voxels + along_maps / 2, along_voxels * along_maps
        return max(1.0, READ_CYCLES * reads / (PRODUCT_CYCLES * products))

    def kernel(self, precision: Precision) -> str:
        value = "half" if precision == "fp16" else "float"
        return f"gemm<{value}, {WORDS[precision]}, {', '.join(map(str, (*self.warps, *self.matrices)))}>"


BLOCKS = (  # the widest first: of equals it is taken
    *(Block((4, 2), (4, maps)) for maps in (8, 7, 6, 5, 4, 3, 2)),
    *(Block((8, 1), (2, maps)) for maps in (3, 2, 1)),
)
WIDEST = {1: 128, 2: 80}  # maps of a block, by words: what registers hold


def block_of(fout: int, precision: Precision) -> Block:
    """The block that costs least: maps that are not there count, and what is loaded again for every slice."""
    fitting = [block for block in BLOCKS if block.maps <= WIDEST[WORDS[precision]]]
    return min(fitting, key=lambda block: -(-fout // block.maps) * (block.maps + SLICE))


def instances() -> list[Instance]:
    """The narrowest block of each precision, the widest, and that of 80 maps: the registers of 256 threads."""
    wanted = {(maps, precision) for precision in WORDS for maps in (8, 80, WIDEST[WORDS[precision]])}
    blocks = {block.maps: block for block in BLOCKS}
    return [Instance(SOURCE, blocks[maps].kernel(precision), 255) for maps, precision in sorted(wanted)]


class Plan(NamedTuple):
    """How a problem is cut: tile along (planes, y, x), and taps between two barriers."""

    block: Block
    tile: Vec3
    group: int


def region_rows(problem: Lowering, tile: Vec3) -> int:
    """Voxels of x that the windows of a tile meet, for one dz."""
    (_, ky, kx), (_, sy, sx) = problem.k, problem.sliding.stride
    return tile[0] * ((tile[1] - 1) * sy + ky) * ((tile[2] - 1) * sx + kx)


def _shared_bytes(problem: Lowering, block: Block, tile: Vec3, group: int) -> int:
    words = WORDS[problem.precision]
    offsets = -(-problem.k[1] * problem.k[2] // 4) * 4
    rows = words * (region_rows(problem, tile) + group * block.maps)
    planes = TABLES * PLANE_BYTES * (-(-tile[0] // 2) * 2)
    return SIZES_BYTES + planes + OFFSET_BYTES * offsets + 2 * rows * PITCH * FLOAT16


@lru_cache(maxsize=4096)
def plan_of(problem: Lowering, images: int, shared: int) -> Plan | None:
    """The tile that costs least: products of voxels that are not there count, and what is loaded.

    None where no tile and one tap fit `shared` bytes.
    """
    block, (mz, my, mx) = block_of(problem.fout, problem.precision), problem.out
    taps, planes = problem.k[1] * problem.k[2], images * mz
    best, least = None, inf
    for ty, tx in product(SIDES, SIDES):
        if ty * tx > block.voxels or ty >= 2 * my or tx >= 2 * mx:
            continue
        tile = min(block.voxels // (ty * tx), planes), ty, tx
        while tile[0] > 1 and _shared_bytes(problem, block, tile, 1) > shared:
            tile = tile[0] // 2, ty, tx
        rows = region_rows(problem, tile)
        if rows > MOST_REGION or _shared_bytes(problem, block, tile, 1) > shared:
            continue
        tiles = -(-planes // tile[0]) * -(-my // ty) * -(-mx // tx)
        cost = tiles * (taps * block.voxels + LOADED * rows * block.voxels / 16)
        if cost < least:
            best, least = tile, cost
    if best is None:
        return None
    most = min(taps, MOST_GROUP)
    while _shared_bytes(problem, block, best, most) > shared:
        most -= 1
    rounds = -(-taps // most)
    return Plan(block, best, -(-taps // rounds))


def tiles_of(problem: Lowering, images: int, tile: Vec3) -> int:
    mz, my, mx = problem.out
    return -(-images * mz // tile[0]) * -(-my // tile[1]) * -(-mx // tile[2])


def chunks_of(fin: int) -> int:
    return -(-fin // CHUNK)


def resident_bytes(fin: int, fout: int, taps: int, precision: Precision) -> int:
    columns = _columns(fout, precision)
    return FLOAT16 * WORDS[precision] * columns * chunks_of(fin) * CHUNK * taps + FLOAT32 * columns


def _columns(fout: int, precision: Precision) -> int:
    maps = block_of(fout, precision).maps
    return -(-fout // maps) * maps


class TensorWeights(NamedTuple):
    """On the device, but for the last."""

    kernels: Any  # [slice][chunk][dz][(dy, dx)][word][map][CHUNK] float16
    bias: Any  # (slices * maps,) float32
    unscale: float  # what the kernels were multiplied with, inverted


def prepare(weights: ConvWeights, precision: Precision, device: Device) -> TensorWeights:
    fout, fin, kz, ky, kx = weights.weight.shape
    maps, columns, chunks = block_of(fout, precision).maps, _columns(fout, precision), chunks_of(fin)
    padded = np.zeros((columns, chunks * CHUNK, kz, ky * kx), np.float32)
    padded[:fout, :fin] = weights.weight.reshape(fout, fin, kz, ky * kx)
    scale = _scale(weights.weight)
    cut = (scale * padded).reshape(columns // maps, maps, chunks, CHUNK, kz, ky * kx).transpose(0, 2, 4, 5, 1, 3)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not a number shows in the result
        high = cut.astype(np.float16)
        words = [high, (cut - high).astype(np.float16)][: WORDS[precision]]
    bias = np.pad(weights.bias, (0, columns - fout)).astype(np.float32)
    return TensorWeights(
        device.put(np.ascontiguousarray(np.stack(words, axis=4)), "kernels of gpu.conv.implicit_gemm"),
        device.put(bias, "biases of gpu.conv.implicit_gemm"),
        float(1 / scale),
    )


def _scale(weight: npt.NDArray[np.float32]) -> np.float32:
    """A power of two that brings the largest to less than 2^TOP."""
    largest = float(np.abs(weight).max())
    power = TOP - 1 - floor(log2(largest)) if 0 < largest < inf else 0
    return np.float32(2.0 ** max(-MOST_SCALE, min(MOST_SCALE, power)))


class TensorProduct:
    """One problem, ready to run on arrays of so many images."""

    def __init__(self, weights: TensorWeights, problem: Lowering, images: int, device: Device) -> None:
        plan = plan_of(problem, images, device.gpu.shared_block_bytes)
        assert plan is not None, f"no tile of {problem} fits {device.gpu.shared_block_bytes} bytes of shared memory"
        self._weights, self._problem, self._plan, self._device = weights, problem, plan, device
        name = plan.block.kernel(problem.precision)
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(self, x: Any, out: Any, before: Any | None, x_peak: int, out_peak: int) -> None:
        """See DeviceStep."""
        problem, (block, tile, group) = self._problem, self._plan
        old = x if before is None else before
        slices = -(-problem.fout // block.maps)
        at_once = max(1, block.resident * self._device.gpu.multiprocessors // slices)
        self._kernel(
            (min(tiles_of(problem, len(x), tile), at_once), slices),
            (block.threads,),
            *(old, image_step(old), x, image_step(x), out, image_step(out)),
            *self._weights,
            *(np.uint64(x_peak), np.uint64(out_peak)),
            *(len(x), problem.n[0] - x.shape[1], *problem.n, problem.fin, *problem.out, problem.fout, *problem.k),
            *(*problem.sliding.stride, *problem.sliding.padding, *tile, group),
            *(self._whole(8, old, x), self._whole(2, out), ACTIVATIONS.index(problem.activation)),
            shared=_shared_bytes(problem, block, tile, group),
        )

    def _whole(self, maps: int, *arrays: Any) -> int:
        """1 if so many maps of every voxel may be read or written at once: 16 bytes at most."""
        for array in arrays:
            itemsize = array.dtype.itemsize
            width = min(maps * itemsize, 16)
            steps = self._device.address(array), image_step(array) * itemsize, array.shape[-1] * itemsize
            if array.shape[-1] % maps or any(step % width for step in steps):
                return 0
        return 1
