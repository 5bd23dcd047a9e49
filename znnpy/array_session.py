"""A network, planned and prepared once for arrays of one shape, and run on any number of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import PlanFileError, ShapeError, VolumeError
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights, Network
from znnpy.patches import Box
from znnpy.phases import log_once, log_phase
from znnpy.planner.explain import human_bytes, predicted
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import pipeline
from znnpy.run.choice import Wishes, choose, columns_only
from znnpy.run.devices import Site, check_device_words, check_here, site_for
from znnpy.run.session import Session
from znnpy.run.wisdom import wisdom_kept
from znnpy.shapes import FLOAT32
from znnpy.volume.array import ArrayVolume, why_unwritable
from znnpy.volume.sample import sample_of
from znnpy.volume.source import Source
from znnpy.wording import excerpt, option

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Result:
    """An output in memory, for the pipeline to write to."""

    array: npt.NDArray[np.float32]  # (maps, z, y, x)
    done: frozenset[int] = frozenset()

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return self.array.dtype

    def write(self, box: Box, voxels: npt.NDArray[np.float32]) -> None:
        self.array[(slice(None), *box.slices)] = voxels

    def finish_column(self, index: int) -> None:
        """Nothing to record: what is in memory ends with the process."""


class ArraySession:
    """Runs one network on arrays of one shape. `TrainedNetwork.session` makes it; a context manager.

    Entering makes the plan, prepares the weights and takes the memory; leaving gives it back. Any thread may call it:
    calls from several threads take turns, and each uses all threads of the plan. After a call that raised an error, the
    next call works as if it had not been, unless the plan is for a GPU: then the session has ended.
    """

    def __init__(
        self,
        network: Network,
        weights: Sequence[ConvWeights],
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        border: str,
        wishes: Wishes,
    ) -> None:
        """Checks the words; plans and allocates nothing. Parameters are those of `TrainedNetwork.session`."""
        self._network, self._weights, self._border, self._wishes = network, weights, border, wishes
        self._given = wishes.given_plan()
        self._meant = check_device_words(wishes.device, wishes.vram, wishes.precision, wishes.only)
        if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
            raise ValueError(f"shape is (z, y, x) or (c, z, y, x), positive integers, not {excerpt(repr(shape))}")
        try:
            voxel = np.zeros((), dtype)
        except TypeError:
            raise ValueError(f"dtype is a type that numpy knows, such as 'uint8', not {excerpt(repr(dtype))}") from None
        like = ArrayVolume(np.broadcast_to(voxel, shape))  # of that shape, in the memory of one voxel
        self._like, self._source = like, self._source_of(like)
        self._turn = threading.Lock()
        self._open = ExitStack()
        self._session: Session | None = None
        self._ended = False
        self._looked = False  # at the grey values of an array

    @property
    def plan(self) -> Plan:
        """The plan by which arrays are computed; ValueError outside of the `with` block."""
        return self._running().plan

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of each prediction, (maps, z, y, x)."""
        return self._network.output_channels, *self._source.output

    def __enter__(self) -> Self:
        if self._session is not None:
            raise ValueError("the session is open already; leave its `with` block first, or make another session")
        with ExitStack() as stack:
            meant = self._meant
            if self._given is not None:
                check_here(self._given)
                _check_plain(self._given)
                meant = self._given.device
            words = self._wishes
            site, plan = stack.enter_context(site_for(self._make, meant, words.vram, words.precision))
            log_phase("planned", predicted(plan))
            log_phase("preparing", f"{human_bytes(plan.memory.arena + plan.memory.residents)}")
            crew = stack.enter_context(ThreadPool(plan.crew))
            with wisdom_kept(site.machine, plan.seconds) as wisdom:
                session = Session(plan, self._network, self._weights, crew, device=site.gpu)
                stack.enter_context(session)
            for sentence in (*site.sentences, *wisdom.sentences):
                log_once(sentence)
            self._session = session
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._turn:
            self._session = None
            self._open.__exit__(kind, error, at)

    def __call__(
        self,
        array: npt.NDArray[Any],
        *,
        out: npt.NDArray[np.float32] | None = None,
        progress: Callable[[pipeline.Event], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Dense prediction of one array.

        array     of the session's shape, any integer or float dtype with at most as many bytes a voxel as its dtype.
        out       where the prediction goes: float32 of `output_shape`, strides of any order, its elements apart;
                  None: a new array.
        progress  called with an Event in the calling thread: before the first patch, after each one, and while the last
                  ones are written; what it raises ends the call.

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
        if out is not None and (out.shape != self.output_shape or out.dtype != np.float32):
            raise ShapeError(f"`out` is {out.shape} {out.dtype}, and the prediction is {self.output_shape} float32")
        if out is not None and (why := why_unwritable(out)):
            raise ShapeError(f"`out` {why}")
        if out is not None and np.may_share_memory(array, out):
            raise ShapeError("`out` shares memory with the array, which is read meanwhile; give memory of its own")
        with self._turn:
            session = self._running()
            self._look_once(volume)
            result = _Result(np.empty(self.output_shape, np.float32) if out is None else out)
            session.crew.resume()
            self._ended = session.plan.device == "gpu"  # until the run has ended well
            columns = session.plan.cover(self._network)
            pipeline.run(session, session.crew, self._source_of(volume), result, columns, progress)
            self._ended = False
        return result.array

    def _look_once(self, volume: ArrayVolume) -> None:
        if not self._looked:
            self._looked = True
            for doubt in sample_of(volume).doubts(self._network):
                _log.warning("%s", doubt)

    def _running(self) -> Session:
        if self._ended:
            raise ValueError("the session ended with an error on the GPU; open another")
        if self._session is None:
            raise ValueError("the session is not open; use it in a `with` block")
        return self._session

    def _source_of(self, volume: ArrayVolume) -> Source:
        return Source(volume, roi=None, border=self._border, network=self._network, allow_nan=False)

    def _make(self, site: Site) -> Plan:
        """The plan that was given, or the fastest; the memory of a prediction counted."""
        words, network = self._wishes, self._network
        result_bytes = FLOAT32 * prod(self.output_shape)
        if self._given is not None:
            return choose(
                words, network, self._source, np.dtype(np.float32), masks=False, site=site, result_bytes=result_bytes
            )
        limits = site.limits(words.ram, words.threads, words.vram)
        return make_plan(
            network,
            self._source.output,
            site.machine,
            limits,
            itemsize_in=self._like.dtype.itemsize,
            itemsize_out=FLOAT32,
            patch=words.patch,
            only=words.only,
            columns=columns_only(words.cover),
            depth_first=words.depth_first,
            baseline=baseline_bytes() + site.later_bytes + result_bytes,
            rates=site.rates(network, limits),
            **site.words(),
        )


def _check_plain(plan: Plan) -> None:
    """PlanFileError for a plan of several devices, which sessions do not run."""
    if plan.mode not in ("cpu", "gpu") or plan.devices > 1:
        raise PlanFileError(
            f"the plan is of mode {plan.mode} on {plan.devices} device(s), and arrays are computed on one; "
            f"make one with {option('mode', 'cpu')} or {option('mode', 'gpu')}, or use znnpy.infer"
        )
