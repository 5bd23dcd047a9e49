"""Measure what a session costs beside computing, and the memory of a stream.

    python -m benchmarks sessions [--network fib25_boundary ..] [--side 64] [--arrays 100] [--rounds 10]

computing  The steps of the plan alone, on buffers that are there: what no way to call a network can save.
session    The same arrays through one session, each with its own output: checks, reading, writing and threads of each
           call are added.
any shape  The same in a session that is not told a shape.
call       A call of the network for an array, which plans and prepares every time; of one array in each round.

The arrays are divided among the rounds; in each, all ways run in turn on the processor. The milliseconds of all cores
together are kept too: they tell more where other programs run. A stream of a larger volume
runs in a process of its own: its largest resident memory is held against what its plan promises, and two blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import znnpy
from benchmarks.harness import markdown, options
from benchmarks.harness.inputs import SEED
from benchmarks.harness.isolate import run_child
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Program, Result, Results, Row, ratio_of
from benchmarks.harness.timing import Budget, Entry, WallClock, interleave
from znnpy.machine import peak_bytes, process_bytes, this_machine
from znnpy.run.target import OpenTarget
from znnpy.run.worker import front
from znnpy.run.workers import sessions_of

NETWORKS = ("fib25_boundary", "fib25_unet")
COMPUTING, SESSION, ANY_SHAPE, CALL = "computing", "session", "any shape", "call"
STREAMED, STREAM_LIMIT = 256, 256 * 2**20  # side of the streamed volume, and bytes that its run gets beside the process
STREAM_SECONDS = 600.0
Array = npt.NDArray[Any]


def measured(name: str, side: int, count: int, rounds: int, minutes: float) -> list[Row]:
    """Time all ways to run one network on arrays of one size; return a row for each."""
    net, each = znnpy.load_network(name), max(1, count // rounds)
    arrays = np.random.default_rng(SEED).integers(0, 256, (count, side, side, side), np.uint8)
    with ExitStack() as stack:
        opened = {
            SESSION: stack.enter_context(net.session(arrays.shape[1:], dtype=arrays.dtype, device="cpu")),
            ANY_SHAPE: stack.enter_context(net.session(dtype=arrays.dtype, device="cpu")),
        }
        plan = opened[SESSION].plan
        outs = np.zeros((count, *opened[SESSION].output_shape), np.float32)
        ways: dict[str, Callable[[], object]] = {
            COMPUTING: steps_of(net, plan, each, stack),
            **{way: Through(run, arrays, outs, each) for way, run in opened.items()},
            CALL: Through(partial(called, net), arrays, outs, 1),
        }
        clocks = {way: CoreClock() for way in ways}
        entries = [Entry(way, run, clocks[way], repeats=1) for way, run in ways.items()]
        for run in opened.values():
            run(arrays[0])
        interleave(entries, rounds, Budget(minutes))
    found = []
    for way, entry in zip(ways, entries, strict=True):
        many = 1 if way == CALL else each
        wall, cores = ([1e3 * seconds / many for seconds in spent] for spent in (entry.seconds, clocks[way].cores))
        facts = {"plan": repr(plan), "arrays": count, "core_ms": cores}
        found.append(Row(name, f"{count} of {side}^3", way, "ms/array", tuple(wall), None, facts))
    return found


class CoreClock(WallClock):
    """A clock that also keeps the seconds of all cores, which other programs on the machine hardly change."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[float] = []

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        began = time.process_time()
        wall = super().seconds(run, repeats)
        self.cores.append((time.process_time() - began) / repeats)
        return wall


class Through:
    """Predicts the next arrays into their outputs, so many in each call."""

    def __init__(self, run: Callable[..., object], arrays: Array, outs: Array, each: int) -> None:
        self._run, self._arrays, self._outs, self._each, self._next = run, arrays, outs, each, 0

    def __call__(self) -> None:
        for _ in range(self._each):
            self._run(self._arrays[self._next], out=self._outs[self._next])
            self._next = (self._next + 1) % len(self._arrays)


def called(net: znnpy.TrainedNetwork, array: Array, *, out: Array) -> None:
    """Predict an array by a call of the network."""
    out[...] = net(array, device="cpu")


def steps_of(net: znnpy.TrainedNetwork, plan: znnpy.RunPlan, count: int, stack: ExitStack) -> Callable[[], None]:
    """Return a function that computes the steps of a plan so many times, on buffers of its own."""
    target = OpenTarget(machine=this_machine())
    (session,) = stack.enter_context(sessions_of(plan, target, net.network, net.weights)).values()
    raws, outs = session.buffers(np.dtype(np.uint8), np.dtype(np.float32), reads=1, writes=1)
    (raw, *_), (out, *_) = raws, outs
    raw[...] = np.random.default_rng(SEED).integers(0, 256, raw.shape, np.uint8)
    steps = [(number == 0, step) for column in plan.work_items(net.network) for number, step in enumerate(column.steps)]

    def compute() -> None:
        for _ in range(count):
            for begins, step in steps:
                voxels = out if step.writes else None
                session.wait(session.submit(front(raw, step.size), voxels, begins=begins, step=step.step))

    return compute


class Zeros:
    """A volume that takes no memory."""

    dtype = np.dtype(np.uint8)

    def __init__(self, side: int) -> None:
        self.shape = (side, side, side)

    def __getitem__(self, box: Any) -> Array:
        return np.zeros([at.stop - at.start for at in box], self.dtype)


def streamed(request: dict[str, Any]) -> dict[str, Any]:
    """Stream a network over a volume in this process; return bytes: promised, of a block, and at the peak."""
    ram = process_bytes() + STREAM_LIMIT  # `peak_bytes` of znnpy, since that of `getrusage` begins with the parent's
    blocks = znnpy.stream(Zeros(request["side"]), request["network"], ram=ram, device="cpu")
    largest = max(block.nbytes for _, block in blocks)
    plan = blocks.plan
    assert plan is not None, "it has run"
    return {"promised": plan.memory.peak, "block": largest, "peak": peak_bytes(), "plan": repr(plan)}


def stream_row(name: str, side: int) -> Row:
    """Return the memory of a process that streams a network over a volume."""
    done = run_child("benchmarks.sessions:streamed", {"network": name, "side": side}, seconds=STREAM_SECONDS)
    if done.failure is not None:
        return Row("stream", f"{name} {side}^3", "peak", "bytes", (), done.failure)
    found = done.answer
    return Row("stream", f"{name} {side}^3", "peak", "bytes", (float(found["peak"]),), None, found)


def sessions_table(results: Results) -> str:
    """Return what sessions cost, of all machines."""
    made = results.get("sessions", ())
    return markdown.sections(made, [_sessions(result) for result in made], "sessions", NETWORKS)


def stream_table(results: Results) -> str:
    """Return the memory of streams, of all machines."""
    made = results.get("sessions", ())
    return markdown.sections(made, [_streams(result) for result in made], "sessions", ("stream",))


def _sessions(result: Result) -> str:
    lines = []
    for network in NETWORKS:
        for case, rows in result.cases(network):
            alone = next(row for row in rows if row.subject == COMPUTING)
            for row in rows:
                cores = row.facts["core_ms"]
                ratios = ("", "")
                if row is not alone:
                    ratios = (
                        str(ratio_of(row.values, alone.values)),
                        f"{ratio_of(cores, alone.facts['core_ms']).median:.2f}",
                    )
                lines.append((
                    network, case, row.subject, markdown.number(row.median), ratios[0],
                    markdown.number(median(cores)), ratios[1],
                ))  # fmt: skip
    head = ("network", "arrays", "way", "ms an array", "times the computing", "core ms", "core ms over the computing")
    return markdown.table(head, lines, left=3)


def _streams(result: Result) -> str:
    lines: list[tuple[str, ...]] = []
    for row in result.of_group("stream"):
        if row.failure is not None:
            lines.append((row.case, row.failure, "", "", ""))
            continue
        promised, block = row.facts["promised"], row.facts["block"]
        allowed = promised + 2 * block
        lines.append((row.case, *(f"{one / 2**20:,.1f}" for one in (promised, block, allowed, row.median))))
    head = ("network, volume", "plan, MiB", "a block, MiB", "plan and two blocks, MiB", "peak, MiB")
    return markdown.table(head, lines)


def headline(result: Result) -> str:
    """Return the overhead of a session for the first network."""
    case, rows = next(result.cases(NETWORKS[0]))
    alone, session = (next(row for row in rows if row.subject == way) for way in (COMPUTING, SESSION))
    return f"{NETWORKS[0]}, {case}: {ratio_of(session.values, alone.values).median:.2f} times the computing"


PROGRAM = Program(
    "sessions",
    "What does a session cost beside computing, and how much memory does a stream take?",
    "sessions",
    {"sessions": sessions_table, "streams": stream_table},
    headline,
)


@click.command()
@options.OUT
@options.QUICK
@options.MINUTES
@click.option("--network", "networks", multiple=True, default=NETWORKS, show_default=True)
@click.option("--side", type=int, default=64, show_default=True, help="Voxels along each axis of an array.")
@click.option("--arrays", type=int, default=100, show_default=True)
@click.option("--rounds", type=int, default=10, show_default=True)
def command(
    out: Path | None, quick: bool, minutes: float, networks: Sequence[str], side: int, arrays: int, rounds: int
) -> None:
    """Measure what a session costs beside computing, and the memory of a stream."""
    result = Result("sessions", machine_name(), header())
    networks, side, arrays, rounds = (NETWORKS[:1], 40, 2, 1) if quick else (networks, side, arrays, rounds)
    if out is not None or not quick:
        merge(result, out, {*networks, "stream"})
    for name in networks:
        result.add(measured(name, side, arrays, rounds, minutes))
        result.add([stream_row(name, 48 if quick else STREAMED)])
        if out is not None or not quick:
            result.write(out)
    click.echo(f"{_sessions(result)}\n\n{_streams(result)}")
