"""A plan is charged with memory beyond its own numbers: masks, results and this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from tests.support.emulator import EMULATED_GPU
from tests.support.fake_plans import changed
from znnpy.errors import PlanFileError, ResumeError
from znnpy.machine import process_bytes, this_machine
from znnpy.measure import calibrate
from znnpy.option_values import COVERS, AskedMode, Cover
from znnpy.planner.memory import MARGIN_BYTES, MIB, reading_bytes, writing_bytes
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.run import choice
from znnpy.run.resume import check_options
from znnpy.run.target import OpenTarget
from znnpy.shapes import Vec3
from znnpy.shared_options import RunOptions
from znnpy.trained import load_network
from znnpy.volume.array import ArrayVolume
from znnpy.volume.journal import JournalHeader
from znnpy.volume.source import Source

GIB = 2**30


def chosen(
    place: Place,
    dtype: str,
    plan: RunPlan | None = None,
    *,
    masks: bool = False,
    out: str = "f4",
    cover: Cover | None = None,
    size: Vec3 = (20, 23, 25),
) -> RunPlan:
    volume = ArrayVolume(np.zeros(size, dtype))
    source = Source(volume, roi=None, border="valid", network=place.network, allow_nan=masks)
    patch, threads = (None, None) if plan else ((4, 4, 4), 2)
    wishes = RunOptions(plan=plan, ram=None if plan else 16 * GIB, threads=threads, patch=patch, cover=cover)
    work = choice.Work(place.network, source.output, source.dtype.itemsize, np.dtype(out).itemsize, masks=masks)
    return choice.choose(wishes, work, OpenTarget(machine=this_machine()))


def test_masks_are_charged_where_nan_is_allowed(place: Place) -> None:
    without, with_masks = (chosen(place, "f4", cover="patches", masks=masks) for masks in (False, True))
    assert with_masks.main.memory.reading - without.main.memory.reading == 4 * prod(without.main.patch_in)


def test_columns_are_charged_for_masks_of_what_they_have_seen(place: Place) -> None:
    without, with_masks = (chosen(place, "f4", cover="columns", masks=masks) for masks in (False, True))
    new, window = prod(without.main.patch_in), prod(place.network.patch_in(without.patch_out))
    assert new < window
    assert with_masks.main.memory.reading - without.main.memory.reading == 2 * new + 3 * window
    assert chosen(place, "f4", without, masks=True).main.memory.reading == with_masks.main.memory.reading


def test_given_plan_is_charged_for_this_volume_and_output(place: Place) -> None:
    plan = chosen(place, "u1", out="u1")
    here = chosen(place, "f8", plan, masks=True)
    seen = place.network.patch_in(plan.patch_out)
    assert here.main.memory.reading == reading_bytes(1, plan.main.patch_in, 8, seen=seen) > plan.main.memory.reading
    assert here.main.memory.writing == writing_bytes(2, plan.patch_out, 4) > plan.main.memory.writing


@pytest.mark.parametrize(("more", "charged"), [(MARGIN_BYTES, 0), (MARGIN_BYTES + 1, MARGIN_BYTES + 1)])
def test_given_plan_is_charged_for_the_memory_of_this_process(
    place: Place, monkeypatch: pytest.MonkeyPatch, more: int, charged: int
) -> None:
    plan = chosen(place, "u1")
    monkeypatch.setattr(choice, "baseline_bytes", lambda: plan.memory.baseline + more)
    assert chosen(place, "u1", plan).memory.baseline == plan.memory.baseline + charged


def test_given_plan_keeps_its_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = chosen(place, "u1")
    tight = changed(plan, limits=replace(plan.limits, ram_bytes=plan.memory.peak))
    monkeypatch.setattr(choice, "baseline_bytes", lambda: plan.memory.baseline)
    assert chosen(place, "u1", tight).memory.peak == tight.limits.ram_bytes
    monkeypatch.setattr(choice, "baseline_bytes", lambda: plan.memory.baseline + GIB)
    with pytest.raises(PlanFileError, match=r"1,073,741,824 more than the limit allows"):
        chosen(place, "u1", tight)


def _in_a_process_of(monkeypatch: pytest.MonkeyPatch, now: Callable[[], int]) -> None:
    """Replace the memory of this process, which may also shrink while it runs many tests."""
    monkeypatch.setattr(choice, "baseline_bytes", lambda: 10**8)
    monkeypatch.setattr(choice, "peak_bytes", lambda: 10**8)
    monkeypatch.setattr(choice, "process_bytes", now)


def test_plan_counts_what_its_search_leaves_in_the_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0]
    search = calibrate.Calibration.best_plan

    def best_plan(calibration: calibrate.Calibration, target: OpenTarget, request: PlanRequest) -> RunPlan:
        left.append(60 * MIB)
        return search(calibration, target, request)

    monkeypatch.setattr(calibrate.Calibration, "best_plan", best_plan)
    _in_a_process_of(monkeypatch, lambda: 10**8 + left[-1])
    assert chosen(place, "u1").main.memory.baseline == 10**8 + 60 * MIB - MARGIN_BYTES


def test_result_in_memory_is_charged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_a_process_of(monkeypatch, lambda: 10**8)
    net = load_network(place.folder / "net.yaml")
    with net.session((20, 23, 25), dtype=np.uint8, device="cpu") as run:
        assert run.plan.memory.baseline == 10**8 + 4 * prod(run.output_shape)


@pytest.mark.parametrize("size", [(13, 31, 16), (44, 23, 25), (20, 23, 25), (6, 8, 7)])
def test_given_plan_of_columns_covers_another_volume(place: Place, size: Vec3) -> None:
    """Shorter, longer than its columns, wider: as if made for it, but for where columns end."""
    plan = chosen(place, "u1", cover="columns")
    here = chosen(place, "u1", plan, size=size)
    assert here.output == place.network.dense_size(size)
    assert (here.main.axis, here.main.column_planes, here.patch_out) == (
        plan.main.axis,
        plan.main.column_planes,
        plan.patch_out,
    )
    cover = here.main.cover(place.network)
    assert here.main.columns == len(cover)
    assert sum(column.voxels for column in cover) == prod(here.output)
    margins = [place.network.margins[c.layers[1] + 1][plan.main.axis] for c in plan.choices]
    for made, margin, parts in zip(here.choices, margins, plan.main.sub_batches, strict=True):
        runs = sum(
            step.out.hi[plan.main.axis] > column.steps[cover.ahead].out.lo[plan.main.axis] - margin
            for column in cover
            for step in column.steps
        )
        assert made.executions == parts * runs
    assert here.seconds == pytest.approx(
        plan.main.preparing_seconds + sum(c.executions * c.seconds for c in here.choices)
    )


def test_cover_argument_constrains_the_planner(place: Place) -> None:
    assert chosen(place, "u1", cover="columns").main.streams
    assert not chosen(place, "u1", cover="patches").main.streams
    with pytest.raises(ValueError, match="there is no cover 'rows'; choose one of columns, patches"):
        RunOptions(cover="rows")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"cover": "columns"}, "leave out `cover`, or leave out `plan`"),
        ({"depth_first": False}, "leave out depth_first=False, or leave out `plan`"),
        ({"threads": 1, "patch": (4, 4, 4)}, "leave out `threads` and `patch`, or leave out `plan`"),
        ({"only": ("cpu.conv.direct",)}, "leave out `only`, or leave out `plan`"),
    ],
)
def test_given_plan_refuses_planning_arguments(place: Place, words: dict[str, Any], said: str) -> None:
    wishes = RunOptions(plan=chosen(place, "u1"), **words)
    work = choice.Work(place.network, place.network.dense_size((20, 23, 25)), 1, 4)
    with pytest.raises(PlanFileError, match=said):
        choice.choose(wishes, work, OpenTarget(machine=this_machine()))


def test_resumed_run_refuses_arguments_contradicting_its_plan() -> None:
    ram = process_bytes() + (950 << 20)  # whatever tests before this one left in the process
    plan = znnpy.plan("fib25_boundary", shape=(330, 330, 330), patch=(176, 176, 176), ram=ram, cover="patches")
    assert max(plan.main.sub_batches) > 1
    begun = JournalHeader({}, {"only": []}, plan.to_json(), "", plan.main.columns)
    none = RunOptions()
    for kept in (none, replace(none, cover="patches"), replace(none, patch=(176, 176, 176))):
        check_options(kept, begun, plan)
    with pytest.raises(ResumeError, match=r"layers that take their fragments in parts, and now .* depth_first=False"):
        check_options(replace(none, depth_first=False), begun, plan)
    with pytest.raises(ResumeError, match=r"began with cover='patches', and now it is cover='columns'; leave it out"):
        check_options(replace(none, cover="columns"), begun, plan)
    together = znnpy.plan("fib25_boundary", shape=(60, 60, 60), depth_first=False, cover="columns")
    assert together.main.streams
    assert max(together.main.sub_batches) == 1
    check_options(replace(none, depth_first=False, cover="columns"), begun, together)


def test_called_network_accepts_the_same_arguments(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def note(request: PlanRequest, costs: CostModel) -> RunPlan:
        assert not request.constraints.depth_first
        plans.append(make_plan(request, costs))
        return plans[-1]

    monkeypatch.setattr(calibrate, "make_plan", note)
    net = load_network(place.folder / "net.yaml")
    array = np.random.default_rng(2).integers(0, 256, (31, 23, 25), np.uint8)
    columns, patches = (net(array, cover=cover, depth_first=False, patch=(4, 4, 4)) for cover in COVERS)
    assert [plan.main.streams for plan in plans] == [True, False]
    np.testing.assert_allclose(columns, patches, atol=1e-5)
    with pytest.raises(ValueError, match="there is no cover 'rows'"):
        net(array, cover="rows")  # type: ignore[arg-type]


def test_work_in_order_is_planned_for_one_device(place: Place) -> None:
    """Mode `auto` may take the CPU and GPUs together, which finish patches in no order."""
    machine = replace(this_machine(), gpu=EMULATED_GPU)
    work = choice.Work(place.network, (15, 16, 19), 1, 4)
    asked: tuple[tuple[AskedMode, bool], ...] = (("auto", False), ("auto", True), ("gpu-host", True))
    requests = [
        choice.request_for(
            RunOptions(mode=mode), replace(work, in_order=in_order), target, target.limits(None, 2, None)
        )
        for target in (OpenTarget(machine=machine), OpenTarget(machine=this_machine()))
        for mode, in_order in asked
    ]
    assert [one.target.mode for one in requests] == ["auto", "gpu", "gpu-host", "auto", "cpu", "gpu-host"]
