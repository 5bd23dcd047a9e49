"""Divide direct convolutions among the multiprocessors of a GPU: the paper's procedures, as arithmetic.

They determine how many products a multiprocessor must do on the data it has while the next data are in flight or, if it
has fewer, how many bytes must be in flight at once. No arrays, no device.

Source  Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 2.2 (requirements
        of a GPU), 3.1 (one input map), 3.2 (many); numbers of steps are the paper's.
Tested  tests/kernels/gpu/block/test_division.py, also for the paper's GTX 1080 Ti
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Literal, NamedTuple

from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.machine import Gpu

WARP = 32


@dataclass(frozen=True, slots=True)
class Card:
    """The properties of a GPU that the procedures use (table 1 of the paper)."""

    latency: float  # cycles from a memory read to its data
    clock: float  # cycles per second
    bandwidth: float  # bytes per second of its memory
    multiprocessors: int
    shared_bytes: int  # shared memory of a multiprocessor
    products: int  # multiply-adds per cycle and multiprocessor

    @property
    def bytes_a_cycle(self) -> int:
        return floor(self.bandwidth / self.clock)

    @property
    def hiding_products(self) -> int:
        """N_FMA: products per multiprocessor and set of data that hide the latency of the next set."""
        return ceil(self.latency * self.products)

    @property
    def hiding_bytes(self) -> int:
        """The bytes that must be in flight at once to keep the memory busy, exactly."""
        return ceil(self.bytes_a_cycle * self.latency)

    @property
    def threads(self) -> int:
        """Threads per multiprocessor, in whole warps, that have `hiding_bytes` in flight at one float32 each."""
        warps = ceil(self.hiding_bytes / (FLOAT32 * WARP))
        return ceil(warps / self.multiprocessors) * WARP

    @property
    def volume(self) -> int:
        """V_s: `hiding_bytes` in whole warps on every multiprocessor."""
        return self.threads * self.multiprocessors * FLOAT32


class _Clocked(NamedTuple):
    latency: float
    clock: float
    products: int


# Latencies of A100, RTX 4090 and H100: Luo et al., Benchmarking and dissecting the Nvidia Hopper GPU architecture via
# microbenchmarking, 2024; RTX 30 is assumed to be like A100 and RTX 50 like RTX 40. Clocks: boost, of A100, RTX 3090,
# RTX 4090, H200 and RTX 5090. A GPU does not report these itself.
_CLOCKED: Mapping[tuple[int, int], _Clocked] = {
    (8, 0): _Clocked(466, 1.41e9, 64),
    (8, 6): _Clocked(466, 1.70e9, 128),
    (8, 9): _Clocked(542, 2.52e9, 128),
    (9, 0): _Clocked(479, 1.98e9, 128),
    (12, 0): _Clocked(542, 2.41e9, 128),
}


def card_of(gpu: Gpu) -> Card:
    """Return `gpu` as the procedures see it; an unknown capability counts as the newest known one."""
    clocked = _CLOCKED.get(gpu.capability, _CLOCKED[max(_CLOCKED)])
    return Card(
        clocked.latency,
        clocked.clock,
        gpu.bandwidth,
        gpu.multiprocessors,
        gpu.shared_multiprocessor_bytes,
        clocked.products,
    )


class Image(NamedTuple):
    """The input, which is cut only between lines: rows of an image, or planes of a volume."""

    lines: int  # W_y
    voxels: int  # voxels of a line, W_x
    halo: int  # lines that adjacent pieces share: K - 1
    maps: int = 1  # 1 in the paper

    @property
    def line_bytes(self) -> int:
        return FLOAT32 * self.maps * self.voxels

    @property
    def nbytes(self) -> int:
        return self.lines * self.line_bytes


class Single(NamedTuple):
    """The division of one input map and its filters."""

    divided: Literal["filters", "image"]  # the part that multiprocessors share; each goes through the other in `pieces`
    pieces: int  # P of the image or Q of the filters
    filters: int  # filters that a multiprocessor applies at a time
    nbytes: int  # bytes of shared memory: D_1 or D_2
    products: int  # products on one piece: Th_1 or Th_2
    hides: bool  # whether they hide fetching the next piece, within shared memory; else `volume` must be in flight


def divide_single(card: Card, image: Image, filters: int, taps: int) -> Single:
    """Divide the filters or the image among multiprocessors, whichever leaves more shared memory free (3.1, step 4).

    Two criteria come first: whether there are filters or lines for all multiprocessors, which is always true for the
    paper's GPU with its 28, and whether they hide the latency of the next data.

    taps  values of one filter: K K for each input map.
    """
    first, second = _among_filters(card, image, filters, taps), _among_images(card, image, filters, taps)
    units = {"filters": min(filters, card.multiprocessors), "image": min(image.lines, card.multiprocessors)}
    return min(second, first, key=lambda found: (-units[found.divided], not found.hides, found.nbytes))


def _among_filters(card: Card, image: Image, filters: int, taps: int) -> Single:
    """Give each multiprocessor some filters and the image in P pieces: formulas 4 to 6."""
    mine = ceil(filters / card.multiprocessors)
    held = FLOAT32 * taps * mine + image.halo * image.line_bytes
    products = taps * mine * image.lines * image.voxels
    pieces = _pieces(card, held, image.nbytes, products, image.lines)
    nbytes = held + ceil(image.nbytes / (pieces or 1))
    return Single("filters", pieces or 1, mine, nbytes, products // (pieces or 1), pieces is not None)


def _among_images(card: Card, image: Image, filters: int, taps: int) -> Single:
    """Give each multiprocessor some lines and the filters in Q pieces: formulas 7 to 9."""
    lines = ceil(image.lines / card.multiprocessors)
    held = (lines + image.halo) * image.line_bytes
    products = taps * filters * lines * image.voxels
    pieces = _pieces(card, held, FLOAT32 * taps * filters, products, filters)
    mine = ceil(filters / (pieces or 1))
    nbytes = held + FLOAT32 * taps * mine
    return Single("image", pieces or 1, mine, nbytes, products // (pieces or 1), pieces is not None)


def _pieces(card: Card, held: int, nbytes: int, products: int, most: int) -> int | None:
    """Return the fewest pieces of `nbytes` that fit (step 2) and have enough products each (step 1), or None."""
    free = card.shared_bytes - held
    if free <= 0:
        return None
    fewest = max(1, ceil(nbytes / free))
    return fewest if fewest <= min(most, products // card.hiding_products) else None


class Multiple(NamedTuple):
    """The numbers of filters that stride-fixed blocks of many input maps may have."""

    fewest: int  # M': enough products while the next data arrive (step 3)
    most: int  # both sets of data fit shared memory (step 4); if less than `fewest`, no number is valid


def divide_multiple(card: Card, taps: int, pixels: int, image_bytes: int) -> Multiple:
    """Return how many filters of `taps` values (S / 4) to apply to `pixels` (W'_x) at a time (3.2).

    image_bytes  bytes that these pixels need: ceil(taps / K) lines (W'_y) of them in the paper.
    """
    fewest = ceil(card.hiding_products / (taps * pixels))
    most = (card.shared_bytes // 2 - image_bytes) // (FLOAT32 * taps)
    return Multiple(fewest, max(0, most))
