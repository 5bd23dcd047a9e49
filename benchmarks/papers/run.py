"""Measure the papers' layers and networks on this machine; `cases.yaml` lists them, `tables.py` shows the results."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import znnpy
from benchmarks.harness.layer_runner import Host, Place, Problem, place_of
from benchmarks.harness.machine import torch_sees_a_gpu
from benchmarks.harness.peers import compute_in, dtype_of
from benchmarks.harness.results import Row
from benchmarks.harness.timing import Budget, Clock, WallClock
from benchmarks.papers.cases import Case, cases_of, experiments
from benchmarks.papers.clock import HeldClock, HeldTorchClock
from benchmarks.planner_runs import Planner, Point, facts_of_plan
from znnpy.kernels.table import TABLE

OURS, OTHER, COPIED, PEER, INEXACT, CPU, COPY = (
    "ours", "our other methods", "ours, with copies", "peer", "peer, inexact", "processor", "copy",
)  # fmt: skip
CUDNN = "gpu.conv.cudnn"  # primitives whose names begin so run cuDNN's plans
MOST_ERROR = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3}  # relative rms; beyond it ours is void, a peer inexact
WRONG = 2e-2  # beyond it, in any precision, a peer is wrong, not just inexact
CLOSE = 1.5  # contenders up to this many times the best one's time take part in rounds
SERIES_SECONDS, MOST_RUNS = 1e-3, 12  # shortest series of runs, and the most runs of one
SLOW_SECONDS, SLOW_ROUNDS = 0.02, 4  # runs that take longer are slow; rounds of a slow run
CPU_FLOPS = 4e10  # operations per second and core, to predict which cases take too long on a CPU
BYTE = 16.0  # floating-point operations that take as long as a byte, roughly: orders variants
ALGORITHMS = 10  # algorithms of cuDNN that PyTorch tries for a layout
MODES = {"cpu": ("cpu",), "gpu": ("gpu", "gpu-host", "cpu-to-gpu", "side-by-side")}


class Plain(Problem):
    """A convolution without activation, whose biases are zero, so that peers need not add them."""

    kept: ClassVar[deque[Any]] = deque(maxlen=256)  # peaks on a GPU outlive what was bound with them

    @classmethod
    def of(cls, shape: Any, place: Place) -> Plain:
        """Make input and weights."""
        made = super().of(shape, place)
        assert isinstance(made, Plain)
        made.weights = znnpy.ConvWeights(made.weights.weight, np.zeros_like(made.weights.bias))
        return made

    def bound(self, primitive: Any, variant: Any) -> Callable[[], None]:
        """Return a function that runs the primitive once; several may be bound at a time."""
        run = super().bound(primitive, variant)
        self.kept.append(getattr(self.place, "_values", None))
        return run

    def _definition(self, lo: Any, size: Any) -> Any:
        return self._sums(lo, size)


@dataclass
class Contender:
    """A method of ours or of a peer that computes a layer.

    error    rms error of boxes of its output, over the rms of the definition.
    seconds  seconds of runs; at first one average of consecutive runs.
    """

    name: str
    who: str
    variant: str
    run: Callable[[], Any]
    clock: Clock
    error: float = 0.0
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass
class LayerBench:
    """Measures one paper's layers at a place.

    slow  methods that take more seconds run only once, and cases that would at CPU_FLOPS are omitted; inf on a GPU.
    """

    paper: str
    place: Place
    budget: Budget
    rounds: int
    variants: int
    slow: float
    clock: Clock
    torch_clock: Clock | None
    left_out: list[str]

    def rows(self, case: Case) -> list[Row]:
        """Measure all contenders that apply to a case; report those that need more memory or time than is allowed."""
        if case.flops > self.slow * CPU_FLOPS * self.place.threads:
            self.left_out.append(f"{self.paper}, {case}: {case.flops / 1e9:.0f} Gflop would take too long")
            return []
        try:
            problem = Plain.of(case.shape, self.place)
        except (MemoryError, RuntimeError, znnpy.ZnnpyError) as error:
            self.left_out.append(f"{self.paper}, {case}: {error}")
            return []
        with ExitStack() as opened:
            found = [*self._primitives(problem, opened), *self._torch(problem)]
            if experiments()[self.paper].get("copies") and self.place.device == "gpu":
                found += self._with_copies(problem, found)
                found += self._processor(case, opened)
            self._compete([one for one in found if one.failure is None])
            rows = [self._row(case, one) for one in self._kept(found)]
        if isinstance(self.clock, HeldClock) and rows:
            copied = 1e6 * self.clock.copied_seconds(case.least_bytes)
            rows.append(Row(self.paper, str(case), "copy of as many bytes", "us", (copied,), facts={"who": COPY}))
        return rows

    def _primitives(self, problem: Problem, opened: ExitStack) -> Iterator[Contender]:
        """Yield the fastest variant of each of our methods and of our other ones, and each plan of cuDNN.

        On a CPU every method counts as ours; the experiment on one image runs them with one thread, too.
        """
        about = experiments()[self.paper]
        for primitive in TABLE:
            if (
                primitive.kind != "conv"
                or not primitive.name.startswith(self.place.device)
                or "naive" in primitive.name
            ):
                continue
            who = OURS if self.place.device == "cpu" or primitive.name in about["methods"] else OTHER
            if primitive.name.startswith(CUDNN):
                who = PEER
            elif who == OTHER and primitive.name not in about["others"]:
                continue
            if primitive.why_not(problem.shape, self.place.machine) is not None:
                continue
            tried = list(self._variants(primitive, problem, who))
            if who == PEER or (about.get("copies") and self.place.device == "gpu"):
                yield from tried
            else:
                yield min(tried, key=lambda one: one.seconds[0] if one.seconds else float("inf"))
        if about.get("copies") and isinstance(self.place, Host) and self.place.threads > 1:
            yield from self._single(problem, opened)

    def _single(self, problem: Problem, opened: ExitStack) -> Iterator[Contender]:
        one = opened.enter_context(place_of("cpu", 1))
        alone = replace(problem, place=one)
        for found in replace(self, place=one)._primitives(alone, opened):
            yield replace(found, name=f"{found.name}, one thread")

    def _variants(self, primitive: Any, problem: Problem, who: str) -> Iterator[Contender]:
        """Yield some variants, each with the average seconds of consecutive runs; least work comes first."""
        shape, most = problem.shape, experiments()[self.paper].get("most_gib")

        def work(variant: Any) -> float:
            return float(sum(stage.flops + BYTE * stage.nbytes for stage in primitive.work(shape, variant)))

        variants = list(primitive.variants(shape, self.place.machine))
        if who != PEER:
            variants = sorted(variants, key=work)[: self.variants]
        failure = f"{primitive.name} has no variant"
        any_ran = False
        for variant in variants:
            scratch = sum(one.nbytes for one in primitive.footprint(shape, variant, self.place.threads).scratch)
            if most is not None and scratch > most * 2**30:
                failure = f"{variant} takes {scratch / 2**30:.2f} GiB, and {most} are allowed"
                continue
            try:
                run, crop = problem.bound(primitive, variant), _cropped(problem)
                crop(np.s_[:1, :1, :1, :1])  # waits for earlier work
                problem.out.fill(np.nan)  # so that voxels which are not written are found
                begin = time.perf_counter()
                run()
                spent = time.perf_counter() - begin
                error = problem.error(crop)
                if spent <= self.slow:
                    spent = self.clock.seconds(run)
            except (RuntimeError, MemoryError, znnpy.ZnnpyError) as failed:
                failure = f"{type(failed).__name__}: {failed}"[:300]
                continue
            any_ran = True
            name = "cuDNN" if who == PEER else primitive.name
            if experiments()[self.paper].get("copies") and self.place.device == "gpu":
                name = f"{name} {variant}".strip()
            one = Contender(name, who, str(variant), run, self.clock, error, [spent])
            yield judged(one, shape.precision)
        if not any_ran:
            yield Contender(primitive.name, who, "", lambda: None, self.clock, failure=failure)

    def _torch(self, problem: Problem) -> Iterator[Contender]:
        """Yield PyTorch's conv2d in both layouts: it finds the plans that cuDNN has for two dimensions alone."""
        if self.torch_clock is None:
            return
        import torch

        shape, where = problem.shape, "cuda" if self.place.device == "gpu" else "cpu"
        if where == "cpu":
            torch.set_num_threads(self.place.threads)
        for layout, form in (("contiguous", torch.contiguous_format), ("channels last", torch.channels_last)):
            kept: list[Any] = [None]
            values = torch.from_numpy(problem.values[:, 0]).to(where, dtype_of(shape.precision)).permute(0, 3, 1, 2)
            image = values.contiguous(memory_format=form)
            weight = torch.from_numpy(problem.weights.weight[:, :, 0]).to(where, dtype_of(shape.precision))
            weight = weight.contiguous(memory_format=form)

            def run(image: Any = image, weight: Any = weight, kept: list[Any] = kept) -> None:
                if where == "cuda":
                    compute_in(shape.precision, ALGORITHMS)
                with torch.inference_mode():
                    kept[0] = None  # the memory of the run before is free for this one
                    kept[0] = torch.nn.functional.conv2d(image, weight)

            def crop(box: tuple[slice, ...], kept: list[Any] = kept) -> Any:
                return kept[0].permute(0, 2, 3, 1)[:, None][box].float().cpu().numpy()

            one = Contender(f"PyTorch, {layout}", PEER, "", run, self.torch_clock)
            try:
                run()
                one.error = problem.error(crop)
                one.seconds = [one.clock.seconds(run)]
            except RuntimeError as error:  # PyTorch's own, for lack of memory too
                yield replace(one, failure=str(error)[:300])
                continue
            yield judged(one, shape.precision)

    def _with_copies(self, problem: Problem, found: Sequence[Contender]) -> Iterator[Contender]:
        """Yield our fastest method from the host's memory to the host's memory, by the host's clock."""
        ours = [one for one in found if one.who == OURS and one.failure is None]
        if not ours:
            return
        best = min(ours, key=lambda one: one.seconds[0])
        device: Any = self.place.opened
        source = np.ascontiguousarray(problem.values.astype(problem.out.dtype))

        def run() -> None:
            device.copy_async(problem.x(), source, device.stream)
            best.run()
            device.get(problem.out)

        run()
        clock = WallClock()
        yield replace(
            best, who=COPIED, name=f"{best.name}, with copies", run=run, clock=clock, seconds=[clock.seconds(run)]
        )

    def _processor(self, case: Case, opened: ExitStack) -> Iterator[Contender]:
        """Yield the methods of the CPU, for comparison with those of a GPU."""
        host = opened.enter_context(place_of("cpu"))
        bench = replace(self, place=host, clock=host.clock, torch_clock=None)
        problem = Plain.of(case.shape, host)
        for one in bench._primitives(problem, opened):
            yield replace(one, who=CPU)

    def _compete(self, contenders: Sequence[Contender]) -> None:
        """Time contenders close to the best of their side in interleaved rounds; others keep their first seconds."""
        best: dict[str, float] = {}
        for one in contenders:
            best[one.who] = min(best.get(one.who, float("inf")), one.seconds[0])
        turns = [one for one in contenders if one.seconds[0] <= CLOSE * best[one.who]]
        series = [min(MOST_RUNS, max(1, ceil(SERIES_SECONDS / max(one.seconds[0], 1e-9)))) for one in turns]
        rounds = [min(SLOW_ROUNDS, self.rounds) if one.seconds[0] > SLOW_SECONDS else self.rounds for one in turns]
        for one in turns:
            one.seconds = []
        for number in range(self.rounds):
            if number and not self.budget.left:
                break
            order = list(zip(turns, series, rounds, strict=True))
            for one, repeats, most in order if number % 2 == 0 else reversed(order):
                if number < most:
                    one.seconds.append(one.clock.seconds(one.run, repeats))

    def _kept(self, found: Sequence[Contender]) -> list[Contender]:
        """Return one contender of each name, the fastest."""
        fastest: dict[str, Contender] = {}
        for one in sorted(found, key=lambda one: float(np.median(one.seconds)) if one.seconds else float("inf")):
            fastest.setdefault(one.name, one)
        return list(fastest.values())

    def _row(self, case: Case, one: Contender) -> Row:
        facts: dict[str, Any] = {"who": one.who, "variant": one.variant}
        if one.failure is None:
            facts["error"] = float(f"{one.error:.2g}")
        values = () if one.failure else tuple(float(f"{1e6 * spent:.6g}") for spent in one.seconds)
        return Row(self.paper, str(case), one.name, "us", values, one.failure, facts)


def judged(one: Contender, precision: str) -> Contender:
    """Return a contender after a check of its error: ours may be void, a peer inexact or wrong."""
    if one.error <= MOST_ERROR[precision]:
        return one
    if one.who == PEER and one.error <= WRONG:
        return replace(one, who=INEXACT, name=f"{one.name}, inexact")
    return replace(one, failure=f"void: rms error {one.error:.1e}", seconds=[])


def _cropped(problem: Problem) -> Callable[[tuple[slice, ...]], Any]:
    return lambda box: problem.place.get(problem.out[box])


def layer_rows(
    paper: str,
    place: Place,
    budget: Budget,
    left_out: list[str],
    *,
    quick: bool,
    rounds: int,
    variants: int,
    slow: float,
    known: Collection[str] = (),
) -> Iterator[Row]:
    """Yield the rows of a paper's layers at a place; cases for which no time is left are counted.

    slow   approximate limit of the seconds of a run on a CPU.
    known  cases that are not measured again.
    """
    gpu = place.opened
    slow = float("inf") if gpu is not None else slow
    nbytes = {"nbytes": 2**12} if quick else {}
    clock: Clock = WallClock(0.0 if quick else 0.002) if gpu is None else HeldClock(gpu, **nbytes)
    torch_clock: Clock | None = None
    if find_spec("torch") is not None:
        torch_clock = clock if gpu is None else HeldTorchClock(gpu, **nbytes) if torch_sees_a_gpu() else None
    bench = LayerBench(paper, place, budget, rounds, variants, slow, clock, torch_clock, left_out)
    cases = [case for case in cases_of(paper, place.device, quick=quick) if str(case) not in known]
    for number, case in enumerate(cases):
        if not budget.left:
            left_out.append(f"{paper}: no time left for {len(cases) - number} of {len(cases)} cases")
            return
        yield from bench.rows(case)


def network_rows(device: str, budget: Budget, left_out: list[str], *, quick: bool, rounds: int) -> Iterator[Row]:
    """Yield the speeds of ZNNi's networks in every mode, and the predicted speeds of its schemes."""
    about = experiments()["znni"]
    networks, side = (["tiny"], 40) if quick else (about["networks"], about["shape"][0])
    with tempfile.TemporaryDirectory() as folder:
        seconds = 0.2 if quick else {"cpu": 5.0, "gpu": 1.0}[device]
        planner = Planner(device, budget, Path(folder), seconds)
        for name in networks:
            for mode in MODES[device]:
                if not budget.allows(seconds):
                    left_out.append(f"znni: no time left for {name} in mode {mode}")
                    continue
                point = Point(name, side, about["limit"], "Table V")
                made = planner.plan(point, "calibrated", mode=mode, why=mode == device)
                runs = [] if made.get("failure") else [run for _ in range(rounds) for run in planner.run(point, made)]
                failure = made.get("failure") or next((run["failure"] for run in runs if run.get("failure")), None)
                values = () if failure else tuple(run["speed"] for run in runs)
                yield Row("znni", f"{name}, {side}^3", mode, "voxels/s", values, failure, facts_of_plan(made))
                if not failure and mode == device:
                    yield from _schemes(f"{name}, {side}^3", made)


def _schemes(case: str, made: dict[str, Any]) -> Iterator[Row]:
    """Yield predicted speeds of section VI-A: several images at a time, and plain max-pooling."""
    for scheme, speed in made["schemes"].items():
        yield Row("znni", case, f"predicted: {scheme}", "voxels/s", (speed,), facts={"predicted": True})
    yield Row("znni", case, "predicted: the plan", "voxels/s", (made["voxels_per_second"],), facts={"predicted": True})
