"""Stages for the pipeline that are simple, and fail or wait where they are told to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence, Set
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError, VolumeError, ZnnpyError
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Conv, Network
from znnpy.patches import Box, Column, Cover, cover
from znnpy.planner.plan import patch_in
from znnpy.run import pipeline
from znnpy.run.work_queue import ColumnQueue
from znnpy.run.worker import Computes, StepSource, Stoppable, Worker
from znnpy.shapes import Vec3

SIZE: Vec3 = (7, 5, 9)
PATCH: Vec3 = (3, 2, 4)
NETWORK = Network("probe", 2, (Conv((3, 1, 2), 3),))
COLUMNS = cover(SIZE, PATCH)
WALKER = Network("walker", 2, (Conv((3, 4, 6), 3),))  # sees more than one voxel along every axis

FAULTS: list[BaseException] = [VolumeError("a"), OutputError("b"), MemoryError("c"), RuntimeError("d"), SystemExit(3)]

Hook = Callable[[str, int], None]  # stage, how many patches it had before


def quiet(stage: str, patch: int) -> None:
    """Cause no fault and no delay."""


class Session:
    """Sums the field of view over both channels, times 1, 2 and 3 for the three maps.

    In columns it keeps what it has read; planes that it has not are NaN.
    """

    max_in_flight = 0
    abandoned = False

    def __init__(
        self, hook: Hook, pool: ThreadPool, network: Network = NETWORK, columns: Sequence[Column] = COLUMNS
    ) -> None:
        self.network = network
        self._axis = columns.axis if isinstance(columns, Cover) else 0
        patch = columns.patch if isinstance(columns, Cover) else PATCH
        walks = isinstance(columns, Cover) and columns.column > 0
        step = patch_in(network, patch, self._axis, streams=walks)
        self.plan: Any = SimpleNamespace(
            device="cpu",
            patch_in=step,
            patch_out=patch,
            axis=self._axis,
            streams=walks,
            area=None,
            warmup_work=lambda network: (0.0, 0.5),
        )
        self._read = np.full((2, *network.patch_in(patch)), np.nan)
        self._hook, self._pool, self._count = hook, pool, 0

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[list[Any], list[Any]]:
        count = 2 + self.max_in_flight
        raws = [np.empty((2, *self.plan.patch_in), raw) for _ in range(min(reads, count))]
        return raws, [np.empty((3, *self.plan.patch_out), out) for _ in range(min(writes, count))]

    def submit(
        self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True, step: object | None = None
    ) -> Any:
        """Compute at once, or, if steps may be under way, when the step is waited for."""
        work = partial(self.run, raw, out, begins=begins)
        return work if self.max_in_flight else work()

    def done(self, ticket: Any) -> bool:
        return True

    def wait(self, ticket: Any) -> None:
        if ticket is not None:
            ticket()

    def abandon(self) -> None:
        self.abandoned = True

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
        self._pool.check()
        self._hook("compute", self._count)
        self._count += 1
        planes, new = np.moveaxis(self._read, 1 + self._axis, 0), np.moveaxis(raw, 1 + self._axis, 0)
        planes[:] = np.nan if begins else np.concatenate((planes[len(new) :], planes[: len(new)]))
        planes[-len(new) :] = new
        if out is not None:
            assert out.dtype == np.float32
            out[:] = dense(self._read, self.network)


class Source:
    def __init__(self, voxels: npt.NDArray[Any], hook: Hook) -> None:
        self.dtype = voxels.dtype
        self._voxels, self._hook, self._count = voxels, hook, 0

    def read(self, lo: Vec3, out: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        self._hook("read", self._count)
        self._count += 1
        size = self._voxels.shape[1:]
        inside = [(max(0, at), min(n, at + m)) for at, n, m in zip(lo, size, out.shape[1:], strict=True)]
        z, y, x = (slice(first, max(first, last)) for first, last in inside)
        oz, oy, ox = (slice(a.start - at, a.stop - at) for a, at in zip((z, y, x), lo, strict=True))
        out[:] = 0
        out[:, oz, oy, ox] = self._voxels[:, z, y, x]
        bad: npt.NDArray[np.bool_] = ~np.isfinite(out).all(axis=0)
        out[~np.isfinite(out)] = 0
        return bad if bad.any() else None


class Output:
    def __init__(self, hook: Hook, done: Set[int] = frozenset()) -> None:
        self.dtype = np.dtype(np.float32)
        self.done = done
        self.written = np.full((3, *SIZE), -1, np.float32)
        self.finished: list[int] = []
        self._hook, self._count = hook, 0

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        self._hook("write", self._count)
        self._count += 1
        where = (slice(None), *box.slices)
        assert (self.written[where] == -1).all(), "written twice"
        self.written[where] = voxels

    def finish_column(self, index: int) -> None:
        self.finished.append(index)


def dense(voxels: npt.NDArray[Any], network: Network = NETWORK) -> npt.NDArray[Any]:
    fov = network.field_of_view
    windows = np.lib.stride_tricks.sliding_window_view(voxels.astype(np.float64), fov, axis=(1, 2, 3))
    return np.stack([scale * windows.sum(axis=(0, 4, 5, 6)) for scale in (1, 2, 3)])


def volume(network: Network = NETWORK) -> npt.NDArray[np.float32]:
    return np.random.default_rng(9).integers(0, 50, (2, *network.patch_in(SIZE))).astype(np.float32)


def run(
    hook: Hook = quiet,
    voxels: npt.NDArray[Any] | None = None,
    columns: Sequence[Column] = COLUMNS,
    done: frozenset[int] = frozenset(),
    progress: Callable[[pipeline.Event], None] | None = None,
    network: Network = NETWORK,
) -> tuple[Output, pipeline.Timings]:
    with ThreadPool(1) as pool:
        output = Output(hook, done)
        source = Source(volume(network) if voxels is None else voxels, hook)
        session = Session(hook, pool, network, columns)
        timings = run_session(session, pool, source, output, columns, progress)
    return output, timings


def run_session(
    session: Computes,
    pool: Stoppable,
    source: StepSource,
    output: pipeline.Writes,
    columns: Sequence[Column],
    progress: Callable[[pipeline.Event], None] | None = None,
) -> pipeline.Timings:
    """Read, compute and write every column that `output.done` does not hold, with one worker."""
    worker = Worker(session.plan.device.upper(), session, pool, ColumnQueue(columns, done=output.done))
    return pipeline.run_workers((worker,), source, output, progress)


def walking(axis: int, steps: int, patch: Vec3 = PATCH) -> Cover:
    """Columns of so many steps along an axis."""
    return Cover(SIZE, patch, axis, steps * patch[axis], WALKER.field_of_view[axis] - 1)


def no_thread_is_left() -> bool:
    return not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("znnpy-reader", "znnpy-writer", "znnpy-worker"))
    ]


def is_fault(error: BaseException, fault: BaseException, *, named: bool = True) -> bool:
    """Return whether a stage raised it, and it names its step unless it came from elsewhere."""
    place = re.compile(r"output voxels \(z, y, x\) = \(.*\) to \(.*\), step \d+ of column \d+( in cells? [\d, ]+)?")
    if not named or not isinstance(fault, Exception):
        return error is fault
    if isinstance(fault, ZnnpyError):
        inside, beside = f"{place.pattern}: {re.escape(str(fault))}", rf"{re.escape(str(fault))} \({place.pattern}\)"
        return type(error) is type(fault) and re.fullmatch(f"{inside}|{beside}", str(error)) is not None
    notes = list(getattr(error, "__notes__", ()))
    if notes:
        error.__notes__.clear()  # the next test raises it again
    return error is fault and any(place.fullmatch(note) for note in notes)
