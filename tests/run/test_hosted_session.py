"""Sessions of plans whose first layers live with the host, on an emulated GPU: values, order, failures, the stop."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from emulated import EmulatedDevice, compiler
from hosted_plans import EVERY, WITH_GPU, WITH_HOST, backs, fronts, hosted_plan
from odd import NETWORKS, ODDER, Poisoned, _nan_bytes, assert_dense, definition, small, some_volume, trained
from stand_ins import STAND_INS

from znnpy.errors import DeviceError, PlanFileError, Stopped, ValuesOverflowError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import Variant
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.machine import Limits
from znnpy.network import Conv, Network, Pool
from znnpy.planner.hosted import HostedMode
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import gpu, host, lane, pipeline
from znnpy.run.hosted import HostedSession
from znnpy.shapes import turned, turned_back
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")

ON_CPU = tuple(primitive for primitive in TABLE if primitive.name.startswith("cpu."))
LAYERS = [network for network in (*NETWORKS, *ODDER) if len(network.layers) > 1]
CUTS = [(network, theta) for network in LAYERS for theta in range(1, len(network.layers))]


def ids(value: object) -> str:
    return value.name if isinstance(value, Network) else str(value)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """All its memory is given back when a test is over."""
    monkeypatch.setattr(gpu, "LOOK_SECONDS", 0)
    monkeypatch.setattr(lane, "LOOK_SECONDS", 0)
    with EmulatedDevice() as device:
        yield device
        assert device.allocated == 0


@contextmanager
def session_for(plan: Plan, net: TrainedNetwork, device: EmulatedDevice) -> Iterator[HostedSession]:
    """Of arenas that hold NaN."""
    with pytest.MonkeyPatch.context() as patch, Crew(plan.crew) as crew:
        patch.setattr(host, "aligned_bytes", _nan_bytes)
        with HostedSession(plan, net.network, net.weights, crew, EVERY, device=device) as session:  # type: ignore[arg-type]
            yield session


def ran(plan: Plan, net: TrainedNetwork, volume: npt.NDArray[Any], device: EmulatedDevice) -> npt.NDArray[Any]:
    """What a plan gives, through the pipeline; every voxel is written once."""
    network = net.network
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=False)
    assert source.output == plan.output
    output = Poisoned.of((network.output_channels, *plan.output), np.float32)
    with session_for(plan, net, device) as session:
        pipeline.run(session, session.crew, source, output, plan.cover(network))
        steps = plan.cover(network).steps
        ahead = [network.margins[choice.layers[1] + 1][plan.axis] for choice in plan.choices]
        for choice, more, parts, values in zip(plan.choices, ahead, plan.parts, session.written, strict=True):
            assert values == parts * steps(more) * np.prod(choice.shape.out_shape[:4])
    assert (output.times == 1).all()
    assert no_feeder_is_left()
    return output.array


def no_feeder_is_left() -> bool:
    return not any(thread.name == "znnpy-feeder" for thread in threading.enumerate())


def fragments_at(network: Network, theta: int) -> int:
    """Images that are handed over."""
    return int(np.prod([layer.window for layer in network.layers[:theta] if isinstance(layer, Pool)], dtype=int))


def parts_of(network: Network, theta: int, seed: int) -> dict[str, Any]:
    """Some number of images at a time that divides all there are; half of the time parts of parts."""
    rng = random.Random(seed)
    count = fragments_at(network, theta)
    images = rng.choice([n for n in range(1, count + 1) if count % n == 0])
    return {"images": images, "later": rng.choice([0, 1])}


@pytest.mark.parametrize("overlaps", [True, False], ids=["side by side", "in turn"])
@pytest.mark.parametrize(("network", "theta"), CUTS, ids=ids)
def test_patches_equal_the_definition(device: EmulatedDevice, network: Network, theta: int, overlaps: bool) -> None:
    net, volume = trained(network), some_volume(network, seed=71)
    period, output = network.period, network.dense_size(volume.shape[1:])
    patch = (period[0], 2 * period[1], network.round_up(output)[2])
    words: dict[str, Any] = {"with_host": None if overlaps else WITH_HOST, "front": fronts(theta), "back": backs(theta)}
    plan = hosted_plan(
        network, output, patch, theta, overlaps=overlaps, **words, **parts_of(network, theta, seed=theta)
    )
    assert plan.columns > 1
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.parametrize("overlaps", [True, False], ids=["side by side", "in turn"])
@pytest.mark.parametrize(("network", "theta"), CUTS, ids=ids)
def test_columns_equal_the_definition(device: EmulatedDevice, network: Network, theta: int, overlaps: bool) -> None:
    """Along an axis each, in columns of two steps: both sides keep planes."""
    axis = (theta + len(network.layers)) % 3
    net, volume = trained(network), some_volume(network, seed=72)
    thick, *across = turned(network.period, axis)
    output = network.dense_size(volume.shape[1:])
    patch = turned_back((thick, 2 * across[0], 3 * across[1]), axis)
    words: dict[str, Any] = {"with_host": None if overlaps else WITH_HOST, "back": backs(theta)}
    plan = hosted_plan(
        network, output, patch, theta, axis=axis, column=2 * thick, overlaps=overlaps,
        **words, **parts_of(network, theta, seed=theta),
    )  # fmt: skip
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.parametrize("column", [0, 4])
def test_layers_of_the_host_that_a_gpu_computes(device: EmulatedDevice, column: int) -> None:
    """gpu.conv.host_ram itself, in parts that leave one over, with sums."""
    layers = Conv((2, 3, 2), 5, "relu"), Pool((2, 2, 1)), Conv((2, 2, 2), 4, "tanh"), Conv((1, 2, 2), 2)
    network = small("two", 2, *layers)
    net, volume = trained(network), some_volume(network, seed=73, more=(5, 4, 3))
    variant = Variant.of(
        images=1, planes=2, maps_in=2, maps_out=3, order="outputs", inner="gpu.conv.direct", inner_kernel="shared"
    )
    plan = hosted_plan(
        network, network.dense_size(volume.shape[1:]), (4, 2, 4), 3, column=column, overlaps=False, images=2,
        with_host=IN_HOST_RAM[0], variant=variant,
    )  # fmt: skip
    assert [choice.device for choice in plan.choices] == ["gpu", "cpu", "gpu", "gpu"]
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


def test_one_voxel_of_output(device: EmulatedDevice) -> None:
    network = small("one", 1, Conv((3, 2, 1), 4, "relu"), Conv((2, 1, 3), 3, "tanh"), Conv((1, 1, 1), 1))
    net, volume = trained(network), some_volume(network, seed=74, more=(0, 0, 0))
    for theta in (1, 2):
        plan = hosted_plan(network, (1, 1, 1), (1, 1, 1), theta)
        assert_dense(ran(plan, net, volume, device), definition(net, volume))


def test_a_session_holds_what_its_plan_says(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU, in page-locked memory, and in the host's arena."""
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
        plan = hosted_plan(network, output, (4, 6, 2), 2, column=column, overlaps=overlaps)
        blocks: list[int] = []
        taken.clear()
        with pytest.MonkeyPatch.context() as patch, Crew(plan.crew) as crew:
            patch.setattr(host, "aligned_bytes", held)
            with HostedSession(plan, network, net.weights, crew, EVERY, device=device):  # type: ignore[arg-type]
                memory = plan.memory
                words = 4 * (2 + sum(choice.shape.kind == "conv" for choice in plan.choices[plan.hosted :]))
                staging = 2 * (plan.handover_bytes // plan.parts[plan.hosted])
                staging += 2 * 4 * network.output_channels * int(np.prod(plan.patch_out))
                assert staging <= memory.staging
                assert device.allocated == memory.arena + memory.carries + staging + 2 * words
                assert sum(taken) == memory.handover + 2 * words
                assert sum(blocks) == memory.host_arena + memory.host_carries


def hot(theta: int, layer: int) -> TrainedNetwork:
    """A network of which layer `layer` makes large numbers."""
    network = small("hot", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 2)), Conv((2, 2, 2), 2), Conv((1, 1, 1), 2))
    net = trained(network)
    where = network.convolutions.index(layer)
    net.weights[where].weight[:] = 3e38
    net.weights[where].bias[:] = 0
    return net


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(("theta", "layer"), [(1, 0), (2, 2), (3, 2), (2, 3)])
def test_an_overflow_names_its_layer_and_step(device: EmulatedDevice, theta: int, layer: int, overlaps: bool) -> None:
    net = hot(theta, layer)
    network = net.network
    volume = some_volume(network, seed=76, more=(15, 8, 8))
    output = network.dense_size(volume.shape[1:])
    with_host = None if overlaps else WITH_HOST
    plan = hosted_plan(network, output, (2, 8, 8), theta, column=4, overlaps=overlaps, with_host=with_host)
    step = r"^output voxels \(z, y, x\) = \(\d+, 0, 0\) to \(\d+, 8, 8\), step \d of column 0: "
    with pytest.raises(ValuesOverflowError, match=step + rf"layer {layer} \(conv"):
        ran(plan, net, volume, device)
    assert no_feeder_is_left()


class Fault(Exception):
    """What no stage raises itself."""


def stages(session: HostedSession, hook: Any) -> None:
    """`hook` is called before the front, the back and the wait of every step, with their numbers."""
    counts = dict.fromkeys(("front", "back", "wait"), 0)

    def before(stage: str, work: Any) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            hook(stage, counts[stage])
            counts[stage] += 1
            return work(*args, **words)

        return call

    session._run_front = before("front", session._run_front)  # type: ignore[method-assign]
    session._run_back = before("back", session._run_back)  # type: ignore[method-assign]
    session._shop.wait = before("wait", session._shop.wait)  # type: ignore[method-assign]


SMALL = small("delays", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 1)), Conv((2, 1, 2), 2, "tanh"), Conv((1, 1, 1), 1))


@pytest.mark.parametrize("seed", range(60))
def test_delays_and_failures_anywhere(device: EmulatedDevice, seed: int) -> None:
    """No delay changes a voxel or stops a run; what fails ends it at once, and names the step in which it did."""
    rng = random.Random(seed)
    theta, walks = rng.choice([1, 2, 3]), seed % 2 == 1
    net, volume = trained(SMALL), some_volume(SMALL, seed=77, more=(9, 7, 5))
    output = SMALL.dense_size(volume.shape[1:])
    overlaps = seed % 5 != 0
    plan = hosted_plan(SMALL, output, (2, 4, 3), theta, column=4 if walks else 0, overlaps=overlaps)
    steps = sum(len(column.steps) for column in plan.cover(SMALL))
    slow = {stage: rng.choice([0.0, 0.0, 0.002, 0.005]) for stage in ("front", "back", "wait")}
    where, when = rng.choice(["front", "back", "wait", "nowhere"]), rng.randrange(steps)
    fault: BaseException = rng.choice([Fault("here"), DeviceError("here"), KeyboardInterrupt("here")])

    def hook(stage: str, number: int) -> None:
        time.sleep(rng.random() * slow[stage])
        if (stage, number) == (where, when):
            raise fault

    source = Source(ArrayVolume(volume), roi=None, border="valid", network=SMALL, allow_nan=False)
    written = Poisoned.of((1, *output), np.float32)
    began = time.perf_counter()
    with session_for(plan, net, device) as session:
        stages(session, hook)
        if where == "nowhere":
            pipeline.run(session, session.crew, source, written, plan.cover(SMALL))
            idle = session.idle_seconds
            assert set(idle) == ({"CPU", "GPU"} if overlaps else set())
            assert all(0 <= spent < time.perf_counter() - began for spent in idle.values())
        else:
            with pytest.raises(type(fault)) as caught:
                pipeline.run(session, session.crew, source, written, plan.cover(SMALL))
            if not isinstance(fault, KeyboardInterrupt):
                places = [(c, n) for c, column in enumerate(plan.cover(SMALL)) for n in range(len(column.steps))]
                column, number = places[when]
                told = "; ".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
                assert f"step {number} of column {column}" in told
    assert time.perf_counter() - began < 10
    assert no_feeder_is_left()
    exact = definition(net, volume)
    if where == "nowhere":
        assert_dense(written.array, exact)
    done = written.times == 1
    assert np.abs(written.array - exact)[:, done].max(initial=0) < 1e-4
    assert (written.times <= 1).all()


def test_what_fails_in_the_back_stops_the_front(device: EmulatedDevice) -> None:
    """At its next look at the stop flag, though its step is a later one."""
    plan, net, volume = a_plan()

    def hook(stage: str, number: int) -> None:
        if (stage, number) == ("back", 0):
            raise Fault
        for _ in range(1000 if (stage, number) == ("front", 1) else 0):
            session.crew.check()
            time.sleep(0.01)

    source = Source(ArrayVolume(volume), roi=None, border="valid", network=SMALL, allow_nan=False)
    began = time.perf_counter()
    with session_for(plan, net, device) as session:
        stages(session, hook)
        with pytest.raises(Fault) as caught:
            pipeline.run(session, session.crew, source, Poisoned.of((1, *plan.output), np.float32), plan.cover(SMALL))
    assert time.perf_counter() - began < 5
    assert "step 0 of column 0" in "; ".join(caught.value.__notes__)
    assert no_feeder_is_left()


def steps_of(plan: Plan, volume: Any, network: Network) -> Iterator[tuple[Any, Any, bool]]:
    """Raw patch, array for the output and `begins` of every step."""
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=False)
    for column in plan.cover(network):
        for number, step in enumerate(column.steps):
            raw = np.empty((network.input_channels, *plan.patch_in), source.dtype)
            source.read(step.read, raw)
            out = np.full((network.output_channels, *plan.patch_out), np.nan, np.float32)
            yield raw, out if step.write.voxels else None, number == 0


def a_plan(**words: Any) -> tuple[Plan, TrainedNetwork, Any]:
    net, volume = trained(SMALL), some_volume(SMALL, seed=78, more=(9, 7, 5))
    return hosted_plan(SMALL, SMALL.dense_size(volume.shape[1:]), (2, 4, 3), 2, **words), net, volume


def test_the_next_front_runs_while_the_back_does(device: EmulatedDevice) -> None:
    """Each waits for the other: neither would be done if they took turns."""
    plan, net, volume = a_plan()
    inside, passed = threading.Event(), threading.Event()

    def hook(stage: str, number: int) -> None:
        if (stage, number) == ("back", 0):
            inside.set()
            assert passed.wait(5), "the back waits for the next front"
        if (stage, number) == ("front", 1):
            assert inside.wait(5), "the front waits for the back"
            passed.set()

    every = steps_of(plan, volume, SMALL)
    with session_for(plan, net, device) as session:
        stages(session, hook)
        assert session.under_way == 1
        tickets = []
        for _ in range(2):
            raw, out, begins = next(every)
            tickets.append(session.submit(raw, out, begins=begins))
        with pytest.raises(RuntimeError, match="2 steps are under way"):
            session.submit(raw, out, begins=begins)
        for ticket in tickets:
            session.wait(ticket)
            assert session.done(ticket)


def test_a_back_that_is_done_is_told_while_the_next_is_queued(device: EmulatedDevice) -> None:
    """The device holds up who feeds it; who waits for the step before must not wait for that."""
    plan, net, volume = a_plan()
    gone = threading.Event()

    def hook(stage: str, number: int) -> None:
        if (stage, number) == ("back", 1):
            assert gone.wait(5), "the wait for a step waits for the next"

    every = steps_of(plan, volume, SMALL)
    with session_for(plan, net, device) as session:
        stages(session, hook)
        first, second = (session.submit(raw, out, begins=begins) for raw, out, begins in (next(every), next(every)))
        session.wait(first)
        assert not session.done(second)
        gone.set()
        session.wait(second)


def test_the_stop_is_noticed_while_the_feeder_hangs(device: EmulatedDevice) -> None:
    """In a call that looks at no flag: who waits does not hang with it."""
    plan, net, volume = a_plan()
    gone = threading.Event()

    def hook(stage: str, number: int) -> None:
        if stage == "back":
            assert gone.wait(5)

    raw, out, begins = next(steps_of(plan, volume, SMALL))
    with session_for(plan, net, device) as session:
        stages(session, hook)
        ticket = session.submit(raw, out, begins=begins)
        session.crew.stop()
        began = time.perf_counter()
        with pytest.raises(Stopped):
            session.wait(ticket)
        assert time.perf_counter() - began < 1.0
        gone.set()


def test_uploads_may_be_ahead_of_all_else(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes up as soon as it may: parts that wait in a slot are not written over."""
    copy_async = device.copy_async

    def copying(target: Any, source: Any, stream: Any) -> None:
        copy_async(target, source, stream)
        if stream is device.uploads:
            device.synchronize(stream)

    monkeypatch.setattr(device, "copy_async", copying)
    for column in (0, 4):
        plan, net, volume = a_plan(column=column, images=1)
        assert plan.parts[-1] == 4
        assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "patches"])
def test_what_is_planned_runs(device: EmulatedDevice, mode: HostedMode, columns: bool) -> None:
    """A plan that the search made, of primitives that run."""
    net, volume = trained(SMALL), some_volume(SMALL, seed=79, more=(9, 7, 5))
    output = SMALL.dense_size(volume.shape[1:])
    limits, only = Limits(2**32, 2, 2**30), ("gpu.conv.host_ram",) if mode == "gpu-host" else ()
    plan = make_plan(
        SMALL, output, WITH_GPU, limits, mode=mode, columns=columns, patch=(4, 4, 5), baseline=0, context=0,
        table=(*ON_CPU, *STAND_INS), only=only,
    )  # fmt: skip
    plan.check_runs(SMALL, WITH_GPU, table=EVERY)
    assert [choice.device for choice in plan.choices[: plan.hosted]].count("gpu") == (mode == "gpu-host")
    assert_dense(ran(plan, net, volume, device), definition(net, volume))


@pytest.mark.parametrize("where", ["submit", "wait"])
@pytest.mark.parametrize("how", ["stop", "Ctrl-C"])
def test_the_stop_is_noticed_while_the_device_hangs(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, where: str, how: str
) -> None:
    plan, net, volume = a_plan(overlaps=where == "wait")
    hangs = threading.Event()
    hangs.set()
    awaits = gpu.GpuWorkshop._await

    def never(shop: Any, event: Any, crew: Any = None) -> None:
        while crew is not None and hangs.is_set():
            crew.check()
            time.sleep(0.001)
        awaits(shop, event, crew)

    monkeypatch.setattr(gpu.GpuWorkshop, "_await", never)
    monkeypatch.setattr(gpu, "QUEUED_SECONDS", 0.0)  # every layer is waited for before the next is queued
    raw, out, begins = next(steps_of(plan, volume, SMALL))
    main = threading.main_thread().ident
    assert main is not None
    with session_for(plan, net, device) as session:
        press = session.crew.stop if how == "stop" else lambda: signal.pthread_kill(main, signal.SIGINT)
        timer = threading.Timer(0.2, press)
        timer.start()
        began = time.perf_counter()
        with pytest.raises(Stopped if how == "stop" else KeyboardInterrupt):
            session.wait(session.submit(raw, out, begins=begins))
        assert time.perf_counter() - began < 1.0
        left = time.perf_counter()
        if how == "Ctrl-C":
            session.crew.stop()  # as the pipeline does
    assert time.perf_counter() - left < 1.0
    hangs.clear()
    timer.join()
    assert no_feeder_is_left()


def test_a_lost_device_is_asked_nothing_any_more(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, net, volume = a_plan()

    def refused(*words: Any) -> None:
        raise DeviceError("cudaMemcpyAsync was refused: cudaErrorIllegalAddress")

    raw, out, begins = next(steps_of(plan, volume, SMALL))
    with session_for(plan, net, device) as session:
        with monkeypatch.context() as broken:
            broken.setattr(gpu.GpuWorkshop, "fetch", refused)
            ticket = session.submit(raw, out, begins=begins)
            with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
                session.wait(ticket)
            assert session.done(ticket)
            session.abandon()
            assert no_feeder_is_left()
            assert not device.abandoned, "it still answers"
        with pytest.raises(Stopped):
            session.submit(raw, out, begins=begins)


def test_plans_that_no_session_runs() -> None:
    plan, _, _ = a_plan(front=replace(fronts(), in_one=False))
    edits: list[tuple[dict[str, Any], str]] = [
        ({"hosted": len(plan.choices)}, "choices are hosted"),
        ({"hosted": 0}, "0 of 4 choices are hosted"),
        ({"memory": replace(plan.memory, devices=2)}, "on 2 GPU"),
        ({"overlaps": False, "hosted": 3}, "all images at a time"),
    ]
    for words, said in edits:
        with pytest.raises(ValueError, match=said):
            replace(plan, **words)
    with pytest.raises(ValueError, match="leave it no time"):
        a_plan(with_host=WITH_HOST, overlaps=True)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    edits = [
        ({"host_tensors": plan.host_tensors[:-1]}, "arena in the memory of the host lacks"),
        ({"memory": replace(plan.memory, handover=plan.memory.handover - 4)}, "for what is handed over"),
        ({"memory": replace(plan.memory, host_arena=plan.memory.host_arena + 256)}, "end at byte"),
        ({"hosted": 1}, "layer 1 of the plan runs cpu.*on the CPU, and all layers of the plan run on the GPU"),
    ]
    for words, said in edits:
        with pytest.raises(PlanFileError, match=said):
            replace(plan, **words).check_runs(SMALL, WITH_GPU, table=EVERY)
