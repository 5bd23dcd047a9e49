"""OME-Zarr 0.5 (Zarr 3) and OME-Zarr 0.4 (Zarr 2): groups of one array, or of coarser ones too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from znnpy.volume.chunked_formats import (
    ChunkedFormat,
    Document,
    Files,
    Layout,
    StoredArray,
    as_json,
    below,
    check_same,
    coarser,
    listed,
    whole,
)
from znnpy.volume.output_names import OUTPUTS
from znnpy.volume.space import Space, image_of

SHUFFLED = 1  # blosc: the first bytes of all values, then the second ones, and so on
LEVEL = 1  # of zstd within blosc


def _folder(array: StoredArray) -> str:
    return below(array.name, str(array.level))


def _index(array: StoredArray, index: Sequence[int]) -> Sequence[int]:
    """Return the index of a file as it is stored."""
    return index if array.shape[0] > 1 else index[1:]


def _turned(opened: Any) -> Any:
    import tensorstore

    return opened if opened.rank == 4 else opened[tensorstore.newaxis]


def _array_attributes(array: StoredArray) -> dict[str, Any]:
    """Return the attributes of an array itself, which programs read that know no groups."""
    placed = {} if array.space is None else array.space.attributes(first=array.level == 0)
    return listed({**(array.attributes or {}), **placed})


def _image(levels: Sequence[StoredArray], version: str) -> dict[str, Any]:
    """Return the description of an image and its channels, as OME-Zarr has it."""
    first = levels[0]
    spaces = [(str(one.level), one.space or _plain(one.level)) for one in levels]
    ends = (0.0, 255.0) if first.dtype.kind == "u" else (0.0, 1.0)
    window = {"min": ends[0], "max": ends[1], "start": ends[0], "end": ends[1]}
    word = first.name.rpartition("/")[2] or "prediction"
    names = [f"{word} {number}" for number in range(first.shape[0])] if first.shape[0] > 1 else [word]
    channels = [{"label": name, "color": "FFFFFF", "active": True, "window": window} for name in names]
    return {
        "multiscales": [image_of(word, spaces, first.shape[0], version)],
        "omero": {"channels": channels} | ({} if version == "0.5" else {"version": version}),
    }


def _plain(level: int) -> Space:
    """Return the space of a level where it is not known: voxels of the finest one are the unit."""
    return coarser(Space((1.0, 1.0, 1.0)), level)


class Zarr3(ChunkedFormat):
    """OME-Zarr 0.5, with or without shards."""

    name, prefix, has_shards, marks = "Zarr 3", "zarr3", True, ("zarr.json",)

    def folder(self, array: StoredArray) -> str:
        return _folder(array)

    def documents(self, stored: Sequence[Sequence[StoredArray]], attributes: Mapping[str, Any]) -> Files:
        found: Files = {}
        for levels in stored:
            first = levels[0]
            for array in levels:
                document = {**self._metadata(array), "attributes": _array_attributes(array)}
                found[below(_folder(array), "zarr.json")] = as_json(document)
            group = {**_array_attributes(first), "ome": {"version": "0.5", **_image(levels, "0.5")}}
            if first.name:
                found[below(first.name, "zarr.json")] = _group(group)
            else:
                found["zarr.json"] = _group({**listed(attributes), **group})
        if stored[0][0].name:
            found[below(OUTPUTS, "zarr.json")] = _group({})
            found["zarr.json"] = _group(listed(attributes))
        return found

    def attributes(self, read: Document, name: str = "") -> dict[str, Any]:
        found = read(below(name, "zarr.json"))["attributes"]
        return found if isinstance(found, dict) else {}

    def held(self, read: Document, array: StoredArray) -> tuple[tuple[int, ...], np.dtype[Any]]:
        document = read(below(_folder(array), "zarr.json"))
        return tuple(document["shape"]), np.dtype(document["data_type"])

    def layout(self, read: Document, array: StoredArray) -> Layout:
        document = read(below(_folder(array), "zarr.json"))
        count = len(array.stored_shape)
        file = whole(document["chunk_grid"]["configuration"]["chunk_shape"], count)[-3:]
        first = document["codecs"][0]
        chunk = file
        if first["name"] == "sharding_indexed":
            chunk = whole(first["configuration"]["chunk_shape"], count)[-3:]
        found = Layout((chunk[0], chunk[1], chunk[2]), (file[0], file[1], file[2]) if chunk != file else None)
        if first["name"] == "sharding_indexed" and found.shard is None:
            found = Layout(found.chunk, found.chunk)
        document.pop("attributes", None)
        check_same(document, self._metadata(replace(array, layout=found)))
        return found

    def spec(self, array: StoredArray) -> dict[str, Any]:
        return {"driver": "zarr3", "metadata": self._metadata(array)}

    def turned(self, opened: Any) -> Any:
        return _turned(opened)

    def key(self, array: StoredArray, index: Sequence[int]) -> str:
        return "/".join([_folder(array), "c", *map(str, _index(array, index))])

    def _metadata(self, array: StoredArray) -> dict[str, Any]:
        layout, itemsize = array.layout, array.dtype.itemsize
        packed: list[dict[str, Any]] = [
            {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"},
            {
                "name": "blosc",
                "configuration": {
                    "cname": "zstd",
                    "clevel": LEVEL,
                    "shuffle": "shuffle" if itemsize > 1 else "noshuffle",
                    "typesize": itemsize,
                    "blocksize": 0,
                },
            },
        ]
        if layout.shard is not None:
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            inside = {
                "chunk_shape": list(array.stored(layout.chunk)),
                "codecs": packed,
                "index_codecs": index,
                "index_location": "end",
            }
            packed = [{"name": "sharding_indexed", "configuration": inside}]
        shape = array.stored_shape
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.stored(layout.file))}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0 if array.dtype.kind == "u" else 0.0,
            "codecs": packed,
            "dimension_names": list(("c", "z", "y", "x")[-len(shape) :]),
        }


class Zarr2(ChunkedFormat):
    """OME-Zarr 0.4."""

    name, prefix, marks = "Zarr 2", "zarr2", (".zattrs", ".zgroup")

    def folder(self, array: StoredArray) -> str:
        return _folder(array)

    def documents(self, stored: Sequence[Sequence[StoredArray]], attributes: Mapping[str, Any]) -> Files:
        found: Files = {}
        group = as_json({"zarr_format": 2})
        for levels in stored:
            first = levels[0]
            for array in levels:
                found[below(_folder(array), ".zarray")] = as_json(self._metadata(array))
                found[below(_folder(array), ".zattrs")] = as_json(_array_attributes(array))
            described = {**_array_attributes(first), **_image(levels, "0.4")}
            if first.name:
                found[below(first.name, ".zattrs")] = as_json(described)
                found[below(first.name, ".zgroup")] = group
            else:
                found[".zattrs"] = as_json({**listed(attributes), **described})
        if stored[0][0].name:
            found[below(OUTPUTS, ".zgroup")] = group
            found[".zattrs"] = as_json(listed(attributes))
        found[".zgroup"] = group
        return found

    def attributes(self, read: Document, name: str = "") -> dict[str, Any]:
        return read(below(name, ".zattrs"))

    def held(self, read: Document, array: StoredArray) -> tuple[tuple[int, ...], np.dtype[Any]]:
        document = read(below(_folder(array), ".zarray"))
        return tuple(document["shape"]), np.dtype(document["dtype"])

    def layout(self, read: Document, array: StoredArray) -> Layout:
        document = read(below(_folder(array), ".zarray"))
        z, y, x = whole(document["chunks"], len(array.stored_shape))[-3:]
        found = Layout((z, y, x))
        check_same(document, self._metadata(replace(array, layout=found)))
        return found

    def spec(self, array: StoredArray) -> dict[str, Any]:
        return {"driver": "zarr", "metadata": self._metadata(array)}

    def turned(self, opened: Any) -> Any:
        return _turned(opened)

    def key(self, array: StoredArray, index: Sequence[int]) -> str:
        return "/".join([_folder(array), *map(str, _index(array, index))])

    def _metadata(self, array: StoredArray) -> dict[str, Any]:
        shuffle = SHUFFLED if array.dtype.itemsize > 1 else 0
        return {
            "zarr_format": 2,
            "shape": list(array.stored_shape),
            "chunks": list(array.stored(array.layout.chunk)),
            "dtype": array.dtype.newbyteorder("<").str,
            "compressor": {"id": "blosc", "cname": "zstd", "clevel": LEVEL, "shuffle": shuffle, "blocksize": 0},
            "fill_value": 0 if array.dtype.kind == "u" else 0.0,
            "order": "C",
            "filters": None,
            "dimension_separator": "/",
        }


def _group(attributes: Mapping[str, Any]) -> bytes:
    return as_json({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})
