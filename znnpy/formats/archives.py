"""Read files of named arrays that hold weights, .npz and .safetensors, within bounds.

A size that a file states is compared with the size of the file before it is used, nothing is unpickled, and an array is
read in parts, so that it is in memory only once.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.extras import install
from znnpy.files import open_regular
from znnpy.formats.npy import NpyHeader, read_npy_header
from znnpy.messages import excerpt

PART_BYTES = 2**18  # bytes of an array read at a time
MOST_LISTED = 2**20  # largest list of arrays in a file, in bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """The description of an array in its file, known before the array is read."""

    shape: tuple[int, ...]
    dtype: str
    is_real: bool  # float16, float32 or float64
    by_columns: bool = False  # the first index varies fastest


class Archive(Protocol):
    """Named arrays in a file. `undamaged` catches the errors that it raises for a damaged file."""

    def names(self) -> list[str]: ...

    def header(self, name: str) -> Stored: ...

    def parts(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the values of a real array in the order of the file, as one-dimensional arrays.

        ValueError at once if the file is too short for them.
        """
        ...


# Errors that zipfile raises for damaged archives (found by damaging every byte).
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    RuntimeError,  # encrypted, or a feature of zip that zipfile does not support
    OSError,
)


@contextmanager
def undamaged(name: str = "the file") -> Iterator[None]:
    """Turn the errors of a damaged archive into a NetworkFileError that begins with `name`."""
    try:
        yield
    except NetworkFileError:  # a NetworkFileError is also a ValueError
        raise
    except _DAMAGE as error:
        why = excerpt(str(error).strip() or type(error).__name__)
        raise NetworkFileError(f"{name} is damaged or cut short ({why}); save or copy it again") from error


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a .npz or .safetensors file. NetworkFileError if it is damaged, OSError if it cannot be opened.

    MissingExtraError for .safetensors if that package is missing.
    """
    kind = _open_npz if path.suffix.lower() == ".npz" else _open_safetensors
    with open_regular(path) as raw, BoundedFile(cast(io.RawIOBase, raw)) as file, kind(path, file) as archive:
        yield archive


class BoundedFile(io.BufferedReader):
    """A file that limits the size of a read: zipfile reads a list of members of any size at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = MOST_LISTED if size is None or size < 0 else size
        if most > MOST_LISTED:
            raise ValueError(f"its list of members has {most:,} bytes, more than the {MOST_LISTED:,} that are read")
        return super().read(most)


class _Npz:
    """An archive of numpy.savez: a zip file of .npy files."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._headers: dict[str, NpyHeader] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in self._members:
                raise NetworkFileError(f"the file holds {excerpt(name, 60)} twice; save it again with numpy.savez")
            self._members[name] = member

    def names(self) -> list[str]:
        return list(self._members)

    def header(self, name: str) -> Stored:
        member = self._members[name]
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the two that numpy writes
            raise ValueError(f"zip compression {member.compress_type}")
        with self._archive.open(member) as stream:
            header = self._headers[name] = read_npy_header(stream)
        return Stored(header.shape, str(header.dtype), header.is_real, header.by_columns)

    def parts(self, name: str) -> Iterator[npt.NDArray[Any]]:
        member, header = self._members[name], self._headers[name]
        nbytes, held = prod(header.shape) * header.dtype.itemsize, member.file_size - header.nbytes
        if held != nbytes:
            raise ValueError(f"{held} bytes of an array of {nbytes}")
        return self._parts(member, header, nbytes)

    def _parts(self, member: zipfile.ZipInfo, header: NpyHeader, nbytes: int) -> Iterator[npt.NDArray[Any]]:
        with self._archive.open(member) as stream:
            stream.read(header.nbytes)
            while nbytes:
                part = bytearray()
                while len(part) < min(PART_BYTES, nbytes):
                    more = stream.read(min(PART_BYTES, nbytes) - len(part))
                    if not more:
                        raise ValueError(f"{nbytes - len(part)} bytes of the array are missing")
                    part += more
                nbytes -= len(part)
                yield np.frombuffer(part, header.dtype)
            stream.read(1)  # zipfile compares the checksum at the end


@contextmanager
def _open_npz(path: Path, file: io.BufferedReader) -> Iterator[Archive]:
    with undamaged():
        if not zipfile.is_zipfile(file):
            raise NetworkFileError("this is not an .npz archive, or it is cut short; save it again with numpy.savez")
        archive = zipfile.ZipFile(file)
    with archive:
        yield _Npz(archive)


_SAFETENSORS_REAL = {"F16": "float16", "F32": "float32", "F64": "float64"}


class _Safetensors:
    """An archive of the package safetensors; its own errors become ValueErrors."""

    def __init__(self, archive: Any, error: type[Exception]) -> None:
        self._archive = archive
        self._error = error

    def names(self) -> list[str]:
        return list(self._archive.keys())

    def header(self, name: str) -> Stored:
        view = self._archive.get_slice(name)
        dtype = view.get_dtype()
        return Stored(tuple(view.get_shape()), _SAFETENSORS_REAL.get(dtype, dtype), dtype in _SAFETENSORS_REAL)

    def parts(self, name: str) -> Iterator[npt.NDArray[Any]]:
        try:
            array: npt.NDArray[Any] = self._archive.get_tensor(name)
        except self._error as error:
            raise ValueError(str(error)) from error
        yield array.reshape(-1)


@contextmanager
def _open_safetensors(path: Path, file: io.BufferedReader) -> Iterator[Archive]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs the package safetensors, which is not installed; {install('safetensors')}"
        ) from error
    with undamaged():
        _check_safetensors(file)
        try:
            archive = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    with archive:
        yield _Safetensors(archive, SafetensorError)


def _check_safetensors(file: io.BufferedReader) -> None:
    """Raise ValueError if the header is longer than what is read, or names an array twice.

    The package reads headers of up to 100 MB, and the last of two arrays with one name. It checks everything else.
    """
    size = int.from_bytes(file.read(8), "little")
    if size > MOST_LISTED:
        raise ValueError(f"its header has {size:,} bytes, more than the {MOST_LISTED:,} that are read")
    try:
        json.loads(file.read(size), object_pairs_hook=_check_unique)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NetworkFileError(f"the file holds {excerpt(twice, 60)} twice; save it again")
    return found
