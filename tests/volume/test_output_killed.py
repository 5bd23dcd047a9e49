"""SIGKILL at random moments: the file opens every time, recorded columns are whole, the end result is the same."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from znnpy.patches import cover
from znnpy.volume.journal import Journal, journal_path

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from znnpy.patches import cover
from znnpy.volume import output, store
from znnpy.volume.journal import JournalHeader

store.CHUNK = 16
output.SYNC_SECONDS = 0.002
size, patch = (60, 50, 40), (10, 25, 13)
columns = cover(size, patch)
voxels = np.random.default_rng(4).standard_normal((2, *size)).astype(np.float32)
path = Path(sys.argv[1])
with output.Output(
    path, volume=path, shape=(2, *size), dtype=np.dtype("f4"), mode="resume", job={"kill": 1}
) as out:
    print("working", flush=True)
    if out.header is None:
        out.begin(JournalHeader({"kill": 1}, "", "", "", len(columns)), {})
    for index, column in enumerate(columns):
        if index not in out.done:
            for step in column.steps:
                out.write(step.write, voxels[(slice(None), *step.write.slices)])
            out.finish_column(index)
            time.sleep(0.002)
    out.complete()
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(20261120)
    size, patch = (60, 50, 40), (10, 25, 13)
    columns = cover(size, patch)
    voxels = np.random.default_rng(4).standard_normal((2, *size)).astype(np.float32)
    path = tmp_path / "out.h5"
    partial = tmp_path / "out.h5.partial"
    killed, finished, compared = 0, 0, 0
    while not path.exists():
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"working\n"
            if killed < 8:
                time.sleep(rng.uniform(0, 0.05))
                writer.send_signal(signal.SIGKILL)
            writer.communicate()
        if writer.returncode != -signal.SIGKILL:
            assert writer.returncode == 0
            break
        killed += 1
        if not journal_path(path).exists():
            continue  # killed before the file was whole: the next run begins again
        _, done = Journal(journal_path(path)).read()
        assert len(done) >= finished
        finished = len(done)
        with h5py.File(partial) as file:
            for index in done:
                for step in columns[index].steps:
                    where = (slice(None), *step.write.slices)
                    np.testing.assert_array_equal(file["prediction"][where], voxels[where])
                    compared += 1
    assert killed >= 4
    assert compared > 0
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["prediction"][:], voxels)
    assert {item.name for item in tmp_path.iterdir()} == {"out.h5"}
