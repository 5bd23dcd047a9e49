"""Read the header of a .npy array from an untrusted file, without Python's parser and up to a limited size."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import IO

import numpy as np

from znnpy.messages import excerpt

MOST_HEADER = 1024  # bytes; numpy writes about 120 for an array of numbers
SHOWN = 60  # characters of a header in a message

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # bytes that hold the header's length, by version
_WHOLE = r"\d{1,18}L?"  # Python 2 wrote 3L for 3
_SHAPE = rf"\(\s*(?:{_WHOLE}\s*,\s*)*(?:{_WHOLE})?\s*,?\s*\)"
_ENTRY = rf"'descr'\s*:\s*'[^']*'|'fortran_order'\s*:\s*(?:True|False)|'shape'\s*:\s*{_SHAPE}"
_HEADER = re.compile(rf"\{{\s*(?:{_ENTRY})\s*,\s*(?:{_ENTRY})\s*,\s*(?:{_ENTRY})\s*,?\s*\}}\s*")
_DTYPE = re.compile(r"[<>|=]?[a-zA-Z]\d{0,9}")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of an array: shape, order and type of the values that follow it."""

    shape: tuple[int, ...]
    by_columns: bool  # the first index varies fastest
    dtype: np.dtype[np.generic]
    nbytes: int  # size of the header itself

    @property
    def is_real(self) -> bool:
        """Return whether the values are float16, float32 or float64, in any byte order."""
        return self.dtype.kind == "f" and self.dtype.itemsize in (2, 4, 8)


def read_npy_header(stream: IO[bytes]) -> NpyHeader:
    """Read the header at the beginning of `stream`, and leave it at the first value.

    At most MOST_HEADER bytes are read. ValueError if it is cut short, longer than that, or not the header of an array
    of numbers, bools, texts or objects.
    """
    start = _exactly(stream, len(_MAGIC) + 2)
    if not start.startswith(_MAGIC):
        raise ValueError("it does not begin as a .npy array does")
    version = (start[-2], start[-1])
    if version not in _LENGTH_BYTES:
        raise ValueError(f".npy version {version}")
    length = int.from_bytes(_exactly(stream, _LENGTH_BYTES[version]), "little")
    if length > MOST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than the {MOST_HEADER:,} that are read")
    text = _exactly(stream, length).decode("latin-1")
    entries = re.findall(_ENTRY, text) if _HEADER.fullmatch(text) else []
    found = {key.strip("' "): value.strip() for key, _, value in (entry.partition(":") for entry in entries)}
    if len(found) != 3:
        raise ValueError(f"its header is {excerpt(text.strip(), SHOWN)}")
    shape = tuple(int(size.rstrip("L")) for size in re.findall(_WHOLE, found["shape"]))
    nbytes = len(start) + _LENGTH_BYTES[version] + length
    return NpyHeader(shape, found["fortran_order"] == "True", _dtype(found["descr"].strip("'")), nbytes)


def _dtype(name: str) -> np.dtype[np.generic]:
    shown = f"its header names the dtype {excerpt(name, SHOWN)}"
    if not _DTYPE.fullmatch(name):
        raise ValueError(shown)
    try:
        return np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(shown) from error


def _exactly(stream: IO[bytes], count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise ValueError(f"it ends after {len(content)} of {count} bytes of its header")
    return content
