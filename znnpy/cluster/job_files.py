"""The small files of a job, in the folder `OUTPUT.job` beside its output, on a file system or in a bucket.

    job                  what is computed, and in what items; JSON

All others lie in a folder that has the id of the run as its name, so that processes of an earlier job touch none:

    network.yaml, ..     the network, where the caller gave it as an object
    open                 it is there until the job is finished
    claims/000000123     the attempt that item 123 belongs to
    begun/000000123/ID   an attempt that has written voxels of the item, or may have
    withdrawn/ID         an attempt that must stop
    done/000000123       the attempt that finished the item, with a checksum of its voxels; JSON
    plans/KIND-WORK      the plan for one kind of machine and one shape of work

A file is written under another name and then takes its own, so it is always whole. Of several processes that create
one file, one succeeds.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Protocol

from znnpy.errors import ResumeError
from znnpy.files import create_new, read_regular, sync_folder, write_all
from znnpy.volume.location import Location

JOB = "job"
MOST_BYTES = 2**26  # of a file that is read ..
MOST_WEIGHTS = 2**36  # .. and of the weights of a network


class JobFiles(Protocol):
    """Files by their keys, which have slashes between their parts."""

    def read(self, key: str) -> bytes | None:
        """Return the content of a file; None if it is not there."""

    def write(self, key: str, content: bytes) -> None:
        """Write a file, whatever is there."""

    def create(self, key: str, content: bytes) -> bool:
        """Write a file where none is; return whether it is there with this content."""

    def every(self, folder: str = "") -> list[str]:
        """Return the keys of all files below a folder, sorted; "" for all files."""

    def remove_one(self, key: str) -> None:
        """Remove a file if it is there."""

    def remove(self, folder: str) -> None:
        """Remove all files below a folder; "" for all files."""


class JobFolder:
    """Files of a job in a folder, which all processes see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, key: str) -> bytes | None:
        """Return the content of a file; None if it is not there."""
        most = MOST_WEIGHTS if key.endswith(".npz") else MOST_BYTES
        path = self.path / key
        try:
            size = path.stat().st_size
            if size > most:
                raise ResumeError(f"{path} has {size:,} bytes, and no such file of a job has more than {most:,}")
            return read_regular(path, size + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, key: str, content: bytes) -> None:
        """Write a file, whatever is there."""
        draft = self._draft(key, content)
        draft.replace(self.path / key)
        sync_folder(draft.parent)

    def create(self, key: str, content: bytes) -> bool:
        """Write a file where none is; return whether it is there with this content."""
        draft = self._draft(key, content)
        try:
            os.link(draft, self.path / key)  # the one way that is exclusive on network file systems too
        except FileExistsError:
            return self.read(key) == content
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(draft.parent)
        return True

    def every(self, folder: str = "") -> list[str]:
        """Return the keys of all files below a folder, sorted; "" for all files."""
        root = self.path / folder
        return sorted(
            (Path(at) / name).relative_to(self.path).as_posix()
            for at, _, names in os.walk(root)
            for name in names
            if not name.startswith(".")
        )

    def remove_one(self, key: str) -> None:
        """Remove a file if it is there."""
        (self.path / key).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        """Remove all files below a folder; "" for all files."""
        there = self.path / folder
        if there.is_dir():
            shutil.rmtree(there)

    def _draft(self, key: str, content: bytes) -> Path:
        """Write a file under a name of its own, in the folder of its key."""
        folder = (self.path / key).parent
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{secrets.token_hex(8)}"
        with create_new(draft) as file:
            write_all(file, content)
            os.fsync(file.fileno())
        return draft


def job_files(out: Location, run: str = "") -> JobFiles:
    """Return the files of the job of an output; those of one run if it is named."""
    place = out.with_name(f"{out.name}.{JOB}")
    place = place.inside(run) if run else place
    if place.is_local:
        return JobFolder(place.path)
    from znnpy.volume.bucket import check_bucket

    return check_bucket(place)
