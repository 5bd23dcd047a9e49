"""The best plan of every other kind, why it lost, and a plan that explains itself without its network's file."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from tests.support.brute_force import AROUND, planned
from tests.support.fake_plans import MIXED, WIDE, changed, in_parts, patches, walking
from tests.support.fake_primitives import MACHINE, WITH_GPU
from znnpy.errors import NoPlanError
from znnpy.layer_shapes import with_batch
from znnpy.network import Network
from znnpy.planner.alternatives import kind_of, why_lost
from znnpy.planner.run_plan import RunPlan
from znnpy.report.plan_text import explain, network_of
from znnpy.shapes import Vec3
from znnpy.units import human_bytes


def times_longer(plan: RunPlan, index: int, factor: float, **changes: Any) -> RunPlan:
    """One of its layers takes `factor` times as long, and is otherwise as `changes` say."""
    choices = list(plan.choices)
    choices[index] = replace(choices[index], seconds=factor * choices[index].seconds, **changes)
    return changed(plan, stages=(replace(plan.main.stages[0], choices=tuple(choices)),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "output", "room"),
    [
        (MIXED, (20, 31, 8), 100_000),
        (WIDE, (31, 20, 9), 600_000),
        pytest.param(WIDE, (60, 60, 60), 300_000, marks=pytest.mark.long),
    ],
)
def test_each_alternative_is_the_best_of_its_kind(network: Network, output: Vec3, room: int) -> None:
    """Every kind occurs once, except that of the plan, and equals the search restricted to it."""
    plan = planned(network, output, AROUND + room, kinds=True)
    assert replace(plan, alternatives=()) == planned(network, output, AROUND + room)
    found = {plan.voxels_per_second, *(kind.best.voxels_per_second for kind in plan.alternatives)}
    assert len(found) == len(plan.alternatives) + 1
    expected = set()
    for columns in (True, False):
        for depth_first in (True, False):
            words: dict[str, Any] = {"columns": columns, "depth_first": depth_first}
            expected.add(planned(network, output, AROUND + room, **words).voxels_per_second)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(("room", "columns", "depth_first"), [(3300, True, False), (3300, False, True)])
def test_alternative_beyond_a_limit_names_the_missing_bytes(room: int, columns: bool, depth_first: bool) -> None:
    """The search restricted to that kind misses by the same number."""
    limit, output = AROUND + room, (60, 60, 60)
    plan = planned(WIDE, output, limit, kinds=True)
    lost = [kind for kind in plan.alternatives if kind.best.over_bytes]
    assert sorted(kind.best.column_planes > 0 for kind in lost) == [False, True]
    (kind,) = [kind for kind in lost if (kind.best.column_planes > 0) == columns]
    assert kind.reason == f"does not fit: {human_bytes(kind.best.over_bytes)} more, at the least"
    assert kind.ram_bytes == limit + kind.best.over_bytes
    with pytest.raises(NoPlanError) as refused:
        planned(WIDE, output, limit, columns=columns, depth_first=depth_first)
    assert refused.value.needed_bytes == kind.ram_bytes
    planned(WIDE, output, kind.ram_bytes, columns=columns, depth_first=depth_first)


@pytest.mark.slow
def test_constraints_of_the_request_restrict_the_alternatives() -> None:
    assert planned(MIXED, (20, 31, 8), AROUND + 2**19, kinds=True, columns=False, depth_first=False).alternatives == ()
    for kind in planned(WIDE, (31, 20, 9), AROUND + 600_000, kinds=True, columns=True).alternatives:
        assert kind.best.column_planes
        assert max(kind.best.sub_batches) == 1


def test_slower_plan_names_borders_or_its_slowest_layer() -> None:
    """Borders are named if they cost the most, else the slowest layer and what differs there."""
    plan = patches()
    assert why_lost(MIXED, plan, plan) == "as fast"
    slower = times_longer(plan, len(plan.choices) - 1, 1e6)
    ratio = f"{slower.seconds / plan.seconds:,.0f} times as long: "
    layer = "layer 4 (conv 1x2x2 -> 2 none) takes "
    assert why_lost(MIXED, plan, slower).startswith(ratio + layer)
    assert why_lost(MIXED, plan, slower).endswith(" more")
    assert why_lost(MIXED, slower, plan).endswith(" times as fast, but where both may be taken the GPU is")
    last, method = len(plan.choices) - 1, "cpu.conv.other"
    assert why_lost(MIXED, plan, times_longer(plan, last, 1e6, primitive=method)).endswith(f" more with {method}")
    keeping = times_longer(plan, last, 1.0, resident_bytes=100)
    again = times_longer(keeping, last, 1e6, resident_bytes=0)
    assert why_lost(MIXED, keeping, again).endswith(", as it needs its kernels again in each of 1 runs")
    deep = in_parts()
    choices = tuple(
        replace(
            choice, executions=choice.executions // parts, shape=with_batch(choice.shape, parts * choice.shape.batch)
        )
        for choice, parts in zip(deep.choices, deep.main.sub_batches, strict=True)
    )
    together = changed(deep, stages=(replace(deep.main.stages[0], choices=choices),))
    slow = times_longer(deep, 2, 1e6)
    assert why_lost(WIDE, together, slow).endswith(" more, in 4 parts")


def test_borders_are_the_reason_if_they_cost_the_most() -> None:
    best = planned(WIDE, (60, 60, 60), AROUND + 2**22, columns=False)
    other = planned(WIDE, (60, 60, 60), AROUND + 2**22, columns=False, patch=(2, 2, 2))
    assert other.main.waste > 2 * best.main.waste
    kind = kind_of(WIDE, best, other)
    assert kind.reason.endswith(f": {other.main.waste / best.main.waste:.1f} times the waste")
    assert kind.best.waste == other.main.waste
    assert kind.best.voxels_per_second == prod(other.output) / other.seconds


@pytest.mark.parametrize("make", [patches, walking, in_parts])
def test_plan_file_alone_suffices_to_explain_the_plan(make: Any) -> None:
    plan = make()
    network = WIDE if make is in_parts else MIXED
    assert network_of(plan) == network
    told = explain(RunPlan.from_json(plan.to_json()))
    assert f"field of view {'x'.join(map(str, network.field_of_view))}" in " ".join(told.split())
    assert "another machine" not in " ".join(told.split())
    assert "another machine" not in explain(plan, WITH_GPU)
    assert "another machine" in explain(plan, MACHINE)
    assert max(map(len, told.splitlines())) <= 120


@pytest.mark.slow
def test_alternatives_are_printed_with_speed_memory_and_reason() -> None:
    plan = planned(WIDE, (60, 60, 60), AROUND + 300_000, kinds=True)
    assert plan.alternatives
    told = " ".join(explain(plan).split())
    for kind in plan.alternatives:
        speed, taken = f"{kind.best.voxels_per_second:,.0f} voxels/s", human_bytes(kind.ram_bytes)
        assert f", {speed}, work {kind.best.waste:.2f} times, {taken} of RAM: {kind.reason}" in told
    assert RunPlan.from_json(plan.to_json()) == plan
