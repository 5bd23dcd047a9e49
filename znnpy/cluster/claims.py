"""Keep account of which attempt a work item belongs to, and which one finished it.

Items are tried at least once; the result is as if each was computed once. An attempt claims its item, and looks before
it writes voxels whether the item is still its own: another attempt may have been begun since, as this one seemed lost.
The first attempt that ends creates the record of the item; only one process can. Every attempt leaves a mark before its
first voxels. So an item with several marks may hold voxels of several attempts, and is held against the checksum in its
record when the job is finished.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from znnpy.cluster.job_files import JobFiles, JobFolder
from znnpy.errors import OutputError, ResumeError
from znnpy.messages import excerpt, option

CLAIMS, BEGUN, DONE, WITHDRAWN = "claims", "begun", "done", "withdrawn"
OPEN = "open"  # a file that is there until the job is finished
LOOK_SECONDS = 1.0  # for which an attempt may write to a bucket without having looked whether it has its item
ATTEMPT = re.compile(r"[\w.-]{1,200}")


class AttemptLostError(OutputError):
    """Another attempt has the item now, so that this one must not write."""


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """A finished work item.

    attempt   id of the attempt
    worker    name of the worker
    checksum  of its voxels, see `checksum`
    voxels    of the first output
    seconds   that it took
    peak      bytes of memory that the process had at most
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    item: int
    attempt: str
    worker: str
    checksum: int
    voxels: int
    seconds: float
    peak: int


@cache
def _adapter() -> TypeAdapter[ItemRecord]:
    return TypeAdapter(ItemRecord)


def new_attempt() -> str:
    """Return the id of a new attempt: the name of the machine, and random digits."""
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
    return f"{host[:40]}-{secrets.token_hex(8)}"


class Claim:
    """The claim of one attempt on one item."""

    def __init__(self, files: JobFiles, item: int, attempt: str) -> None:
        if not ATTEMPT.fullmatch(attempt):
            raise ValueError(
                f"the id of an attempt has letters, digits, '.', '-' and '_', and not {excerpt(attempt)!r}"
            )
        self.item, self.attempt = item, attempt
        self._files = files
        self._is_marked = False
        self._seconds = 0.0 if isinstance(files, JobFolder) else LOOK_SECONDS
        self._looked = -inf

    def take(self) -> None:
        """Claim the item; an earlier attempt loses it.

        AttemptLostError if the job is finished or removed, if this attempt was withdrawn, or if a later attempt of the
        same coordinator has the item.
        """
        if self._files.read(OPEN) is None:
            raise self._lost("the job was finished or removed")
        if self._files.read(f"{WITHDRAWN}/{self.attempt}") is not None:
            raise self._lost("it was withdrawn")
        there = self._owner()
        if there is not None and _is_later(there, self.attempt):
            raise self._lost(f"attempt {excerpt(there)} has it")
        self._files.write(self._key, self.attempt.encode())

    def check(self, *, at_once: bool = False) -> None:
        """Raise AttemptLostError if another attempt has the item, or the job is gone; mark that this one writes.

        The mark comes first: where the claim still stands afterwards, whoever takes the item later finds the mark.

        at_once  whether a bucket is asked although it was a moment ago
        """
        now = time.monotonic()
        if not at_once and self._is_marked and now < self._looked + self._seconds:
            return
        if not self._is_marked:
            if self._files.read(OPEN) is None:
                raise self._lost("the job was finished or removed")
            self._files.create(f"{BEGUN}/{self.item:09}/{self.attempt}", b"")
            self._is_marked = True
        self._looked = now
        there = self._owner()
        if there != self.attempt:
            gone = "the job was finished or removed, or the attempt was withdrawn"
            raise self._lost(gone if there is None else f"attempt {excerpt(there)} has it")

    @property
    def _key(self) -> str:
        return f"{CLAIMS}/{self.item:09}"

    def _owner(self) -> str | None:
        """Return the attempt that has the item; None if none has it."""
        found = self._files.read(self._key)
        return None if found is None else found.decode(errors="replace")

    def _lost(self, why: str) -> AttemptLostError:
        return AttemptLostError(f"work item {self.item} is no longer of attempt {self.attempt}: {why}")

    def finish(self, record: ItemRecord) -> None:
        """Record that the item is finished; AttemptLostError if another attempt was faster."""
        self.check(at_once=True)
        if not self._files.create(f"{DONE}/{self.item:09}", _adapter().dump_json(record)):
            raise AttemptLostError(f"work item {self.item} was finished by another attempt than {self.attempt}")


def withdraw(files: JobFiles, attempt: str, items: Iterable[int]) -> None:
    """Take items from an attempt, which stops before it writes any more, and begins none."""
    files.write(f"{WITHDRAWN}/{attempt}", b"")
    for item in items:
        if files.read(f"{CLAIMS}/{item:09}") == attempt.encode():
            files.remove_one(f"{CLAIMS}/{item:09}")


def _is_later(one: str, other: str) -> bool:
    """Return whether an attempt is a later one of the same coordinator: ids of these end in a number."""
    its, _, number = one.rpartition("-")
    mine, _, another = other.rpartition("-")
    return its == mine and number.isdecimal() and another.isdecimal() and int(number) > int(another)


def record_of(files: JobFiles, item: int) -> ItemRecord | None:
    """Return the record of an item; None if it is not finished. ResumeError if it is damaged."""
    content = files.read(f"{DONE}/{item:09}")
    if content is None:
        return None
    try:
        found = _adapter().validate_json(content)
        if found.item != item:
            raise ValueError(f"it is the record of item {found.item}")
    except (ValidationError, ValueError) as error:
        raise ResumeError(
            f"the record of work item {item} is damaged ({excerpt(error)}), so it is not known whether it is finished; "
            f"start again with {option('overwrite', True)}"
        ) from None
    return found


def finished_items(files: JobFiles, count: int) -> list[int]:
    """Return the items of a job with `count` of them that are finished."""
    return _numbers(files, DONE, count)


def contested_items(files: JobFiles, count: int) -> list[int]:
    """Return the items that several attempts wrote, or may have written."""
    marks: dict[int, int] = {}
    for key in files.every(BEGUN):
        number = key.split("/")[1]
        if number.isdecimal() and int(number) < count:
            marks[int(number)] = marks.get(int(number), 0) + 1
    return sorted(item for item, times in marks.items() if times > 1)


def forget(files: JobFiles, item: int) -> None:
    """Remove the record of an item, so that it is computed again. Marks stay: an attempt may still go on."""
    files.remove_one(f"{DONE}/{item:09}")


def _numbers(files: JobFiles, folder: str, count: int) -> list[int]:
    names: list[Any] = [key.rpartition("/")[2] for key in files.every(folder)]
    return sorted({int(name) for name in names if name.isdecimal() and int(name) < count})
