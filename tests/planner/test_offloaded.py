"""Plans whose first layers are offloaded: within both memories, read as they were written, told layer by layer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.brute_force import BASELINE, CONTEXT, THREADS
from tests.support.fake_offloaded_plans import GPU_RATES, HOST_RATES, ON_CPU, ON_GPU, PLENTY, UPLOAD, best_offloaded
from tests.support.fake_plans import MIXED, TENSORS_AT, WIDE, changed, edited
from tests.support.fake_primitives import POOL, SLOW, WITH_GPU, on_gpu
from tests.support.flat_requests import make_plan
from znnpy.costs.model import Rate, seconds
from znnpy.errors import NoPlanError, PlanFileError
from znnpy.machine import Limits
from znnpy.network import Conv, Network
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.report.plan_text import explain
from znnpy.shapes import Vec3
from znnpy.units import mebibytes

pytestmark = pytest.mark.usefixtures("sublayers_take_no_longer")


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return best_offloaded(MIXED, (20, 11, 8), PLENTY, PLENTY)


def test_memory_of_process_and_gpu_is_promised_separately(plan: RunPlan) -> None:
    """The process holds patches on their way, two handovers, and the tensors of layers in host memory."""
    memory = plan.main.memory
    front = plan.choices[: plan.main.offloaded]
    assert (plan.device, plan.main.overlap, memory.baseline, memory.context) == ("gpu", True, BASELINE, CONTEXT)
    assert memory.handover == 2 * front[-1].shape.out_bytes == 2 * plan.main.handover_bytes
    assert memory.stages[0].weights == sum(choice.resident_bytes for choice in front)
    assert memory.stages[0].arena == max(
        tensor.offset + -(-tensor.nbytes // 256) * 256 for tensor in plan.main.stages[0].tensors
    )
    around = memory.baseline + memory.reading + memory.writing + memory.pinned
    offloaded_bytes = memory.stages[0].total
    assert memory.peak == around + offloaded_bytes + memory.handover
    assert memory.vram == CONTEXT + memory.staging + memory.last.total
    assert memory.excess(Limits(memory.peak - 3, 1, memory.vram - 7)) == (3, 7)


def test_seconds_of_both_stages_add_up(plan: RunPlan) -> None:
    front, back = plan.main.stage_seconds
    assert plan.main.seconds_per_step == max(front, back)
    in_turn = changed(plan, overlap=False)
    assert in_turn.main.seconds_per_step == pytest.approx(front + back)
    assert plan.seconds < in_turn.seconds
    parts = plan.main.sub_batches[plan.main.offloaded]
    upload, once = plan.main.handover_bytes / parts / UPLOAD, back - plan.main.stages[1].wait_seconds
    assert plan.main.stages[1].wait_seconds == pytest.approx(upload + (parts - 1) * max(0.0, upload - once / parts))


def test_written_plan_is_read_back(plan: RunPlan) -> None:
    table = (*ON_CPU, *ON_GPU)
    read = RunPlan.from_json(plan.to_json())
    assert read == plan
    check_runs(read, MIXED, WITH_GPU, ram_bytes=plan.memory.peak, vram_bytes=plan.memory.vram, table=table)
    with pytest.raises(PlanFileError, match="bytes of RAM, 70 more than the limit allows"):
        check_runs(plan, MIXED, WITH_GPU, ram_bytes=plan.memory.peak - 70, table=table)
    edits: list[tuple[tuple[str | int, ...], Any, str]] = [
        (("stages",), [], "damaged: .*stages: .*at least 1 item"),
        (("stages", 1), ..., "damaged: .*memory is promised for stages on"),
        (("overlap",), False, "for what is handed over"),
        (("memory", "stages", 0, "arena"), 0, "arena of the stage in the memory of the host"),
        (("memory", "stages", 0, "weights"), 1, "of weights of the stage in the memory of the host"),
        ((*TENSORS_AT, 0, "offset"), 64, "not aligned to 256"),
        (("stages", 1, "wait_seconds"), -1.0, "damaged: .*stages.1.wait_seconds"),
    ]
    for path, to, said in edits:
        with pytest.raises(PlanFileError, match=said):
            check_runs(RunPlan.from_json(edited(plan, *path, to=to)), MIXED, WITH_GPU, table=table)


@pytest.mark.slow
def test_constraints_of_the_request_are_kept() -> None:
    some_patch: Vec3 = (2, 2, 4)
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, patch=some_patch, columns=True, depth_first=False)
    assert (plan.patch_out, plan.main.streams, max(plan.main.sub_batches)) == (some_patch, True, 1)
    only = ("cpu.conv.slow", "gpu.conv.over")
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, only=only)
    names = {choice.primitive for choice in plan.choices if choice.shape.kind == "conv"}
    assert names <= set(only)
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, kinds=True, precision="tf32")
    assert {kind.device for kind in plan.alternatives} == {"cpu", "gpu"}
    assert plan.precision == "tf32"
    assert {choice.shape.precision for choice in plan.choices[: plan.main.offloaded]} == {"fp32"}


@pytest.mark.slow
def test_impossible_requests_are_refused() -> None:
    with pytest.raises(
        NoPlanError, match=r"hands float32 from the host to the GPU: choose precision='tf32' or precision='fp32'"
    ):
        best_offloaded(MIXED, (20, 11, 8), PLENTY, PLENTY, precision="fp16")
    with pytest.raises(NoPlanError, match="has one layer, and mode cpu-to-gpu needs one for each device"):
        best_offloaded(Network("one", 1, (Conv((2, 2, 2), 1),)), (20, 11, 8), PLENTY, PLENTY)
    with pytest.raises(NoPlanError, match="run the first layers of mixed with the host"):
        best_offloaded(MIXED, (20, 11, 8), PLENTY, PLENTY, table=ON_GPU)
    with pytest.raises(NoPlanError, match="are to run on a GPU, and there is none"):
        make_plan(MIXED, (20, 11, 8), replace(WITH_GPU, gpu=None), Limits(PLENTY, 2, PLENTY), mode="cpu-to-gpu")


@pytest.mark.slow
def test_nearest_miss_names_the_sufficient_limits(plan: RunPlan) -> None:
    """The limits that the message asks for are enough."""
    with pytest.raises(NoPlanError) as caught:
        best_offloaded(MIXED, (20, 11, 8), BASELINE, CONTEXT)
    assert caught.value.needs is not None
    ram_bytes, vram_bytes = caught.value.needs
    need = re.escape(f"the smallest need is {mebibytes(ram_bytes)} and {mebibytes(vram_bytes)}, with ")
    assert re.search(rf"{need}.* allow at least ram='\d+M' and vram='\d+M'$", str(caught.value))
    found = best_offloaded(MIXED, (20, 11, 8), ram_bytes, vram_bytes)
    assert found.memory.excess(Limits(ram_bytes, 2, vram_bytes)) == (0, 0)
    with pytest.raises(NoPlanError):
        best_offloaded(MIXED, (20, 11, 8), ram_bytes - 1, vram_bytes - 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gpu-host", "cpu-to-gpu"])
def test_feeder_thread_reserves_a_core(mode: str) -> None:
    limits = Limits(PLENTY, THREADS + 1, PLENTY)
    words: dict[str, Any] = {"table": (*ON_CPU, *ON_GPU), "in_host_ram": (), "baseline": BASELINE, "context": 0}
    words |= {"mode": mode, "rates": GPU_RATES, "host_rates": HOST_RATES, "kinds": True}
    plan = make_plan(WIDE, (20, 12, 9), WITH_GPU, limits, **words)
    assert plan.limits == limits
    assert plan.main.compute_threads == THREADS + (mode == "gpu-host")
    slower = limits.threads / plan.main.compute_threads
    table = {primitive.name: primitive for primitive in ON_CPU}
    for choice in plan.choices[: plan.main.offloaded]:
        work = table[choice.primitive].work(choice.shape, choice.variant)
        assert choice.seconds >= (1 - 1e-9) * slower * seconds(work, HOST_RATES)
    check_runs(plan, WIDE, WITH_GPU, table=(*ON_CPU, *ON_GPU))
    (alone,) = (kind.best for kind in plan.alternatives if kind.device == "cpu")
    words |= {"mode": None, "rates": HOST_RATES, "host_rates": None}
    of_all = make_plan(WIDE, (20, 12, 9), WITH_GPU, limits, device="cpu", **words)
    assert alone.voxels_per_second == of_all.voxels_per_second
    said = json.loads(plan.to_json())
    own = said["workers"][0]["plan"]
    assert own.pop("feed_threads") == limits.threads - plan.main.compute_threads
    assert RunPlan.from_json(json.dumps(said)).main.compute_threads == limits.threads
    own["feed_threads"] = limits.threads
    with pytest.raises(PlanFileError, match="threads"):
        RunPlan.from_json(json.dumps(said))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
def test_printed_plan_names_the_device_of_each_layer(mode: str) -> None:
    """It also names the memory of each layer, and the stage that waits for the other."""
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, mode=mode)
    told = explain(plan)
    assert max(map(len, told.splitlines())) <= 120
    for choice in plan.choices[: plan.main.offloaded]:
        where = "GPU, from RAM" if choice.device == "gpu" else "CPU"
        assert re.search(rf"{re.escape(choice.primitive)} +{where} ", told), told
    assert re.search(rf"{re.escape(plan.choices[-1].primitive)} +GPU ", told), told
    last = plan.choices[plan.main.offloaded - 1].layers[1]
    beside = (
        rf"layers 0 to {last} run with {plan.main.compute_threads} threads for the next patch or step while the GPU "
        r"runs the others: "
        r".* waits \d+% of the time"
    )
    in_turn = rf"layers 0 to {last} run with tensors in RAM before the GPU runs the others: .* and .*"
    layers = (beside if plan.main.overlap else in_turn).replace("layers 0 to 0 run", "layer 0 runs")
    assert re.search(layers, told.replace("\n", " ")), told
    for row in ("offloaded layers: arena", "handed over", "GPU: arena"):
        assert row in told


@pytest.mark.slow
def test_printed_plan_names_the_waiting_stage() -> None:
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY)
    assert "the CPU waits 100% of the time" in " ".join(
        explain(changed(plan, stages=(plan.main.stages[0], replace(plan.main.stages[1], wait_seconds=9.0)))).split()
    )


def test_uploads_overlap_with_computing() -> None:
    """One image at a time is faster than all at once if that costs nothing else."""
    words: dict[str, Any] = {"patch": (20, 12, 10), "columns": False, "table": (*ON_CPU, *on_gpu(SLOW, POOL))}
    plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, **words)
    assert plan.choices[plan.main.offloaded].shape.batch == 1
    assert plan.main.sub_batches[plan.main.offloaded] == 4
    assert plan.main.stages[1].wait_seconds == pytest.approx(plan.main.handover_bytes / 4 / UPLOAD)


def test_less_vram_gives_fewer_images_at_a_time() -> None:
    """The number goes down to one; the link is fast enough that nobody waits for it."""
    words: dict[str, Any] = {"patch": (20, 12, 10), "columns": False, "table": (*ON_CPU, *on_gpu(SLOW, POOL))}
    words["rates"] = GPU_RATES.replaced(gpu_link=Rate(flops=1e12, nbytes=1e300))
    most = best_offloaded(WIDE, (20, 12, 9), PLENTY, PLENTY, **words)
    parts = {1}
    for share in (0.9, 0.6, 0.4, 0.3):
        room = CONTEXT + int(share * (most.memory.vram - CONTEXT))
        try:
            plan = best_offloaded(WIDE, (20, 12, 9), PLENTY, room, **words)
        except NoPlanError:
            break
        assert plan.memory.vram <= room
        parts.add(plan.main.sub_batches[plan.main.offloaded])
    assert len(parts) > 1, parts
