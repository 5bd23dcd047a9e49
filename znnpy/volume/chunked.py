"""Checks that all formats of folders with chunks share."""

from __future__ import annotations

from znnpy.errors import VolumeError
from znnpy.messages import option
from znnpy.volume.base import Reading
from znnpy.volume.location import Location


def check_folder(location: Location) -> None:
    """Raise VolumeError where a local volume is no folder."""
    if location.is_local and not location.path.is_dir():
        raise VolumeError(
            f"{location} is not a folder; check the path"
            if location.path.exists()
            else f"there is no folder {location}; check the path"
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
