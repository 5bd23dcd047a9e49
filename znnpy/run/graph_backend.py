"""The protocol between the session of a graph and the device that runs it, and the backend of a processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.kernels.aligned import aligned_bytes, touch
from znnpy.kernels.thread_pool import ThreadPool, min_chunk
from znnpy.network import Normalise
from znnpy.planner.memory import BUFFERS
from znnpy.planner.plan import Tensor
from znnpy.run.arena import Arena, host_arena
from znnpy.run.backend import UNTRACED, Voxels
from znnpy.run.voxels import load_voxels, store_voxels

if TYPE_CHECKING:
    from znnpy.kernels.contract import Footprint
    from znnpy.run.trace import Spans


class Arrays(NamedTuple):
    """Arrays that are to be made."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class GraphBackend(Protocol):
    """A processor or a GPU that runs the operations of a graph. A context manager.

    Its arrays are numpy's on the host, and those of its Device on a GPU. On a GPU everything except `wait` and
    `buffers` is queued: a call returns before the work is done.
    """

    @property
    def executor(self) -> Any:
        """The ThreadPool or the Device that primitives prepare and bind for."""

    @property
    def max_in_flight(self) -> int:
        """Number of steps that may be submitted and not waited for when the next one is."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *cause: Any) -> None: ...

    def abandon(self) -> None:
        """Ask nothing of a device that failed any more."""

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> Arena:
        """Allocate the arena for operations with these footprints, once their weights are prepared."""

    def block(self, count: int, dtype: npt.DTypeLike) -> Any:
        """Allocate a flat array beside the arena."""

    def move(self, target: Any, source: Any) -> None:
        """Copy a flat array; where the two overlap, `target` begins before `source`."""

    def clear(self, x: Any) -> None:
        """Write zeros to an array in C order."""

    def copied(self, x: Any, store: Any) -> Any:
        """Return a copy of an array in C order, in the bytes of `store`."""

    def load(self, raw: Any, x: Any) -> None:
        """Normalise raw voxels (c, z, y, x) of any real dtype and strides into `x` (z, y, x, c)."""

    def store(self, x: Any, out: Any) -> None:
        """Write voxels (z, y, x, maps) to `out` (maps, z, y, x), in the dtype of the output, any strides."""

    def run(
        self, index: int, step: Any, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], more: Sequence[Any]
    ) -> None:
        """Run the bound primitive of operation `index`; `more`: its second output, if it has one.

        ValuesOverflowError is raised here or by `wait`.
        """

    def repeated(self, key: int, work: Callable[[], None]) -> bool:
        """Run operations that have run before on the same arrays; return whether `work` was called for it.

        key  names the operations
        """

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        """Trace what happens within as one span, between `begin_step` and `end_step`."""

    def buffers(
        self, raw: Arrays, out: Arrays, *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return input and output arrays for `begin_step`, in the memory of the host.

        reads, writes  steps of the run, and those with output: there are no more arrays than are useful
        """

    def begin_step(self, raw: Voxels, out: Voxels | None, *, begins: bool) -> tuple[Any, Any | None]:
        """Begin a step; return the arrays that `load` reads and `store` writes."""

    def end_step(self) -> Any:
        """End the step that `begin_step` began; return a ticket for `wait`."""

    def done(self, ticket: Any) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self, ticket: Any) -> None:
        """Wait until the output of the step is in its array. ValuesOverflowError names the node."""


class GraphOnCpu:
    """Runs the operations of a graph on a processor, see `GraphBackend`. A step is done when it was submitted.

    prepared  called with bytes of memory that were written to for the first time
    """

    max_in_flight = 0

    def __init__(
        self,
        pool: ThreadPool,
        normalise: Normalise | None,
        trace: Spans | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        self.executor = pool
        self._normalise, self._trace, self._lane, self._prepared = normalise, trace, lane or "CPU", prepared
        self._steps = 0  # begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: Any) -> None:
        """Do nothing: arrays end with those that refer to them."""

    def abandon(self) -> None:
        """Do nothing: a processor does not fail alone."""

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> Arena:
        del footprints
        return host_arena(self.block(nbytes, np.uint8), tensors)

    def block(self, count: int, dtype: npt.DTypeLike) -> Any:
        """Allocate memory and touch it, so that a run neither waits for memory nor fails for lack of it later."""
        block = aligned_bytes(count * np.dtype(dtype).itemsize)
        touch(block, self.executor, self._prepared)
        return block.view(dtype)

    def move(self, target: Any, source: Any) -> None:
        if np.may_share_memory(target, source):
            distance = (source.ctypes.data - target.ctypes.data) // source.itemsize
            for first, end in without_overlap(target.size, distance):
                self.move(target[first:end], source[first:end])
            return

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            target[lo:hi] = source[lo:hi]

        self.executor.each(piece, source.size, least=min_chunk(source.nbytes, source.size))

    def clear(self, x: Any) -> None:
        x[...] = 0

    def copied(self, x: Any, store: Any) -> Any:
        copy = store[: x.nbytes].view(x.dtype).reshape(x.shape)
        np.copyto(copy, x)
        return copy

    def load(self, raw: Any, x: Any) -> None:
        load_voxels(raw, x, self._normalise, self.executor)

    def store(self, x: Any, out: Any) -> None:
        store_voxels(x, out, self.executor)

    def run(
        self, index: int, step: Any, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], more: Sequence[Any]
    ) -> None:
        del index
        step.run(inputs, out, scratch, *more)

    def repeated(self, key: int, work: Callable[[], None]) -> bool:
        del key  # nothing is recorded on a processor
        work()
        return True

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        if self._trace is None:
            return UNTRACED
        return self._trace.span(self._lane, name, step=self._steps - 1, **facts)

    def buffers(
        self, raw: Arrays, out: Arrays, *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        del reads, writes  # pages that are never written to cost nothing
        raws, outs = ([np.empty(each.shape, each.dtype) for _ in range(BUFFERS)] for each in (raw, out))
        return raws, outs

    def begin_step(self, raw: Voxels, out: Voxels | None, *, begins: bool) -> tuple[Voxels, Voxels | None]:
        del begins
        self._steps += 1
        return raw, out

    def end_step(self) -> None:
        """Do nothing: the step is done."""

    def done(self, ticket: Any) -> bool:
        """Return True: a step is done when it was submitted."""
        del ticket
        return True

    def wait(self, ticket: Any) -> None:
        """Do nothing: a step is done when it was submitted."""
        del ticket


def without_overlap(size: int, distance: int) -> Iterable[tuple[int, int]]:
    """Yield parts of an array that do not overlap their sources, which begin `distance` values later."""
    for first in range(0, size, distance) if distance else ():
        yield first, min(first + distance, size)
