"""The names of volumes and outputs: paths, and URLs of buckets and web servers, each with a dataset inside.

    em.h5                             a file or folder
    em.h5::raw                        an array inside
    file:///data/em.zarr              the same as a path
    s3://bucket/em.zarr               in a bucket of Amazon S3, or of a server that speaks its protocol
    gs://bucket/em.n5                 in a bucket of Google Cloud Storage
    https://host/em.zarr              on a web server: for reading alone
    precomputed://gs://bucket/em      the format before the place, as Neuroglancer writes it

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from znnpy.errors import VolumeError
from znnpy.messages import excerpt

BUCKETS = ("s3", "gs")
WEB = ("http", "https")
PREFIXES = ("zarr", "zarr2", "zarr3", "n5", "precomputed")  # formats that may be written before a place
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_PART = "::"  # between a place and a dataset


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a volume or an output, and the array inside it.

    place    the path as it was given, or the URL without a slash at its end
    scheme   "file", or one of BUCKETS or WEB
    dataset  name of the array inside; None: not named
    prefix   format that was written before the place, one of PREFIXES; None: found by the suffix or the content
    """

    place: str
    scheme: str = "file"
    dataset: str | None = None
    prefix: str | None = None

    @classmethod
    def of(cls, name: str | os.PathLike[str] | Location, dataset: str | None = None) -> Location:
        """Read the name of a volume or an output.

        dataset  given beside the name; `::dataset` at the end of the name must not differ from it

        ValueError names what is wrong with the name.
        """
        if isinstance(name, Location):
            return name if dataset is None else replace(name, dataset=dataset)
        text = os.fspath(name)
        if not isinstance(name, str):
            return cls(text, dataset=dataset)
        prefix = None
        for word in PREFIXES:
            if text.startswith(f"{word}://"):
                prefix, text = word, text.removeprefix(f"{word}://")
        if not os.path.lexists(text):  # a file may have :: in its name
            text, inside = _parted(text)
            if inside is not None and dataset not in (None, inside):
                raise ValueError(
                    f"{excerpt(name)} names the dataset {excerpt(inside)}, and {excerpt(dataset)} is given"
                )
            dataset = inside if dataset is None else dataset
        match = _SCHEME.match(text)
        if match is None:
            return cls(text, "file", dataset, prefix)
        scheme = match[1]
        if scheme == "file":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise ValueError(f"{excerpt(name)} names the host {parts.netloc!r}: give file:/// and a path")
            return cls(unquote(parts.path), "file", dataset, prefix)
        if scheme not in (*BUCKETS, *WEB):
            known = ", ".join(f"{one}://" for one in ("file", *BUCKETS, *WEB))
            raise ValueError(f"{excerpt(name)} begins with {scheme}://, and only {known} are known")
        place = text.rstrip("/")
        if len(place) <= len(scheme) + 3 or not urlsplit(place).netloc:
            raise ValueError(f"{excerpt(name)} names no {'bucket' if scheme in BUCKETS else 'host'}")
        if any(part in (".", "..") for part in place.split("/")):
            raise ValueError(f"{excerpt(name)} has . or .. between slashes: give the key itself")
        return cls(place, scheme, dataset, prefix)

    def __str__(self) -> str:
        return self.place

    @property
    def is_local(self) -> bool:
        """Say whether it is a path on this machine."""
        return self.scheme == "file"

    @property
    def path(self) -> Path:
        """The path on this machine; ValueError for a URL."""
        if not self.is_local:
            raise ValueError(f"{self} is not on this machine")
        return Path(self.place)

    @property
    def name(self) -> str:
        """The last part of the place."""
        return Path(self.place).name if self.is_local else PurePosixPath(urlsplit(self.place).path).name

    @property
    def bucket(self) -> str:
        """The bucket or the host."""
        return "" if self.is_local else urlsplit(self.place).netloc

    @property
    def key(self) -> str:
        """The part behind the bucket or the host, without a slash at its beginning."""
        return "" if self.is_local else self.place.split("/", 3)[3] if self.place.count("/") > 2 else ""

    def with_name(self, name: str) -> Location:
        """Return the location beside this one, of another name, without a dataset."""
        if self.is_local:
            return Location(str(self.path.with_name(name)))
        return Location(f"{self.place.rpartition('/')[0]}/{name}", self.scheme)

    def inside(self, name: str) -> Location:
        """Return a file or folder below this location."""
        return replace(self, place=f"{self.place.rstrip('/')}/{name}".rstrip("/"), dataset=None)


def volume_location(volume: str | os.PathLike[str] | Location, dataset: str | None = None) -> Location:
    """Read the name of a volume as `Location.of` does; VolumeError names what is wrong with it."""
    try:
        return Location.of(volume, dataset)
    except ValueError as error:
        raise VolumeError(f"{error}; check the name of the volume") from None


def path_of(volume: object) -> Path | None:
    """Return the path of a volume on this machine; None for a URL or an object of the caller.

    VolumeError if the name of the volume cannot be read.
    """
    if not isinstance(volume, str | Path):
        return None
    location = volume_location(volume)
    return location.path if location.is_local else None


def _parted(text: str) -> tuple[str, str | None]:
    """Return a place and the dataset that follows `::`, if any."""
    place, mark, inside = text.rpartition(_PART)
    return (place, inside.strip("/")) if mark and place and inside.strip("/") else (text, None)
