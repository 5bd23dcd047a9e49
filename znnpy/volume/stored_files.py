"""Files below a place, by key: in a folder of this machine, in a bucket, or on a web server."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from znnpy.errors import VolumeError
from znnpy.files import MOST_METADATA_BYTES, open_regular
from znnpy.messages import excerpt
from znnpy.volume.location import Location

MOST_ENTRIES = 10_000  # names in a folder


class StoredFiles(ABC):
    """The files below a place."""

    can_list = False  # whether `folders` lists what lies there

    def __init__(self, place: Location) -> None:
        self.place = place

    def named(self, key: str) -> str:
        """Return the whole name of a file, for messages."""
        return f"{str(self.place).rstrip('/')}/{key}".rstrip("/")

    @abstractmethod
    def read(self, key: str, most: int) -> bytes | None:
        """Return the first `most` bytes of a file; None where there is none. VolumeError if it cannot be read."""

    @abstractmethod
    def folders(self, key: str) -> Sequence[str]:
        """Return the names of the folders in a folder; () where they are not listed."""


class LocalFiles(StoredFiles):
    """The files in a folder of this machine; no pipe or device is opened."""

    can_list = True

    def read(self, key: str, most: int) -> bytes | None:
        path = self.place.path / key
        try:
            with open_regular(path) as file:
                return file.read(most)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise VolumeError(f"{path} cannot be read: {error.strerror}; copy the folder again") from None

    def folders(self, key: str) -> Sequence[str]:
        folder = self.place.path / key
        found = []
        try:
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    if number > MOST_ENTRIES:
                        raise VolumeError(f"{folder} holds more than {MOST_ENTRIES:,} entries; name a folder inside it")
                    if entry.is_dir():
                        found.append(entry.name)
        except OSError as error:
            raise VolumeError(f"{folder} cannot be listed: {error.strerror}; copy the folder again") from None
        return sorted(found)


def read_document(files: StoredFiles, key: str) -> dict[str, Any] | None:
    """Read a JSON object of at most MOST_METADATA_BYTES; None where there is no file."""
    content = files.read(key, MOST_METADATA_BYTES + 1)
    if content is None:
        return None
    name = files.named(key)
    if len(content) > MOST_METADATA_BYTES:
        raise VolumeError(
            f"{name} has more than {MOST_METADATA_BYTES:,} bytes, which metadata never need; copy it again"
        )
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise VolumeError(f"{name} cannot be read as JSON: {excerpt(error)}; copy it again") from None
    if not isinstance(document, dict):
        raise VolumeError(f"{name} holds no JSON object; copy it again")
    return document
