"""The two stages of a session wait for each other, fail together, and stop at once."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.emulator import EmulatedDevice, needs_compiler
from tests.support.fake_pipeline import run_session
from tests.support.odd_networks import Poisoned, assert_dense, definition, some_volume, trained
from tests.support.offloaded_plans import offloaded_plan
from tests.support.offloaded_sessions import SMALL, a_plan, emulated_device, no_feeder_is_left, session_for
from znnpy.errors import DeviceError, Stopped
from znnpy.network import Network
from znnpy.planner.plan import Plan
from znnpy.run import gpu_backend, gpu_steps
from znnpy.run.session import Session
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    with emulated_device(monkeypatch) as device:
        yield device


class Fault(Exception):
    """An error that no stage raises itself."""


def stages(session: Session, hook: Any) -> None:
    """Call `hook` before both stages and the wait of every step, with their numbers."""
    counts = dict.fromkeys(("front", "back", "wait"), 0)

    def before(stage: str, work: Any) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            hook(stage, counts[stage])
            counts[stage] += 1
            return work(*args, **words)

        return call

    handover = session._handover
    assert handover is not None
    handover._run_front = before("front", handover._run_front)  # type: ignore[method-assign]
    handover._run_back = before("back", handover._run_back)  # type: ignore[method-assign]
    handover._gpu.wait = before("wait", handover._gpu.wait)  # type: ignore[method-assign]


def steps_of(plan: Plan, volume: Any, network: Network) -> Iterator[tuple[Any, Any, bool]]:
    """Raw patch, array for the output and `begins` of every step."""
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=False)
    for column in plan.cover(network):
        for number, step in enumerate(column.steps):
            raw = np.empty((network.input_channels, *plan.patch_in), source.dtype)
            source.read(step.read, raw)
            out = np.full((network.output_channels, *plan.patch_out), np.nan, np.float32)
            yield raw, out if step.write.voxels else None, number == 0


def test_next_host_stage_overlaps_with_the_gpu_stage(device: EmulatedDevice) -> None:
    """Each waits for the other, so that neither would end if they took turns."""
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
        assert session.max_in_flight == 1
        tickets = []
        for _ in range(2):
            raw, out, begins = next(every)
            tickets.append(session.submit(raw, out, begins=begins))
        with pytest.raises(RuntimeError, match="2 steps are under way"):
            session.submit(raw, out, begins=begins)
        for ticket in tickets:
            session.wait(ticket)
            assert session.done(ticket)


def test_finished_gpu_stage_is_seen_while_the_next_is_queued(device: EmulatedDevice) -> None:
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


@pytest.mark.parametrize("seed", range(60))
def test_delays_change_no_voxel_and_failures_end_the_run(device: EmulatedDevice, seed: int) -> None:
    """A failure ends the run at once and names its step."""
    rng = random.Random(seed)
    theta, walks = rng.choice([1, 2, 3]), seed % 2 == 1
    net, volume = trained(SMALL), some_volume(SMALL, seed=77, more=(9, 7, 5))
    output = SMALL.dense_size(volume.shape[1:])
    overlaps = seed % 5 != 0
    plan = offloaded_plan(SMALL, output, (2, 4, 3), theta, column=4 if walks else 0, overlaps=overlaps)
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
            run_session(session, session.pool, source, written, plan.cover(SMALL))
            idle = session.idle_seconds
            assert set(idle) == ({"CPU", "GPU"} if overlaps else set())
            assert all(0 <= spent < time.perf_counter() - began for spent in idle.values())
        else:
            with pytest.raises(type(fault)) as caught:
                run_session(session, session.pool, source, written, plan.cover(SMALL))
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


def test_failure_in_the_gpu_stage_stops_the_host_stage(device: EmulatedDevice) -> None:
    """The host stage ends at its next look at the stop flag, though its step is later."""
    plan, net, volume = a_plan()

    def hook(stage: str, number: int) -> None:
        if (stage, number) == ("back", 0):
            raise Fault
        for _ in range(1000 if (stage, number) == ("front", 1) else 0):
            session.pool.check()
            time.sleep(0.01)

    source = Source(ArrayVolume(volume), roi=None, border="valid", network=SMALL, allow_nan=False)
    began = time.perf_counter()
    with session_for(plan, net, device) as session:
        stages(session, hook)
        with pytest.raises(Fault) as caught:
            run_session(session, session.pool, source, Poisoned.of((1, *plan.output), np.float32), plan.cover(SMALL))
    assert time.perf_counter() - began < 5
    assert "step 0 of column 0" in "; ".join(caught.value.__notes__)
    assert no_feeder_is_left()


def test_stop_is_noticed_while_the_feeder_hangs(device: EmulatedDevice) -> None:
    """The feeder hangs in a call that looks at no flag, and the waiting thread does not."""
    plan, net, volume = a_plan()
    gone = threading.Event()

    def hook(stage: str, number: int) -> None:
        if stage == "back":
            assert gone.wait(5)

    raw, out, begins = next(steps_of(plan, volume, SMALL))
    with session_for(plan, net, device) as session:
        stages(session, hook)
        ticket = session.submit(raw, out, begins=begins)
        session.pool.stop()
        began = time.perf_counter()
        with pytest.raises(Stopped):
            session.wait(ticket)
        assert time.perf_counter() - began < 1.0
        gone.set()


@pytest.mark.parametrize("where", ["submit", "wait"])
@pytest.mark.parametrize("how", ["stop", "Ctrl-C"])
def test_stop_is_noticed_while_the_device_hangs(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, where: str, how: str
) -> None:
    plan, net, volume = a_plan(overlaps=where == "wait")
    hangs = threading.Event()
    hangs.set()
    awaits = gpu_backend.GpuBackend._await

    def never(shop: Any, event: Any, pool: Any = None) -> None:
        while pool is not None and hangs.is_set():
            pool.check()
            time.sleep(0.001)
        awaits(shop, event, pool)

    monkeypatch.setattr(gpu_backend.GpuBackend, "_await", never)
    monkeypatch.setattr(gpu_steps, "QUEUED_SECONDS", 0.0)  # every layer is waited for before the next is queued
    raw, out, begins = next(steps_of(plan, volume, SMALL))
    main = threading.main_thread().ident
    assert main is not None
    with session_for(plan, net, device) as session:
        press = session.pool.stop if how == "stop" else lambda: signal.pthread_kill(main, signal.SIGINT)
        timer = threading.Timer(0.2, press)
        timer.start()
        began = time.perf_counter()
        with pytest.raises(Stopped if how == "stop" else KeyboardInterrupt):
            session.wait(session.submit(raw, out, begins=begins))
        assert time.perf_counter() - began < 1.0
        left = time.perf_counter()
        if how == "Ctrl-C":
            session.pool.stop()  # as the pipeline does
    assert time.perf_counter() - left < 1.0
    hangs.clear()
    timer.join()
    assert no_feeder_is_left()


def test_lost_device_is_not_called_again(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, net, volume = a_plan()

    def refused(*words: Any) -> None:
        raise DeviceError("cudaMemcpyAsync was refused: cudaErrorIllegalAddress")

    raw, out, begins = next(steps_of(plan, volume, SMALL))
    with session_for(plan, net, device) as session:
        with monkeypatch.context() as broken:
            broken.setattr(gpu_backend.GpuBackend, "fetch", refused)
            ticket = session.submit(raw, out, begins=begins)
            with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
                session.wait(ticket)
            assert session.done(ticket)
            session.abandon()
            assert no_feeder_is_left()
            assert not device.abandoned, "it still answers"
        with pytest.raises(Stopped):
            session.submit(raw, out, begins=begins)
