"""Neuroglancer's precomputed volumes, read by tensorstore. Needs the extra `io`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from znnpy.errors import VolumeError
from znnpy.messages import excerpt, option
from znnpy.volume.about import Inside
from znnpy.volume.axes import arranged
from znnpy.volume.base import Reading
from znnpy.volume.chunked import check_folder, chosen_scale, nothing_there
from znnpy.volume.chunked_about import about_chunks, inside
from znnpy.volume.location import Location
from znnpy.volume.object_store import context, files_of
from znnpy.volume.precomputed_info import INFO, node_of, resolutions
from znnpy.volume.stored_array import InvalidError
from znnpy.volume.stored_files import read_document
from znnpy.volume.tensor_volume import TensorVolume


def open_volume(location: Location, reading: Reading) -> TensorVolume:
    """Open one resolution of a volume: the finest, or the one that is asked for.

    VolumeError: the folder is missing or not precomputed, its metadata are damaged, or there is no such resolution.
    """
    limits = context()
    check_folder(location)
    if reading.dataset is not None:
        raise VolumeError(
            f"{location} holds one image, so there is no dataset {excerpt(repr(reading.dataset))} to name: choose a "
            f"resolution with {option('scale')}"
        )
    files = files_of(location, limits)
    document = read_document(files, INFO)
    if document is None:
        raise nothing_there(files, "precomputed", f"file {INFO}")
    try:
        every = resolutions(document)
        node, space = node_of(document, every[chosen_scale(location, reading, len(every))])
    except InvalidError as wrong:
        raise VolumeError(f"{files.named(INFO)} cannot be read as precomputed: {wrong}; copy it again") from None
    how = arranged(node.names or (), node.shape, reading.time, location)
    volume = TensorVolume(files, "", node, how, reading.missing, limits, INFO)
    volume.space = space
    about = about_chunks("Neuroglancer precomputed", node, {})
    volume.described = replace(about, scales=tuple(_scales(document, every)) if len(every) > 1 else ())
    return volume


def _scales(document: dict[str, Any], every: Sequence[dict[str, Any]]) -> Iterator[Inside]:
    """Describe the resolutions; those whose metadata are wrong are left out."""
    for one in every:
        with suppress(InvalidError):
            node, space = node_of(document, one)
            yield inside(str(one["key"]), node, space)
