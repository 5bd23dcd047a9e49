"""Measure single layers by every method and in PyTorch: convolutions, poolings, threads, preparation of weights.

Rounds are interleaved in alternating order, after a warm-up run; figures are medians. On a GPU the work is timed by
events of the device, and rotated over several inputs if its cache could hold one. The variant of each method is the one
that ran fastest on a smaller volume; a method that would take longer than `--slow-seconds` stays on that volume, since
the time per voxel hardly depends on it. Weights are prepared before, as in a run over many patches; all methods include
bias and ReLU. A method whose output differs from the float64 definition by more than its precision allows has no
figure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

import znnpy
from benchmarks.harness import against, markdown, options, plots
from benchmarks.harness.layer_runner import (
    Place,
    Problem,
    Shape,
    effort,
    fastest,
    likely,
    limits_of,
    place_of,
    ratio,
    smaller,
)
from benchmarks.harness.machine import header, machine_name, torch_sees_a_gpu
from benchmarks.harness.merging import merge
from benchmarks.harness.peers import compute_in, dtype_of, in_layout, largest, placed
from benchmarks.harness.results import Program, Result, Results, Row, device_of, ratio_of
from benchmarks.harness.timing import Budget, Clock, Entry, TorchClock, WallClock, interleave, repeats_of
from benchmarks.layer_cases import GROUPS, Case, cases
from znnpy.kernels.table import of_kind

MOST_ERROR = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3, "bf16": 2e-2}  # relative rms error; a figure beyond it is void
ROUNDS = 6
SHARES = 1.5  # a case may take this many times its even share of the remaining time
FAR = 4.0  # one variant and one round suffice for a method this many times slower than the fastest
LEAST_METHODS = 2  # methods of a case that are measured however little time there is
FAILURES = (RuntimeError, MemoryError, znnpy.ZnnpyError)  # failures of one method; the others are still measured
SLOW_SECONDS = {"cpu": 4.0, "gpu": 0.2}


class Bench:
    """Measures cases on one device and adds the rows to a result."""

    def __init__(
        self, result: Result, place: Place, budget: Budget, only: Sequence[str], limits: dict[str, Any]
    ) -> None:
        self._result, self._place, self._budget, self._only = result, place, budget, only
        self._limits = limits  # limits of the machine: bytes and operations per second

    def measure(self, case: Case, seconds: float) -> list[Row]:
        """Measure every method on a case, in about `seconds`."""
        if case.group == "preparing":
            return self._preparing(case)
        slow = SLOW_SECONDS[self._place.device]
        problem, small = Problem.of(case.shape, self._place), Problem.of(smaller(case.shape), self._place)
        row = partial(Row, case.group, case.name, unit="ns/voxel")
        rows: list[Row] = []
        trials: dict[str, tuple[Any, float]] = {}  # time of one variant of each method, on the smaller volume
        trying, choosing = Budget(seconds / 180), Budget(seconds / 90)  # a third of the time, and the second third
        for primitive in sorted(self._methods(case.shape), key=partial(self._effort, small)):
            if len(trials) >= LEAST_METHODS and not trying.left:
                rows.append(row(subject=primitive.name, failure="no time left"))
                continue
            try:
                trials[primitive.name] = (
                    primitive,
                    fastest(small, primitive, self._likely(primitive, small)[:1], 0.0)[0],
                )
            except FAILURES as failure:
                rows.append(row(subject=primitive.name, failure=message_of(failure)))
        best = min((spent for _, spent in trials.values()), default=inf)
        share = seconds / 3 / max(1, len(trials))
        contenders: list[tuple[Entry, Problem, dict[str, Any]]] = []
        for primitive, spent in sorted(trials.values(), key=lambda trial: trial[1]):
            if len(contenders) >= LEAST_METHODS and not choosing.left:
                rows.append(row(subject=primitive.name, failure="no time left"))
                continue
            is_far = spent > FAR * best  # variants do not differ by so much
            fits = spent * ratio(problem.shape, small.shape) <= slow
            where = problem if fits and not is_far else small
            try:
                spent, variant = fastest(where, primitive, self._likely(primitive, where), 0.0 if is_far else share)
                run = where.bound(primitive, variant)
                error = where.error_of(run)
            except FAILURES as failure:
                rows.append(row(subject=primitive.name, failure=message_of(failure)))
                continue
            if not error <= MOST_ERROR[case.shape.precision]:
                rows.append(row(subject=primitive.name, failure=f"void: rms error {error:.1e}"))
                continue
            entry = Entry(primitive.name, run, self._place.clock, [spent] if is_far else [], repeats_of(spent))
            facts = {"variant": str(variant), "error": error, "is_far": is_far}
            contenders.append((entry, where, facts | {"work": primitive.work(where.shape, variant)}))
        for entry, error, where in peers(problem, small, slow):
            contenders.append((entry, where, {"error": error} if error == error else {}))
        close = [entry for entry, _, facts in contenders if not facts.get("is_far")]
        interleave(close, ROUNDS, Budget(min(seconds / 3, self._budget.left) / 60))
        return rows + [self._row(case, *contender) for contender in contenders]

    def _effort(self, problem: Problem, primitive: Any) -> float:
        variants = self._likely(primitive, problem)
        return effort(primitive.work(problem.shape, variants[0])) if variants else inf

    def _likely(self, primitive: Any, problem: Problem) -> list[Any]:
        return likely(primitive, problem.shape, self._place)

    def _methods(self, shape: Shape) -> Iterator[Any]:
        for primitive in of_kind(shape.kind):
            if not primitive.name.startswith(f"{self._place.device}.") or (
                self._only and primitive.name not in self._only
            ):
                continue
            if primitive.why_not(shape, self._place.machine) is None and "naive" not in primitive.name:
                yield primitive

    def _row(self, case: Case, entry: Entry, problem: Problem, facts: dict[str, Any]) -> Row:
        shape, spent = problem.shape, median(entry.seconds)
        work = facts.pop("work", ())
        voxels = prod((shape.out_shape if shape.kind == "conv" else shape.in_shape)[:4])
        facts |= {
            "measured": list(shape.n),
            "is_smaller": shape != case.shape,
            "precision": shape.precision,
            "why": case.why,
        }
        facts["threads"] = self._place.threads
        facts["of_copy"] = (shape.in_bytes + shape.out_bytes) / spent / self._limits["copy"]
        if work and self._limits.get("fp32"):
            facts["of_memory"] = sum(stage.nbytes for stage in work) / self._limits["copy"] / spent
            facts["stages"] = [[stage.unit, stage.flops, stage.nbytes] for stage in work]
        values = tuple(1e9 * s / voxels for s in entry.seconds)
        return Row(case.group, case.name, entry.name, "ns/voxel", values, facts=facts)

    def _preparing(self, case: Case) -> list[Row]:
        """Time the preparation of weights, and for comparison numpy's transforms of the padded kernels."""
        shape, clock = case.shape, WallClock()
        problem = Problem.of(shape, self._place)
        padded = np.zeros((80, 32, 32, 32), np.float32)
        entries = []
        for primitive in self._methods(shape):
            variant = primitive.variants(shape, self._place.machine)[0]
            run = partial(self._place.bind, primitive, shape, variant, problem.weights)
            entries.append(Entry(primitive.name, run, clock))
        entries.append(Entry("numpy rfftn of 80 kernels in 32^3", lambda: np.fft.rfftn(padded, axes=(1, 2, 3)), clock))
        for entry in entries:
            entry.run()
        interleave(entries, 3, self._budget)
        return [Row(case.group, case.name, e.name, "s", tuple(e.seconds), facts={"why": case.why}) for e in entries]


def message_of(failure: Exception) -> str:
    """Return the first part of the message of a failure."""
    return f"{type(failure).__name__}: {failure}"[:300]


def peers(problem: Problem, small: Problem, slow: float) -> Iterator[tuple[Entry, float, Problem]]:
    """Yield PyTorch's conv3d with bias and ReLU in each precision and memory format, or for poolings a copy."""
    shape, on_gpu = problem.shape, problem.place.device == "gpu"
    if shape.kind != "conv":
        if not on_gpu:
            source, target = (np.full(prod(shape.in_shape), 0.5, np.float32) for _ in range(2))
            yield Entry("numpy copy of the input", lambda: np.copyto(target, source), WallClock()), 0.0, problem
        return
    try:
        import torch
    except ImportError:
        return
    if not on_gpu:
        torch.set_num_threads(problem.place.threads)
    elif not torch_sees_a_gpu():
        return
    where = "cuda" if on_gpu else "cpu"
    asked = (shape.precision, "bf16") if shape.precision == "fp16" or not on_gpu else (shape.precision,)
    for precision in asked:
        rate = {"cpu": 4e10 * problem.place.threads, "cuda": 1.5e13 if precision == "fp32" else 1e14}[where]
        flops = 2 * prod(shape.out_shape) * shape.fin * prod(shape.k)
        given = problem if flops / rate <= slow else small
        for layout in ("contiguous", "channels_last_3d") if precision == "fp32" else ("channels_last_3d",):
            found = _torch_entry(given, precision, layout, where, TorchClock() if on_gpu else WallClock())
            if found is not None:
                yield *found, given


def _torch_entry(given: Problem, precision: str, layout: str, where: str, clock: Clock) -> tuple[Entry, float] | None:
    import torch

    shape = given.shape
    kept: list[Any] = [None]
    try:
        image = torch.from_numpy(given.values).to(where).permute(0, 4, 1, 2, 3).to(dtype_of(precision))
        image = in_layout(image, layout)
        weight = placed(given.weights.weight, precision, layout, where)
        bias = placed(given.weights.bias, precision, None, where)

        def run() -> None:
            if where == "cuda":
                compute_in(precision)
            with torch.inference_mode():
                kept[0] = None  # the memory of the run before is free for this one
                out = torch.relu_(torch.nn.functional.conv3d(image, weight, bias))
                for axis, extent in enumerate(shape.pool, start=2):
                    out = largest(out, axis, extent, 1)
                kept[0] = out

        clock.seconds(run)
        if shape.pools:  # it does not move its maxima, so there are no fragments to compare
            return Entry(f"PyTorch {precision}, {layout}", run, clock), float("nan")
        error = given.error(lambda box: np.asarray(kept[0].permute(0, 2, 3, 4, 1)[box].float().cpu().numpy()))
        if not error <= MOST_ERROR[precision]:
            raise RuntimeError(f"void: rms error {error:.1e}")
    except RuntimeError as failure:
        click.echo(f"  PyTorch {precision}, {layout}: {failure}"[:300])
        return None
    return Entry(f"PyTorch {precision}, {layout}", run, clock), error


def show(rows: Sequence[Row]) -> None:
    """Print the rows of one case, the fastest first."""
    click.echo(f"\n{rows[0].group}: {rows[0].case}")
    for row in sorted((row for row in rows if row.values), key=lambda row: row.median):
        star = " (smaller volume)" if row.facts.get("is_smaller") else ""
        click.echo(
            f"  {row.subject:38}{row.median:12.4g} {row.unit} +- {row.spread:.0%}  {row.facts.get('variant', '')}{star}"
        )
    for row in rows:
        if row.failure:
            click.echo(f"  {row.subject:38}{row.failure}")


def fastest_of(rows: Sequence[Row], *, peer: bool) -> Row | None:
    """Return the fastest method of znnpy, or of others."""
    found = [row for row in rows if row.values and row.subject.startswith(("cpu.", "gpu.")) != peer]
    return min(found, key=lambda row: row.median, default=None)


SHOWN = ("layers", "first", "few-maps", "pools", "pooled")  # groups in the tables


def layers_table(device: str, results: Results) -> str:
    """Return a table for each machine: the fastest method of each layer, and PyTorch's."""
    found, parts = [result for result in results.get("layers", ()) if device_of(result) == device], []
    for result in found:
        rows = []
        for group in SHOWN:
            for case, of_case in result.cases(group):
                ours, peer = fastest_of(of_case, peer=False), fastest_of(of_case, peer=True)
                if ours is None:
                    continue
                best_peer = "-" if peer is None else f"{markdown.number(peer.median)} ({peer.subject})"
                compared = ratio_of(peer.values, ours.values) if peer else None
                bold = "**" if compared and compared.is_clear and compared.median > 1 else ""
                times = f"{bold}{markdown.times(compared.median)}{bold}" if compared else "-"
                rows.append((case, f"`{ours.subject}`", markdown.number(ours.median), best_peer, times))
        head = ("layer", "fastest method", "ns/voxel", "fastest peer", "times as fast")
        parts.append(markdown.table(head, rows, left=2))
    return markdown.sections(found, parts, f"layers --device {device}", SHOWN)


def headline(result: Result) -> str:
    """Return time per voxel of a wide layer, and how many times as fast as PyTorch it is."""
    for case, rows in result.cases("layers"):
        ours, peer = fastest_of(rows, peer=False), fastest_of(rows, peer=True)
        if ours and ("k = 5" in case or "k = 3" in case):
            times = f", {markdown.times(peer.median / ours.median)} as fast as {peer.subject}" if peer else ""
            return f"{case}: {markdown.number(ours.median)} ns/voxel by `{ours.subject}`{times}"
    return "-"


def draw(results: Results, path: Path) -> None:
    """Draw the wide layers of all machines as bars."""
    groups = []
    for result in results.get("layers", ()):
        for case, rows in result.cases("layers"):
            shown = sorted((row for row in rows if row.values), key=lambda row: row.median)
            bars = [
                plots.Bar(row.subject, row.median, markdown.number(row.median), row.subject[1:3] == "pu")
                for row in shown
            ]
            groups.append((f"{result.machine}: {case}", bars))
    plots.bars(path, "Nanoseconds per output voxel of one layer", groups)


PROGRAM = Program(
    "layers",
    "How fast is one layer?",
    "layers [--device gpu]",
    {"layers-cpu": partial(layers_table, "cpu"), "layers-gpu": partial(layers_table, "gpu")},
    headline,
    {"layers": draw},
)


def run_against(other: Path, device: str, budget: Budget, rounds: int) -> list[Row]:
    """Compare single layers with another source tree."""
    with tempfile.TemporaryDirectory() as name:
        side = 256 if device == "gpu" else 48
        asked = [(f"80 -> 80 maps, k = {k}", against.session_request(Path(name), f"layer{k}", side, device=device))
                 for k in (3, 5, 7, 2, 9)]  # fmt: skip
        return [row for rows in against.compare(asked, other, rounds, budget, alone=False) for row in rows]


@click.command()
@options.shared
@options.AGAINST
@click.option(
    "--groups", "-g", multiple=True, type=click.Choice(GROUPS), help="Measure only these groups of cases; repeatable."
)
@click.option("--only", multiple=True, help="Measure only these methods; repeatable.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "fp16"]),
    multiple=True,
    help="Precisions on a GPU [default: all].",
)
@click.option("--rounds", default=4, show_default=True, help="Rounds with --against.")
def command(
    device: str,
    minutes: float,
    quick: bool,
    out: Path | None,
    against: Path | None,
    groups: tuple[str, ...],
    only: tuple[str, ...],
    precision: tuple[str, ...],
    rounds: int,
) -> None:
    """Measure how fast one layer is by every method and in PyTorch."""
    budget = Budget(minutes)
    if against is not None:
        compare_trees(against, device, budget, rounds, out)
        return
    with place_of(device) as place:
        measure_all(place, budget, groups, only, precision, out, quick=quick)


def compare_trees(other: Path, device: str, budget: Budget, rounds: int, out: Path | None) -> None:
    """Compare with another source tree, and fail if ours is slower."""
    rows = run_against(other, device, budget, rounds)
    if out is not None:
        Result("layers", machine_name(), header(), rows).write(out)
    against.report(rows)


def measure_all(
    place: Place,
    budget: Budget,
    groups: Sequence[str],
    only: Sequence[str],
    precision: Sequence[str],
    out: Path | None,
    *,
    quick: bool,
) -> Result:
    """Measure all cases on an open device, and write after each."""
    gpu = place.machine.gpu
    result = Result("layers", machine_name(gpu), header(gpu))
    limits = limits_of(place)
    result.header = {**result.header, "limits": limits}
    precisions = (precision or ("tf32", "fp16", "fp32")) if gpu is not None else ("fp32",)
    wanted = [(case, p) for p in precisions for case in cases(place.device, p, place.threads, quick=quick)]
    order = [case.group for case, _ in wanted]
    wanted.sort(key=lambda one: order.index(one[0].group))  # the most important cases in every precision come first
    wanted = [(case, p) for case, p in wanted if not groups or case.group in groups]
    named_cases = [replace(case, name=f"{case.name}, {p}") if gpu is not None else case for case, p in wanted]
    missing = [f"{case.group}: {case.name}" for case in named_cases]
    if out is not None or not quick:
        merge(result, out, groups or GROUPS)
    earlier = list(result.left_out)
    for place_in_list, named in enumerate(named_cases):
        if not budget.left:
            break
        seconds = SHARES * budget.left / (len(named_cases) - place_in_list)
        if named.threads is not None and named.threads != place.threads:
            with place_of("cpu", named.threads) as fewer:
                rows = Bench(result, fewer, budget, only, limits).measure(named, seconds)
        else:
            rows = Bench(result, place, budget, only, limits).measure(named, seconds)
        missing.pop(0)
        result.left_out = [*earlier, *missing]
        if torch_sees_a_gpu():
            import torch

            torch.cuda.empty_cache()  # memory of the peers, for the next case
        if rows:
            show(rows)
            result.add(rows)
        if out is not None or not quick:
            result.write(out)
    if missing:
        click.echo(f"no time left for {'; '.join(missing)}")
    return result
