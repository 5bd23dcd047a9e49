"""What a run prints while it goes and when it is done."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from place import Place

from znnpy import progress
from znnpy.progress import BAR_WIDTH
from znnpy.report import Report
from znnpy.run.pipeline import Event


@pytest.fixture
def report(place: Place) -> Report:
    from znnpy.inference import infer

    return infer(place.volume, place.folder / "net.yaml", threads=1)


def test_figures_stand_beside_the_plans(report: Report) -> None:
    plan = report.plan
    report = replace(report, output=Path("out.h5"), seconds=2.0, peak_bytes=3 * 2**29, warnings=("slow today",))
    lines = report.lines()
    assert lines[0] == "out.h5: 15x16x19, 4,560 voxels"
    assert lines[1] == f"speed      2,280 voxels/s (plan: {plan.voxels_per_second:,.0f})"
    assert lines[2].startswith("time       2 s (plan: ")
    assert lines[3].startswith("memory     1.50 GiB at the peak (plan: ")
    assert lines[-1] == "warning: slow today"


def test_resumed_run_counts_what_it_did(report: Report) -> None:
    resumed = replace(report, computed=1140, seconds=2.0)
    assert "4,560 voxels, 1,140 of them in this run" in resumed.lines()[0]
    assert resumed.voxels_per_second == 570
    assert resumed.predicted_seconds == pytest.approx(report.plan.seconds / 4)


def event(done: int, seconds: float, *, voxels_per_column: int = 1000) -> Event:
    stages = {"reading": 0.25, "computing": 1.5}
    return Event(
        done, 20, done * voxels_per_column, 20 * voxels_per_column, seconds, stages, 4 * done * voxels_per_column
    )


def last_drawn(err: str) -> str:
    """The last line on a terminal, without colours and what moves the cursor."""
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", err)
    return plain.strip().splitlines()[-1].rpartition("\r")[2].rstrip()


def test_lines_come_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
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
        " 35%  7/20 patches, 250 voxels/s, 27.3 KiB written, 52 s left (reading 0.2 s, computing 1.5 s)"
    )
    assert " 0 µs left" in lines[-1]


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with progress.show() as callback:
        callback(event(0, 0.0))
        callback(event(20, 10.0))
    captured = capsys.readouterr()
    assert captured.out == ""
    said = "100% 20/20 patches 2k voxels/s 78.1 KiB 0 µs left (reading 0.2 s, computing 1.5 s)"
    assert last_drawn(captured.err).endswith(said)


def test_bar_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    stages = {"reading": 25000.0, "computing": 15000.0, "writing": 3000.0, "waiting": 2.0}
    with progress.show() as callback:
        callback(Event(0, 175616, 0, 9 * 10**9, 0.0, stages, 0))
        callback(Event(87808, 175616, 45 * 10**8, 9 * 10**9, 36363.0, stages, 45 * 10**8 * 12))
    captured = capsys.readouterr()
    words = last_drawn(captured.err)
    bar = words[:BAR_WIDTH]
    assert set(bar) <= set("━╸╺ ")
    assert "━" in bar
    assert words.endswith("50% 87808/175616 patches 124k voxels/s 50.3 GiB 10 h 06 min left")
    assert len(words) <= 80


def test_before_the_first_patch_nothing_is_divided_by_zero() -> None:
    assert "0 voxels/s, 0 B written, unknown time left" in progress._Speed().describe(event(0, 0.0))


def test_speeds_have_three_digits() -> None:
    speeds = (0.0, 12.3, 999.0, 1234.0, 123456.0, 1234567.0, 2.5e9)
    assert [progress._rounded(v) for v in speeds] == ["0", "12", "999", "1.23k", "123k", "1.23M", "2.5G"]


def test_no_stderr_is_no_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with progress.show() as callback:
        callback(event(20, 10.0))
    assert capsys.readouterr().out == ""


def test_stderr_that_cannot_be_written_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as full:  # closing it fails too
        monkeypatch.setattr("sys.stderr", full)
        with progress.show() as callback:
            callback(event(20, 10.0))
            callback(event(20, 10.0))
            told = True
    assert told


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e308])
def test_plans_edited_by_hand_break_no_report(report: Report, seconds: float) -> None:
    choices = tuple(replace(choice, seconds=seconds) for choice in report.plan.choices)
    edited = replace(report, plan=replace(report.plan, choices=choices, patches=10))
    assert "(plan: 0)" in edited.lines()[1]
    predicted = json.loads(json.dumps(edited.as_json(), allow_nan=False))["predicted"]
    assert (predicted["seconds"], predicted["voxels_per_second"]) == (0, 0)
