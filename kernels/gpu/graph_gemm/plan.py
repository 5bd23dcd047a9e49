"""Choose how a convolution of a graph is divided for warpgroup.cu: arithmetic on shapes, with costs in cycles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import NamedTuple

from znnpy.graph_shapes import GraphConvShape
from znnpy.layers import ONE
from znnpy.shapes import FLOAT16, FLOAT32, Vec3

ROWS, PIECE, STEP, MULTIPLIERS, MOST_REGIONS, MOST_KEPT = 64, 8, 16, 2, 4, 16  # as in regions.cuh
WARPS = 4 * MULTIPLIERS  # that multiply
HEADER_BYTES, OFFSETS_BYTES, PLACE_BYTES, ALIGNMENT, STAGED_BYTES = 720, 16, 4, 512, 2048  # as in warpgroup.cu
SHARED = 227 * 1024  # bytes of a block: what cards with these instructions have
MULTIPROCESSORS = 132  # of these cards, most of them
STEP_BYTES = STEP * ROWS * FLOAT16
MOST_LINES, MOST_COLUMNS = 1 << 10, 1 << 10  # of a region, as in regions.cuh
LINES = (1, 2, 4)  # voxels of a column
GROUP = 3  # steps between two barriers, of layers that have more than one: a step is a tap for 16 maps
ENOUGH_KEPT = 8  # groups whose kernels are kept before more regions are
MOST_PARTS = 32  # of a sum
# columns of a product, and products of a warpgroup
PRODUCTS: tuple[tuple[int, int], ...] = ((128, 2), (128, 1), (64, 4), (64, 2), (64, 1))
ALONG: tuple[Vec3, ...] = ((0, 1, 0), (0, 0, 8), (1, 0, 0))  # from 8 columns of a product to the next 8
# Cycles: of a product of 64 columns to one of its own arithmetic; of a voxel's two pieces in a region; of 8 columns'
# results; of an item; of a launch; of a value of a part that is added. Bytes that a multiprocessor loads in a cycle.
NARROW, LOAD_CYCLES, STORE_CYCLES, ITEM_CYCLES, LAUNCH_CYCLES, PART_CYCLES = 1.25, 3.0, 110.0, 3000.0, 3500.0, 0.003
LOADED_BYTES, WAIT_CYCLES = 20.0, 3000.0  # the latter: of a region that is waited for
SLOWED = 0.2  # cycles of products that one of loading costs


class Columns(NamedTuple):
    """The layer as the kernel sees it: columns of `lines` voxels, whose kernels are as often shifted along y.

    With few input maps the inputs of `across` taps along x are maps of one voxel.
    """

    lines: int
    across: int
    k: Vec3  # taps of a column
    stride: Vec3  # from column to column
    apart: Vec3  # from tap to tap
    steps: int  # of 16 maps, of a chunk
    m: Vec3  # columns of the output
    pieces: int  # of 8 maps, of all inputs
    blocks: int  # of maps of the output

    @classmethod
    def of(cls, shape: GraphConvShape, lines: int, steps: int) -> Columns:
        (kz, ky, kx), (sz, sy, sx), (_, mz, my, mx, _) = shape.k, shape.stride, shape.out_shape
        across = across_of(shape)
        k = (kz, reach_of(ky, sy, lines), kx // across)
        pieces = sum(-(-maps * across // PIECE) for maps in shape.fins)
        blocks = -(-shape.fout // (ROWS // lines))
        m = mz, -(-my // lines), mx
        return cls(lines, across, k, (sz, sy * lines, sx), shape.dilation, steps, m, pieces, blocks)

    @property
    def chunks(self) -> int:
        return -(-self.pieces // (2 * self.steps))

    @property
    def group(self) -> int:
        """Return the steps between two barriers."""
        return min(prod(self.k) * self.steps, GROUP)

    @property
    def groups(self) -> int:
        return -(-prod(self.k) * self.steps // self.group)


def reach_of(ky: int, stride: int, lines: int) -> int:
    """Return the taps along y of a column of so many lines."""
    return ky + (lines - 1) * stride


@lru_cache(maxsize=4096)
def columns_of(shape: GraphConvShape) -> tuple[Columns, ...]:
    """Return the columns with which the fewest products are needed, and then the fewest rows are empty.

    With chunks of 16 maps and, if no maps are padded for it, of 32: they are loaded faster, but there are fewer to cut
    a sum into parts. Whether a tile fits shared memory does not depend on the size of the input, so all sizes have the
    same columns.
    """
    ky, sy = shape.k[1], shape.stride[1]
    some = [lines for lines in LINES if lines == 1 or (shape.dilation[1] == 1 and ky >= sy)]
    some.sort(key=lambda lines: (-(-shape.fout // (ROWS // lines)) * reach_of(ky, sy, lines) / lines, -lines))
    found = [Columns.of(shape, lines, 1) for lines in some]
    fitting = next((columns for columns in found if _divisions(columns)), found[-1])
    wide = Columns.of(shape, fitting.lines, 2)
    small = shape.stride == ONE and (fitting.lines == 1 or ky == 1)  # two regions have room
    return (fitting, wide) if small and fitting.chunks % 2 == 0 and _divisions(wide) else (fitting,)


def across_of(shape: GraphConvShape) -> int:
    """Return the taps along x that become maps: all of them, if a chunk has room."""
    fits = len(shape.fins) == 1 and not shape.upsampled and shape.fin * shape.k[2] <= STEP
    return shape.k[2] if fits else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A division: columns of a product, products of a warpgroup, tile in columns, and what shared memory holds."""

    columns: Columns
    n: int
    products: int
    along: Vec3
    tile: Vec3
    parts: int = 1
    regions: int = 1
    kept: int = 2

    @property
    def extent(self) -> Vec3:
        """Planes, lines, and voxels of a line of a region: as many for each residue of x modulo the stride."""
        c = self.columns
        z, y, x = (
            (tile - 1) * stride + (k - 1) * apart + 1
            for tile, stride, k, apart in zip(self.tile, c.stride, c.k, c.apart, strict=True)
        )
        return z, y, -(-x // c.stride[2]) * c.stride[2]

    @property
    def tiles(self) -> Vec3:
        z, y, x = (-(-m // tile) for m, tile in zip(self.columns.m, self.tile, strict=True))
        return z, y, x

    @property
    def items(self) -> int:
        return prod(self.tiles) * self.columns.blocks * self.parts

    @property
    def region_bytes(self) -> int:
        """Return the bytes of a buffer for a region."""
        return -(-prod(self.extent) * self.columns.steps * STEP * FLOAT16 // ALIGNMENT) * ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        tables = HEADER_BYTES + OFFSETS_BYTES * self.columns.groups + PLACE_BYTES * prod(self.extent)
        regions = self.regions * self.region_bytes
        kernels = self.kept * self.columns.group * STEP_BYTES
        return -(-tables // ALIGNMENT) * ALIGNMENT + regions + kernels + WARPS * STAGED_BYTES

    @property
    def cycles(self) -> float:
        """Return the cycles of the whole layer on a card with MULTIPROCESSORS."""
        c, rows = self.columns, prod(self.extent)
        multiply = c.groups * c.group * MULTIPLIERS * self.products * self.n / 2 * (NARROW if self.n == 64 else 1.0)
        nbytes = self.region_bytes + c.groups * c.group * STEP_BYTES
        load = max(rows * (c.steps + 1) / 2 * LOAD_CYCLES, nbytes / LOADED_BYTES)
        chunk = max(multiply, load) + load * SLOWED if self.regions > 1 else multiply + load + WAIT_CYCLES
        chunks = -(-c.chunks // self.parts)
        item = chunks * chunk + ITEM_CYCLES + STORE_CYCLES * self.n / 8 * self.products
        rounds = -(-self.items // MULTIPROCESSORS)
        return rounds * item + (LAUNCH_CYCLES if self.parts > 1 else 0.0)


@lru_cache(maxsize=4096)
def plan_of(shape: GraphConvShape, steps: int) -> Plan | None:
    """Return the plan of least cost with chunks of so many 16 maps; None if no tile fits."""
    best, least = None, inf
    columns = next(columns for columns in columns_of(shape) if columns.steps == steps)
    for plan in _divisions(columns):
        most = min(columns.chunks, MOST_PARTS, max(1, 2 * MULTIPROCESSORS // plan.items))
        for parts in range(1, most + 1):
            if parts > 1 and -(-columns.chunks // parts) == -(-columns.chunks // (parts - 1)):
                continue  # no part is shorter
            divided = replace(plan, parts=parts)
            if (cost := cycles_of(shape, divided)) < least:
                best, least = divided, cost
    return best


def cycles_of(shape: GraphConvShape, plan: Plan) -> float:
    """Return the cycles of a layer, with those that add parts."""
    return plan.cycles + (prod(shape.out_shape) * plan.parts * PART_CYCLES if plan.parts > 1 else 0.0)


@lru_cache(maxsize=256)
def _divisions(columns: Columns) -> tuple[Plan, ...]:
    """Return all divisions into tiles that fit shared memory, whole sums each."""
    found = []
    for (n, products), along in product(PRODUCTS, ALONG):
        extent = (n // PIECE - 1) * along[0] + 1, (n // PIECE - 1) * along[1] + 1, n if along[2] else PIECE
        for counts in _boxes(MULTIPLIERS * products):
            tile = counts[0] * extent[0], counts[1] * extent[1], counts[2] * extent[2]
            plan = _with_buffers(Plan(columns, n, products, along, tile))
            if plan is not None:
                found.append(plan)
    return tuple(found)


def _with_buffers(plan: Plan) -> Plan | None:
    """Return the plan with as many buffers as shared memory has room for; None if it has too little."""
    _, lines, width = plan.extent
    apart = abs(plan.along[0] * plan.columns.stride[0] * lines + plan.along[1] * plan.columns.stride[1]) * width
    if lines > MOST_LINES or width > MOST_COLUMNS or apart * 2 * plan.columns.steps >= 1 << 14:
        return None
    region_bytes, group_bytes = plan.region_bytes, plan.columns.group * STEP_BYTES
    for regions in (2, 1):
        filled = replace(plan, regions=regions, kept=2)
        room = SHARED - filled.shared_bytes
        if room < 0:
            continue
        kept = min(ENOUGH_KEPT, 2 + room // group_bytes)
        room -= (kept - 2) * group_bytes
        more = min(MOST_REGIONS - regions, room // region_bytes) if regions > 1 else 0
        kept = min(MOST_KEPT, kept + (room - more * region_bytes) // group_bytes)
        return replace(filled, kept=kept, regions=regions + more)
    return None


def _boxes(count: int) -> Iterator[Vec3]:
    """Yield all boxes of so many products."""
    for z in (1, 2, 4, 8):
        for y in (1, 2, 4, 8):
            if count % (z * y) == 0:
                yield z, y, count // (z * y)


def resident_bytes(columns: Columns) -> int:
    """Return the bytes of weights on the device."""
    maps = columns.blocks * (ROWS // columns.lines)
    return columns.blocks * columns.chunks * columns.groups * columns.group * STEP_BYTES + FLOAT32 * maps
