"""Direct convolution on a GPU by the definition: any shape, slow but reliable.

Method   kernel=shared: a block stages the input of a tile of voxels in shared memory, some maps and planes of taps at a
         time; a lane sums four neighbours and up to 16 maps in registers. kernel=plain: a thread computes one voxel,
         all its maps, and reads everything from memory. Both take strides and zero padding. conv_direct.cu.
Memory   None besides kernels, in float32 in every precision.
Bound    Arithmetic: 2 k^3 f f' flops a voxel on float32 units.
Source   First principles, after the post Convolution in CUDA from first principles, which only announces its
         shared-memory version; strides and padding as in Chetlur et al., cuDNN, 2014, 3.
Tested   tests/kernels/gpu/test_conv_direct.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import Footprint, Kind, Variant, Work, as_conv, why_not_on_gpu
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering, image_step
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ACTIVATIONS, FLOAT32, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

SOURCE = "conv_direct.cu"
THREADS, WARP, MOST_WARPS, LANE, HEAD = 128, 32, 6, 4, 32  # as in conv_direct.cu
SUMMED_BYTES = 8  # size of Summed in conv_direct.cu
WIDTHS = (32, 16, 8)  # tile sizes along x
SHARED_BYTES = 40 << 10  # size of the staged input: two blocks fit a multiprocessor of any GPU
LONGEST = 512  # products summed in sequence, if there are more: a float32 sum of 4,000 is wrong by 1e-6
MOST_BYTES = 99 << 10  # per block, available on any GPU
FEW = 4  # input maps staged at a time, at least, if all planes of taps fit with so many
BANKS = 32
STAGED = 8  # products of a lane in the time of staging one input: rough, to choose a tile
PLAIN = 4.0  # slowdown without shared memory, assumed
REGISTERS = {"plain": 128, "shared": 168}


def _group(maps: int) -> int:
    """Return the maps that a thread sums at a time."""
    return next(group for group in (1, 4, 16) if maps <= group or group == 16)


def _padded(maps: int) -> int:
    return -(-maps // _group(maps)) * _group(maps)


def _kernel(kernel: str, itemsize: int, group: int) -> str:
    name = {"plain": "plain", "shared": "tiled"}[kernel]
    return f"{name}<{'half' if itemsize == 2 else 'float'}, {group}>"


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return [
        KernelInstance(SOURCE, _kernel(kernel, itemsize, group), registers)
        for kernel, registers in REGISTERS.items()
        for itemsize in (2, 4)
        for group in (1, 4, 16)
    ]


class Tile(NamedTuple):
    """The work of a block of kernel=shared: its voxels, its maps, and what it stages at a time."""

    size: Vec3  # voxels of the output
    warps_y: int
    warps_maps: int  # warps that share voxels
    warps: int
    planes: int  # planes of taps at a time
    chunk: int  # input maps at a time
    pitch: int  # floats from line to line
    plane: int  # floats from map to map
    split_sums: bool  # whether sums of each staged part are added up in shared memory

    def shared_bytes(self, group: int, *, soft: bool) -> int:
        totals = LANE * group * MOST_WARPS * WARP if self.split_sums else 0
        summed = SUMMED_BYTES * LANE * self.warps * WARP if soft else 0
        return FLOAT32 * (HEAD + -(-self.chunk * self.plane // 2) * 2 + totals) + summed

    def blocks(self, out: Vec3) -> int:
        """Return the blocks of one image."""
        return prod(-(-m // t) for m, t in zip(out, self.size, strict=True))


@lru_cache(maxsize=1024)
def tile_of(problem: Lowering) -> Tile | None:
    """Return the tile with the least work; None if not even one line of taps of one map fits shared memory."""
    groups = _padded(problem.fout) // _group(problem.fout)
    warps_maps = -(-groups // -(-groups // MOST_WARPS))
    warps_voxels = MOST_WARPS // warps_maps
    best, least = None, float("inf")
    for wide in WIDTHS:
        for warps_y in (w for w in range(1, warps_voxels + 1) if warps_voxels % w == 0):
            size = warps_voxels // warps_y, warps_y * (WARP // wide) * LANE, wide
            tile = _staged(problem, size, warps_y, warps_maps)
            if tile is None:
                continue
            inputs = prod((t - 1) * s + k for t, s, k in zip(size, problem.sliding.stride, problem.k, strict=True))
            products = prod(size) * problem.taps * _group(problem.fout) * warps_maps
            work = tile.blocks(problem.out) * (products + STAGED * inputs)
            if work < least:
                best, least = tile, work
    return best


def _staged(problem: Lowering, size: Vec3, warps_y: int, warps_maps: int) -> Tile | None:
    """Choose what to stage at a time for a tile of `size`: all planes of taps if a few maps fit as well."""
    (deep, high, wide), (sz, sy, sx), (kz, ky, kx) = size, problem.sliding.stride, problem.k
    warps = deep * warps_y * warps_maps
    lines, pitch = (high - 1) * sy + ky, _pitch((wide - 1) * sx + kx, wide, sy, sx)
    split_sums = problem.taps * problem.fin > LONGEST
    for planes in range(kz, 0, -1):
        plane = ((deep - 1) * sz + planes) * lines * pitch | 1  # odd, because maps are written side by side
        chunk = min(problem.fin, (SHARED_BYTES // FLOAT32 - HEAD - 1) // plane)
        if split_sums:
            chunk = min(chunk, LONGEST // (planes * ky * kx))
        if chunk >= min(FEW, problem.fin):
            break
    tile = Tile(size, warps_y, warps_maps, warps, planes, max(chunk, 1), pitch, plane, split_sums)
    return tile if tile.shared_bytes(_group(problem.fout), soft=True) <= MOST_BYTES else None


@lru_cache(maxsize=1024)
def _pitch(columns: int, wide: int, step_y: int, step_x: int) -> int:
    """Return the floats from line to line, for lines of `columns`, with the fewest bank conflicts in a warp."""

    def most_in_a_bank(pitch: int) -> int:
        floats = {lane % wide * step_x + lane // wide * LANE * step_y * pitch for lane in range(WARP)}
        return max(Counter(at % BANKS for at in floats).values())

    return min(range(columns, columns + 8), key=most_in_a_bank)


class _Resident(NamedTuple):
    kernels: Any  # (taps, padded f') float32, taps in the order (dz, dy, dx, f)
    bias: Any  # (padded f',) float32


@dataclass(frozen=True, slots=True)
class ConvDirect:
    """Direct convolution: for shapes that no other primitive takes, and as reference for the others."""

    name: str = "gpu.conv.direct"
    kind: Kind = "conv"
    version: int = 2
    summary: str = "any shape, slow but reliable, by the definition: softmax, few maps"
    source: str = "definition; Convolution in CUDA from first principles"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        return why_not_on_gpu(shape, machine)

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return the shared-memory kernel first, if its tile fits."""
        del machine
        plain = Variant.of(kernel="plain")
        return (plain,) if tile_of(Lowering.of(as_conv(shape))) is None else (Variant.of(kernel="shared"), plain)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = as_conv(shape)
        resident = FLOAT32 * _padded(shape.fout) * (prod(shape.k) * shape.fin + 1)
        return Footprint(resident=resident, reads_carried=True, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        problem, voxels, maps = Lowering.of(shape), prod(shape.out_shape[1:4]), _padded(shape.fout)
        held, slower = _group(shape.fout), PLAIN
        if variant.text("kernel") == "shared":
            tile = tile_of(problem)
            assert tile is not None, "was not among the variants"
            held, slower = tile.warps_maps * _group(shape.fout), 1.0
            voxels, maps = tile.blocks(shape.out) * prod(tile.size), -(-maps // held) * held
        rounds = 2 if shape.activation == "softmax" and maps > held else 1
        flops = 2.0 * rounds * shape.batch * voxels * problem.taps * shape.fin * maps
        return (Work("gpu_direct", slower * flops, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> _Resident:
        del variant
        assert weights is not None
        return prepare(weights, device)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> DirectStep:
        return DirectStep(resident, Lowering.of(as_conv(shape)), device, variant.text("kernel"))


def prepare(weights: ConvWeights, device: Device) -> _Resident:
    """Upload kernels and biases in the layout of both kernels."""
    fout = len(weights.bias)
    matrix = weights.weight.transpose(2, 3, 4, 1, 0).reshape(-1, fout)
    more = _padded(fout) - fout
    return _Resident(
        device.put(np.pad(matrix, ((0, 0), (0, more))), "kernels of gpu.conv.direct"),
        device.put(np.pad(weights.bias, (0, more)), "biases of gpu.conv.direct"),
    )


class DirectStep:
    """A DeviceStep for any stride and padding.

    kernel  plain | shared; None: shared if its tile fits.
    """

    def __init__(self, resident: _Resident, problem: Lowering, device: Device, kernel: str | None = None) -> None:
        self._resident, self._problem, self._device = resident, problem, device
        self._tile = None if kernel == "plain" else tile_of(problem)
        assert kernel != "shared" or self._tile is not None, "was not among the variants"
        name = _kernel("plain" if self._tile is None else "shared", problem.itemsize, _group(problem.fout))
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(
        self,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        del scratch, x_peak
        problem, tile, d = self._problem, self._tile, self._device
        old = x if before is None else before
        begins = (d.address(out), out.strides[0], problem.fout * problem.itemsize)
        vectors = all(begin % (4 * problem.itemsize) == 0 for begin in begins)
        arguments = (
            *(old, image_step(old), x, image_step(x), out, image_step(out)),
            *self._resident,
            *(len(x), problem.n[0] - x.shape[1], *problem.n, problem.fin, *problem.out, problem.fout, *problem.k),
            *(*problem.sliding.stride, *problem.sliding.padding),
            *(ACTIVATIONS.index(problem.activation), int(vectors)),
            np.uint64(out_peak),
        )
        if tile is None:
            self._kernel((-(-len(x) * prod(problem.out) // THREADS),), (THREADS,), *arguments)
            return
        soft = problem.activation == "softmax"
        maps = tile.warps_maps * _group(problem.fout)
        self._kernel(
            (len(x) * tile.blocks(problem.out), 1 if soft else -(-problem.fout // maps)),
            (tile.warps * WARP,),
            *arguments,
            *(tile.size[2], tile.warps_y, tile.warps_maps, tile.planes, tile.chunk, tile.pitch, tile.plane),
            int(tile.split_sums),
            shared=tile.shared_bytes(_group(problem.fout), soft=soft),
        )
