"""N5 volumes, read by tensorstore. Needs the extra `io`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.volume.axes import arranged
from znnpy.volume.base import Reading, pick
from znnpy.volume.chunked import check_folder, chosen_scale, not_listed, nothing_there
from znnpy.volume.chunked_about import about_chunks, version
from znnpy.volume.location import Location
from znnpy.volume.n5_nodes import ATTRIBUTES, read_nodes, space_of
from znnpy.volume.object_store import context, files_of
from znnpy.volume.stored_array import Node
from znnpy.volume.tensor_volume import TensorVolume

SCALE = re.compile(r"s(\d{1,3})")


def open_volume(location: Location, reading: Reading) -> TensorVolume:
    """Open an array of a folder: the named one, the only 3D or 4D numeric one in any group, or the folder itself.

    Of a group with the arrays s0, s1, ... the finest, s0, is read unless another is asked for.

    VolumeError: the folder is missing or not N5, its metadata are damaged, there is no such array, or several, or it
    is not a volume.
    """
    limits = context()
    check_folder(location)
    files = files_of(location, limits)
    wanted = reading.dataset.strip("/") if reading.dataset is not None else None
    nodes = read_nodes(files, wanted if not files.can_list else None)
    if not nodes:
        raise nothing_there(files, "N5", ATTRIBUTES)
    name = _name(location, reading, nodes)
    node = nodes[name]
    what = f"{location}: {name}" if name else location
    how = arranged(node.names or (), node.shape, reading.time, what)
    volume = TensorVolume(files, name, node, how, reading.missing, limits, f"{name}/{ATTRIBUTES}".lstrip("/"))
    group, _, last = name.rpartition("/")
    around = nodes[group].attributes if name and group in nodes else {}
    volume.space = space_of(around, node, last)
    arrays = {one: other.volume_shape for one, other in nodes.items() if other.dtype is not None}
    levels = _images(arrays).get(group, []) if SCALE.fullmatch(last) else []
    scales = [(one, space_of(around, nodes[one], one.rpartition("/")[2])) for one in levels]
    stated = version(nodes[""].attributes.get("n5"), "") if "" in nodes else ""
    volume.described = about_chunks(f"N5 {stated}".strip(), node, nodes, scales)
    return volume


def _name(location: Location, reading: Reading, nodes: Mapping[str, Node]) -> str:
    """Return the name of the array to read."""
    dataset = reading.dataset
    arrays = {name: (node.volume_shape, node.dtype) for name, node in nodes.items() if node.dtype is not None}
    if "" in arrays:
        if dataset is not None:
            raise VolumeError(f"{location} is one N5 array, so there is no dataset {excerpt(repr(dataset))} to name")
        reading.check_single(location)
        return ""
    images = _images(arrays)
    group = None if dataset is None else dataset.strip("/")
    if group is None and len(images) == 1 and len(next(iter(images.values()))) == len(arrays):
        group = next(iter(images))  # all arrays are resolutions of one image
    if group is not None and group in images:
        return images[group][chosen_scale(location, reading, len(images[group]))]
    reading.check_single(location, dataset=False)
    if not arrays and not location.is_local:
        raise not_listed(location, dataset)
    return pick(arrays, dataset, location)


def _images(arrays: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the groups with arrays s0, s1, ... without a gap, each with their names."""
    found: dict[str, list[str]] = {}
    for name in arrays:
        group, _, last = name.rpartition("/")
        if SCALE.fullmatch(last):
            found.setdefault(group, []).append(name)
    for names in found.values():
        names.sort(key=lambda name: int(name.rpartition("/")[2][1:]))
    return {
        group: names
        for group, names in found.items()
        if [name.rpartition("/")[2] for name in names] == [f"s{number}" for number in range(len(names))]
    }
