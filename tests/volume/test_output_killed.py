"""SIGKILL at random moments: the file opens every time, recorded columns are whole, the end result is the same."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.stored_outputs import stored
from znnpy.patches import cover
from znnpy.volume.journal import Journal, journal_path

pytestmark = pytest.mark.slow

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from znnpy.patches import cover
from znnpy.volume import column_record, output, store
from znnpy.volume.journal import JournalHeader

store.CHUNK = 16
column_record.SYNC_SECONDS = 0.002
size, patch = (60, 50, 40), (10, 25, 13)
columns = cover(size, patch)
voxels = np.random.default_rng(4).standard_normal((2, *size)).astype(np.float32)
path = Path(sys.argv[1])
with output.Output(
    path,
    inputs={},
    arrays=(store.OutputArray((2, *size)),),
    dtype=np.dtype("f4"),
    mode="resume",
    job={"kill": 1},
    storage=store.Storage(sys.argv[2] or None, "sharded" in sys.argv),
) as out:
    print("entered", flush=True)
    if out.header is None and not out.finished:
        plans = [] if "across" in sys.argv else [columns]  # chunks that lie across the edges of columns, or do not
        out.begin(JournalHeader({"kill": 1}, {}, "", "", len(columns)), {}, plans)
    print("begun", flush=True)
    for index, column in enumerate(columns):
        if not out.finished and index not in out.done:
            for step in column.steps:
                out.write(step.write, voxels[(slice(None), *step.write.slices)])
            out.finish_column(index)
            print("column", flush=True)
            time.sleep(0.005)
    out.complete()
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("out.h5", [""]),
        ("out.zarr", [""]),
        ("out.zarr", ["zarr2"]),
        ("out.zarr", ["", "sharded"]),
        ("out.n5", [""]),
        ("out.precomputed", [""]),
        ("out.tif", [""]),
        ("out.nii", [""]),
        ("out.zarr", ["", "across"]),
        ("out.zarr", ["zarr2", "across"]),
        ("out.precomputed", ["", "across"]),
    ],
    ids=[
        *("HDF5", "Zarr 3", "Zarr 2", "shards", "N5", "precomputed", "TIFF", "NIfTI"),
        *("Zarr 3 across", "Zarr 2 across", "precomputed across"),
    ],
)
def test_output_survives_kills_at_random_moments(name: str, words: list[str], tmp_path: Path) -> None:
    rng = random.Random(20261120)
    size, patch = (60, 50, 40), (10, 25, 13)
    columns = cover(size, patch)
    voxels = np.random.default_rng(4).standard_normal((2, *size)).astype(np.float32)
    path = tmp_path / name
    partial = tmp_path / f"{name}.partial"
    killed, finished, compared = 0, 0, 0
    while True:
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path), *words], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"entered\n"
            if killed % 4:  # else it may die while it makes the file
                assert writer.stdout.readline() == b"begun\n"
                for _ in range(rng.randint(0, 30 if "across" in words else 3)):
                    writer.stdout.readline()  # a column, if any is left
            if killed < 6:
                time.sleep(rng.uniform(0, 0.03))
                writer.send_signal(signal.SIGKILL)
            writer.communicate()
        if writer.returncode != -signal.SIGKILL:
            assert writer.returncode == 0
            break
        killed += 1
        if not (journal_path(path).exists() and partial.exists()):
            continue  # killed before the file was whole, or when it had its name: the next run sees to it
        journal = Journal(journal_path(path))
        assert journal.open()
        recorded = journal.read()
        assert recorded is not None
        journal.close()
        done = recorded[1]
        assert len(done) >= finished
        finished = len(done)
        kept = stored(partial)
        for index in done:
            for step in columns[index].steps:
                where = (slice(None), *step.write.slices)
                np.testing.assert_array_equal(kept[where], voxels[where])
                compared += 1
    assert killed >= 4
    assert compared > 0
    np.testing.assert_array_equal(stored(path), voxels)
    assert {item.name for item in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize(
    ("name", "words", "least"),
    [
        ("out.h5", [], 12),
        ("out.tif", [], 12),
        ("out.nii", [], 12),
        ("out.mrc", [], 12),
        ("out.zarr", [], 30),
        pytest.param("out.zarr", ["zarr2"], 30, marks=pytest.mark.long),
        pytest.param("out.zarr", ["sharded", "2"], 30, marks=pytest.mark.long),
        pytest.param("out.n5", ["2"], 30, marks=pytest.mark.long),
        pytest.param("out.precomputed", ["2"], 30, marks=pytest.mark.long),
    ],
)
def test_output_survives_a_kill_before_every_rename(name: str, words: list[str], least: int, tmp_path: Path) -> None:
    """An output is replaced, and the run is killed before each change of a name; so is the run that goes on."""
    command = [sys.executable, "-m", "tests.support.kill_at_every_step", str(tmp_path / name), *words]
    repository = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least
