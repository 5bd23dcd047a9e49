"""Throughput against memory: the best plans of one kind at one limit after the other, from a machine's memory down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from znnpy.errors import NoPlanError
from znnpy.planner.plan import Plan

LEAST_BYTES = 2**28  # assumed, for progress alone: where the least plan may be


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan of its kind within a limit."""

    limit: int  # bytes, of where the layers run
    plan: Plan
    done: float  # share of what is to be worked out

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "device": plan.device,
            "cover": "columns" if plan.walks else "patches",
            "limit_bytes": self.limit,
            "held_bytes": plan.memory.held,
            "voxels_per_second": plan.voxels_per_second,
            "patch_out": list(plan.patch_out),
            "primitives": [choice.primitive for choice in plan.choices],
        }


def points(make: Callable[[int], Plan], most: int) -> Iterator[Point]:
    """The best plans within `most` bytes and every smaller power of the root of 2, down to the least that any needs.

    make  the best plan within a limit; NoPlanError with the least need where there is none
    A plan that fits within a smaller limit too is the best there: nothing is worked out twice.
    """
    limit, last = most, most
    while True:
        try:
            plan = make(limit)
        except NoPlanError as error:
            needed = error.needed_bytes
            if needed is not None and needed < last:
                with suppress(NoPlanError):
                    yield Point(needed, make(needed), 1.0)
            return
        while plan.memory.held <= limit:
            yield Point(limit, plan, _share(limit, most))
            limit, last = _smaller(limit), limit


def _smaller(limit: int) -> int:
    """The next smaller power of the root of 2."""
    return int(2 ** ((ceil(2 * log2(limit) - 1e-6) - 1) / 2))


def _share(limit: int, most: int) -> float:
    """Of a curve, that is done with a limit."""
    whole = log2(max(most / LEAST_BYTES, 2.0))
    return min(0.99, log2(most / limit) / whole)
