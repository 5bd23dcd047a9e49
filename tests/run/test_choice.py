"""What a plan is charged with, beyond what its own numbers say."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from place import Place

from znnpy import trained
from znnpy.errors import PlanFileError
from znnpy.machine import this_machine
from znnpy.planner.memory import MARGIN_BYTES, MASKS, reading_bytes, writing_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import choice
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

GIB = 2**30


def chosen(place: Place, dtype: str, plan: Plan | None = None, *, masks: bool = False, out: str = "f4") -> Plan:
    volume = ArrayVolume(np.zeros((20, 23, 25), dtype))
    source = Source(volume, roi=None, border="valid", network=place.network, allow_nan=masks)
    patch, threads = (None, None) if plan else ((4, 4, 4), 2)
    wishes = choice.Wishes(plan, None if plan else 16 * GIB, threads, patch, ())
    return choice.choose(wishes, place.network, source, np.dtype(out), masks=masks, machine=this_machine())


def test_masks_are_charged_where_nan_is_allowed(place: Place) -> None:
    without, with_masks = chosen(place, "f4"), chosen(place, "f4", masks=True)
    assert with_masks.memory.reading - without.memory.reading == MASKS * prod(without.patch_in)


def test_a_given_plan_is_charged_what_this_volume_and_output_take(place: Place) -> None:
    plan = chosen(place, "u1", out="u1")
    here = chosen(place, "f8", plan, masks=True)
    assert here.memory.reading == reading_bytes(1, plan.patch_in, 8, masks=True) > plan.memory.reading
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

    monkeypatch.setattr(trained, "make_plan", note)
    monkeypatch.setattr(trained, "baseline_bytes", lambda: 10**8)
    result = trained.load_network(place.folder / "net.yaml")(np.zeros((20, 23, 25), np.uint8))
    assert baselines == [10**8 + result.nbytes]
