"""Traces: files in Chrome's format that are whole or not there, recorded from any thread, and read again."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from znnpy.errors import OutputError, ZnnpyError
from znnpy.report.trace_reader import Span, read_spans
from znnpy.run import trace as traces
from znnpy.run.trace import BATCH, Trace


def spans_of(path: Path) -> list[Span]:
    return [span for span in read_spans(path) if isinstance(span, Span)]


def recorded(path: Path, *names: str, then: Callable[[], object] = list) -> None:
    """Record a trace of spans with these names, a second each, and call a function before it closes."""
    with Trace(path) as trace:
        for second, name in enumerate(names):
            trace.record("CPU", name, second, second + 1, step=second)
        then()


def fails(error: BaseException) -> Callable[[], object]:
    def now() -> None:
        raise error

    return now


def drafts(folder: Path) -> list[Path]:
    return list(folder.glob("*.partial"))


def test_trace_has_chromes_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        now = time.perf_counter()
        trace.record("reader", 'read "patch" 0', now, now + 0.25, step=0, share=0.5, note="ä")
        trace.record("writer", "write", now + 1, now + 1.5)
        trace.record("reader", "read", now + 2, now + 3)
        assert not path.exists()
    document = json.loads(path.read_bytes())
    events = document["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(rows) == ["reader", "writer"]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert order[rows["reader"]] < order[rows["writer"]]
    assert [event["args"] for event in events if event["name"] == "process_name"] == [{"name": "znnpy"}]
    first, *others = (event for event in events if event["ph"] == "X")
    assert (first["name"], first["tid"], first["pid"]) == ('read "patch" 0', rows["reader"], 1)
    assert first["args"] == {"step": 0, "share": 0.5, "note": "ä"}
    assert first["dur"] == pytest.approx(250_000)
    assert 0 <= first["ts"] < 1e6
    assert [other["ts"] - first["ts"] for other in others] == pytest.approx([1e6, 2e6], abs=0.01)
    assert {event["pid"] for event in events} == {1}
    assert drafts(tmp_path) == []
    assert [span.track for span in read_spans(path) if isinstance(span, Span)] == ["reader", "writer", "reader"]


def test_trace_without_spans_is_complete(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json"):
        pass
    assert json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert list(read_spans(tmp_path / "trace.json")) == []


def test_no_more_than_a_batch_is_in_memory(tmp_path: Path) -> None:
    """The draft lacks only spans recorded since the last batch."""
    with Trace(tmp_path / "trace.json") as trace:
        for number in range(3 * BATCH + 7):
            trace.record("CPU", "conv", number, number + 1, step=number)
            if number in (BATCH // 2, BATCH + 5, 3 * BATCH):
                (draft,) = drafts(tmp_path)
                assert number + 1 - draft.read_bytes().count(b'"ph": "X"') < BATCH
    assert [span.facts["step"] for span in spans_of(tmp_path / "trace.json")] == list(range(3 * BATCH + 7))


def test_many_threads_record_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They also record while one of them writes."""
    threads, count, write = 8, 50, traces._write_all

    def slow(file: Any, at: int, content: bytes) -> None:
        time.sleep(0.002)
        write(file, at, content)

    monkeypatch.setattr(traces, "_write_all", slow)
    monkeypatch.setattr(traces, "BATCH", 20)

    def work(number: int) -> None:
        start.wait()
        for step in range(count):
            with trace.span(f"thread {number % 4}", f"span {number}", step=step):
                pass

    start = threading.Barrier(threads)
    with Trace(tmp_path / "trace.json") as trace:
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    spans = spans_of(tmp_path / "trace.json")
    assert sorted((span.name, span.facts["step"]) for span in spans) == [
        (f"span {number}", step) for number in range(threads) for step in range(count)
    ]
    assert {(span.track, span.name) for span in spans} == {(f"thread {n % 4}", f"span {n}") for n in range(threads)}


def test_span_ends_when_its_work_fails(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        with pytest.raises(ZeroDivisionError), trace.span("CPU", "fails"):
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="Out of range"):
            trace.record("CPU", "no number", 0.0, 1.0, share=float("nan"))
    assert [span.name for span in spans_of(tmp_path / "trace.json")] == ["fails"]


@pytest.mark.parametrize("error", [ZnnpyError("layer 2: 3 > 2; do less"), KeyboardInterrupt()], ids=repr)
def test_trace_of_a_failed_run_names_the_reason(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(type(error)):
        recorded(path, "conv", then=fails(error))
    *spans, why = read_spans(path)
    assert len(spans) == 1
    assert why == (str(error) or "KeyboardInterrupt")
    assert [e["s"] for e in json.loads(path.read_bytes())["traceEvents"] if e["ph"] == "i"] == ["g"]
    assert drafts(tmp_path) == []


def test_run_that_did_not_begin_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZnnpyError):
        recorded(tmp_path / "trace.json", then=fails(ZnnpyError("there is no file volume.h5; check the path")))
    assert list(tmp_path.iterdir()) == []


def test_killed_run_leaves_no_complete_looking_file(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\nfrom znnpy.run.trace import BATCH, Trace\n"
        "with Trace(pathlib.Path(sys.argv[1])) as trace:\n"
        "    for step in range(2 * BATCH + 1):\n        trace.record('CPU', 'conv', step, step + 1)\n"
        "    print('there', flush=True)\n    time.sleep(60)\n"
    )
    path = tmp_path / "trace.json"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)
    assert not path.exists()
    (draft,) = drafts(tmp_path)
    with pytest.raises(json.JSONDecodeError):
        json.loads(draft.read_bytes())
    with pytest.raises(ZnnpyError, match="is cut short"):
        list(read_spans(draft))


def test_trace_replaces_only_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    with pytest.raises(OutputError, match="is no trace, and nothing else is replaced by one; give another `trace`"):
        recorded(path)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    path.unlink()
    for name in ("first", "second"):
        recorded(path, name)
    assert [span.name for span in spans_of(path)] == ["second"]


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "trace.json"
    with pytest.raises(OutputError, match=r"^cannot write the trace .*: No such file or directory; .* another `trace`"):
        recorded(path)


def test_spans_outside_a_trace_are_not_recorded(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for _ in range(2):
        with pytest.raises(ValueError, match="is not open"):
            trace.record("CPU", "conv", 0.0, 1.0)
        with trace:
            pass


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


SAID = r"^cannot write the trace .*trace\.json: No space left on device; make room"


def test_full_disk_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised from the span that filled the batch and from all later ones; no file is left."""
    refused: list[int] = []

    def once(*given: object) -> None:
        monkeypatch.undo()
        full()

    def run() -> None:
        with Trace(tmp_path / "trace.json") as trace:
            monkeypatch.setattr(traces, "_write_all", once)
            for number in range(BATCH + 10):
                try:
                    trace.record("CPU", "conv", 0.0, 1.0)
                except OutputError:
                    refused.append(number)

    with pytest.raises(OutputError, match=SAID):
        run()
    assert BATCH - 10 < refused[0] < BATCH
    assert refused == list(range(refused[0], BATCH + 10))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("place", "name"), [(traces, "_write_all"), (os, "fsync"), (Path, "replace")], ids=str)
def test_full_disk_at_the_end_leaves_the_old_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    path = tmp_path / "trace.json"
    recorded(path, "old")
    with pytest.raises(OutputError, match=SAID):
        recorded(path, "new", then=lambda: monkeypatch.setattr(place, name, full))
    assert [span.name for span in spans_of(path)] == ["old"]
    assert drafts(tmp_path) == []


def test_error_of_a_run_wins_over_that_of_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> None:
        monkeypatch.setattr(traces, "_write_all", full)
        raise ZnnpyError("first")

    with pytest.raises(ZnnpyError, match="first") as caught:
        recorded(tmp_path / "trace.json", "conv", then=ends)
    (note,) = caught.value.__notes__
    assert note.startswith("afterwards: cannot write the trace")


def test_ctrl_c_within_a_write_tears_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, taken = traces._write_all, [100]

    def interrupted(file: Any, at: int, content: bytes) -> None:
        if taken:
            write(file, at, content[: taken.pop()])
            raise KeyboardInterrupt
        write(file, at, content)

    monkeypatch.setattr(traces, "_write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path / "trace.json", *["conv"] * (2 * BATCH))
    steps = [span.facts["step"] for span in spans_of(tmp_path / "trace.json")]
    assert BATCH - 10 < len(steps) < BATCH
    assert steps == list(range(len(steps)))


def test_partial_writes_are_continued(tmp_path: Path) -> None:
    class Sparing(FileIO):
        def write(self, content: Any) -> int:
            return super().write(content[:7])

    with Sparing(tmp_path / "file", "w") as file:
        traces._write_all(file, 3, b"all of these bytes")
    assert (tmp_path / "file").read_bytes() == b"\0\0\0all of these bytes"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"GIF89a, surely", "is no trace of a run: give what `znnpy infer --trace` wrote"),
        (lambda content: b"", "is no trace of a run"),
        (lambda content: b'{"traceEvents": []}', "is no trace of a run"),
        (lambda content: content[:-4], "is cut short"),
        (lambda content: content[: content.index(b'"pool"')], "is damaged"),
        (lambda content: content.replace(b'"ts"', b'"st"', 1), "is damaged"),
        (lambda content: content.replace(b'"ph"', b'"\xff"', 1), "is damaged"),
        (lambda content: content.replace(b'"tid": 1', b'"tid": 9', 1), "is damaged"),
        (lambda content: content.replace(b'"dur": 1000000.0', b'"dur": []', 1), "is damaged"),
        (lambda content: content.replace(b'"dur": 1000000.0', b'"dur": NaN', 1), "is damaged"),
        (lambda content: content.replace(b'"dur": 1000000.0', b'"dur": 1' + b"0" * 400, 1), "is damaged"),
        (lambda content: content.replace(b'"dur": 1000000.0', b'"dur": ' + b"[" * 30_000, 1), "is damaged"),
        (lambda content: content[:-4] + b" " * 10**6 + content[-4:], "is damaged"),
        (lambda content: content[: content.index(b"{", 5)] + b"[7],\n" + content, "is (damaged|no trace)"),
    ],
    ids=range(14),
)
def test_file_without_a_trace_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    path = tmp_path / "trace.json"
    recorded(path, "conv", "pool")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ZnnpyError, match=rf"^{path} {said}"):
        list(read_spans(path))


def test_pipe_as_trace_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for another process to write to it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ZnnpyError, match=r"cannot read .*pipe: it is a pipe, a socket or a device"):
        list(read_spans(tmp_path / "pipe"))


def test_unreadable_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ZnnpyError, match=r"there is no file .*gone\.json; check the path"):
        list(read_spans(tmp_path / "gone.json"))
    with pytest.raises(ZnnpyError, match=r"cannot read .*: Is a directory; check the path"):
        list(read_spans(tmp_path))
