"""The arrays in which the results of windows are summed up, and what is done with parts of them, by device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from znnpy.errors import ValuesOverflowError
from znnpy.geometry import Interval
from znnpy.kernels.aligned import aligned_bytes, touch
from znnpy.kernels.cpu.blend import add_weighted
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.messages import option
from znnpy.network import Network
from znnpy.run.window_result import store_result

if TYPE_CHECKING:
    import numpy.typing as npt

Array = Any  # numpy's, or on a GPU those of its Device
Finished = Iterable[tuple[Interval, Array]]  # lines along the second axis, and their sums


class SumArrays(Protocol):
    """Boxes are (z, y, x, maps), with the maps of a voxel next to each other."""

    extra_maps: int  # of the sums, behind the maps of the results

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Allocate sums."""

    def weights(self, weights: npt.NDArray[np.float32]) -> Array:
        """Return the weights of a window as `add` takes them."""

    def take(self, row: Array, kept: Array) -> None:
        """Copy what was kept into a row, in float32. ValuesOverflowError, here or later: float16 did not hold it."""

    def clear(self, sums: Array) -> None:
        """Write zeros."""

    def add(self, sums: Array, result: Array, weights: Array, share: float, member: int, *, counts: bool) -> None:
        """Add `result * weights * share` to the maps of a member of an ensemble, which are as many as the result's.

        counts  it is the first result of its window: sums of weights are added to
        """

    def store(self, finished: Finished, totals: Callable[[], npt.NDArray[np.float32]], out: Array) -> None:
        """Write the network's result of finished sums, which may be overwritten.

        totals  returns the sums of the weights (z, y, x), for all lines
        out     (maps of the result, z, y, x), any strides
        """


class SumsOnCpu:
    """Sums in the memory of the process, see `SumArrays`; all threads take part.

    prepared  called with bytes of memory that were written to for the first time
    """

    extra_maps = 0

    def __init__(self, network: Network, pool: ThreadPool, prepared: Callable[[int], None] | None = None) -> None:
        self._network, self._pool, self._prepared = network, pool, prepared

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        block = aligned_bytes(prod(shape) * dtype.itemsize)
        touch(block, self._pool, self._prepared)
        return block.view(dtype).reshape(shape)

    def weights(self, weights: npt.NDArray[np.float32]) -> Array:
        return weights

    def take(self, row: Array, kept: Array) -> None:
        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(lo, hi):
                np.copyto(row[z], kept[z], casting="unsafe")
                if kept.dtype == np.float16 and not np.isfinite(row[z]).all():
                    raise sums_overflow("ram")

        self._each(piece, len(row))

    def clear(self, sums: Array) -> None:
        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            sums[lo:hi] = 0

        self._each(piece, len(sums))

    def add(self, sums: Array, result: Array, weights: Array, share: float, member: int, *, counts: bool) -> None:
        del counts  # sums of weights are known
        maps = slice(member * result.shape[3], (member + 1) * result.shape[3])

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(lo, hi):
                add_weighted(sums[z, :, :, maps], result[z], weights[z], share)

        self._each(piece, len(result))

    def store(self, finished: Finished, totals: Callable[[], npt.NDArray[np.float32]], out: Array) -> None:
        of_all, first = totals(), None
        for lines, values in finished:
            first = lines.lo if first is None else first
            part = slice(lines.lo - first, lines.hi - first)
            store_result(values, of_all[:, part], out[:, :, part], self._network, self._pool)

    def _each(self, piece: Callable[[int, int, int], None], planes: int) -> None:
        """Call a function for planes; each thread takes its share at once, as a few calls cost less than many."""
        self._pool.each(piece, planes, least=max(1, -(-planes // self._pool.threads)))


def sums_overflow(word: str) -> ValuesOverflowError:
    """Return the error for sums that float16 does not hold; `word` names the option that limits the memory."""
    return ValuesOverflowError(
        "sums of windows exceed float16, in which a row keeps them for the next one within this memory; give "
        f"more memory ({option(word)}), so that they are kept in float32"
    )
