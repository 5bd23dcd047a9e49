"""`znnpy infer --trace` and `znnpy timeline`: what a run did when, in a file and in a picture."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.cli import Place
from tests.support.messages import assert_holds
from znnpy import timeline
from znnpy.errors import ZnnpyError
from znnpy.extras import install
from znnpy.inference import infer
from znnpy.plots import figures
from znnpy.plots import timeline as plot
from znnpy.plots.figures import DPI, WIDTH
from znnpy.report.trace_reader import Span, read_spans
from znnpy.run import trace as traces
from znnpy.run.trace import Trace

pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("znnpy")
WORDS = ("--patch", "4,4,4", "--threads", 1, "--device", "cpu")


@pytest.fixture
def trace(place: Place) -> Path:
    return place.folder / "trace.json"


def layers_in(path: Path) -> set[int]:
    return {span.facts["layer"] for span in read_spans(path) if isinstance(span, Span) and "layer" in span.facts}


def some_spans(path: Path, *spans: tuple[str, str, float, float]) -> Path:
    """Write a trace of spans (track, name, begin, end in seconds); those called `conv` are of layer 3."""
    with Trace(path) as trace:
        for track, name, begin, end in spans:
            facts = {"layer": 3} if name.startswith("conv") else {}
            trace.record(track, name, trace._zero + begin, trace._zero + end, **facts)
    return path


SOME = (
    ("CPU reading", "step 0 of column 0", 0.0, 1.0),
    ("CPU reading", "step 1 of column 0", 0.5, 1.5),
    ("CPU", "conv 3 cpu.conv.direct", 1.0, 3.0),
    ("CPU waiting", "step 1 of column 0", 3.0, 3.5),
    ("CPU", "store", 3.5, 4.0),
)


# --- a run ---


def test_traced_run_records_its_work(place: Place, trace: Path) -> None:
    assert place.infer(*WORDS, "--trace", trace).exit_code == 0
    expected = place.prediction()
    assert json.loads(trace.read_bytes())["traceEvents"]
    tracks = {span.track for span in read_spans(trace) if isinstance(span, Span)}
    assert tracks == {"CPU", "CPU reading", "CPU waiting", "writer"}
    assert {0, 2} <= layers_in(trace) <= {0, 1, 2, 3}  # a convolution and the pooling behind it may be in one
    assert place.infer(*WORDS, "--overwrite").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), expected)


def test_library_call_writes_a_trace(place: Place, trace: Path) -> None:
    infer(place.volume, place.folder / "net.yaml", out=place.out, trace=str(trace), device="cpu")
    assert 0 in layers_in(trace)


def test_trace_is_replaced_only_with_overwrite(place: Place, trace: Path) -> None:
    assert place.infer(*WORDS, "--trace", trace).exit_code == 0
    place.out.unlink()
    sentence = place.refusal(*place.arguments, "--trace", trace)
    assert sentence == f"{trace} exists already; give another --trace, or --overwrite to replace it"
    assert place.infer(*WORDS, "--trace", trace, "--overwrite").exit_code == 0


def test_unwritable_trace_is_refused_before_the_run(place: Place) -> None:
    """One sentence, before anything is done; --overwrite is for the output and a trace, and for no other file."""
    for name, role in (("volume.h5", "volume"), ("net.yaml", "network"), ("net.npz", "weights")):
        sentence = place.refusal(*place.arguments, "--overwrite", "--trace", place.folder / name)
        path = place.folder / name
        assert sentence == f"the output {path} is the {role} {path} itself; give another name as --trace"
    other = place.folder / "other.json"
    other.write_text("{}")
    sentence = place.refusal(*place.arguments, "--overwrite", "--trace", other)
    assert sentence.endswith("other.json is no trace, and nothing else is replaced by one; give another --trace")
    for ending in ("", ".partial", ".journal", ".lock"):
        beside = place.out.with_name(f"out.h5{ending}")
        sentence = place.refusal(*place.arguments, "--trace", beside)
        assert sentence.endswith(f"{beside} is the output or a file that it needs; give another --trace")
    assert "is not a folder; give another --trace" in place.refusal(
        *place.arguments, "--trace", place.folder / "no" / "t.json"
    )
    (place.folder / "inner").mkdir()
    assert "is a folder; give another --trace" in place.refusal(*place.arguments, "--trace", place.folder / "inner")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_for_a_trace_is_refused(place: Place) -> None:
    closed = place.folder / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    sentence = place.refusal(*place.arguments, "--trace", closed / "trace.json")
    assert sentence.startswith(f"cannot write the trace {closed / 'trace.json'}: Permission denied; ")


def test_refused_run_leaves_no_trace(place: Place, trace: Path) -> None:
    assert "there is no file" in place.refusal("infer", place.folder / "gone.h5", "--trace", trace)


def test_full_disk_ends_the_run_with_one_sentence(place: Place, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished columns are kept."""
    write, calls = traces._write_all, count()

    def fills(file: Any, at: int, content: bytes) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, at, content)

    arguments = ("--patch", "4,2,2", "--threads", 1, "--device", "cpu", "--cover", "patches")
    with monkeypatch.context() as patch:
        patch.setattr(traces, "_write_all", fills)
        patch.setattr(traces, "BATCH", 50)
        result = place.infer(*arguments, "--trace", trace)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert f"cannot write the trace {trace}: No space left on device; make room, " in last
    assert not trace.exists()
    assert not list(place.folder.glob("trace.json*"))
    assert place.infer(*arguments, "--trace", trace, "--resume").exit_code == 0


def test_stopped_run_leaves_its_trace(place: Place, trace: Path) -> None:
    place.write_volume(np.random.default_rng(11).integers(0, 256, (45, 43, 41), np.uint8))
    arguments = [*place.arguments, "--patch", "2,2,2", "--threads", "1", "--device", "cpu", "--trace", str(trace)]
    with subprocess.Popen([PROGRAM, *arguments], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not any(draft.stat().st_size for draft in place.folder.glob("trace.json.*.partial")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 143
    *spans, why = read_spans(trace)
    assert why == "Terminated"
    assert len(spans) > 10
    shown = place.run("timeline", trace)
    assert shown.stdout.splitlines()[-1] == "the run ended early: Terminated"


# --- its timeline ---


def test_timeline_prints_how_busy_each_track_was(place: Place, trace: Path) -> None:
    """Overlapping spans count once; waiting is not work."""
    some_spans(trace, *SOME)
    result = place.run("timeline", trace)
    assert result.exit_code == 0
    assert result.stdout == (
        "             from 0 s to 4 s\n"
        "CPU reading  busy 37.5 %, idle 62.5 %\n"
        "CPU          busy 62.5 %, idle 37.5 %\n"
        "CPU waiting  12.5 % of the time\n"
    )


def test_timeline_of_a_window_is_printed_as_json(place: Place, trace: Path) -> None:
    some_spans(trace, *SOME)
    document = json.loads(place.run("timeline", trace, "--from", 1.25, "--to", 3.25, "--json").stdout)
    assert (document["from"], document["to"], document["ended_early"]) == (1.25, 3.25, None)
    rows = {row["track"]: row for row in document["tracks"]}
    assert [row["spans"] for row in rows.values()] == [1, 1, 1]
    assert [row["waits"] for row in rows.values()] == [False, False, True]
    assert [row["seconds"] for row in rows.values()] == pytest.approx([0.25, 1.75, 0.25], abs=1e-6)
    assert [row["share"] for row in rows.values()] == pytest.approx([0.125, 0.875, 0.125], abs=1e-6)


def test_timeline_is_drawn_into_a_picture(place: Place, trace: Path) -> None:
    picture = place.folder / "timeline.png"
    assert place.infer(*WORDS, "--trace", trace).exit_code == 0
    result = place.run("timeline", trace, "--out", picture)
    assert result.exit_code == 0, result.stderr
    assert "CPU" in result.stdout
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.width == WIDTH * DPI
        assert len(image.convert("RGB").getcolors(2**20) or []) > 6
    assert "timeline.png exists already; give another --out, or" in place.refusal("timeline", trace, "--out", picture)
    assert place.run("timeline", trace, "--out", picture, "--overwrite", "--from", 0, "--to", 1).exit_code == 0
    assert not list(place.folder.glob("*.partial"))


def test_bars_are_where_their_spans_are(trace: Path) -> None:
    """There is a colour for each layer and name, and one for each track of patches; waiting is grey."""
    found = timeline.read_timeline(some_spans(trace, *SOME))
    assert [{bar.kind for bar in row.bars} for row in found.rows] == [
        {"CPU reading"},
        {"conv 3 cpu.conv.direct", "store"},
        {"CPU waiting"},
    ]
    colours = plot.colours_of(found.rows)
    assert len(set(colours.values())) == 4
    assert colours["CPU waiting"] == plot.WAITING
    figure = plot.timeline_figure("a run", found)
    (axes,) = figure.axes
    drawn: dict[str, tuple[float, float]] = {}
    for bars in axes.collections:
        kind = str(bars.get_label())
        assert np.asarray(bars.get_facecolor())[0, :3] == pytest.approx(colours[kind])
        times = np.concatenate([np.asarray(path.vertices)[:, 0] for path in bars.get_paths()])
        drawn[kind] = float(times.min()), float(times.max())
    assert drawn.keys() == colours.keys()
    for kind, ends in {
        "CPU reading": (0.0, 1.5),
        "conv 3 cpu.conv.direct": (1.0, 3.0),
        "CPU waiting": (3.0, 3.5),
        "store": (3.5, 4.0),
    }.items():
        assert drawn[kind] == pytest.approx(ends, abs=1e-5)
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == list(colours)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["CPU reading", "CPU", "CPU waiting"]


@pytest.mark.parametrize("sentence", ["layer 2: 3 > 2; do less", "as long as no line is " * 40], ids=["short", "long"])
def test_picture_names_why_a_run_ended_early(place: Place, trace: Path, sentence: str) -> None:
    picture = place.folder / "timeline.png"
    found = replace(timeline.read_timeline(some_spans(trace, *SOME)), ended=sentence)
    figure = plot.timeline_figure("a run", found)
    assert figure.axes[0].get_title("left").startswith(f"the run ended early: {sentence[:20]}")
    plot.draw(picture, "a run", found, overwrite=False)
    with Image.open(picture) as image:
        pixels = np.array(image.convert("L"))
    assert (pixels[:, -5:] == 255).all(), "it leaves the picture"


def test_spans_shorter_than_a_pixel_are_drawn(place: Place, trace: Path) -> None:
    picture = place.folder / "timeline.png"
    some_spans(trace, ("CPU", "load", 0.0, 1e-6), ("CPU", "store", 999.0, 1000.0))
    assert place.run("timeline", trace, "--out", picture).exit_code == 0
    with Image.open(picture) as image:
        pixels = np.array(image.convert("RGB"), np.int64)[: image.height // 2]
    colour = np.rint(255 * np.array(plot.colours_of(timeline.read_timeline(trace).rows)["load"]))
    assert (abs(pixels - colour).sum(axis=2) < 60).any()


def test_colours_of_layers_differ() -> None:
    """There are enough for a network of a dozen layers, its transfers, reader and writer."""
    row = timeline.Row("GPU", [timeline.Bar(0.0, 1.0, f"conv {layer}") for layer in range(24)])
    colours = 255 * np.array([*plot.colours_of([row]).values()])
    apart = np.abs(colours[:, None] - colours[None]).sum(axis=2)
    assert apart[~np.eye(24, dtype=bool)].min() > 40


def test_spans_within_a_pixel_are_joined_to_one_bar() -> None:
    """A run of days is drawn in seconds."""
    bars = [timeline.Bar(number, number + 0.5, "load") for number in range(20_000)]
    spans = list(plot.visible_spans(bars, 10.0))
    assert len(spans) == 2000
    assert all(begin + length == pytest.approx(after) for (begin, length), (after, _) in pairwise(spans))


def test_missing_matplotlib_is_named_with_what_to_install(
    place: Place, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_spans(trace, *SOME)
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    said = f"plots need the package matplotlib, which is not installed; `{install('plots')}`"
    assert place.refusal("timeline", trace, "--out", place.folder / "timeline.png") == said
    assert place.run("timeline", trace).exit_code == 0
    assert place.refusal("plan", "n337", "--plot", place.folder / "curves.png") == said


def test_span_without_duration_gives_a_timeline(place: Place, trace: Path) -> None:
    some_spans(trace, ("CPU", "load", 1.0, 1.0))
    assert place.run("timeline", trace, "--out", place.folder / "timeline.png").exit_code == 0


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.write_text("{}"), "is no trace of a run: give what `znnpy infer --trace` wrote"),
        (some_spans, "holds no spans: run `znnpy infer --trace` again"),
    ],
    ids=["missing", "foreign", "empty"],
)
def test_file_without_a_timeline_is_refused(place: Place, trace: Path, write: Callable[[Path], Any], said: str) -> None:
    write(trace)
    assert said in place.refusal("timeline", trace, "--out", place.folder / "timeline.png")


def test_arguments_without_a_picture_are_refused(place: Place, trace: Path) -> None:
    some_spans(trace, *SOME)
    assert "does not end in .png: give an --out that does" in place.refusal(
        "timeline", trace, "--out", place.folder / "a.svg"
    )
    beyond = place.refusal("timeline", trace, "--from", 5, "--to", 6)
    assert_holds(beyond, "nothing ran from 5 s to 6 s", f"{trace} covers 0 s to 4 s", "--from or --to")
    with pytest.raises(ZnnpyError, match="nothing ran from 5 s to inf s"):
        timeline.read_timeline(trace, 5.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", 2, "--to", 1), "--from 2.0 is not before --to 1.0"),
        (("--from", "nan"), "--from and --to must be finite numbers of seconds"),
        (("--to", "inf"), "--from and --to must be finite numbers of seconds"),
        (("--overwrite",), "--overwrite replaces the file given as --out: give --out too"),
    ],
    ids=str,
)
def test_wrong_arguments_are_usage_errors(place: Place, trace: Path, arguments: tuple[object, ...], said: str) -> None:
    some_spans(trace, *SOME)
    result = place.run("timeline", trace, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
