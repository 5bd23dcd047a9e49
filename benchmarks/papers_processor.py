"""Processors in `papers.py`: each primitive of theirs by one thread and by all, for a few seconds a case.

Of each primitive the variant that the cost model likes best takes part. What the model has it that there is no time for
is left out, and so is what turns out to take longer, or a third of the time alone: its crew is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import layers
import numpy as np
from gpu_card import WallClock
from layer_entries_gpu import Entry, Input
from papers_inputs import box

from znnpy.errors import Stopped
from znnpy.kernels.crew import Crew
from znnpy.kernels.table import TABLE
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates, seconds
from znnpy.shapes import ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Primitive, Variant

PART = 1 / 3  # of a case's seconds for one run at most
FAR = 3.0  # times the time of the processor's best: a figure of one run is enough


@dataclass(slots=True)
class Allowed:
    """Seconds of a case for first runs on the processor, and what they were too few for.

    crews  open as long as entries run
    """

    seconds: float
    crews: ExitStack
    left_out: list[str] = field(default_factory=list)


def processor_entries(given: Input, threads: Sequence[int], allowed: Allowed) -> Iterator[Entry]:
    """Each ran once already; what is far behind the best has the seconds of that run, and needs no other."""
    shape, end = given.shape, time.monotonic() + allowed.seconds
    found: list[tuple[float, Entry]] = []
    for predicted, primitive, variant, count in _by_prediction(given, threads):
        name = f"{primitive.name} {variant} threads={count}".replace("  ", " ")
        left = end - time.monotonic()
        if predicted > left:
            allowed.left_out.append(f"{name} on {shape}: {predicted:.1f} s predicted, {max(0.0, left):.1f} s left")
            continue
        crew = allowed.crews.enter_context(Crew(count))
        entry, limit = _entry(given, primitive, variant, crew), min(left, PART * allowed.seconds)
        spent = _stopped_after(limit, crew, entry.run)
        if spent is None:
            allowed.left_out.append(f"{name} on {shape}: stopped after {limit:.1f} s")
        else:
            found.append((spent, entry))
    best = min((spent for spent, _ in found), default=0.0)
    for spent, entry in found:
        if spent > FAR * best:
            entry.seconds.append(spent)
        yield entry


def _by_prediction(given: Input, threads: Sequence[int]) -> list[tuple[float, Primitive, Variant, int]]:
    """The best variant of each primitive that applies, by each number of threads: seconds, the fewest first."""
    shape, machine = given.shape, this_machine()
    assert isinstance(shape, ConvShape)
    found = []
    for count in threads:
        rates = assumed_rates(machine, count)
        for primitive in TABLE:
            if not primitive.name.startswith("cpu.conv.") or primitive.why_not(shape, machine) is not None:
                continue
            times = {variant: seconds(primitive.work(shape, variant), rates)
                     for variant in primitive.variants(shape, machine)}  # fmt: skip
            variant = min(times, key=times.__getitem__)
            found.append((times[variant], primitive, variant, count))
    return sorted(found, key=lambda one: one[0])


def _stopped_after(limit: float, crew: Crew, run: Callable[[], Any]) -> float | None:
    """Seconds of a run; None where it took longer. A crew of one ends the step that it is at."""
    timer = threading.Timer(limit, crew.stop)
    timer.start()
    try:
        begin = time.perf_counter()
        run()
        spent = time.perf_counter() - begin
        timer.cancel()
        timer.join()
        crew.check()  # it may have been stopped just behind the run
    except Stopped:
        return None
    finally:
        timer.cancel()
    return spent


def _entry(given: Input, primitive: Primitive, variant: Variant, crew: Crew) -> Entry:
    """Bound, with an output of its own."""
    assert isinstance(given.shape, ConvShape)
    assert given.weights is not None
    bound = layers.entry(primitive, variant, given.shape, given.some, given.weights, crew)
    found: list[Any] = [None]

    def run() -> None:
        found[0] = bound.run()

    def crop(corner: Vec3) -> Array:
        return np.asarray(found[0][box(given.shape.in_shape[0], corner)])

    told = f"{variant} threads={crew.threads}".strip()
    return Entry(primitive.name, "fp32", told, given.shape, given, run, crop, WallClock())
