"""Whole jobs on simulated workers that fail, die, hang and come late, and the bound for their end."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from math import inf
from pathlib import Path
from random import Random

import pytest

from benchmarks.assignment import END, TIME, measured
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import read
from benchmarks.simulated_workers import SimulatedWorker, Simulation, least_seconds
from znnpy.cluster.assignment import Assignment

ITEMS = 300


def seconds_of_items(random: Random) -> list[float]:
    return [random.uniform(60.0, 600.0) for _ in range(ITEMS)]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(15))
def test_every_item_is_finished_whoever_fails_dies_hangs_or_comes_late(seed: int, ahead: int) -> None:
    random = Random(seed)
    items = seconds_of_items(random)
    workers = [SimulatedWorker("safe", "cpu", 1.0)]
    for number in range(20):
        kind, speed = random.choice([("cpu", 1.0), ("cpu", 0.25), ("gpu", 10.0)])
        joins, dies, hangs = random.choice([(0.0, inf, inf), (900.0, inf, inf), (0.0, 900.0, inf), (0.0, inf, 900.0)])
        times = [time * random.random() if time < inf else inf for time in (joins, dies, hangs)]
        workers.append(SimulatedWorker(f"{kind}{number}", kind, speed, *times))
    done = set(random.sample(range(ITEMS), 30))
    assignment = Assignment(ITEMS, done, tries=6, ahead=ahead)
    simulation = Simulation(assignment, items, workers, failing=0.1, pause=0.1, seed=seed)
    outcome = simulation.run()
    assert outcome.end < inf
    assert outcome.failures > 0
    assert not assignment.given_up
    assert set(outcome.computed) == set(range(ITEMS)) - done
    assert assignment.finished == ITEMS
    left = [items[number] for number in range(ITEMS) if number not in done]
    assert outcome.end >= least_seconds(left, workers)


def test_without_failures_and_copies_every_item_is_computed_once() -> None:
    items = seconds_of_items(Random(1))
    workers = [SimulatedWorker(f"cpu{number}", "cpu", 1.0) for number in range(3)]
    outcome = Simulation(Assignment(ITEMS), items, workers).run()
    assert outcome.copies == outcome.needless == outcome.failures == 0
    assert outcome.computed == Counter(range(ITEMS))
    assert outcome.work == pytest.approx(sum(items))


def test_only_items_that_fail_by_themselves_are_given_up() -> None:
    poisoned = {0, 17, 18, 150, ITEMS - 1}
    workers = [SimulatedWorker(f"gpu{number}", "gpu", 100.0) for number in range(5)]
    assignment = Assignment(ITEMS)
    outcome = Simulation(assignment, seconds_of_items(Random(1)), workers, poisoned=poisoned).run()
    assert assignment.given_up.keys() == poisoned
    assert all(reason.startswith("attempt ") for reason in assignment.given_up.values())
    assert set(outcome.computed) == set(range(ITEMS)) - poisoned
    assert outcome.end < inf


def test_items_of_hung_workers_are_finished_by_copies() -> None:
    workers = [SimulatedWorker(f"cpu{number}", "cpu", 1.0, hangs=3000.0 if number < 3 else inf) for number in range(9)]
    assignment = Assignment(ITEMS)
    items = seconds_of_items(Random(1))
    outcome = Simulation(assignment, items, workers).run()
    assert outcome.copies >= 3
    assert outcome.needless >= 3
    assert assignment.is_done
    assert outcome.end < least_seconds(items, workers) + 2 * max(items)


def test_all_workers_end_together() -> None:
    workers = [SimulatedWorker(f"cpu{number}", "cpu", 1.0) for number in range(10)]
    workers += [SimulatedWorker(f"gpu{number}", "gpu", 10.0) for number in range(10)]
    items = seconds_of_items(Random(1)) * 10
    outcome = Simulation(Assignment(len(items)), items, workers).run()
    assert outcome.end < least_seconds(items, workers) + 150  # 2.5 items of a GPU, a quarter of one of a CPU


def test_a_job_that_no_worker_can_end_is_told_apart() -> None:
    assignment = Assignment(3)
    outcome = Simulation(assignment, [1.0] * 3, [SimulatedWorker("a", "cpu", 1.0, dies=1.5)]).run()
    assert outcome.end == inf
    assert assignment.left == 2


@pytest.mark.parametrize(
    ("workers", "bound"),
    [
        ([SimulatedWorker("a", "cpu", 1.0), SimulatedWorker("b", "gpu", 4.0)], 20.0),
        ([SimulatedWorker("a", "cpu", 1.0, joins=5.0), SimulatedWorker("b", "gpu", 4.0)], 21.0),
        ([SimulatedWorker("a", "cpu", 1.0), SimulatedWorker("b", "gpu", 4.0, dies=10.0)], 60.0),
        ([SimulatedWorker("a", "cpu", 1.0, joins=10.0), SimulatedWorker("b", "gpu", 4.0, hangs=5.0)], 90.0),
        ([SimulatedWorker("a", "cpu", 1.0), SimulatedWorker("b", "gpu", 4.0, joins=9.0, dies=19.0)], 60.0),
        ([SimulatedWorker("a", "cpu", 1.0, dies=99.0)], inf),
    ],
)
def test_the_bound_counts_workers_while_they_are_there(workers: list[SimulatedWorker], bound: float) -> None:
    assert least_seconds([60.0, 40.0], workers) == pytest.approx(bound)


def test_a_job_on_a_hundred_workers_ends_near_the_bound() -> None:
    end, time = measured("60+40:10000", 1)
    assert (end.subject, time.subject) == (END, TIME)
    assert end.facts["copies"][0] > 0
    assert 1.0 < end.median < 1.05


@pytest.mark.slow
def test_the_program_runs_and_writes_its_rows(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / f"assignment-{machine_name()}.json"
    command = [sys.executable, "-m", "benchmarks", "assignment", "--quick", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row.subject for row in read(out).rows] == [END, TIME]
    assert "| 6+2 | 100 |" in done.stdout
