"""The journal of an output in a bucket: objects below `OUTPUT.journal/`.

    run                  the id of the run, and the header; written first, and only where there is none
    RUN/owner            the process that writes now; whoever continues the run puts its own name there
    RUN/files/NAME       the metadata files of the output, which get their own names when it is complete
    RUN/done/0000000001  columns that are in the bucket; each further record has the next number

A record is written only where none of its number is, by the owner. So of two processes that write one output, the one
that finds another owner, or its number taken, stops. An owner looks every CHECK_SECONDS, before it writes chunks; and
who takes an output over waits for HANDOVER_SECONDS, so that an earlier owner that still runs has noticed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Set

from znnpy.errors import OutputError, ResumeError
from znnpy.messages import excerpt, option
from znnpy.volume.bucket import Bucket, check_bucket
from znnpy.volume.journal import ColumnSet, JournalHeader, columns_of, header_line, header_of, record_lines
from znnpy.volume.location import Location
from znnpy.volume.lock import OutputLockedError
from znnpy.volume.output_names import RUN

CHECK_SECONDS = 1.0  # time for which an owner may write without having looked whether it still is
HANDOVER_SECONDS = 2.0
RUN_KEY, OWNER, FILES, DONE = "run", "owner", "files", "done"
_RECORD = re.compile(r"\d{10}")


def journal_location(out: Location) -> Location:
    """Return the place of the journal of an output in a bucket."""
    return out.with_name(f"{out.name}.journal")


def print_kernels(out: str) -> None:
    """Print the processor and the BLAS kernels that the run of an output began with, a line each; nothing without one.

    The command line calls it in a process of its own.
    """
    place = Location.of(out)
    check_bucket(place)
    found = BucketJournal(place).read()
    if found is not None:
        print(found[0].settings["processor"], found[0].blas, sep="\n")


class BucketJournal:
    """The journal of one output."""

    def __init__(self, out: Location) -> None:
        self.place = journal_location(out)
        self.run: str | None = None  # id of the run that is recorded
        self._bucket = Bucket(self.place)
        self._records = 0  # number of the last one
        self._owner = secrets.token_hex(8).encode()
        self._looked = 0.0  # time at which this was known to be the owner

    @property
    def is_listed(self) -> bool:
        """Say whether the bucket lists the journal."""
        return self._bucket.holds(RUN_KEY)

    def create(self, run: str, header: JournalHeader, files: dict[str, bytes], *, handover: bool = False) -> None:
        """Create the journal of a run; OutputError if another run was faster.

        files     the metadata files of the output, by their names below it
        handover  whether there was another run, which may still write
        """
        if not self._bucket.create(RUN_KEY, run.encode() + b"\n" + header_line(header)):
            raise self.taken()
        self.run, self._records = run, 0
        self._bucket.write(self._key(OWNER), self._owner)
        for left in {key.partition("/")[0] for key in self._bucket.every()} - {run}:
            if RUN.fullmatch(left):
                self._bucket.remove(left)
        for name, content in files.items():
            self._bucket.write(self._key(FILES, name), content)
        if handover:
            time.sleep(HANDOVER_SECONDS)
        self._looked = time.monotonic()

    def take_over(self) -> None:
        """Become the owner of the run that was read; OutputError if it has gone on since."""
        if not self._is_of(self.run) or self._bucket.holds(self._record(self._records + 1)):
            raise self.taken()
        self._bucket.write(self._key(OWNER), self._owner)
        time.sleep(HANDOVER_SECONDS)
        self.check()

    def check(self, seconds: float = 0.0) -> None:
        """Raise OutputError if another process owns the run; nothing is asked within so many seconds."""
        now = time.monotonic()
        if now < self._looked + seconds:
            return
        if not self.is_ours(self.run):
            raise self.taken()
        self._looked = now

    def read(self) -> tuple[JournalHeader, Set[int]] | None:
        """Return the header and the finished columns of an earlier run; None if there is none. ResumeError: damaged."""
        content = self._bucket.read(RUN_KEY)
        if content is None:
            return None
        first, _, line = content.partition(b"\n")
        if not RUN.fullmatch(first.decode(errors="replace")):
            raise OutputError(
                f"{self.place} is not the journal of a run, and is left as it is; move it away, or give another "
                f"{option('out')}"
            )
        try:
            header = header_of(line)
        except ValueError as error:
            raise self._damaged(RUN_KEY, str(error)) from None
        self.run, done = first.decode(), ColumnSet(header.columns)
        folder = self._key(DONE, "")
        keys = self._bucket.every()
        if RUN_KEY not in keys:
            raise OutputError(
                f"the bucket of {self.place} does not list it, so it is not known what is finished; give credentials "
                f"that may list the bucket, and run it again"
            )
        for number, key in enumerate((key for key in keys if key.startswith(folder)), 1):
            found = key.removeprefix(folder)
            if not _RECORD.fullmatch(found) or int(found) != number:
                raise self._damaged(key, f"it is not record {number}")
            for record in (self._bucket.read(key) or b"").splitlines(keepends=True):
                columns = columns_of(record, header.columns)
                if columns is None:
                    raise self._damaged(key, f"it is not a record of columns 0 to {header.columns - 1}")
                done.update(columns)
            self._records = number
        return header, done

    def files(self) -> dict[str, bytes]:
        """Return the metadata files of the output, by their names below it."""
        folder = self._key(FILES, "")
        found = {key.removeprefix(folder): self._bucket.read(key) for key in self._bucket.every(folder.rstrip("/"))}
        return {name: content for name, content in found.items() if content is not None}

    def append(self, columns: Iterable[int]) -> None:
        """Record columns whose chunks are in the bucket; OutputError if another run records too."""
        self.check()
        if not self._bucket.create(self._record(self._records + 1), record_lines(columns)):
            raise self.taken()
        self._records += 1

    def is_ours(self, run: str | None) -> bool:
        """Return whether the journal is still that of a run, and this process is its owner."""
        return self._is_of(run) and self._bucket.read(self._key(OWNER)) == self._owner

    def exists(self) -> bool:
        """Return whether there is a journal."""
        return self._bucket.read(RUN_KEY) is not None

    def forget(self) -> None:
        """Remove the records: before the chunks that they tell of are removed."""
        if self.run is not None:
            self._bucket.remove(self._key(DONE))

    def remove(self, run: str | None = None) -> None:
        """Remove the journal. If that is cut short, what is left belongs to no run; `run` is the one it belonged to."""
        self._bucket.remove_one(RUN_KEY)
        if run := self.run or run:
            self._bucket.remove(run)
        self.run, self._records = None, 0

    def _is_of(self, run: str | None) -> bool:
        content = self._bucket.read(RUN_KEY)
        return run is not None and content is not None and content.startswith(run.encode() + b"\n")

    def _key(self, *parts: str) -> str:
        return "/".join((self.run or "", *parts))

    def _record(self, number: int) -> str:
        return self._key(DONE, f"{number:010}")

    def taken(self) -> OutputError:
        """Make the error for a journal that another run writes."""
        return OutputLockedError(
            f"another run writes to {self.place}, so this one ends; make sure that only one run writes an output, and "
            f"continue with {option('resume', True)}"
        )

    def _damaged(self, key: str, why: str) -> ResumeError:
        return ResumeError(
            f"the journal {self.place}/{key} is damaged ({excerpt(why)}), so it is not known what is finished; start "
            f"again with {option('overwrite', True)}"
        )
