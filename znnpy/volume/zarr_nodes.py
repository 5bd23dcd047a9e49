"""Read the metadata of Zarr folders, formats 2 and 3, and check them before the package zarr uses them.

Only regular files are opened, at most MOST_METADATA_BYTES of each are read, and every number is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.errors import VolumeError
from znnpy.files import MOST_METADATA_BYTES, open_regular
from znnpy.messages import excerpt

MOST_NODES = 10_000  # arrays and groups that are read in one folder
MOST_NESTED = 32  # levels of groups
METADATA_FILES = frozenset(("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"))
NUMBERS = frozenset(
    ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)


INDEX_ENTRY = 16  # bytes of the index of a shard for each of its chunks: where it begins, and how long it is
CHECKSUM_BYTES = 4  # checksum (crc32c) after an index


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The position of the index in a shard, if it is stored as plain numbers."""

    at_end: bool
    nbytes: int  # including its checksum
    dtype: str  # type of its numbers


@dataclass(frozen=True, slots=True)
class Node:
    """A group, or an array whose numbers were checked."""

    attributes: Mapping[str, Any]
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None  # None: a group
    chunk: tuple[int, ...] = ()  # elements along each axis that are unpacked together
    file: tuple[int, ...] = ()  # elements of one file: the chunk, or the shard that holds several
    has_fill_value: bool = True  # there is a value for chunks that are not stored
    is_sharded: bool = False  # files hold several chunks
    index: ShardIndex | None = None  # index of each shard; None: no shards, or their index cannot be read here

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, unpacked."""
        return prod(self.chunk) * (self.dtype.itemsize if self.dtype is not None else 0)

    @property
    def chunks(self) -> int:
        """Number of chunks that the array is cut into."""
        return prod(-(-n // size) for n, size in zip(self.shape, self.chunk, strict=True))

    @property
    def chunks_per_file(self) -> tuple[int, ...]:
        """Number of chunks of one file along each axis."""
        return tuple(whole // part for whole, part in zip(self.file, self.chunk, strict=True))


def read_nodes(root: Path) -> dict[str, Node]:
    """Read every group and array of a folder, by name, "" for the folder itself; nothing if it is not Zarr.

    VolumeError: metadata are damaged or larger than MOST_METADATA_BYTES, or there are more than MOST_NODES nodes.
    """
    found: dict[str, Node] = {}
    waiting = [""]
    while waiting:
        name = waiting.pop()
        node = _node(root / name)
        if node is None:
            continue
        found[name] = node
        if len(found) > MOST_NODES:
            raise VolumeError(f"{root} holds more than {MOST_NODES:,} arrays and groups; name a folder inside it")
        if node.dtype is None and name.count("/") < MOST_NESTED:
            waiting += sorted(_folders(root, name), reverse=True)
    return found


def _folders(root: Path, name: str) -> Iterator[str]:
    for number, entry in enumerate((root / name).iterdir()):
        if number > MOST_NODES:
            raise VolumeError(f"{root / name} holds more than {MOST_NODES:,} entries; name a folder inside it")
        if entry.is_dir():
            yield f"{name}/{entry.name}".lstrip("/")


def _node(folder: Path) -> Node | None:
    """Read the group or array in a folder; None where there is none."""
    for name, read in (("zarr.json", _of_format_3), (".zarray", _of_format_2), (".zgroup", _group_of_format_2)):
        path = folder / name
        document = _document(path)
        if document is None:
            continue
        try:
            return read(document, folder)
        except _Invalid as wrong:
            raise VolumeError(f"{path} cannot be read as Zarr: {wrong}; copy it again") from None
    return None


class _Invalid(Exception):
    """Metadata are wrong; the text is the middle of a sentence."""


def _document(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no file."""
    try:
        with open_regular(path) as file:
            content = file.read(MOST_METADATA_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise VolumeError(f"{path} cannot be read: {error.strerror}; copy the folder again") from None
    if len(content) > MOST_METADATA_BYTES:
        raise VolumeError(
            f"{path} has more than {MOST_METADATA_BYTES:,} bytes, which metadata never need; copy it again"
        )
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise VolumeError(f"{path} cannot be read as JSON: {excerpt(error)}; copy it again") from None
    if not isinstance(document, dict):
        raise VolumeError(f"{path} holds no JSON object; copy it again")
    return document


def _of_format_3(document: dict[str, Any], folder: Path) -> Node:
    del folder  # attributes are in the same document
    attributes = document.get("attributes", {})
    if document.get("zarr_format") != 3 or not isinstance(attributes, dict):
        raise _Invalid(f"zarr_format is {excerpt(document.get('zarr_format'), 60)}")
    if document.get("node_type") == "group":
        return Node(attributes)
    if document.get("node_type") != "array":
        raise _Invalid(f"node_type is {excerpt(document.get('node_type'), 60)}")
    shape = _sizes(document, "shape", 0)
    grid, kind = document.get("chunk_grid"), document.get("data_type")
    settings = grid.get("configuration") if isinstance(grid, dict) and grid.get("name") == "regular" else None
    if not isinstance(settings, dict):
        raise _Invalid(f"chunk_grid is {excerpt(grid, 60)}, and only regular grids are read")
    file = chunk = _sizes(settings, "chunk_shape", 1, len(shape))
    index, is_sharded = None, False
    codecs = document.get("codecs")
    if not isinstance(codecs, list) or not all(isinstance(codec, dict | str) for codec in codecs):
        raise _Invalid(f"codecs is {excerpt(codecs, 60)}")
    for codec in codecs:
        is_sharded |= _is_sharding(codec)
        if isinstance(codec, dict) and _is_sharding(codec) and len(codecs) == 1:
            configuration = _object(codec, "configuration")
            chunk = _sizes(configuration, "chunk_shape", 1, len(shape))
            if any(whole % part for whole, part in zip(file, chunk, strict=True)):
                raise _Invalid(f"chunks {chunk} do not divide shards {file}")
            index = _index(configuration, prod(file) // prod(chunk))
    dtype = np.dtype(kind) if isinstance(kind, str) and kind in NUMBERS else _other(kind)
    _check_fill(document.get("fill_value"), dtype)
    return Node(attributes, shape, dtype, chunk, file, is_sharded=is_sharded, index=index)


def _is_sharding(codec: object) -> bool:
    return isinstance(codec, dict) and codec.get("name") == "sharding_indexed"


def _index(configuration: Mapping[str, Any], chunks: int) -> ShardIndex | None:
    """Describe the index of shards of `chunks` chunks; None if it is not plain numbers, or shards are nested."""
    inner = configuration.get("codecs")
    if isinstance(inner, list) and any(map(_is_sharding, inner)):
        return None
    codecs = configuration.get("index_codecs")
    if not isinstance(codecs, list) or not all(isinstance(codec, dict) for codec in codecs):
        return None
    names = [codec.get("name") for codec in codecs]
    order = {"little": "<u8", "big": ">u8"}
    dtype = next((order[end] for end in order if codecs and codecs[0].get("configuration") == {"endian": end}), None)
    if dtype is None or names not in (["bytes"], ["bytes", "crc32c"]):
        return None
    nbytes = INDEX_ENTRY * chunks + CHECKSUM_BYTES * (len(names) - 1)
    at_end = configuration.get("index_location", "end") == "end"
    return ShardIndex(at_end, nbytes, dtype)


def _of_format_2(document: dict[str, Any], folder: Path) -> Node:
    attributes = _document(folder / ".zattrs") or {}
    if document.get("zarr_format") != 2:
        raise _Invalid(f"zarr_format is {excerpt(document.get('zarr_format'), 60)}")
    shape = _sizes(document, "shape", 0)
    chunk = _sizes(document, "chunks", 1, len(shape))
    kind = document.get("dtype")
    try:
        dtype = np.dtype(kind) if isinstance(kind, str) else _other(kind)
    except (TypeError, ValueError):
        raise _Invalid(f"dtype is {excerpt(kind, 60)}") from None
    for key, kinds in (("compressor", (dict, type(None))), ("filters", (list, type(None)))):
        if not isinstance(document.get(key), kinds):
            raise _Invalid(f"{key} is {excerpt(document.get(key), 60)}")
    fill = document.get("fill_value")
    if fill is not None:
        _check_fill(fill, dtype)
    return Node(attributes, shape, dtype, chunk, chunk, fill is not None)


def _group_of_format_2(document: dict[str, Any], folder: Path) -> Node:
    if document.get("zarr_format") != 2:
        raise _Invalid(f"zarr_format is {excerpt(document.get('zarr_format'), 60)}")
    return Node(_document(folder / ".zattrs") or {})


def _other(kind: object) -> np.dtype[Any]:
    """Return a type for elements that are not numbers, for the list of what the folder holds."""
    if kind == "bool":
        return np.dtype(bool)
    if kind in ("complex64", "complex128"):
        return np.dtype(str(kind))
    return np.dtype("V1") if isinstance(kind, list | dict) else np.dtype(object)


def _object(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise _Invalid(f"{key} is {excerpt(value, 60)}")
    return value


def _sizes(document: Mapping[str, Any], key: str, least: int, count: int | None = None) -> tuple[int, ...]:
    """Return a list of whole numbers, each at least `least`, as many as `count` states."""
    value = document.get(key)
    if not isinstance(value, list) or not all(type(n) is int and least <= n < 2**63 for n in value):
        raise _Invalid(f"{key} is {excerpt(value, 60)}, and must be whole numbers from {least} to {2**63 - 1:,}")
    if count is not None and len(value) != count:
        raise _Invalid(f"{key} is {excerpt(value, 60)} of an array of {count} axes")
    return tuple(value)


def _check_fill(value: object, dtype: np.dtype[Any]) -> None:
    """Raise _Invalid unless `value` is of the type; types other than numbers are not read, so not checked."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if type(value) is int and int(info.min) <= value <= int(info.max):
            return
        if type(value) is float and value.is_integer() and int(info.min) <= value <= int(info.max):
            return
    elif dtype.kind == "f":
        if type(value) in (int, float) or (isinstance(value, str) and len(value) <= 40 and _is_float(value)):
            return
    else:
        return
    raise _Invalid(f"fill_value is {excerpt(json.dumps(value), 60)}, which is not a {dtype}")


def _is_float(value: str) -> bool:
    if value in ("NaN", "Infinity", "-Infinity"):
        return True
    try:
        int(value, 16)
    except ValueError:
        return False
    return value.startswith("0x")
