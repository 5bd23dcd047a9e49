"""Seconds of plans from seconds of their layers: each distinct layer is timed once, and kept in a file of JSON.

Two layers are one where shape, primitive, version, variant and planes carried are equal. A layer that takes longer than
could matter is given up; what is kept of it is that it takes as long at least. A second reading of the same layers, in
another process, tells the band within which nothing can be told apart.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Self

from planning_child import Child, Facts
from planning_plans import carried
from pydantic import TypeAdapter

from znnpy.planner.plan import Choice, Plan

CHILD = Path(__file__).with_name("planning_layer.py")
PREPARING_SECONDS = 120.0  # that a layer may take before it runs: kernels are compiled, weights and input made
RUNS = 3.0  # the first one, one that counts, and what lies between
SPARE_SECONDS = 0.5


@dataclass(slots=True)
class Timed:
    """One distinct layer."""

    readings: list[list[float]] = field(default_factory=list)  # seconds of single runs, by process
    at_least: float = 0.0  # seconds, where it was given up
    failure: str | None = None

    def seconds(self, reading: int = 0) -> float:
        """The median of one reading; inf where there is none."""
        return median(self.readings[reading]) if reading < len(self.readings) else inf


@dataclass(frozen=True, slots=True)
class Total:
    """Seconds of all layers for the whole output."""

    seconds: float
    whole: bool  # else the least that it can be
    failure: str | None = None


class Kept:
    """Layers in a file; `facts` say what machine they were timed on."""

    def __init__(self, path: Path, facts: Facts, *, resume: bool) -> None:
        self._path, self._facts = path, facts
        self.layers: dict[str, Timed] = {}
        if resume and path.is_file():
            kept = json.loads(path.read_text())
            if wrong := [name for name in facts if kept["facts"].get(name) != facts[name]]:
                name = wrong[0]
                raise SystemExit(
                    f"{path} was measured with {name} {kept['facts'].get(name)!r}, and this is {facts[name]!r}; "
                    "leave out --resume, or give another --out"
                )
            self.layers = {key: Timed(**timed) for key, timed in kept["layers"].items()}

    def write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        content = {"facts": self._facts, "layers": {key: asdict(timed) for key, timed in self.layers.items()}}
        other = self._path.with_suffix(".part")
        other.write_text(json.dumps(content) + "\n")
        other.replace(self._path)  # in one step: a run may be killed


def key_of(choice: Choice, planes: int) -> str:
    carrying = f" carrying {planes}" if planes else ""
    return f"{choice.primitive} v{choice.version} {choice.variant} | {choice.shape}{carrying}"


class Stopwatch:
    """Times layers of the plans of one network within one limit. A context manager; its child starts when needed."""

    def __init__(self, kept: Kept, network: str, pick: Plan, *, repeat_seconds: float, end: float) -> None:
        self._kept, self._repeat_seconds, self._end = kept, repeat_seconds, end
        first = {"plan": pick.to_json(), "network": network, "ram_bytes": pick.limits.ram_bytes}
        self._child = Child(CHILD, first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The next layer is timed in a process of its own."""
        self._child.stop()
        self._kept.write()

    def total(self, plan: Plan, *, below: float = inf, reading: int = 0) -> Total:
        """Of a plan's layers; given up as soon as it is plain that it is not below `below` seconds.

        Layers that are known come first, and then those that are predicted to take most.
        """
        entries = [(choice, planes) for choice, planes in zip(plan.choices, carried(plan), strict=True)]
        known = self._kept.layers
        entries.sort(key=lambda e: (key_of(*e) not in known, -e[0].executions * e[0].seconds))
        spent = 0.0
        for choice, planes in entries:
            most = (below - spent) / choice.executions
            timed = self._layer(choice, planes, most, reading)
            if timed.failure:
                return Total(spent, whole=False, failure=timed.failure)
            seconds = timed.seconds(reading)
            if seconds == inf:
                return Total(spent + choice.executions * timed.at_least, whole=False)
            spent += choice.executions * seconds
            if spent > below:
                return Total(spent, whole=choice is entries[-1][0])
        return Total(spent, whole=True)

    def _layer(self, choice: Choice, planes: int, most: float, reading: int) -> Timed:
        timed = self._kept.layers.setdefault(key_of(choice, planes), Timed())
        if timed.failure or len(timed.readings) > reading or timed.at_least >= most:
            return timed
        try:
            said = self._ask(choice, planes, most)
        except TimeoutError:
            self.stop()
            timed.at_least = max(timed.at_least, most)
            return timed
        if "failure" in said:
            timed.failure = said["failure"]
        else:
            timed.readings.append(said["seconds"])
        return timed

    def _ask(self, choice: Choice, planes: int, most: float) -> dict[str, Any]:
        """TimeoutError where it takes longer than `most` seconds."""
        request = {
            "choice": json.loads(TypeAdapter(Choice).dump_json(choice)),
            "carried": planes,
            "most": min(most, 1e9),
            "repeat_seconds": self._repeat_seconds,
        }
        self._child.tell(request)
        said = self._child.line(PREPARING_SECONDS, self._end)
        if said is None:
            self.stop()
            return {"failure": f"not prepared within {PREPARING_SECONDS:.0f} s"}
        if "ready" not in said:
            return said
        said = self._child.line(SPARE_SECONDS + self._repeat_seconds + RUNS * most, self._end)
        if said is None:
            raise TimeoutError(f"more than {most:.2g} s")
        return said


def band(one: Total, other: Total) -> float:
    """How far two readings of the same plan lie apart, as a share."""
    if not (one.whole and other.whole):
        return 0.0
    return max(one.seconds, other.seconds) / min(one.seconds, other.seconds) - 1
