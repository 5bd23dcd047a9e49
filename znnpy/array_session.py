"""A session that plans and prepares a network once, and runs it on any number of arrays of one shape."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.costs.store import CostStore
from znnpy.errors import ShapeError, VolumeError, VramError
from znnpy.measure.fftw_wisdom import wisdom_kept
from znnpy.messages import excerpt, option
from znnpy.network import ConvWeights, Network
from znnpy.option_values import Border
from znnpy.patches import Box
from znnpy.planner.run_plan import RunPlan
from znnpy.report.plan_text import predicted
from znnpy.run import pipeline
from znnpy.run.asked import devices_asked
from znnpy.run.choice import Work, choose, forgetful, given_plan, smaller_plan
from znnpy.run.target import OpenTarget, Targets, check_here
from znnpy.run.workers import Sessions, sessions_of, workers_of
from znnpy.run_log import log_once, log_phase
from znnpy.shared_options import RunOptions
from znnpy.units import human_bytes
from znnpy.volume.array import ArrayVolume, why_unwritable
from znnpy.volume.sample import sample_of
from znnpy.volume.source import Predicted, Source
from znnpy.volume.statistics import with_statistics

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Result:
    """An output in memory, for the pipeline to write to; outputs of a graph follow one another along the maps."""

    array: npt.NDArray[Any]  # (maps, z, y, x)
    maps: tuple[int, ...]  # of each output
    done: frozenset[int] = frozenset()

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int) -> None:
        first = sum(self.maps[:number])
        self.array[(slice(first, first + self.maps[number]), *box.slices)] = voxels

    def finish_column(self, index: int) -> None:
        """Do nothing: an output in memory needs no record of what is finished."""


class ArraySession:
    """Runs one network on arrays of one shape. `TrainedNetwork.session` makes it; a context manager.

    Entering makes the plan, prepares the weights and takes the memory; leaving gives it back. Any thread may call it:
    calls from several threads run one after the other, and each uses all threads of the plan. A call that raises an
    error does not affect the next one, unless the plan is for a GPU: then the session has ended.

    If the GPU refuses memory that the plan needs, a plan that needs less is made, and the call runs again.
    """

    def __init__(
        self,
        network: Network,
        weights: Sequence[ConvWeights],
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        border: Border,
        asked: RunOptions,
    ) -> None:
        """Check the options; plan and allocate nothing. The parameters are those of `TrainedNetwork.session`."""
        self._network, self._weights, self._border, self._asked = network, weights, border, asked
        self._given = given_plan(asked)
        self._devices = devices_asked(asked)
        if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
            raise ValueError(f"shape is (z, y, x) or (c, z, y, x), positive integers, not {excerpt(repr(shape))}")
        try:
            voxel = np.zeros((), dtype)
        except TypeError:
            raise ValueError(f"dtype is a type that numpy knows, such as 'uint8', not {excerpt(repr(dtype))}") from None
        like = ArrayVolume(np.broadcast_to(voxel, shape))  # an array of that shape in the memory of one voxel
        self._like, self._source = like, self._source_of(like)
        self._source.check_one_size(network, "call znnpy.infer with a path")
        self._turn = threading.Lock()
        self._open, self._prepared = ExitStack(), ExitStack()  # the devices; what is prepared on them
        self._target: OpenTarget | None = None
        self._plan: RunPlan | None = None
        self._sessions: Sessions = {}
        self._ended = False
        self._looked = False  # whether grey values of an array were sampled

    @property
    def plan(self) -> RunPlan:
        """Plan of the session; ValueError outside of the `with` block."""
        return self._running()[1]

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of each prediction, (maps, z, y, x)."""
        return self._network.output_channels, *self._source.output

    @property
    def output_maps(self) -> tuple[int, ...]:
        """Maps of each output of the network, which follow one another in a prediction."""
        return self._network.output_maps

    @property
    def places(self) -> tuple[Predicted, ...]:
        """Place of each output of the network in the array, and the size of its voxels."""
        return self._source.outputs

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """Type of each prediction: float32, or uint8 for labels and what is above thresholds."""
        return np.dtype(np.uint8 if self._network.result.is_integer else np.float32)

    def __enter__(self) -> Self:
        if self._target is not None:
            raise ValueError("the session is open already; leave its `with` block first, or make another session")
        asked, store = self._devices, CostStore(self._asked.costs, calibrate=self._asked.calibrate)
        if self._given is not None:
            check_here(self._given)
            asked = replace(asked, device=self._given.device)
        with ExitStack() as stack:
            targets = stack.enter_context(Targets(replace(asked, device=store.meant(asked.device)), store))
            for target in targets:
                with targets.attempt():
                    plan = choose(self._asked, self._work, target)
                    break
            for sentence in (*target.sentences, *store.sentences):
                log_once(sentence)
            stack.callback(self._forget)
            refused = None
            try:
                self._prepare(target, plan)
            except VramError as error:
                refused = forgetful(error)
            if refused is not None:
                self._prepare(target, smaller_plan(self._asked, self._work, target, plan, refused))
            self._target, self._ended = target, False
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._turn:
            self._target = None
            self._open.__exit__(kind, error, at)

    def __call__(
        self,
        array: npt.NDArray[Any],
        *,
        out: npt.NDArray[Any] | None = None,
        progress: Callable[[pipeline.Event], None] | None = None,
    ) -> npt.NDArray[Any]:
        """Return the prediction of one array.

        array     of the session's shape, any integer or float dtype with at most as many bytes a voxel as its dtype.
        out       array for the prediction: of `output_shape` and `output_dtype`, strides of any order, no two elements
                  in the same place; None: a new array.
        progress  called with an Event in the calling thread: before the first patch, after each one, and while the last
                  ones are written; an exception that it raises ends the call.

        Returns `out`, or the new array.

        ShapeError when `array` or `out` has another shape or type, or `out` cannot be written element by element;
        VolumeError for values that cannot be used.
        """
        volume = ArrayVolume(array)
        if volume.shape != self._like.shape:
            raise ShapeError(f"the session is for arrays of (c, z, y, x) = {self._like.shape}, not {volume.shape}")
        if volume.dtype.itemsize > self._like.dtype.itemsize:
            raise VolumeError(
                f"the session has memory for voxels of {self._like.dtype.itemsize} bytes ({self._like.dtype}), and the "
                f"array is {volume.dtype}; give {option('dtype', volume.dtype.name)} to the session"
            )
        if out is not None and (out.shape != self.output_shape or out.dtype != self.output_dtype):
            raise ShapeError(
                f"`out` is {out.shape} {out.dtype}, and the prediction is {self.output_shape} {self.output_dtype}"
            )
        if out is not None and (why := why_unwritable(out)):
            raise ShapeError(f"`out` {why}")
        if out is not None and np.may_share_memory(array, out):
            raise ShapeError("`out` shares memory with the array, which is read meanwhile; give separate memory")
        with self._turn:
            self._normalise_by(volume)
            target, plan = self._running()
            self._look_once(volume)
            source = self._source_of(volume)
            written = np.empty(self.output_shape, self.output_dtype) if out is None else out
            result = _Result(written, self._network.output_maps)
            refused = None
            try:
                self._compute(source, result, progress)
            except VramError as error:
                refused = forgetful(error)
            if refused is not None:
                self._forget()
                self._prepare(target, smaller_plan(self._asked, self._work, target, plan, refused))
                self._compute(source, result, progress)
        return result.array

    def _compute(self, source: Source, result: _Result, progress: Callable[[pipeline.Event], None] | None) -> None:
        """Run the plan on one array; an error ends the session if the plan is for a GPU."""
        _, plan = self._running()
        for session in self._sessions.values():
            session.pool.resume()
        self._ended = plan.device == "gpu"  # stays so until the run has ended well
        timings = pipeline.run_workers(workers_of(plan, self._sessions, self._network), source, result, progress)
        self._ended = any(worker.lost for worker in timings.workers)

    def _prepare(self, target: OpenTarget, plan: RunPlan) -> None:
        """Prepare all that a plan needs on a target."""
        log_phase("planned", predicted(plan))
        log_phase("preparing", f"{human_bytes(plan.main.memory.last.prepared)}")
        with wisdom_kept(target.machine, plan.seconds) as wisdom:
            sessions = self._prepared.enter_context(sessions_of(plan, target, self._network, self._weights))
        for sentence in wisdom.sentences:
            log_once(sentence)
        self._plan, self._sessions, self._ended = plan, sessions, False

    def _normalise_by(self, volume: ArrayVolume) -> None:
        """Prepare the network anew where its normalisation follows from each array, and this one has another."""
        target, plan = self._running()
        network = with_statistics(self._network, volume)
        if network != self._network:
            self._forget()
            self._network = network
            self._prepare(target, plan)

    def _forget(self) -> None:
        """Release all that was prepared."""
        self._plan, self._sessions = None, {}
        self._prepared.close()

    @property
    def _work(self) -> Work:
        """Description of the work to plan for, including the memory of a prediction."""
        itemsize, source = self.output_dtype.itemsize, self._source
        held = itemsize * prod(self.output_shape)
        return Work(
            self._network, source.output, self._like.dtype.itemsize, itemsize, area=source.area, held_bytes=held
        )

    def _look_once(self, volume: ArrayVolume) -> None:
        if not self._looked:
            self._looked = True
            for doubt in sample_of(volume).doubts(self._network):
                _log.warning("%s", doubt)

    def _running(self) -> tuple[OpenTarget, RunPlan]:
        """Return the open target and the plan that runs on it; ValueError if the session has ended."""
        if self._ended:
            raise ValueError("the session ended with an error on the GPU; open another")
        if self._target is None or self._plan is None:
            raise ValueError("the session is not open; use it in a `with` block")
        return self._target, self._plan

    def _source_of(self, volume: ArrayVolume) -> Source:
        return Source(volume, roi=None, border=self._border, network=self._network, allow_nan=False)
