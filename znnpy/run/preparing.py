"""Measures and reports how a run prepares memory before it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from math import prod
from typing import TYPE_CHECKING

from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.run.masked import work_items
from znnpy.run.pipeline import Before, Event
from znnpy.run.worker import values_per_voxel

if TYPE_CHECKING:
    from znnpy.volume.mask import WantedOutputs

LEAST_TOLD = 2**28  # bytes; less is prepared in a moment and not reported


class Preparing:
    """The preparation of one plan of a run, from the creation of this object until `done` is called.

    began     when the run began, by `time.perf_counter()`
    finished  indices of the columns, or patches, that earlier runs finished
    progress  called with the number of prepared bytes, for plans of a processor alone
    wanted    where outputs are wanted; None: everywhere
    """

    def __init__(
        self,
        plan: RunPlan,
        network: Network,
        began: float,
        finished: Collection[int],
        progress: Callable[[Event], None] | None,
        wanted: WantedOutputs | None = None,
    ) -> None:
        self._plan, self._network, self._finished, self._wanted = plan, network, finished, wanted
        self._began, self._progress, self._since = began, progress, time.perf_counter()
        self._touched, self._all = 0, plan.main.memory.last.arena + plan.main.memory.last.carries

    @property
    def told(self) -> Callable[[int], None] | None:
        """The function that a session calls with the bytes that it prepared; None where there is no progress."""
        alone = self._plan.device == "cpu" and self._progress is not None
        return self._tell if alone and self._all >= LEAST_TOLD else None

    def done(self) -> Before:
        """End the preparation: the run computes from now on."""
        return Before(self._began, self._since - self._began, time.perf_counter() - self._since)

    def _tell(self, nbytes: int) -> None:
        assert self._progress is not None, "called only where there is progress"
        self._touched += nbytes
        plan, network = self._plan, self._network
        parts = work_items(plan, network, self._wanted)
        voxels = sum(parts[index].voxels for index in self._finished)
        steps, now = [len(part.steps) for part in parts], time.perf_counter()
        event = Event(
            columns_done=len(self._finished),
            columns=len(parts),
            voxels_done=voxels,
            voxels=prod(plan.output),
            seconds=now - self._began,
            stage_seconds={"planning": self._since - self._began, "preparing": now - self._since},
            bytes_done=int(voxels * values_per_voxel(plan.main, network)) * plan.main.itemsize_out,
            steps_done=sum(steps[index] for index in self._finished),
            steps=sum(steps),
            work_done=voxels / prod(plan.output),
            preparing=(min(self._touched, self._all), self._all),
        )
        self._progress(event)
