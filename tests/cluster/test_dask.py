"""Workers of dask compute one output: what they give, and what happens when some of them are lost, slow or full."""

from __future__ import annotations

import itertools
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from distributed import Client, LocalCluster
from distributed.client import AllExit

import znnpy
from tests.support.cli import Place
from tests.support.stored_outputs import stored
from znnpy.cluster import finish
from znnpy.cluster.dask_workers import Coordinator, client_of, limits_of_worker
from znnpy.cluster.job import JobRecord
from znnpy.cluster.preparing import prepare
from znnpy.cluster.running import Limits
from znnpy.errors import ClusterError
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.run.pipeline import Event

ITEM = (16, 16, 16)
COUNT = 64  # of items in SIZE
SIZE = (63, 61, 62)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, tiny_network: Callable[..., Any]) -> Place:
    """Return a volume that many items are made of, and `alone.h5`, which one process predicts from it."""
    place = Place.furnish(tmp_path_factory.mktemp("cluster"), tiny_network())
    place.write_volume(np.random.default_rng(5).integers(0, 256, SIZE, np.uint8))
    infer(place, "alone.h5")
    return place


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0") as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    cluster.scale(2)
    with Client(cluster) as made:
        made.wait_for_workers(2, timeout=60)
        yield made


def infer(place: Place, name: str, **more: Any) -> Any:
    more = {"border": "reflect", "calibrate": False, "ram": "2G", **more}
    return znnpy.infer(place.volume, place.folder / "net.yaml", out=place.folder / name, **more)


def close(place: Place, name: str) -> bool:
    found, exact = stored(place.folder / name), stored(place.folder / "alone.h5")
    return found.shape == exact.shape and bool(np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max())


def after(columns: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """Return a callback that acts once so many items are finished."""
    acted: list[int] = []

    def told(event: Event) -> None:
        if event.columns_done >= columns and not acted:
            acted.append(event.columns_done)
            act()

    return told


def processes(client: Client) -> dict[str, int]:
    """Return the processes of workers, by their addresses."""
    return {name: int(pid) for name, pid in client.run(os.getpid).items()}


@pytest.mark.parametrize("name", ["out.zarr", "out.n5"])
def test_workers_give_what_one_process_gives(ground: Place, client: Client, name: str) -> None:
    events: list[Event] = []
    report = infer(ground, name, client=client, items=ITEM, progress=events.append)
    assert close(ground, name)
    assert report.is_complete
    assert report.items == COUNT
    assert report.computed == report.voxels == np.prod(SIZE)
    assert sorted(report.processes) == sorted(processes(client))
    assert sum(one.items for one in report.processes.values()) == COUNT
    assert all(one.items and one.voxels_per_second for one in report.processes.values())
    assert report.failures == 0
    assert [events[0].columns_done, events[-1].columns_done] == [0, COUNT]
    assert re.search(r"borders     \d+\.\d% of the work", str(report))
    again = infer(ground, name, client=client, resume=True)
    assert again.computed == 0
    assert not list(ground.folder.glob(f"{name}.*"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.long)])
def test_processes_on_this_machine(ground: Place, count: int) -> None:
    report = infer(ground, f"local{count}.zarr", cluster=f"local:{count}", items=ITEM)
    assert len(report.processes) == count
    assert close(ground, f"local{count}.zarr")


def test_a_worker_that_is_killed_loses_its_items_only(ground: Place, client: Client) -> None:
    victim = next(iter(processes(client).values()))
    name = "killed.zarr"
    report = infer(ground, name, client=client, items=ITEM, progress=after(10, lambda: os.kill(victim, signal.SIGKILL)))
    assert close(ground, name)
    assert [one.is_lost for one in report.processes.values()].count(True) == 1
    assert "lost" in str(report)


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.long)])
def test_a_worker_that_stands_still_is_replaced_by_others(ground: Place, client: Client, seconds: float) -> None:
    victim = next(iter(processes(client).values()))
    out, until = f"paused-{seconds}.zarr", time.monotonic() + seconds
    try:
        infer(
            ground,
            out,
            client=client,
            items=ITEM,
            progress=after(10, lambda: os.kill(victim, signal.SIGSTOP)),
        )
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        os.kill(victim, signal.SIGCONT)
    time.sleep(1)  # it goes on with its item, which others have finished
    assert close(ground, out)


def test_a_disk_that_is_full_for_one_worker(ground: Place, client: Client) -> None:
    victim = next(iter(processes(client).values()))
    before = resource.prlimit(victim, resource.RLIMIT_FSIZE)
    resource.prlimit(victim, resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        report = infer(ground, "full.zarr", client=client, items=ITEM)
    finally:
        resource.prlimit(victim, resource.RLIMIT_FSIZE, before)
    assert report.failures > 0
    assert close(ground, "full.zarr")


def test_items_that_always_fail_are_named(ground: Place, client: Client, tmp_path: Path) -> None:
    place = Place.furnish(tmp_path, ground.network)
    volume: npt.NDArray[Any] = np.zeros(SIZE, np.float32)
    volume[20, 20, 20] = np.inf
    place.write_volume(volume)
    with pytest.raises(
        ClusterError, match=r"work item \d+( \(and \d more\))? failed 3 times.*1 voxel is NaN"
    ) as caught:
        infer(place, "out.zarr", client=client, items=ITEM)
    assert "resume=True" in str(caught.value)
    assert (tmp_path / "out.zarr.partial").exists()


def test_a_network_that_workers_do_not_see_ends_the_run(ground: Place, client: Client, tmp_path: Path) -> None:
    place = Place.furnish(tmp_path, ground.network)
    place.write_volume(np.zeros(SIZE, np.uint8))
    names = str(place.volume), str(place.folder / "net.yaml")
    job = prepare(InferOptions(*names, out=str(place.folder / "out.zarr"), items=ITEM))
    (tmp_path / "net.yaml").rename(tmp_path / "gone.yaml")
    words = r"no work item could be computed; item \d+ failed 3 times, .*there is no network"
    with pytest.raises(ClusterError, match=words):
        Coordinator(client, job, JobRecord.load(job).count, []).run()


def test_ctrl_c_stops_cleanly_and_another_cluster_goes_on(ground: Place, client: Client) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        infer(ground, "stopped.zarr", client=client, items=ITEM, progress=after(20, stop))
    assert (ground.folder / "stopped.zarr.partial").is_dir()
    report = infer(ground, "stopped.zarr", client=client, resume=True)
    assert 20 <= report.done_before < COUNT
    assert close(ground, "stopped.zarr")


SCHEDULER = (sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0")
WORKER = (sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--memory-limit", "0")


@pytest.mark.slow
def test_a_scheduler_that_is_killed(ground: Place, tmp_path: Path) -> None:
    """A scheduler file names it; what was finished is kept, and another cluster goes on."""
    file = tmp_path / "scheduler.json"
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*SCHEDULER, "--no-dashboard", "--scheduler-file", str(file)], **quiet) as scheduler:
        workers = [subprocess.Popen([*WORKER, "--no-dashboard", "--scheduler-file", str(file)], **quiet) for _ in "ab"]
        try:
            while not file.exists():
                time.sleep(0.1)
            kill = threading.Timer(0.0, scheduler.kill)
            with pytest.raises(ClusterError, match=r"the scheduler is gone .*what is finished is kept"):
                infer(ground, "orphan.zarr", cluster=str(file), items=ITEM, progress=after(5, kill.start))
        finally:
            for process in (scheduler, *workers):
                process.kill()
                process.wait()
    report = infer(ground, "orphan.zarr", cluster="local:1", resume=True)
    assert report.done_before >= 5
    assert close(ground, "orphan.zarr")


def test_threads_are_those_of_dask_and_not_of_openmp(ground: Place) -> None:
    """The nanny sets OMP_NUM_THREADS=1; a worker of two threads computes with two, one item at a time."""
    names = str(ground.volume), str(ground.folder / "net.yaml")
    job = prepare(InferOptions(*names, border="reflect", out=str(ground.folder / "two.zarr"), items=ITEM))
    local = LocalCluster(n_workers=1, threads_per_worker=2, memory_limit=0, dashboard_address="127.0.0.1:0")
    with local as made, Client(made) as client:
        assert set(client.run(os.environ.get, "OMP_NUM_THREADS").values()) == {"1"}
        Coordinator(client, job, JobRecord.load(job).count, []).run()
    plans = [RunPlan.from_json((job.files.read(key) or b"").decode()) for key in job.files.every("plans")]
    assert {plan.main.compute_threads for plan in plans} == {2}
    finish(job)
    assert close(ground, "two.zarr")


def test_other_threads_run_while_an_item_is_computed(ground: Place) -> None:
    """Heartbeats of a worker fail where the interpreter's lock is held for seconds."""
    job = prepare(
        InferOptions(str(ground.volume), str(ground.folder / "net.yaml"), out=str(ground.folder / "gaps.zarr"))
    )
    ticks, over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    finish(job)
    over.set()
    ticker.join()
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 3.0


def test_limits_follow_those_of_dask() -> None:
    assert limits_of_worker(8 * 2**30, 4, None) == Limits(6 * 2**30, 4)
    assert limits_of_worker(8 * 2**30, 4, 2**30) == Limits(2**30, 4)
    assert limits_of_worker(None, 2, None) == limits_of_worker(0, 2, None) == Limits(None, 2)
    assert limits_of_worker(0, 2, 2**40) == Limits(2**40, 2)
    with pytest.raises(ClusterError, match=r"is more than 6.00 GiB, the part of the 8.00 GiB of this worker"):
        limits_of_worker(8 * 2**30, 4, 7 * 2**30)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("local:0", "names no number of processes from 1 to 1024"),
        ("local:many", "names no number of processes from 1 to 1024"),
        ("nowhere.json", "there is no scheduler file nowhere.json"),
        ("tcp://127.0.0.1:1", "no scheduler answers at tcp://127.0.0.1:1"),
    ],
)
def test_clusters_that_are_not_there(ground: Place, cluster: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.cluster.dask_workers.ANSWER_SECONDS", 1.0)
    with pytest.raises(ClusterError, match=words):
        infer(ground, "none.zarr", cluster=cluster)


def test_options_that_exclude_one_another(ground: Place) -> None:
    with pytest.raises(ValueError, match="exclude one another"):
        infer(ground, "none.zarr", cluster="local:1", part="1/2")
    with pytest.raises(ValueError, match="exclude one another"):
        infer(ground, "none.zarr", finish=True, part="1/2")
    with pytest.raises(ValueError, match="items are of runs with cluster, client or part"):
        infer(ground, "none.zarr", items=ITEM)


def test_tasks_that_dask_ends_itself_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """After an interrupt, asyncio says of them that nobody waited, with a traceback."""
    told = logging.getLogger("asyncio")
    with client_of("local:1"):
        pass
    for error in (AllExit(), ValueError("another")):
        told.error("Task exception was never retrieved", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["another"]
