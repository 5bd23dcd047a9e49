"""The header of NRRD files: lines of text, read within bounds. NRRD without compression, and with gzip."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import isfinite
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from znnpy.messages import excerpt
from znnpy.volume.lengths import length_unit
from znnpy.volume.space import Space

MOST_BYTES = 2**20  # of a header
MOST_AXES = 16
MAGIC = re.compile(r"NRRD000[1-5]")
DTYPES = {
    "i1": ("signed char", "int8", "int8_t"),
    "u1": ("uchar", "unsigned char", "uint8", "uint8_t"),
    "i2": ("short", "short int", "signed short", "signed short int", "int16", "int16_t"),
    "u2": ("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"),
    "i4": ("int", "signed int", "int32", "int32_t"),
    "u4": ("uint", "unsigned int", "uint32", "uint32_t"),
    "i8": ("longlong", "long long", "long long int", "signed long long", "signed long long int", "int64", "int64_t"),
    "u8": ("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"),
    "f2": ("float16", "half"),
    "f4": ("float",),
    "f8": ("double",),
}
SPATIAL = ("domain", "space")
TIME = ("time",)
# The signs that turn the axes of a space into those to the right, to the front and upwards.
SIGNS = {
    "right-anterior-superior": (1, 1, 1),
    "ras": (1, 1, 1),
    "left-anterior-superior": (-1, 1, 1),
    "las": (-1, 1, 1),
    "left-posterior-superior": (-1, -1, 1),
    "lps": (-1, -1, 1),
}


@dataclass(frozen=True, slots=True)
class NrrdHeader:
    """The fields of a header, by their names in small letters, the byte behind it, and the version of the format."""

    fields: dict[str, str]
    end: int
    version: int

    @classmethod
    def of(cls, file: BinaryIO) -> NrrdHeader:
        """Read the header of a file; ValueError if it is none, or longer than MOST_BYTES."""
        content = os.pread(file.fileno(), MOST_BYTES, 0)
        match = re.search(rb"\r?\n\r?\n", content)
        if match is None and len(content) == MOST_BYTES:
            raise ValueError(f"its header has more than {MOST_BYTES:,} bytes")
        end = match.end() if match else len(content)
        first, *lines = content[: match.start() if match else end].decode("utf-8", "replace").splitlines() or [""]
        if not MAGIC.fullmatch(first.strip()):
            raise ValueError("it does not begin with NRRD0001 to NRRD0005")
        fields = {}
        for line in lines:
            name, mark, value = line.partition(":")
            if line.startswith("#") or not mark or value.startswith("="):  # comments, and key/value pairs
                continue
            fields[name.strip().lower().replace(" ", "")] = value.strip()
        return cls(fields, end, int(first.strip()[-1]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of voxels along each axis, the fastest first; ValueError where it is not stated."""
        sizes = self.fields.get("sizes", "").split()
        if not 1 <= len(sizes) <= MOST_AXES or not all(re.fullmatch(r"\d{1,18}", size) for size in sizes):
            raise ValueError(f"its sizes are {excerpt(repr(' '.join(sizes)), 60)}")
        if self.fields.get("dimension", str(len(sizes))) != str(len(sizes)):
            raise ValueError(f"it has {len(sizes)} sizes, and the dimension {excerpt(self.fields['dimension'], 20)}")
        return tuple(map(int, sizes))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the voxels as it is stored; ValueError for one that is not read."""
        word = " ".join(self.fields.get("type", "").split()).lower()
        kind = next((kind for kind, words in DTYPES.items() if word in words), None)
        if kind is None:
            raise ValueError(f"its type is {excerpt(repr(word), 40)}")
        order = self.fields.get("endian", "").lower()
        if kind[1] != "1" and order not in ("little", "big"):
            raise ValueError(f"its endian is {excerpt(repr(order), 20)}, not little or big")
        return np.dtype(kind).newbyteorder(">" if order == "big" else "<")

    def skipped(self, field: str) -> int:
        """Return a number of bytes or lines to leave out; ValueError if it is none. -1: all but the last bytes."""
        text = self.fields.get(field, "0")
        if not re.fullmatch(r"-1|\d{1,18}", text):
            raise ValueError(f"its {field} is {excerpt(text, 20)}")
        return int(text)

    def names(self) -> tuple[str, ...]:
        """Return the names of the axes, the fastest first: by their kinds, directions, or else their number."""
        count = len(self.shape)
        kinds = self.fields.get("kinds", "").lower().split()
        directions = self._directions()
        if len(kinds) != count:
            kinds = ["?"] * count
        if len(directions) == count:
            kinds = [
                ("space" if vector is not None else kind if kind not in SPATIAL else "list")
                for kind, vector in zip(kinds, directions, strict=True)
            ]
        elif set(kinds) <= {"?", "???", "none"}:
            kinds = ["space"] * min(3, count) + ["list"] * (count - 3)
        spatial, names = iter("xyz"), []
        for kind in kinds:
            if kind in SPATIAL:
                name = next(spatial, "")
                if not name:
                    raise ValueError("it has more than 3 axes of space")
                names.append(name)
            else:
                names.append("t" if kind in TIME else "c")
        return tuple(names)

    def space(self) -> Space | None:
        """Return the position of the voxels; None where it is not stated, or damaged."""
        names = self.names()
        directions = dict(zip(names, self._directions(), strict=False))
        if directions:
            return self._turned([directions.get(name) for name in "xyz"])
        spacings = dict(zip(names, map(_number, self.fields.get("spacings", "").split()), strict=False))
        found = [spacings.get(name) for name in "zyx"]
        units = dict(zip(names, re.findall(r'"([^"]*)"', self.fields.get("units", "")), strict=False))
        z, y, x = (one if one is not None and isfinite(one) and one > 0 else None for one in found)
        if z is None or y is None or x is None:
            return None
        unit = [length_unit(units.get(name, "")) for name in "zyx"]
        return Space((z, y, x), units=(unit[0], unit[1], unit[2]))

    def _turned(self, directions: list[npt.NDArray[np.float64] | None]) -> Space | None:
        x, y, z = directions
        origin = _vector(self.fields.get("spaceorigin", "(0,0,0)"))
        if x is None or y is None or z is None or origin is None:
            return None
        units = {length_unit(unit) for unit in re.findall(r'"([^"]*)"', self.fields.get("spaceunits", ""))}
        space = self.fields.get("space", "").lower().removesuffix("-time")
        signs = np.array(SIGNS.get(space, (1, 1, 1)), np.float64)[:, None]
        return Space.turned(signs * np.stack((x, y, z, origin), axis=1), units.pop() if len(units) == 1 else None)

    def _directions(self) -> list[npt.NDArray[np.float64] | None]:
        """Return the direction of each axis in space; None for an axis that has none."""
        return [_vector(one) for one in re.findall(r"none|\([^()]*\)", self.fields.get("spacedirections", "").lower())]


def _vector(text: str) -> npt.NDArray[np.float64] | None:
    """Return three numbers in parentheses; None for anything else."""
    found = [_number(word) for word in text.strip("()").split(",")]
    if len(found) != 3 or None in found:
        return None
    return np.array(found, np.float64)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
