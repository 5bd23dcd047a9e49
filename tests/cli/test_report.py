"""What a run prints while it goes and when it is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from place import Place

from znnpy import progress
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
    return Event(done, 20, done * voxels_per_column, 20 * voxels_per_column, seconds, stages)


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
    assert lines[0] == " 35%  7/20 columns, 250 voxels/s, 52 s left (reading 0.2 s, computing 1.5 s)"
    assert " 0 µs left" in lines[-1]


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with progress.show() as callback:
        callback(event(0, 0.0))
        callback(event(20, 10.0))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "20/20 columns, 2,000 voxels/s" in captured.err


def test_before_the_first_patch_nothing_is_divided_by_zero() -> None:
    assert "0 voxels/s, unknown time left" in progress._Speed().describe(event(0, 0.0))
