"""The log of a command in a file: what was called, each phase, warnings, the progress, and the error at the end."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from contextlib import suppress
from io import FileIO
from pathlib import Path

from znnpy.errors import OutputError
from znnpy.files import create_new, reopen
from znnpy.messages import excerpt, one_line, option
from znnpy.run_log import PROGRESS

_FIRST = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d znnpy ")  # how a log begins
_FIRST_BYTES = len("2026-01-01 00:00:00 znnpy ")


class LogFile(logging.Handler):
    """Appends a line for each record to a file, which a resumed run goes on with.

    A disk that is full, or a file system that is gone, ends the log and not the run.
    """

    def __init__(self, path: Path, words: str) -> None:
        """Open the file, and write what was called; OutputError if it cannot be written, or holds something else."""
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._file = _opened(path)
        self.say(words)

    def say(self, sentence: str) -> None:
        """Write a line of the command itself."""
        self.emit(logging.LogRecord("znnpy", logging.INFO, "", 0, "%s", (sentence,), None))

    def emit(self, record: logging.LogRecord) -> None:
        line = one_line(self.format(record))
        if record.levelno == logging.WARNING:
            date, hour, sentence = line.split(" ", 2)
            line = f"{date} {hour} warning: {sentence}"
        with suppress(OSError):
            self._file.write(f"{line}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        super().close()


def is_progress(record: logging.LogRecord) -> bool:
    """Return whether a record tells of progress, which has a form of its own on standard error."""
    return record.name == PROGRESS


def _opened(path: Path) -> FileIO:
    """Open a log to append to; OutputError if that is not possible."""
    try:
        try:
            file = reopen(path)
        except FileNotFoundError:
            file = create_new(path)
    except OSError as error:
        raise OutputError(
            f"cannot write the log {excerpt(path)}: {error.strerror}; give another {option('log')}"
        ) from error
    begin = file.read(_FIRST_BYTES) or b""
    if begin and not _FIRST.fullmatch(begin):
        file.close()
        raise OutputError(f"{excerpt(path)} exists and is no log of znnpy; give another {option('log')}")
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_APPEND)  # runs that share a log write whole lines
    return file
