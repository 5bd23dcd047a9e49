"""A session that plans and prepares a network once for each shape, and runs it on any number of arrays."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
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
from znnpy.machine import give_back_memory, process_bytes
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

MOST_SHAPES = 8  # that stay prepared, each with threads of its own
MOST_SOURCES = 64  # shapes of which it is known what is read and predicted


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


@dataclass
class _Prepared:
    """The plan and the memory that are ready for arrays of one shape.

    network  with the normalisation that follows from an array, where it does
    source   of an array of the shape, which is not kept
    held     bytes of a prediction
    open     gives back what is prepared
    """

    network: Network
    source: Source
    plan: RunPlan
    held: int
    sessions: Sessions
    open: ExitStack


class ArraySession:
    """Runs one network on arrays of one shape, or of any. `TrainedNetwork.session` makes it; a context manager.

    Entering makes the plan, prepares the weights and takes the memory; leaving gives it back. In a session for any
    shape the first array of each shape does this. Shapes stay prepared while all of them fit into `ram`, a few at most;
    the one that was not used for longest goes first. On a GPU the latest shape stays.

    Any thread may call it: calls from several threads run one after the other, and each uses all threads of the plan. A
    call that raises an error does not affect the next one, unless the plan is for a GPU: then the session has ended.

    If the GPU refuses memory that the plan needs, a plan that needs less is made, and the call runs again.
    """

    def __init__(
        self,
        network: Network,
        weights: Sequence[ConvWeights],
        shape: tuple[int, ...] | None,
        dtype: npt.DTypeLike,
        border: Border,
        asked: RunOptions,
    ) -> None:
        """Check the options; plan and allocate nothing. The parameters are those of `TrainedNetwork.session`."""
        self._network, self._weights, self._border, self._asked = network, weights, border, asked
        self._given = given_plan(asked)
        self._devices = devices_asked(asked)
        try:
            self._voxel = np.zeros((), dtype)
        except TypeError:
            raise ValueError(f"dtype is a type that numpy knows, such as 'uint8', not {excerpt(repr(dtype))}") from None
        self._sources: dict[tuple[int, ...], Source] = {}  # of arrays of these shapes
        self._finding = threading.Lock()
        self._shape = None if shape is None else self._source_like(shape).volume.shape
        self._turn = threading.Lock()
        self._open = ExitStack()  # the devices
        self._entered = self._ended = False
        self._target: OpenTarget | None = None
        self._kept: OrderedDict[tuple[int, ...], _Prepared] = OrderedDict()  # by shape, the latest last
        self._looked = False  # whether grey values of an array were sampled

    @property
    def plan(self) -> RunPlan:
        """Plan of the session, or for the latest array; ValueError outside of the `with` block and before an array."""
        self._check_open()
        if not self._kept:
            raise ValueError("the session is for arrays of any shape, and none has come yet: call it first")
        return next(reversed(self._kept.values())).plan

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of each prediction, (maps, z, y, x); ValueError in a session for arrays of any shape."""
        return self.output_shape_of(self._only_shape())

    @property
    def output_maps(self) -> tuple[int, ...]:
        """Maps of each output of the network, which follow one another in a prediction."""
        return self._network.output_maps

    @property
    def places(self) -> tuple[Predicted, ...]:
        """Place of each output in the array, and the size of its voxels; ValueError in a session for any shape."""
        return self.places_of(self._only_shape())

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """Type of each prediction: float32, or uint8 for labels and what is above thresholds."""
        return np.dtype(np.uint8 if self._network.result.is_integer else np.float32)

    def output_shape_of(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the shape (maps, z, y, x) of the prediction of an array of a shape."""
        return self._network.output_channels, *self._source_like(shape).output

    def places_of(self, shape: tuple[int, ...]) -> tuple[Predicted, ...]:
        """Return the place of each output in an array of a shape, and the size of its voxels."""
        return self._source_like(shape).outputs

    def __enter__(self) -> Self:
        if self._entered:
            raise ValueError("the session is open already; leave its `with` block first, or make another session")
        self._ended = False
        if self._shape is not None:
            with self._turn:
                self._begin(self._network, self._source_like(self._shape))
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._turn:
            self._entered, self._target = False, None
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
        VolumeError for values that cannot be used. In a session for any shape also what `TrainedNetwork.session` raises
        for a shape.
        """
        volume = ArrayVolume(array)
        if self._shape is not None and volume.shape != self._shape:
            raise ShapeError(f"the session is for arrays of (c, z, y, x) = {self._shape}, not {volume.shape}")
        if volume.dtype.itemsize > self._voxel.itemsize:
            raise VolumeError(
                f"the session has memory for voxels of {self._voxel.itemsize} bytes ({self._voxel.dtype}), and the "
                f"array is {volume.dtype}; give {option('dtype', volume.dtype.name)} to the session"
            )
        network = with_statistics(self._network, volume)
        source = self._source_of(volume, network)
        shape = self._network.output_channels, *source.output
        if out is not None and (out.shape != shape or out.dtype != self.output_dtype):
            raise ShapeError(f"`out` is {out.shape} {out.dtype}, and the prediction is {shape} {self.output_dtype}")
        if out is not None and (why := why_unwritable(out)):
            raise ShapeError(f"`out` {why}")
        if out is not None and np.may_share_memory(array, out):
            raise ShapeError("`out` shares memory with the array, which is read meanwhile; give separate memory")
        with self._turn:
            prepared = self._prepared_for(network, source)
            self._look_once(volume)
            written = np.empty(shape, self.output_dtype) if out is None else out
            result = _Result(written, self._network.output_maps)
            refused = None
            try:
                self._compute(prepared, source, result, progress)
            except VramError as error:
                refused = forgetful(error)
            if refused is not None:
                self._compute(self._with_less(prepared, refused), source, result, progress)
        return result.array

    def _compute(
        self, prepared: _Prepared, source: Source, result: _Result, progress: Callable[[pipeline.Event], None] | None
    ) -> None:
        """Run the plan on one array; an error ends the session if the plan is for a GPU."""
        plan, sessions = prepared.plan, prepared.sessions
        for session in sessions.values():
            session.pool.resume()
        self._ended = plan.device == "gpu"  # stays so until the run has ended well
        timings = pipeline.run_workers(workers_of(plan, sessions, prepared.network), source, result, progress)
        self._ended = any(worker.lost for worker in timings.workers)

    def _prepared_for(self, network: Network, source: Source) -> _Prepared:
        """Return what is ready for the shape of an array; it is made ready if it is not."""
        self._check_open()
        shape, target = source.volume.shape, self._target
        found = self._kept.get(shape)
        if target is None:
            return self._begin(network, source)
        if found is None:
            if target.device == "gpu":
                self._forget(*self._kept)
            work = self._work(network, source)
            staying = sum(_stays(one.plan) for one in self._kept.values())
            staying = min(staying, process_bytes())  # and measured as the process's, although it may be released
            plan = choose(self._asked, replace(work, held_bytes=work.held_bytes - staying), target)
            self._make_room(plan, work.held_bytes)
            return self._prepared_by(plan, network, source, target)
        if found.network != network:  # its normalisation followed from another array
            self._forget(shape)
            return self._prepared_by(found.plan, network, source, target)
        self._kept.move_to_end(shape)
        return found

    def _begin(self, network: Network, source: Source) -> _Prepared:
        """Open the devices, plan for the shape of an array, and prepare it."""
        asked, store = self._devices, CostStore(self._asked.costs, calibrate=self._asked.calibrate)
        if self._given is not None:
            check_here(self._given)
            asked = replace(asked, device=self._given.device)
        with ExitStack() as stack:
            targets = stack.enter_context(Targets(replace(asked, device=store.meant(asked.device)), store))
            for target in targets:
                with targets.attempt():
                    plan = choose(self._asked, self._work(network, source), target)
                    break
            for sentence in (*target.sentences, *store.sentences):
                log_once(sentence)
            stack.callback(lambda: self._forget(*self._kept))
            prepared = self._prepared_by(plan, network, source, target)
            self._target, self._ended = target, False
            self._open = stack.pop_all()
        return prepared

    def _make_room(self, plan: RunPlan, held: int) -> None:
        """Release shapes, the one first that was not used for longest, until a plan fits beside the others."""
        alone = plan.memory.baseline - held  # the process without anything that is prepared, and without predictions
        new = _stays(plan)
        room = plan.limits.ram_bytes - alone - new
        released = False
        while self._kept:
            others = self._kept.values()
            comes = max(_comes(plan, held), *(_comes(one.plan, one.held) for one in others))
            if len(others) < MOST_SHAPES and sum(_stays(one.plan) for one in others) + comes <= room:
                break
            self._forget(next(iter(self._kept)))
            released = True
        if released:
            give_back_memory()

    def _prepared_by(self, plan: RunPlan, network: Network, source: Source, target: OpenTarget) -> _Prepared:
        """Prepare a plan on a target, or a smaller one if the GPU refuses the memory that it needs."""
        refused = None
        try:
            return self._prepare(plan, network, source, target)
        except VramError as error:
            refused = forgetful(error)
        smaller = smaller_plan(self._asked, self._work(network, source), target, plan, refused)
        return self._prepare(smaller, network, source, target)

    def _with_less(self, prepared: _Prepared, refused: VramError) -> _Prepared:
        """Prepare a plan that needs less of the GPU than the one that it refused."""
        network, source, target = prepared.network, prepared.source, self._target
        assert target is not None, "it ran there"
        self._forget(source.volume.shape)
        smaller = smaller_plan(self._asked, self._work(network, source), target, prepared.plan, refused)
        return self._prepare(smaller, network, source, target)

    def _prepare(self, plan: RunPlan, network: Network, source: Source, target: OpenTarget) -> _Prepared:
        """Prepare all that a plan needs on a target."""
        log_phase("planned", predicted(plan))
        log_phase("preparing", f"{human_bytes(plan.main.memory.last.prepared)}")
        with ExitStack() as stack:
            with wisdom_kept(target.machine, plan.seconds) as wisdom:
                sessions = stack.enter_context(sessions_of(plan, target, network, self._weights))
            for sentence in wisdom.sentences:
                log_once(sentence)
            held = self._work(network, source).held_bytes
            like = self._source_like(source.volume.shape)
            made = _Prepared(network, like, plan, held, sessions, stack.pop_all())
        self._kept[source.volume.shape], self._ended = made, False
        return made

    def _forget(self, *shapes: tuple[int, ...]) -> None:
        """Release what is prepared for arrays of these shapes."""
        for shape in shapes:
            self._kept.pop(shape).open.close()

    def _work(self, network: Network, source: Source) -> Work:
        """Return the work to plan for, including the memory of a prediction."""
        itemsize = self.output_dtype.itemsize
        held = itemsize * network.output_channels * prod(source.output)
        return Work(network, source.output, self._voxel.itemsize, itemsize, area=source.area, held_bytes=held)

    def _look_once(self, volume: ArrayVolume) -> None:
        if not self._looked:
            self._looked = True
            for doubt in sample_of(volume).doubts(self._network):
                _log.warning("%s", doubt)

    def _check_open(self) -> None:
        """Raise ValueError if the session has ended, or was not entered."""
        if self._ended:
            raise ValueError("the session ended with an error on the GPU; open another")
        if not self._entered:
            raise ValueError("the session is not open; use it in a `with` block")

    def _only_shape(self) -> tuple[int, ...]:
        if self._shape is None:
            raise ValueError("the session is for arrays of any shape; give one to `output_shape_of` or `places_of`")
        return self._shape

    def _source_like(self, shape: tuple[int, ...]) -> Source:
        """Return the source of an array of a shape in the memory of one voxel; ValueError if it is no shape."""
        if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
            raise ValueError(f"shape is (z, y, x) or (c, z, y, x), positive integers, not {excerpt(repr(shape))}")
        return self._source_of(ArrayVolume(np.broadcast_to(self._voxel, shape)), self._network)

    def _source_of(self, volume: ArrayVolume, network: Network) -> Source:
        """Return the source of an array; ShapeError if network and array do not fit, or outputs differ in size.

        Of graphs it takes tens of milliseconds to find, so that it is found once for each shape.
        """
        found = self._sources.get(volume.shape)
        if found is None:
            like = ArrayVolume(np.broadcast_to(self._voxel, volume.shape))  # the array itself is not kept
            found = Source(like, roi=None, border=self._border, network=network, allow_nan=False)
            found.check_one_size(network, "call znnpy.infer with a path")
            with self._finding:
                self._sources[volume.shape] = found
                while len(self._sources) > MOST_SOURCES:
                    del self._sources[next(iter(self._sources))]
        return found.of(volume, network)


def _stays(plan: RunPlan) -> int:
    """Return the bytes of the process that a prepared plan takes between calls."""
    return plan.memory.last.prepared if plan.device == "cpu" else 0


def _comes(plan: RunPlan, held: int) -> int:
    """Return the bytes of the process that a call takes beside them, with its prediction."""
    return plan.memory.peak - plan.memory.baseline - _stays(plan) + held
