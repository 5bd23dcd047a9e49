"""The journal of an unfinished output: what the job is, and which columns of it are on disk. Loads no numpy.

First line: the header. Every further line: a list of columns that were synced to disk before the line was written.
A run that was killed may leave half a last line; it is ignored, and cut off before the next is written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from znnpy.errors import ResumeError

FORMAT = 1  # version of the journal


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Everything a resumed run needs to write the same bytes as an uninterrupted one."""

    job: dict[str, Any]  # what identifies the job; JSON types
    settings: dict[str, Any]  # what else decides the bytes: versions of libraries, words of the caller; JSON types
    plan: str  # plan.json
    blas: str  # kernels BLAS ran
    columns: int  # how many the output has
    format: int = FORMAT
    wisdom: dict[str, str] = field(default_factory=dict)  # FFTW's, by transform; the others were estimated


def default_output(volume: Path, network: str) -> Path:
    """Where an output goes when nobody says: beside the volume, as `<volume>_<network>.h5`."""
    word = re.sub(r"[^\w.+-]+", "_", network)  # a network may be called lab/net, a file may not
    return volume.with_name(f"{volume.stem}_{word}.h5")


def journal_path(out: Path) -> Path:
    """Where the journal of the output `out` lies."""
    return out.with_name(out.name + ".journal")


def read_header(out: Path) -> JournalHeader | None:
    """Header of the journal beside the output `out`; None when there is none. ResumeError when it is damaged."""
    journal = Journal(journal_path(out))
    return journal.read()[0] if journal.path.exists() else None


class ColumnSet(Set[int]):
    """Some of `count` columns: one byte each, in or out."""

    def __init__(self, count: int, columns: Iterable[int] = ()) -> None:
        self._holds = bytearray(count)
        self.update(columns)

    def update(self, columns: Iterable[int]) -> None:
        for column in columns:
            self._holds[column] = 1

    def __contains__(self, column: object) -> bool:
        return isinstance(column, int) and 0 <= column < len(self._holds) and self._holds[column] == 1

    def __iter__(self) -> Iterator[int]:
        return (column for column, held in enumerate(self._holds) if held)

    def __len__(self) -> int:
        return self._holds.count(1)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        """What `&`, `|`, `-` and `^` make."""
        return frozenset(it)


class Journal:
    """The file itself. Only the holder of the output's lock writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._length = 0  # bytes known to be whole lines

    def create(self, header: JournalHeader) -> None:
        """Begin a journal; it appears whole or not at all."""
        draft = self.path.with_name(self.path.name + ".new")
        line = _adapter().dump_json(header) + b"\n"
        with draft.open("wb") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        sync_folder(self.path.parent)
        self._length = len(line)

    def read(self) -> tuple[JournalHeader, Set[int]]:
        """Header and finished columns. ResumeError when more than the end of the last line is damaged."""
        with self.path.open("rb") as file:
            header = self._header(file.readline())
            done = ColumnSet(header.columns)
            for number, line in enumerate(file, start=2):
                columns = _columns(line, header.columns)
                if columns is None:
                    if file.readline():
                        shown = line.rstrip(b"\n")[:40]
                        raise self._damaged(number, f"{shown!r} is no list of columns 0 to {header.columns - 1}")
                    break
                done.update(columns)
                self._length += len(line)
        return header, done

    def _header(self, line: bytes) -> JournalHeader:
        if not line.endswith(b"\n"):
            raise self._damaged(1, f"{len(line)} bytes without an end of line")
        try:
            header = _adapter().validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the header"
            raise self._damaged(1, f"{where}: {first['msg']}") from None
        if header.format != FORMAT:
            raise self._damaged(1, f"format {header.format} instead of {FORMAT}")
        if header.columns < 1:
            raise self._damaged(1, f"columns: {header.columns}")
        self._length = len(line)
        return header

    def append(self, columns: Iterable[int]) -> None:
        """Record columns whose data are on disk; on return, so is the record."""
        line = json.dumps(sorted(columns)).encode() + b"\n"
        with self.path.open("r+b") as file:
            file.truncate(self._length)
            file.seek(self._length)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._length += len(line)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _damaged(self, line: int, why: str) -> ResumeError:
        return ResumeError(
            f"the journal {self.path} is damaged in line {line} ({why}), so what was finished is not known; "
            "start again with --overwrite"
        )


def sync_folder(folder: Path) -> None:
    """Bring names created, renamed or removed in a folder to disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _columns(line: bytes, count: int) -> list[int] | None:
    """The columns of one line, or None when it is none, or only the first part of one."""
    if not line.endswith(b"\n"):
        return None
    try:
        columns = json.loads(line)
    except ValueError:
        return None
    if not isinstance(columns, list) or not all(isinstance(c, int) and 0 <= c < count for c in columns):
        return None
    return columns


@cache
def _adapter() -> TypeAdapter[JournalHeader]:
    return TypeAdapter(JournalHeader)
