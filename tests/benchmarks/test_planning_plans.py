"""benchmarks/planning_plans.py and planning_findings.py: rivals and schemes are what they say."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.benchmark_networks import MIB, NET, maker_with
from tests.support.fake_primitives import FAKES
from znnpy.planner.schemes import Scheme, repeats, shapes_of
from znnpy.shapes import multiply

if TYPE_CHECKING:
    from collections.abc import Callable

    from znnpy.planner.plan import Plan
    from znnpy.shapes import Vec3


def decided(plan: Plan) -> tuple[Any, ...]:
    return (
        plan.patch_out,
        plan.patch_in,
        plan.axis,
        plan.column_planes,
        plan.choices,
        plan.memory,
        plan.tensors,
        plan.columns,
    )


OVER = {"only": ["cpu.conv.over"], "columns": False}  # some of its layers need memory of the libraries, poolings none


@pytest.mark.parametrize("wishes", [{"columns": False}, {"columns": True}, {"patch": (4, 2, 8)}, OVER], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_recipe_makes_its_plan_again(imported: Callable[[str], Any], wishes: dict[str, Any], share: float) -> None:
    """With less memory than the best takes, layers run in parts too."""
    free = maker_with(imported, **wishes)
    maker = maker_with(imported, int(free.pick.memory.peak * share), **wishes)
    again = maker.plan(maker.recipe(maker.pick))
    assert again is not None
    assert decided(again) == decided(maker.pick)
    assert again.seconds == pytest.approx(maker.pick.seconds)


def test_neighbours_differ_in_one_choice(imported: Callable[[str], Any]) -> None:
    free = maker_with(imported, columns=False)
    maker = maker_with(imported, int(free.pick.memory.peak * 0.8), columns=False)
    found = list(imported("planning_plans").neighbours(maker))
    recipe, *others = [maker.recipe(plan) for plan in (maker.pick, *(r.plan for r in found[:-1]))]
    assert len(set(others)) == len(others) > 10
    for rival, other in zip(found, others, strict=False):
        assert rival.plan.memory.over(maker.ground.limits) == (0, 0)
        ways = {(way.primitive.name, way.layers) for way in recipe.chosen}
        ways_of_other = {(way.primitive.name, way.layers) for way in other.chosen}
        changes = [
            recipe.patch != other.patch,
            recipe.at_once != other.at_once,
            ways != ways_of_other or (rival.what.startswith("layer") and recipe.chosen != other.chosen),
        ]
        assert sum(changes) == 1, rival.what
        assert sum(a != b for a, b in zip(recipe.patch, other.patch, strict=True)) <= 1
    assert found[-1].what == "columns"
    kinds = {rival.what.split(" ")[0] for rival in found}
    assert kinds >= {"layer", "patch", "images", "columns"}


def test_random_plans_fit_and_are_the_same_again(imported: Callable[[str], Any]) -> None:
    plans, maker = imported("planning_plans"), maker_with(imported, 30 * MIB)
    found = list(plans.random_plans(maker, 12, np.random.default_rng(5)))
    again = list(plans.random_plans(maker, 12, np.random.default_rng(5)))
    assert [rival.plan for rival in found] == [rival.plan for rival in again]
    assert len(found) == 12
    assert all(rival.plan.memory.peak <= 30 * MIB for rival in found)
    assert len({maker.recipe(rival.plan) for rival in found}) > 6
    for rival in found:  # each is a whole plan: nothing but the choice of primitives is checked here
        layers = [layer for choice in rival.plan.choices for layer in range(choice.layers[0], choice.layers[1] + 1)]
        assert layers == list(range(len(NET.layers)))


def test_uniform_choices(imported: Callable[[str], Any]) -> None:
    found = list(imported("planning_plans").uniform(maker_with(imported)))
    assert [rival.what for rival in found] == [fake.name for fake in FAKES if fake.kind == "conv"]
    for rival in found:
        convs = {c.primitive for c in rival.plan.choices if c.shape.kind == "conv"}
        assert rival.what in convs
        assert rival.what == "cpu.conv.both" or convs == {rival.what}


def test_schemes(imported: Callable[[str], Any]) -> None:
    """All fragments are what a plan has; a plain pooling gives a part of the output, so often as its window has."""
    findings = imported("planning_findings")
    schemes = list(findings.schemes(NET))
    assert [s.images for s in schemes] == [1, 2, 4, 8, 1, 1, 1]
    period = NET.period
    out: Vec3 = (3, 4, 2)
    dense = multiply(out, period)
    assert shapes_of(NET, out, schemes[0]) == NET.layer_shapes(dense)
    for scheme in schemes:
        shapes = shapes_of(NET, out, scheme)
        for first, second in pairwise(shapes):
            assert first.out_shape == second.in_shape
        voxels = prod(shapes[-1].out_shape[:4]) * repeats(NET, scheme)
        assert voxels == scheme.images * prod(dense)


def test_the_best_of_the_papers_scheme_is_the_planners(imported: Callable[[str], Any]) -> None:
    """Patches, no parts: what the planner finds where it may do nothing else. More images cost nothing with fakes."""
    findings, maker = imported("planning_findings"), maker_with(imported, 40 * MIB, columns=False, depth_first=False)
    one, two, *_ = (findings.best(maker.ground, NET, maker.pick, scheme) for scheme in findings.schemes(NET))
    assert one.seconds == pytest.approx(maker.pick.seconds, rel=0.02)
    assert one.plan.memory.over(maker.ground.limits) == (0, 0)
    assert two.seconds >= 0.95 * one.seconds
    plain = findings.best(maker.ground, NET, maker.pick, Scheme(1, (False, False)))
    assert plain.seconds > one.seconds
    assert all(choice.shape.kind != "pool" or not choice.shape.fragments for choice in plain.plan.choices)


def test_theory(imported: Callable[[str], Any]) -> None:
    """One voxel at a time, every subsampling for itself, is where the speedup is counted from."""
    findings = imported("planning_findings")
    points = findings.theory(2)
    for images in findings.BATCHES:
        speedups = [point["speedup"] for point in points if point["images"] == images]
        assert speedups == sorted(speedups)
        assert speedups[-1] > 50
    (least,) = [point for point in points if point["images"] == 1 and point["side"] == 1]
    assert least["speedup"] > 1
    assert findings.theory_verdict(points, 1000.0)["speedup"] == max(point["speedup"] for point in points)


def test_rivals_take_turns(imported: Callable[[str], Any]) -> None:
    """Of each kind the one that is predicted to be the fastest first; nobody is left out."""
    plans, made = imported("planning_plans"), maker_with(imported)
    rivals = plans.all_rivals(made, 5, 3)
    ranked = list(plans.turns(rivals, ("uniform", "random", "neighbour")))
    assert sorted(map(id, ranked)) == sorted(map(id, rivals))
    assert [rival.kind for rival in ranked[:3]] == ["uniform", "random", "neighbour"]
    for kind in ("uniform", "random", "neighbour"):
        spent = [rival.plan.seconds for rival in ranked if rival.kind == kind and rival.plan]
        assert spent == sorted(spent)
