"""Read the metadata of N5 folders, and check them before tensorstore uses them.

The axes of N5 are (x, y, z), and more after them: channels, then time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.volume.space import LONGEST_NAME, Space
from znnpy.volume.stored_array import InvalidError, Node, axis_names, joined, sizes
from znnpy.volume.stored_files import StoredFiles, read_document
from znnpy.volume.zarr_nodes import MOST_NESTED, MOST_NODES, NUMBERS

ATTRIBUTES = "attributes.json"
NAMES = ("x", "y", "z", "c", "t")
DIMENSIONS_BYTES = 4  # of a block's header for each axis
HEADER_BYTES = 4  # mode and number of axes
COMPRESSORS: dict[str, tuple[str, ...]] = {  # with the settings of each
    "raw": (),
    "gzip": ("level", "useZlib"),
    "bzip2": ("blockSize",),
    "xz": ("preset",),
    "blosc": ("cname", "clevel", "shuffle", "blocksize"),
    "zstd": ("level",),
}
MOST_SCALES = 32


def read_nodes(files: StoredFiles, wanted: str | None) -> dict[str, Node]:
    """Read the groups and arrays of a folder, by name, "" for the folder itself; nothing if it is not N5.

    wanted  a group or array: it is read with what is in it, and the groups around it; None: everything is read

    Where folders are not listed, a group has the arrays s0, s1, ... as long as there is one of the next number.
    """
    found: dict[str, Node] = {}
    parts = wanted.split("/") if wanted else []
    waiting = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
    while waiting:
        name = waiting.pop()
        document = read_document(files, f"{name}/{ATTRIBUTES}".lstrip("/"))
        if document is None and not name:
            return {}
        try:
            node = node_of(document or {})
        except InvalidError as wrong:
            key = files.named(f"{name}/{ATTRIBUTES}".lstrip("/"))
            raise VolumeError(f"{key} cannot be read as N5: {wrong}; copy it again") from None
        found[name] = node
        if len(found) > MOST_NODES:
            raise VolumeError(
                f"{files.place} holds more than {MOST_NODES:,} arrays and groups; name a folder inside it"
            )
        is_inside = not wanted or name == wanted or name.startswith(f"{wanted}/")
        if node.dtype is not None or name.count("/") >= MOST_NESTED or not is_inside:
            continue
        if files.can_list:
            waiting += [f"{name}/{one}".lstrip("/") for one in reversed(files.folders(name))]
        else:
            found |= _scales_in(files, name)
    return found


def _scales_in(files: StoredFiles, group: str) -> dict[str, Node]:
    """Return the arrays s0, s1, ... of a group."""
    found: dict[str, Node] = {}
    for number in range(MOST_SCALES):
        name = f"{group}/s{number}".lstrip("/")
        document = read_document(files, f"{name}/{ATTRIBUTES}")
        if document is None:
            break
        try:
            found[name] = node_of(document)
        except InvalidError as wrong:
            key = files.named(f"{name}/{ATTRIBUTES}")
            raise VolumeError(f"{key} cannot be read as N5: {wrong}; copy it again") from None
    return found


def node_of(document: dict[str, Any]) -> Node:
    """Return the group or array that attributes describe; InvalidError if they are wrong."""
    if "dimensions" not in document:
        return Node(document)
    shape = sizes(document, "dimensions", 0)
    chunk = sizes(document, "blockSize", 1, len(shape))
    kind = document.get("dataType")
    dtype = np.dtype(kind) if isinstance(kind, str) and kind in NUMBERS - {"float16"} else np.dtype(object)
    found = document.get("compression")
    if found is None and isinstance(document.get("compressionType"), str):
        found = {"type": document["compressionType"]}  # of the first version of the format
    if not isinstance(found, dict):
        raise InvalidError(f"compression is {excerpt(found, 60)}")
    name = found.get("type")
    refused, compression = None, {"type": "raw"}
    if isinstance(name, str) and name in COMPRESSORS:
        compression = {key: found[key] for key in ("type", *COMPRESSORS[name]) if key in found}
    else:
        refused = (
            f"is compressed with {excerpt(name, 60)}, and only {', '.join(COMPRESSORS)} are read; write it with one of "
            "these"
        )
    metadata = {
        "dimensions": list(shape),
        "blockSize": list(chunk),
        "dataType": dtype.name,
        "compression": compression,
    }
    return Node(
        document,
        shape,
        dtype,
        chunk,
        chunk,
        _names(document, len(shape)),
        {"driver": "n5", "metadata": metadata},
        partial(joined, "/"),
        "zero",
        is_blosc=name == "blosc",
        behind=HEADER_BYTES + DIMENSIONS_BYTES * len(shape),
        refused=refused,
    )


def _names(document: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return the names of axes: those that `axes` states, else x, y, z, and for more axes c and t."""
    stated = axis_names(document.get("axes"), count)
    return stated or (*NAMES[:count], *(f"axis {place}" for place in range(len(NAMES), count)))


def space_of(group: Mapping[str, Any], node: Node, last: str) -> Space | None:
    """Return where the voxels of an array lie; None if its attributes and those of its group do not say it.

    group  attributes of the group that holds the array
    last   name of the array in its group

    The numbers are those of the axes as N5 has them, (x, y, z), or of `axes` where it names them:
    `pixelResolution` {"dimensions", "unit"}, or `resolution` and `units`, or `transform` {"axes", "scale", "translate",
    "units"}; for a smaller resolution, times `downsamplingFactors`, which also move its first voxel by half of what it
    is larger; the place of the first voxel is `translate`, or `offset`.
    """
    own = node.attributes
    transform = own.get("transform")
    if isinstance(transform, Mapping):
        names = axis_names(transform.get("axes"), len(node.shape))
        scale = _triple(names, transform.get("scale"))
        if scale is not None:
            return _placed(
                scale, _triple(names, transform.get("translate")), _units(names, transform.get("units")), node
            )
    names = node.names
    factors = _triple(names, own.get("downsamplingFactors"))
    for holder in (own, group):
        pixel = holder.get("pixelResolution")
        unit: Any = pixel.get("unit") if isinstance(pixel, Mapping) else holder.get("units")
        numbers = pixel.get("dimensions") if isinstance(pixel, Mapping) else pixel
        scale = _triple(names, numbers if numbers is not None else holder.get("resolution"))
        if scale is None:
            continue
        if factors is None and holder is group:
            factors = _triple(names, _factors_in(group, last))
        at = next((found for key in ("translate", "offset") if (found := _triple(names, own.get(key)))), None)
        if factors is not None and (holder is group or isinstance(pixel, Mapping)):
            at = at or _times(scale, tuple((factor - 1) / 2 for factor in factors))
            scale = _times(scale, factors)
        return _placed(scale, at, _units(names, unit), node)
    return None


def _factors_in(group: Mapping[str, Any], last: str) -> Any:
    """Return the factors of an array s1, s2, ... in the list of its group."""
    every = group.get("downsamplingFactors", group.get("scales"))
    number = int(last[1:]) if last[:1] == "s" and last[1:].isdecimal() and len(last) < 4 else -1
    return every[number] if isinstance(every, list) and 0 <= number < len(every) else None


Triple = tuple[float, ...]


def _placed(scale: Triple, at: Triple | None, units: tuple[str | None, ...], node: Node) -> Space | None:
    if not all(isfinite(n) and n > 0 for n in scale) or not all(map(isfinite, at or ())):
        return None
    z, y, x = at or (0.0, 0.0, 0.0)
    return Space((scale[0], scale[1], scale[2]), (z, y, x), (units[0], units[1], units[2]), node.names or NAMES)


def _times(one: Triple, other: Triple) -> Triple:
    return tuple(a * b for a, b in zip(one, other, strict=True))


def _triple(names: tuple[str, ...] | None, found: Any) -> Triple | None:
    """Return numbers for z, y and x from a list for all axes, or for x, y and z; None if it is none."""
    if not isinstance(found, list) or names is None or not 3 <= len(found) <= len(names):
        return None
    if not all(type(n) in (int, float) and abs(n) < 1e300 for n in found):
        return None
    by_name = dict(zip(names, found, strict=False))
    return tuple(float(by_name[name]) for name in "zyx") if {"z", "y", "x"} <= set(by_name) else None


def _units(names: tuple[str, ...] | None, found: Any) -> tuple[str | None, ...]:
    """Return the units of z, y and x, from a list or from one unit for all."""
    if isinstance(found, str) and len(found) <= LONGEST_NAME:
        return (found,) * 3
    if not isinstance(found, list) or not all(isinstance(one, str) and len(one) <= LONGEST_NAME for one in found):
        return (None,) * 3
    by_name = dict(zip(names or (), found, strict=False))
    return tuple(by_name.get(name) for name in "zyx")
