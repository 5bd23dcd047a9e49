"""N5: arrays s0, s1 and so on in a group, with axes and vectors in the order x, y, z, as its readers have them.

Chunks are packed with gzip, which every reader knows; blosc and zstd are extensions.
"""

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
    listed,
    whole,
)
from znnpy.volume.space import Space

VERSION = "2.5.1"  # of the specification; readers refuse a larger first number than theirs
LEVEL = 1  # of gzip
UNITS = {"nanometer": "nm", "micrometer": "um", "millimeter": "mm", "centimeter": "cm", "meter": "m"}


class N5(ChunkedFormat):
    """N5, with the metadata that Neuroglancer, n5-viewer and funlib read."""

    name, prefix, dtypes = "N5", "n5", ("uint8", "float32")
    marks = ("attributes.json",)

    def folder(self, array: StoredArray) -> str:
        return below(array.name, f"s{array.level}")

    def documents(self, stored: Sequence[Sequence[StoredArray]], attributes: Mapping[str, Any]) -> Files:
        found: Files = {}
        root = {"n5": VERSION, **listed(attributes)}
        for levels in stored:
            first = levels[0]
            factors = [[2**one.level] * 3 + [1] * (first.shape[0] > 1) for one in levels]
            for array, factor in zip(levels, factors, strict=True):
                document = {**self._metadata(array), **_placed(array), "downsamplingFactors": factor}
                found[below(self.folder(array), "attributes.json")] = as_json(document)
            group = {**_placed(first), "downsamplingFactors": factors, "scales": factors}
            if first.name:
                found[below(first.name, "attributes.json")] = as_json(group)
            else:
                root |= group
        found["attributes.json"] = as_json(root)
        return found

    def attributes(self, read: Document, name: str = "") -> dict[str, Any]:
        found = read(below(name, "attributes.json"))
        if isinstance(found.get("voxel_offset"), list):  # from the order of N5
            found["voxel_offset"] = found["voxel_offset"][:3][::-1]
        return found

    def held(self, read: Document, array: StoredArray) -> tuple[tuple[int, ...], np.dtype[Any]]:
        document = read(below(self.folder(array), "attributes.json"))
        return tuple(document["dimensions"][::-1]), np.dtype(document["dataType"])

    def layout(self, read: Document, array: StoredArray) -> Layout:
        document = read(below(self.folder(array), "attributes.json"))
        x, y, z = whole(document["blockSize"], len(array.stored_shape))[:3]
        found = Layout((z, y, x))
        due = self._metadata(replace(array, layout=found))
        check_same({name: document.get(name) for name in due}, due)
        return found

    def spec(self, array: StoredArray) -> dict[str, Any]:
        return {"driver": "n5", "metadata": self._metadata(array)}

    def turned(self, opened: Any) -> Any:
        import tensorstore

        return opened.T if opened.rank == 4 else opened.T[tensorstore.newaxis]

    def key(self, array: StoredArray, index: Sequence[int]) -> str:
        stored = index if array.shape[0] > 1 else index[1:]
        return "/".join([self.folder(array), *map(str, reversed(stored))])

    def _metadata(self, array: StoredArray) -> dict[str, Any]:
        return {
            "dimensions": list(reversed(array.stored_shape)),
            "blockSize": list(reversed(array.stored(array.layout.chunk))),
            "dataType": array.dtype.name,
            "compression": {"type": "gzip", "level": LEVEL, "useZlib": False},
        }


def _placed(array: StoredArray) -> dict[str, Any]:
    """Return the attributes of an array, its vectors in the order of N5."""
    maps = array.shape[0] > 1
    found: dict[str, Any] = {"axes": ["x", "y", "z", *["c"] * maps]}
    own = listed(array.attributes or {})
    for name in ("offset", "voxel_offset"):
        if name in own:
            own[name] = [*own[name][::-1], *[0] * maps]
    found |= own
    if array.space is not None:
        found |= _in_space(array.space, maps, first=array.level == 0)
    return found


def _in_space(space: Space, maps: bool, *, first: bool) -> dict[str, Any]:
    scale, units = [*space.scale[::-1]], [UNITS.get(unit or "", unit or "") for unit in space.units[::-1]]
    at = [*space.translation[::-1]]
    found = {
        "resolution": scale + [1.0] * maps,
        "units": units + [""] * maps,
        "translate": at + [0.0] * maps,
    }
    if units[0] and len(set(units)) == 1:
        found["pixelResolution"] = {"dimensions": scale + [1.0] * maps, "unit": units[0]}
    return found | ({"offset": at + [0.0] * maps} if first else {})
