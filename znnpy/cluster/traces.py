"""Traces of work items, each recorded by the process that computed it, and joined to one trace of the job.

The clocks of machines may differ by what their system clocks do.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from znnpy.cluster.job_files import JobFiles
from znnpy.errors import ZnnpyError
from znnpy.report.trace_reader import Span, read_spans
from znnpy.run.trace import Trace

_log = logging.getLogger(__name__)

TRACES = "traces"


@contextmanager
def traced_item(files: JobFiles, item: int, worker: str) -> Iterator[Trace]:
    """Yield a trace of one item, which is kept among the files of the job once the item is computed."""
    with tempfile.TemporaryDirectory(prefix="znnpy-") as folder:
        path = Path(folder) / "trace.json"
        began = time.time()
        with Trace(path) as trace:
            yield trace
        head = json.dumps({"worker": worker, "began": began}).encode()
        files.write(f"{TRACES}/{item:09}", head + b"\n" + path.read_bytes())


def join_traces(files: JobFiles, into: Trace) -> None:
    """Add the spans of all items to a trace, on tracks that are named after workers and their devices."""
    offset = time.perf_counter() - time.time()
    with tempfile.TemporaryDirectory(prefix="znnpy-") as folder:
        path = Path(folder) / "trace.json"
        for key in files.every(TRACES):
            head, _, content = (files.read(key) or b"").partition(b"\n")
            path.write_bytes(content)
            try:
                about = json.loads(head)
                at, worker = float(about["began"]) + offset, str(about["worker"])
                spans = [span for span in read_spans(path) if isinstance(span, Span)]
            except (ValueError, KeyError, TypeError, ZnnpyError) as error:
                _log.warning("the trace of %s is left out, since it is damaged: %s", key, error)
                continue
            for span in spans:
                into.record(f"{worker} {span.track}".strip(), span.name, at + span.begin, at + span.end, **span.facts)
