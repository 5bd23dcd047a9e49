"""Checks that all formats of folders with chunks share."""

from __future__ import annotations

from znnpy.errors import VolumeError
from znnpy.messages import excerpt, option
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
from znnpy.volume.stored_files import StoredFiles


def check_folder(location: Location) -> None:
    """Raise VolumeError where a local volume is no folder."""
    if location.is_local and not location.path.is_dir():
        raise VolumeError(
            f"{location} is not a folder; check the path"
            if location.path.exists()
            else f"there is no folder {location}; check the path"
        )


def nothing_there(files: StoredFiles, format_name: str, marks: str) -> VolumeError:
    """Return an error for a place without the metadata of a format."""
    return VolumeError(f"{files.place} is not {format_name}: it holds no {marks}; check the path")


def not_listed(location: Location, dataset: str | None) -> VolumeError:
    """Return an error for a group in a bucket or on a web server, of which no array is known."""
    if dataset is None:
        return VolumeError(
            f"{location} is a group, and the names in it cannot be listed there; name one with {option('dataset')}"
        )
    return VolumeError(
        f"{location} has no dataset {excerpt(repr(dataset))}, and the names that it has cannot be listed there; "
        f"give another {option('dataset')}"
    )


def chosen_scale(what: object, reading: Reading, count: int) -> int:
    """Return which of `count` resolutions is read; VolumeError if there are fewer."""
    scale = reading.scale or 0
    if not 0 <= scale < count:
        raise VolumeError(
            f"{what} holds {count:,} {'resolution' if count == 1 else 'resolutions'}, from 0 to {count - 1:,}, and no "
            f"{scale:,}; give another {option('scale')}"
        )
    return scale
