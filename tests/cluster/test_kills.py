"""Workers, nannies, schedulers and clients are killed at fifty random moments: nothing is lost or mixed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.cli import Place
from tests.support.stored_outputs import stored

pytestmark = pytest.mark.long

KILLS = 50
SIZE = (95, 94, 93)
ITEM = "16,16,16"
SECONDS = 120.0  # that a client may take after its last kill, and after each item
MOST_BETWEEN = 12  # items that are finished between two kills, so that an output takes fewer kills than all
QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SCHEDULER = ("-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
WORKER = ("-m", "distributed.cli.dask_worker", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard")


class Cluster:
    """A scheduler and two workers with their nannies, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler.json"
        self.scheduler = self._started(*SCHEDULER)
        while not self.file.exists():
            time.sleep(0.05)
        self.nannies = [self._started(*WORKER) for _ in range(2)]

    def _started(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words, "--scheduler-file", str(self.file)], **QUIET)

    def kill(self, what: str) -> None:
        """Kill a worker, or a nanny with its worker, which is replaced, or the scheduler."""
        if what == "scheduler":
            self.scheduler.kill()
            return
        number = random.randrange(2)
        nanny = self.nannies[number]
        workers = psutil.Process(nanny.pid).children(recursive=True)
        for worker in workers:
            worker.kill()
        if what == "nanny":
            nanny.kill()
            nanny.wait()
            self.nannies[number] = self._started(*WORKER)

    def close(self) -> None:
        for one in (*self.nannies, self.scheduler):
            for child in psutil.Process(one.pid).children(recursive=True) if one.poll() is None else ():
                child.kill()
            one.kill()
            one.wait()


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    folder.mkdir()
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()


def started(place: Place, out: Path, cluster: Cluster, *more: str) -> subprocess.Popen[bytes]:
    options = ["--border", "reflect", "--no-calibrate", "--ram", "1G", "--items", ITEM, "--resume"]
    words = ["infer", place.volume, "--network", place.folder / "net.yaml", "--out", out, *options, *more]
    command = [sys.executable, "-m", "znnpy", *map(str, words), "--cluster", str(cluster.file), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finished(out: Path) -> int:
    """Return how many items are on record."""
    folder = out.with_name(f"{out.name}.job")
    return sum(1 for _ in folder.glob("*/done/0*")) if folder.exists() else 0


def test_nothing_is_lost_and_no_chunk_is_mixed(tmp_path: Path, tiny_network: Callable[..., Any]) -> None:
    random.seed(3)
    place = Place.furnish(tmp_path, tiny_network())
    place.write_volume(np.random.default_rng(5).integers(0, 256, SIZE, np.uint8))
    whole = tmp_path / "alone.h5"
    plain = ["infer", place.volume, "--network", place.folder / "net.yaml", "--border", "reflect", "--no-calibrate"]
    assert place.run(*plain, "--out", whole).exit_code == 0
    exact = stored(whole)
    kills, runs = 0, 0
    while kills < KILLS:
        out = tmp_path / f"out{runs}.zarr"
        runs += 1
        kills += _one_output(place, out, exact, KILLS - kills)
        assert runs < KILLS
    assert runs > 1


def _one_output(place: Place, out: Path, exact: Any, most: int) -> int:
    """Compute an output, whose processes are killed until it is there; return how often."""
    kills, number, seen, awaited = 0, 0, 0, 0
    while not out.exists():
        number += 1
        with cluster(place.folder / f"{out.name}-{number}") as made:
            client = started(place, out, made)
            until = time.monotonic() + SECONDS
            while client.poll() is None:
                time.sleep(random.uniform(0.3, 1.5))
                if (done := finished(out)) > seen:
                    awaited, seen, until = awaited - (done - seen), done, time.monotonic() + SECONDS
                if kills < most and done and awaited < 0:
                    what = random.choice(("worker", "worker", "worker", "nanny", "client", "scheduler"))
                    awaited, kills = random.randint(0, MOST_BETWEEN), kills + 1
                    if what == "client":
                        client.send_signal(random.choice((signal.SIGKILL, signal.SIGINT)))
                    else:
                        made.kill(what)
                    until = time.monotonic() + SECONDS
                if time.monotonic() > until:
                    os.kill(client.pid, signal.SIGKILL)
                    raise AssertionError(f"the client stands still after {kills} kills")
            _, said = client.communicate()
            assert b"Traceback" not in said, said.decode()
    found = stored(out)
    assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max()
    left = {path.name for path in out.parent.glob(f"{out.name}.*")}
    assert left == set()
    assert not list(out.rglob("*.__lock"))
    return kills
