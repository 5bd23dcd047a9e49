"""Offloaded layers that a GPU computes: where that is faster, what it takes of both memories, and by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.brute_force import BASELINE
from tests.support.fake_offloaded_plans import IN_HOST, ON_CPU, ON_GPU, PLENTY, best_offloaded
from tests.support.fake_plans import WIDE
from tests.support.fake_primitives import WITH_GPU
from tests.support.flat_requests import make_plan
from znnpy.errors import NoPlanError
from znnpy.kernels.table import IN_HOST_RAM
from znnpy.machine import Limits
from znnpy.network import Conv, Network
from znnpy.planner import sublayers
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs

pytestmark = pytest.mark.usefixtures("sublayers_take_no_longer")


@pytest.mark.slow
def test_layers_of_host_memory_run_on_the_gpu_if_faster() -> None:
    """The plan promises their memory on both sides, and they share the arena of the GPU."""
    limits = PLENTY, PLENTY
    alone = best_offloaded(WIDE, (20, 12, 9), *limits, mode="gpu-host", in_host_ram=())
    plan = best_offloaded(WIDE, (20, 12, 9), *limits, mode="gpu-host", in_host_ram=(IN_HOST,))
    assert plan.seconds < alone.seconds
    lent = [choice for choice in plan.choices[: plan.main.offloaded] if choice.device == "gpu"]
    assert {choice.primitive for choice in lent} == {IN_HOST.name}
    assert not plan.main.overlap
    assert plan.main.memory.pinned == 200 * len(lent)
    rest = sum(choice.resident_bytes for choice in plan.choices[plan.main.offloaded :])
    assert plan.main.memory.last.weights == 100 * len(lent) + rest
    names = [tensor.name for tensor in plan.main.stages[-1].tensors if "host_ram" in tensor.name]
    assert len(names) == 2 * len(lent)
    assert plan.main.memory.handover == plan.main.handover_bytes
    check_runs(plan, WIDE, WITH_GPU, table=(*ON_CPU, *ON_GPU, IN_HOST))
    assert RunPlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_host_time_of_every_sublayer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts if nothing overlaps with it."""
    monkeypatch.setattr(sublayers, "SUBLAYER_SECONDS", 1e-3)
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, mode="gpu-host", in_host_ram=(IN_HOST,))
    assert {choice.device for choice in plan.choices[: plan.main.offloaded]} == {"cpu"}
    named = {"only": (IN_HOST.name,), "mode": "gpu-host", "in_host_ram": (IN_HOST,)}
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, **named)
    lent = [choice for choice in plan.choices[: plan.main.offloaded] if choice.primitive == IN_HOST.name]
    assert lent
    assert all(choice.seconds > 1e-3 for choice in lent)


@pytest.mark.slow
def test_layers_of_host_memory_without_enough_memory_are_refused() -> None:
    greedy = replace(IN_HOST, least_bytes=PLENTY)
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, mode="gpu-host", in_host_ram=(greedy,))
    assert {choice.device for choice in plan.choices[: plan.main.offloaded]} == {"cpu"}


@pytest.mark.slow
def test_layers_of_host_memory_may_be_forced_by_name() -> None:
    """They are slower than layers on the CPU here, and are refused if both devices work at a time."""
    slow = replace(IN_HOST, flops=1e4)
    words: dict[str, Any] = {"in_host_ram": (slow,), "mode": "gpu-host"}
    free = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, **words)
    assert slow.name not in {choice.primitive for choice in free.choices}
    asked = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, only=slow.name, **words)
    front = [choice for choice in asked.choices[: asked.main.offloaded] if choice.shape.kind == "conv"]
    assert {choice.primitive for choice in front} == {slow.name}
    with pytest.raises(NoPlanError, match=r"gpu.conv.in_host runs in mode gpu-host alone; drop `only` or choose"):
        best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, only=slow.name, **(words | {"mode": "cpu-to-gpu"}))


def test_host_ram_primitive_is_planned_below_the_bytes_of_its_tensors() -> None:
    """The primitive is gpu.conv.host_ram itself."""
    network = Network("real", 1, (Conv((3, 3, 3), 16, "relu"), Conv((3, 3, 3), 16, "relu"), Conv((1, 1, 1), 2)))
    limits = Limits(2**34, 2, 2**30)
    plan = make_plan(
        network, (60, 60, 60), WITH_GPU, limits, mode="gpu-host", baseline=BASELINE, patch=(60, 60, 60), columns=False,
        only=IN_HOST_RAM[0].name,
    )  # fmt: skip
    lent = [choice for choice in plan.choices[: plan.main.offloaded] if choice.shape.kind == "conv"]
    assert {choice.primitive for choice in lent} == {"gpu.conv.host_ram"}
    check_runs(plan, network, WITH_GPU)
    assert RunPlan.from_json(plan.to_json()) == plan
