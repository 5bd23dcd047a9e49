"""Memory is a promise: what the system counts for a whole process stays below what its plan says, and below --ram."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.flat_requests import make_plan
from tests.support.infer_process import infer, thin
from tests.support.odd_networks import MACHINE, Ways, planned
from tests.support.stored_outputs import stored
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import Limits, this_machine
from znnpy.planner import memory
from znnpy.planner.run_plan import RunPlan
from znnpy.run.session import Session
from znnpy.shapes import Vec3
from znnpy.trained import load_network

pytestmark = pytest.mark.slow

MIB = 2**20

SIZE = (300, 300, 300)  # 108 MB of float32, more than the limits below leave to a run
CHUNK = (60, 60, 60)


def as_npy(folder: Path) -> Path:
    """640 MB of zeros that take no disk: a mapping would count every page it reads."""
    path = folder / "volume.npy"
    np.lib.format.open_memmap(path, "w+", np.uint8, (1000, 800, 800)).flush()
    return path


def as_wide_hdf5(folder: Path) -> Path:
    """216 MB of zeros that take no disk."""
    path = folder / "volume.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", SIZE, np.float64, chunks=CHUNK)
    return path


def as_nan(folder: Path) -> Path:
    """Every voxel is NaN, and every plane is stored."""
    path = folder / "volume.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", SIZE, np.float32, chunks=CHUNK, fillvalue=np.nan)
    return path


def as_gzip(folder: Path) -> Path:
    """Chunks of 3.4 MB that are packed and filled with noise in part."""
    path = folder / "volume.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("raw", SIZE, np.float32, chunks=(95, 95, 95), compression="gzip", shuffle=True)
        data[:95, :95, :190] = np.random.default_rng(5).random((95, 95, 190), np.float32)
    return path


def as_zarr(folder: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    path = folder / "volume.zarr"
    array = zarr.create_array(path, shape=SIZE, chunks=CHUNK, dtype=np.float32)
    array[:60, :60, :120] = np.random.default_rng(6).random((60, 60, 120), np.float32)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
@pytest.mark.parametrize(
    ("store", "out", "ram", "words"),
    [
        (as_wide_hdf5, "out.h5", 170, []),
        pytest.param(as_npy, "out.h5", 400, ["--roi", "0:1000,0:800,0:80"], marks=pytest.mark.long),
        (as_nan, "out.h5", 210, ["--allow-nan"]),
        pytest.param(as_gzip, "out.h5", 170, [], marks=pytest.mark.long),
        pytest.param(as_zarr, "out.zarr", 210, [], marks=pytest.mark.long),
        (as_wide_hdf5, "out.zarr", 210, ["--sharded", "--multiscale", "2"]),
        pytest.param(as_wide_hdf5, "out.n5", 210, [], marks=pytest.mark.long),
        pytest.param(as_wide_hdf5, "out.precomputed", 210, [], marks=pytest.mark.long),
    ],
    ids=["HDF5", "npy", "NaN", "gzip", "Zarr", "shards", "N5", "precomputed"],
)
def test_volume_larger_than_ram_runs_within_the_limit(
    tmp_path: Path, store: Callable[[Path], Path], out: str, ram: int, words: list[str]
) -> None:
    dtype = "float16" if words == ["--allow-nan"] else "uint8"
    common = ("--network", str(thin(tmp_path)), "--ram", f"{ram}M", "--out", str(tmp_path / out))
    promise, peak = infer(store(tmp_path), *common, "--output-dtype", dtype, *words)
    assert peak <= promise <= ram * MIB
    assert promise <= 1.6 * peak
    prediction = last_plane(tmp_path / out)
    exact = 1 / (1 + np.exp(8 * 0.5 / 0.3))  # sigmoid of eight normalised zeros
    assert np.isnan(prediction).all() if words == ["--allow-nan"] else (prediction == round(255 * exact)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_refusing_a_volume_takes_no_more_memory_than_running_it(tmp_path: Path) -> None:
    """A patch has 27 million voxels that are not finite, which are counted."""
    program = (
        "import sys, znnpy.inference\n"
        "from znnpy.errors import VolumeError\n"
        "promise = znnpy.plan(sys.argv[2], volume=sys.argv[1], ram='1G', threads=1).memory.peak\n"
        "try:\n"
        "    znnpy.inference.infer(sys.argv[1], sys.argv[2], ram='1G', threads=1)\n"
        "except VolumeError as error:\n"
        "    print(promise, znnpy.machine.peak_bytes(), error)\n"
    )
    network, volume = thin(tmp_path), as_nan(tmp_path)
    command = [sys.executable, "-c", program, str(volume), str(network)]
    promise, peak, said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(" ", 2)
    assert re.search(r" \d+ voxels are NaN or infinite between \(z, y, x\) = \(0, 0, 0\) and ", said)
    assert int(peak) <= int(promise)


def last_plane(out: Path) -> np.ndarray:
    return np.asarray(stored(out)[-1])


def noise(folder: Path, size: Vec3 = (130, 150, 170)) -> Path:
    path = folder / "volume.h5"
    with h5py.File(path, "w") as file:
        file["raw"] = np.random.default_rng(4).integers(0, 256, size, np.uint8)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
@pytest.mark.parametrize(("ram", "cover"), [("300M", "patches"), ("1G", "columns")])
def test_peak_stays_within_a_tight_promise(tmp_path: Path, ram: str, cover: str) -> None:
    """The shipped network on noise: peak <= promise, and the promise at most 1.15 times the peak."""
    out = str(tmp_path / "out.h5")
    promise, peak = infer(noise(tmp_path), "--ram", ram, "--cover", cover, "--out", out)
    assert peak <= promise <= 1.15 * peak


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
@pytest.mark.parametrize(
    ("patch", "axis", "column", "at_once"),
    [
        ((40, 104, 128), 0, 1000, (0, 0)),  # carried planes of every layer, all fragments at a time
        ((88, 48, 144), 1, 48, (2, 1)),  # both
        ((64, 124, 144), 0, 0, (1, 1)),  # a tensor that stays while fragments go through all layers one by one
    ],
    ids=["columns", "columns in parts", "parts"],
)
def test_columns_and_parts_keep_the_promise(
    tmp_path: Path, patch: Vec3, axis: int, column: int, at_once: tuple[int, int]
) -> None:
    network = load_network("fib25_boundary").network
    ways = Ways(0, ("cpu.conv.fft_lanes", "cpu.conv.direct_lanes", "cpu.conv.fft_tiled", "cpu.pool.fragments"))
    output = network.dense_size((70, 150, 170))
    chosen = planned(network, output, patch, axis=axis, column=column, at_once=at_once, ways=ways)
    path = tmp_path / "plan.json"
    path.write_text(RunPlan.of(network, MACHINE, chosen).to_json())
    promise, peak = infer(noise(tmp_path, (70, 150, 170)), "--plan", str(path), "--out", str(tmp_path / "out.h5"))
    assert peak <= promise
    assert promise > 256 * MIB
    assert promise <= 1.15 * peak


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of one process is known on Linux only")
def test_session_has_its_memory_before_it_runs(tmp_path: Path) -> None:
    """A run would otherwise wait for its arena and carried planes, or fail without them."""
    network = load_network("fib25_boundary").network
    output = network.dense_size((70, 150, 170))
    ways = Ways(0, ("cpu.conv.direct_lanes", "cpu.pool.fragments"))
    chosen = planned(network, output, (40, 104, 128), column=1000, ways=ways)
    path = tmp_path / "plan.json"
    path.write_text(RunPlan.of(network, MACHINE, chosen).to_json())
    program = (  # a process of its own: this one may have memory left from what it did before
        "import sys\n"
        "from pathlib import Path\n"
        "from znnpy.kernels.thread_pool import ThreadPool\n"
        "from znnpy.machine import process_bytes\n"
        "from znnpy.planner.run_plan import RunPlan\n"
        "from znnpy.run.session import Session\n"
        "from znnpy.trained import load_network\n"
        "trained, plan = load_network('fib25_boundary'), RunPlan.load(Path(sys.argv[1]))\n"
        "with ThreadPool(2) as pool:\n"
        "    before = process_bytes()\n"
        "    with Session(plan.main, trained.network, trained.weights, pool):\n"
        "        print(process_bytes() - before)\n"
    )
    taken = int(subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, check=True).stdout)
    held = chosen.memory.last.arena + chosen.memory.last.carries
    assert held > 128 * MIB
    assert taken > 0.95 * held


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("primitive", ["cpu.conv.direct", "cpu.conv.fft_tiled"])
def test_bound_session_allocates_at_most_its_allowance(
    primitive: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more copy of an input patch would exceed it."""
    monkeypatch.setattr(memory, "process_bytes", lambda: 300 * MIB)  # whatever tests before this one left
    trained = load_network("fib25_boundary")
    network = trained.network
    output = (56, 56, 60)
    chosen = make_plan(network, output, this_machine(), Limits(2**30, 2), itemsize_in=8, patch=output, only=[primitive])
    raw = np.random.default_rng(8).integers(0, 256, (1, *chosen.main.patch_in)).astype(np.float64)
    out = np.full((network.output_channels, *chosen.patch_out), 77, dtype)
    assert raw.nbytes > chosen.main.memory.last.allowance
    with ThreadPool(2) as pool, Session(chosen.main, network, trained.weights, pool) as session:
        session.run(raw, out)
        tracemalloc.start()
        try:
            session.run(raw, out)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak <= chosen.main.memory.last.allowance
