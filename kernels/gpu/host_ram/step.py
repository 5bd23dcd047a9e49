"""Execute a layer in sub-layers: with three streams and two pinned buffers each way, uploads and downloads overlap.

While a sub-layer is computed, the host copies the next part of the input into a pinned buffer, queues its upload, and
copies the previous outputs out of another. Events order the work on the device; the host waits only for pinned buffers,
and checks the thread pool's stop flag while it does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.errors import ValuesOverflowError
from znnpy.kernels.gpu.host_ram.division import Divided, Visit
from znnpy.kernels.thread_pool import min_chunk
from znnpy.messages import option
from znnpy.shapes import ACTIVATIONS, FLOAT32

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.thread_pool import ThreadPool

    Values = npt.NDArray[np.float32] | npt.NDArray[np.float16]

SOURCE, PEAK_SOURCE = "host_ram/sums.cu", "load_store.cu"
THREADS = 256
WAVES = 16  # blocks per multiprocessor
POLL_SECONDS = 0.0001  # between polls of an event: a wait in CUDA would not notice Ctrl-C
FLOAT16_END = 65520.0  # values from this size on round to infinity
SUM_WORD, OUT_WORD = 2, 3  # indices of peaks, after those of both input buffers


class Resident(NamedTuple):
    """The data kept between runs."""

    kernels: Mapping[tuple[int, int], Any]  # the inner primitive's resident data, by group of input and of output maps
    bias: Any  # (f',) float32 on the device if outputs are sums, else None


class _Task(NamedTuple):
    """One sub-layer in progress."""

    images: tuple[int, int]
    planes: tuple[int, int]  # planes of the output
    visit: Visit
    buffer: int  # input buffer
    slot: int  # output buffer


class _Download(NamedTuple):
    """An output in transit to the host."""

    task: _Task
    pinned: Values


class HostRamStep:
    """A HostStep.

    inner      binds the step of a sub-layer to its resident kernels
    footprint  returns that step's footprint
    """

    def __init__(self, resident: Resident, divided: Divided, inner: Any, footprint: Any, device: Device) -> None:
        self._resident, self._divided, self._device = resident, divided, device
        shape, largest = divided.shape, divided.largest
        self._kind = np.dtype(np.float32 if shape.itemsize == FLOAT32 else np.float16)
        self._steps, self._footprints = {}, {}
        chunks = product(divided.images.sizes, divided.planes.sizes)
        for ((images, _), (planes, _)), (groups, kept) in product(list(chunks), resident.kernels.items()):
            maps = self._maps(*groups)
            sub = divided.sublayer(images, planes, *(hi - lo for lo, hi in maps))
            self._steps[images, planes, *groups] = inner(kept, sub)
            self._footprints[sub] = footprint(sub)
        value = "float" if self._kind == np.float32 else "half"
        names = [f"peak_of<{value}, {width}>" for width in (1, 4)]
        found = device.kernels(PEAK_SOURCE, names)
        self._peak_of = {1: found[names[0]], 4: found[names[1]]}
        self._add = device.kernels(SOURCE, [f"add_part<{value}>"])[f"add_part<{value}>"] if divided.sums else None
        self._pinned_in = [device.pinned((divided.x_bytes,), np.uint8) for _ in range(divided.x_buffers)]
        self._pinned_out = [device.pinned((divided.out_bytes,), np.uint8) for _ in range(divided.download_buffers)]
        self._peaks = device.pinned((OUT_WORD + 1,), np.float32)
        self._uploaded = [device.event() for _ in self._pinned_in]
        self._read = [device.event() for _ in self._pinned_in]  # events after the last use of a part of the input
        self._computed = device.event()
        self._downloaded = [device.event() for _ in range(divided.slots)]
        assert largest.itemsize == self._kind.itemsize

    def run(self, x: Values, out: Values, scratch: Mapping[str, Any], pool: ThreadPool) -> None:
        """Compute the layer; see `HostStep.run`."""
        device = self._device
        streams = device.uploads, device.stream, device.downloads
        started = device.event()
        device.stream.record(started)  # scratch may belong to another step until then
        device.uploads.wait_event(started)
        device.downloads.wait_event(started)
        try:
            device.clear(scratch["host_ram.peaks"])
            self._run(x, out, scratch, pool)
            device.copy_async(
                self._peaks, device.view(scratch["host_ram.peaks"], (OUT_WORD + 1,), np.float32), device.stream
            )
            device.stream.record(started)
            self._await(started, pool)
        finally:  # afterwards no queued work refers to the caller's scratch, even if the run was stopped
            for stream in streams:
                device.synchronize(stream)
        self._check()

    def _run(self, x: Values, out: Values, scratch: Mapping[str, Any], pool: ThreadPool) -> None:
        downloads: deque[_Download] = deque()
        tasks, started = self._tasks(), 0
        first = next(tasks)
        self._upload(first, x, scratch, pool)
        following: _Task | None = first
        while following is not None:
            task, following = following, next(tasks, None)
            if following is not None and following.visit.uploads:
                self._upload(following, x, scratch, pool)
            self._compute(task, scratch)
            if task.visit.last:
                if len(downloads) == len(self._pinned_out):
                    self._finish(downloads.popleft(), out, pool)
                downloads.append(self._download(task, scratch, self._pinned_out[started % len(self._pinned_out)]))
                started += 1
        while downloads:
            self._finish(downloads.popleft(), out, pool)

    def _tasks(self) -> Iterator[_Task]:
        divided = self._divided
        buffers = list(range(divided.x_buffers))  # the older first
        done = 0
        for image, plane in product(range(divided.images.count), range(divided.planes.count)):
            for visit in divided.visits:
                if visit.older:
                    buffers.reverse()
                slot = visit.group_out if divided.division.order == "inputs" else done % divided.slots
                yield _Task(divided.images.of(image), divided.planes.of(plane), visit, buffers[-1], slot)
                done += visit.last

    def _maps(self, group_in: int, group_out: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return self._divided.maps_in.of(group_in), self._divided.maps_out.of(group_out)

    def _upload(self, task: _Task, x: Values, scratch: Mapping[str, Any], pool: ThreadPool) -> None:
        """Copy a part of the input to the pinned buffer of the device buffer, and upload it from there."""
        device, buffer, (p, q) = self._device, task.buffer, task.planes
        (fin, fin_end), _ = self._maps(*task.visit[:2])
        part = x[slice(*task.images), p : q + self._divided.shape.k[0] - 1, :, :, fin:fin_end]
        self._await(self._uploaded[buffer], pool)
        staged = self._pinned_in[buffer][: part.nbytes].view(self._kind).reshape(part.shape)
        _copy(staged, part, pool)
        device.uploads.wait_event(self._read[buffer])
        device.copy_async(self._x(task, scratch), staged, device.uploads)
        device.uploads.record(self._uploaded[buffer])

    def _compute(self, task: _Task, scratch: Mapping[str, Any]) -> None:
        device, divided, (group_in, group_out, uploads, _, first, last) = self._device, self._divided, task.visit
        (i, j), (p, q) = task.images, task.planes
        step, sub = self._steps[j - i, q - p, group_in, group_out], self._sub(task)
        footprint = self._footprints[sub]
        x, out = self._x(task, scratch), self._out(task, scratch)
        words = device.view(scratch["host_ram.peaks"], (OUT_WORD + 1,), np.float32)
        at = [device.address(words) + FLOAT32 * word for word in range(OUT_WORD + 1)]
        device.stream.wait_event(self._uploaded[task.buffer])
        if uploads and footprint.reads_peak:
            device.clear(words[task.buffer : task.buffer + 1])
            self._raise_peak(x, at[task.buffer])
        if first:
            device.stream.wait_event(self._downloaded[task.slot])
        total = self._total(task, scratch, out)
        into = out
        if divided.sums and not (first and total is out):
            into = device.view(scratch["host_ram.part"], sub.out_shape, self._kind)
        peak = at[SUM_WORD if divided.sums else OUT_WORD]
        step.run(
            x,
            into,
            scratch,
            x_peak=at[task.buffer] if footprint.reads_peak else 0,
            out_peak=peak if footprint.raises_peak else 0,
        )
        if not footprint.raises_peak:
            self._raise_peak(into, peak)
        if into is not out:
            self._sum(task, into, total, out, at[OUT_WORD])
        device.stream.record(self._read[task.buffer])
        if last:
            device.stream.record(self._computed)

    def _sum(self, task: _Task, part: Any, total: Any, out: Any, peak: int) -> None:
        assert self._add is not None, "there are sums"
        count, (lo, hi) = int(part.size), self._maps(*task.visit[:2])[1]
        self._add(
            (self._blocks(count),),
            (THREADS,),
            *(
                part,
                total,
                out,
                self._resident.bias[lo:hi],
                count,
                hi - lo,
                int(task.visit.first),
                int(task.visit.last),
            ),
            *(ACTIVATIONS.index(self._divided.shape.activation), np.uint64(peak)),
        )

    def _raise_peak(self, values: Any, peak: int) -> None:
        count, itemsize = int(values.size), self._kind.itemsize
        width = 4 if count % 4 == 0 and self._device.address(values) % (4 * itemsize) == 0 else 1
        blocks = self._blocks(count // width)
        self._peak_of[width]((blocks,), (THREADS,), values, count, 1, count, np.uint64(peak))

    def _blocks(self, threads: int) -> int:
        return max(1, min(-(-threads // THREADS), WAVES * self._device.gpu.multiprocessors))

    def _download(self, task: _Task, scratch: Mapping[str, Any], pinned: Any) -> _Download:
        device, source = self._device, self._out(task, scratch)
        target = pinned[: source.nbytes].view(self._kind).reshape(source.shape)
        device.downloads.wait_event(self._computed)
        device.copy_async(target, source, device.downloads)
        device.downloads.record(self._downloaded[task.slot])
        return _Download(task, target)

    def _finish(self, download: _Download, out: Values, pool: ThreadPool) -> None:
        task = download.task
        self._await(self._downloaded[task.slot], pool)
        _, maps = self._maps(*task.visit[:2])
        _copy(out[slice(*task.images), slice(*task.planes), :, :, slice(*maps)], download.pinned, pool)

    def _sub(self, task: _Task) -> Any:
        (i, j), (p, q) = task.images, task.planes
        return self._divided.sublayer(j - i, q - p, *(hi - lo for lo, hi in self._maps(*task.visit[:2])))

    def _x(self, task: _Task, scratch: Mapping[str, Any]) -> Any:
        offset = task.buffer * self._divided.x_bytes
        return self._device.view(scratch["host_ram.x"], self._sub(task).in_shape, self._kind, offset=offset)

    def _out(self, task: _Task, scratch: Mapping[str, Any]) -> Any:
        offset = task.slot * self._divided.out_bytes
        return self._device.view(scratch["host_ram.out"], self._sub(task).out_shape, self._kind, offset=offset)

    def _total(self, task: _Task, scratch: Mapping[str, Any], out: Any) -> Any:
        """Return the float32 array of a sum: the output itself if that is float32."""
        divided, shape = self._divided, self._sub(task).out_shape
        if not divided.totals:
            return out
        offset = (
            (task.visit.group_out if divided.totals > 1 else 0) * divided.out_bytes * FLOAT32 // self._kind.itemsize
        )
        return self._device.view(scratch["host_ram.totals"], shape, np.float32, offset=offset)

    def _await(self, event: Any, pool: ThreadPool) -> None:
        """Wait for an event; raise Stopped if the pool is stopped meanwhile."""
        with self._device.calling("a layer in the memory of the host"):
            while not event.done:
                pool.check()
                time.sleep(POLL_SECONDS)
        pool.check()

    def _check(self) -> None:
        """Raise ValuesOverflowError if a result, or a partial sum, exceeds its stored type."""
        end = FLOAT16_END if self._kind == np.float16 else np.inf
        for peak in self._peaks[SUM_WORD:].tolist():
            if peak < end:
                continue
            wider = f"choose {option('precision', 'tf32')}, or " if self._kind == np.float16 else ""
            raise ValuesOverflowError(
                f"a result of {self._divided.shape} became {peak:.6g}, beyond {self._kind}; "
                f"{wider}check the weights and that the input is normalised as in training"
            )


def _copy(target: Values, source: Values, pool: ThreadPool) -> None:
    """Copy row by row with all threads of the pool: (images, planes, rows, ...) of any strides."""
    _, planes, rows = source.shape[:3]

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        while lo < hi:
            plane, row = divmod(lo, rows)
            end = min(rows, row + hi - lo)
            at = (*divmod(plane, planes), slice(row, end))
            target[at] = source[at]
            lo += end - row

    count = len(source) * planes * rows
    pool.each(piece, count, least=min_chunk(source.nbytes, count))
