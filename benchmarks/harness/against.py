"""Compare two source trees of znnpy: child processes of both run the same cases alternately.

Each tree has two children for each case: ours, theirs, ours again, theirs again. The ratio that counts is ours over
theirs; theirs over theirs again shows how much of it may be chance. Children use only functions that both trees have,
and their own caches.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.harness.inputs import CHANNELS, network_file, noise
from benchmarks.harness.isolate import ROOT, Answer, Child, Outcome, Request
from benchmarks.harness.results import Row
from benchmarks.harness.timing import Budget

ALLOWED = 0.03  # our median may be slower by this share, or by the spread of theirs against theirs if that is larger
CASE_SECONDS = 600.0  # limit of one request
FUNCTION = "benchmarks.harness.against:work"
Environment = Callable[[], AbstractContextManager[None]]  # in which a child starts
NAMES = ("theirs", "ours", "theirs again", "ours again")

_open = ExitStack()
_run: Any = None  # the session of this child


def work(request: Request) -> Answer:
    """Answer a request in a child: prepare a session, time one run of it, or time one plan."""
    import znnpy

    begin = time.perf_counter()
    if request["do"] == "plan":
        plan = znnpy.plan(request["network"], shape=tuple(request["shape"]), **request["options"])
        return {"seconds": time.perf_counter() - begin, "planned": plan.voxels_per_second}
    if request["do"] == "prepare":
        _prepare(request)
        return {"seconds": time.perf_counter() - begin, "source": str(Path(znnpy.__file__).parents[1])}
    run, array, out = _run
    run(array, out=out)
    return {"seconds": time.perf_counter() - begin}


def _prepare(request: Request) -> None:
    """Open a session and run it once, so that memory is touched and kernels are compiled."""
    global _run
    import znnpy

    shape: Any = tuple(request["shape"])
    channels = request["channels"]
    net = znnpy.load_network(request["network"])
    array = noise(shape, channels)
    run = _open.enter_context(net.session(array.shape, dtype=array.dtype, **request["options"]))
    out = np.zeros(run.output_shape, np.float32)
    run(array, out=out)
    _run = run, array, out


def session_request(folder: Path, name: str, side: int, **options: Any) -> Request:
    """Return the request to prepare a session of a network for a cubic volume of noise."""
    path = network_file(folder, name)
    return {"do": "prepare", "network": str(path), "shape": [side] * 3, "channels": CHANNELS.get(name, 1),
            "options": options}  # fmt: skip


def plan_request(name: str, side: int, **options: Any) -> Request:
    """Return the request to time a plan of a network that ships with znnpy."""
    return {"do": "plan", "network": name, "shape": [side] * 3, "options": options}


def compare(
    cases: Sequence[tuple[str, Request]], other: Path, rounds: int, budget: Budget, *, alone: bool
) -> Iterator[list[Row]]:
    """Yield two rows for each case, "ours" and "theirs", with the seconds of each run; a failure is a row too.

    other  source tree that ours is compared with.
    alone  start a new child for each run, so that only one exists at a time: for cases that need much memory.
    """
    trees = (other, ROOT, other, ROOT)
    for case, request in cases:
        if not budget.left:
            return
        with tempfile.TemporaryDirectory() as caches:
            values: list[list[float]] = [[], [], [], []]
            failure = None
            environment = partial(_environment, caches, request["options"])
            children = _alone(trees, environment) if alone else _together(trees, environment)
            with children as ask:
                for number in range(rounds):
                    if number and not budget.left:
                        break
                    order = range(4) if number % 2 == 0 else range(3, -1, -1)
                    for place in order:
                        outcome = ask(place, request, budget)
                        failure = failure or (f"{NAMES[place]}: {outcome.failure}" if outcome.failure else None)
                        if failure:
                            break
                        values[place].append(outcome.answer["seconds"])
                    if failure:
                        break
        yield _rows(case, values, failure)


@contextmanager
def _together(trees: Sequence[Path], environment: Environment) -> Iterator[Any]:
    """Open four children that live as long as the case; each prepares at its first request."""
    with ExitStack() as stack:
        with environment():
            children = [stack.enter_context(Child(FUNCTION, source=tree)) for tree in trees]
        prepared: set[int] = set()

        def ask(place: int, request: Request, budget: Budget) -> Outcome:
            if request["do"] == "prepare" and place not in prepared:
                outcome = children[place].ask(request, CASE_SECONDS)
                if outcome.failure:
                    return outcome
                prepared.add(place)
            return children[place].ask(_timed(request), CASE_SECONDS)

        yield ask


@contextmanager
def _alone(trees: Sequence[Path], environment: Environment) -> Iterator[Any]:
    """Open a new child for each request."""

    def ask(place: int, request: Request, budget: Budget) -> Outcome:
        with environment(), Child(FUNCTION, source=trees[place]) as child:
            if request["do"] == "prepare" and (outcome := child.ask(request, CASE_SECONDS)).failure:
                return outcome
            return child.ask(_timed(request), CASE_SECONDS)

    yield ask


def _timed(request: Request) -> Request:
    return {"do": "time"} if request["do"] == "prepare" else request


@contextmanager
def _environment(caches: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Put caches into a folder in this block, and calibrate no processor: both trees plan with assumed costs.

    Costs and wisdom of earlier runs would favour one of the trees. A GPU is measured by both.
    """
    set_here = {"XDG_CACHE_HOME": caches}
    if options.get("device") != "gpu":
        set_here["ZNNPY_NO_CALIBRATE"] = "1"
    before = {name: os.environ.get(name) for name in set_here}
    os.environ.update(set_here)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rows(case: str, values: Sequence[Sequence[float]], failure: str | None) -> list[Row]:
    if failure or not all(values):
        return [Row("against", case, "ours", "s", failure=failure or "no time left")]
    theirs, ours = [*values[0], *values[2]], [*values[1], *values[3]]
    chance = abs(median(values[2]) / median(values[0]) - 1)
    ratio = median(ours) / median(theirs)
    facts = {"ratio": ratio, "theirs_against_theirs": chance, "is_slower": ratio > 1 + max(ALLOWED, chance)}
    click.echo(
        f"{case:40} ours/theirs {ratio:.3f}, theirs/theirs off by {chance:.1%}{' SLOWER' if facts['is_slower'] else ''}"
    )
    return [
        Row("against", case, "ours", "s", tuple(ours), facts=facts),
        Row("against", case, "theirs", "s", tuple(theirs)),
    ]


def report(rows: Sequence[Row]) -> None:
    """Fail if ours is slower than theirs by more than is allowed, or did not run."""
    slower = [row.case for row in rows if row.facts.get("is_slower")]
    failed = [f"{row.case}: {row.failure}" for row in rows if row.failure]
    if slower or failed:
        raise click.ClickException("; ".join([*(f"{case} is slower" for case in slower), *failed]))
