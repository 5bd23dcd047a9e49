"""Zarr volumes, formats 2 and 3, and the images of OME-Zarr, read by tensorstore. Needs the extra `io`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.volume.axes import arranged
from znnpy.volume.base import Reading, pick, why_not
from znnpy.volume.chunked import check_folder, chosen_scale, not_listed, nothing_there
from znnpy.volume.chunked_about import about_chunks, version
from znnpy.volume.location import Location
from znnpy.volume.object_store import context, files_of
from znnpy.volume.space import Scales, Space
from znnpy.volume.stored_array import Node
from znnpy.volume.tensor_volume import TensorVolume
from znnpy.volume.zarr_nodes import read_nodes


def open_volume(location: Location, reading: Reading) -> TensorVolume:
    """Open an array of a folder: the named one, the only 3D or 4D numeric one in any group, or the folder itself.

    Of an OME-Zarr image with several resolutions the finest is read unless another is asked for.

    VolumeError: the folder is missing or not Zarr, its metadata are damaged, there is no such array, or several, or it
    is not a volume.
    """
    limits = context()
    check_folder(location)
    files = files_of(location, limits)
    wanted = reading.dataset.strip("/") if reading.dataset is not None else None
    nodes = _named(read_nodes(files, wanted if not files.can_list else None))
    if not nodes:
        raise nothing_there(files, "Zarr", "zarr.json, .zarray or .zgroup")
    name = _name(location, reading, nodes)
    node = nodes[name]
    how = None
    if node.names is None:
        reading.check_one_time(location)
    else:
        how = arranged(node.names, node.shape, reading.time, f"{location}: {name}" if name else location)
    document = "zarr.json" if node.spec["driver"] == "zarr3" else ".zarray"
    volume = TensorVolume(files, name, node, how, reading.missing, limits, f"{name}/{document}".lstrip("/"))
    scales, number = _image(nodes, name)
    below: list[tuple[str, Space | None]] = []
    form = f"Zarr {node.spec['metadata']['zarr_format']}"
    if scales is not None:
        volume.space = scales.spaces[number]
        group = name.rpartition("/")[0]
        paths = (f"{group}/{path}".lstrip("/") if path != "." else name for path in scales.paths)
        below = list(zip(paths, scales.spaces, strict=True))
        form += f", OME-Zarr {_ome_version(nodes[group].attributes)}"
    volume.described = about_chunks(form, node, nodes, below)
    return volume


def _ome_version(attributes: Mapping[str, Any]) -> str:
    """Return the version of the metadata of an image."""
    ome = attributes.get("ome")
    if isinstance(ome, Mapping):
        return version(ome.get("version"), "0.5")
    return version(attributes["multiscales"][0].get("version"), "0.4")


def _image(nodes: Mapping[str, Node], name: str) -> tuple[Scales | None, int]:
    """Return the image that an array belongs to, and which of its resolutions the array is."""
    group, _, last = name.rpartition("/")
    last = last or "."  # an array whose own metadata describe it, as in outputs of znnpy
    scales = Scales.of(nodes[group].attributes) if group in nodes else None
    return (scales, scales.paths.index(last)) if scales is not None and last in scales.paths else (None, 0)


def _named(nodes: dict[str, Node]) -> dict[str, Node]:
    """Return the nodes, with the names of axes that the images state which they belong to."""
    found = dict(nodes)
    for name, node in nodes.items():
        names = None if (scales := _image(nodes, name)[0]) is None else scales.names
        if node.dtype is not None and names is not None and len(names) == len(node.shape) and {"y", "x"} <= set(names):
            found[name] = replace(node, names=names)
    return found


def _name(location: Location, reading: Reading, nodes: Mapping[str, Node]) -> str:
    """Return the name of the array to read."""
    dataset = reading.dataset
    arrays = {name: (node.volume_shape, node.dtype) for name, node in nodes.items() if node.dtype is not None}
    if "" in arrays:
        if dataset is not None:
            raise VolumeError(f"{location} is one Zarr array, so there is no dataset {excerpt(repr(dataset))} to name")
        reading.check_single(location)
        return ""
    images = {name: scales for name, node in nodes.items() if (scales := Scales.of(node.attributes)) is not None}
    group = "" if dataset is None else dataset.strip("/")
    if dataset is None and group not in images and len(images) == 1 and reading.scale is not None:
        group = next(iter(images))
    if group in images and group not in arrays:
        paths = [f"{group}/{path}".lstrip("/") for path in images[group].paths]
        name = paths[chosen_scale(location, reading, len(paths))]
        if name in arrays and (dataset is not None or reading.scale or why_not(*arrays[name]) is None):
            return name
        if reading.scale or dataset is not None:
            raise VolumeError(f"{location} has no array {excerpt(name, 60)}, which its metadata name; copy it again")
    else:
        reading.check_single(location, dataset=False)
    if not arrays and not location.is_local:
        raise not_listed(location, dataset)
    return pick(arrays, dataset, location)
