"""How direct convolutions are divided among the multiprocessors of a card: the paper's procedures, as arithmetic.

What is asked: how many products a multiprocessor must have to do on what is there while the next data are on their way,
or, where it has not so many, how many bytes must be on their way at once. No arrays, no device.

Source  Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 2.2 (what a card
        needs), 3.1 (one input map), 3.2 (many); numbers of steps are the paper's.
Tested  tests/kernels/gpu/test_block_division.py, on the paper's GTX 1080 Ti too
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
    """What the procedures ask of a card (table 1 of the paper)."""

    latency: float  # cycles until a read of its memory is there
    clock: float  # cycles a second
    bandwidth: float  # bytes a second of its memory
    multiprocessors: int
    shared_bytes: int  # shared memory of a multiprocessor
    products: int  # multiply-adds that a multiprocessor does a cycle

    @property
    def bytes_a_cycle(self) -> int:
        return floor(self.bandwidth / self.clock)

    @property
    def hiding_products(self) -> int:
        """N_FMA: what a multiprocessor must do on one set of data to hide that the next is on its way."""
        return ceil(self.latency * self.products)

    @property
    def hiding_bytes(self) -> int:
        """What must be on its way at once so that the memory never waits, exactly."""
        return ceil(self.bytes_a_cycle * self.latency)

    @property
    def threads(self) -> int:
        """Of a multiprocessor, in whole warps, that each fetch one float32: as many bring `hiding_bytes`."""
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
# microbenchmarking, 2024; RTX 30 as A100 and RTX 50 as RTX 40 are assumed. Clocks: boost, of A100, RTX 3090, RTX 4090,
# H200 and RTX 5090. A card does not say these itself.
_CLOCKED: Mapping[tuple[int, int], _Clocked] = {
    (8, 0): _Clocked(466, 1.41e9, 64),
    (8, 6): _Clocked(466, 1.70e9, 128),
    (8, 9): _Clocked(542, 2.52e9, 128),
    (9, 0): _Clocked(479, 1.98e9, 128),
    (12, 0): _Clocked(542, 2.41e9, 128),
}


def card_of(gpu: Gpu) -> Card:
    """`gpu` as the procedures see it; one of a capability that is not known as the newest that is."""
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
    """What is convolved; cut only between lines: rows of an image, or the planes of a volume."""

    lines: int  # W_y
    voxels: int  # of a line, W_x
    halo: int  # lines that a piece shares with the next: K - 1
    maps: int = 1  # the paper's has one

    @property
    def line_bytes(self) -> int:
        return FLOAT32 * self.maps * self.voxels

    @property
    def nbytes(self) -> int:
        return self.lines * self.line_bytes


class Single(NamedTuple):
    """How one input map and its filters are divided."""

    divided: Literal["filters", "image"]  # among the multiprocessors; each goes through the other in `pieces`
    pieces: int  # P of the image or Q of the filters
    filters: int  # that a multiprocessor applies at a time
    nbytes: int  # of shared memory: D_1 or D_2
    products: int  # on one piece: Th_1 or Th_2
    hides: bool  # they are enough to fetch the next meanwhile, within shared memory; else `volume` has to be on its way


def divide_single(card: Card, image: Image, filters: int, taps: int) -> Single:
    """3.1: the filters or the image among multiprocessors, whichever leaves more shared memory free (step 4).

    Before that counts whether there are filters or lines for all multiprocessors, which the paper's card, with its 28,
    always had, and whether they hide that the next data are on their way.

    taps  values of one filter: K K, of each input map.
    """
    first, second = _among_filters(card, image, filters, taps), _among_images(card, image, filters, taps)
    units = {"filters": min(filters, card.multiprocessors), "image": min(image.lines, card.multiprocessors)}
    return min(second, first, key=lambda found: (-units[found.divided], not found.hides, found.nbytes))


def _among_filters(card: Card, image: Image, filters: int, taps: int) -> Single:
    """Each multiprocessor has some filters and takes the image in P pieces: formulas 4 to 6."""
    mine = ceil(filters / card.multiprocessors)
    held = FLOAT32 * taps * mine + image.halo * image.line_bytes
    products = taps * mine * image.lines * image.voxels
    pieces = _pieces(card, held, image.nbytes, products, image.lines)
    nbytes = held + ceil(image.nbytes / (pieces or 1))
    return Single("filters", pieces or 1, mine, nbytes, products // (pieces or 1), pieces is not None)


def _among_images(card: Card, image: Image, filters: int, taps: int) -> Single:
    """Each multiprocessor has some lines and takes the filters in Q pieces: formulas 7 to 9."""
    lines = ceil(image.lines / card.multiprocessors)
    held = (lines + image.halo) * image.line_bytes
    products = taps * filters * lines * image.voxels
    pieces = _pieces(card, held, FLOAT32 * taps * filters, products, filters)
    mine = ceil(filters / (pieces or 1))
    nbytes = held + FLOAT32 * taps * mine
    return Single("image", pieces or 1, mine, nbytes, products // (pieces or 1), pieces is not None)


def _pieces(card: Card, held: int, nbytes: int, products: int, most: int) -> int | None:
    """Fewest pieces of `nbytes` that fit beside what is held (step 2) and leave enough to do (step 1), or None."""
    room = card.shared_bytes - held
    if room <= 0:
        return None
    fewest = max(1, ceil(nbytes / room))
    return fewest if fewest <= min(most, products // card.hiding_products) else None


class Multiple(NamedTuple):
    """The filters that stride-fixed blocks of many input maps may have."""

    fewest: int  # M': enough to do while the next data come (step 3)
    most: int  # both sets of data fit shared memory (step 4); less than `fewest`: no number does


def divide_multiple(card: Card, taps: int, pixels: int, image_bytes: int) -> Multiple:
    """3.2: how many filters a multiprocessor applies to `pixels` (W'_x) at a time, `taps` values (S / 4) of each.

    image_bytes  of what these pixels need: ceil(taps / K) lines (W'_y) of them in the paper.
    """
    fewest = ceil(card.hiding_products / (taps * pixels))
    most = (card.shared_bytes // 2 - image_bytes) // (FLOAT32 * taps)
    return Multiple(fewest, max(0, most))
