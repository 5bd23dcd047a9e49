"""`python -m benchmarks io`: every way to store a volume is read back, tiny runs fit the schema, figures are right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import znnpy
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read
from benchmarks.harness.timing import Budget
from benchmarks.io import (
    COPY_SUBJECTS,
    EXPERIMENTS,
    STORED,
    Runs,
    Stored,
    copying_network,
    grey_values,
    headline,
    store,
    tables_of,
)
from benchmarks.io_runs import Discard, timed_fsync


def test_every_experiment_runs_and_forgets_its_files(repository: Path, tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / f"io-{machine_name()}.json"
    disk.mkdir()
    arguments = ["--quick", "--out", str(out), "--folder", str(disk)]
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "io",
        *arguments,
        "--do",
        "write",
        "--do",
        "journal",
        "--do",
        "whole",
        "--do",
        "copy",
    ]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(disk.iterdir())
    result = read(out)
    assert [row.failure for row in result.rows if row.failure] == []
    assert {row.group for row in result.rows} == set(EXPERIMENTS) - {"read"}
    assert {row.subject for row in result.of_group("write")} == {"HDF5", "Zarr", "plain file"}
    for case, rows in result.cases("journal"):
        assert [row.subject for row in rows] == ["fsync", "no fsync"], case
        assert all(row.facts["fsyncs"] > 3 for row in rows), "of the output, its journal and their folder"
    assert {row.subject for row in result.of_group("whole")} == {"file to file", "memory to memory"}
    assert {row.subject for row in result.of_group("copy")} == set(COPY_SUBJECTS)
    tables = (
        "GB/s of writing",
        "Seconds of a run of many columns",
        "Output voxels per second",
        "GB/s from Zarr to Zarr",
    )
    for table in tables:
        assert table in tables_of(result)


@pytest.mark.parametrize("how", STORED, ids=str)
def test_a_stored_volume_is_what_znnpy_reads(how: Stored, tmp_path: Path) -> None:
    voxels = grey_values((66, 70, 65))
    path, network = store(tmp_path, how, voxels), copying_network(tmp_path, 2)
    out = np.zeros((2, 65, 69, 64), np.float32)
    znnpy.infer(path, network, out=out, device="cpu", ram="4G", patch=(40, 40, 40), cover="patches", threads=1)
    for copy in out:
        np.testing.assert_array_equal(copy, voxels[:-1, :-1, :-1] / np.float32(256))


def test_a_failed_run_is_told_and_the_next_one_has_a_new_child(tmp_path: Path) -> None:
    volume = store(tmp_path, Stored("npy"), grey_values((9, 9, 9)))
    asked = {"volume": str(volume), "network": str(copying_network(tmp_path, 1)), "out": [1, 8, 8, 8]}
    with Runs("cpu", Budget(1), tmp_path, 2, {"here": None}) as runs:
        failed = runs.of("whole", {**asked, "volume": "nowhere.npy"})["here"]
        assert "nowhere.npy" in failed[0]["failure"]
        assert len(failed) == 1, "it is not tried again"
        right = runs.of("whole", asked)["here"]
        assert len(right) == 2, "the first run does not count"
        (row,) = runs.rows("whole", "c", {"here": right}, "s", "voxels/s", "voxels_per_second")
        assert row.values == tuple(one["voxels_per_second"] for one in right)


def test_fsync_is_counted_timed_and_left_out(tmp_path: Path) -> None:
    before = os.fsync
    with (tmp_path / "file").open("wb") as file, timed_fsync(really=True) as real:
        os.fsync(file.fileno())
        os.fsync(file)
    assert real["calls"] == 2
    assert real["seconds"] > 0
    with timed_fsync(really=False) as none:
        os.fsync(-1)  # what is left out does not even look
    assert none["calls"] == 1
    assert os.fsync is before


def test_nowhere_has_maps_only_where_there_are_several() -> None:
    assert Discard((3, 4, 5, 6)).shape == (3, 4, 5, 6)
    assert Discard((1, 4, 5, 6)).shape == (4, 5, 6)


def test_tables_and_headline_take_medians() -> None:
    header = {"processor": "p", "cores": 2, "date": "2026-01-01", "commit": "c"}
    rows = [
        Row("read", "npy", "cached", "GB/s", (1.0, 3.0, 2.0)),
        Row("read", "npy", "plain, cached", "GB/s", (4.0,)),
        Row("read", "HDF5", "cached", "GB/s", failure="no memory"),
        Row("write", "thin", "HDF5", "GB/s", (0.5,)),
        Row("write", "thin", "Zarr", "GB/s", (1.5,)),
    ]
    result = Result("io", "m", header, rows)
    assert "| npy | 2.00 | - | 4.00 |" in tables_of(result)
    assert "| thin | 0.5 | 1.50 | - |" in tables_of(result)
    assert "| HDF5 | - | - | - |" in tables_of(result), "a failure has no figure"
    assert headline(result) == "read 2.00 GB/s, write 1.00 GB/s"
