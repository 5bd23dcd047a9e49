"""Read what an output says of itself, on this machine, in a bucket or on a web server."""

from __future__ import annotations

from typing import Any

from znnpy.volume.location import Location
from znnpy.volume.registry import is_written, store_for


def attributes_of(place: Location, name: str = "") -> dict[str, Any]:
    """Return the attributes of an output, or of one of its arrays; none if it is no output, or cannot be read.

    name  of an array of its own, whose attributes are returned instead

    VolumeError if a bucket or a web server refuses to give them.
    """
    if place.is_local:
        return store_for(place).attributes_of(place.path, name) if is_written(place.path) else {}
    from znnpy.volume.bucket_output import remote_attributes

    return remote_attributes(place, name)


def dataset_of(place: Location, name: str) -> str | None:
    """Return the name by which the voxels of an array of an output are read; None: it needs none."""
    if place.is_local:
        return store_for(place).dataset_of(place.path, name) if is_written(place.path) else name or None
    from znnpy.volume.bucket_output import remote_dataset

    return remote_dataset(place, name)
