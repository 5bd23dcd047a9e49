"""The journal of an unfinished output: the job, and which of its columns are on disk. Loads no numpy.

The first line marks the file as a journal, and holds the run's id and whether the run may replace an output. The second
line is the header. Every further line is a list of columns, synced to disk before the line was written, and a checksum.
A killed run may leave an incomplete last line; it is ignored, and removed before the next one is written.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from znnpy.errors import OutputError, ResumeError
from znnpy.files import create_new, is_still, open_regular, reopen, sync_folder, write_all
from znnpy.messages import excerpt, option
from znnpy.shapes import Vec3
from znnpy.volume.location import Location

MAGIC = b"znnpy journal 2 "  # followed by 16 hexadecimal digits, the run's id, and NEW or REPLACES
NEW, REPLACES = b" new\n", b" replaces\n"
FIRST_LINE = re.compile(rb"%s([0-9a-f]{16}) (new|replaces)\n" % MAGIC)
RECORD = re.compile(rb"\[(\d{1,9}(?:, \d{1,9})*)\] ([0-9a-f]{8})\n")
MOST_LINE_BYTES = 2**24  # limit of the header and of a record: longer lines are damaged
MOST_COLUMNS = 2**26  # limit of an output: each takes a byte before anything else is known
FOLDERS = (".zarr", ".n5", ".precomputed")  # suffixes of volumes beside which outputs are of the same format
COLUMNS_A_RECORD = 2**16  # columns per line; longer lists take several lines


class Settings(TypedDict, total=False):
    """The settings that determine the output bytes of a run, besides its plan."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    only: list[str]  # names of primitives that the caller chose
    processor: str
    versions: dict[str, str]  # versions of libraries
    gpu: dict[str, str | int] | None
    item: list[int]  # voxels (z, y, x) of a work item, where several processes write the output


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Everything a resumed run needs to write the same bytes as an uninterrupted one."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    job: dict[str, Any]  # identifies the job; JSON types
    settings: Settings
    plan: str  # content of plan.json
    blas: str  # kernels that BLAS ran
    columns: int  # number of columns of the output
    wisdom: dict[str, str] = field(default_factory=dict)  # FFTW's wisdom by transform; other transforms were estimated

    @property
    def item(self) -> Vec3 | None:
        """Voxels of a work item, where several processes write the output; None: one process writes it."""
        found = self.settings.get("item")
        return None if found is None or len(found) != 3 else (found[0], found[1], found[2])


def default_output(volume: Location, network: str) -> Path:
    """Return the default path of an output, beside the volume: `<volume>_<network>.h5`.

    It has the suffix of the volume where that is one of folders, such as .zarr.

    OutputError for a volume that is not on this machine.
    """
    if not volume.is_local:
        raise OutputError(f"{volume} is not on this machine, so the output needs a name: give {option('out')}")
    word = re.sub(r"[^\w.+-]+", "_", network)  # a network may be called lab/net, a file may not
    path = volume.path
    return path.with_name(f"{path.stem}_{word}{path.suffix if path.suffix in FOLDERS else '.h5'}")


def journal_path(out: Path) -> Path:
    """Return the path of the journal of the output `out`."""
    return out.with_name(out.name + ".journal")


def read_header(out: Path) -> JournalHeader | None:
    """Read the header of the journal of the output `out`; None if there is none, or if it was never complete.

    ResumeError if it is damaged, OutputError if no run wrote it, OSError if it cannot be read.
    """
    journal = Journal(journal_path(out))
    try:
        file = open_regular(journal.path)
    except FileNotFoundError:
        return None
    with file:
        found = journal.read_from(file)
    return None if found is None else found[0]


class ColumnSet(Set[int]):
    """A set of columns 0 to `count` - 1, stored as one byte per column."""

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
        """Make the result of `&`, `|`, `-` and `^`."""
        return frozenset(it)


class Journal:
    """The journal file, from `create` or `open` to `close`. Only the holder of the output's lock writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: str | None = None  # id of the run; None if it was killed before it wrote the id
        self.replaces = False  # the run may replace an existing output
        self._file: FileIO | None = None
        self._length = 0  # bytes known to be complete lines

    def create(self, run: str, header: JournalHeader, *, replaces: bool = False) -> None:
        """Create a journal; it is on disk on return. FileExistsError if there is anything at its path.

        run  id of the run, 16 hexadecimal digits.
        """
        if not 0 < header.columns <= MOST_COLUMNS:
            raise OutputError(f"an output has 1 to {MOST_COLUMNS} columns, not {header.columns}; choose larger patches")
        first = MAGIC + run.encode() + (REPLACES if replaces else NEW)
        lines = first + header_line(header)
        self._file = create_new(self.path)
        write_all(self._file, lines)
        os.fsync(self._file.fileno())
        sync_folder(self.path.parent)
        self.run, self.replaces, self._length = run, replaces, len(lines)

    def open(self) -> bool:
        """Open the journal of an earlier run and read its id. Return False if there is none.

        OutputError if it is not a journal of znnpy; the file is left unchanged.
        """
        try:
            file = reopen(self.path)
        except FileNotFoundError:
            return False
        except PermissionError:
            raise
        except OSError as error:
            raise self._foreign(error.strerror) from error
        self._file = file
        try:
            self._first_line(file)
        except BaseException:
            self.close()
            raise
        return True

    def read(self) -> tuple[JournalHeader, Set[int]] | None:
        """Return header and finished columns; None if the run was killed before its header was complete.

        ResumeError if more than the end of the last line is damaged.
        """
        file = self._opened()
        file.seek(0)
        return self.read_from(file)

    def read_from(self, file: BinaryIO | FileIO) -> tuple[JournalHeader, Set[int]] | None:
        """Read as `read` does, from a file that the caller opened at its beginning."""
        with os.fdopen(os.dup(file.fileno()), "rb") as lines:
            length = self._first_line(lines)
            line = lines.readline(MOST_LINE_BYTES)
            if not length or not (line.endswith(b"\n") or lines.read(1)):
                return None
            header = self._header(line)
            length += len(line)
            done = ColumnSet(header.columns)
            number = 2
            while line := lines.readline(MOST_LINE_BYTES):
                number += 1
                columns = columns_of(line, header.columns)
                if columns is None:
                    if lines.read(1):
                        shown = excerpt(line.removesuffix(b"\n").decode(errors="replace"), 40)
                        raise self.damaged(number, f"'{shown}' is not a record of columns 0 to {header.columns - 1}")
                    break
                done.update(columns)
                length += len(line)
        self._length = length
        return header, done

    def append(self, columns: Iterable[int]) -> None:
        """Record columns whose data are on disk; on return the record is on disk too."""
        file, records = self._opened(), record_lines(columns)
        file.truncate(self._length)
        file.seek(self._length)
        write_all(file, records)
        os.fsync(file.fileno())
        self._length += len(records)

    def is_still_there(self) -> bool:
        """Return whether the path is still that of the open file."""
        return self._file is not None and is_still(self.path, self._file.fileno())

    def remove(self) -> None:
        """Remove the file if it is open and still at its path, and close it."""
        if self.is_still_there():
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Close the file. It may be called more than once."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self.run, self.replaces, self._length = None, False, 0

    def _opened(self) -> FileIO:
        if self._file is None:
            raise ValueError(f"the journal {self.path} is not open")
        return self._file

    def _first_line(self, file: BinaryIO | FileIO) -> int:
        """Read and store the first line. Return its bytes; 0 if the run was killed before it was complete."""
        line = file.readline(64)
        if found := FIRST_LINE.fullmatch(line):
            self.run, self.replaces = found[1].decode(), found[2] == b"replaces"
            return len(line)
        self.run, self.replaces = None, False
        whole = any(FIRST_LINE.fullmatch(line + rest) for rest in _rests(line))
        if not whole:
            raise self._foreign("it does not begin as one")
        return 0

    def _header(self, line: bytes) -> JournalHeader:
        try:
            return header_of(line)
        except ValueError as error:
            raise self.damaged(2, str(error)) from None

    def damaged(self, line: int, why: str) -> ResumeError:
        """Make the error for a damaged line, counted from 1."""
        return ResumeError(
            f"the journal {self.path} is damaged in line {line} ({why}), so it is not known what is finished; "
            f"start again with {option('overwrite', True)}"
        )

    def _foreign(self, why: str | None) -> OutputError:
        return OutputError(
            f"{self.path} is not the journal of a run ({why}), and is left as it is; move it away, or give another "
            f"{option('out')}"
        )


def header_line(header: JournalHeader) -> bytes:
    """Return the header as a line of the journal."""
    return _adapter().dump_json(header) + b"\n"


def header_of(line: bytes) -> JournalHeader:
    """Read the header from a line of the journal; ValueError says what is wrong with it."""
    try:
        header = _adapter().validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the header"
        raise ValueError(f"{excerpt(where, 80)}: {excerpt(first['msg'], 100)}") from None
    if not 0 < header.columns <= MOST_COLUMNS:
        raise ValueError(f"columns: {excerpt(header.columns, 40)}")
    return header


def header_digest(header: JournalHeader) -> str:
    """Return the digest by which an output identifies its journal: SHA-256 of the header, in hexadecimal digits."""
    return hashlib.sha256(header_line(header)).hexdigest()


def _rests(line: bytes) -> Iterator[bytes]:
    """Yield the bytes that complete `line` if it is the beginning of a first line."""
    for last in (NEW, REPLACES):
        whole = MAGIC + b"0" * 16 + last
        yield whole[len(line) :]


def record_lines(columns: Iterable[int]) -> bytes:
    """Return the records of columns, a line for at most COLUMNS_A_RECORD of them."""
    records, left = b"", sorted(columns)
    while left:
        part, left = left[:COLUMNS_A_RECORD], left[COLUMNS_A_RECORD:]
        numbers = b", ".join(b"%d" % column for column in part)
        records += b"[%s] %08x\n" % (numbers, zlib.crc32(numbers))
    return records


def columns_of(line: bytes, count: int) -> list[int] | None:
    """Return the columns of one record; None if the line is not a record, or only the first part of one."""
    found = RECORD.fullmatch(line)
    if found is None or zlib.crc32(found[1]) != int(found[2], 16):
        return None
    columns = [int(column) for column in found[1].split(b", ")]
    return columns if max(columns) < count else None


@cache
def _adapter() -> TypeAdapter[JournalHeader]:
    return TypeAdapter(JournalHeader)
