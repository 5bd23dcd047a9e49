"""Read the metadata of Zarr folders, formats 2 and 3, and check them before tensorstore uses them.

Only regular files are opened, at most MOST_METADATA_BYTES of each are read, and every number is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.volume.stored_array import (
    INDEX_ENTRY,
    InvalidError,
    Node,
    ShardIndex,
    axis_names,
    joined,
    object_in,
    sizes,
)
from znnpy.volume.stored_files import StoredFiles, read_document

MOST_NODES = 10_000  # arrays and groups that are read in one folder
MOST_NESTED = 32  # levels of groups, and of codecs
METADATA_FILES = frozenset(("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"))
NUMBERS = frozenset(
    ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
CHECKSUM_BYTES = 4  # checksum (crc32c) after an index
COMPRESSORS = ("blosc", "bz2", "gzip", "zlib", "zstd")  # of format 2
CODECS = ("bytes", "transpose", "blosc", "gzip", "zstd", "crc32c", "sharding_indexed")  # of format 3
PACKING = ("blosc", "gzip", "zstd")


def read_nodes(files: StoredFiles, wanted: str | None = None) -> dict[str, Node]:
    """Read the groups and arrays of a folder, by name, "" for the folder itself; nothing if it is not Zarr.

    wanted  a group or array: it is read with what is in it, and the groups around it; None: everything is read

    Where folders are not listed, a group has the arrays of its consolidated metadata and of its OME metadata.

    VolumeError: metadata are damaged or larger than MOST_METADATA_BYTES, or there are more than MOST_NODES nodes.
    """
    found: dict[str, Node] = {}
    parts = wanted.split("/") if wanted else []
    waiting = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
    while waiting:
        name = waiting.pop()
        node = _node(files, name)
        if node is None:
            continue
        found[name] = node
        if len(found) > MOST_NODES:
            raise VolumeError(
                f"{files.place} holds more than {MOST_NODES:,} arrays and groups; name a folder inside it"
            )
        is_inside = not wanted or name == wanted or name.startswith(f"{wanted}/")
        if node.dtype is None and name.count("/") < MOST_NESTED and is_inside:
            inside = files.folders(name) if files.can_list else _stated(files, name, node)
            waiting += [f"{name}/{one}".lstrip("/") for one in reversed(inside)]
    return found


def _stated(files: StoredFiles, name: str, node: Node) -> Sequence[str]:
    """Return the names in a group according to its metadata, at most MOST_NODES."""
    consolidated = read_document(files, f"{name}/.zmetadata".lstrip("/")) or {}
    found = {
        key.rpartition("/")[0] for key in _keys(consolidated.get("metadata")) if key.endswith(("/.zarray", "/.zgroup"))
    }
    found |= set(node.inside)
    images = node.attributes.get("ome", node.attributes)
    images = images.get("multiscales") if isinstance(images, Mapping) else None
    for image in images if isinstance(images, list) else ():
        datasets = image.get("datasets") if isinstance(image, Mapping) else None
        for one in datasets if isinstance(datasets, list) else ():
            path = one.get("path") if isinstance(one, Mapping) else None
            if isinstance(path, str) and path.strip("/") not in ("", "."):
                found.add(path.strip("/"))
    return sorted({one for one in found if not {"", ".", ".."} & set(one.split("/"))})[: MOST_NODES + 1]


def _keys(value: object) -> list[str]:
    return [key for key in value if isinstance(key, str)] if isinstance(value, dict) else []


def _node(files: StoredFiles, folder: str) -> Node | None:
    """Read the group or array in a folder; None where there is none."""
    for name, read in (("zarr.json", _of_format_3), (".zarray", _of_format_2), (".zgroup", _group_of_format_2)):
        key = f"{folder}/{name}".lstrip("/")
        document = read_document(files, key)
        if document is None:
            continue
        try:
            return read(document, partial(_attributes, files, folder))
        except InvalidError as wrong:
            raise VolumeError(f"{files.named(key)} cannot be read as Zarr: {wrong}; copy it again") from None
    return None


def _attributes(files: StoredFiles, folder: str) -> dict[str, Any]:
    """Read the attributes of a node of format 2."""
    return read_document(files, f"{folder}/.zattrs".lstrip("/")) or {}


def _of_format_3(document: dict[str, Any], attributes_of: Callable[[], dict[str, Any]]) -> Node:
    del attributes_of  # attributes are in the same document
    attributes = document.get("attributes", {})
    if document.get("zarr_format") != 3 or not isinstance(attributes, dict):
        raise InvalidError(f"zarr_format is {excerpt(document.get('zarr_format'), 60)}")
    if document.get("node_type") == "group":
        consolidated = document.get("consolidated_metadata")
        held = consolidated.get("metadata") if isinstance(consolidated, dict) else None
        return Node(attributes, inside=tuple(_keys(held)))
    if document.get("node_type") != "array":
        raise InvalidError(f"node_type is {excerpt(document.get('node_type'), 60)}")
    shape = sizes(document, "shape", 0)
    grid, kind = document.get("chunk_grid"), document.get("data_type")
    settings = grid.get("configuration") if isinstance(grid, dict) and grid.get("name") == "regular" else None
    if not isinstance(settings, dict):
        raise InvalidError(f"chunk_grid is {excerpt(grid, 60)}, and only regular grids are read")
    file = chunk = sizes(settings, "chunk_shape", 1, len(shape))
    codecs = _codecs(document.get("codecs"))
    index, is_sharded = None, any(map(_is_sharding, codecs))
    last = codecs
    if is_sharded and len(codecs) == 1:
        configuration = object_in(codecs[0], "configuration")
        chunk = sizes(configuration, "chunk_shape", 1, len(shape))
        if any(whole % part for whole, part in zip(file, chunk, strict=True)):
            raise InvalidError(f"chunks {chunk} do not divide shards {file}")
        index = _index(configuration, prod(file) // prod(chunk))
        last = _codecs(configuration.get("codecs"))
    dtype = np.dtype(kind) if isinstance(kind, str) and kind in NUMBERS else _other(kind)
    fill = _fill(document.get("fill_value"), dtype)
    encoding, key = _key_encoding(document.get("chunk_key_encoding"))
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(file)}},
        "chunk_key_encoding": encoding,
        "fill_value": fill,
        "codecs": codecs,
    }
    transformers = document.get("storage_transformers")
    refused = _why_not(codecs) if not transformers else "has storage transformers, which are not read; write it without"
    return Node(
        attributes,
        shape,
        dtype,
        chunk,
        file,
        axis_names(document.get("dimension_names"), len(shape)) or _xarray(attributes, shape),
        {"driver": "zarr3", "metadata": metadata},
        key,
        "stored",
        index,
        is_sharded,
        any(codec.get("name") == "blosc" for codec in last),
        refused=refused,
    )


def _codecs(value: object, depth: int = 0) -> list[dict[str, Any]]:
    """Return a list of codecs as objects, also where only their names are written."""
    is_list = isinstance(value, list) and value and all(isinstance(codec, dict | str) for codec in value)
    if not isinstance(value, list) or not is_list or depth > MOST_NESTED:
        raise InvalidError(f"codecs is {excerpt(value, 60)}")
    return [{"name": codec} if isinstance(codec, str) else codec for codec in value]


def _why_not(codecs: list[dict[str, Any]], depth: int = 0) -> str | None:
    """Return why chunks with these codecs are not read, as the end of a sentence; None if they are."""
    packed = [codec.get("name") for codec in codecs if codec.get("name") in PACKING]
    for codec in codecs:
        if codec.get("name") not in CODECS:
            return (
                f"is stored with the codec {excerpt(codec.get('name'), 60)}, and only {', '.join(CODECS)} are read; "
                "write it with one of these"
            )
        if _is_sharding(codec):
            inner = object_in(codec, "configuration")
            for key in ("codecs", "index_codecs"):
                why = _why_not(_codecs(inner.get(key), depth + 1), depth + 1)
                if why is not None:
                    return why
    if "blosc" in packed and len(packed) > 1:
        return f"is packed by {' and '.join(map(str, packed))}, and only once is read with blosc; write it with one"
    return None


def _key_encoding(value: object) -> tuple[dict[str, Any], Callable[[Sequence[int]], str]]:
    """Return how chunks are named, and the function that names one."""
    name = value.get("name", "default") if isinstance(value, dict) else value or "default"
    settings = value.get("configuration") if isinstance(value, dict) else None
    separator = (settings if isinstance(settings, dict) else {}).get("separator", "." if name == "v2" else "/")
    if name not in ("default", "v2") or separator not in (".", "/"):
        raise InvalidError(f"chunk_key_encoding is {excerpt(value, 60)}")
    lead = "" if name == "v2" else f"c{separator}"
    encoding = {"name": name, "configuration": {"separator": separator}}
    return encoding, lambda index: lead + joined(separator, index)


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


def _of_format_2(document: dict[str, Any], attributes_of: Callable[[], dict[str, Any]]) -> Node:
    attributes = attributes_of()
    if document.get("zarr_format") != 2:
        raise InvalidError(f"zarr_format is {excerpt(document.get('zarr_format'), 60)}")
    shape = sizes(document, "shape", 0)
    chunk = sizes(document, "chunks", 1, len(shape))
    kind, order = document.get("dtype"), document.get("order", "C")
    try:
        dtype = np.dtype(kind) if isinstance(kind, str) else _other(kind)
    except (TypeError, ValueError):
        raise InvalidError(f"dtype is {excerpt(kind, 60)}") from None
    for key, kinds in (("compressor", (dict, type(None))), ("filters", (list, type(None)))):
        if not isinstance(document.get(key), kinds):
            raise InvalidError(f"{key} is {excerpt(document.get(key), 60)}")
    separator = document.get("dimension_separator", ".")
    if order not in ("C", "F"):
        raise InvalidError(f"order is {excerpt(order, 60)}, and must be C or F")
    if separator not in (".", "/"):
        raise InvalidError(f"dimension_separator is {excerpt(separator, 60)}")
    fill = document.get("fill_value")
    fill = None if fill is None else _fill(fill, dtype)
    compressor, refused = document.get("compressor"), None
    if compressor is not None and compressor.get("id") not in COMPRESSORS:
        refused = (
            f"is compressed with {excerpt(compressor.get('id'), 60)}, and only {', '.join(COMPRESSORS)} are read; "
            "write it with one of these"
        )
    if document.get("filters"):
        refused = "is stored with filters, which are not read; write it without"
    metadata = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": dtype.str,
        "fill_value": fill,
        "order": order,
        "filters": None,
        "compressor": compressor,
        "dimension_separator": separator,
    }
    return Node(
        attributes,
        shape,
        dtype,
        chunk,
        chunk,
        _xarray(attributes, shape),
        {"driver": "zarr", "metadata": metadata},
        partial(joined, separator),
        "none" if fill is None else "stored",
        is_blosc=compressor is not None and compressor.get("id") == "blosc",
        refused=refused,
    )


def _xarray(attributes: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the names of axes that xarray writes."""
    return axis_names(attributes.get("_ARRAY_DIMENSIONS"), len(shape))


def _group_of_format_2(document: dict[str, Any], attributes_of: Callable[[], dict[str, Any]]) -> Node:
    if document.get("zarr_format") != 2:
        raise InvalidError(f"zarr_format is {excerpt(document.get('zarr_format'), 60)}")
    return Node(attributes_of())


def _other(kind: object) -> np.dtype[Any]:
    """Return a type for elements that are not numbers, for the list of what the folder holds."""
    if kind == "bool":
        return np.dtype(bool)
    if kind in ("complex64", "complex128"):
        return np.dtype(str(kind))
    return np.dtype("V1") if isinstance(kind, list | dict) else np.dtype(object)


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value of the type; InvalidError if it is none. Types other than numbers are not checked."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if is_whole and int(info.min) <= value <= int(info.max):
            return int(value)
    elif dtype.kind == "f":
        if type(value) in (int, float) or (isinstance(value, str) and len(value) <= 40 and _is_float(value)):
            return value
    else:
        return value
    raise InvalidError(f"fill_value is {excerpt(json.dumps(value), 60)}, which is not a {dtype}")


def _is_float(value: str) -> bool:
    if value in ("NaN", "Infinity", "-Infinity"):
        return True
    try:
        int(value, 16)
    except ValueError:
        return False
    return value.startswith("0x")
