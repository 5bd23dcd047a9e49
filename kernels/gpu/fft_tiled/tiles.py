"""Tiles of the fused tiled FFT: their sizes, how a block takes one, and how many cover a layer. Arithmetic alone.

Mirrors the constants of tile.cuh; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from typing import Literal

from znnpy.shapes import ConvShape, Vec3, ceil_divide, valid

Spectra = Literal["half", "split"]

MAPS = 8  # maps of a spectrum are padded to a multiple of it: 16 real numbers, a step of the tensor cores

# Maps a block takes, its threads, and how many blocks a multiprocessor of sm_90 holds; fewer maps where shared memory
# is smaller. Threads divide the lines of a pass evenly.
_BLOCKS: dict[tuple[Vec3, Spectra], tuple[tuple[int, int, int], ...]] = {
    ((8, 16, 16), "half"): ((8, 256, 4), (4, 128, 4)),
    ((8, 16, 16), "split"): ((4, 256, 4),),
    ((16, 16, 16), "half"): ((8, 256, 3), (4, 256, 2)),
    ((16, 16, 16), "split"): ((4, 256, 3), (2, 256, 2)),
    ((24, 24, 24), "half"): ((4, 288, 2), (2, 288, 1)),
    ((24, 24, 24), "split"): ((2, 288, 2), (1, 288, 1)),
    ((32, 32, 32), "half"): ((2, 512, 1), (1, 512, 1)),
    ((32, 32, 32), "split"): ((1, 512, 1),),
}
TILES: tuple[Vec3, ...] = tuple(dict.fromkeys(tile for tile, _ in _BLOCKS))


@dataclass(frozen=True, slots=True)
class Block:
    """How a block of the transform kernels takes a tile."""

    tile: Vec3
    spectra: Spectra
    maps: int
    threads: int
    per_multiprocessor: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as `Tile::SHARED`."""
        itemsize, banks = (4, 32) if self.spectra == "half" else (8, 16)
        planes = self.tile[0] // 2 * self.tile[1] * (self.tile[2] + 1)
        return self.maps * (-(-planes // banks) * banks + banks // self.maps % banks) * itemsize

    def instance(self, kernel: str, value: str, spectrum: str | None = None) -> str:
        """The C++ name of `forward` or `inverse` for activations of type `value`."""
        stored = spectrum or {"half": "Halves", "split": "Split"}[self.spectra]
        sizes = ", ".join(map(str, (*self.tile, self.maps)))
        return f"{kernel}<{sizes}, {stored}, {value}, {self.threads}, {self.per_multiprocessor}>"


@cache
def block_for(tile: Vec3, spectra: Spectra, shared_bytes: int) -> Block | None:
    """The block with the most maps that `shared_bytes` of shared memory a block allow; None if none does."""
    for maps, threads, per_multiprocessor in _BLOCKS[tile, spectra]:
        block = Block(tile, spectra, maps, threads, per_multiprocessor)
        if block.shared_bytes <= shared_bytes:
            return block
    return None


def frequencies(tile: Vec3) -> int:
    """Complex numbers of a real tile's spectrum that are kept, as `Tile::FREQUENCIES`."""
    z, y, x = tile
    return (z // 2 - 1) * y * x + 2 * y * (x // 2 + 1)


def padded(maps: int) -> int:
    """Maps of a spectrum, those that are zero included."""
    return -(-maps // MAPS) * MAPS


@dataclass(frozen=True, slots=True)
class Cover:
    """The tiles that cover a layer, taken in groups of at most `group`."""

    shape: ConvShape
    tile: Vec3
    group: int

    @property
    def step(self) -> Vec3:
        """Outputs of one tile."""
        return valid(self.tile, self.shape.k)

    @property
    def grid(self) -> Vec3:
        """Tiles of one image."""
        return ceil_divide(self.shape.unpooled, self.step)

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return self.shape.batch * prod(self.grid)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """First tile and number of tiles of each group; as equal as may be."""
        count = -(-self.tiles // self.group)
        bounds = [self.tiles * i // count for i in range(count + 1)]
        return tuple((lo, hi - lo) for lo, hi in pairwise(bounds))

    @property
    def largest_group(self) -> int:
        return max(count for _, count in self.groups)

    def spectrum_bytes(self, maps: int, spectra: Spectra) -> int:
        """Of one group's input or output, for so many maps."""
        return frequencies(self.tile) * self.largest_group * padded(maps) * (4 if spectra == "half" else 8)
