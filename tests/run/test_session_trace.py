"""A session records every layer of every step once in its trace, on the CPU and on an emulated GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.emulator import EMULATED_GPU, EmulatedDevice, EmulatedEvent, needs_compiler
from tests.support.odd_networks import (
    MACHINE,
    NETWORKS,
    ODDER,
    Ways,
    assert_dense,
    definition,
    planned,
    some_volume,
    trained,
)
from tests.support.reference_primitives import STAND_INS
from znnpy.errors import OutputError, ValuesOverflowError, ZnnpyError
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Network
from znnpy.planner.plan import Plan
from znnpy.planner.tilings import splits
from znnpy.report.trace_reader import Span, read_spans
from znnpy.run import gpu_steps
from znnpy.run.gpu_trace import ANCHOR_SECONDS, GpuTrace
from znnpy.run.session import Session
from znnpy.run.trace import Trace
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = pytest.mark.slow

WITH_GPU = replace(MACHINE, gpu=EMULATED_GPU)


def spans_of(path: Path) -> list[Span]:
    return [span for span in read_spans(path) if isinstance(span, Span)]


@dataclass(frozen=True)
class Case:
    """A plan, and what it runs on."""

    net: TrainedNetwork
    plan: Plan
    volume: Any
    device: EmulatedDevice | None

    @staticmethod
    def of(network: Network, device: EmulatedDevice | None, *, walks: bool, in_parts: bool = True) -> Case:
        volume = some_volume(network, seed=61, more=(7, 8, 9))
        size, (z, y, x) = network.dense_size(volume.shape[1:]), network.period
        at_once = splits(network)[-1] if in_parts else ()
        ways = Ways(1, (), True, MACHINE) if device is None else Ways(1, (), True, WITH_GPU, STAND_INS)
        column = 2 * z if walks else 0
        plan = planned(network, size, (z, 2 * y, 3 * x), column=column, at_once=at_once, ways=ways)
        return Case(trained(network), plan, volume, device)

    @property
    def names(self) -> dict[str, int]:
        """Return the names of the spans of each choice, as a reader of a trace sees them."""
        names = {}
        for index, choice in enumerate(self.plan.choices):
            first, last = choice.layers
            layers = f"{first}-{last}" if last > first else f"{first}"
            names[f"{choice.shape.kind} {layers} {choice.primitive}"] = index
        return names

    def session(self, pool: ThreadPool, trace: Trace | None, lane: str | None = None) -> Session:
        device: Any = self.device
        table = TABLE if device is None else STAND_INS
        words: dict[str, Any] = {"device": device, "trace": trace, "lane": lane}
        return Session(self.plan, self.net.network, self.net.weights, pool, table, **words)

    def steps(self) -> Iterator[tuple[Any, Any, bool, Any]]:
        """Raw patch, room for what comes out, `begins`, and where of the output that belongs, of every step."""
        network, plan = self.net.network, self.plan
        source = Source(ArrayVolume(self.volume), roi=None, border="valid", network=network, allow_nan=False)
        for column in plan.cover(network):
            for number, step in enumerate(column.steps):
                raw = np.empty((network.input_channels, *plan.patch_in), source.dtype)
                source.read(step.read, raw)
                out = np.full((network.output_channels, *plan.patch_out), np.nan, np.float32)
                yield raw, out if step.write.voxels else None, number == 0, step

    def run(self, path: Path) -> tuple[list[Span], Session, float, float]:
        """Spans, the closed session, and when the first step was submitted and the last was there."""
        dense = np.full((self.net.network.output_channels, *self.plan.output), np.nan, np.float32)
        with Trace(path) as trace, ThreadPool(2) as pool, self.session(pool, trace) as session:
            begun = time.perf_counter() - trace._zero
            tickets: list[Any] = []

            def land() -> None:
                ticket, out, step = tickets.pop(0)
                session.wait(ticket)
                if out is not None:
                    inner = tuple(
                        slice(lo - at, hi - at)
                        for lo, hi, at in zip(step.write.lo, step.write.hi, step.out.lo, strict=True)
                    )
                    dense[(slice(None), *step.write.slices)] = out[(slice(None), *inner)]

            for raw, out, begins, step in self.steps():
                tickets.append((session.submit(raw, out, begins=begins), out, step))
                if len(tickets) > session.max_in_flight:
                    land()
            while tickets:
                land()
            ended = time.perf_counter() - trace._zero
        assert_dense(dense, definition(self.net, self.volume))
        return spans_of(path), session, begun, ended


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    monkeypatch.setattr(gpu_steps, "LOOK_SECONDS", 0)
    with EmulatedDevice() as device:
        yield device
        assert device.allocated == 0


def assert_in_order(spans: Sequence[Span], begun: float, ended: float) -> None:
    """Spans of a track do not overlap, and none leaves the run, as far as a device's clock is known."""
    tracks = defaultdict(list)
    for span in spans:
        tracks[span.track].append(span)
    for of_one in tracks.values():
        for earlier, later in pairwise(of_one):
            assert earlier.begin <= earlier.end <= later.begin + 1e-8, (earlier, later)
        assert begun - 1e-6 <= of_one[0].begin
        assert of_one[-1].end <= ended + ANCHOR_SECONDS


def assert_every_layer_once(case: Case, spans: Sequence[Span], session: Session) -> None:
    """Check that each step has each of its layers once for each image, as often as the session counts."""
    plan, names = case.plan, case.names
    ran: dict[tuple[int, int], list[int]] = defaultdict(list)  # choice, step -> images
    for span in spans:
        if span.name in names:
            index = names[span.name]
            assert span.facts["layer"] == plan.choices[index].layers[0]
            ran[index, span.facts["step"]] += range(span.facts["first"], span.facts["last"] + 1)
    every = list(case.steps())
    for index, choice in enumerate(plan.choices):
        images = plan.sub_batches[index] * choice.shape.in_shape[0]
        runs = [step for step in range(len(every)) if (index, step) in ran]
        assert set(runs) >= {step for step, (_, out, _, _) in enumerate(every) if out is not None}
        assert all(ran[index, step] == list(range(images)) for step in runs)
        voxels = prod(choice.shape.out_shape[:4]) // choice.shape.batch
        assert session.written[index] == voxels * images * len(runs)
    for name, steps in (("load", every), ("store", [step for step in every if step[1] is not None])):
        assert len({span.facts["step"] for span in spans if span.name == name}) == len(steps)
    stored = [span for span in spans if span.name == "store"]
    assert sum(span.facts["last"] - span.facts["first"] + 1 for span in stored) == len(
        {span.facts["step"] for span in stored}
    ) * prod(case.net.network.period)


@pytest.mark.parametrize("walks", [False, True], ids=["patches", "columns"])
@pytest.mark.parametrize("network", [NETWORKS[0], NETWORKS[4], ODDER[5]], ids=lambda network: network.name)
def test_every_layer_of_every_step_is_traced_on_the_cpu(tmp_path: Path, network: Network, walks: bool) -> None:
    case = Case.of(network, None, walks=walks)
    spans, session, begun, ended = case.run(tmp_path / "trace.json")
    assert {span.track for span in spans} == {"CPU"}
    assert_in_order(spans, begun, ended)
    assert_every_layer_once(case, spans, session)
    assert {span.name for span in spans} - {*case.names} == {"load", "store"} | ({"clear", "carry"} if walks else set())


@needs_compiler
@pytest.mark.parametrize("walks", [False, True], ids=["patches", "columns"])
@pytest.mark.parametrize("network", [NETWORKS[0], ODDER[5]], ids=lambda network: network.name)
def test_every_layer_of_every_step_is_traced_on_a_gpu(
    tmp_path: Path, device: EmulatedDevice, network: Network, walks: bool
) -> None:
    case = Case.of(network, device, walks=walks)
    spans, session, begun, ended = case.run(tmp_path / "trace.json")
    assert {span.track for span in spans} == {"GPU upload", "GPU compute", "GPU download"}
    assert_in_order(spans, begun, ended)
    assert_every_layer_once(case, spans, session)
    steps = defaultdict(lambda: defaultdict(list))  # type: ignore[var-annotated]
    for span in spans:
        steps[span.facts["step"]][span.track].append(span)
    assert list(steps) == list(range(len(list(case.steps()))))
    for tracks in steps.values():
        (up,), compute, (down,) = tracks["GPU upload"], tracks["GPU compute"], tracks["GPU download"]
        assert (up.name, down.name) == ("upload", "download")
        assert up.begin <= up.end <= compute[0].begin + 1e-6
        assert compute[-1].end <= down.begin + 1e-6
        assert down.begin <= down.end


@needs_compiler
def test_each_device_has_its_own_tracks(tmp_path: Path, device: EmulatedDevice) -> None:
    path = tmp_path / "trace.json"
    for on in (None, device):
        case = Case.of(NETWORKS[0], on, walks=False)
        raw, out, begins, _ = next(case.steps())
        with Trace(path) as trace, ThreadPool(1) as pool, ExitStack() as stack:
            for lane in ("one", "two"):
                stack.enter_context(case.session(pool, trace, lane)).run(raw, out, begins=begins)
        tracks = [("upload", "compute", "download"), ("",)][on is None]
        assert {span.track for span in spans_of(path)} == {
            f"{lane} {track}".rstrip() for lane in ("one", "two") for track in tracks
        }


@needs_compiler
def test_span_is_as_long_as_its_work(tmp_path: Path, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has its own clock: uploads take long here, and downloads longer."""
    copy, path = EmulatedDevice.copy_async, tmp_path / "trace.json"
    seconds = {id(device.uploads): 0.03, id(device.downloads): 0.06}

    def slow(self: EmulatedDevice, target: Any, source: Any, stream: Any) -> None:
        copy(self, target, source, stream)
        stream.queue(lambda: time.sleep(seconds.get(id(stream), 0.0)))

    case = Case.of(NETWORKS[0], device, walks=False)
    raw, out, begins, _ = next(case.steps())
    with Trace(path) as trace, ThreadPool(1) as pool, case.session(pool, trace) as session:
        session.run(raw, out, begins=begins)
        monkeypatch.setattr(EmulatedDevice, "copy_async", slow)
        session.run(raw, out, begins=begins)
    took = {span.name: span.end - span.begin for span in spans_of(path) if span.facts["step"] == 1}
    assert took["upload"] >= 0.03
    assert took["download"] >= 0.12  # the output, and the peaks


@needs_compiler
def test_step_is_recorded_when_it_is_waited_for(tmp_path: Path, device: EmulatedDevice) -> None:
    told: list[Any] = []

    class Noted(Trace):
        def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
            told.append(facts["step"])

    case = Case.of(NETWORKS[0], device, walks=False)
    with Noted(tmp_path / "trace.json") as trace, ThreadPool(1) as pool, case.session(pool, trace) as session:
        tickets = [session.submit(raw, out, begins=begins) for raw, out, begins, _ in list(case.steps())[:2]]
        assert not told
        for number, ticket in enumerate(tickets):
            session.wait(ticket)
            assert set(told) == set(range(number + 1))


@needs_compiler
def test_device_clock_is_kept_aligned_with_the_host(
    tmp_path: Path, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one half in its rate does not add up from step to step."""
    between = EmulatedDevice.seconds_between

    def fast(self: EmulatedDevice, start: EmulatedEvent, end: EmulatedEvent) -> float:
        return 1.5 * between(self, start, end)

    monkeypatch.setattr(EmulatedDevice, "seconds_between", fast)
    case = Case.of(NETWORKS[0], device, walks=False)
    raw, out, begins, _ = next(case.steps())
    path = tmp_path / "trace.json"
    with Trace(path) as trace, ThreadPool(1) as pool, case.session(pool, trace) as session:
        session.run(raw, out, begins=begins)  # kernels are compiled
        time.sleep(0.6)
        begun = time.perf_counter() - trace._zero
        session.run(raw, out, begins=begins)
        took = time.perf_counter() - trace._zero - begun
    for span in spans_of(path):
        if span.facts["step"] == 1:
            assert begun <= span.begin <= span.end <= begun + 2.5 * took + ANCHOR_SECONDS


class Marks:
    """The events of a device, one for each second."""

    def __init__(self) -> None:
        self.uploads = self
        self.seconds = 0.0
        self.happens = True

    def event(self, *, timing: bool) -> SimpleNamespace:
        assert timing
        return SimpleNamespace(at=None, done=self.happens)

    def record(self, event: SimpleNamespace) -> None:
        self.seconds += 1
        event.at = self.seconds

    def calling(self, call: str) -> AbstractContextManager[None]:
        return nullcontext()

    def seconds_between(self, start: SimpleNamespace, end: SimpleNamespace) -> float:
        assert start.done, "it had not happened when the clock was read"
        return float(end.at - start.at)


def test_busy_stream_uses_the_last_clock_reading(tmp_path: Path) -> None:
    """Then the time of the last step will do."""
    marks, path = Marks(), tmp_path / "trace.json"
    with Trace(path) as trace:
        begun = time.perf_counter() - trace._zero
        told = GpuTrace(trace, marks)
        ended = time.perf_counter() - trace._zero
        marks.happens = False
        told.begin()
        with told.span("GPU", marks, "conv"):
            marks.seconds += 10
        told.end()
    (span,) = spans_of(path)
    assert begun + 2 - 1e-6 <= span.begin <= ended + 2 + 1e-6
    assert span.end - span.begin == pytest.approx(11)


@needs_compiler
def test_error_of_a_run_wins_over_that_of_its_trace(tmp_path: Path, device: EmulatedDevice) -> None:
    class Full(Trace):
        def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
            raise OutputError("the disk is full")

    case = Case.of(NETWORKS[0], device, walks=False)
    raw, out, begins, _ = next(case.steps())

    def run(error: BaseException | None) -> None:
        with Full(tmp_path / "trace.json") as trace, ThreadPool(1) as pool, case.session(pool, trace) as session:
            session.submit(raw, out, begins=begins)
            if error is not None:
                raise error

    with pytest.raises(ZnnpyError, match="first"):
        run(ZnnpyError("first"))
    with pytest.raises(OutputError, match="the disk is full"):
        run(None)


@needs_compiler
def test_gpu_work_before_an_early_end_is_traced(tmp_path: Path, device: EmulatedDevice) -> None:
    """A step that nobody waited for, and one that overflows, are traced too."""
    case = Case.of(NETWORKS[0], device, walks=False)
    raw, out, begins, _ = next(case.steps())
    path = tmp_path / "trace.json"

    def ends_early() -> None:
        with Trace(path) as trace, ThreadPool(1) as pool, case.session(pool, trace) as session:
            session.submit(raw, out, begins=begins)
            raise ZnnpyError("the volume ends here; give a longer one")

    with pytest.raises(ZnnpyError):
        ends_early()
    *spans, why = read_spans(path)
    assert why == "the volume ends here; give a longer one"
    assert {span.name for span in spans if isinstance(span, Span)} == {
        *case.names,
        "load",
        "store",
        "upload",
        "download",
    }
    case.net.weights[0].weight[:] = 3e38
    with (
        pytest.raises(ValuesOverflowError),
        Trace(path) as trace,
        ThreadPool(1) as pool,
        case.session(pool, trace) as session,
    ):
        session.run(raw, out, begins=begins)
    *spans, why = read_spans(path)
    assert {span.name for span in spans if isinstance(span, Span)} >= {*case.names, "download"}
    assert isinstance(why, str)
    assert why.startswith("layer 0 (conv")


@needs_compiler
def test_nothing_is_timed_without_a_trace(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    event = EmulatedDevice.event

    def noted(self: EmulatedDevice, *, timing: bool = False) -> EmulatedEvent:
        made.append(timing)
        return event(self, timing=timing)

    monkeypatch.setattr(EmulatedDevice, "event", noted)
    case = Case.of(NETWORKS[0], device, walks=False)
    raw, out, begins, _ = next(case.steps())
    with ThreadPool(1) as pool, case.session(pool, None) as session:
        session.run(raw, out, begins=begins)
    assert made
    assert not any(made)
