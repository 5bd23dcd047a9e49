"""How much is measured before a plan is chosen: nothing, layers of the best plans, or all that could be in the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

from znnpy.errors import NoPlanError
from znnpy.kernels.primitive import Primitive
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.machine import Limits
from znnpy.messages import option
from znnpy.planner.cost_model import Rates, assumed_rates
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan
from znnpy.planner.plan import Rigor as Word
from znnpy.planner.sublayers import DividedPrimitive
from znnpy.run.clocks import clock_of
from znnpy.run.devices import Site
from znnpy.run.learning import Known, Learner, Making
from znnpy.run.timing import Clock, Progress, Timer, Where, rooms_of
from znnpy.units import human_bytes

RIGORS: tuple[Word, ...] = ("estimate", "measure", "exhaustive")
TIME_LIMIT = 60.0  # seconds that "measure" may take where nobody said how long
HOPE = 0.5  # assumed: no layer takes less than this share of its estimate

Clocks = Callable[[Site, Where, float], AbstractContextManager[Clock]]


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


def clock_on(site: Site, where: Where, seconds: float) -> AbstractContextManager[Clock]:
    """Of what a site has open, for a run of so many seconds."""
    return clock_of(where, site.gpu, site.machine, seconds)


def layers_timed(plan: Plan, site: Site, known: Known, study: Study) -> Known:
    """`known`, and what `study` measured of the layers of one plan that were not known at their size.

    site   with its GPU open, where layers run on one
    known  by device; what is missing is assumed. Rates of the processor are of `plan.limits.threads`

    So plans may be made elsewhere, and in turn with this.
    """
    return study.rates(site, plan.limits, known, lambda rates: plan)


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
    in_host_ram: Sequence[DividedPrimitive] = IN_HOST_RAM
    done: Word = "estimate"  # of the rigor, before the time was up
    sentences: list[str] = field(default_factory=list)
    found: dict[DeviceKind, Rates] = field(default_factory=dict)  # by device, where anything was measured

    def rates(self, site: Site, limits: Limits, known: Known, *makes: Making) -> Known:
        """`known`, and what was measured of layers that `makes` would choose; NoPlanError where the last finds no plan.

        known  by device, what is missing is assumed; those of the processor are of `limits.threads`
        makes  who make plans: the last takes all into account, those before are there sooner
        """
        if self.rigor == "estimate":
            return known
        devices: set[DeviceKind] = {"cpu", site.device}
        begun = {device: known.get(device) or assumed_rates(site.machine, limits.threads, device) for device in devices}
        timer, rooms = Timer(self.seconds, self.tell, self.now), rooms_of(site, limits)
        clocks = partial(self.clock, site)
        learner = Learner(dict(begun), timer, clocks, limits.threads, rooms, self.table, self.in_host_ram)
        self.done = "measure"
        whole = _learnt(learner, makes)
        if whole and self.rigor == "exhaustive":
            learner.hope(HOPE)
            whole = _learnt(learner, makes)
            learner.hope(1.0)
            self.done = "exhaustive" if whole and not learner.too_large else "measure"
        self.sentences += _left_out(learner)
        if not whole:
            self.sentences.append(
                f"the time limit of {self.seconds:,.3g} s was up after {len(learner.found)} layers were measured, "
                f"before all were that may be in the best plan: give more {option('time_limit')}"
            )
        self.found = {device: rates for device, rates in learner.rates.items() if rates != begun[device]}
        return learner.rates


def _learnt(learner: Learner, makes: Sequence[Making]) -> bool:
    """False where the time was up before the end; the first plan of each is none of that time."""
    for sooner in makes[:-1]:
        with suppress(NoPlanError):
            if not _learnt(learner, [sooner]):
                return False
    with learner.timer.paused():
        first = makes[-1](learner.rates)
    return learner.learn(makes[-1], first=first)


def _left_out(learner: Learner) -> list[str]:
    """A sentence on layers that did not fit each memory."""
    names: dict[DeviceKind, str] = {"cpu": "RAM", "gpu": "VRAM"}
    return [
        f"layers that one image of needs more than the {human_bytes(max(0, learner.rooms[device]))} of {names[device]} "
        f"that are free for them, {len(cases)} in all, were not measured and count as estimated"
        for device, cases in learner.too_large.items()
    ]
