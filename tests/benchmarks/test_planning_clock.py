"""benchmarks/planning_clock.py and planning_layer.py: distinct layers are timed once, and as they run in a plan."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from tests.support.benchmark_networks import NET, OUTPUT, maker_with
from znnpy.kernels.crew import Crew
from znnpy.machine import Limits, this_machine
from znnpy.planner.cost_model import assumed_rates
from znnpy.planner.plan import Choice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from znnpy.planner.plan import Plan

CHILD = """\
import json, os, sys, time
json.loads(sys.stdin.readline())
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"ready": True}), flush=True)
    with open(os.environ["ASKED"], "a") as file:
        file.write(asked["choice"]["primitive"] + "\\n")
    if asked["choice"]["primitive"] == os.environ.get("SLOW"):
        time.sleep(60)
    if asked["choice"]["primitive"] == os.environ.get("DEADLY"):
        sys.exit(3)
    print(json.dumps({"seconds": [2.0, 1.0, 3.0]}), flush=True)
"""


@pytest.fixture
def watch(imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A stopwatch whose child measures nothing, and the pick it is for."""
    clock = imported("planning_clock")
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(clock, "CHILD", child)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    (tmp_path / "asked").touch()

    def make(seconds: float = 60.0, resume: bool = False, **facts: Any) -> tuple[Any, Plan, Callable[[], list[str]]]:
        pick = maker_with(imported, columns=False).pick
        kept = clock.Kept(tmp_path / "layers.json", {"machine": "fake"} | facts, resume=resume)
        stopwatch = clock.Stopwatch(kept, "net", pick, repeat_seconds=0.0, end=time.monotonic() + seconds)
        return stopwatch, pick, lambda: (tmp_path / "asked").read_text().split()

    return make


def test_distinct_layers_are_timed_once(watch: Callable[..., Any]) -> None:
    stopwatch, pick, asked = watch()
    with stopwatch:
        one = stopwatch.total(pick)
        assert one.whole
        assert one.seconds == 2.0 * sum(choice.runs for choice in pick.choices)  # the median
        assert len(asked()) == len(pick.choices)
        assert stopwatch.total(pick) == one
        assert len(asked()) == len(pick.choices)
        stopwatch.stop()
        assert stopwatch.total(pick, reading=1) == one
        assert len(asked()) == 2 * len(pick.choices)
    again, _, _ = watch(resume=True)
    with again:
        assert again.total(pick, reading=1) == one
    assert len(asked()) == 2 * len(pick.choices)
    with pytest.raises(SystemExit, match="machine 'fake', and this is 'other'"):
        watch(resume=True, machine="other")


def test_what_is_plainly_slower_is_given_up(watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is asked, and the least that it takes is told; it is asked again when more would matter."""
    stopwatch, pick, asked = watch()
    slow = max(pick.choices, key=lambda choice: choice.runs * choice.seconds)
    with stopwatch:
        total = stopwatch.total(pick, below=0.5)
        assert not total.whole
        assert total.seconds >= 2.0
        assert asked() == [slow.primitive]
    monkeypatch.setenv("SLOW", slow.primitive)
    stopwatch, pick, asked = watch()
    begin = time.monotonic()
    with stopwatch:
        total = stopwatch.total(pick, below=0.4 * slow.runs)
        assert total == type(total)(seconds=pytest.approx(0.4 * slow.runs), whole=False)
        assert time.monotonic() - begin < 20
        assert stopwatch.total(pick, below=0.3 * slow.runs).seconds == total.seconds
        assert len(asked()) == 2


def test_what_kills_its_process_and_when_time_is_up(
    watch: Callable[..., Any], imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopwatch, pick, _ = watch()
    monkeypatch.setenv("DEADLY", pick.choices[0].primitive)
    with stopwatch:
        total = stopwatch.total(pick)
        assert not total.whole
        assert total.failure == "the process ended with 3"
    stopwatch, pick, _ = watch(seconds=0.0)
    with stopwatch, pytest.raises(imported("planning_child").NoTimeLeft):
        stopwatch.total(pick)


@pytest.mark.parametrize("columns", [False, True])
def test_every_layer_of_a_plan_is_timed(imported: Callable[[str], Any], columns: bool) -> None:
    """With what it carries, on the processor."""
    plans, child = imported("planning_plans"), imported("planning_layer")
    machine = this_machine()
    ground = plans.Ground(machine, Limits(2**30, 1), assumed_rates(machine, 1), baseline=0)
    maker = plans.Maker(ground, NET, ground.plan(NET, OUTPUT, columns=columns, patch=(8, 8, 12)))
    rivals = [maker.pick, *(r.plan for r in plans.random_plans(maker, 3, np.random.default_rng(2)))]
    with Crew(1) as crew:
        room = child.HostRoom(maker.pick, "n337", crew)
        for plan in rivals:
            for choice, planes in zip(plan.choices, plans.carried(plan), strict=True):
                request = {"choice": json.loads(TypeAdapter(Choice).dump_json(choice)), "carried": planes}
                (spent,) = child.layer(request | {"most": 0.0, "repeat_seconds": 0.0}, room)
                assert 0 < spent < 60
    assert any(plans.carried(maker.pick)) == columns


def test_every_layer_of_a_plan_on_a_gpu_is_timed(imported: Callable[[str], Any]) -> None:
    plans, child, emulated = imported("planning_plans"), imported("planning_layer"), imported("tests.support.emulator")
    machine = replace(this_machine(), gpu=emulated.EMULATED_GPU)
    ground = plans.Ground(
        machine, Limits(2**40, 1, 2**30), assumed_rates(machine, 1, "gpu"), 0, "gpu", "tf32", context=0
    )
    pick = ground.plan(NET, (8, 4, 8), columns=True, patch=(4, 4, 4))
    with emulated.EmulatedDevice() as device:
        room = child.DeviceRoom(pick, "n337", device)
        for choice, planes in zip(pick.choices, plans.carried(pick), strict=True):
            request = {"choice": json.loads(TypeAdapter(Choice).dump_json(choice)), "carried": planes}
            (spent,) = child.layer(request | {"most": 0.0, "repeat_seconds": 0.0}, room)
            assert spent > 0
