"""Outputs whose voxels lie in one file at addresses that follow from its header: TIFF, NIfTI and MRC.

The file is created once, with its header and at its full size, and closed. From then on its structure never changes:
voxels are written to their addresses with plain system calls. So a killed process, a full disk or a power cut never
leaves a file that does not open, and a resumed run writes the rest.

Planes follow one another, map by map. Each is cut into tiles; a format without tiles has one tile a plane. What is
known of the output is text in the header (JSON), which has the shape and the type of the array too.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import OutputError, ResumeError
from znnpy.files import create_new, is_still, open_regular, reopen, write_all
from znnpy.messages import option
from znnpy.patches import Box
from znnpy.volume.regions import Region
from znnpy.volume.store import OutputArray, Storage, Store, check_filled, check_stored, damaged

RUN_BYTES = 2**20  # written at once where it is contiguous
MOST_ATTRIBUTES = 2**26  # bytes of the text of attributes that are read
SEVERAL = (".h5", ".zarr")  # suffixes of outputs that hold several arrays


@dataclass(frozen=True, slots=True)
class Tiles:
    """The places of the tiles of an array in a file.

    begin  byte of the first one
    size   rows and columns of a tile; those at the far edges are filled up with zeros
    """

    begin: int
    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    dtype: np.dtype[Any]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles down and across a plane."""
        return -(-self.shape[2] // self.size[0]), -(-self.shape[3] // self.size[1])

    @property
    def tile_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind the last tile."""
        return self.begin + self.shape[0] * self.shape[1] * prod(self.grid) * self.tile_bytes

    def address(self, channel: int, z: int, row: int, column: int) -> int:
        """Return the byte at which a tile of a plane begins."""
        down, across = self.grid
        number = ((channel * self.shape[1] + z) * down + row) * across + column
        return self.begin + number * self.tile_bytes


class RawStore(Store):
    """One file with one array, (c, z, y, x)."""

    suffix: ClassVar[str]  # of its names, for messages
    dtypes: ClassVar[tuple[str, ...]]  # of voxels that the format holds

    def __init__(
        self, path: Path, arrays: Sequence[OutputArray], dtype: np.dtype[Any], storage: Storage | None = None
    ) -> None:
        self._path, self._dtype, (array,) = path, dtype, arrays
        self._file = reopen(path)
        try:
            self._tiles = self._checked(array)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def check(cls, dtype: np.dtype[Any], storage: Storage) -> None:
        for asked, word, what in (
            (storage.multiscale, "multiscale", "coarser levels"),
            (storage.sharded, "sharded", "shards"),
        ):
            if asked:
                raise OutputError(
                    f"{cls.suffix} outputs have no {what}; leave out {option(word)}, or give a name that ends with "
                    f".zarr in {option('out')}"
                )
        if dtype.name not in cls.dtypes:
            raise OutputError(
                f"{cls.suffix} outputs hold {' and '.join(cls.dtypes)}, and not {dtype.name}; give "
                f"{option('output_dtype', cls.dtypes[0])}, or another format in {option('out')}"
            )

    @classmethod
    def check_arrays(cls, arrays: Sequence[OutputArray]) -> None:
        if len(arrays) > 1:
            raise OutputError(
                f"the network has {len(arrays)} outputs, and a {cls.suffix} output holds one; give "
                f"{' or '.join(SEVERAL)} in {option('out')}"
            )

    @classmethod
    def create(
        cls,
        path: Path,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        attributes: Mapping[str, Any],
        storage: Storage | None = None,
    ) -> None:
        (array,) = arrays
        text = _text(array, dtype, attributes)
        with create_new(path) as file:
            for part in cls.head(array, dtype, text):
                write_all(file, part)
            os.ftruncate(file.fileno(), cls.tiles(array, dtype, text).end)
            os.fsync(file.fileno())
        cls.say_lost(array)

    @classmethod
    def dataset_of(cls, path: Path, name: str) -> str | None:
        return None

    @classmethod
    def attributes_of(cls, path: Path, name: str = "") -> dict[str, Any]:
        if name:
            return {}
        try:
            with open_regular(path) as file:
                found = from_json(cls.text_of(file))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @classmethod
    @abstractmethod
    def tiles(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Tiles:
        """Return where the tiles lie in a file with this text of attributes."""

    @classmethod
    @abstractmethod
    def head(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Iterator[bytes]:
        """Yield all that lies before the tiles; it depends on nothing else."""

    @classmethod
    @abstractmethod
    def text_of(cls, file: BinaryIO) -> bytes:
        """Return the text of attributes in a file; OSError or ValueError if it has none."""

    @classmethod
    @abstractmethod
    def say_lost(cls, array: OutputArray) -> None:
        """Log what the format cannot hold of the place of the voxels."""

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        check_filled(box, voxels, self._dtype)
        if not voxels.size:
            return
        area = Region(box.lo[1:], box.hi[1:])
        touched = area.in_steps(self._tiles.size)
        for channel, maps in enumerate(voxels):
            for z, plane in enumerate(maps, box.lo[0]):
                for row in range(touched.lo[0], touched.hi[0]):
                    for column in range(touched.lo[1], touched.hi[1]):
                        corner = (row * self._tiles.size[0], column * self._tiles.size[1])
                        end = (corner[0] + self._tiles.size[0], corner[1] + self._tiles.size[1])
                        part = Region(corner, end).clipped(area)
                        inside = part.shifted([-at for at in corner])
                        found = plane[part.shifted([-at for at in area.lo]).slices]
                        self._write_part(self._tiles.address(channel, z, row, column), inside, found, corner[1])

    def read(self, box: Box, number: int = 0) -> npt.NDArray[Any]:
        found = np.empty((self._tiles.shape[0], *box.size), self._dtype)
        height, width = self._tiles.size
        for channel, z, y in product(range(len(found)), range(box.size[0]), range(box.size[1])):
            row, inside = divmod(box.lo[1] + y, height)
            for column in range(box.lo[2] // width, -(-box.hi[2] // width)):
                lo, hi = max(box.lo[2], column * width), min(box.hi[2], (column + 1) * width)
                address = self._tiles.address(channel, box.lo[0] + z, row, column)
                at = address + (inside * width + lo - column * width) * self._dtype.itemsize
                part = os.pread(self._file.fileno(), (hi - lo) * self._dtype.itemsize, at)
                found[channel, z, y, lo - box.lo[2] : hi - box.lo[2]] = np.frombuffer(part, self._dtype)
        return found

    def limit(self, budget: int) -> None:
        """Do nothing: voxels are written as they come."""

    def flush(self, serials: Set[int] | None = None) -> None:
        """Do nothing: voxels are written as they come."""

    def write_coarser(self) -> None:
        """Do nothing: `check` refuses to have coarser levels."""

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def is_still_there(self) -> bool:
        return is_still(self._path, self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write_part(self, address: int, part: Region, voxels: npt.NDArray[Any], first: int) -> None:
        """Write rows and columns of a tile, whose first column is column `first` of the plane.

        Rows that are written as far as the plane goes follow one another, with zeros behind its edge.
        """
        width, item = self._tiles.size[1], self._dtype.itemsize
        used = min(width, self._tiles.shape[3] - first)
        whole = part.shape[1] == used
        rows = max(1, RUN_BYTES // (width * item))
        for begin in range(0, part.shape[0], rows):
            some = voxels[begin : begin + rows]
            if whole and used < width:
                padded = np.zeros((len(some), width), self._dtype)
                padded[:, :used] = some
                some = padded
            content = np.ascontiguousarray(some).data.cast("B")
            at = address + ((part.lo[0] + begin) * width + part.lo[1]) * item
            if whole:
                self._write(content, at)
                continue
            step, descriptor = part.shape[1] * item, self._file.fileno()
            for row in range(len(some)):
                voxel_row = content[row * step : (row + 1) * step]
                count = os.pwrite(descriptor, voxel_row, at)
                if count < step:
                    self._write(voxel_row[count:], at + count)
                at += width * item

    def _write(self, content: memoryview, at: int) -> None:
        while content:
            count = os.pwrite(self._file.fileno(), content, at)
            content, at = content[count:], at + count

    def _checked(self, array: OutputArray) -> Tiles:
        """Return where the tiles lie. OutputError if shape or type differ, ResumeError if the header is not ours."""
        try:
            text = self.text_of(self._file)
            said = from_json(text)["array"]
            check_stored(self._path, tuple(said["shape"]), np.dtype(said["dtype"]), array, self._dtype)
            at = 0
            for part in self.head(array, self._dtype, text):
                if os.pread(self._file.fileno(), len(part), at) != part:
                    raise ValueError(f"its header was changed behind byte {at:,}")
                at += len(part)
            tiles = self.tiles(array, self._dtype, text)
            size = os.fstat(self._file.fileno()).st_size
            if size < tiles.end:
                raise ValueError(f"it has {size:,} bytes of {tiles.end:,}")
        except (OutputError, ResumeError):
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(self._path, error) from error
        return tiles


def padding(nbytes: int, multiple: int) -> bytes:
    """Return the zeros that fill up so many bytes to a multiple."""
    return bytes(-nbytes % multiple)


def _text(array: OutputArray, dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> bytes:
    """Return the attributes of an output as JSON in ASCII."""
    place = {} if array.space is None else array.space.attributes()
    merged = {**attributes, **array.attributes, **place, "array": {"shape": array.shape, "dtype": dtype.name}}
    listed = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in merged.items()}
    return json.dumps(listed).encode("ascii")
