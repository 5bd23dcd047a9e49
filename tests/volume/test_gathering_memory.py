"""Gathering, packing and writing chunks takes no more memory than plans count for it, and not far less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from znnpy.planner.memory import gathering_budget, gathering_bytes

pytestmark = pytest.mark.slow

MIB = 2**20
SIZE = (192, 512, 512)
RAM = 1024 * MIB
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from znnpy.machine import peak_bytes, process_bytes
from znnpy.patches import Box, Cover
from znnpy.volume.location import Location
from znnpy.volume.registry import store_for
from znnpy.volume.store import OutputArray, Storage

path, prefix, budget = Path(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3])
size, thick = (192, 512, 512), 8
columns = Cover(size, (thick, *size[1:]), 0, size[0], 20)
storage = Storage(prefix, "sharded" in sys.argv, 0, budget, (columns,))
arrays, dtype = [OutputArray((1, *size))], np.dtype("f4")
kind = store_for(Location(str(path), prefix=prefix))
kind.create(path, arrays, dtype, {}, storage)
store = kind(path, arrays, dtype, storage)
slab = np.random.default_rng(0).random((1, thick, *size[1:]), np.float32)
before = process_bytes()
for z in range(0, size[0], thick):
    store.write(Box((z, 0, 0), (z + thick, *size[1:])), slab)
store.sync()
print(before, peak_bytes(), store.rewritten)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
@pytest.mark.parametrize(
    ("name", "words"),
    [("a.zarr", [""]), ("a.zarr", ["", "sharded"]), ("a.zarr", ["zarr2"]), ("a.n5", [""]), ("a.precomputed", [""])],
    ids=["Zarr 3", "shards", "Zarr 2", "N5", "precomputed"],
)
def test_gathering_takes_what_plans_count(tmp_path: Path, name: str, words: list[str]) -> None:
    budget = gathering_budget(RAM)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / name), words[0], str(budget), *words[1:]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    before, peak, rewritten = map(int, done.stdout.split())
    promise = gathering_bytes(RAM, 4 * SIZE[0] * SIZE[1] * SIZE[2])
    print(f"{name} {words}: {(peak - before) / MIB:.0f} of {promise / MIB:.0f} MiB")
    assert 0.3 * promise <= peak - before <= promise
    assert rewritten == 0
