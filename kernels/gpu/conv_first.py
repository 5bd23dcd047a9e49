"""Convolution of few input maps on a GPU: the first layer, whose output is many times larger than its input.

Method   A block stages the input of a tile of 192 voxels in shared memory and sums all output maps, up to 80 of them,
         in registers. units=float: on float32 units; units=tensor: in matrix products of tf32, whose rounding tf32 and
         fp16 allow. Kernels are processed in chunks of whole rows of taps, so that any size fits shared memory. If an
         image has too few tiles for the GPU, a block sums fewer maps, according to the paper's division. staging=ahead:
         as in the paper, while one part is multiplied the next is loaded: a plane of the input if all kernels stay in
         shared memory, else a chunk of kernels and its planes. conv_first.cu.
Memory   None besides kernels.
Bound    float: arithmetic from k = 3 on, 2 k^3 f f' flops a voxel; tensor: writing the output up to k = 5.
Source   Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 3.1.
Tested   tests/kernels/gpu/test_conv_first.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.kernels.contract import Footprint, Kind, Variant, Work, as_conv, why_not_on_gpu
from znnpy.kernels.gpu.block.division import Image, card_of, divide_single
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ACTIVATIONS, FLOAT32, Activation, ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Gpu, Machine

SOURCE = "conv_first.cu"
THREADS, TILE, GROUP, HEAD, AT_ONCE = 192, 192, 16, 32, 8  # as in conv_first.cu
WIDTHS = (32, 16, 8)  # tile sizes along x
MOST_GROUPS = 5  # groups of GROUP maps that a block sums
MOST_MAPS = 4  # maps of the input
WIDEST = 11  # kernel along x: the inputs of a row of taps stay in registers
MOST_IMAGES = 65535  # blocks of a grid along z
SHARED_BYTES = 49 << 10  # per block: two fit a multiprocessor of any GPU
RESIDENT = 2  # blocks per multiprocessor
BLOCKS = 16  # blocks per multiprocessor that there should be: limits how many z a block takes
REGISTERS = 168
TENSOR_SPEED = 4.0  # throughput of tensor cores relative to float32 units
AHEAD = ("staging", "ahead")  # value of a variant; without it a chunk is staged, then multiplied
# Cost with staging ahead relative to that without, for flops of taps and for bytes, and flops per output value besides
# its taps: fitted to 1 to 80 maps, k = 2 to 8, on an H200, benchmarks/results/layers_first-..
AHEAD_FLOPS, AHEAD_BYTES, EPILOGUE_FLOPS = 0.45, 0.77, 16


class _Plan(NamedTuple):
    """The division of one layer's kernels."""

    blocks: int  # blocks of maps
    groups: int  # groups of GROUP maps per block
    rows: int  # rows of taps per chunk: (dz, dy)
    chunks: int
    kernel_floats: int  # kernels of a chunk and a block of maps
    planes: int  # most planes of the input that a chunk needs
    units: str
    ahead: bool  # whether the next chunk is staged while one is multiplied

    @property
    def padded(self) -> int:
        return self.blocks * self.groups * GROUP

    @property
    def buffers(self) -> int:
        """Number of buffers of kernels: 1 if there is one chunk, which stays."""
        return 2 if self.ahead and self.chunks > 1 else 1

    @property
    def arriving(self) -> int:
        """Number of planes staged ahead at a time: the next z shares all but one."""
        return self.planes if self.chunks > 1 else 1

    @property
    def slots(self) -> int:
        """Number of planes that fit the tile."""
        return self.planes + self.arriving if self.ahead else self.planes


def _plan(fin: int, fout: int, k: Vec3, units: str, groups: int, *, ahead: bool = False) -> _Plan:
    blocks = -(-fout // (groups * GROUP))
    all_rows, rows, chunks = k[0] * k[1], k[0] * k[1], 1
    while True:
        taps = rows * fin * k[2]
        taps = taps if units == "float" else -(-taps // 8) * 8
        starts = range(0, all_rows, rows)
        planes = max((min(row + rows, all_rows) - 1) // k[1] - row // k[1] + 1 for row in starts)
        plan = _Plan(blocks, groups, rows, len(starts), taps * groups * GROUP, planes, units, ahead)
        if rows == 1 or _fits(plan, fin, k):
            return plan
        while -(-all_rows // chunks) >= rows:
            chunks += 1
        rows = -(-all_rows // chunks)


def _fits(plan: _Plan, fin: int, k: Vec3) -> bool:
    """Return whether shared memory suffices for any tile or, if all kernels stay, for at least one."""
    some = 1 if plan.ahead and plan.chunks == 1 else len(WIDTHS)
    return len(_widths(plan, fin, k)) >= some


def _widths(plan: _Plan, fin: int, k: Vec3) -> list[int]:
    """Return the widths of tiles for which two blocks fit a multiprocessor, and the data in flight fit registers."""

    def held(wide: int) -> int:
        by_cp_async = plan.units == "float" or not plan.ahead
        return 0 if by_cp_async else plan.arriving * fin * (TILE // wide + k[1] - 1) * (wide + k[2] - 1)

    fitting = (wide for wide in WIDTHS if _shared_bytes(plan, fin, k, wide) <= SHARED_BYTES)
    return [wide for wide in fitting if held(wide) <= AT_ONCE * THREADS]


def _plan_of(shape: ConvShape, variant: Variant) -> _Plan:
    units, groups, ahead = variant.text("units"), variant.count("groups"), AHEAD in variant.parameters
    return _plan(shape.fin, shape.fout, shape.k, units, groups, ahead=ahead)


def _comes_ahead(shape: ConvShape, groups: int) -> bool:
    """Return whether there is something to stage while something is multiplied, and space for both."""
    plan = _plan(shape.fin, shape.fout, shape.k, _units(shape), groups, ahead=True)
    return _fits(plan, shape.fin, shape.k) and (plan.chunks > 1 or shape.out[0] > 1)


def _most_groups(fout: int) -> int:
    """Return the most groups of a block, if all blocks have as many."""
    return -(-fout // (-(-fout // (MOST_GROUPS * GROUP)) * GROUP))


def _divided_groups(shape: ConvShape, gpu: Gpu) -> int:
    """Return the groups of a block: the most or, if these blocks do not fill the GPU, the paper's number (3.1)."""
    most, wide, (mz, my, mx) = _most_groups(shape.fout), _wide(shape), shape.out
    tiles = shape.batch * mz * -(-my // (TILE // wide)) * -(-mx // wide)
    if tiles * -(-shape.fout // (most * GROUP)) >= RESIDENT * gpu.multiprocessors:
        return most
    (nz, ny, nx), (kz, ky, _) = shape.n, shape.k
    flat = Image(shape.batch * ny, nx, ky - 1, shape.fin)
    image = flat if nz == 1 else Image(shape.batch * nz, ny * nx, kz - 1, shape.fin)
    divided = divide_single(card_of(gpu), image, shape.fout, prod(shape.k) * shape.fin)
    return min(most, -(-divided.filters // GROUP))


def _shared_bytes(plan: _Plan, fin: int, k: Vec3, wide: int) -> int:
    planes = plan.slots * fin * (TILE // wide + k[1] - 1) * _pitch(wide, k)
    offsets = -(-plan.rows * fin * k[2] // 8) * 8 // 2  # offsets of 2 bytes
    return FLOAT32 * (HEAD + plan.groups * GROUP + planes + plan.buffers * (plan.kernel_floats + offsets))


def _pitch(wide: int, k: Vec3) -> int:
    """Return the floats from one line of the tile to the next: lanes read four at a time."""
    return -(-(wide + k[2] - 1) // 4) * 4


def _wide(shape: ConvShape, plan: _Plan | None = None) -> int:
    """Return the width of the tiles that cover the least, among the widths that fit."""
    _, my, mx = shape.out
    widths = _widths(plan, shape.fin, shape.k) if plan is not None and plan.ahead else WIDTHS
    return min(widths, key=lambda wide: -(-mx // wide) * -(-my // (TILE // wide)))


def _units(shape: LayerShape) -> str:
    """Return the units that compute: fp32 allows no rounding to tf32."""
    return "float" if shape.precision == "fp32" else "tensor"


def _kernel(
    itemsize: int, fin: int, groups: int, kx: int, activation: Activation, *, vectors: bool, ahead: bool
) -> str:
    value = "half" if itemsize == 2 else "float"
    flags = ", ".join(str(flag).lower() for flag in (vectors, ahead))
    return f"first<{value}, {fin}, {groups}, {kx}, {ACTIVATIONS.index(activation)}, {flags}>"


def instances() -> list[KernelInstance]:
    """Return kernels of the benchmarks' first layers, and of the widest."""
    tensor = [(itemsize, fin, 5, 0) for itemsize in (2, 4) for fin in (1, 3)]
    plain = [(4, fin, 5, kx) for fin, kx in ((1, 2), (1, 3), (1, 5), (1, 9), (3, 3))]
    names = []
    for ahead in (False, True):
        names += [_kernel(*sizes, "relu", vectors=True, ahead=ahead) for sizes in (*tensor, *plain)]
        names += [_kernel(4, 1, 1, kx, "none", vectors=False, ahead=ahead) for kx in (0, 3)]
    return [KernelInstance(SOURCE, name, REGISTERS) for name in names]


class _Resident(NamedTuple):
    kernels: Any  # float32, in the plan's layout: conv_first.cu
    bias: Any  # (padded f',) float32


@dataclass(frozen=True, slots=True)
class ConvFirst:
    """Direct convolution of up to 4 input maps."""

    name: str = "gpu.conv.first"
    kind: Kind = "conv"
    version: int = 2
    summary: str = "1 to 4 input maps: all output maps of a tile at once, the input from shared memory"
    source: str = "Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU, 3.1"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_on_gpu(shape, machine, softmax=False):
            return reason
        shape = as_conv(shape)
        if shape.fin > MOST_MAPS:
            return f"takes up to {MOST_MAPS} input maps, not {shape.fin}"
        if shape.k[2] > WIDEST:
            return f"takes kernels up to {WIDEST} along x, not {shape.k[2]}"
        if shape.batch > MOST_IMAGES:
            return f"takes up to {MOST_IMAGES} images, not {shape.batch}"
        assert machine.gpu is not None
        plan = _plan(shape.fin, shape.fout, shape.k, _units(shape), _most_groups(shape.fout))
        needed, there = _shared_bytes(plan, shape.fin, shape.k, _wide(shape)), machine.gpu.shared_block_bytes
        if needed > there:
            return f"one row of its taps needs {needed} bytes of shared memory, and a block has {there}"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        shape = as_conv(shape)
        assert machine.gpu is not None
        choices = dict.fromkeys((_divided_groups(shape, machine.gpu), _most_groups(shape.fout)))
        plain = [Variant.of(groups=groups, units=_units(shape)) for groups in choices]
        ahead = [
            Variant.of(groups=groups, staging=AHEAD[1], units=_units(shape))
            for groups in choices
            if _comes_ahead(shape, groups)
        ]
        return (*plain, *ahead)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = as_conv(shape)
        plan = _plan_of(shape, variant)
        floats = plan.padded * prod(shape.k) * shape.fin
        if variant.text("units") == "tensor":
            floats = plan.blocks * plan.chunks * plan.kernel_floats
        return Footprint(resident=FLOAT32 * (floats + plan.padded), reads_carried=True, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        plan = _plan_of(shape, variant)
        units, wide, (mz, my, mx) = variant.text("units"), _wide(shape, plan), shape.out
        voxels = shape.batch * mz * -(-my // (TILE // wide)) * -(-mx // wide) * TILE
        flops = 2.0 * voxels * prod(shape.k) * shape.fin * plan.padded
        equal = flops if units == "float" else flops / TENSOR_SPEED
        nbytes = shape.in_bytes + shape.out_bytes
        if plan.ahead:
            return (
                Work("gpu_first", AHEAD_FLOPS * equal + EPILOGUE_FLOPS * voxels * plan.padded, AHEAD_BYTES * nbytes),
            )
        return (Work("gpu_first", equal, nbytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> _Resident:
        assert weights is not None
        units, (fout, fin, *k) = variant.text("units"), weights.weight.shape
        ahead = AHEAD in variant.parameters
        plan = _plan(fin, fout, (k[0], k[1], k[2]), units, variant.count("groups"), ahead=ahead)
        more = plan.padded - fout
        taps = np.pad(weights.weight.transpose(2, 3, 1, 4, 0), (*[(0, 0)] * 4, (0, more)))  # (dz, dy, f, dx, maps)
        matrix = taps.reshape(k[0] * k[1], fin * k[2], plan.blocks, plan.groups * GROUP)
        kernels = matrix.transpose(2, 0, 1, 3) if units == "float" else _fragments(matrix, plan)
        return _Resident(
            device.put(np.ascontiguousarray(kernels), "kernels of gpu.conv.first"),
            device.put(np.pad(weights.bias, (0, more)), "biases of gpu.conv.first"),
        )

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        return _Step(resident, as_conv(shape), variant, device)


def _fragments(matrix: npt.NDArray[np.float32], plan: _Plan) -> npt.NDArray[np.float32]:
    """Arrange rows of taps (rows, f * kx, blocks, maps) for tensor cores: conv_first.cu, "tensor"."""
    rows, taps, blocks, maps = matrix.shape
    eights = plan.kernel_floats // maps // 8
    chunks = np.zeros((plan.chunks, eights * 8, blocks, maps), np.float32)
    for chunk in range(plan.chunks):
        part = matrix[chunk * plan.rows : (chunk + 1) * plan.rows]
        chunks[chunk, : len(part) * taps] = part.reshape(-1, blocks, maps)
    assert plan.chunks * plan.rows >= rows
    # Taps are 4 h + t of an eight; maps 4 c + 2 i + b of a group, lane 4 (2 c + b) + t, word 2 i + h.
    split = chunks.reshape(plan.chunks, eights, 2, 4, blocks, plan.groups, 4, 2, 2)
    ordered = split.transpose(4, 0, 1, 5, 6, 8, 3, 7, 2)
    bits = np.ascontiguousarray(ordered).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)  # rounded to the nearest tf32


class _Step:
    def __init__(self, resident: _Resident, shape: ConvShape, variant: Variant, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._plan = plan = _plan_of(shape, variant)
        self._wide = _wide(shape, plan)
        kx = 0 if variant.text("units") == "tensor" else shape.k[2]
        sizes = (shape.itemsize, shape.fin, plan.groups, kx, shape.activation)
        names = [_kernel(*sizes, vectors=vectors, ahead=plan.ahead) for vectors in (False, True)]
        compiled = device.kernels(SOURCE, names)
        self._kernels = [compiled[name] for name in names]

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
        shape, plan, wide, itemsize = self._shape, self._plan, self._wide, self._shape.itemsize
        (mz, my, mx), (kz, ky, kx), d = shape.out, shape.k, self._device
        old = x if before is None else before
        begins = (d.address(out), out.strides[0], shape.fout * itemsize)
        kernel = self._kernels[all(begin % (4 * itemsize) == 0 for begin in begins)]
        tiles_y, tiles_x = -(-my // (TILE // wide)), -(-mx // wide)
        columns = tiles_y * tiles_x * plan.blocks * len(x)
        parts = -(-BLOCKS * d.gpu.multiprocessors // columns) if plan.chunks == 1 or plan.ahead else mz
        steps = -(-mz // min(parts, mz))
        kernel(
            (tiles_y * tiles_x * -(-mz // steps), plan.blocks, len(x)),
            (THREADS,),
            *(old, old.strides[0] // itemsize, x, x.strides[0] // itemsize, out, out.strides[0] // itemsize),
            *self._resident,
            *(shape.n[0] - x.shape[1], *shape.n[1:], mz, my, mx, shape.fout, kz, ky, kx),
            *(plan.rows, wide, plan.planes, plan.slots, _pitch(wide, shape.k), plan.kernel_floats, tiles_y, steps),
            np.uint64(out_peak),
            shared=_shared_bytes(plan, shape.fin, shape.k, wide),
        )
