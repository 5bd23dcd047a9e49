"""Sessions of plans whose first layers live with the host, on an emulated GPU: values, memory, what cannot run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.emulator import EmulatedDevice, needs_compiler
from tests.support.fake_pipeline import run_session
from tests.support.flat_requests import make_plan
from tests.support.odd_networks import NETWORKS, ODDER, Poisoned, assert_dense, definition, small, some_volume, trained
from tests.support.offloaded_plans import EVERY, WITH_GPU, WITH_HOST, backs, fronts, offloaded_plan
from tests.support.offloaded_sessions import SMALL, a_plan, emulated_device, no_feeder_is_left, session_for
from tests.support.reference_primitives import STAND_INS
from tests.support.tiers import one_in
from znnpy.errors import PlanFileError, ValuesOverflowError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import Variant
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import Limits
from znnpy.network import Conv, Network, Pool
from znnpy.option_values import OffloadMode
from znnpy.planner.plan import Plan, Stage
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_plan
from znnpy.run import cpu_backend
from znnpy.run.session import Session
from znnpy.shapes import turned, turned_back
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = needs_compiler
ON_CPU = tuple(primitive for primitive in TABLE if primitive.name.startswith("cpu."))
LAYERS = [network for network in (*NETWORKS, *ODDER) if len(network.layers) > 1]
CUTS = [(network, theta) for network in LAYERS for theta in range(1, len(network.layers))]


def ids(value: object) -> str:
    return value.name if isinstance(value, Network) else str(value)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    with emulated_device(monkeypatch) as device:
        yield device


def ran(plan: Plan, net: TrainedNetwork, volume: npt.NDArray[Any], device: EmulatedDevice) -> npt.NDArray[Any]:
    """Return what a plan gives through the pipeline; every voxel is written once."""
    network = net.network
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=False)
    assert source.output == plan.output
    output = Poisoned.of((network.output_channels, *plan.output), np.float32)
    with session_for(plan, net, device) as session:
        run_session(session, session.pool, source, output, plan.cover(network))
        steps = plan.cover(network).steps
        ahead = [network.margins[choice.layers[1] + 1][plan.axis] for choice in plan.choices]
        for choice, more, parts, values in zip(plan.choices, ahead, plan.sub_batches, session.written, strict=True):
            assert values == parts * steps(more) * np.prod(choice.shape.out_shape[:4])
    assert (output.times == 1).all()
    assert no_feeder_is_left()
    return output.array


def fragments_at(network: Network, theta: int) -> int:
    """Images that are handed over."""
    return int(np.prod([layer.window for layer in network.layers[:theta] if isinstance(layer, Pool)], dtype=int))


def parts_of(network: Network, theta: int, seed: int) -> dict[str, Any]:
    """Return a number of images at a time that divides all, half of the time parts of parts."""
    rng = random.Random(seed)
    count = fragments_at(network, theta)
    images = rng.choice([n for n in range(1, count + 1) if count % n == 0])
    return {"images": images, "later": rng.choice([0, 1])}


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [True, False], ids=["side by side", "in turn"])
@pytest.mark.parametrize(("network", "theta"), one_in(2, CUTS), ids=ids)
def test_patches_equal_the_definition(device: EmulatedDevice, network: Network, theta: int, overlaps: bool) -> None:
    net, volume = trained(network), some_volume(network, seed=71)
    period, output = network.period, network.dense_size(volume.shape[1:])
    patch = (period[0], 2 * period[1], network.round_up(output)[2])
    words: dict[str, Any] = {"with_host": None if overlaps else WITH_HOST, "front": fronts(theta), "back": backs(theta)}
    plan = offloaded_plan(
        network, output, patch, theta, overlaps=overlaps, **words, **parts_of(network, theta, seed=theta)
    )
    assert plan.columns > 1
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [True, False], ids=["side by side", "in turn"])
@pytest.mark.parametrize(("network", "theta"), one_in(2, CUTS), ids=ids)
def test_columns_equal_the_definition(device: EmulatedDevice, network: Network, theta: int, overlaps: bool) -> None:
    """Columns of two steps run along each axis; both stages keep planes."""
    axis = (theta + len(network.layers)) % 3
    net, volume = trained(network), some_volume(network, seed=72)
    thick, *across = turned(network.period, axis)
    output = network.dense_size(volume.shape[1:])
    patch = turned_back((thick, 2 * across[0], 3 * across[1]), axis)
    words: dict[str, Any] = {"with_host": None if overlaps else WITH_HOST, "back": backs(theta)}
    plan = offloaded_plan(
        network, output, patch, theta, axis=axis, column=2 * thick, overlaps=overlaps,
        **words, **parts_of(network, theta, seed=theta),
    )  # fmt: skip
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.slow
@pytest.mark.parametrize("column", [0, 4])
def test_layers_of_host_memory_on_the_gpu_equal_the_definition(device: EmulatedDevice, column: int) -> None:
    """gpu.conv.host_ram runs in parts that leave one over, with sums."""
    layers = Conv((2, 3, 2), 5, "relu"), Pool((2, 2, 1)), Conv((2, 2, 2), 4, "tanh"), Conv((1, 2, 2), 2)
    network = small("two", 2, *layers)
    net, volume = trained(network), some_volume(network, seed=73, more=(5, 4, 3))
    variant = Variant.of(
        images=1, planes=2, maps_in=2, maps_out=3, order="outputs", inner="gpu.conv.direct", inner_kernel="shared"
    )
    plan = offloaded_plan(
        network, network.dense_size(volume.shape[1:]), (4, 2, 4), 3, column=column, overlaps=False, images=2,
        with_host=IN_HOST_RAM[0], variant=variant,
    )  # fmt: skip
    assert [choice.device for choice in plan.choices] == ["gpu", "cpu", "gpu", "gpu"]
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.slow
def test_single_voxel_of_output_equals_the_definition(device: EmulatedDevice) -> None:
    network = small("one", 1, Conv((3, 2, 1), 4, "relu"), Conv((2, 1, 3), 3, "tanh"), Conv((1, 1, 1), 1))
    net, volume = trained(network), some_volume(network, seed=74, more=(0, 0, 0))
    for theta in (1, 2):
        plan = offloaded_plan(network, (1, 1, 1), (1, 1, 1), theta)
        assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.slow
def test_session_holds_the_planned_bytes(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on the GPU, in page-locked memory, and in the host's arena."""
    network = NETWORKS[3]
    net, volume = trained(network), some_volume(network, seed=75)
    taken: list[int] = []
    pinned, aligned = device.pinned, aligned_bytes

    def noted(shape: Any, dtype: Any) -> Any:
        array = pinned(shape, dtype)
        taken.append(array.nbytes)
        return array

    def held(nbytes: int) -> Any:
        blocks.append(nbytes)
        return aligned(nbytes)

    monkeypatch.setattr(device, "pinned", noted)
    for column, overlaps in ((0, True), (4, True), (4, False)):
        output = network.dense_size(volume.shape[1:])
        plan = offloaded_plan(network, output, (4, 6, 2), 2, column=column, overlaps=overlaps)
        blocks: list[int] = []
        taken.clear()
        with pytest.MonkeyPatch.context() as patch, ThreadPool(plan.compute_threads) as pool:
            patch.setattr(cpu_backend, "aligned_bytes", held)
            with Session(plan, network, net.weights, pool, EVERY, device=device):  # type: ignore[arg-type]
                memory = plan.memory
                words = 4 * (2 + sum(choice.shape.kind == "conv" for choice in plan.choices[plan.offloaded :]))
                staging = 2 * (plan.handover_bytes // plan.sub_batches[plan.offloaded])
                staging += 2 * 4 * network.output_channels * int(np.prod(plan.patch_out))
                assert staging <= memory.staging
                assert device.allocated == memory.last.arena + memory.last.carries + staging + 2 * words
                assert sum(taken) == memory.handover + 2 * words
                assert sum(blocks) == memory.stages[0].arena + memory.stages[0].carries


def hot(theta: int, layer: int) -> TrainedNetwork:
    """Return a network of which layer `layer` makes large numbers."""
    network = small("hot", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 2)), Conv((2, 2, 2), 2), Conv((1, 1, 1), 2))
    net = trained(network)
    where = network.weighted.index(layer)
    net.weights[where].weight[:] = 3e38
    net.weights[where].bias[:] = 0
    return net


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(("theta", "layer"), [(1, 0), (2, 2), (3, 2), (2, 3)])
def test_overflow_names_its_layer_and_step(device: EmulatedDevice, theta: int, layer: int, overlaps: bool) -> None:
    net = hot(theta, layer)
    network = net.network
    volume = some_volume(network, seed=76, more=(15, 8, 8))
    output = network.dense_size(volume.shape[1:])
    with_host = None if overlaps else WITH_HOST
    plan = offloaded_plan(network, output, (2, 8, 8), theta, column=4, overlaps=overlaps, with_host=with_host)
    step = r"^output voxels \(z, y, x\) = \(\d+, 0, 0\) to \(\d+, 8, 8\), step \d of column 0: "
    with pytest.raises(ValuesOverflowError, match=step + rf"layer {layer} \(conv"):
        ran(plan, net, volume, device)
    assert no_feeder_is_left()


@pytest.mark.slow
def test_early_uploads_overwrite_no_waiting_part(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes up as soon as it may: parts that wait in a slot are not written over."""
    copy_async = device.copy_async

    def copying(target: Any, source: Any, stream: Any) -> None:
        copy_async(target, source, stream)
        if stream is device.uploads:
            device.synchronize(stream)

    monkeypatch.setattr(device, "copy_async", copying)
    for column in (0, 4):
        plan, net, volume = a_plan(column=column, images=1)
        assert plan.sub_batches[-1] == 4
        assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "patches"])
def test_plan_of_the_search_runs(device: EmulatedDevice, mode: OffloadMode, columns: bool) -> None:
    """A plan that the search made, of primitives that run."""
    net, volume = trained(SMALL), some_volume(SMALL, seed=79, more=(9, 7, 5))
    output = SMALL.dense_size(volume.shape[1:])
    limits, only = Limits(2**32, 2, 2**30), ("gpu.conv.host_ram",) if mode == "gpu-host" else ()
    plan = make_plan(
        SMALL, output, WITH_GPU, limits, mode=mode, columns=columns, patch=(4, 4, 5), baseline=0, context=0,
        table=(*ON_CPU, *STAND_INS), only=only,
    )  # fmt: skip
    check_plan(plan.main, SMALL, WITH_GPU, EVERY)
    assert [choice.device for choice in plan.choices[: plan.main.offloaded]].count("gpu") == (mode == "gpu-host")
    assert_dense(ran(plan.main, net, volume, device), definition(net, volume))


def cut_at(plan: Plan, count: int) -> tuple[Stage, ...]:
    """Return the same choices and tensors, with so many choices in the first stage."""
    one, other = plan.stages
    return replace(one, choices=plan.choices[:count]), replace(other, choices=plan.choices[count:])


@pytest.mark.slow
def test_unsupported_plans_are_refused() -> None:
    plan, _, _ = a_plan(front=replace(fronts(), in_one=False))
    one, other = plan.stages
    last = replace(plan.memory, stages=plan.memory.stages[1:])
    edits: list[tuple[dict[str, Any], str]] = [
        ({"stages": (other,)}, "memory is promised for stages on"),
        ({"stages": (other, one)}, "memory is promised for stages on"),
        ({"stages": (other,), "memory": last}, "1 stages are in the memory of GPU"),
        ({"overlap": False, "stages": cut_at(plan, 3)}, "take all images at a time"),
    ]
    for words, said in edits:
        with pytest.raises(ValueError, match=said):
            replace(plan, **words)
    with pytest.raises(ValueError, match="cannot be at the step before"):
        a_plan(with_host=WITH_HOST, overlaps=True)
    run = RunPlan.of(SMALL, WITH_GPU, plan)
    assert RunPlan.from_json(run.to_json()) == run
    with pytest.raises(ValueError, match="2 devices run a plan of mode cpu-to-gpu, which runs on one"):
        run.on_devices(2)
    memory = plan.memory.stages
    arena = replace(plan.memory, stages=(replace(memory[0], arena=memory[0].arena + 256), memory[1]))
    edits = [
        (
            {"stages": (replace(one, tensors=one.tensors[:-1]), other)},
            "arena of the stage in the memory of the host lacks",
        ),
        ({"memory": replace(plan.memory, handover=plan.memory.handover - 4)}, "for what is handed over"),
        ({"memory": arena}, "end at byte"),
        (
            {"stages": cut_at(plan, 1)},
            "layer 1 of the plan runs cpu.*on the CPU, and all layers of the plan run on the GPU",
        ),
    ]
    for words, said in edits:
        with pytest.raises(PlanFileError, match=said):
            check_plan(replace(plan, **words), SMALL, WITH_GPU, EVERY)
