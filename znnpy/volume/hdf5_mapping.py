"""The positions of the sources of a virtual HDF5 dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import h5py

from znnpy.volume.regions import Region

UNLIMITED = 2**63  # this count or block size, and any larger one, grows with the dataset


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected part of a dataset."""

    box: Region  # smallest box around all of it; around the first block if it grows
    axis: int | None = None  # axis along which it grows with its dataset
    step: int = 0  # distance from one block to the next along that axis
    is_box: bool = True  # everything in the box is selected, also when it grows

    @classmethod
    def of(cls, space: h5py.h5s.SpaceID) -> Selection | None:
        """Return the selection of a dataspace; None if it is all of a dataset whose shape is not stored."""
        kind = space.get_select_type()
        if kind == h5py.h5s.SEL_ALL:
            return cls(Region((0,) * len(space.shape), tuple(space.shape))) if space.shape else None
        if kind == h5py.h5s.SEL_NONE:
            return cls(Region((0,) * len(space.shape), (0,) * len(space.shape)))
        if kind == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
            return cls._of_blocks(*space.get_regular_hyperslab())
        lo, last = space.get_select_bounds()
        box = Region(tuple(map(int, lo)), tuple(int(at) + 1 for at in last))
        return cls(box, is_box=space.get_select_npoints() == box.elements)

    @classmethod
    def _of_blocks(cls, start: Any, stride: Any, count: Any, block: Any) -> Selection:
        """Make the selection of a regular hyperslab, given its start, stride, count and block along each axis."""
        hi, axis = [], None
        for number, (at, step, blocks, size) in enumerate(zip(start, stride, count, block, strict=True)):
            if blocks >= UNLIMITED or size >= UNLIMITED:
                axis = number
                hi.append(at + (1 if size >= UNLIMITED else size))
            else:
                hi.append(at + (blocks - 1) * step + size)
        gaps = (step > size for step, blocks, size in zip(stride, count, block, strict=True) if blocks > 1)
        return cls(Region(tuple(start), tuple(hi)), axis, 0 if axis is None else stride[axis], not any(gaps))


@dataclass(frozen=True, slots=True)
class Mapping:
    """One source of a virtual dataset, or a series of sources: one for each block along an axis."""

    file: str  # name as stored
    dataset: str
    place: Selection  # part of the virtual dataset
    extent: tuple[int, ...]  # shape of the virtual dataset when it was made
    taken: Selection | None  # part of the source; None: the whole source

    @classmethod
    def of(cls, made: h5py.h5p.PropDCID, number: int) -> Mapping:
        """Return mapping number `number` of a virtual dataset."""
        virtual = made.get_virtual_vspace(number)
        place = Selection.of(virtual)
        assert place is not None  # the shape of the virtual dataset is stored
        names = made.get_virtual_filename(number), made.get_virtual_dsetname(number)
        return cls(*names, place, tuple(virtual.shape), Selection.of(made.get_virtual_srcspace(number)))

    @property
    def is_series(self) -> bool:
        """Return whether the names contain %b, the number of a block: there is one source for each, counted from 0."""
        return self.place.axis is not None and "%b" in (self.file + self.dataset).replace("%%", "")

    def names(self, block: int) -> tuple[str, str]:
        """Return the names of the file and the dataset that block number `block` comes from."""
        file, dataset = (
            "%".join(part.replace("%b", str(block)) for part in name.split("%%")) for name in (self.file, self.dataset)
        )
        return file, dataset

    def box(self, block: int, shape: tuple[int, ...], *, rest: bool) -> Region:
        """Return the box of the block in a virtual dataset of this shape; `rest` extends it to the end of the axis."""
        box, axis = self.place.box, self.place.axis
        if axis is None:
            return box
        box = box.shifted([self.place.step * block * (other == axis) for other in range(len(box.lo))])
        if rest or not self.is_series:
            end = max(box.lo[axis], shape[axis])
            box = replace(box, hi=(*box.hi[:axis], end, *box.hi[axis + 1 :]))
        return box

    def of_source(self, part: Region, shape: tuple[int, ...], box: Region) -> Region | None:
        """Return where a part of a source of this shape, which is mapped to `box`, lies; None if it is not one box.

        The part is clipped to what is mapped, and may then be empty.
        """
        if self.taken is not None and len(self.taken.box.lo) != len(shape):
            return None
        taken = Region((0,) * len(shape), shape) if self.taken is None else self.taken.box
        if self.taken is not None and self.taken.axis is not None:
            axis = self.taken.axis
            taken = replace(taken, hi=(*taken.hi[:axis], shape[axis], *taken.hi[axis + 1 :]))
        part = part.clipped(taken)
        if not part.elements:
            return Region(box.lo, box.lo)
        if not self.place.is_box or (self.taken is not None and not self.taken.is_box):
            return None
        there, here = ([axis for axis, size in enumerate(one.shape) if size != 1] for one in (taken, box))
        if [taken.shape[axis] for axis in there] != [box.shape[axis] for axis in here]:
            return None
        lo, hi = list(box.lo), list(box.hi)
        for of_source, axis in zip(there, here, strict=True):
            lo[axis] = box.lo[axis] + part.lo[of_source] - taken.lo[of_source]
            hi[axis] = box.lo[axis] + part.hi[of_source] - taken.lo[of_source]
        return Region(tuple(lo), tuple(hi))

    def fits(self, shape: tuple[int, ...], box: Region) -> bool:
        """Return whether a source of this shape holds everything that is mapped to `box`."""
        if self.taken is None:
            of_box = self.place.is_box and self.place.axis is None
            return not of_box or Region((0,) * len(shape), shape).elements == box.elements
        if len(self.taken.box.lo) != len(shape):
            return False
        return self.taken.axis is not None or all(
            end <= size for end, size in zip(self.taken.box.hi, shape, strict=True)
        )
