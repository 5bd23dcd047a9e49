"""The backend of a processor: numpy arrays and a thread pool. A step is done when it was submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError
from znnpy.kernels.aligned import aligned_bytes, touch
from znnpy.kernels.thread_pool import ThreadPool, min_chunk
from znnpy.network import Network, Pool
from znnpy.planner.memory import BUFFERS
from znnpy.planner.plan import Choice, Plan, Tensor
from znnpy.run.arena import host_arena
from znnpy.run.backend import UNTRACED, Voxels, corners, layer_of
from znnpy.run.voxels import load_voxels, store_image

if TYPE_CHECKING:
    from znnpy.kernels.contract import Bytes, Footprint
    from znnpy.run.gpu_backend import GpuBackend
    from znnpy.run.trace import Spans

NOTHING = host_arena(aligned_bytes(0), ())


class CpuBackend:
    """Runs a stage on a processor, see `Backend`."""

    max_in_flight = 0

    def __init__(
        self,
        plan: Plan,
        network: Network,
        pool: ThreadPool,
        trace: Spans | None = None,
        lane: str = "CPU",
        prepared: Callable[[int], None] | None = None,
        lent: GpuBackend | None = None,
    ) -> None:
        self.executor = pool
        self._lent = lent  # computes layers of a host stage that run on the GPU, and holds their scratch
        self._prepared = prepared  # called with bytes that were written to for the first time
        self._trace, self._lane = trace, lane
        self._steps = 0  # begun
        self._plan, self._network = plan, network
        along = network.turned(plan.axis)
        self._windows = [layer.window for layer in along.layers if isinstance(layer, Pool)]
        self._period = along.period
        self._arena = NOTHING

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: Any) -> None:
        self._arena = NOTHING

    def executor_for(self, choice: Choice) -> Any:
        return self.executor if choice.device == "cpu" or self._lent is None else self._lent.executor

    def _on_gpu(self, index: int) -> bool:
        return self._plan.choices[index].device == "gpu"

    def abandon(self) -> None:
        """Do nothing: a processor does not fail alone."""

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> None:
        del footprints
        self._arena = host_arena(self._block(nbytes), tensors)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return self._arena.tensor(name, shape, dtype)

    def scratch(self, step: int) -> dict[str, Any]:
        if self._on_gpu(step) and self._lent is not None:
            return self._lent.scratch(step)
        return self._arena.scratch(step)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        itemsize = np.dtype(dtype).itemsize
        return self._block(itemsize * prod(shape)).view(dtype).reshape(shape)

    def _block(self, nbytes: int) -> Bytes:
        """Allocate memory and touch it, so that a run neither waits for memory nor fails for lack of it later."""
        block = aligned_bytes(nbytes)
        touch(block, self.executor, self._prepared)
        return block

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        del reads, writes  # pages that are never written to cost nothing
        plan, network = self._plan, self._network
        raws = [np.empty((network.input_channels, *plan.patch_in), raw) for _ in range(BUFFERS)]
        return raws, [np.empty((network.output_channels, *plan.patch_out), out) for _ in range(BUFFERS)]

    def begin_step(self, raw: Voxels, out: Voxels | None, *, begins: bool) -> tuple[Voxels, Voxels | None]:
        del begins
        self._steps += 1
        return raw, out

    def end_step(self) -> None:
        """Do nothing: the step is done."""

    def done(self, ticket: Any) -> bool:
        del ticket
        return True

    def wait(self, ticket: Any) -> None:
        del ticket

    def run(self, index: int, step: Any, x: Any, out: Any, scratch: Mapping[str, Any], before: Any | None) -> None:
        carried = () if before is None else (before,)
        copying = (self.executor,) if self._on_gpu(index) else ()  # its threads copy to the GPU and back
        try:
            step.run(x, out, scratch, *carried, *copying)
        except ValuesOverflowError as error:
            raise error.with_context(layer_of(self._plan, self._network, index)) from None

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        if self._trace is None:
            return UNTRACED
        return self._trace.span(self._lane, name, step=self._steps - 1, **facts)

    def clear_carry(self, kept: Any) -> None:
        """Write zeros with all threads, since there may be gigabytes."""
        flat = kept.reshape(-1)

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            flat[lo:hi] = 0

        self.executor.each(piece, flat.size, least=min_chunk(flat.nbytes, flat.size))

    def save_carry(self, kept: Any, x: Any, *, join: bool) -> None:
        carried, planes = kept.shape[1], x.shape[1]

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for old, image in zip(kept[:, :, lo:hi], x[:, :, lo:hi], strict=True):
                if join:
                    image[:carried] = old
                    old[:] = image[planes - carried :]
                    continue
                for plane in range(carried):  # ascending: each plane moves to where nothing is needed any more
                    later = plane + planes
                    old[plane] = old[later] if later < carried else image[later - carried]

        self.executor.each(piece, x.shape[2], least=min_chunk(kept.nbytes, x.shape[2]))

    def load(self, raw: Voxels, x: Any) -> None:
        load_voxels(raw, x, self._network.normalise, self.executor)

    def store(self, fragments: Any, first: int, out: Voxels) -> None:
        period = self._period
        places = corners(self._windows, range(first, first + len(fragments))).tolist()

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for fragment, (z, y, x) in zip(fragments, places, strict=True):
                target = out[:, z :: period[0], y :: period[1], x :: period[2]]
                store_image(fragment[lo:hi], target[:, lo:hi])

        self.executor.each(piece, fragments.shape[1], least=min_chunk(fragments.nbytes, fragments.shape[1]))
