"""A run prints its progress while it goes, and a report when it is done."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Place
from tests.support.fake_plans import changed
from znnpy import progress
from znnpy.progress import BAR_WIDTH
from znnpy.report.run_report import Report
from znnpy.report.trace_reader import Span, read_spans
from znnpy.run.pipeline import Event

pytestmark = pytest.mark.slow


@pytest.fixture
def report(place: Place) -> Report:
    from znnpy.inference import infer

    return infer(place.volume, place.folder / "net.yaml", threads=1)


def test_measured_figures_stand_beside_those_of_the_plan(report: Report) -> None:
    plan = report.plan
    report = replace(report, output=Path("out.h5"), seconds=2.0, peak_bytes=3 * 2**29, warnings=("slow today",))
    lines = report.lines()
    assert lines[0] == "out.h5: 15x16x19, 4,560 voxels"
    assert lines[1] == f"speed      2,280 voxels/s (plan: {plan.voxels_per_second:,.0f})"
    assert lines[2].startswith("time       2 s (plan: ")
    assert lines[3].startswith("memory     1.50 GiB at the peak (plan: ")
    assert lines[-1] == "warning: slow today"


def test_methods_are_counted_in_layers(report: Report) -> None:
    """Two layers that one primitive computes are two."""
    first, *others = report.plan.choices
    both = replace(first, layers=(0, 1), primitive="cpu.conv.both")
    rest = [replace(choice, layers=(i, i), primitive="cpu.conv.one") for i, choice in enumerate(others[:2], start=2)]
    stages = (replace(report.plan.main.stages[0], choices=(both, *rest)),)
    run = replace(report, plan=changed(report.plan, stages=stages), notes=("because", "so"))
    assert (
        "methods    cpu.conv.both (2 layers), cpu.conv.one (2 layers); `znnpy primitives` explains them" in run.lines()
    )
    assert "device     CPU; because; so" in run.lines()
    said = run.as_json()
    assert (said["device"], said["gpu"], said["vram_bytes"], said["notes"]) == ("cpu", None, None, ["because", "so"])
    assert said["predicted"]["vram_bytes"] == 0


def test_resumed_run_reports_its_own_work(report: Report) -> None:
    resumed = replace(report, computed=1140, seconds=2.0)
    assert "4,560 voxels, 1,140 of them in this run" in resumed.lines()[0]
    assert resumed.voxels_per_second == 570
    preparing = report.plan.main.preparing_seconds
    assert resumed.predicted_seconds == pytest.approx(preparing + (report.plan.seconds - preparing) / 4)


def test_run_of_columns_reports_columns(place: Place) -> None:
    from znnpy.inference import infer

    arguments: dict[str, Any] = {"threads": 1, "patch": (4, 4, 4), "overwrite": True}
    patches = infer(place.volume, place.folder / "net.yaml", cover="patches", **arguments)
    assert "patches    80 of 4x4x4 output voxels, computed by 1 thread" in patches.lines()
    assert [patches.as_json()[key] for key in ("patch", "columns", "axis", "column")] == [[4, 4, 4], 80, 0, 0]
    columns = infer(place.volume, place.folder / "net.yaml", cover="columns", **arguments)
    plan = columns.plan.main
    assert (
        f"columns    {plan.columns} along {'zyx'[plan.axis]} in steps of 4x4x4 output voxels, computed by 1 thread"
        in columns.lines()
    )
    found = columns.as_json()
    assert found["columns"] == plan.columns < 80
    assert (found["axis"], found["column"], found["patch"]) == (plan.axis, plan.column_planes, [4, 4, 4])
    assert found["column"] == -(-plan.output[plan.axis] // 4) * 4
    assert found.keys() == patches.as_json().keys()


def test_patch_larger_than_the_output_is_explained(place: Place, report: Report) -> None:
    """15x16x19 output voxels are one patch of 16x16x20, a multiple of the period 2x2x1."""
    assert report.plan.output == (15, 16, 19)
    rounded = replace(report, plan=changed(report.plan, patch_out=(16, 16, 19), column_planes=0, columns=1))
    line = "patches    1 of 16x16x19 output voxels (rounded up to whole periods of the network), computed by "
    assert any(found.startswith(line) for found in rounded.lines())
    exact = replace(report, plan=changed(report.plan, patch_out=(8, 16, 19), column_planes=0, columns=2))
    assert not any("rounded" in found for found in exact.lines())
    said = place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--patch", "16,16,19")
    assert "reaches beyond the 15x16x19 voxels of the output" in " ".join(said.stdout.split())


def event(done: int, seconds: float, *, voxels_per_column: int = 1000) -> Event:
    stages = {"reading": 0.25, "computing": 1.5}
    return Event(
        columns_done=done,
        columns=20,
        voxels_done=done * voxels_per_column,
        voxels=20 * voxels_per_column,
        seconds=seconds,
        stage_seconds=stages,
        bytes_done=4 * done * voxels_per_column,
        steps_done=done,
        steps=20,
        work_done=done / 20,
    )


def last_drawn(err: str) -> str:
    """Return the last line on a terminal, without colours and cursor movements."""
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", err)
    return plain.strip().splitlines()[-1].rpartition("\r")[2].rstrip()


def test_progress_lines_come_at_intervals_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress.SECONDS_OF_RUNS == 60, "a line a minute"
    clock = 100.0
    monkeypatch.setattr(progress, "SECONDS_OF_RUNS", 10.0)
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with progress.show() as callback:
        for done in range(4, 21):  # 4 columns were there before this run
            clock += 3.0
            callback(event(done, 3.0 * (done - 3)))
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[0] for line in lines] == ["35%", "55%", "75%", "95%", "100%"]
    assert lines[0] == (
        " 35%  7/20 patches, 250 voxels/s, 27.3 KiB written, 39 s left (reading 0.2 s, computing 1.5 s)"
    )
    assert lines[-1].endswith("78.1 KiB written (reading 0.2 s, computing 1.5 s)")


def test_terminal_shows_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with progress.show() as callback:
        callback(event(0, 0.0))
        callback(event(20, 10.0))
    captured = capsys.readouterr()
    assert captured.out == ""
    said = "100% 20/20 patches 2k voxels/s 78.1 KiB (reading 0.2 s, computing 1.5 s)"
    assert last_drawn(captured.err).endswith(said)


def warming(work: float, steps: int, seconds: float, written: int = 0) -> Event:
    """Return the events of a run that is a single column."""
    return Event(0, 1, written, 10**6, seconds, {"computing": seconds}, 4 * written, steps, 12, work)


def test_first_steps_of_a_column_count_as_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any voxel is written the work tells speed and time left."""
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with progress.show() as callback:
        callback(warming(0.0, 0, 0.0))
        clock += 60
        callback(warming(0.1, 4, 60.0))
        clock += 60
        callback(warming(0.2, 5, 120.0, 10**5))
    assert capsys.readouterr().err.splitlines() == [
        " 10%  0/1 columns, 4/12 steps, 1,667 voxels/s, 0 B written, 9 min left (computing 60.0 s)",
        " 20%  0/1 columns, 5/12 steps, 1,667 voxels/s, 391 KiB written, 8 min left (computing 120.0 s)",
    ]


@pytest.mark.parametrize(("work", "said"), [(0.99, "under 1 s left"), (0.5, "10 s left")])
def test_time_left_is_in_whole_seconds(work: float, said: str) -> None:
    speed = progress._Speed()
    assert "unknown time left" in speed.describe(warming(0.0, 0, 0.0))
    assert said in speed.describe(warming(work, 5, 10.0))


def test_refused_run_leaves_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(ValueError, match="exists"), progress.show():
        raise ValueError("the output exists")
    assert capsys.readouterr().err == ""


def test_preparing_is_shown_and_counts_in_the_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed is that of the whole run, as in the report; the time left is what computing takes."""
    clock = 100.0
    monkeypatch.setattr(progress, "SECONDS_OF_RUNS", 10.0)
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with progress.show() as callback:
        for seconds, touched in ((1.0, 2**30), (11.0, 2**31)):
            clock = 100.0 + seconds
            callback(replace(event(0, seconds), preparing=(touched, 5 * 2**30)))
        clock = 120.0
        callback(event(0, 20.0))
        clock = 140.0
        callback(event(10, 40.0))
    assert capsys.readouterr().err.splitlines() == [
        "  0%  preparing 5.00 GiB, 40 %",
        " 50%  10/20 patches, 250 voxels/s, 39.1 KiB written, 20 s left (reading 0.2 s, computing 1.5 s)",
    ]


def test_preparing_is_reported_in_progress_stages_and_trace(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress while memory is written to for the first time, `preparing` among the stages, a span in the trace."""
    from znnpy.inference import infer

    monkeypatch.setattr("znnpy.run.preparing.LEAST_TOLD", 1)
    events: list[Event] = []
    traced = place.folder / "run.trace"
    report = infer(place.volume, place.folder / "net.yaml", threads=1, progress=events.append, trace=traced)
    preparing = [event for event in events if event.preparing is not None]
    assert events[: len(preparing)] == preparing, "before the first patch"
    whole = report.plan.main.memory.last.arena + report.plan.main.memory.last.carries
    assert preparing[-1].preparing == (whole, whole)
    assert {event.columns for event in events} == {report.plan.main.columns}
    assert {(event.columns_done, event.work_done) for event in preparing} == {(0, 0.0)}
    assert list(preparing[-1].stage_seconds) == ["planning", "preparing"]
    seconds = [event.seconds for event in events]
    assert seconds == sorted(seconds)
    assert 0 < report.stage_seconds["preparing"] < seconds[-1] <= report.seconds
    (stages,) = [line for line in report.lines() if line.startswith("stages")]
    assert re.match(r"stages     planning [\d.]+ m?s; preparing [\d.]+ m?s; reading .* \(side by side\)$", stages)
    parts = [report.stage_seconds[stage] for stage in ("planning", "preparing", "computing", "waiting")]
    assert 0.5 * report.seconds < sum(parts) <= 1.01 * report.seconds, "the stages account for the time of the run"
    spans = [span for span in read_spans(traced) if isinstance(span, Span) and span.name == "prepare"]
    assert [(span.track, span.facts) for span in spans] == [("CPU", {"bytes": report.plan.main.memory.last.prepared})]
    assert spans[0].end - spans[0].begin <= report.stage_seconds["preparing"]


def test_run_above_its_limit_is_reported(report: Report) -> None:
    limits = replace(report.plan.limits, ram_bytes=2**30)
    within = replace(report, plan=changed(report.plan, limits=limits), peak_bytes=2**30)
    assert not [line for line in within.lines() if "limit of" in line]
    above = replace(within, peak_bytes=3 * 2**29)
    sentence = (
        "the process held 1.50 GiB at its peak (1,610,612,736 bytes), more than the limit of 1.00 GiB "
        "(1,073,741,824 bytes)"
    )
    assert f"warning: {sentence}" in above.lines()
    assert sentence in above.as_json()["warnings"]
    assert replace(above, earlier_peak_bytes=3 * 2**29).above_limit == (), "the process held it before this run"


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ({"preparing": 9.0, "computing": 1.0, "waiting": 0.5}, "preparing took 9 s instead of"),
        ({"preparing": 0.5, "computing": 8.0, "waiting": 0.5}, "the layers took 8 s instead of"),
        ({"preparing": 0.5, "computing": 1.0, "waiting": 7.0}, "the layers waited 7 s for reading and writing"),
        (
            {"planning": 8.0, "preparing": 0.5, "computing": 1.0},
            "opening files, measuring devices and planning took 8 s",
        ),
    ],
)
def test_wrong_prediction_is_explained(report: Report, stages: dict[str, float], why: str) -> None:
    off = replace(report, seconds=10.0, stage_seconds=stages)
    (said,) = [line for line in off.lines() if line.startswith("off by")]
    assert why in said
    assert said.endswith("its rates are assumed: `znnpy measure` takes a minute and measures those of this machine")
    choices = tuple(replace(choice, measured=True) for choice in report.plan.choices)
    of_memory = why.startswith("preparing")  # which has a rate of its own
    changes: list[tuple[dict[str, Any], bool]] = [
        ({"stages": (replace(report.plan.main.stages[0], choices=choices),)}, not of_memory),
        ({"preparing_measured": True}, of_memory),
    ]
    for change, measured in changes:
        (said,) = [line for line in replace(off, plan=changed(off.plan, **change)).lines() if "off by" in line]
        assert said.endswith("its rates are measured on this machine") == measured
    assert off.as_json()["off_by"].startswith(f"{10 / report.predicted_seconds:.1f} times from the plan: ")
    for seconds in (report.predicted_seconds, 0.5):  # what it begins with says nothing of the plan
        assert not [line for line in replace(off, seconds=seconds).lines() if line.startswith("off by")]


def test_limit_above_the_memory_warns_with_both_numbers(place: Place) -> None:
    from znnpy.inference import infer
    from znnpy.machine import this_machine
    from znnpy.units import human_bytes

    there = this_machine().ram_bytes
    report = infer(place.volume, place.folder / "net.yaml", threads=1, ram=4 * there)
    said = f"is above the {human_bytes(there)} of this machine, which ends a process that needs more"
    assert [warning for warning in report.warnings if human_bytes(4 * there) in warning and said in warning]


def test_resumed_columns_count_only_the_work_of_this_run(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show() as callback:
        callback(Event(2, 4, 500, 1000, 0.0, {}, 2000, 24, 48, 0.5))
        callback(Event(4, 4, 1000, 1000, 5.0, {}, 4000, 48, 48, 1.0))
    assert capsys.readouterr().err == "100%  4/4 columns, 48/48 steps, 100 voxels/s, 3.91 KiB written ()\n"


def test_progress_of_other_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show() as callback:
        for done, seconds in ((0, 1.0), (4, 5.0)):
            words = "work items on 2 workers"
            callback(Event(done, 4, 250 * done, 1000, seconds, {}, 0, done, 4, done / 4, elsewhere=words))
    assert capsys.readouterr().err == "100%  4/4 work items on 2 workers, 200 voxels/s\n"


def test_stage_lines_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    with progress.show() as callback:
        callback(Event(0, 1024, 0, 9 * 10**9, 0.0, {}, 0, 0, 65536, 0.0))
        callback(Event(512, 1024, 45 * 10**8, 9 * 10**9, 36363.0, {}, 45 * 10**8 * 12, 32768, 65536, 0.5))
    line = last_drawn(capsys.readouterr().err)
    assert line.endswith("50% 32768/65536 steps 124k voxels/s 50.3 GiB 10 h 06 min left")


def test_progress_of_a_column_follows_the_work_of_its_steps(place: Place) -> None:
    """A single column: most of its first steps cost little, and the work done never goes back."""
    from znnpy.inference import infer

    events: list[Event] = []
    report = infer(
        *(place.volume, place.folder / "net.yaml"),
        cover="columns",
        patch=(2, 16, 20),
        threads=1,
        progress=events.append,
    )
    plan = report.plan
    assert plan.main.streams
    cover = plan.main.cover(place.network)
    assert events[0].work_done == events[0].steps_done == 0
    assert events[-1].work_done == 1
    assert events[-1].steps_done == events[-1].steps == sum(len(column.steps) for column in cover)
    done = [event.work_done for event in events]
    assert done == sorted(done)
    ahead = plan.main.warmup_work(place.network)
    assert len(ahead) == cover.ahead > 1
    assert 0 <= ahead[0] < ahead[-1] <= 1  # the first may bring in voxels for no layer to run yet
    assert list(ahead) == sorted(ahead)
    seconds = plan.main.seconds_per_step * len(cover) * (sum(ahead) + len(cover[0].steps) - cover.ahead)
    assert seconds == pytest.approx(plan.seconds - plan.main.preparing_seconds)


def test_progress_bar_fits_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    stages = {"reading": 25000.0, "computing": 15000.0, "writing": 3000.0, "waiting": 2.0}
    with progress.show() as callback:
        callback(Event(0, 175616, 0, 9 * 10**9, 0.0, stages, 0, 0, 175616, 0.0))
        callback(Event(87808, 175616, 45 * 10**8, 9 * 10**9, 36363.0, stages, 45 * 10**8 * 12, 87808, 175616, 0.5))
    captured = capsys.readouterr()
    line = last_drawn(captured.err)
    bar = line[:BAR_WIDTH]
    assert set(bar) <= set("━╸╺ ")
    assert "━" in bar
    assert line.endswith("50% 87808/175616 patches 124k voxels/s 50.3 GiB 10 h 06 min left")
    assert len(line) <= 80


def test_progress_before_the_first_patch_is_finite() -> None:
    assert "0 voxels/s, 0 B written, unknown time left" in progress._Speed().describe(event(0, 0.0))


def test_speeds_have_three_digits() -> None:
    speeds = (0.0, 12.3, 999.0, 1234.0, 123456.0, 1234567.0, 2.5e9)
    assert [progress._rounded(v) for v in speeds] == ["0", "12", "999", "1.23k", "123k", "1.23M", "2.5G"]


def test_closed_stderr_gets_no_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with progress.show() as callback:
        callback(event(20, 10.0))
    assert capsys.readouterr().out == ""


def test_broken_stderr_gets_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as full:  # closing it fails too
        monkeypatch.setattr("sys.stderr", full)
        with progress.show() as callback:
            callback(event(20, 10.0))
            callback(event(20, 10.0))
            told = True
    assert told


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e308])
def test_hand_edited_plan_gives_a_report(report: Report, seconds: float) -> None:
    plan = report.plan.main.with_choices(lambda choice: replace(choice, seconds=seconds))
    edited = replace(report, plan=report.plan.with_main(replace(plan, columns=10, preparing_seconds=0.0)))
    assert "(plan: 0)" in edited.lines()[1]
    predicted = json.loads(json.dumps(edited.as_json(), allow_nan=False))["predicted"]
    assert (predicted["seconds"], predicted["voxels_per_second"]) == (0, 0)
