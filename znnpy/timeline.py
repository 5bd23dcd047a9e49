"""Read the timeline of a run from its trace: what each device and thread did when, and how busy it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from znnpy.errors import ZnnpyError
from znnpy.messages import option
from znnpy.report.trace_reader import Span, read_spans


@dataclass(frozen=True, slots=True)
class Bar:
    """The part of a span that lies in the window."""

    begin: float  # seconds since the trace began
    end: float
    kind: str  # bars of one kind have one colour: a layer, or all patches that a track works on in turn


@dataclass(slots=True)
class Row:
    """The bars of one track."""

    name: str
    bars: list[Bar] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Return whether the spans of this track are times of waiting."""
        return self.name.endswith("waiting")

    @property
    def seconds(self) -> float:
        """Seconds that the bars cover; overlaps count once."""
        covered, until = 0.0, -inf
        for bar in sorted(self.bars, key=lambda bar: bar.begin):
            covered += max(0.0, bar.end - max(bar.begin, until))
            until = max(until, bar.end)
        return covered


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run, or the part of it in a window of time."""

    begin: float  # seconds since the trace began
    end: float
    rows: Sequence[Row]
    ended: str | None  # reason why it ended early

    def share(self, row: Row) -> float:
        """Return the share of the window in which a row is busy, or waits if it is a row of waiting."""
        return row.seconds / (self.end - self.begin) if self.end > self.begin else 0.0

    def describe(self, row: Row) -> str:
        """Say how busy a row was."""
        share = 100 * self.share(row)
        return f"{share:.1f} % of the time" if row.waits else f"busy {share:.1f} %, idle {100 - share:.1f} %"

    def lines(self) -> list[str]:
        """Return lines of text that say how busy each row was."""
        wide = max(len(row.name) for row in self.rows)
        early = [] if self.ended is None else [f"the run ended early: {self.ended}"]
        rows = [f"{row.name:{wide}}  {self.describe(row)}" for row in self.rows]
        return [f"{'':{wide}}  from {self.begin:.6g} s to {self.end:.6g} s", *rows, *early]

    def as_json(self) -> dict[str, Any]:
        """Return the timeline as JSON types: `seconds` and `share` are what spans cover, of waiting if `waits`."""
        rows = [
            {
                "track": row.name,
                "waits": row.waits,
                "spans": len(row.bars),
                "seconds": row.seconds,
                "share": self.share(row),
            }
            for row in self.rows
        ]
        return {"from": self.begin, "to": self.end, "tracks": rows, "ended_early": self.ended}


def read_timeline(path: Path, begin: float | None = None, end: float | None = None) -> Timeline:
    """Read a trace from second `begin` to second `end`, by default all of it. ZnnpyError if that window is empty."""
    lo, hi = -inf if begin is None else begin, inf if end is None else end
    rows: dict[str, Row] = {}
    ended = None
    first, last = inf, -inf
    for span in read_spans(path):
        if isinstance(span, str):
            ended = span
            continue
        row = rows.setdefault(span.track, Row(span.track))
        first, last = min(first, span.begin), max(last, span.end)
        if span.end >= lo and span.begin <= hi:
            row.bars.append(Bar(max(lo, span.begin), min(hi, span.end), _kind(span)))
    if not rows:
        raise ZnnpyError(f"{path} holds no spans: run `znnpy infer --trace` again")
    if not any(row.bars for row in rows.values()):
        raise ZnnpyError(
            f"nothing ran from {lo:.6g} s to {hi:.6g} s: {path} covers {first:.6g} s to {last:.6g} s; "
            f"give another {option('begin')} or {option('end')}"
        )
    return Timeline(first if begin is None else lo, last if end is None else hi, tuple(rows.values()), ended)


def _kind(span: Span) -> str:
    """Return the name of the span, or its track if the name has a number that is not a layer's: one patch of many."""
    many = any(letter.isdigit() for letter in span.name) and "layer" not in span.facts
    return span.track if many or span.track.endswith("waiting") else span.name
