"""A session: a plan with its arenas, prepared weights and carried planes, which turns input into output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import VramError
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights, Network
from znnpy.planner.memory import PINNED
from znnpy.planner.plan import Plan
from znnpy.run.backend import Backend
from znnpy.run.cpu_backend import CpuBackend
from znnpy.run.handover import Handover, StopFlag
from znnpy.run.stage_runner import StageRunner

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Spans

ALL: tuple[Primitive, ...] = (*TABLE, *IN_HOST_RAM)


class Session:
    """Runs the steps of one plan. A context manager: `with Session(...) as session: session.run(raw, out)`.

    Entering prepares weights and plans transforms; after that nothing of the size of a patch is allocated.

    A plan for the GPU runs on `device`, or on one that the session opens and closes. Then a step that is submitted is
    on its way through upload, computation and download, and so may be the next one. A plan of two stages runs the first
    on the host and the second on the GPU (`Handover`).

    A `trace` is told of every layer of every step, for the images `first` to `last` of its input, and of what is moved;
    `lane` is the name of the device there, where there are several. `prepared` is called with bytes of memory that were
    written to for the first time, while a session on the CPU is entered.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        pool: ThreadPool,
        table: tuple[Primitive, ...] = ALL,
        *,
        device: Device | None = None,
        trace: Spans | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        self.plan, self.network, self.pool = plan, network, pool
        self._open = ExitStack()
        self._handover: Handover | None = None
        lane = lane or plan.device.upper()
        if plan.device == "cpu":
            backends: list[Backend] = [CpuBackend(plan, network, pool, trace, lane, prepared)]
        else:
            from znnpy.run.gpu_backend import GpuBackend  # here, since runs on the CPU need none of it

            stops = StopFlag(pool)
            gpu = GpuBackend(plan, network, stops if plan.offloaded else pool, device, trace, lane)
            host = CpuBackend(plan, network, pool, trace, lent=gpu)
            backends = [host, gpu] if plan.offloaded else [gpu]
        self._backends = backends
        self._runners = tuple(
            StageRunner(plan, network, weights, backend, table, number) for number, backend in enumerate(backends)
        )
        if plan.offloaded:
            self._handover = Handover(plan, stops, host, gpu, *self._runners)

    @property
    def written(self) -> list[int]:
        """Voxels of one map that each choice has written, all images."""
        return [sum(counts) for counts in zip(*(runner.written for runner in self._runners), strict=True)]

    @property
    def idle_seconds(self) -> dict[str, float]:
        """Seconds in which each of two overlapping stages stood still, by device; empty for other plans."""
        return {} if self._handover is None else self._handover.idle_seconds

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted and not waited for when the next is; 0: `submit` computes."""
        return self._backends[-1].max_in_flight if self._handover is None else self._handover.max_in_flight

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for runner in self._runners:
                stack.callback(runner.forget)
            for backend in reversed(self._backends):
                stack.enter_context(backend)
            try:
                for runner in reversed(self._runners):
                    runner.bind()
                if self._handover is not None:
                    stack.callback(self._handover.close)
                    self._handover.open()
            except VramError as error:
                clear_frames(error.__traceback__)  # who plans again with less needs what they refer to
                raise
            self._open = stack.pop_all()
        return self

    def __exit__(self, *cause: Any) -> None:
        self._open.__exit__(*cause)

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[npt.NDArray[Any]], Iterable[npt.NDArray[Any]]]:
        """Return arrays for `submit` of these dtypes: as many as keep a run going, and the plan counts.

        reads, writes  steps of the run, and those with output

        Those that are copied to or from a GPU are pinned: only then do uploads and downloads go on during the
        computation. That takes seconds for gigabytes, so each is made when it is asked for, from any thread.
        """
        if self._handover is None:
            return self._backends[-1].buffers(raw, out, reads=reads, writes=writes)
        native, size = raw.newbyteorder("="), (self.network.input_channels, *self.plan.patch_in)
        _, outs = self._backends[-1].buffers(np.dtype(np.float32), out, reads=0, writes=writes)
        return (np.empty(size, native) for _ in range(min(PINNED, reads))), outs

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
        """Compute one step of a column, or one patch: `submit` it and `wait`."""
        self.wait(self.submit(raw, out, begins=begins))

    def submit(
        self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True, step: object | None = None
    ) -> Any:
        """Begin to compute one step of a column, or one patch; return a ticket for `wait`, in the order of submission.

        raw     (c, *patch_in), any real dtype, as the volume stores it; read only.
        out     (maps, *patch_out) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`); overwritten. None in the
                first steps of a column that walks: they give no output (`Cover.ahead`).
        begins  the first step of a column; every patch is one.

        No more than `max_in_flight` steps may be without their wait. Until it, `raw` and `out` belong to the session.
        ValuesOverflowError, here or in `wait`, names the layer whose result is not finite.
        """
        assert step is None, "all steps of a chain are alike"
        if self._handover is not None:
            return self._handover.submit(raw, out, begins=begins)
        backend, runner = self._backends[0], self._runners[0]
        source, target = backend.begin_step(raw, out, begins=begins)
        runner.step(source, None if target is None else target.transpose(runner.axes), begins=begins)
        return backend.end_step()

    def abandon(self) -> None:
        """Ask nothing of a device that failed any more; leaving then waits for nothing."""
        if self._handover is not None:
            self._handover.stop()
        self._backends[-1].abandon()

    def done(self, ticket: Any) -> bool:
        """Return whether `wait` would return at once."""
        return self._backends[-1].done(ticket) if self._handover is None else self._handover.done(ticket)

    def wait(self, ticket: Any) -> None:
        """Wait until the output of a step is there."""
        if self._handover is None:
            self._backends[-1].wait(ticket)
        else:
            self._handover.wait(ticket)
