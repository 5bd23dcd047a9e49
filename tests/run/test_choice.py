"""What a plan is charged with, beyond what its own numbers say."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from znnpy import array_session
from znnpy.errors import PlanFileError, ResumeError
from znnpy.machine import process_bytes, this_machine
from znnpy.planner.memory import MARGIN_BYTES, reading_bytes, writing_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import choice
from znnpy.run.devices import Site
from znnpy.shapes import Vec3
from znnpy.trained import load_network
from znnpy.volume.array import ArrayVolume
from znnpy.volume.journal import JournalHeader
from znnpy.volume.source import Source

GIB = 2**30


def chosen(
    place: Place,
    dtype: str,
    plan: Plan | None = None,
    *,
    masks: bool = False,
    out: str = "f4",
    cover: str | None = None,
    size: Vec3 = (20, 23, 25),
) -> Plan:
    volume = ArrayVolume(np.zeros(size, dtype))
    source = Source(volume, roi=None, border="valid", network=place.network, allow_nan=masks)
    patch, threads = (None, None) if plan else ((4, 4, 4), 2)
    wishes = choice.Wishes(plan, None if plan else 16 * GIB, threads, patch, (), cover)
    return choice.choose(wishes, place.network, source, np.dtype(out), masks=masks, site=Site(this_machine()))


def test_masks_are_charged_where_nan_is_allowed(place: Place) -> None:
    without, with_masks = (chosen(place, "f4", cover="patches", masks=masks) for masks in (False, True))
    assert with_masks.memory.reading - without.memory.reading == 4 * prod(without.patch_in)


def test_columns_are_charged_for_masks_of_what_they_have_seen(place: Place) -> None:
    without, with_masks = (chosen(place, "f4", cover="columns", masks=masks) for masks in (False, True))
    new, window = prod(without.patch_in), prod(place.network.patch_in(without.patch_out))
    assert new < window
    assert with_masks.memory.reading - without.memory.reading == 2 * new + 3 * window
    assert chosen(place, "f4", without, masks=True).memory.reading == with_masks.memory.reading


def test_a_given_plan_is_charged_what_this_volume_and_output_take(place: Place) -> None:
    plan = chosen(place, "u1", out="u1")
    here = chosen(place, "f8", plan, masks=True)
    seen = place.network.patch_in(plan.patch_out)
    assert here.memory.reading == reading_bytes(1, plan.patch_in, 8, seen=seen) > plan.memory.reading
    assert here.memory.writing == writing_bytes(2, plan.patch_out, 4) > plan.memory.writing


@pytest.mark.parametrize(("more", "charged"), [(MARGIN_BYTES, 0), (MARGIN_BYTES + 1, MARGIN_BYTES + 1)])
def test_a_given_plan_is_charged_what_this_process_holds(
    place: Place, monkeypatch: pytest.MonkeyPatch, more: int, charged: int
) -> None:
    plan = chosen(place, "u1")
    monkeypatch.setattr(choice, "baseline_bytes", lambda: plan.memory.baseline + more)
    assert chosen(place, "u1", plan).memory.baseline == plan.memory.baseline + charged


def test_a_given_plan_keeps_its_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = chosen(place, "u1")
    tight = replace(plan, limits=replace(plan.limits, ram_bytes=plan.memory.peak))
    monkeypatch.setattr(choice, "baseline_bytes", lambda: plan.memory.baseline)
    assert chosen(place, "u1", tight).memory.peak == tight.limits.ram_bytes
    monkeypatch.setattr(choice, "baseline_bytes", lambda: plan.memory.baseline + GIB)
    with pytest.raises(PlanFileError, match=r"1,073,741,824 more than the limit allows"):
        chosen(place, "u1", tight)


def test_the_result_in_memory_is_charged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = []

    def note(*shapes: Any, baseline: int, **words: Any) -> Plan:
        baselines.append(baseline)
        return make_plan(*shapes, baseline=baseline, **words)

    monkeypatch.setattr(array_session, "make_plan", note)
    monkeypatch.setattr(array_session, "baseline_bytes", lambda: 10**8)
    result = load_network(place.folder / "net.yaml")(np.zeros((20, 23, 25), np.uint8))
    assert baselines == [10**8 + result.nbytes]


@pytest.mark.parametrize("size", [(13, 31, 16), (44, 23, 25), (20, 23, 25), (6, 8, 7)])
def test_a_given_plan_of_columns_covers_another_volume(place: Place, size: Vec3) -> None:
    """Shorter, longer than its columns, wider: as if made for it, but for where columns end."""
    plan = chosen(place, "u1", cover="columns")
    here = chosen(place, "u1", plan, size=size)
    assert here.output == place.network.dense_size(size)
    assert (here.axis, here.column_planes, here.patch_out) == (plan.axis, plan.column_planes, plan.patch_out)
    cover = here.cover(place.network)
    assert here.columns == len(cover)
    assert sum(column.voxels for column in cover) == prod(here.output)
    margins = [place.network.margins[c.layers[1] + 1][plan.axis] for c in plan.choices]
    for made, margin, parts in zip(here.choices, margins, plan.sub_batches, strict=True):
        runs = sum(
            step.out.hi[plan.axis] > column.steps[cover.ahead].out.lo[plan.axis] - margin
            for column in cover
            for step in column.steps
        )
        assert made.executions == parts * runs
    assert here.seconds == pytest.approx(plan.preparing_seconds + sum(c.executions * c.seconds for c in here.choices))


def test_words_on_columns_and_on_parts_are_those_of_the_planner(place: Place) -> None:
    assert chosen(place, "u1", cover="columns").streams
    assert not chosen(place, "u1", cover="patches").streams
    assert [choice.columns_only(word) for word in (None, "columns", "patches")] == [None, True, False]
    with pytest.raises(ValueError, match="there is no cover 'rows'; choose one of columns, patches"):
        choice.columns_only("rows")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"cover": "columns"}, "leave out `cover`, or leave out `plan`"),
        ({"depth_first": False}, "leave out depth_first=False, or leave out `plan`"),
        ({"threads": 1, "patch": (4, 4, 4)}, "leave out `threads` and `patch`, or leave out `plan`"),
        ({"only": ("cpu.conv.direct",)}, "leave out `only`, or leave out `plan`"),
    ],
)
def test_a_given_plan_takes_no_other_words(place: Place, words: dict[str, Any], said: str) -> None:
    wishes = choice.Wishes(
        **{"plan": chosen(place, "u1"), "ram": None, "threads": None, "patch": None, "only": ()} | words
    )
    source = Source(
        ArrayVolume(np.zeros((20, 23, 25), "u1")), roi=None, border="valid", network=place.network, allow_nan=False
    )
    with pytest.raises(PlanFileError, match=said):
        choice.choose(wishes, place.network, source, np.dtype("f4"), masks=False, site=Site(this_machine()))


def test_a_run_that_goes_on_may_not_be_asked_for_what_its_plan_is_not() -> None:
    ram = process_bytes() + (950 << 20)  # whatever tests before this one left in the process
    plan = znnpy.plan("fib25_boundary", shape=(330, 330, 330), patch=(176, 176, 176), ram=ram, cover="patches")
    assert max(plan.sub_batches) > 1
    begun = JournalHeader({}, {"only": []}, plan.to_json(), "", plan.columns)
    none = choice.Wishes(None, None, None, None, ())
    for kept in (none, replace(none, cover="patches"), replace(none, patch=(176, 176, 176))):
        choice.check_wishes(kept, begun, plan)
    with pytest.raises(ResumeError, match=r"layers that take their fragments in parts, and now .* depth_first=False"):
        choice.check_wishes(replace(none, depth_first=False), begun, plan)
    with pytest.raises(ResumeError, match=r"began with cover='patches', and now it is cover='columns'; leave it out"):
        choice.check_wishes(replace(none, cover="columns"), begun, plan)
    together = znnpy.plan("fib25_boundary", shape=(60, 60, 60), depth_first=False, cover="columns")
    assert together.streams
    assert max(together.sub_batches) == 1
    choice.check_wishes(replace(none, depth_first=False, cover="columns"), begun, together)


def test_networks_that_are_called_take_the_same_words(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def note(*shapes: Any, **words: Any) -> Plan:
        plans.append(make_plan(*shapes, **words))
        assert words["depth_first"] is False
        return plans[-1]

    monkeypatch.setattr(array_session, "make_plan", note)
    net = load_network(place.folder / "net.yaml")
    array = np.random.default_rng(2).integers(0, 256, (31, 23, 25), np.uint8)
    columns, patches = (net(array, cover=cover, depth_first=False, patch=(4, 4, 4)) for cover in choice.COVERS)
    assert [plan.streams for plan in plans] == [True, False]
    np.testing.assert_allclose(columns, patches, atol=1e-5)
    with pytest.raises(ValueError, match="there is no cover 'rows'"):
        net(array, cover="rows")
