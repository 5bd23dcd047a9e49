"""Plans of primitives with made-up costs, and how to change them by hand."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from typing import Any

from tests.support.brute_force import AROUND, planned
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.planner.co_execution import CoExecution
from znnpy.planner.plan import Plan
from znnpy.planner.run_plan import RunPlan

MIXED = Network(  # one layer of every kind
    "mixed", 1, (Conv((3, 2, 2), 6, "relu"), Pool((2, 1, 2)), Maxout(2), MaxFilter((1, 2, 1)), Conv((1, 2, 2), 2))
)
WIDE = Network(  # more maps behind the pooling than before: it pays to take the fragments one by one
    "wide", 2, (Conv((2, 3, 2), 2), Pool((2, 1, 2)), Conv((2, 1, 3), 12), Conv((1, 2, 2), 12), Conv((1, 1, 1), 1))
)

CHOICES_AT: tuple[str | int, ...] = ("stages", 0, "choices")  # where the plan of a worker holds them
MEMORY_AT: tuple[str | int, ...] = ("memory", "stages", 0)
TENSORS_AT: tuple[str | int, ...] = ("stages", 0, "tensors")
OF_WORKER = {field.name for field in fields(Plan)}


@cache
def patches() -> RunPlan:
    """Return a plan of MIXED with one patch."""
    return planned(MIXED, (20, 11, 8), AROUND + 2**19, columns=False, baseline=5000)


@cache
def walking() -> RunPlan:
    """Return a plan of MIXED with columns along y in steps of one plane."""
    found = planned(MIXED, (20, 31, 8), AROUND + 100_000, columns=True)
    assert (found.main.axis, found.patch_out, found.main.column_planes) == (1, (10, 1, 8), 31)
    assert found.main.sub_batches == (1, 1, 1, 1, 1)
    return found


@cache
def in_parts() -> RunPlan:
    """Return a plan of WIDE with columns along z, which computes its 4 fragments one at a time."""
    found = planned(WIDE, (31, 20, 9), AROUND + 600_000, columns=True, patch=(4, 10, 10))
    assert (found.main.axis, found.main.sub_batches) == (0, (1, 1, 4, 4, 4))
    return found


def changed(run: RunPlan, **changes: Any) -> RunPlan:
    """Return a run whose first worker has a plan with other fields."""
    return run.with_main(replace(run.main, **changes))


def sharing_of(run: RunPlan) -> CoExecution:
    """Return how the two workers of a run share its output."""
    assert run.sharing is not None, "side by side"
    return run.sharing


def edited(plan: RunPlan, *path: str | int, to: Any) -> str:
    """Return a plan's JSON with one value of it or of its worker's plan changed, or left out where `to` is ..."""
    content = json.loads(plan.to_json())
    part = content["workers"][0]["plan"] if path[0] in OF_WORKER else content
    for key in path[:-1]:
        part = part[key]
    if to is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = to
    return json.dumps(content)
