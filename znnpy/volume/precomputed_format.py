"""Neuroglancer precomputed: raw chunks that hold all maps, with axes and vectors in the order x, y, z.

`info` has no place for attributes of others, so those of znnpy lie beside it, in `znnpy.json`. Voxel sizes are in nm,
and positions are whole numbers of voxels: what does not fit is said in a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from znnpy.errors import OutputError
from znnpy.messages import option
from znnpy.shapes import Vec3
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

ATTRIBUTES = "znnpy.json"
NANOMETERS = {
    "angstrom": 0.1,
    "nanometer": 1.0,
    "micrometer": 1e3,
    "millimeter": 1e6,
    "centimeter": 1e7,
    "meter": 1e9,
}
FARTHEST = 2**40  # voxels from the origin, as they are read
_log = logging.getLogger(__name__)


class Precomputed(ChunkedFormat):
    """Unsharded volumes of Neuroglancer, with raw chunks."""

    name, prefix, dtypes = "Precomputed", "precomputed", ("uint8", "float32")
    whole_maps, keeps_zeros, marks = True, True, (ATTRIBUTES, "info")

    def folder(self, array: StoredArray) -> str:
        return below(array.name, _key(array))

    def documents(self, stored: Sequence[Sequence[StoredArray]], attributes: Mapping[str, Any]) -> Files:
        found: Files = {}
        for levels in stored:
            first = levels[0]
            own = listed(first.attributes or {})
            if first.name:
                found[below(first.name, ATTRIBUTES)] = as_json(own)
            else:
                found[ATTRIBUTES] = as_json({**listed(attributes), **own})
            scales = [self._scale(one) for one in levels]
            info = {"@type": "neuroglancer_multiscale_volume", **_volume(first)}
            listed_scales = [{**scale, "chunk_sizes": [scale["chunk_size"]]} for scale in scales]
            for scale in listed_scales:
                del scale["chunk_size"]
            found[below(first.name, "info")] = as_json({**info, "scales": listed_scales})
            for sentence in lost(levels):
                _log.warning("%s", sentence)
        if stored[0][0].name:
            found[ATTRIBUTES] = as_json(listed(attributes))
        return found

    def attributes(self, read: Document, name: str = "") -> dict[str, Any]:
        return read(below(name, ATTRIBUTES))

    def held(self, read: Document, array: StoredArray) -> tuple[tuple[int, ...], np.dtype[Any]]:
        document = read(below(array.name, "info"))
        size = document["scales"][array.level]["size"][::-1]
        return (document["num_channels"], *size), np.dtype(document["data_type"])

    def layout(self, read: Document, array: StoredArray) -> Layout:
        document = read(below(array.name, "info"))
        scale = document["scales"][array.level]
        (chunk,) = scale["chunk_sizes"]
        x, y, z = whole(chunk, 3)
        found = Layout((z, y, x))
        check_same({**scale, "chunk_size": chunk} | {"chunk_sizes": None}, self._scale(replace(array, layout=found)))
        check_same({name: document.get(name) for name in _volume(array)}, _volume(array))
        return found

    def spec(self, array: StoredArray) -> dict[str, Any]:
        return {
            "driver": "neuroglancer_precomputed",
            "multiscale_metadata": _volume(array),
            "scale_metadata": self._scale(array),
        }

    def turned(self, opened: Any) -> Any:
        import tensorstore

        return opened[tensorstore.d[:].translate_to[0]].T

    def key(self, array: StoredArray, index: Sequence[int]) -> str:
        region, begin = array.region_of(index), _begin(array)
        spans = (f"{lo + at}-{hi + at}" for lo, hi, at in zip(region.lo[1:], region.hi[1:], begin, strict=True))
        return f"{self.folder(array)}/{'_'.join(reversed(list(spans)))}"

    def dataset(self, array: str) -> str:
        return array

    def _scale(self, array: StoredArray) -> dict[str, Any]:
        return {
            "key": _key(array),
            "size": list(array.size[::-1]),
            "chunk_size": list(array.layout.chunk[::-1]),
            "resolution": list(_resolution(array)[::-1]),
            "voxel_offset": list(_begin(array)[::-1]),
            "encoding": "raw",
        }


def _volume(array: StoredArray) -> dict[str, Any]:
    return {"type": "image", "data_type": array.dtype.name, "num_channels": array.shape[0]}


def _resolution(array: StoredArray) -> tuple[float, float, float]:
    """Return the voxel size (z, y, x) in nm; the number as it is where the unit is not known."""
    if array.space is None:
        return (float(2**array.level),) * 3
    z, y, x = (
        size * NANOMETERS.get(unit or "", 1.0) for size, unit in zip(array.space.scale, array.space.units, strict=True)
    )
    return z, y, x


def _key(array: StoredArray) -> str:
    return "_".join(f"{size:.12g}" for size in reversed(_resolution(array)))


def _begin(array: StoredArray) -> Vec3:
    """Return the position (z, y, x) of the first voxel, in voxels."""
    if array.space is None:
        return 0, 0, 0
    factor = 2**array.level
    z, y, x = (
        round(at / size - (factor - 1) / 2 / factor)
        for at, size in zip(array.space.translation, array.space.scale, strict=True)
    )
    if (far := max(map(abs, (z, y, x)))) > FARTHEST:
        raise OutputError(
            f"the output lies {far:.3g} voxels from the origin, and precomputed positions reach {FARTHEST:,}; choose "
            f".zarr or .n5 in {option('out')}"
        )
    return z, y, x


def lost(levels: Sequence[StoredArray]) -> list[str]:
    """Return sentences on what the format cannot hold of the position of an array."""
    first = levels[0]
    if first.space is None:
        return ["the voxel size of the volume is not known, and precomputed outputs must have one: they say 1 nm"]
    found = []
    if unknown := [str(unit) for unit in first.space.units if unit not in NANOMETERS]:
        found.append(
            f"precomputed voxel sizes are in nm, and the volume's are in {unknown[0]}: the numbers are kept as they are"
        )
    at = [t / s for t, s in zip(first.space.translation, first.space.scale, strict=True)]
    off = max(abs(one - round(one)) for one in at)
    if off > 1e-6:
        found.append(
            f"precomputed positions are whole numbers of voxels: the output is placed up to {off:.2g} voxels away from "
            f"where it lies; choose .zarr or .n5 in {option('out')} to keep its position"
        )
    return found
