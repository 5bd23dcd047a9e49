"""The journal of an output in a bucket: objects below `OUTPUT.journal/`, each written once.

    run              the id of the run, and the header; written first, and only where there is none
    files/NAME       the metadata files of the output, which get their own names when it is complete
    done/0000000001  columns that are in the bucket; each further record has the next number

A record is written only where none of its number is. So of two runs that write one output the first to record columns
goes on, and the other finds its number taken and stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from znnpy.errors import OutputError, ResumeError
from znnpy.messages import excerpt, option
from znnpy.volume.bucket import Bucket
from znnpy.volume.journal import ColumnSet, JournalHeader, columns_of, header_line, header_of, record_lines
from znnpy.volume.location import Location
from znnpy.volume.output_names import RUN

RUN_KEY, FILES, DONE = "run", "files", "done"
_RECORD = re.compile(rf"{DONE}/(\d{{10}})")


def journal_location(out: Location) -> Location:
    """Return the place of the journal of an output in a bucket."""
    return out.with_name(f"{out.name}.journal")


def print_kernels(out: str) -> None:
    """Print the processor and the BLAS kernels that the run of an output began with, a line each; nothing without one.

    The command line calls it in a process of its own.
    """
    found = BucketJournal(Location.of(out)).read()
    if found is not None:
        print(found[0].settings["processor"], found[0].blas, sep="\n")


class BucketJournal:
    """The journal of one output."""

    def __init__(self, out: Location) -> None:
        self.place = journal_location(out)
        self.run: str | None = None  # id of the run that is recorded
        self._bucket = Bucket(self.place)
        self._records = 0  # number of the last one

    def create(self, run: str, header: JournalHeader, files: dict[str, bytes]) -> None:
        """Create the journal of a run; OutputError if another run was faster.

        files  the metadata files of the output, by their names below it
        """
        if not self._bucket.create(RUN_KEY, run.encode() + b"\n" + header_line(header)):
            raise self.taken()
        for name, content in files.items():
            self._bucket.write(f"{FILES}/{name}", content)
        self.run, self._records = run, 0

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
        for number, key in enumerate(self._bucket.keys(DONE), 1):
            found = _RECORD.fullmatch(key)
            if found is None or int(found[1]) != number:
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
        keys = self._bucket.keys(FILES)
        found = {key.removeprefix(f"{FILES}/"): self._bucket.read(key) for key in keys}
        return {name: content for name, content in found.items() if content is not None}

    def append(self, columns: Iterable[int]) -> None:
        """Record columns whose chunks are in the bucket; OutputError if another run records too."""
        if not self._bucket.create(f"{DONE}/{self._records + 1:010}", record_lines(columns)):
            raise self.taken()
        self._records += 1

    def is_ours(self, run: str) -> bool:
        """Return whether the journal is still that of a run."""
        content = self._bucket.read(RUN_KEY)
        return content is not None and content.startswith(run.encode() + b"\n")

    def remove(self) -> None:
        """Remove all objects of the journal, the one that names the run last."""
        for folder in (DONE, FILES):
            self._bucket.remove(folder)
        self._bucket.remove_one(RUN_KEY)
        self.run, self._records = None, 0

    def taken(self) -> OutputError:
        """Make the error for a journal that another run writes."""
        return OutputError(
            f"another run writes to {self.place}, so this one ends; make sure that only one run writes an output, and "
            f"continue with {option('resume', True)}"
        )

    def _damaged(self, key: str, why: str) -> ResumeError:
        return ResumeError(
            f"the journal {self.place}/{key} is damaged ({excerpt(why)}), so it is not known what is finished; start "
            f"again with {option('overwrite', True)}"
        )
