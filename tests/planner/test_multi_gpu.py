"""Plans for several equal GPUs: columns enough for all, memory for each, and never more than as many times as fast."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Any

import pytest

from tests.support.brute_force import BASELINE, EDGE_BYTES
from tests.support.fake_plans import MIXED
from tests.support.fake_primitives import FAST, FILTER, MAXOUT, POOL, RATES, WITH_GPU, on_gpu
from tests.support.flat_requests import costs_of, make_plan, request_of
from znnpy.errors import NoPlanError
from znnpy.machine import Limits
from znnpy.network import Conv, Network
from znnpy.planner.memory import MIB, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.multi_gpu import plan_on_devices
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.report.plan_text import explain
from znnpy.shapes import Vec3

TABLE = on_gpu(FAST, POOL, FILTER, MAXOUT)
HEAVY = RATES.scaled(1e-5, 1e-5)  # so that the edges of a run are nothing compared to it
PLENTY = Limits(2**40, 2, 2**40)
OUTPUT: Vec3 = (40, 22, 26)
DEEP = Network("deep", 1, (Conv((5, 1, 1), 2), Conv((5, 1, 1), 2)))  # borders along z only


def make(network: Network, output: Vec3, limits: Limits, **words: Any) -> RunPlan:
    return several(1, network, output, limits, **words)


def several(
    devices: int, network: Network = MIXED, output: Vec3 = OUTPUT, limits: Limits = PLENTY, **words: Any
) -> RunPlan:
    request = request_of(network, output, WITH_GPU, limits, baseline=BASELINE, device="gpu", devices=devices, **words)
    return plan_on_devices(request, costs_of("gpu", table=TABLE, rates=HEAVY))


@pytest.mark.slow
def test_one_gpu_gives_the_plan_for_a_single_gpu() -> None:
    plan = several(1)
    alone = {"baseline": BASELINE, "device": "gpu"}
    assert plan == make_plan(MIXED, OUTPUT, WITH_GPU, PLENTY, table=TABLE, rates=HEAVY, **alone)  # type: ignore[arg-type]
    assert (plan.devices, plan.single_device_seconds) == (1, None)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_last_patches_of_all_gpus_are_written_by_one_thread(devices: int) -> None:
    plan = several(devices)
    computing = sum(choice.executions * choice.seconds for choice in plan.choices) / plan.main.columns
    edges = plan.seconds - computing * ceil(plan.main.columns / devices)
    last = min(devices, plan.main.columns) * 4 * MIXED.output_channels * prod(plan.patch_out)
    nbytes = MIXED.input_channels * prod(plan.main.patch_in) + last
    assert edges == pytest.approx(nbytes / EDGE_BYTES, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "patches"])
def test_output_is_cut_into_columns_for_all_gpus(devices: int, columns: bool) -> None:
    """One GPU would take a single column or patch; the cut output is many times as fast."""
    alone, plan = make(MIXED, OUTPUT, PLENTY, columns=columns), several(devices, columns=columns)
    assert alone.main.columns == 1
    assert plan.main.columns > devices / 2
    assert plan.output == OUTPUT
    assert plan.devices == devices
    assert plan.single_device_seconds == alone.seconds
    assert 1 / devices <= plan.seconds / alone.seconds < 1.7 / devices
    whole = sum(choice.executions * choice.seconds for choice in plan.choices)
    rounds = -(-plan.main.columns // devices)
    assert plan.seconds == pytest.approx(whole * rounds / plan.main.columns, rel=1e-3), "the edges beside"
    check_runs(plan, MIXED, WITH_GPU, table=TABLE)
    assert RunPlan.from_json(plan.to_json()) == plan
    assert f"{alone.seconds / plan.seconds:.2f} times as fast as one GPU alone" in explain(plan)


@pytest.mark.slow
def test_output_is_cut_along_the_cheapest_axis() -> None:
    plan = several(2, DEEP, (24, 24, 24))
    assert plan.patch_out[0] == 24 or plan.main.column_planes >= 24, "not along z"
    assert plan.single_device_seconds is not None
    assert plan.single_device_seconds / plan.seconds == pytest.approx(2, rel=0.01)


def test_memory_is_promised_for_all_gpus() -> None:
    plan = several(3, columns=False, masks=True, itemsize_in=4, itemsize_out=2)
    memory, steps = plan.main.memory, plan.main.columns
    seen = MIXED.patch_in(plan.patch_out)
    assert memory.reading == reading_bytes(1, plan.main.patch_in, 4, steps=steps, seen=seen, device="gpu")
    assert memory.writing == writing_bytes(2, plan.patch_out, 2, steps=steps, device="gpu")
    raw, out = (
        4 * plan.main.patch_in[0] * plan.main.patch_in[1] * plan.main.patch_in[2],
        2 * 2 * plan.patch_out[0] * plan.patch_out[1] * plan.patch_out[2],
    )
    assert memory.staging == staging_bytes(raw, out, reads=steps, writes=steps)
    assert plan.memory.peak == BASELINE + 3 * (memory.reading + memory.writing)
    assert plan.memory.vram == memory.vram, "of each"


@pytest.mark.slow
def test_each_gpu_adds_its_memory_of_the_process() -> None:
    """Each adds 22 MiB, whatever it computes."""
    tight = replace(PLENTY, ram_bytes=BASELINE + 50 * MIB)
    plan = several(2, limits=tight)
    assert plan.memory.peak <= tight.ram_bytes
    assert plan.limits == tight
    assert several(1, limits=tight).memory.peak <= tight.ram_bytes
    with pytest.raises(NoPlanError):
        several(4, limits=tight)


def test_more_gpus_than_planes_are_no_slower_than_one() -> None:
    plan = several(64, output=(3, 3, 3))
    assert plan.devices == 64
    assert plan.single_device_seconds is not None
    assert plan.seconds <= plan.single_device_seconds
