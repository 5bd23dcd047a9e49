"""A run that was stopped goes on only as what it was: settings, libraries, BLAS kernels, plan and memory.

And, killed within a column, from the column's first step.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from tests.support.odd_networks import MACHINE, Ways, planned
from znnpy.errors import ResumeError
from znnpy.inference import infer
from znnpy.network_files import read_network
from znnpy.planner.run_plan import FORMAT, RunPlan
from znnpy.report.run_report import Report
from znnpy.run.pipeline import Event
from znnpy.shapes import Vec3, turned_back

BEGUN: dict[str, Any] = {"patch": (4, 4, 4), "threads": 2}


@pytest.fixture
def stopped(place: Place) -> Place:
    """Interrupt a run after some of its columns."""

    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(place, resume=False, progress=interrupt)
    return place


def go_on(place: Place, *, resume: bool = True, **changed: Any) -> Report:
    words = {**BEGUN, **changed}
    return infer(place.volume, place.folder / "net.yaml", out=place.out, resume=resume, **words)


@pytest.mark.slow
def test_run_resumes_where_it_stopped(stopped: Place) -> None:
    report = go_on(stopped)
    assert 0 < report.computed < report.voxels
    resumed = stopped.prediction()
    go_on(stopped, resume=False, overwrite=True)
    np.testing.assert_array_equal(resumed.view(np.uint32), stopped.prediction().view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"threads": 1},
            r"began with threads=2, and now it is threads=1; leave it out, or start",
        ),
        ({"patch": (2, 4, 4)}, r"began with patch=\(4, 4, 4\), and now it is patch=\(2, 4, 4\)"),
        ({"only": ["cpu.conv.direct"]}, r"began with no `only`, and now it is only=\('cpu.conv.direct',\)"),
        (
            {"ram": "1M"},
            r"needs [\d,]+\.\d MiB, and ram='1M' allows 1\.0 MiB; allow as much, or start again",
        ),
    ],
)
def test_changed_arguments_are_refused(stopped: Place, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ResumeError, match=said):
        go_on(stopped, **changed)
    go_on(stopped)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [{"threads": None}, {"patch": None}, {"ram": "20G"}])
def test_omitted_arguments_keep_their_first_values(stopped: Place, left_out: dict[str, Any]) -> None:
    assert go_on(stopped, **left_out).plan.patch_out == BEGUN["patch"]


@pytest.mark.slow
def test_sufficient_new_limit_is_accepted_and_reported(place: Place) -> None:
    """The plan stays, as rounding depends on it."""

    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(place, resume=False, progress=interrupt, ram="2G")
    report = go_on(place, ram="3G")
    assert report.plan.limits.ram_bytes == 2 * 2**30
    said = "the run went on with the plan that it began with, which was made for 2.00 GiB: ram='3G' cha"
    assert [warning for warning in report.warnings if warning.startswith(said)]


@pytest.mark.slow
def test_first_limit_needs_no_argument(place: Place) -> None:
    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(place, resume=False, progress=interrupt, ram="2G")
    assert not [warning for warning in go_on(place, ram="2G").warnings if "went on" in warning]


def change_output(header: dict[str, Any]) -> None:
    plan = json.loads(header["plan"])
    plan["workers"][0]["plan"]["output"][0] += 4
    header["plan"] = json.dumps(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda header: header.update(columns=header["columns"] + 1),
            r"counts \d+ columns, and its plan has \d+",
        ),
        (
            lambda header: header.update(columns=5),
            r"counts 5 columns, and its plan has \d+; start again",
        ),
        (lambda header: header.update(plan="{}"), "the plan that the run began with: "),
        (lambda header: header.update(plan="[" * 100_000), "the plan that the run began with: "),
        (
            change_output,
            "began with a plan for 19x16x19 voxels, and its output has 15x16x19; start again",
        ),
        (lambda header: header["settings"].pop("versions"), "began with versions null, and here they are"),
        (lambda header: header["settings"].pop("only"), None),
    ],
)
def test_journal_is_checked_before_computing(
    stopped: Place, change: Callable[[dict[str, Any]], None], said: str | None
) -> None:
    stopped.edit_journal(change)
    before = stopped.state()
    if said is None:
        go_on(stopped)
        return
    with pytest.raises(ResumeError, match=said) as caught:
        go_on(stopped)
    assert len(str(caught.value)) < 600
    assert stopped.state() == before


def test_roi_of_the_whole_volume_equals_no_roi(stopped: Place) -> None:
    report = go_on(stopped, roi="0:20,0:23,0:25")
    assert 0 < report.computed < report.voxels


@pytest.mark.slow
def test_another_plan_is_refused(stopped: Place) -> None:
    other = znnpy.plan(stopped.folder / "net.yaml", volume=stopped.volume, patch=(2, 2, 2))
    with pytest.raises(ResumeError, match="another plan than `plan` gives"):
        go_on(stopped, plan=other)


@pytest.mark.slow
def test_other_library_versions_are_refused(stopped: Place) -> None:
    def older(header: dict[str, Any]) -> None:
        header["settings"]["versions"]["numpy"] = "1.0"

    stopped.edit_journal(older)
    with pytest.raises(ResumeError, match=r'began with versions \{.*"numpy": "1.0".*start again with overwrite=True'):
        go_on(stopped)


@pytest.mark.slow
def test_another_processor_is_refused(stopped: Place) -> None:
    def elsewhere(header: dict[str, Any]) -> None:
        header["settings"]["processor"] = "Z80"

    stopped.edit_journal(elsewhere)
    with pytest.raises(ResumeError, match=r'began with processor "Z80", and here'):
        go_on(stopped)


@pytest.mark.slow
def test_another_version_of_a_primitive_is_refused(stopped: Place) -> None:
    def older(header: dict[str, Any]) -> None:
        plan = json.loads(header["plan"])
        plan["workers"][0]["plan"]["stages"][0]["choices"][0]["version"] += 1
        header["plan"] = json.dumps(plan)

    stopped.edit_journal(older)
    with pytest.raises(ResumeError, match=r"the plan that the run began with: .*version.*start again with overwrite"):
        go_on(stopped)


@pytest.mark.slow
def test_plan_of_another_format_is_refused(stopped: Place) -> None:
    """It cannot be made again, so nothing says that it should be."""

    def older(header: dict[str, Any]) -> None:
        header["plan"] = json.dumps(json.loads(header["plan"]) | {"format": FORMAT - 1})

    stopped.edit_journal(older)
    with pytest.raises(ResumeError) as caught:
        go_on(stopped)
    assert str(caught.value) == (
        f"the plan that the run began with: this is a plan file of format {FORMAT - 1}, and this version reads format "
        f"{FORMAT}; start again with overwrite=True"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (json.dumps({"format": FORMAT - 1}), f"this is a plan file of format {FORMAT - 1}, and this version reads "),
        (json.dumps({"format": FORMAT}), "the plan is damaged: "),
        ('{"format": 3', "the plan is damaged or cut off: line 1, column 13"),
        (None, "this is no plan file, and this version reads format "),
    ],
    ids=["of another format", "damaged", "cut off", "none"],
)
def test_finished_output_with_an_unreadable_plan_is_accepted(place: Place, plan: str | None, why: str) -> None:
    go_on(place, resume=False)
    with h5py.File(place.out, "r+") as file:
        attributes = file["prediction"].attrs
        del attributes["plan"]
        if plan is not None:
            attributes["plan"] = plan
    with pytest.raises(ResumeError) as caught:
        go_on(place)
    said = str(caught.value)
    assert said.startswith(f"{place.out} is complete, but what it says of how it was made cannot be read: {why}")
    assert said.endswith("; use it as it is, or start again with overwrite=True")
    assert "make it again" not in said
    go_on(place, resume=False, overwrite=True)
    assert go_on(place).computed == 0


@pytest.mark.slow
@pytest.mark.parametrize("primitive", ["cpu.conv.fft_tiled", "cpu.conv.fft_data", "cpu.conv.direct"])
def test_every_primitive_resumes_byte_for_byte(place: Place, primitive: str) -> None:
    """The run begins under a limit and resumes without one: the plan is the journal's."""

    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    words: dict[str, Any] = {"only": [primitive], "patch": (6, 8, 10)}
    with pytest.raises(KeyboardInterrupt):
        go_on(place, resume=False, progress=interrupt, ram="2G", **words)
    go_on(place, **words)
    resumed = place.prediction()
    go_on(place, resume=False, overwrite=True, ram="2G", **words)
    np.testing.assert_array_equal(resumed.view(np.uint32), place.prediction().view(np.uint32))


@pytest.mark.slow
def test_other_blas_kernels_are_refused(stopped: Place) -> None:
    def elsewhere(header: dict[str, Any]) -> None:
        header["blas"] = "openblas Prescott"

    stopped.edit_journal(elsewhere)
    with pytest.raises(ResumeError, match=r"began with BLAS kernels openblas Prescott, .*OPENBLAS_CORETYPE"):
        go_on(stopped)


KILLED = """
import os, signal, sys, time
from pathlib import Path
from znnpy.inference import infer
from znnpy.volume import column_record

column_record.SYNC_SECONDS = 0.0  # columns are on record as soon as they are written
steps = -1


def progress(event):
    global steps
    steps += 1
    if steps == int(sys.argv[5]):
        while Path(out + ".journal").read_bytes().count(b"\\n") <= 1 + int(sys.argv[6]):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


volume, network, plan, out = sys.argv[1:5]
infer(volume, network, plan=plan, out=out, progress=progress)
"""


def columns_of(place: Place, axis: int, primitive: str) -> RunPlan:
    """Columns of three steps, several along each axis, some fragments at a time."""
    network = read_network(place.folder / "net.yaml").network
    output = network.dense_size((20, 23, 25))
    across: Vec3 = turned_back((2, 8, 6), axis)
    ways = Ways(0, [primitive], in_one=primitive == "cpu.conv.fft_lanes")
    return RunPlan.of(network, MACHINE, planned(network, output, across, axis=axis, column=6, at_once=(2,), ways=ways))


def record(place: Place) -> list[str]:
    """Return the records of the journal behind its first two lines."""
    lines: list[str] = place.out.with_name(place.out.name + ".journal").read_text().splitlines()
    return lines[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "primitive", "column", "steps"),
    [
        (0, "cpu.conv.fft_tiled", 0, 1),  # within the first column, before it gives output
        (0, "cpu.conv.fft_lanes", 0, 5),  # when it has written a part of its output
        (1, "cpu.conv.fft_data", 7, 2),
        (2, "cpu.conv.fft_tiled", 10, 4),
    ],
)
def test_killed_column_is_run_again_from_its_first_step(
    place: Place, axis: int, primitive: str, column: int, steps: int
) -> None:
    plan = columns_of(place, axis, primitive)
    columns = plan.main.cover(read_network(place.folder / "net.yaml").network)
    before = sum(len(columns[index].steps) for index in range(column))
    assert steps < len(columns[column].steps)
    path = place.folder / "plan.json"
    path.write_text(plan.to_json())
    files = place.volume, place.folder / "net.yaml", path, place.out
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, files), str(before + steps), str(column)])
    assert killed.returncode == -signal.SIGKILL
    assert len(record(place)) == column
    report = go_on(place, threads=None, patch=None, plan=path)
    assert report.computed == report.voxels - sum(columns[index].voxels for index in range(column))
    resumed = place.prediction()
    go_on(place, resume=False, overwrite=True, threads=None, patch=None, plan=path)
    np.testing.assert_array_equal(resumed.view(np.uint32), place.prediction().view(np.uint32))


@pytest.mark.slow
def test_run_with_a_plan_of_another_volume_resumes(place: Place) -> None:
    """How often its layers run depends on the volume; what they are does not."""
    network = read_network(place.folder / "net.yaml").network
    path = place.folder / "plan.json"
    path.write_text(RunPlan.of(network, MACHINE, planned(network, (40, 30, 20), (2, 8, 6), column=6)).to_json())

    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(place, resume=False, threads=None, patch=None, plan=path, progress=interrupt)
    report = go_on(place, threads=None, patch=None, plan=path)
    assert 0 < report.computed < report.voxels
