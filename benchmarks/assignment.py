"""Simulate how close to the bound a job on many machines ends, and measure the time of the assignment.

    python -m benchmarks assignment [--case 500+500:200000 --case 5+5:2000 ..] [--rounds 3]

A case names CPUs, GPUs and items. An item takes 1 to 10 minutes on a CPU, and a tenth of that on a GPU. Of the workers
5 % are slower than the others of their kind by a factor of 4. At random times 5 % of them die, 5 % come later than the
others, and 0.5 % hang and are never declared lost. Of the tasks 2 % fail, each at a random moment. Between two tasks of
a worker there is a pause of 0.1 s, and a worker without a task asks again after 1 s. Each round has another seed.

end         End of the job over the bound: the seconds of all items over the speed of all workers as they are there,
            `least_seconds` in `benchmarks/simulated_workers.py`. Failed and lost work is not taken off the bound.
assignment  Processor time in calls of `Assignment` over the number of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from random import Random
from statistics import median

import click

from benchmarks.harness import markdown, options
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Program, Result, Results, Row
from benchmarks.simulated_workers import Outcome, SimulatedWorker, Simulation, least_seconds
from znnpy.cluster.assignment import Assignment

CASES = ("500+500:200000", "900+100:200000", "1000+0:200000", "90+10:20000", "5+5:2000")
QUICK = ("6+2:100",)
ITEM_SECONDS = (60.0, 600.0)  # on a CPU, evenly distributed
GPU_SPEED = 10.0  # of a GPU, where that of a CPU is 1
SLOW, SLOWER = 0.05, 4.0  # share of the slow workers, and how much slower they are
DIE, LATE, HANG = 0.05, 0.05, 0.005  # shares of the workers that die, come late, and hang
FAIL, PAUSE = 0.02, 0.1  # share of the tasks that fail; seconds between two tasks of a worker
GROUP = "simulated"
END, TIME = "end", "assignment"  # subjects


def workers_of(cpus: int, gpus: int, seconds: float, random: Random) -> list[SimulatedWorker]:
    """Return the workers of a case; those that come or go do so at random times of the first `seconds`."""
    found = []
    for kind, count, full in (("cpu", cpus, 1.0), ("gpu", gpus, GPU_SPEED)):
        for number in range(count):
            speed = full / SLOWER if random.random() < SLOW else full
            chance, time = random.random(), random.uniform(0, seconds)
            joins = time if chance < LATE else 0.0
            dies = time if LATE <= chance < LATE + DIE else inf
            hangs = time if LATE + DIE <= chance < LATE + DIE + HANG else inf
            found.append(SimulatedWorker(f"{kind}{number}", kind, speed, joins, dies, hangs))
    return found


def simulated(case: str, seed: int) -> tuple[Outcome, float, Assignment]:
    """Simulate a case; return what happened, the bound in seconds, and the assignment at the end."""
    workers, _, count = case.partition(":")
    cpus, gpus = map(int, workers.split("+"))
    random = Random(seed)
    items = [random.uniform(*ITEM_SECONDS) for _ in range(int(count))]
    found = workers_of(cpus, gpus, sum(items) / (cpus + GPU_SPEED * gpus), random)
    assignment = Assignment(len(items))
    simulation = Simulation(assignment, items, found, failing=FAIL, pause=PAUSE, seed=seed)
    return simulation.run(), least_seconds(items, found), assignment


def measured(case: str, rounds: int) -> list[Row]:
    """Simulate a case with several seeds; return the rows of its end and of the time of the assignment."""
    ends, times, facts = list[float](), list[float](), list[dict[str, float]]()
    for seed in range(1, rounds + 1):
        outcome, bound, assignment = simulated(case, seed)
        if outcome.end == inf:
            failure = f"with seed {seed} {assignment.left} items were left"
            return [Row(GROUP, case, END, "of the bound", failure=failure)]
        count = int(case.partition(":")[2])
        ends.append(outcome.end / bound)
        times.append(1e6 * outcome.cpu_seconds / count)
        facts.append({
            "bound": bound, "tasks": outcome.tasks, "copies": outcome.copies, "needless": outcome.needless,
            "failures": outcome.failures, "given_up": len(assignment.given_up),
        })  # fmt: skip
    about = {name: [fact[name] for fact in facts] for name in facts[0]}
    return [
        Row(GROUP, case, END, "of the bound", tuple(ends), None, about),
        Row(GROUP, case, TIME, "us/item", tuple(times)),
    ]


def table_of(results: Results) -> str:
    """Return how jobs end, and what the assignment takes, of all machines."""
    made = results.get("assignment", ())
    return markdown.sections(made, [_table(result) for result in made], "assignment")


def _table(result: Result) -> str:
    lines = []
    for case, rows in result.cases(GROUP):
        workers, _, count = case.partition(":")
        end, *rest = rows
        if end.failure is not None:
            lines.append((workers, f"{int(count):,}", "-", end.failure, "", "", ""))
            continue
        worst = f"{max(end.values) - 1:.1%}"
        least = markdown.number(median(end.facts["bound"]))
        copies = markdown.number(median(end.facts["copies"]))
        lines.append((
            workers, f"{int(count):,}", least, f"{end.median - 1:.1%}", worst, copies, markdown.number(rest[0].median),
        ))  # fmt: skip
    head = ("CPUs + GPUs", "items", "bound, s", "above it", "at most", "copies", "us an item")
    return markdown.table(head, lines)


def headline(result: Result) -> str:
    """Return how the first case ends, and what its assignment takes."""
    end, time = result.rows[:2]
    return f"{end.case}: ends {end.median - 1:.1%} above the bound, {markdown.number(time.median)} us an item"


PROGRAM = Program(
    "assignment",
    "How close to the bound does a job on many machines end, simulated?",
    "assignment",
    {"assignment": table_of},
    headline,
)


@click.command()
@options.OUT
@options.QUICK
@click.option("--case", "cases", multiple=True, default=CASES, show_default=True, help="CPUs+GPUs:items.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds of each case.")
def command(out: Path | None, quick: bool, cases: Sequence[str], rounds: int) -> None:
    """Simulate how close to the bound a job on many machines ends."""
    result = Result("assignment", machine_name(), header())
    if out is not None or not quick:
        merge(result, out, {GROUP})
    for case in QUICK if quick else cases:
        result.add(measured(case, rounds))
        if out is not None or not quick:
            result.write(out)
    click.echo(_table(result))
