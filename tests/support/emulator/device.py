"""A device that is not there: kernels compiled as C++ (emulator.hpp) over arrays of numpy, with the API of `Device`.

Work on a stream is done only when somebody waits for it, as late as a real device might: an event that nobody waits
for, or an array that is looked at without `get`, shows. Memory holds NaN when it is allocated; a page that nobody may
touch follows each array, and bytes between the two are watched.
"""

from __future__ import annotations

import ctypes
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tests.support.emulator.compiling import ONE_LAUNCH, Launch, compiled
from tests.support.emulator.libraries import NumpyLibraries
from znnpy.kernels.gpu.checks import check_view, copy_rows, kernel_arguments
from znnpy.kernels.gpu.cuda_runtime import refusal
from znnpy.kernels.gpu.device import ALIGNMENT
from znnpy.machine import Gpu

POISON = 0xFF  # every byte of it: NaN in float32, float16 and complex64, -1 in integers
MOST_THREADS = 1024  # of a block
MOST_BLOCKS = (2**31 - 1, 65535, 65535)

EMULATED_GPU = Gpu(
    name="emulated",
    capability=(9, 0),
    multiprocessors=132,
    memory_bytes=2**30,
    l2_bytes=50 << 20,
    shared_block_bytes=227 << 10,
    shared_multiprocessor_bytes=228 << 10,
    bandwidth=3.35e12,
    driver=13000,
    versions=(("emulator", "1"),),
)
SMALL_GPU = Gpu(  # what a block of an RTX 3090 or 4090 may have
    name="emulated, small",
    capability=(8, 6),
    multiprocessors=82,
    memory_bytes=2**29,
    l2_bytes=6 << 20,
    shared_block_bytes=99 << 10,
    shared_multiprocessor_bytes=100 << 10,
    bandwidth=936e9,
    driver=13000,
    versions=(("emulator", "1"),),
)

_LIBC = ctypes.CDLL(None, use_errno=True)


class EmulatedEvent:
    """A mark in a stream; `timing`: it knows when it was reached."""

    def __init__(self, *, timing: bool = False) -> None:
        self.mark: tuple[EmulatedStream, int] | None = None
        self.timing = timing
        self.reached: float | None = None  # seconds of `time.perf_counter()`

    def record(self, stream: EmulatedStream) -> None:
        stream.record(self)

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark[0].work_off(self.mark[1])

    @property
    def done(self) -> bool:
        """Return whether it was reached; each question lets the stream do one thing more, as time would."""
        if self.mark is None:
            return True
        stream, number = self.mark
        stream.work_off(min(number, stream.finished + 1))
        return stream.finished >= number


class EmulatedRecording:
    """Work that was recorded."""

    def __init__(self, stream: EmulatedStream, work: Sequence[Callable[[], None]]) -> None:
        self._stream, self._work = stream, work

    def play(self) -> None:
        for one in self._work:
            self._stream.queue(one)


class EmulatedStream:
    """Work in order, done when somebody waits."""

    def __init__(self) -> None:
        self.ptr = 0
        self.queued = self.finished = 0
        self.recording: list[Callable[[], None]] | None = None  # what is queued goes there, while something is recorded
        self._work: deque[Callable[[], None]] = deque()
        self._timed: deque[EmulatedEvent] = deque()  # that were not reached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def queue(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
            return
        with ONE_LAUNCH:
            self._work.append(work)
            self.queued += 1

    def record(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        assert self.recording is None, "recorded work marks no events"
        event = event or EmulatedEvent()
        with ONE_LAUNCH:
            event.mark, event.reached = (self, self.queued), None
            if event.timing:
                self._timed.append(event)
                self._time(self.finished)
        return event

    def wait_event(self, event: EmulatedEvent) -> None:
        mark = event.mark
        if mark is not None:
            self.queue(lambda: mark[0].work_off(mark[1]))

    def synchronize(self) -> None:
        assert self.recording is None, "nobody waits for work that is recorded"
        self.work_off(self.queued)

    @property
    def done(self) -> bool:
        return self.finished >= self.queued

    def work_off(self, until: int) -> None:
        """Do what was queued, up to the thing of number `until`."""
        with ONE_LAUNCH:
            while self.finished < until:
                self.finished += 1
                self._work.popleft()()
                self._time(self.finished)

    def _time(self, finished: int) -> None:
        """Events behind what was done were reached now, if they were not before."""
        while self._timed and self._timed[0].mark is not None and self._timed[0].mark[1] <= finished:
            self._timed.popleft().reached = time.perf_counter()


class EmulatedKernel:
    """One kernel of a compiled library."""

    def __init__(self, device: EmulatedDevice, name: str, library: ctypes.CDLL, number: int) -> None:
        self.name = name
        self.registers = self.local_bytes = 0
        self._device = device
        self._library = library
        self._number = number
        self._parameters = library.znnpy_parameters(number).decode().split()

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *arguments: Any,
        shared: int = 0,
        stream: EmulatedStream | None = None,
    ) -> None:
        ready = kernel_arguments(self.name, arguments, self._device.address)
        self._check(ready)
        sizes = [(*size, 1, 1)[:3] for size in (grid, block)]
        call = f"launch of {self.name} on grid {grid} of blocks {block}"
        most = self._device.gpu.shared_block_bytes
        if prod(sizes[1]) > MOST_THREADS or any(size < 1 for size in (*sizes[0], *sizes[1])) or shared > most or any(
            size > limit for size, limit in zip(sizes[0], MOST_BLOCKS, strict=True)
        ):  # fmt: skip
            raise refusal(call, "CUDA_ERROR_INVALID_VALUE: invalid argument", shared)
        where = Launch((ctypes.c_uint * 3)(*sizes[0]), (ctypes.c_uint * 3)(*sizes[1]), shared)
        held = (ready, arguments)  # arrays live until the kernel has run, as memory would

        def run() -> None:
            words = [np.array(value) for value in held[0]]
            pointers = (ctypes.c_void_p * max(1, len(words)))(*(word.ctypes.data for word in words))
            fault = self._library.znnpy_launch(self._number, ctypes.byref(where), pointers)
            if fault is not None:
                raise refusal(call, f"the emulator stopped it in {fault.decode()}")
            self._device.check_margins(call)

        (self._device.stream if stream is None else stream).queue(run)

    def _check(self, values: Sequence[np.generic]) -> None:
        """TypeError unless each value is of its parameter's kind and size; a device would read other bytes."""
        if len(values) != len(self._parameters):
            raise TypeError(f"{self.name} takes {len(self._parameters)} arguments, not {len(values)}")
        for place, (value, parameter) in enumerate(zip(values, self._parameters, strict=True)):
            kind, nbytes = parameter[0], int(parameter[1:])
            fits = {
                "p": value.dtype.kind in "iu",
                "i": value.dtype.kind in "iub",
                "f": value.dtype.kind == "f",
                "v": True,
            }
            if not fits[kind] or value.dtype.itemsize != nbytes:
                words = {"p": "a pointer", "i": "an integer", "f": "a floating-point number", "v": "a value"}
                raise TypeError(
                    f"argument {place} of {self.name} is {value.dtype}; it takes {words[kind]} of {nbytes} bytes"
                )


class _Pages(mmap.mmap):
    """Memory of one allocation, with a page on each side that nobody may touch."""


class EmulatedDevice:
    """`Device` over numpy: see there. Its memory is as large as `gpu` says."""

    def __init__(self, gpu: Gpu = EMULATED_GPU, number: int = 0) -> None:
        self.gpu = gpu
        self.number = number
        self.abandoned = False
        self.stream, self.uploads, self.downloads = EmulatedStream(), EmulatedStream(), EmulatedStream()
        self._held: dict[int, tuple[int, str, weakref.ref[_Pages]]] = {}  # address -> bytes, what for, memory
        self._freeing: dict[int, weakref.finalize[..., Any]] = {}
        self._modules: dict[tuple[Any, ...], dict[str, EmulatedKernel]] = {}
        self.libraries = NumpyLibraries(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon(self) -> None:
        self.abandoned = True

    def close(self) -> None:
        if self.abandoned:
            return
        self.synchronize()
        self._held.clear()

    @property
    def allocated(self) -> int:
        return sum(nbytes for nbytes, _, _ in self._held.values())

    @contextmanager
    def calling(self, call: str, nbytes: int | None = None) -> Iterator[None]:
        """Pass on refusals, which are DeviceErrors already."""
        del call, nbytes
        yield

    def allocate(self, nbytes: int, what: str) -> npt.NDArray[np.uint8]:
        if nbytes > self.free_bytes():
            free = self.free_bytes()
            raise refusal(f"cudaMalloc for {what}", "cudaErrorMemoryAllocation: out of memory", nbytes, free)
        page = mmap.PAGESIZE
        rounded = -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        inner = -(-rounded // page) * page
        pages = _Pages(-1, inner + 2 * page)
        whole = np.frombuffer(pages, np.uint8)
        for guard in (whole.ctypes.data, whole.ctypes.data + page + inner):
            if _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page + inner - rounded
        whole[page : page + inner] = POISON
        array = whole[start : start + nbytes]
        address = whole.ctypes.data + start
        self._held[address] = (nbytes, what, weakref.ref(pages))
        self._freeing[address] = weakref.finalize(pages, self._held.pop, address, None)
        self._freeing[address].atexit = False
        return array

    def free(self, *arrays: npt.NDArray[Any]) -> None:
        self.synchronize(self.stream)
        for array in arrays:
            address = self.address(array)
            self._held.pop(address, None)
            self._freeing.pop(address).detach()

    def view(
        self,
        data: npt.NDArray[Any],
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        *,
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        check_view(data.nbytes, shape, kind.itemsize, offset, strides)
        return np.ndarray(
            tuple(shape), kind, buffer=data, offset=offset, strides=None if strides is None else tuple(strides)
        )

    def put(self, host: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
        array = self.view(self.allocate(host.nbytes, what), host.shape, host.dtype)
        self.stream.synchronize()
        array[...] = host
        return array

    def get(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.synchronize(self.stream)
        return array.copy()

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        array = np.empty(tuple(shape), dtype)
        array.reshape(-1).view(np.uint8)[:] = POISON
        return array

    def kernels(self, source: str, names: Sequence[str], **defines: int | str) -> dict[str, EmulatedKernel]:
        key = (source, tuple(names), tuple(sorted(defines.items())))
        if key not in self._modules:
            library = compiled(*key)
            self._modules[key] = {
                name: EmulatedKernel(self, name, library, number) for number, name in enumerate(names)
            }
        return self._modules[key]

    def address(self, array: npt.NDArray[Any]) -> int:
        return array.ctypes.data

    def holds(self, array: object) -> bool:
        if not isinstance(array, np.ndarray):
            return False
        address = self.address(array)
        return any(start <= address <= start + nbytes for start, (nbytes, _, _) in list(self._held.items()))

    def copy_async(self, target: npt.NDArray[Any], source: npt.NDArray[Any], stream: EmulatedStream) -> None:
        copy_rows(target, source)
        stream.queue(lambda: np.copyto(target, source))

    def clear(self, array: npt.NDArray[Any], stream: EmulatedStream | None = None) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"clearing {array.shape} with strides {array.strides}: only arrays in C order")
        (self.stream if stream is None else stream).queue(lambda: array.fill(0))

    def recorded(self, work: Callable[[], object]) -> EmulatedRecording:
        self.stream.recording = []
        try:
            work()
            return EmulatedRecording(self.stream, self.stream.recording)
        finally:
            self.stream.recording = None

    def event(self, *, timing: bool = False) -> EmulatedEvent:
        return EmulatedEvent(timing=timing)

    def seconds_between(self, start: EmulatedEvent, end: EmulatedEvent) -> float:
        if not (start.timing and end.timing):
            raise refusal("cudaEventElapsedTime", "cudaErrorInvalidResourceHandle: an event without timing")
        if start.reached is None or end.reached is None:
            raise refusal("cudaEventElapsedTime", "cudaErrorNotReady: device not ready")
        return float(np.float32(1e3 * (end.reached - start.reached))) / 1e3  # as CUDA says it

    def elapsed(self, work: Callable[[], object], repeats: int = 1) -> list[float]:
        seconds = []
        for _ in range(repeats):
            self.synchronize(self.stream)
            start = time.perf_counter()
            work()
            self.synchronize(self.stream)
            seconds.append(time.perf_counter() - start)
        return seconds

    def synchronize(self, stream: EmulatedStream | None = None) -> None:
        for each in (self.stream, self.uploads, self.downloads) if stream is None else (stream,):
            each.synchronize()

    def free_bytes(self) -> int:
        return self.gpu.memory_bytes - self.allocated

    def check_margins(self, call: str) -> None:
        """DeviceError if `call` wrote bytes beside an array, on its own pages."""
        for address, (nbytes, what, pages) in list(self._held.items()):
            memory = pages()
            if memory is None:
                continue
            whole = np.frombuffer(memory, np.uint8)
            start = address - whole.ctypes.data
            before, after = whole[mmap.PAGESIZE : start], whole[start + nbytes : len(whole) - mmap.PAGESIZE]
            if (before != POISON).any() or (after != POISON).any():
                raise refusal(call, f"it wrote beside the {nbytes} bytes of {what}")
