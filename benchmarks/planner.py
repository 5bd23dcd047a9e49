"""Compare the planner's predictions, choices, promises of memory and planning times with runs.

    python -m benchmarks planner [--device gpu] [--minutes 30] [--do predict --do regret ..] [--against TREE]

predict  A network within a limit of memory is planned with assumed costs, with those that the calibration for the
         network before it left behind, and after `znnpy measure`; each plan runs, and its predicted speed is divided by
         the measured one.
first    The first plan on a machine that was never measured, with an empty cache folder: without the calibration, with
         it, and after `znnpy measure`.
regret   The chosen plan (the pick) is compared with its rivals in whole runs. Rivals use one primitive wherever it
         applies, avoid one that the pick uses, use the other cover or the next sizes of the patch, or random patches
         with random sets of primitives.
memory   Random networks, volumes and limits: the peak of the process, and of the GPU, against the promise of the plan.
time     Seconds of planning in a new process; with --against also those of another source tree, in alternation.

Plans are made and run by `znnpy.plan` and `znnpy.infer` in separate processes. A run computes the part of the output
that is predicted to take --run-seconds: whole steps, and whole columns if they fit. Its seconds are those of preparing,
computing and waiting for data; the plan scales them to the whole output.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from math import exp, log
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.harness import options
from benchmarks.harness.inputs import NETWORKS, SEED, period
from benchmarks.harness.isolate import Child, run_child
from benchmarks.harness.machine import find_gpu, header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Program, Result, Row, ratio_of
from benchmarks.harness.timing import Budget
from benchmarks.planner_runs import PLANNING_SECONDS, Facts, Planner, Point, facts_of_plan
from benchmarks.planner_tables import STATES, TABLES, headline

EXPERIMENTS = ("first", "time", "predict", "regret", "memory")
GIVE_UP = 3.0  # a rival predicted to take this many times as long as the pick is not run
RIVALS_AT_ONCE = 3  # rivals measured in the same rounds as the pick
LIMITS_MIB = {"cpu": (400, 3072), "gpu": (3072, 32768)}  # range of random limits
SIDES = {"cpu": (90, 260), "gpu": (220, 600)}  # range of sides of random volumes
PREDICTED = {
    "cpu": [
        *(Point(name, 520, limit, "predicted against measured speed")
          for limit in ("4G", "1G", "16G") for name in ("fib25", "n337", "n926", "n537", "n726")),
    ],
    "gpu": [
        *(Point(name, 1024, limit, "predicted against measured speed")
          for limit in ("16G", "64G", "4G") for name in ("fib25", "n337", "n926", "n537", "n726")),
    ],
}  # fmt: skip
FIRST = {
    "cpu": [Point("fib25", 520, "2G", "was 2.3 times off"), Point("n337", 520, "4G", "was 1.5 times off")],
    "gpu": [Point("fib25", 1024, "16G", "the network that ships"), Point("n337", 1024, "16G", "small kernels")],
}
TIMED = {
    "cpu": [Point(name, 1024, limit, "planning time") for limit in ("16G", "2G") for name in ("n337", "n926", "fib25")],
    "gpu": [Point(name, 1024, limit, "planning time") for limit in ("64G", "8G") for name in ("n337", "n926", "fib25")],
}
QUICK = [Point("tiny", 40, "1G", "that it works")]


def promise_rows(case: str, subject: str, runs: Sequence[Facts], facts: Facts) -> Iterator[Row]:
    """Yield the promised bytes over the peak, of RAM and of VRAM."""
    for what, peak, promised in (("RAM", "peak_bytes", "ram_promised"), ("VRAM", "vram_peak_bytes", "vram_promised")):
        values = tuple(run[promised] / run[peak] for run in runs if run.get(peak))
        if values:
            about = {"peak_bytes": max(run[peak] for run in runs), "promised_bytes": runs[0][promised], **facts}
            yield Row("memory", f"{case}, {what}", subject, "promised/peak", values, facts=about)


def predict(planner: Planner, points: Sequence[Point], states: Sequence[str], rounds: int, group: str) -> Iterator[Row]:
    """Yield predicted over measured speed of the plan of each state; equal plans run only once."""
    for point in points:
        if not planner.budget.left:
            return
        made = {state: planner.plan(point, state, fresh=group == "first") for state in states}
        plans = {facts["plan"]: facts for facts in made.values() if not facts.get("failure")}
        runs: dict[str, list[Facts]] = {plan: [] for plan in plans}
        for number in range(rounds):
            if number and not planner.budget.allows(len(plans) * planner.run_seconds):
                break
            for plan in plans if number % 2 == 0 else reversed(plans):
                runs[plan] += planner.run(point, plans[plan])
        for state, facts in made.items():
            yield from _predicted(point, state, facts, runs.get(facts.get("plan", ""), []), group)


def _predicted(point: Point, state: str, made: Facts, runs: Sequence[Facts], group: str) -> Iterator[Row]:
    unit, about = "predicted/measured", {"why": point.why, **facts_of_plan(made)}
    failure = made.get("failure") or next((run["failure"] for run in runs if run.get("failure")), None)
    if failure or not runs:
        yield Row(group, str(point), state, unit, failure=failure or "no time left", facts=about)
        return
    speeds = [run["speed"] for run in runs]
    about |= {"voxels_per_second": speeds, "seconds": [run["seconds"] for run in runs], "part": runs[0]["part"]}
    about |= {"whole_seconds": [run["whole_seconds"] for run in runs]}
    yield Row(group, str(point), state, unit, tuple(made["voxels_per_second"] / speed for speed in speeds), facts=about)
    yield from promise_rows(str(point), f"plan with {state} costs", runs, {})


def rivals(pick: Facts, names: Sequence[str], step: int, rng: np.random.Generator) -> Iterator[tuple[str, str, Facts]]:
    """Yield kind, name and arguments of `znnpy.plan` of every rival: each kind in turn, then random ones for ever.

    names  names of all primitives of the device.
    step   sizes of patches are multiples of it.
    """
    used = sorted({name for name in pick["primitives"] if ".conv." in name})
    convolutions = [name for name in names if ".conv." in name]
    uniform = [("uniform", f"only {name}", {"only": [name]}) for name in convolutions]
    without = [("without", f"not {name}", {"only": [other for other in names if other != name]}) for name in used]
    cover = "patches" if pick["column"] else "columns"
    near: list[tuple[str, str, Facts]] = [
        ("neighbour", f"as {cover}", {"cover": cover}),
        ("neighbour", "not depth first", {"depth_first": False}),
    ]
    for axis in range(3):
        for change in (-step, step):
            patch = [size + change * (at == axis) for at, size in enumerate(pick["patch_out"])]
            if min(patch) > 0:
                near.append(("neighbour", f"steps of {'x'.join(map(str, patch))}", {"patch": patch}))
    for some in zip_longest(near, uniform, without):
        yield from (one for one in some if one is not None)
        yield _random(pick, names, step, rng)
    while True:
        yield _random(pick, names, step, rng)


def _random(pick: Facts, names: Sequence[str], step: int, rng: np.random.Generator) -> tuple[str, str, Facts]:
    """Return a patch between half and twice the pick's, and half of the primitives."""
    factors = np.exp2(rng.uniform(-1, 1, 3))
    patch = [max(1, round(f * size / step)) * step for f, size in zip(factors, pick["patch_out"], strict=True)]
    some = [name for name in names if rng.random() < 0.5] or list(names)
    return "random", f"random {'x'.join(map(str, patch))} {rng.integers(2**16):04x}", {"patch": patch, "only": some}


def regret(planner: Planner, points: Sequence[Point], rounds: int, most: int) -> Iterator[Row]:
    """Yield the speed of rivals over that of the pick, which is measured together with a few of them at a time."""
    for point in points:
        if not planner.budget.left:
            return
        pick = planner.plan(point, "measured")
        if pick.get("failure"):
            yield Row("regret", str(point), "pick", "times the pick", failure=pick["failure"])
            continue
        with ExitStack() as stack:
            child = stack.enter_context(Child("benchmarks.planner_runs:plan"))
            group, seen, tried = list[tuple[str, str, Facts]](), {pick["decisions"]}, 0
            for kind, name, arguments in rivals(
                pick, planner.primitives(), period(point.network), np.random.default_rng(SEED)
            ):
                tried += 1
                if tried > most or not planner.budget.allows(2 * RIVALS_AT_ONCE * rounds * planner.run_seconds):
                    break
                outcome = child.ask(planner.request(point, "measured", **arguments), PLANNING_SECONDS)
                made = outcome.answer if outcome.failure is None else {"failure": outcome.failure}
                if outcome.failure is not None:  # the child has ended
                    child = stack.enter_context(Child("benchmarks.planner_runs:plan"))
                if made.get("failure") or made["decisions"] in seen:
                    continue
                seen.add(made["decisions"])
                slower = made["seconds"] / pick["seconds"]
                if slower > GIVE_UP:
                    why = f"not run: predicted to take {slower:.1f} times as long"
                    yield Row("regret", str(point), name, "times the pick", failure=why, facts={"kind": kind})
                    continue
                group.append((kind, name, made))
                if len(group) == RIVALS_AT_ONCE:
                    yield from _compare(planner, point, pick, group, rounds)
                    group.clear()
            yield from _compare(planner, point, pick, group, rounds)


def _compare(
    planner: Planner, point: Point, pick: Facts, group: Sequence[tuple[str, str, Facts]], rounds: int
) -> Iterator[Row]:
    plans = [pick, *(made for _, _, made in group)]
    runs: list[list[Facts]] = [[] for _ in plans]
    for number in range(rounds if group else 0):
        order = range(len(plans)) if number % 2 == 0 else reversed(range(len(plans)))
        for index in order:
            runs[index] += planner.run(point, plans[index])
    for (kind, name, made), ran in zip(group, runs[1:], strict=True):
        failure = next((run["failure"] for run in (*runs[0], *ran) if run.get("failure")), None)
        about = {"kind": kind, "predicted_over_pick": pick["seconds"] / made["seconds"], **facts_of_plan(made)}
        speeds = [[run.get("speed", 0.0) for run in one] for one in (ran, runs[0])]
        values = () if failure else tuple(a / b for a, b in zip(*speeds, strict=True))
        yield Row("regret", str(point), name, "times the pick", values, failure, about)


def memory(planner: Planner, count: int, names: Sequence[str]) -> Iterator[Row]:
    """Yield promised over peak memory of plans for random networks, volumes, limits, covers and primitives."""
    rng = np.random.default_rng(SEED)
    methods = [name for name in planner.primitives() if ".conv." in name]
    for _ in range(count):
        if not planner.budget.allows(3 * planner.run_seconds):
            return
        name = str(rng.choice(names))
        mib, side = (_between(rng, *ends[planner.device]) for ends in (LIMITS_MIB, SIDES))
        arguments: Facts = {"depth_first": bool(rng.random() < 0.7)}
        if (cover := str(rng.choice(["any", "columns", "patches"]))) != "any":
            arguments["cover"] = cover
        if rng.random() < 0.5:
            arguments["only"] = [str(rng.choice(methods))]
        point = Point(name, side, f"{mib}M", "random")
        made = planner.plan(point, "measured", **arguments)
        if made.get("failure"):
            continue  # another limit will do
        runs = planner.run(point, made)
        if failure := runs[0].get("failure"):
            yield Row("memory", str(point), "random plan", "promised/peak", failure=failure, facts=facts_of_plan(made))
        else:
            yield from promise_rows(str(point), "random plan", runs, facts_of_plan(made))


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """Return a random number between `low` and `high` whose logarithm is uniformly distributed."""
    return round(exp(rng.uniform(log(low), log(high))))


def planning_time(planner: Planner, points: Sequence[Point], rounds: int, against: Path | None) -> Iterator[Row]:
    """Yield the seconds that a process with `znnpy.plan` takes; with `against` both trees run in the order A B B A.

    Each tree has its own cache folder; a first plan that does not count fills it.
    """
    trees: dict[str, Path | None] = {"here": None} | ({"against": against} if against else {})
    for point in points:
        if not planner.budget.left:
            return
        found: dict[str, list[Facts]] = {tree: [] for tree in trees}
        for number in range(rounds + 1):
            if number > 1 and not planner.budget.allows(sum(some[-1]["wall_seconds"] for some in found.values())):
                break
            for tree in trees if number % 2 == 0 else reversed(trees):
                asked = planner.request(point, f"time of {tree}")
                outcome = run_child("benchmarks.planner_runs:plan", asked, seconds=PLANNING_SECONDS, source=trees[tree])
                if outcome.failure or outcome.answer.get("failure"):
                    failure = outcome.failure or outcome.answer["failure"]
                    yield Row("time", str(point), tree, "s", failure=failure)
                    return
                found[tree].append({"wall_seconds": outcome.seconds, **outcome.answer})
        for tree, some in found.items():
            counted = some[1:] or some
            about = facts_of_plan(counted[0]) | {"first_seconds": some[0]["planning_seconds"]}
            about |= {"peak_bytes": max(one["peak_bytes"] for one in counted)}
            values = tuple(one["planning_seconds"] for one in counted)
            yield Row("time", str(point), tree, "s", values, facts=about)
        if against and all(found.values()):
            ratio = ratio_of(*([one["planning_seconds"] for one in found[tree][1:]] for tree in ("here", "against")))
            click.echo(f"{point}: {ratio} times the planning time of {against}")


@click.command()
@options.shared
@options.AGAINST
@click.option("--do", "experiments", type=click.Choice(EXPERIMENTS), multiple=True, help="Default: all of them.")
@click.option("--networks", multiple=True, type=click.Choice([*NETWORKS, "tiny"]), help="Only these networks.")
@click.option("--limits", multiple=True, help="Limits of RAM, or of VRAM with --device gpu, instead of the usual ones.")
@click.option("--run-seconds", type=float, help="Predicted time of a run.  [default: 5, on a GPU 1]")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option(
    "--rivals",
    "most_rivals",
    type=int,
    default=40,
    show_default=True,
    help="Most rivals of one network, volume and limit.",
)
@click.option("--plans", type=int, default=40, show_default=True, help="Random plans that test promises of memory.")
@click.option("--measure-minutes", type=float, default=0.5, show_default=True, help="Minutes of `znnpy measure`.")
@click.option(
    "--machine",
    type=click.Path(path_type=Path, exists=True),
    help="Time plans for the machine that this file describes.",
)
def command(device: str, minutes: float, quick: bool, out: Path | None, against: Path | None, **words: Any) -> None:
    """Compare predictions, choices, promises and planning times with runs."""
    gpu = None if words["machine"] else find_gpu(device)
    result = Result("planner", machine_name(gpu), header(gpu))
    budget = Budget(minutes)
    with tempfile.TemporaryDirectory() as folder:
        seconds = words["run_seconds"] or (0.2 if quick else {"cpu": 5.0, "gpu": 1.0}[device])
        planner = Planner(device, budget, Path(folder), seconds, words["machine"])
        experiments = words.pop("experiments") or EXPERIMENTS
        if set(experiments) != set(EXPERIMENTS):
            merge(result, out, experiments)
        if set(experiments) != {"time"} and (why := planner.measure(0.08 if quick else words["measure_minutes"])):
            raise click.ClickException(f"`znnpy measure` failed: {why}")
        made = _experiments(planner, quick=quick, against=against, **words)
        for number, name in enumerate(experiments):
            planner.budget = Budget(budget.left / 60 / (len(experiments) - number))  # the others get what one leaves
            rows = made[name]
            for row in rows:
                figure = row.failure or f"{row.median:.3g} {row.unit} ({min(row.values):.3g} to {max(row.values):.3g})"
                click.echo(f"{row.group:8} {row.case:34} {row.subject:28} {figure}"[:200])
                result.add([row])
                if out or not quick:
                    result.write(out)
            if not planner.budget.left:
                result.left_out.append(f"{name}: the time was up before all of it was measured")


def _experiments(
    planner: Planner,
    *,
    quick: bool,
    against: Path | None,
    networks: Sequence[str],
    limits: Sequence[str],
    rounds: int,
    most_rivals: int,
    plans: int,
    **_: Any,
) -> dict[str, Iterator[Row]]:
    """Return the rows of each experiment as iterators, which measure when they are read."""

    def chosen(usual: dict[str, list[Point]]) -> list[Point]:
        points = QUICK if quick else usual[planner.device]
        points = [point for point in points if not networks or point.network in networks]
        return [Point(p.network, p.side, limit, p.why) for limit in limits for p in points] if limits else points

    rounds = 1 if quick else rounds
    return {
        "first": predict(planner, chosen(FIRST), STATES, rounds, "first"),
        "time": planning_time(planner, chosen(TIMED), 2 if quick else 2 * (rounds // 2 or 1), against),
        "predict": predict(planner, chosen(PREDICTED), STATES, rounds, "predict"),
        "regret": regret(planner, chosen(FIRST), rounds, 4 if quick else most_rivals),
        "memory": memory(planner, 2 if quick else plans, networks or (["tiny"] if quick else NETWORKS)),
    }


PROGRAM = Program(
    name="planner",
    question="Are predictions and choices of the planner right, are promises of memory kept, how long does it take?",
    command="planner [--device gpu]",
    tables=TABLES,
    headline=headline,
)
