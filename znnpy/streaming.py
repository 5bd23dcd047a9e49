"""A prediction as a stream of finished blocks, for programs that use them while the run goes on.

The run has a thread of its own. Its writer copies a block only when the caller asks for the next one, so that two
blocks at most exist beside the memory of the plan: the one that the caller holds and the one that it is given.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.computation import computed
from znnpy.errors import NetworkFileError, PlanFileError, ShapeError, VramError
from znnpy.messages import excerpt, option
from znnpy.nnunet.names import model_of
from znnpy.opened_run import OpenedRun, named_run, opened_run
from znnpy.option_declarations import function_of
from znnpy.options import InferOptions, StreamOptions
from znnpy.patches import Box
from znnpy.planner.run_plan import RunPlan
from znnpy.run.choice import given_plan
from znnpy.run.pipeline import Event
from znnpy.run.stoppable_thread import Thread, is_of_a_run
from znnpy.volume.sliceable import BlockOutput
from znnpy.volume.source import Predicted

LOOK_SECONDS = 0.2  # between looks for news of the run while a block is awaited

Block = npt.NDArray[Any]


@function_of(StreamOptions)
def stream(asked: StreamOptions) -> BlockStream:
    """Compute a network at every voxel of a volume, and give each block of the result as soon as it is finished.

        for box, block in znnpy.stream("volume.h5", "network.yaml", ram="8G"):
            mine[:, *box.slices] = block

    OPTIONS

    Returns a BlockStream. The boxes partition the output, and come in the order in which the plan computes them. One
    device computes. The process takes no more than the plan says and two blocks.

    What is wrong with the arguments is raised here, and what goes wrong in the run by the loop; the errors are those of
    `infer`.
    """
    _check_one_device(asked)
    if model_of(asked.network) is not None:
        raise NetworkFileError(
            f"{excerpt(asked.network, 60)} is a model of nnU-Net, which gives one image of labels for a whole case; "
            "give it to znnpy.infer"
        )
    handover = _Handover()
    given = {of.name: getattr(asked, of.name) for of in fields(StreamOptions) if of.name != "progress"}
    named = named_run(InferOptions(**given, out=handover, progress=handover.tell))
    with ExitStack() as stack:
        run = stack.enter_context(opened_run(named))
        _check_one_block(run)
        return BlockStream(run, handover, asked.progress, stack.pop_all())


class BlockStream(Iterator[tuple[Box, Block]]):
    """The blocks of a prediction, as `znnpy.stream` returns it: an iterator, and a context manager.

    The run begins when the first block is asked for, and computes at most two blocks ahead of the caller. It ends when
    the last block was given, when the stream is closed or no longer referred to, and at an error. One thread at a time
    may ask for blocks.
    """

    def __init__(
        self, run: OpenedRun, handover: _Handover, progress: Callable[[Event], None] | None, open_files: ExitStack
    ) -> None:
        """Compute nothing yet; the parameters are made by `stream`."""
        maps = run.trained.network.output_maps
        handover.shape, handover.dtype = (sum(maps), *run.source.output), run.dtype
        self._output = _StreamedOutput(
            handover, volume=run.asked.volume, shape=handover.shape, dtype=handover.dtype, maps=maps
        )
        self._places, self._progress, self._handover = run.source.outputs, progress, handover
        self._thread = Thread("stream", partial(_compute, run, self._output, handover))
        # None of these refers to the stream: it ends once the caller forgets it, or when the process ends.
        self._end = weakref.finalize(self, _end, handover, self._thread, open_files)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (maps, z, y, x) of the whole prediction."""
        return self._handover.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the blocks."""
        return self._handover.dtype

    @property
    def places(self) -> tuple[Predicted, ...]:
        """Place of each output of the network in the volume, and the size of its voxels."""
        return self._places

    @property
    def plan(self) -> RunPlan | None:
        """Plan of the run; None until the first block is asked for."""
        header = self._output.header
        return None if header is None else RunPlan.from_json(header.plan)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Box, Block]:
        """Return the next box of the output with its block (maps, z, y, x), which is the caller's from then on."""
        if not self._end.alive:
            raise StopIteration
        try:
            if self._thread.ident is None:
                self._thread.start()
            found = self._handover.take(self._progress)
        except BaseException:
            self.close()
            raise
        if found is None:
            self.close()
            raise StopIteration
        return found

    def close(self) -> None:
        """End the run and close the volume; nothing happens if it has ended."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Closed(Exception):
    """Unwinds the run of a stream that was closed."""


class _Handover:
    """Hands blocks from the writer of a run to the caller of a stream, each when the caller asks for it."""

    def __init__(self) -> None:
        self.shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the prediction, as all that follows; not known yet
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self.given = 0  # blocks
        self._changed = threading.Condition()
        self._wanted = self._ended = self._closed = False
        self._error: BaseException | None = None
        self._event: Event | None = None  # the latest that was not told
        self._box = Box((0, 0, 0), (0, 0, 0))
        self._block: Block | None = None  # the maps that the writer has given of it
        self._finished: tuple[Box, Block] | None = None

    def __setitem__(self, where: tuple[slice, ...], voxels: Block) -> None:
        """Take the maps of an output in a box; the last output completes the block."""
        maps, z, y, x = where
        if maps.start == 0:
            self._await_caller()
            self._box = Box((z.start, y.start, x.start), (z.stop, y.stop, x.stop))
            self._block = np.empty((self.shape[0], *self._box.size), self.dtype)
        assert self._block is not None, "the first output comes first"
        self._block[maps] = voxels
        if maps.stop == self.shape[0]:
            with self._changed:
                self._finished, self._block, self._wanted = (self._box, self._block), None, False
                self.given += 1
                self._changed.notify_all()

    def _await_caller(self) -> None:
        """Wait until the caller asks for a block, and has let go of the one before; _Closed if it never will."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            if self._closed:
                raise _Closed

    def tell(self, event: Event) -> None:
        """Keep an event of the run for the caller; _Closed if there is none any more."""
        with self._changed:
            if self._closed:
                raise _Closed
            self._event = event
            self._changed.notify_all()

    def take(self, progress: Callable[[Event], None] | None) -> tuple[Box, Block] | None:
        """Return the next block, once it is finished; None after the last. An error of the run is raised."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news, LOOK_SECONDS)
                event, self._event = self._event, None
                found, self._finished = self._finished, None
                ended, error = self._ended, self._error
            if event is not None and progress is not None:
                progress(event)
            if found is not None:
                return found
            if error is not None:
                raise error
            if ended:
                return None

    def _has_news(self) -> bool:
        return self._finished is not None or self._event is not None or self._ended

    def end(self, error: BaseException | None = None) -> None:
        """Note that the run has ended, and why."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """End the run when it next has a block or an event, and forget what it had."""
        with self._changed:
            self._closed, self._block, self._finished, self._error = True, None, None, None
            self._changed.notify_all()


class _StreamedOutput(BlockOutput):
    """An output whose blocks the caller has had already when a run begins again."""

    def pause(self) -> None:
        given = self._thing.given if isinstance(self._thing, _Handover) else 0
        if given:
            raise VramError(
                f"the GPU refused memory after {given} blocks were given, and a plan that needs less would give other "
                f"blocks; stream again with a smaller {option('vram')}"
            )
        super().pause()


def _compute(run: OpenedRun, output: _StreamedOutput, handover: _Handover) -> None:
    """Compute a run, whose blocks the caller takes."""
    try:
        computed(run, output, None, time.perf_counter(), in_order=True)
    except _Closed:
        handover.end()
    except BaseException as error:  # raised where the caller waits
        handover.end(error)
    else:
        handover.end()


def _end(handover: _Handover, thread: Thread, open_files: ExitStack) -> None:
    """Stop a run, wait for it, and close its volume.

    A stream in a cycle of references is collected by any thread, also by one that the run waits for.
    """
    handover.close()

    def close() -> None:
        thread.wait()
        open_files.close()

    if is_of_a_run(threading.current_thread()):
        threading.Thread(target=close, name="end of a stream", daemon=True).start()
    else:
        close()


def _check_one_device(asked: StreamOptions) -> None:
    """Raise an error for options and plans with which several devices compute, each its own part of the output."""
    if asked.gpus not in (None, 1, "1"):
        raise ValueError(
            f"{option('gpus', asked.gpus)} compute blocks in no order, and a stream gives them in one: leave it out"
        )
    if asked.mode == "side-by-side":
        raise ValueError(
            f"{option('mode', asked.mode)} computes blocks in no order, and a stream gives them in one: choose "
            f"{option('mode', 'gpu')} or {option('mode', 'cpu')}"
        )
    plan = given_plan(asked)
    if plan is not None and plan.sharing is not None:
        raise PlanFileError(
            "the plan is of CPU and GPUs side by side, which compute blocks in no order, and a stream gives them in "
            f"one: make one with {option('mode', 'gpu')} or {option('mode', 'cpu')}"
        )


def _check_one_block(run: OpenedRun) -> None:
    """Raise ShapeError if the outputs of a network are not of the same voxels, so that no block can hold them."""
    network, (first, *others) = run.trained.network, run.source.outputs
    for tensor, one in zip(network.outputs[1:], others, strict=True):
        if (one.wanted, one.step) != (first.wanted, first.step):
            raise ShapeError(
                f"{network.name} gives {network.names[network.outputs[0] - 1]} and {network.names[tensor - 1]} at "
                "different voxels, which one block cannot hold; name one output in the network file, or give it to "
                "znnpy.infer with a path"
            )
