"""Parts of a job array compute one output, on the command line: `--part K/N` and `--finish`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.stored_outputs import stored
from znnpy.cluster import preparing
from znnpy.cluster.job import Job, JobRecord
from znnpy.cluster.job_files import JobFolder
from znnpy.report.trace_reader import Span, read_spans

ITEMS = ("--items", "8,8,12", "--border", "reflect", "--no-calibrate", "--threads", "1", "--ram", "2G")
COUNT = 27


def words(place: Place, *more: object) -> list[object]:
    out = place.folder / "out.zarr"
    return ["infer", place.volume, "--network", place.folder / "net.yaml", "--out", out, *ITEMS, *more]


def run(place: Place, *more: object, code: int = 0) -> dict[str, Any]:
    result = place.run(*words(place, *more), "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else {"stderr": result.stderr}


def alone(place: Place) -> Path:
    out = place.folder / "alone.h5"
    arguments = ["infer", place.volume, "--network", place.folder / "net.yaml", "--out", out, *ITEMS[2:]]
    assert place.run(*arguments).exit_code == 0
    return out


def close(place: Place) -> bool:
    found, exact = stored(place.folder / "out.zarr"), stored(alone(place))
    return found.shape == exact.shape and bool(np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max())


def owners(place: Place) -> dict[int, str]:
    """Return the part that computed each item."""
    (folder,) = (place.folder / "out.zarr.job").glob("*/done")
    records = [json.loads(path.read_bytes()) for path in folder.iterdir()]
    return {record["item"]: record["worker"] for record in records}


def test_parts_compute_every_item_once(place: Place) -> None:
    reports = [run(place, "--part", f"{part}/4", "--trace", place.folder / "t.json") for part in (2, 4, 1, 3)]
    assert [report["items"] for report in reports] == [COUNT] * 4
    assert [report["is_complete"] for report in reports] == [False] * 4
    found = owners(place)
    assert sorted(found) == list(range(COUNT))
    assert [found[item] for item in (0, 5, 6, 12, 13, 19, 20, 26)] == [
        f"part {part} of 4" for part in (1, 1, 2, 2, 3, 3, 4, 4)
    ]
    assert sum(report["computed"] for report in reports) == 20 * 23 * 25
    finished = run(place, "--finish", "--trace", place.folder / "t.json")
    assert finished["is_complete"]
    assert finished["computed"] == 0
    assert finished["done_before"] == COUNT
    assert close(place)
    checked = place.run("verify", place.folder / "out.zarr", place.volume, "--network", place.folder / "net.yaml")
    assert checked.exit_code == 0, checked.output
    spans = [span for span in read_spans(place.folder / "t.json") if isinstance(span, Span)]
    assert {span.track for span in spans} >= {f"part {part} of 4 CPU" for part in (1, 2, 3, 4)}
    assert not (place.folder / "out.zarr.job").exists()


def test_a_part_that_is_begun_again_goes_on(place: Place) -> None:
    run(place, "--part", "1/3")
    files = JobFolder(next((place.folder / "out.zarr.job").glob("*/done")).parent)
    for item in (0, 4):
        files.remove_one(f"done/{item:09}")
    again = run(place, "--part", "1/3", "--resume")
    assert again["done_before"] == 7
    assert next(iter(again["processes"].values()))["items"] == 2
    finished = run(place, "--finish")  # computes the other two parts
    assert finished["done_before"] == 9
    assert finished["processes"]["this process"]["items"] == COUNT - 9
    assert close(place)


def test_parts_that_begin_at_the_same_time(place: Place) -> None:
    commands = [
        [sys.executable, "-m", "znnpy", *map(str, words(place, "--part", f"{part}/3", "--quiet"))] for part in (1, 2, 3)
    ]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    ended = [(process.communicate()[1], process.returncode) for process in running]
    assert [code for _, code in ended] == [0] * 3, ended
    assert len(owners(place)) == COUNT
    run(place, "--finish")
    assert close(place)


def test_a_part_waits_for_the_one_that_prepares(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "LOOK_SECONDS", 0.05)
    lock = place.folder / "out.zarr.lock"
    program = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    locker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert locker.stdout is not None
    locker.stdout.readline()
    threading.Timer(1.0, locker.kill).start()
    began = time.monotonic()
    run(place, "--part", "1/9")
    assert time.monotonic() - began > 0.9
    locker.wait()
    locker.stdout.close()


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--part", "0/3"), 2, "'0/3' is not a part K/N of 1 to N, such as 3/64"),
        (("--part", "4/3"), 2, "'4/3' is not a part K/N of 1 to N"),
        (("--part", "one"), 2, "'one' is not a part K/N of 1 to N"),
        (("--part", "1/3", "--finish"), 2, "part and finish exclude one another"),
        (("--part", "1/3", "--cluster", "local:1"), 2, "cluster and part exclude one another"),
        (("--part", "1/3", "--overwrite"), 2, "overwrite would remove what other parts have computed"),
        ((), 2, "--items is of runs with --cluster or --part: omit it"),
        (("--part", "1/3", "--items", "3,8,12", "--out", "out.h5"), 1, "work items of 3x8x12 voxels would cut chunks"),
    ],
)
def test_odd_options_are_refused(
    place: Place, more: tuple[str, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    assert said in " ".join(run(place, *more, code=code)["stderr"].split())
    assert not list(place.folder.glob("out.*"))


def test_parts_of_different_options_are_refused(place: Place) -> None:
    run(place, "--part", "1/3")
    said = " ".join(run(place, "--part", "2/3", "--output-dtype", "uint8", code=1)["stderr"].split())
    assert "began with --output-dtype, and now it is --output-dtype uint8; give the same options again" in said


def test_a_finished_job_is_described(place: Place) -> None:
    run(place, "--part", "1/1")
    run(place, "--finish")
    for more in (("--finish",), ("--part", "1/1")):
        again = run(place, *more)
        assert again["voxels"] == 20 * 23 * 25
        assert again["computed"] == 0


def test_the_record_of_a_job_is_small(place: Place) -> None:
    run(place, "--part", "1/3")
    record = JobRecord.find(str(place.folder / "out.zarr"))
    assert record is not None
    job = Job(str(place.folder / "out.zarr"), record.run)
    assert (place.folder / "out.zarr.job" / "job").stat().st_size < 20_000
    assert job.files.read("network.yaml") is None  # processes read the file that was named
