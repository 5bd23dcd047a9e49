"""A plan awake: owns arena, prepared weights, bound steps and what columns carry; turns input into output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from traceback import clear_frames
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import VramError
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights, Network
from znnpy.planner.plan import Plan
from znnpy.run.host import HostWorkshop
from znnpy.run.walk import Walk
from znnpy.run.workshop import Workshop
from znnpy.shapes import turn

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Trace


class Session(Walk):
    """Runs the steps of one plan. A context manager: `with Session(...) as session: session.run(raw, out)`.

    Entering prepares weights and plans transforms; after that nothing of the size of a patch is allocated.

    A plan for the GPU runs on `device`, or on one that the session opens and closes. Then a step that is submitted is
    on its way through three stages, upload, computation and download, and so may be the next one.

    A `trace` is told of every layer of every step, for the images `first` to `last` of its input, and of what is moved;
    `lane` is what the device is called there, where there are several. `prepared` is called with bytes of memory that
    were written to for the first time, while the session is entered; on a GPU it is not.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        crew: ThreadPool,
        table: tuple[Primitive, ...] = TABLE,
        *,
        device: Device | None = None,
        trace: Trace | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        shop = _workshop(plan, network, crew, device, trace, lane or plan.device.upper(), prepared)
        super().__init__(plan, network, weights, shop, table)
        self.crew = crew
        self._open = ExitStack()

    @property
    def under_way(self) -> int:
        """Steps that may be submitted and not waited for when the next is; 0: `submit` computes."""
        return self._shop.under_way

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.forget)
            stack.enter_context(self._shop)
            try:
                self.bind(self.plan.memory.arena, self.plan.tensors)
            except VramError as error:
                clear_frames(error.__traceback__)  # who plans again with less needs what they refer to
                raise
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.__exit__(kind, error, at)

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[npt.NDArray[Any]], Iterable[npt.NDArray[Any]]]:
        """Arrays for `submit` of these types: as many as keep a run going, and the plan counts.

        reads, writes  steps of the run, and those with output

        On a GPU they are pinned: only then do uploads and downloads go on beside the computation. That takes seconds
        for gigabytes, so each is made when it is asked for, from any thread.
        """
        return self._shop.buffers(raw, out, reads=reads, writes=writes)

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
        """Compute one step of a column, or one patch: `submit` it and `wait`."""
        self.wait(self.submit(raw, out, begins=begins))

    def submit(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> Any:
        """Begin to compute one step of a column, or one patch; a ticket to `wait` with, in the order of submission.

        raw     (c, *patch_in), any real dtype, as the volume stores it; read only.
        out     (maps, *patch_out) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`); overwritten. None in the
                first steps of a column that walks: they give no output (`Cover.ahead`).
        begins  the first step of a column; every patch is one.

        No more than `under_way` steps may be without their wait. Until it, `raw` and `out` belong to the session.
        ValuesOverflowError, here or in `wait`, names the layer whose result is not finite.
        """
        axes = (0, *(1 + axis for axis in turn(self.plan.axis)))
        source, target = self._shop.take(raw, out, begins=begins)
        if begins:
            self.begin()
        with self._shop.span("load"):
            self._shop.load(source.transpose(axes), self.input[0])
        self.advance(0, None if target is None else target.transpose(axes))
        self.end()
        return self._shop.give()

    def abandon(self) -> None:
        """The device failed: nothing is asked of it any more, and leaving waits for nothing."""
        self._shop.abandon()

    def done(self, ticket: Any) -> bool:
        """`wait` would return at once."""
        return self._shop.done(ticket)

    def wait(self, ticket: Any) -> None:
        """Until the output of a step is there."""
        self._shop.wait(ticket)


def _workshop(
    plan: Plan,
    network: Network,
    crew: ThreadPool,
    device: Device | None,
    trace: Trace | None,
    lane: str,
    prepared: Callable[[int], None] | None,
) -> Workshop:
    """Where a plan runs."""
    if plan.device == "cpu":
        return HostWorkshop(plan, network, crew, trace, lane, prepared)
    from znnpy.run.gpu import GpuWorkshop  # here: runs on the CPU need none of it

    return GpuWorkshop(plan, network, crew, device, trace, lane)
