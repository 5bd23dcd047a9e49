"""Writes what a run did when: a file in Chrome's trace event format, which chrome://tracing and Perfetto show.

A span is work of one track, a device's stream or a thread, from begin to end. Spans go into a draft beside the file as
they come, an event a line, so that runs of days need no memory for them; when the run ends the draft takes the file's
name. A killed run leaves a draft that is no JSON.

Format  Google's "Trace Event Format": events X (a span), M (names and order of tracks), i (why a run ended early).
"""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from znnpy.errors import OutputError
from znnpy.files import create_draft, open_regular, remove, write_all
from znnpy.messages import option

BATCH = 1000  # events that are written at a time
HEAD = b'{"displayTimeUnit": "ms", "otherData": {"made by": "znnpy"}, "traceEvents": [\n'
TAIL = b"\n]}\n"
PROCESS = 1  # the only one
ENCODE = json.JSONEncoder(allow_nan=False).encode  # JSON has no NaN


class Spans(ABC):
    """Takes what a run did when, from any thread."""

    @abstractmethod
    def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
        """Take a span of a track.

        begin, end  seconds of `time.perf_counter()`
        facts       shown beside the name
        """

    @contextmanager
    def span(self, track: str, name: str, **facts: int | float | str) -> Iterator[None]:
        """Record what is done within as a span, to its end or to where it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record(track, name, begin, time.perf_counter(), **facts)


class Trace(Spans):
    """Writes a trace, over an older one too. A context manager; OutputError where that cannot be done, then or later.

    A run that ends with an exception leaves what was recorded until then, and a last event with the exception's
    sentence; no file where nothing was recorded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft: Path | None = None
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._size = 0  # bytes of the draft that hold whole events
        self._events: list[str] = []  # not yet in the draft
        self._rows: dict[str, int] = {}  # of tracks, in the order of their first spans
        self._zero = 0.0
        self._failed: OutputError | None = None

    def check(self) -> None:
        """Raise OutputError if there is another file, which a trace does not replace."""
        try:
            replaces = os.path.lexists(self._path) and not _is_trace(self._path)
        except OSError as error:
            raise self._refused(error) from error
        if replaces:
            raise OutputError(
                f"{self._path} is no trace, and nothing else is replaced by one; give another {option('trace')}"
            )

    def __enter__(self) -> Self:
        self.check()
        try:
            self._draft, self._file = create_draft(self._path)
        except OSError as error:
            raise self._refused(error) from error
        self._zero = time.perf_counter()
        self._events = [_named("process_name", 0, name="znnpy")]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self._lock:
                self._close(error)
        except OutputError as late:
            if error is None:
                raise
            if late is not error:
                error.add_note(f"afterwards: {late}")  # the first error is the cause
        finally:
            if self._draft is not None:
                remove(self._draft)

    def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
        """Record a span of a track. OutputError if a full batch cannot be written, and ever after."""
        span = {
            "ph": "X",
            "name": name,
            "ts": self._micros(begin),
            "dur": round(1e6 * (end - begin), 3),
            "pid": PROCESS,
        }
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._file is None:
                raise ValueError(f"the trace {self._path} is not open")
            row = self._rows.get(track)
            if row is None:
                row = self._rows[track] = len(self._rows) + 1
                self._events += _named("thread_name", row, name=track), _named("thread_sort_index", row, sort_index=row)
            self._events.append(ENCODE({**span, "tid": row, "args": facts}))
            if len(self._events) >= BATCH:
                self._write(self._file)

    def _close(self, error: BaseException | None) -> None:
        file, draft, self._file = self._file, self._draft, None
        assert file is not None
        assert draft is not None
        with file:
            if self._failed is not None:
                raise self._failed
            if error is not None and not self._rows:
                return
            if error is not None:
                sentence, now = str(error) or type(error).__name__, self._micros(time.perf_counter())
                event = {"ph": "i", "s": "g", "name": sentence, "ts": now, "pid": PROCESS, "tid": 0}
                self._events.append(ENCODE(event))
            self._write(file)
            try:
                _write_all(file, self._size, TAIL)
                os.fsync(file.fileno())
                draft.replace(self._path)
            except OSError as refused:
                raise self._refused(refused) from refused

    def _write(self, file: FileIO) -> None:
        """Move all events to the draft; once more, to the same place, where Ctrl-C came in between."""
        if not self._events:
            return
        before = b",\n" if self._size else HEAD
        lines = before + ",\n".join(self._events).encode()
        try:
            _write_all(file, self._size, lines)
        except OSError as error:
            self._failed = self._refused(error)
            raise self._failed from error
        self._size, self._events = self._size + len(lines), []

    def _micros(self, at: float) -> float:
        return round(1e6 * (at - self._zero), 3)

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write the trace {self._path}: {error.strerror}; make room, give another {option('trace')}, or none"
        )


def _is_trace(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(HEAD)) == HEAD


def _named(kind: str, row: int, **facts: int | str) -> str:
    """Return an event that names a process or a track, or says where a track is shown."""
    return ENCODE({"ph": "M", "name": kind, "pid": PROCESS, "tid": row, "args": facts})


def _write_all(file: FileIO, at: int, content: bytes) -> None:
    """Write at byte `at`, however often the system takes a part only."""
    file.seek(at)
    write_all(file, content)
