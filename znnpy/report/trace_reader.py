"""Reads the trace of a run, a file in Chrome's trace event format (`znnpy.run.trace`), span by span."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, cast

from znnpy.errors import ZnnpyError
from znnpy.files import open_regular
from znnpy.messages import excerpt
from znnpy.run.trace import HEAD, TAIL

MOST_LINE_BYTES = 2**16  # in one event
MOST_TRACKS = 10_000
MOST_SECONDS = 1e12  # 30,000 years


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work of one track."""

    track: str
    name: str
    begin: float  # seconds since the trace began
    end: float
    facts: dict[str, Any]


def read_spans(path: Path) -> Iterator[Span | str]:
    """Yield the spans of a trace in the order in which they were recorded; last, the reason why a run ended early.

    Raise ZnnpyError for a file that is no whole trace of a run: when it is found, which may be after some spans.
    """
    try:
        with open_regular(path) as raw, BufferedReader(cast(RawIOBase, raw)) as file:
            if file.readline(2 * len(HEAD)) != HEAD:
                raise ZnnpyError(f"{path} is no trace of a run: give what `znnpy infer --trace` wrote")
            tracks: dict[int, str] = {}
            while line := file.readline(MOST_LINE_BYTES):
                if line == TAIL[1:]:
                    return
                if (event := _event(line, tracks)) is not None:
                    yield event
    except FileNotFoundError:
        raise ZnnpyError(f"there is no file {path}; check the path") from None
    except OSError as error:
        raise ZnnpyError(f"cannot read {path}: {error.strerror}; check the path") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ZnnpyError(f"{path} is damaged ({excerpt(error)}): run `znnpy infer --trace` again") from error
    raise ZnnpyError(f"{path} is cut short: run `znnpy infer --trace` again")


def _event(line: bytes, tracks: dict[int, str]) -> Span | str | None:
    """Return the event of a line, or remember the name of a track; a built-in exception says that it is neither."""
    event = json.loads(line.rstrip(b",\n"))
    match event["ph"]:
        case "X":
            begin, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            if not (abs(begin) < MOST_SECONDS and 0 <= seconds < MOST_SECONDS):
                raise ValueError(f"a span from {begin} s of {seconds} s")
            if not isinstance(event["args"], dict):
                raise TypeError("a span whose facts are no object")
            return Span(tracks[event["tid"]], excerpt(event["name"]), begin, begin + seconds, event["args"])
        case "i":
            return excerpt(event["name"])
        case "M" if event["name"] == "thread_name":
            tracks[event["tid"]] = excerpt(event["args"]["name"])
            if len(tracks) > MOST_TRACKS:
                raise ValueError(f"more than {MOST_TRACKS} tracks")
    return None
