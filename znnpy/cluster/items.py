"""The work items of an output: boxes on a grid, each of which is predicted as a region of the volume by itself."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor, lcm, prod

from znnpy.admissible import admissible
from znnpy.errors import ShapeError
from znnpy.geometry import Geometry
from znnpy.messages import option
from znnpy.network import Network
from znnpy.opened_run import OpenedRun
from znnpy.option_values import Border
from znnpy.patches import Box, Column, Columns, Patch, Piece
from znnpy.shapes import Vec3, add, ceil_divide, multiply, subtract, text
from znnpy.volume import store
from znnpy.volume.chunk_layout import chunk_along
from znnpy.volume.source import Predicted, Source, predicted
from znnpy.volume.store import chunk_of

NOWHERE = (0, 0, 0)
MOST_FACTOR = 1000  # between the sizes of voxels of two outputs
SMALL = 4  # times as small as usual: chunks of work items are not smaller, unless the items are


@dataclass(frozen=True)
class ItemGrid(Columns):
    """The work items of a run, as columns of one step.

    size  voxels (z, y, x) of a work item in the first output; those at the far faces may be smaller
    """

    network: Network
    source: Source
    region: Box  # of the volume that is predicted
    border: Border
    size: Vec3

    @staticmethod
    def of(run: OpenedRun, size: Vec3) -> ItemGrid:
        """Divide the output of a run into items of this size; ShapeError if they hold nothing."""
        if min(size) < 1:
            raise ShapeError(f"work items of {text(size)} voxels hold nothing; give another size in {option('items')}")
        region = Box(NOWHERE, run.volume.size) if run.region is None else run.region
        return ItemGrid(run.trained.network, run.source, region, run.asked.border, size)

    @property
    def counts(self) -> Vec3:
        """Number of items along each axis."""
        return ceil_divide(self.source.output, self.size)

    def _at(self, place: Vec3) -> Column:
        pieces = [Piece(box, box) for box in self.boxes(self._box(place))]
        first, *others = pieces
        return Column((Patch(NOWHERE, first.out, first.write, others=tuple(others)),))

    def box(self, index: int) -> Box:
        """Return the voxels of the first output that an item has."""
        return self[index].steps[0].write

    def region_of(self, index: int) -> Box:
        """Return the region of the volume that is predicted, or with border `valid` read, for an item."""
        _, rows, wide = self.counts
        rest, x = divmod(index, wide)
        z, y = divmod(rest, rows)
        return self._region(self._box((z, y, x)))

    def check(self, *, is_fixed: bool) -> None:
        """Raise ShapeError if an output cannot be divided into these items.

        Chunks of the output must not lie in several items, nor be so small that they are very many. Items must be
        regions of the volume; of outputs finer than the volume, some are none.

        is_fixed  whether the chunks of the format are as they are; else they are fitted to the items
        """
        for have, each, whole in zip(self.size, chunk_of(self.source.output), self.source.output, strict=True):
            if have >= whole:
                continue
            if is_fixed and have % each:
                raise ShapeError(
                    f"work items of {text(self.size)} voxels would cut chunks of the output, which are "
                    f"{text(chunk_of(self.source.output))}; give a multiple of these in {option('items')}"
                )
            chunk = each if is_fixed else chunk_along(whole, have, inside=True)
            if chunk < have and SMALL * chunk < store.CHUNK:
                raise ShapeError(
                    f"work items of {have} voxels along an axis can only have chunks of {chunk}, which would be too "
                    f"many; give a number that one from 24 to 128 divides, such as a multiple of 64, in "
                    f"{option('items')}"
                )
        counts = self.counts
        for axis in range(3):
            for at in range(counts[axis]):
                place = [0, 0, 0]
                place[axis] = at
                box = self._box((place[0], place[1], place[2]))
                found, *others = self.boxes(box)
                if found != box:
                    raise ShapeError(
                        f"work items of {text(self.size)} voxels are no regions of the volume: one of them would have "
                        f"the voxels {found.lo} to {found.hi} in place of {box.lo} to {box.hi}; give another size in "
                        f"{option('items')}"
                    )
                for one, further in zip(others, self.source.outputs[1:], strict=True):
                    if is_fixed and one.lo[axis] % (each := chunk_of(further.size)[axis]):
                        raise ShapeError(
                            f"work items of {text(self.size)} voxels would cut chunks of another output of the "
                            f"network, of {each} voxels: give a name that ends with .zarr in {option('out')}"
                        )

    def boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the voxels of each output that are predicted where a box of the first one is."""
        if self._geometry is None:
            return (box,)
        inside = predicted(self._geometry, self.source.volume.size, self._region(box))
        return tuple(
            one.wanted.shifted(subtract(NOWHERE, whole.wanted.lo))
            for one, whole in zip(inside, self.source.outputs, strict=True)
        )

    @cached_property
    def _geometry(self) -> Geometry | None:
        """The network over the whole volume, where it is computed whole."""
        return admissible(self.network, self.source.volume.size) if self.network.meaning == "whole" else None

    def _box(self, place: Vec3) -> Box:
        lo = multiply(place, self.size)
        return Box(lo, add(lo, self.size)).clipped(Box(NOWHERE, self.source.output))

    def _region(self, box: Box) -> Box:
        source, first = self.source, self.source.outputs[0]
        if self.network.meaning == "windows":
            return box.shifted(first.wanted.lo)
        if self.network.meaning == "whole":
            return _between(box, first, self.region)
        behind = subtract(source.field_of_view, (1, 1, 1)) if self.border == "valid" else NOWHERE
        return Box(add(self.region.lo, box.lo), add(add(self.region.lo, box.hi), behind))


def _between(box: Box, first: Predicted, region: Box) -> Box:
    """Return the region of the volume in which the centres of these voxels lie, and no others."""
    lo, hi = list(region.lo), list(region.hi)
    for axis in range(3):
        for ends, at, is_inner in (
            (lo, box.lo[axis], box.lo[axis] > 0),
            (hi, box.hi[axis], box.hi[axis] < first.size[axis]),
        ):
            if is_inner:
                ends[axis] = floor(first.position[axis] + at * first.step[axis] + 0.5)
    return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))


def unit_of(run: OpenedRun, *, is_fixed: bool) -> Vec3:
    """Return voxels of the first output, of which items have a whole number along each axis: those of a chunk.

    is_fixed  items have whole chunks of all outputs, which are as the format has them
    """
    first, *others = run.source.outputs
    unit = list(chunk_of(first.size))
    for one in others if is_fixed else ():
        for axis, chunk in enumerate(chunk_of(one.size)):
            there = chunk * Fraction(one.step[axis] / first.step[axis]).limit_denominator(MOST_FACTOR)
            unit[axis] = lcm(unit[axis], there.numerator)
    return unit[0], unit[1], unit[2]


def divided(output: Vec3, unit: Vec3, least: int) -> Vec3:
    """Return a size of items of which an output has at least so many, as equal and as nearly cubes as chunks allow.

    unit  voxels of a chunk, of which items have a whole number along each axis

    The size is that of a chunk where even those are fewer.
    """
    counts, size = [1, 1, 1], list(multiply(ceil_divide(output, unit), unit))
    while prod(ceil_divide(output, (size[0], size[1], size[2]))) < least:
        axis = max(range(3), key=lambda one: (size[one] > unit[one], size[one]))
        if size[axis] == unit[axis]:
            break
        counts[axis] += 1
        size[axis] = -(-output[axis] // (counts[axis] * unit[axis])) * unit[axis]
    return size[0], size[1], size[2]
