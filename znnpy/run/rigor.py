"""How much is measured before a plan is chosen: nothing, layers of the best plans, or all that could be in the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import inf

from znnpy.kernels.primitive import Primitive
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits
from znnpy.planner.cost import Rates, assumed_rates
from znnpy.planner.explain import human_bytes
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan
from znnpy.planner.plan import Rigor as Word
from znnpy.run.clocks import clock_of
from znnpy.run.devices import Site
from znnpy.run.learning import Learner
from znnpy.run.timing import Clock, Progress, Timer

RIGORS: tuple[Word, ...] = ("estimate", "measure", "exhaustive")
TIME_LIMIT = 60.0  # seconds that "measure" may take where nobody said how long
HOPE = 0.5  # assumed: no layer takes less than this share of its estimate

Clocks = Callable[[Site, Limits, float], AbstractContextManager[Clock]]


def rigor_of(word: str, time_limit: float | None) -> tuple[Word, float]:
    """The word, and the seconds that measuring may take; ValueError for words that there are not."""
    for known in RIGORS:
        if known == word:
            break
    else:
        raise ValueError(f"there is no rigor {word!r}; choose one of {', '.join(RIGORS)}")
    if time_limit is None:
        return known, TIME_LIMIT if known == "measure" else inf
    if known == "estimate":
        raise ValueError("a time limit is for layers that are measured: give rigor measure or exhaustive")
    if not 0 < time_limit < inf:
        raise ValueError(f"a time limit is a positive number of seconds, not {time_limit}")
    return known, time_limit


def clock_on(site: Site, limits: Limits, seconds: float) -> AbstractContextManager[Clock]:
    """Of the device that a site has open, for a run of so many seconds."""
    return clock_of(site.gpu, site.machine, limits.threads, seconds)


@dataclass(slots=True)
class Study:
    """Measures as much as its rigor asks for, and knows what it found.

    measure     layers of the best plan, until the best plan holds none that was not measured at about its size
    exhaustive  then the same as if layers that were not measured took half their estimate, or 0.84 of it where they
                were at other sizes: of the plans that the search compares none is faster then

    Nothing is begun that does not fit the time. What a device refuses to run is in the rates, with its words.
    """

    rigor: Word = "estimate"
    seconds: float = inf
    tell: Callable[[Progress], None] = lambda progress: None
    clock: Clocks = clock_on
    now: Callable[[], float] = time.monotonic
    table: Sequence[Primitive] = TABLE
    done: Word = "estimate"  # of the rigor, before the time was up
    sentences: list[str] = field(default_factory=list)
    found: dict[DeviceKind, Rates] = field(default_factory=dict)  # by device, where anything was measured

    def rates(self, site: Site, limits: Limits, known: Rates | None, make: Callable[[Rates], Plan]) -> Rates | None:
        """`known`, and what was measured of layers that `make` would choose; NoPlanError where it finds no plan."""
        if self.rigor == "estimate":
            return known
        rates = known or assumed_rates(site.machine, limits.threads, site.device)
        first = make(rates)
        with self.clock(site, limits, first.seconds) as clock:
            timer = Timer(clock, self.seconds, self.tell, self.now)
            learner = Learner(rates, timer, site.device, limits, site.room(limits), self.table)
            whole = learner.learn(make)
            self.done = "measure"
            if whole and self.rigor == "exhaustive":
                learner.rates = replace(learner.rates, hope=HOPE)
                whole = learner.learn(make)
                learner.rates = replace(learner.rates, hope=1.0)
                self.done = "exhaustive" if whole and not learner.too_large else "measure"
            if learner.too_large:
                self.sentences.append(
                    f"layers that one image of needs more than the {human_bytes(learner.room_bytes)} that are free for "
                    f"them, {len(learner.too_large)} in all, were not measured and count as estimated"
                )
        if not whole:
            self.sentences.append(
                f"the time limit of {self.seconds:,.3g} s was up after {len(learner.found)} layers were measured, "
                "before all were that may be in the best plan: give more --time-limit"
            )
        self.found[site.device] = learner.rates
        return learner.rates
