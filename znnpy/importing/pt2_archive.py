"""The members of a PT2 archive of PyTorch: JSON documents and arrays, read from a zip file within bounds.

An archive of torch.export.save, since PyTorch 2.9, holds in one folder

    models/model.json                              the graph
    data/weights/model_weights_config.json         which member holds which parameter or buffer, and its type and size
    data/weights/weight_0, ...                     raw bytes of arrays; several parameters may be parts of one
    data/constants/model_constants_config.json     the same for constants, and for buffers outside the state_dict
    data/constants/tensor_0, ...
    data/sample_inputs/model.pt                    a pickle, which is never read

All members are stored uncompressed.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import NetworkFileError
from znnpy.files import open_regular
from znnpy.formats.archives import PART_BYTES, BoundedFile, undamaged
from znnpy.importing import pt2_json
from znnpy.importing.exported import EXPORT, ONNX, widened
from znnpy.messages import excerpt

SHOWN = 60  # characters of a name in a message
MOST_JSON = 2**25  # bytes of a JSON document; a node of a graph takes one or two thousand
MOST_REPEATED = 2**24  # values of all arrays that repeat the bytes that they are stored in
MOST_DIMENSIONS = 16
STRIDED = 7  # number of the usual layout of an array

SAVE_AGAIN = "save it again with torch.export.save"

# Types of values by the numbers that PyTorch stores.
TYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16",
    29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu",
    34: "uint32", 35: "uint64",
}  # fmt: skip


class UnreadableError(ValueError):
    """An array is of a type that numpy does not know; the argument is the type's word."""


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file, of which nothing was checked yet. NetworkFileError if it is damaged, OSError if it cannot be."""
    with (
        open_regular(path) as raw,
        BoundedFile(cast(io.RawIOBase, raw)) as file,
        undamaged(),
        zipfile.ZipFile(file) as archive,
    ):
        yield archive


@contextmanager
def opened(path: Path) -> Iterator[Pt2Archive]:
    """Open a PT2 archive whose members were checked. NetworkFileError if it is damaged, OSError if it cannot be."""
    with opened_zip(path) as archive:
        yield Pt2Archive(archive, _checked_members(archive.infolist(), os.path.getsize(path)))


def _checked_members(members: list[zipfile.ZipInfo], nbytes: int) -> dict[str, zipfile.ZipInfo]:
    """Return the members by their names inside the archive's folder.

    Members that are stored, and together no longer than the file, cannot fill the memory.
    """
    found: dict[str, zipfile.ZipInfo] = {}
    folder = members[0].filename.split("/")[0] if members else ""
    for member in members:
        first, *rest = parts = member.filename.split("/")
        shown = excerpt(member.filename, SHOWN)
        if first != folder or not rest or {"", ".", ".."} & set(parts) or "\\" in member.filename:
            raise NetworkFileError(f"the archive holds {shown}, which is not in its folder; {SAVE_AGAIN}")
        name = "/".join(rest)
        if name in found:
            raise NetworkFileError(f"the archive holds {shown} twice; {SAVE_AGAIN}")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise NetworkFileError(f"{shown} is compressed, and PyTorch stores members as they are; {SAVE_AGAIN}")
        if not 0 <= member.header_offset <= nbytes:
            raise ValueError(f"{shown} begins at byte {member.header_offset} of {nbytes}")
        found[name] = member
    if (total := sum(member.file_size for member in members)) > nbytes:
        raise ValueError(f"its members have {total:,} bytes, and the file has {nbytes:,}")
    return found


@dataclass
class Pt2Archive:
    """A PT2 archive that is open. Each stored array is read once, when it is asked for."""

    _archive: zipfile.ZipFile
    members: dict[str, zipfile.ZipInfo]
    _storages: dict[tuple[str, str], npt.NDArray[Any]] = field(default_factory=dict)
    _repeated: int = 0  # values of arrays so far that have more than are stored

    def member(self, name: str) -> zipfile.ZipInfo:
        """Return a member; NetworkFileError if there is none of this name."""
        if name not in self.members:
            raise NetworkFileError(f"the archive has no member {excerpt(name, SHOWN)}; {SAVE_AGAIN}")
        return self.members[name]

    def json(self, name: str) -> object:
        """Parse a JSON document."""
        member = self.member(name)
        if member.file_size > MOST_JSON:
            raise NetworkFileError(
                f"{excerpt(name, SHOWN)} has {member.file_size:,} bytes, and at most {MOST_JSON:,} are read; export "
                "a smaller part of the network"
            )
        try:
            return from_json(bytes(self._bytes(member)), allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"{excerpt(name, SHOWN)}: {error}") from error

    def text(self, name: str, otherwise: str) -> str:
        """Return a member of a few letters, or `otherwise` if there is none."""
        member = self.members.get(name)
        if member is None:
            return otherwise
        if member.file_size > SHOWN:
            raise ValueError(f"{name} has {member.file_size:,} bytes")
        return bytes(self._bytes(member)).decode("ascii").strip()

    def array(self, folder: str, name: str, description: object) -> npt.NDArray[np.generic]:
        """Return a stored array. Those that are parts of the same member share memory.

        UnreadableError if numpy does not know its type.

        description  what a config says about the array: the member, and how the array lies in it
        """
        shown = excerpt(name, SHOWN)
        path = pt2_json.field(description, "path_name", str)
        if pt2_json.field(description, "use_pickle", bool):
            raise NetworkFileError(
                f"{shown} is stored as a pickle, which may run any code and is not read; make it an ordinary tensor "
                f"of the module and export that again: {EXPORT} or {ONNX}"
            )
        meta = pt2_json.field(description, "tensor_meta", dict)
        number = pt2_json.field(meta, "dtype", int)
        if pt2_json.field(meta, "layout", int) != STRIDED:
            raise UnreadableError("an array that is not dense")
        if number not in TYPES:
            raise ValueError(f"{shown} is of type {number}")
        sizes = pt2_json.static_sizes(meta, "sizes", name)
        strides = pt2_json.static_sizes(meta, "strides", name)
        offset = pt2_json.static_int(meta.get("storage_offset"), f"storage_offset of {name}")
        storage, count = self._storage(f"{folder}/{path}", TYPES[number]), prod(max(1, size) for size in sizes)
        self._repeated += count if count > storage.size else 0
        if self._repeated > MOST_REPEATED:
            raise ValueError(
                f"{shown} has the sizes {excerpt(list(sizes), SHOWN)}, and {storage.size} values are stored"
            )
        return _part(storage, sizes, strides, offset, shown)

    def _storage(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """Return all values of a member, of one type, as a one-dimensional array."""
        if (name, dtype) not in self._storages:
            self._storages[name, dtype] = self._read(self.member(name), dtype)
        return self._storages[name, dtype]

    def _read(self, member: zipfile.ZipInfo, dtype: str) -> npt.NDArray[Any]:
        if dtype == "complex32" or dtype.startswith("float8"):
            raise UnreadableError(dtype)
        stored = np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")
        if member.file_size % stored.itemsize:
            raise ValueError(
                f"{excerpt(member.filename, SHOWN)} has {member.file_size} bytes, which are not whole values of {dtype}"
            )
        values = self._bytes(member).view(stored)
        return widened(values) if dtype == "bfloat16" else values

    def _bytes(self, member: zipfile.ZipInfo) -> npt.NDArray[np.uint8]:
        """Read a member into memory once; zipfile compares its checksum at the end."""
        content = np.empty(member.file_size, np.uint8)
        filled = 0
        with self._archive.open(member) as stream:
            while part := stream.read(PART_BYTES):
                content[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                filled += len(part)
        if filled != member.file_size:
            raise ValueError(f"{excerpt(member.filename, SHOWN)} ends after {filled} of {member.file_size} bytes")
        return content


def _part(
    storage: npt.NDArray[Any], sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, shown: str
) -> npt.NDArray[np.generic]:
    """Return a part of a one-dimensional array, which cannot be written. ValueError if it is not all inside it.

    strides, offset  in values
    """
    if len(sizes) != len(strides) or len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"{shown} has {len(sizes)} sizes and {len(strides)} strides")
    count = prod(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if count else 0
    if offset < 0 or last >= max(1, storage.size) or (count and not storage.size):
        raise ValueError(f"{shown} reaches from value {offset} to {last}, and {storage.size} values are stored")
    if not count:
        return _fixed(np.zeros(sizes, storage.dtype))
    # the stride of a single value is never used, and may be any number
    steps = tuple(storage.itemsize * stride * (size > 1) for size, stride in zip(sizes, strides, strict=True))
    return _fixed(np.lib.stride_tricks.as_strided(storage[offset:], sizes, steps, writeable=False))


def _fixed(array: npt.NDArray[Any]) -> npt.NDArray[np.generic]:
    array.flags.writeable = False
    return array
