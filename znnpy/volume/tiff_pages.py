"""The directories of TIFF and BigTIFF files: what each page is, and where its strips or tiles lie.

Directories are read within bounds, without the library, so that a hostile file costs little. The positions of strips
and tiles stay in the file until voxels are read: those of a large stack would fill the memory.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.shapes import ceil_divide

MOST_PAGES = 10**6
MOST_FIELDS = 4096  # in one directory
MOST_VALUES = 64  # of a field that has one value for each sample
GUESS = 512  # bytes of a directory that are read at first; most have fewer
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
INTEGERS = {1: "u1", 3: "u2", 4: "u4", 6: "i1", 8: "i2", 9: "i4", 13: "u4", 16: "u8", 17: "i8", 18: "u8"}
SUBFILE, WIDTH, LENGTH, BITS, COMPRESSION, PHOTOMETRIC = 254, 256, 257, 258, 259, 262
FILL_ORDER, DESCRIPTION = 266, 270
STRIP_OFFSETS, SAMPLES, ROWS, STRIP_COUNTS, X_RESOLUTION, Y_RESOLUTION, PLANAR = 273, 277, 278, 279, 282, 283, 284
PREDICTOR, TILE_WIDTH, TILE_LENGTH, TILE_OFFSETS, TILE_COUNTS, SAMPLE_FORMAT, TABLES = 317, 322, 323, 324, 325, 339, 347
DEPTH = 32997
BYTES = (8, 16, 32, 64)  # bits of samples that numpy has
FORMATS = {1: "u", 2: "i", 3: "f", 4: "u", 5: "c", 6: "c"}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a directory: its values lie in the file.

    kind   number of their type
    count  of values
    at     byte at which the first one lies
    """

    kind: int
    count: int
    at: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Size, type and packing of pages.

    order    of the bytes, "<" or ">"
    segment  rows and columns of a strip or tile
    planar   whether each sample has strips or tiles of its own
    """

    order: str
    length: int
    width: int
    samples: int
    bits: int
    sample_format: int
    compression: int
    photometric: int
    predictor: int
    fill_order: int
    segment: tuple[int, int]
    is_tiled: bool
    planar: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the samples as it is stored; ValueError for one that numpy does not have."""
        letter = FORMATS.get(self.sample_format)
        if self.bits == 1 and letter == "u":
            return np.dtype(bool)
        if letter == "c":
            return np.dtype(np.complex64)
        if letter is None or self.bits not in BYTES or (letter, self.bits) == ("f", 8):
            raise ValueError(f"it has {self.bits} bits a sample of format {self.sample_format}; store 8, 16 or 32 bits")
        return np.dtype(f"{self.order}{letter}{self.bits // 8}")

    @property
    def picture(self) -> tuple[int, int, int, np.dtype[Any]]:
        """Rows, columns, samples and type: all slices of a volume have them in common."""
        return self.length, self.width, self.samples, self.dtype.newbyteorder("=")

    @property
    def is_plain(self) -> bool:
        """Whether the samples of a segment lie in the file as they are."""
        return self.compression == 1 and self.predictor == 1 and self.fill_order == 1

    @property
    def grid(self) -> tuple[int, int]:
        """The number of segments down and across a page."""
        _, down, across = ceil_divide((1, self.length, self.width), (1, *self.segment))
        return down, across

    @property
    def interleaved(self) -> int:
        """The number of samples of a pixel that lie together."""
        return 1 if self.planar else self.samples

    @property
    def segment_bytes(self) -> int:
        """The bytes of a segment without compression."""
        return self.segment[0] * self.segment[1] * self.interleaved * max(1, self.bits // 8)

    @property
    def page_bytes(self) -> int:
        """The bytes of the samples of a page."""
        return self.length * self.width * self.samples * max(1, self.bits // 8)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a file.

    at       byte of its directory
    offsets  of its segments, and `counts`, their bytes
    tables   that all its JPEG segments share
    shift    bytes between its segments and those that the directory states
    reduced  whether it is a smaller copy of another page
    """

    kind: Kind
    at: int
    offsets: Field
    counts: Field
    tables: Field | None = None
    shift: int = 0
    reduced: bool = False


@dataclass(slots=True)
class Directories:
    """The directories of a file, which stays open as long as they are used."""

    descriptor: int
    order: str = "<"
    is_big: bool = False
    size: int = 0
    pages: list[Page] = field(default_factory=list)
    first: dict[int, Field] = field(default_factory=dict)  # fields of the first page

    @classmethod
    def of(cls, descriptor: int, most: int | None = None) -> Directories:
        """Read the directories of an open file, or the first of them.

        ValueError if they are damaged, or the file is no TIFF.
        """
        head = os.pread(descriptor, 16, 0)
        order = {b"II": "<", b"MM": ">"}.get(head[:2], "")
        version = struct.unpack(f"{order}H", head[2:4])[0] if order and len(head) >= 8 else 0
        if version not in (42, 43) or (version == 43 and len(head) < 16):
            raise ValueError("it does not begin as a TIFF file does")
        found = cls(descriptor, order, version == 43, os.fstat(descriptor).st_size)
        at = struct.unpack(f"{order}Q", head[8:16])[0] if found.is_big else struct.unpack(f"{order}I", head[4:8])[0]
        kinds: dict[Kind, Kind] = {}
        seen = set[int]()
        while at and len(found.pages) != most:
            if at in seen or len(seen) >= MOST_PAGES:
                raise ValueError(f"its pages are a circle, or more than {MOST_PAGES:,}")
            seen.add(at)
            fields, following = found._fields(at)
            found.first = found.first or fields
            found.pages.append(found._page(at, fields, kinds))
            at = following
        if not found.pages:
            raise ValueError("it has no pages")
        return found

    def integers(self, values: Field, first: int, count: int) -> npt.NDArray[np.int64]:
        """Read values `first` to `first + count`; ValueError if they are no integers, or not in the file."""
        if values.kind not in INTEGERS:
            raise ValueError(f"numbers are of type {values.kind}")
        part = Field(values.kind, min(count, values.count - first), values.at + first * SIZES[values.kind])
        found = np.frombuffer(self.content(part), f"{self.order}{INTEGERS[values.kind]}")
        if found.dtype.itemsize == 8 and found.size and not 0 <= int(found.max()) < 2**63:
            raise ValueError("numbers are larger than the file")
        return found.astype(np.int64)

    def content(self, values: Field) -> bytes:
        """Read the bytes of a field's values; ValueError if they are not in the file."""
        nbytes = SIZES.get(values.kind, 1) * values.count
        if not 0 <= values.at <= self.size - nbytes:
            raise ValueError(f"values at byte {values.at:,} lie outside of the file")
        found = os.pread(self.descriptor, nbytes, values.at)
        if len(found) < nbytes:
            raise ValueError(f"values at byte {values.at:,} cannot be read")
        return found

    def ratio(self, tag: int) -> float | None:
        """Return a positive ratio among the fields of the first page; None where there is none."""
        values = self.first.get(tag)
        if values is None or values.kind != 5 or values.count < 1:
            return None
        above, below = struct.unpack(f"{self.order}2I", self.content(Field(values.kind, 1, values.at)))
        return float(above / below) if above and below else None

    def description(self, most: int) -> str:
        """Return the description of the first page; ValueError if it has more than `most` bytes."""
        values = self.first.get(DESCRIPTION)
        if values is None or values.kind not in (1, 2, 7):
            return ""
        if values.count > most:
            raise ValueError(f"its description has {values.count:,} bytes, and up to {most:,} are read")
        return self.content(values).rstrip(b"\0").decode("utf-8", "replace")

    def _fields(self, at: int) -> tuple[dict[int, Field], int]:
        """Read a directory: its fields by their tags, and the byte of the next one, 0 behind the last."""
        head, entry, word = (8, 20, "Q") if self.is_big else (2, 12, "I")
        content = os.pread(self.descriptor, GUESS, at) if at < self.size else b""
        if len(content) < head:
            raise ValueError(f"its page at byte {at:,} lies outside of the file")
        count = struct.unpack_from(f"{self.order}{'Q' if self.is_big else 'H'}", content)[0]
        if not 1 <= count <= MOST_FIELDS:
            raise ValueError(f"its page at byte {at:,} has {count:,} fields")
        nbytes = head + count * entry + struct.calcsize(f"={word}")
        if len(content) < nbytes:
            content = os.pread(self.descriptor, nbytes, at)
        if len(content) < nbytes:
            raise ValueError(f"its page at byte {at:,} is cut short")
        fields = {}
        for number in range(count):
            place = head + number * entry
            tag, kind, many = struct.unpack_from(f"{self.order}2H{word}", content, place)
            inside = place + (12 if self.is_big else 8)
            fits = SIZES.get(kind, 1) * many <= (8 if self.is_big else 4)
            where = at + inside if fits else struct.unpack_from(f"{self.order}{word}", content, inside)[0]
            fields[tag] = Field(kind, many, where)
        return fields, struct.unpack_from(f"{self.order}{word}", content, nbytes - struct.calcsize(f"={word}"))[0]

    def _page(self, at: int, fields: dict[int, Field], kinds: dict[Kind, Kind]) -> Page:
        """Make a page of the fields of a directory; pages of one kind share its object."""

        def number(tag: int, default: int) -> int:
            return int(self.integers(fields[tag], 0, 1)[0]) if tag in fields and fields[tag].count else default

        tiled = TILE_OFFSETS in fields
        offsets, counts = (
            fields.get(tag) for tag in ((TILE_OFFSETS, TILE_COUNTS) if tiled else (STRIP_OFFSETS, STRIP_COUNTS))
        )
        length, width, samples = number(LENGTH, 0), number(WIDTH, 0), number(SAMPLES, 1)
        if min(length, width, samples) < 1 or number(DEPTH, 1) != 1:
            raise ValueError(f"its page at byte {at:,} has {length} rows of {width} pixels of {samples} samples")
        segment = (min(number(ROWS, length), length), width)
        if tiled:
            segment = (number(TILE_LENGTH, 0), number(TILE_WIDTH, 0))
        if min(segment) < 1 or max(segment) >= 2**32 or offsets is None or counts is None:
            raise ValueError(f"its page at byte {at:,} has no strips or tiles")
        bits = {int(n) for n in self.integers(fields[BITS], 0, MOST_VALUES)} if BITS in fields else {1}
        forms = (
            {int(n) for n in self.integers(fields[SAMPLE_FORMAT], 0, MOST_VALUES)} if SAMPLE_FORMAT in fields else {1}
        )
        if len(bits) != 1 or len(forms) != 1:
            raise ValueError(f"its page at byte {at:,} has samples of several types")
        kind = Kind(
            self.order,
            length,
            width,
            samples,
            bits.pop(),
            forms.pop(),
            number(COMPRESSION, 1),
            number(PHOTOMETRIC, 1),
            number(PREDICTOR, 1),
            number(FILL_ORDER, 1),
            segment,
            tiled,
            samples > 1 and number(PLANAR, 1) == 2,
        )
        down, across = kind.grid
        needed = down * across * (samples if kind.planar else 1)
        if min(offsets.count, counts.count) < needed:
            raise ValueError(f"its page at byte {at:,} has {offsets.count:,} strips or tiles of {needed:,}")
        kind = kinds.setdefault(kind, kind)
        return Page(kind, at, offsets, counts, fields.get(TABLES), reduced=bool(number(SUBFILE, 0) & 1))
