"""Tiles of the fused tiled FFT: their sizes, how they cover a layer, and how blocks take them. Arithmetic alone.

A slab is one row of tiles along z of one image. Tiles are taken in groups: several slabs, or, where one is too large,
some rows of tiles along y of one slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Literal

from znnpy.shapes import ConvShape, Vec3, ceil_divide, valid

Spectra = Literal["half", "split"]

MAPS = 8  # maps of a spectrum are padded to a multiple of it: 16 real numbers, a step of the tensor cores
SIDES_Z = (8, 16, 24, 32)
SIDES = (16, 24, 32)  # along y and x, which are alike
COLUMN_THREADS = 256  # of a block of forward_z and inverse_z
NUMBER = {"half": 4, "split": 8}  # bytes of a complex number


# Of blocks of forward_plane and inverse_plane, by the side of a plane: maps (the first that divides those there are and
# that shared memory allows), threads, and blocks whose registers a multiprocessor must have room for.
PLANE_BLOCKS: dict[tuple[int, Spectra], tuple[tuple[int, int, int], ...]] = {
    (16, "half"): ((16, 128, 5), (8, 128, 5)),
    (24, "half"): ((16, 192, 3), (8, 192, 3)),
    (32, "half"): ((16, 256, 2), (8, 256, 2)),
    (16, "split"): ((16, 128, 5), (8, 128, 5)),
    (24, "split"): ((8, 192, 3),),
    (32, "split"): ((8, 256, 2),),
}


@dataclass(frozen=True, slots=True)
class PlaneBlock:
    """How a block of forward_plane or inverse_plane takes a plane of a tile."""

    side: int
    spectra: Spectra
    maps: int
    threads: int
    per_multiprocessor: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: `Plane::NUMBERS`."""
        return self.side * (self.side + 1) * self.maps * NUMBER[self.spectra]

    def instance(self, kernel: str, stored: str) -> str:
        """The C++ name of `forward_plane` or `inverse_plane`."""
        sizes = f"{self.side}, {self.side}, {self.maps}"
        return f"{kernel}<{sizes}, {stored}, {self.threads}, {self.per_multiprocessor}>"


def plane_block(side: int, spectra: Spectra, maps: int, shared_bytes: int) -> PlaneBlock | None:
    """The first block for `maps` maps, padded, that shared memory allows; None if none does."""
    for count, threads, per_multiprocessor in PLANE_BLOCKS[side, spectra]:
        block = PlaneBlock(side, spectra, count, threads, per_multiprocessor)
        if maps % count == 0 and block.shared_bytes <= shared_bytes:
            return block
    return None


def frequencies(tile: Vec3) -> int:
    """Complex numbers of a real tile's spectrum that are kept."""
    z, y, x = tile
    return (z // 2 - 1) * y * x + 2 * y * (x // 2 + 1)


def padded(maps: int) -> int:
    """Maps of a spectrum, those that are zero included."""
    return -(-maps // MAPS) * MAPS


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles whose spectra there are at a time."""

    first: int  # slab
    slabs: int
    row: int  # of tiles along y
    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        return self.slabs * self.rows * self.columns


@dataclass(frozen=True)
class Cover:
    """The tiles that cover a layer, in groups of about `group` or fewer; at least one row of them along x."""

    shape: ConvShape
    tile: Vec3
    group: int

    @cached_property
    def step(self) -> Vec3:
        """Outputs of one tile."""
        return valid(self.tile, self.shape.k)

    @cached_property
    def grid(self) -> Vec3:
        """Tiles of one image."""
        return ceil_divide(self.shape.unpooled, self.step)

    @cached_property
    def tiles(self) -> int:
        """Of all images."""
        return self.shape.batch * prod(self.grid)

    @cached_property
    def groups(self) -> Sequence[Group]:
        """As equal as may be."""
        z, y, x = self.grid
        slabs = self.shape.batch * z
        if self.group >= y * x:
            return [Group(lo, hi - lo, 0, y, x) for lo, hi in _parts(slabs, max(1, self.group // (y * x)))]
        rows = list(_parts(y, max(1, self.group // x)))
        return [Group(slab, 1, lo, hi - lo, x) for slab in range(slabs) for lo, hi in rows]

    def rows_in(self, group: Group) -> tuple[int, int]:
        """First row along y of the input that a group reads, and how many."""
        first = group.row * self.step[1]
        return first, min(self.shape.n[1] - first, group.rows * self.step[1] + self.shape.k[1] - 1)

    def rows_out(self, group: Group) -> tuple[int, int]:
        """First row along y of the output that a group writes, and how many."""
        first = group.row * self.step[1]
        return first, min(self.shape.unpooled[1] - first, group.rows * self.step[1])

    def bytes_of(self, group: Group, spectra: Spectra) -> tuple[int, int, int, int]:
        """Of what is between the kernels: columns transformed along z, spectra, products, columns of the result."""
        fin, fout = padded(self.shape.fin), padded(self.shape.fout)
        planes = group.slabs * self.tile[0] // 2
        numbers = (
            planes * self.rows_in(group)[1] * self.shape.n[2] * fin,
            frequencies(self.tile) * group.tiles * fin,
            frequencies(self.tile) * group.tiles * fout,
            planes * self.rows_out(group)[1] * self.shape.unpooled[2] * fout,
        )
        a, b, c, d = (count * NUMBER[spectra] for count in numbers)
        return a, b, c, d

    def most_bytes(self, spectra: Spectra) -> tuple[int, int, int, int]:
        """The largest of any group."""
        a, b, c, d = (max(sizes) for sizes in zip(*(self.bytes_of(g, spectra) for g in self.groups), strict=True))
        return a, b, c, d


def _parts(count: int, at_most: int) -> Iterator[tuple[int, int]]:
    """`range(count)` in pieces of at most `at_most`, as equal as may be."""
    pieces = -(-count // at_most)
    return pairwise(count * i // pieces for i in range(pieces + 1))
