"""Plans for a GPU: its memory is what limits them, besides the process's memory, and everything runs there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf, prod
from typing import Any

import pytest

from tests.planner.test_brute_force import FEWER, some
from tests.support.brute_force import AROUND, BASELINE, CONTEXT, SMALL, everything, planned, planned_on_gpu
from tests.support.fake_plans import CHOICES_AT, MIXED, TENSORS_AT, edited
from tests.support.fake_primitives import (
    BOTH,
    CARRYING,
    FAKES,
    FAST,
    FILTER,
    GPU,
    MACHINE,
    MAXOUT,
    OVER,
    POOL,
    SLOW,
    WITH_GPU,
    Fake,
    on_gpu,
)
from tests.support.flat_requests import make_plan
from znnpy.errors import NoPlanError, PlanFileError, ShapeError
from znnpy.machine import Limits
from znnpy.network import Conv, Network, Pool
from znnpy.network_files import read_network
from znnpy.planner.memory import MIB, Memory, context_bytes, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.shapes import GPU_PRECISIONS, ConvShape, Precision
from znnpy.units import mebibytes

MakeNetwork = Callable[..., Network]
ON_GPU = on_gpu(*FEWER)
READING = on_gpu(SLOW, *(replace(p, reads_carried=True) for p in (OVER, BOTH)), POOL, FILTER)
EVERY = (*FAKES, *on_gpu(*FAKES))
PLENTY = 2**40


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return planned_on_gpu(MIXED, (20, 11, 8), PLENTY, CONTEXT + 2**20, table=EVERY, precision="fp16", columns=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fakes", "columns"), [(ON_GPU, None), (ON_GPU, False), (READING, True)], ids=["all", "patches", "columns"]
)
def test_equals_brute_force_at_every_limit(
    tiny_network: MakeNetwork, fakes: tuple[Fake, ...], columns: bool | None
) -> None:
    """The memory of the process is limited apart from that of the GPU."""
    network = tiny_network()
    space = [known for known in everything(network, SMALL, fakes, "gpu") if columns in (None, known.walks)]
    hosts = sorted({known.host for known in space})
    assert len(hosts) > 3
    planned_at, missed = 0, 0
    for ram_bytes in (hosts[0] - 1, hosts[0], hosts[len(hosts) // 2], PLENTY):
        for vram_bytes in some(sorted({known.peak for known in space}), 12):
            fits = [k for k in space if k.host <= ram_bytes]
            least = min((k.seconds for k in fits if k.peak <= vram_bytes), default=inf)
            sure = min((k.seconds for k in fits if k.assumed <= vram_bytes), default=inf)
            try:
                plan = planned_on_gpu(network, SMALL, ram_bytes, vram_bytes, table=fakes, columns=columns)
            except NoPlanError:
                assert sure == inf, f"nothing at {ram_bytes} bytes and {vram_bytes} on the GPU"
            else:
                assert plan.memory.excess(Limits(ram_bytes, 2, vram_bytes)) == (0, 0)
                assert least * (1 - 1e-12) <= plan.seconds <= sure * (1 + 1e-12), (ram_bytes, vram_bytes)
                check_runs(plan, network, WITH_GPU, ram_bytes=ram_bytes, vram_bytes=vram_bytes, table=fakes)
                missed += plan.seconds > least * (1 + 1e-12) and sure < inf
                planned_at += 1
    assert planned_at > 20
    assert missed <= 0.05 * planned_at, f"{missed} of {planned_at} plans are not the best"


def test_memory_of_process_and_gpu_is_promised_separately(plan: RunPlan) -> None:
    memory = plan.main.memory
    raw, out = (int(size[0]) * size[1] * size[2] for size in (plan.main.patch_in, plan.patch_out))
    steps = plan.main.columns
    assert (memory.device, memory.baseline, memory.context) == ("gpu", BASELINE, CONTEXT)
    assert memory.staging == staging_bytes(raw, 4 * 2 * out, reads=steps, writes=steps)
    assert memory.reading == reading_bytes(1, plan.main.patch_in, 1, steps=steps, device="gpu")
    assert memory.writing == writing_bytes(2, plan.patch_out, 4, steps=steps, device="gpu")
    assert memory.peak == BASELINE + memory.reading + memory.writing
    assert memory.vram == CONTEXT + memory.staging + memory.last.total
    assert memory.device_bytes == memory.vram
    assert memory.excess(Limits(memory.peak - 3, 1, memory.vram - 7)) == (3, 7)
    on_host = replace(memory, stages=(replace(memory.last, device="cpu"),))
    assert (on_host.vram, on_host.device_bytes) == (0, on_host.peak)
    assert on_host.peak == memory.peak + memory.last.total


@pytest.mark.slow
def test_streamed_weights_count_in_the_memory_of_the_process() -> None:
    """They are promised beside inputs and outputs, and never exceed the limit of the process."""
    streams = Fake("gpu.conv.streams", "conv", flops=20.0, host=2048, scratch=(0.2,))
    table = (streams, *on_gpu(SLOW, POOL, FILTER, MAXOUT))

    def memory_within(ram_bytes: int) -> Memory:
        plan = planned_on_gpu(MIXED, (20, 11, 8), ram_bytes, PLENTY, table=table, columns=False)
        check_runs(plan, MIXED, WITH_GPU, ram_bytes=ram_bytes, vram_bytes=PLENTY, table=table)
        memory = plan.main.memory
        weights = [
            c.shape.fin * c.shape.fout * prod(c.shape.k)
            for c in plan.choices
            if isinstance(c.shape, ConvShape) and c.primitive == streams.name
        ]
        assert memory.pinned == 2048 * sum(weights)
        assert memory.peak == BASELINE + memory.reading + memory.writing + memory.pinned
        return memory

    most = memory_within(PLENTY)
    assert most.pinned > 0
    less = memory_within(most.peak - 50_000)  # more than patches of another size make up for
    assert less.peak < most.peak
    assert 0 < less.pinned < most.pinned, "one layer's room is missing, not all layers'"


def test_gpu_run_has_three_host_buffers_and_two_device_buffers() -> None:
    """There are no more buffers than steps."""
    assert reading_bytes(2, (3, 4, 5), 2, device="gpu") == 3 * 2 * 60 * 2 + 16 * MIB
    assert reading_bytes(2, (3, 4, 5), 2, steps=2, seen=(3, 4, 5), device="gpu") == 2 * 240 + 2 * 120 + 16 * MIB
    assert writing_bytes(3, (3, 4, 5), 4, device="gpu") == 3 * 3 * 60 * 4 + 6 * MIB
    assert staging_bytes(240, 720) == 2 * 256 + 2 * 768
    assert staging_bytes(240, 720, reads=9, writes=1) == 2 * 256 + 768
    assert context_bytes(0) == 256 * MIB
    assert context_bytes(3 * MIB) == 288 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("precision", GPU_PRECISIONS)
def test_plan_uses_one_device_and_one_precision(precision: Precision) -> None:
    """A table of both devices gives plans of one; plans for a CPU are in fp32."""
    there = planned_on_gpu(MIXED, (20, 11, 8), PLENTY, PLENTY, table=EVERY, precision=precision)
    assert (there.device, there.precision) == ("gpu", precision)
    assert {choice.device for choice in there.choices} == {"gpu"}
    assert all(choice.primitive.startswith("gpu.") for choice in there.choices)
    assert {choice.shape.precision for choice in there.choices} == {precision}
    here = planned(MIXED, (20, 11, 8), PLENTY, table=EVERY, precision=precision)
    assert (here.device, here.precision) == ("cpu", "fp32")
    assert {choice.primitive.partition(".")[0] for choice in here.choices} == {"cpu"}
    assert (here.main.memory.context, here.main.memory.staging, here.memory.vram) == (0, 0, 0)


def test_activations_in_float16_take_half_the_bytes(plan: RunPlan) -> None:
    same = {"table": EVERY, "patch": plan.patch_out, "columns": False, "only": ["gpu.conv.slow"]}
    sizes = {}
    for precision in GPU_PRECISIONS:
        made = planned_on_gpu(MIXED, (20, 11, 8), PLENTY, PLENTY, precision=precision, **same)
        sizes[precision] = {t.name: t.nbytes for t in made.main.stages[0].tensors}
    assert sizes["fp32"] == sizes["tf32"] == {name: 2 * nbytes for name, nbytes in sizes["fp16"].items()}


def test_written_plan_is_read_back(plan: RunPlan) -> None:
    read = RunPlan.from_json(plan.to_json())
    assert read == plan
    assert (read.device, read.precision, read.limits.vram_bytes) == ("gpu", "fp16", CONTEXT + 2**20)
    check_runs(read, MIXED, WITH_GPU, ram_bytes=plan.memory.peak, vram_bytes=plan.memory.vram, table=EVERY)


def test_missing_or_small_gpu_is_refused(plan: RunPlan) -> None:
    with pytest.raises(
        PlanFileError, match=r"run on a GPU, and there is none here; .* `znnpy plan NETWORK --device cpu`"
    ):
        check_runs(plan, MIXED, MACHINE, table=EVERY)
    vram = plan.memory.vram
    small = replace(MACHINE, gpu=replace(GPU, memory_bytes=vram - 10))
    with pytest.raises(PlanFileError, match=rf"needs {vram:,} bytes of VRAM, 10 more than the GPU has .*--vram \d+M`"):
        check_runs(plan, MIXED, small, table=EVERY)
    with pytest.raises(PlanFileError, match="bytes of VRAM, 70 more than the limit allows"):
        check_runs(plan, MIXED, WITH_GPU, vram_bytes=vram - 70, table=EVERY)
    with pytest.raises(PlanFileError, match="bytes of RAM, 70 more than the limit allows"):
        check_runs(plan, MIXED, WITH_GPU, ram_bytes=plan.memory.peak - 70, table=EVERY)


def test_hand_edited_device_is_refused(plan: RunPlan) -> None:
    edits: list[tuple[tuple[str | int, ...], Any, str]] = [
        ((*CHOICES_AT, 0, "device"), "cpu", r"layer 0 of the plan runs gpu.conv.\w+ on the CPU, and all .* the GPU"),
        ((*CHOICES_AT, 0, "primitive"), "cpu.conv.fast", "layer 0 of the plan runs cpu.conv.fast on the GPU, and all"),
        ((*CHOICES_AT, 0, "device"), "tpu", "damaged: .*stages.0.choices.0.device"),
        ((*CHOICES_AT, 3, "shape", "precision"), "tf32", "entry 3 of the plan is layer 3"),
        ((*CHOICES_AT, 3, "shape", "precision"), "int4", "damaged: .*stages.0.choices.3.shape"),
        (("memory", "stages", 0, "device"), "tpu", "damaged: .*memory.stages.0.device"),
        (("memory", "stages", 0, "device"), "cpu", "memory is promised for stages on"),
        (("stages", 0, "device"), "cpu", "memory is promised for stages on"),
        (("memory", "reading"), ..., "damaged: .*memory.reading: .*required"),
        (("memory", "context"), -1, "damaged: .*memory.context"),
        (("limits", "vram_bytes"), None, "damaged: .*no limit for the memory there"),
        (("limits", "vram_bytes"), 0, "damaged: .*limits: .*0 bytes of a GPU are no limit"),
        (("rigor",), "guess", "damaged: rigor"),
        ((*TENSORS_AT, 0, "offset"), 64, "not aligned to 256"),
    ]  # fmt: skip
    for path, to, said in edits:
        with pytest.raises(PlanFileError, match=said):
            check_runs(RunPlan.from_json(edited(plan, *path, to=to)), MIXED, WITH_GPU, table=EVERY)


@pytest.mark.slow
def test_nearest_miss_on_the_gpu_names_the_sufficient_limit(tiny_network: MakeNetwork) -> None:
    """The limit that the message asks for is enough, and a byte less is not."""
    network = tiny_network()
    output = (30, 21, 17)
    with pytest.raises(NoPlanError) as caught:
        planned_on_gpu(network, output, PLENTY, CONTEXT, table=ON_GPU)
    said = str(caught.value)
    found = re.fullmatch(
        rf"nothing fits in {mebibytes(CONTEXT)} of VRAM: the smallest need is [\d.,]+ MiB, [\d.,]+ MiB more, with .*; "
        rf"the process itself takes 0.1 MiB of RAM, CUDA {mebibytes(CONTEXT)} of VRAM, patches on their way "
        r"[\d.]+ MiB, and layer \d .* the most of what is left, [\d.]+ MiB with gpu.conv.\w+; "
        r"allow at least vram='257M'",
        said,
    )
    assert found is not None, said
    assert caught.value.needs is not None
    _, least = caught.value.needs
    assert f"the smallest need is {mebibytes(least)}, {mebibytes(least - CONTEXT)} more" in said
    assert planned_on_gpu(network, output, PLENTY, least, table=ON_GPU).memory.vram == least
    with pytest.raises(NoPlanError):
        planned_on_gpu(network, output, PLENTY, least - 1, table=ON_GPU)


@pytest.mark.slow
def test_nearest_miss_names_the_memory_of_process_or_both(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    with pytest.raises(NoPlanError) as caught:
        planned_on_gpu(network, (30, 21, 17), AROUND, PLENTY, table=ON_GPU)
    assert caught.value.needs is not None
    least, _ = caught.value.needs
    assert str(caught.value).startswith(f"nothing fits in {mebibytes(AROUND)} of RAM: the smallest need is ")
    assert str(caught.value).endswith("allow at least ram='23M'")
    assert planned_on_gpu(network, (30, 21, 17), least, PLENTY, table=ON_GPU).memory.peak == least
    with pytest.raises(NoPlanError):
        planned_on_gpu(network, (30, 21, 17), least - 1, PLENTY, table=ON_GPU)
    with pytest.raises(NoPlanError, match=r"allow at least ram='23M' and vram='257M', or drop `cover`$") as caught:
        planned_on_gpu(network, (30, 21, 17), AROUND, CONTEXT, table=ON_GPU, columns=True)
    both = (
        r"nothing fits in [\d.]+ MiB of RAM and in [\d.]+ MiB of VRAM: the smallest need is [\d.]+ MiB of RAM, [\d.]+ "
    )
    assert re.match(both + r"MiB more and [\d.]+ MiB of VRAM, [\d.]+ MiB more, with ", str(caught.value))


@pytest.mark.slow
def test_missing_gpu_limit_or_primitive_is_refused() -> None:
    words = {"table": EVERY, "rates": CARRYING, "baseline": 0, "device": "gpu"}

    def make(machine: object, limits: Limits, **more: object) -> RunPlan:
        settings = {**words, **more}
        return make_plan(MIXED, (20, 11, 8), machine, limits, **settings)  # type: ignore[arg-type]

    with pytest.raises(
        NoPlanError, match="are to run on a GPU, and there is none; drop `device`, or choose device='cpu'"
    ):
        make(MACHINE, Limits(PLENTY, 2, PLENTY))
    with pytest.raises(NoPlanError, match="needs memory there, and has no limit for it; give `vram`"):
        make(WITH_GPU, Limits(PLENTY, 2))
    with pytest.raises(
        NoPlanError, match=r"cpu.conv.slow does not run on the GPU; drop only='cpu.conv.slow', or choose"
    ):
        make(WITH_GPU, Limits(PLENTY, 2, PLENTY), only="cpu.conv.slow")
    with pytest.raises(NoPlanError, match=r"gpu.conv.slow does not run on the CPU"):
        make(WITH_GPU, Limits(PLENTY, 2, PLENTY), only="gpu.conv.slow", device="cpu")
    with pytest.raises(NoPlanError, match=r"no primitive runs layer 0 \(conv .* here: there is none for a conv"):
        make(WITH_GPU, Limits(PLENTY, 2, PLENTY), table=FAKES)
    with pytest.raises(ShapeError):
        make(WITH_GPU, Limits(PLENTY, 2, PLENTY), patch=(5, 4, 4))


@pytest.mark.slow
def test_faster_plan_beyond_the_vram_limit_names_its_bytes(tiny_network: MakeNetwork) -> None:
    """The bytes are of the memory that is too small."""
    output, room = (30, 21, 17), CONTEXT + 200_000
    plan = planned_on_gpu(tiny_network(), output, PLENTY, room, table=on_gpu(*FAKES), columns=False)
    over = plan.runners_up[0]
    assert over.over_bytes == 0 < over.over_vram_bytes
    assert over.voxels_per_second > plan.voxels_per_second
    allowed = planned_on_gpu(
        tiny_network(), output, PLENTY, room + over.over_vram_bytes, table=on_gpu(*FAKES), columns=False
    )
    assert allowed.voxels_per_second >= over.voxels_per_second


@pytest.mark.slow
def test_large_volumes_are_planned_quickly() -> None:
    """600 voxels and more along each axis, within nearly all memory of a large card."""
    network = read_network("n926").network
    table = on_gpu(FAST, replace(OVER, reads_carried=True), BOTH, POOL)
    for side, vram in ((600, 140 * 2**30), (2048, 130 * 2**30), (600, 20 * 2**30)):
        start = time.process_time()
        plan = planned_on_gpu(network, (side,) * 3, 2**38, vram, table=table, precision="tf32")
        assert time.process_time() - start < 9
        assert plan.memory.excess(plan.limits) == (0, 0)
        check_runs(plan, network, WITH_GPU, table=table)


def test_fused_pooling_keeps_its_precision() -> None:
    """Two layers in one keep their precision."""
    network = Network("in one", 1, (Conv((2, 1, 1), 2, "relu"), Pool((2, 1, 1)), Conv((1, 1, 1), 2)))
    made = planned_on_gpu(network, (8, 6, 5), PLENTY, PLENTY, table=EVERY, only=["gpu.conv.both"], precision="fp16")
    assert [choice.layers for choice in made.choices] == [(0, 1), (2, 2)]
    assert made.choices[0].shape.precision == "fp16"
    check_runs(made, network, WITH_GPU, table=EVERY)
