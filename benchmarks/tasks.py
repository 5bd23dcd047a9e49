"""Task parallel against data parallel: whole-image FFT convolutions of one layer (ZNNi algorithms 3 and 2).

    python benchmarks/tasks.py [--threads 1 2 4 8 16] [--rounds N] [--cases N ...] [--quick] [--out RESULT.json]

Both run in turn, `--rounds` times after a warm run each, the order reversed every other round. The paper asks for
S f and S f' of at least as many as there are cores: every case has them for 16 cores or more. Times are of one layer on
arrays that are there already. Efficiency is the time with the fewest threads, divided by the time and by how many times
more threads there are. Of a run of the tasks beside the timed ones, the JSON says how long each kind of task took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from header import machine_header, without_forced_blas_kernels

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import ConvWeights
from znnpy.kernels.table import find
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates, seconds
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.cpu.scheduler import Event
    from znnpy.kernels.primitive import Array

DATA, TASKS = "cpu.conv.fft_data", "cpu.conv.fft_tasks"
MAX_ERROR = 1e-4  # of the largest output, between the two: else a figure is worth nothing


@dataclass(frozen=True, slots=True)
class Case:
    """One layer. `why` says what the row is there to show."""

    shape: ConvShape
    why: str


CASES = (
    Case(ConvShape(1, 80, 80, (24, 24, 24), (5, 5, 5), "relu"), "one small image: kernels are used once"),
    Case(ConvShape(8, 80, 80, (24, 24, 24), (5, 5, 5), "relu"), "eight of them, as after a pooling: used eight times"),
    Case(ConvShape(1, 80, 80, (48, 48, 48), (5, 5, 5), "relu"), "one image, eight times larger"),
    Case(ConvShape(1, 32, 32, (48, 48, 48), (5, 5, 5), "relu"), "fewer maps: two tasks for all transforms"),
    Case(ConvShape(8, 32, 32, (24, 24, 24), (3, 3, 3), "relu"), "fewer maps, more images, a small kernel"),
)
QUICK = (Case(ConvShape(2, 16, 17, (9, 8, 7), (3, 3, 3), "relu"), "that the script works"),)


@dataclass(frozen=True, slots=True)
class Row:
    """Both ways through one layer with one number of threads; seconds of every run."""

    shape: str
    why: str
    threads: int
    variant: str  # of the tasks
    unpinned: str | None  # why workers were not pinned
    data: tuple[float, ...]
    tasks: tuple[float, ...]
    task_seconds: dict[str, tuple[int, float]]  # by kind: how many, and their time in all

    @property
    def ratio(self) -> float:
        """How many times faster the tasks are: median of the rounds."""
        return statistics.median(a / b for a, b in zip(self.data, self.tasks, strict=True))


def bound(name: str, case: Case, x: Array, weights: ConvWeights, crew: Crew) -> tuple[Any, str, Callable[[], Array]]:
    """The step of a primitive with buffers of its own, its variant, and what runs it."""
    machine, primitive, shape = this_machine(), find(name), case.shape
    rates = assumed_rates(machine, crew.threads)
    variant = min(primitive.variants(shape, machine), key=lambda v: seconds(primitive.work(shape, v), rates))
    step = primitive.bind(primitive.prepare(weights, variant, crew), shape, variant, crew)
    scratch = {s.name: aligned_bytes(s.nbytes) for s in primitive.footprint(shape, variant, crew.threads).scratch}
    out = np.full(shape.out_shape, np.nan, np.float32)

    def run() -> Array:
        step.run(x, out, scratch)
        return out

    return step, str(variant), run


def timed(run: Callable[[], Array]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def by_kind(step: Any, run: Callable[[], Array]) -> dict[str, tuple[int, float]]:
    """How many tasks of each kind one run has, and their seconds added up."""
    began: dict[int, float] = {}
    spent: dict[str, tuple[int, float]] = {}

    def observe(event: Event) -> None:
        now = time.perf_counter()
        if event.what == "begin":
            began[event.worker] = now
        elif event.what == "end":
            count, total = spent.get(event.task.kind, (0, 0.0))
            spent[event.task.kind] = count + 1, total + now - began[event.worker]

    step.observe = observe
    run()
    step.observe = None
    return spent


def measure(case: Case, threads: int, rounds: int) -> Row:
    """Both, in turns."""
    shape = case.shape
    rng = np.random.default_rng(20261120)
    x = rng.standard_normal(shape.in_shape, np.float32)
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weights = ConvWeights(
        rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale,
        rng.standard_normal(shape.fout, np.float32),
    )
    with Crew(threads) as crew:
        _, _, data = bound(DATA, case, x, weights, crew)
        step, variant, tasks = bound(TASKS, case, x, weights, crew)
        expected, found = data(), tasks()
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error <= MAX_ERROR:
            raise SystemExit(f"{TASKS} is {error:.1e} of the largest output away from {DATA}")
        of_data: list[float] = []
        of_tasks: list[float] = []
        for index in range(rounds):
            for run, times in [(data, of_data), (tasks, of_tasks)][:: 1 if index % 2 == 0 else -1]:
                times.append(timed(run))
        spent = by_kind(step, tasks)
    unpinned = step.seating.unpinned
    return Row(str(shape), case.why, threads, variant, unpinned, tuple(of_data), tuple(of_tasks), spent)


def show(rows: Sequence[Row]) -> None:
    """A table of one case: all numbers of threads."""
    first = rows[0]
    print(f"\n{first.shape}\n{'threads':>8}{'data ms':>10}{'tasks ms':>10}{'faster':>8}   efficiency: data, tasks")
    for row in rows:
        more = row.threads / first.threads
        data, tasks = statistics.median(row.data), statistics.median(row.tasks)
        of_data, of_tasks = statistics.median(first.data) / data / more, statistics.median(first.tasks) / tasks / more
        note = f"   not pinned: {row.unpinned}" if row.unpinned and row.threads > 1 else ""
        print(f"{row.threads:8}{1e3 * data:10.1f}{1e3 * tasks:10.1f}{row.ratio:8.2f}", end="")
        print(f"   {of_data:10.2f}{of_tasks:7.2f}{note}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, this_machine().cores])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=int, nargs="*", help=f"only these, 1 to {len(CASES)}")
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/tasks-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    cases = QUICK if options.quick else [c for i, c in enumerate(CASES, 1) if i in (options.cases or range(9))]
    rows: list[Row] = []
    for case in cases:
        of_case = [measure(case, threads, options.rounds) for threads in options.threads]
        show(of_case)
        rows += of_case
    result = {"header": machine_header(), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
    name = "-".join(this_machine().processor.lower().split()[:3])
    out = (
        options.out
        or Path(__file__).parent / "results" / f"tasks-{name}-{this_machine().cores}cores-{date.today()}.json"
    )
    if options.out or not options.quick:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{out}")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
