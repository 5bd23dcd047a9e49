"""Calibrate a processor with the first plan for it: measure for a few seconds what its next plans are made of.

The plan with assumed costs comes first. If its run is long, the layers of this plan are timed at three small sizes, and
between them samples of `znnpy measure` that look the fastest. Rates of units are fitted to all of them and kept, and
the plan is made again. `znnpy measure` replaces them by better ones.

Small sizes keep the calibration short. They suffice, because the factors of primitives by size (`znnpy.costs.fit`) are
fitted as well, and change little beyond the caches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from znnpy.costs.fit import fitted
from znnpy.costs.model import LayerGroup, Rates, layer_key
from znnpy.graph_shapes import (
    GlobalPoolShape,
    GraphConvShape,
    GraphShape,
    PadShape,
    TransposeShape,
    UpsampleShape,
    WindowPoolShape,
)
from znnpy.kernels.contract import Primitive, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import give_back_memory, process_bytes
from znnpy.measure.budget import LayerTask, LayerTimer, Placement, TimeBudget, bytes_of, layers_of
from znnpy.measure.layer_timer import timer_on, touching_rate
from znnpy.measure.survey import Survey, counted_units, sample_tasks
from znnpy.messages import option
from znnpy.patches import with_size
from znnpy.planner.memory import MARGIN_BYTES
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.run.target import OpenTarget
from znnpy.shapes import ChainShape, Vec3
from znnpy.units import human_seconds

LONG_RUN = 2.0  # predicted seconds by assumed rates; what is predicted of a shorter run matters little
SECONDS = 3.5  # of timing
TOUCHED_BYTES = 2**27  # of new memory that is written to
LEAST_BYTES = 2**26  # free memory, below which nothing is measured
MOST_WEIGHT_BYTES = 2**26  # of a layer that is timed: filling and transforming more would take seconds
LAYER_SECONDS = (0.002, 0.01, 0.05)  # expected, of one run of a plan's layer at each of three sizes
SHORT_SECONDS, SAMPLE_SECONDS = 5e-4, 0.01  # expected, of one run of a sample: least and most


def cpu_timer(target: OpenTarget, threads: int) -> AbstractContextManager[LayerTimer]:
    """Return what times layers on the processor of a target; no transforms are measured for it."""
    return timer_on(Placement("cpu", threads), None, target.machine, 0.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a processor is calibrated; tests give other parts.

    clock  opens what times layers on a target's processor, with a number of threads
    touch  measures the bytes per second at which so many threads write to so many bytes of new memory
    now    tells the time in seconds
    load   tells the number of threads that ran on average in the last minute
    costs  primitives, and no rates
    """

    clock: Callable[[OpenTarget, int], AbstractContextManager[LayerTimer]] = cpu_timer
    touch: Callable[[int, int], float] = touching_rate
    now: Callable[[], float] = time.monotonic
    load: Callable[[], float] = lambda: os.getloadavg()[0]
    costs: CostModel = field(default_factory=CostModel)

    def best_plan(self, target: OpenTarget, request: PlanRequest) -> RunPlan:
        """Return the fastest plan for a target, whose processor is calibrated first if it is unknown and the run long.

        NoPlanError if there is no plan.
        """
        known = target.known_rates(request.network, request.limits, request.target.mode)
        first = make_plan(request, replace(self.costs, rates=known))
        if not self._is_wanted(target, known.get("cpu")) or first.seconds < LONG_RUN:
            return first
        if target.free_bytes_within(request.limits) < LEAST_BYTES:
            return first
        before = process_bytes()
        known = {"cpu": self._calibrated(target, first)}
        give_back_memory()
        grown = max(0, process_bytes() - before - MARGIN_BYTES)  # beyond what every plan allows for
        return make_plan(replace(request, baseline=request.baseline + grown), replace(self.costs, rates=known))

    def _is_wanted(self, target: OpenTarget, rates: Rates | None) -> bool:
        """Return whether a processor computes alone, may be calibrated, and was not measured."""
        store = target.costs
        unknown = rates is None or not rates.fitted
        return target.device == "cpu" and store.calibrate and store.named is None and unknown

    def _calibrated(self, target: OpenTarget, plan: RunPlan) -> Rates:
        """Measure the processor of a target for the layers of a plan; return its rates, which the store keeps."""
        limits, store, begun, load = plan.limits, target.costs, self.now(), self.load()
        is_busy = load > 1 + target.machine.cores / 2
        free = target.free_bytes_within(limits) // 2  # the rest is for what timing a layer takes beside its buffers
        survey = Survey(target.machine, "cpu", limits, free, self.costs.table)
        timer = TimeBudget(SECONDS, lambda progress: None, self.now)
        rate = self.touch(limits.threads, min(TOUCHED_BYTES, free))
        with self.clock(target, limits.threads) as clock:
            runs, _ = survey.timed(calibration_tasks(plan, survey), clock, timer)
        rates = replace(fitted(survey.assumed, runs), first_touch=rate, first_touch_measured=True)
        found = replace(survey.costs(rates, counted_units(runs), []), calibrated=True)
        kept = store.keep(found, in_a_file=not is_busy)
        busy = f", while other programs ran (load {load:.1f}), so that it is not kept" if is_busy else ""
        store.sentences.append(
            f"calibrated {target.machine.processor} for {human_seconds(self.now() - begun)}, with {len(runs)} short "
            f"runs of layers{busy}; {option('calibrate', False)} leaves this out, and `znnpy measure` measures more"
        )
        return kept.rates(store.primitives)


def calibration_tasks(plan: RunPlan, survey: Survey) -> list[LayerTask]:
    """Return what is timed, in this order.

    The layers of the plan come first, at the smaller ones of LAYER_SECONDS. Then come the samples, each with what looks
    the fastest, and one sample of each other primitive, since the next plan may take what this one did not. The
    largest size of the plan's layers comes last: a slow machine has no time left for it. Layers of very many weights
    are left out.
    """
    known = {primitive.name: primitive for primitive in survey.table}
    cases: dict[LayerGroup, tuple[Primitive, LayerShape, Variant]] = {}  # each layer once, whatever its size
    for _, choice in layers_of(plan):
        primitive = known[choice.primitive]
        cases.setdefault(
            layer_key(primitive, choice.shape, choice.variant).layer, (primitive, choice.shape, choice.variant)
        )
    sizes = [[_smaller(case, survey, seconds) for case in cases.values()] for seconds in LAYER_SECONDS]
    tasks = [*sizes[0], *sizes[1], *_samples(survey), *sizes[2]]
    fitting = [
        task
        for task in tasks
        if bytes_of(*task.case, survey.limits.threads) <= survey.free_bytes
        and getattr(task.shape, "weight_bytes", 0) <= MOST_WEIGHT_BYTES
    ]
    return list({task.case: task for task in fitting}.values())


def _samples(survey: Survey) -> list[LayerTask]:
    """Return the short ones of the samples with what looks the fastest, then one of each primitive that is left."""
    best: dict[LayerShape, LayerTask] = {}
    others: dict[str, LayerTask] = {}
    for task in sample_tasks(survey.machine, "cpu", ("fp32",), survey.limits, survey.free_bytes, survey.table):
        if SHORT_SECONDS <= task.expected <= SAMPLE_SECONDS:
            others.setdefault(task.primitive.name, task)
            if task.expected < best.setdefault(task.shape, task).expected:
                best[task.shape] = task
    used = {task.primitive.name for task in best.values()}
    return [*best.values(), *(task for name, task in others.items() if name not in used)]


def _smaller(case: tuple[Primitive, LayerShape, Variant], survey: Survey, seconds: float) -> LayerTask:
    """Return a layer on as few images, and these as short, that a run is expected to take at most so many seconds.

    Its variant is the one given if the primitive offers it for such images, else the fastest.
    """
    primitive, shape, variant = case
    while True:
        offered = primitive.variants(shape, survey.machine)
        if variant not in offered:
            variant = min(offered, key=lambda other: survey.assumed.seconds(primitive, shape, other))
        spent = survey.assumed.seconds(primitive, shape, variant)
        less = _halved(shape)
        if spent <= seconds or less is None or primitive.why_not(less, survey.machine) is not None:
            return LayerTask(primitive, shape, variant, spent)
        shape = less


def _halved(shape: LayerShape) -> LayerShape | None:
    """Return a layer with half the images, or one image about half as long along its longest axis; None: it is least.

    Windows of poolings fit as before, since as many whole windows are left out.
    """
    if isinstance(shape, GraphShape):
        return _halved_of_graph(shape)
    if shape.batch > 1:
        return replace(shape, batch=shape.batch // 2)
    kernel, window = _windows(shape)
    spare = [(n - k + 1 - (2 * p - 1)) // p for n, k, p in zip(shape.n, kernel, window, strict=True)]
    longest = max(range(3), key=lambda axis: spare[axis] * window[axis])
    if spare[longest] < 1:
        return None
    less = window[longest] * -(-spare[longest] // 2)
    z, y, x = (size - less * (axis == longest) for axis, size in enumerate(shape.n))
    return replace(shape, n=(z, y, x))


def _halved_of_graph(shape: GraphShape) -> GraphShape | None:
    """Return a layer of a graph for a part of the volume about half as long along its longest axis; None: least."""
    size = shape.n if isinstance(shape, GlobalPoolShape) else shape.out
    axis = max((2, 1, 0), key=lambda axis: size[axis])  # steps of columns are thin along the first axis
    step, times = 1, 1  # voxels of the input in one of the output, or of the output in one of the input
    match shape:
        case GraphConvShape() | WindowPoolShape():
            step = shape.stride[axis]
        case TransposeShape():
            times = shape.stride[axis]
        case UpsampleShape():
            times = shape.factor[axis]
    less = size[axis] // 2 // times  # units that are left out
    if less < 1 or shape.n[axis] - less * step < 4:
        return None
    n = with_size(shape.n, axis, shape.n[axis] - less * step)
    match shape:
        case TransposeShape() | UpsampleShape():
            return replace(shape, n=n, m=with_size(shape.m, axis, shape.m[axis] - less * times))
        case GraphConvShape():
            return shape.of_size(n)
        case PadShape():
            m, high = shape.m[axis] - less, shape.high[axis] - less
            return replace(shape, n=n, m=with_size(shape.m, axis, m), high=with_size(shape.high, axis, high))
        case _:
            return replace(shape, n=n)


def _windows(shape: ChainShape) -> tuple[Vec3, Vec3]:
    """Return the sizes of a layer's kernel and of its pooling window, ones where it has none."""
    one = 1, 1, 1
    match shape.kind:
        case "conv":
            return shape.k, shape.pool
        case "pool" | "maxfilter":
            return one, shape.p
        case _:
            return one, one
