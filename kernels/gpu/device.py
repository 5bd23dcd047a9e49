"""Control one CUDA device: memory, streams, copies and kernels.

Primitives and sessions use only `Device` and `Kernel`. Arrays are cupy.ndarray; callers use only attributes that numpy
arrays have too (shape, strides, dtype, slices, views) and methods of `Device`, so that the tests' emulator, whose
arrays are numpy's, runs the same code. Every refusal of CUDA becomes a DeviceError with the call, its code and the
bytes.

Tested  tests/kernels/gpu/test_device.py, on the emulator and on a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from znnpy.errors import DeviceError
from znnpy.kernels.gpu.checks import c_strides, check_view, copy_rows, kernel_arguments
from znnpy.kernels.gpu.cuda_runtime import describe, dotted, import_cupy, refusal
from znnpy.kernels.gpu.kernel_source import compiler_options, describe_kernels, source_text
from znnpy.kernels.gpu.libraries import CudaLibraries, Libraries
from znnpy.machine import Gpu

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = Any  # cupy.ndarray, or numpy.ndarray under the emulator

ALIGNMENT = 256  # bytes, of allocations
_STATIC_SHARED = 48 << 10  # bytes of dynamic shared memory that a kernel may have without an attribute
_NO_DEVICE = 100  # cudaErrorNoDevice
_OLD_DRIVER = 35  # cudaErrorInsufficientDriver: also returned if there is no driver at all
_OLDEST = (8, 0)  # compute capability that the kernels are written for: Ampere
_LOG_LINES = 12  # shown of a compiler log


def find_gpu() -> Gpu:
    """Return the first CUDA device that this process may see (CUDA_VISIBLE_DEVICES decides).

    Raises DeviceError as `find_gpus` does.
    """
    return find_gpus()[0]


def find_gpus() -> dict[int, Gpu]:
    """Return the CUDA devices that this process may see and that are of the first one's kind, by number.

    Plans are made for one kind. Raises DeviceError, in one sentence: CuPy or CUDA's compiler is not installed, there is
    no driver, the driver is older than CuPy's CUDA, there is no device, or it is too old.
    """
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    driver, library = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        raise DeviceError("this machine has no NVIDIA driver: install one, or run on the CPU")
    if driver // 1000 < library // 1000:  # within one major version, any driver runs any library
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {dotted(driver)} and CuPy needs CUDA {library // 1000}: "
            "install a newer driver, or run on the CPU"
        )
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if error.status not in (_NO_DEVICE, _OLD_DRIVER):
            raise refusal("cudaGetDeviceCount", error) from error
        devices = 0
    if devices == 0:
        raise DeviceError(
            "the NVIDIA driver shows this process no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES, "
            "or run on the CPU"
        )
    gpu = describe(cupy, driver, library, 0)
    if gpu.capability < _OLDEST:
        major, minor = gpu.capability
        raise DeviceError(
            f"the GPU, a {gpu.name}, has compute capability {major}.{minor}, and the kernels need "
            f"{_OLDEST[0]}.{_OLDEST[1]} (Ampere) and newer: run on the CPU"
        )
    return {number: gpu for number in range(devices) if describe(cupy, driver, library, number) == gpu}


class Kernel:
    """One compiled kernel of one device."""

    def __init__(self, device: Device, name: str, raw: Any) -> None:
        self.name = name
        self._device = device
        self._raw = raw
        self._shared = _STATIC_SHARED  # the most dynamic shared memory it may have at present

    @property
    def registers(self) -> int:
        """Registers of one thread."""
        return int(self._raw.num_regs)

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of one thread: spilled registers and arrays with run-time indices."""
        return int(self._raw.local_size_bytes)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any, shared: int = 0, stream: Any = None
    ) -> None:
        """Queue the kernel; see `kernel_arguments` for the types of arguments.

        grid, block  up to three sizes, x first.
        shared       bytes of dynamic shared memory.
        stream       None: the device's `stream`.

        Raises DeviceError if the launch is refused; errors during execution are raised by the next call that waits.
        """
        ready = kernel_arguments(self.name, arguments, self._device.address)
        call = f"launch of {self.name} on grid {grid} of blocks {block}"
        with self._device.calling(call, shared):
            if shared > self._shared:
                self._raw.max_dynamic_shared_size_bytes = shared
                self._shared = shared
            self._raw(grid, block, ready, shared_mem=shared, stream=self._device.stream if stream is None else stream)


class Recording:
    """Work of one device that was recorded, and is queued at once: short kernels wait less for each other."""

    def __init__(self, device: Device, graph: Any) -> None:
        self._device, self._graph = device, graph

    def play(self) -> None:
        """Queue the work on the device's `stream`."""
        with self._device.calling("playing recorded work"):
            self._graph.launch(self._device.stream)


class Device:
    """An open device. Closing it waits for its work and frees all its allocations, even if arrays still refer to them.

    stream     runs kernels by default; no stream here synchronises with CUDA's default stream
    uploads    runs copies to the device in parallel
    downloads  runs copies from the device
    number     index among the devices that the process may see; any thread may use the device
    libraries  cuFFT and cuDNN on it
    allocated  bytes from `allocate` and `put` that are still held
    abandoned  the device failed: closing it makes no CUDA calls and frees nothing
    """

    def __init__(self, gpu: Gpu, number: int = 0) -> None:
        self.gpu = gpu
        self.number = number
        self.abandoned = False
        self._cupy = import_cupy()
        runtime = self._cupy.cuda.runtime
        self._refusals = (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        self._modules: dict[tuple[Any, ...], dict[str, Kernel]] = {}
        self._held: dict[int, tuple[int, weakref.finalize[..., Any]]] = {}  # address -> bytes, finalizer
        self._lock = threading.Lock()
        self.libraries: Libraries = CudaLibraries(self)
        with self.calling("opening the device"):
            self.stream, self.uploads, self.downloads = (self._cupy.cuda.Stream(non_blocking=True) for _ in range(3))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all work, then free all memory. May be called twice."""
        if self.abandoned:
            return
        with self.calling("cudaDeviceSynchronize at the end"):
            self._cupy.cuda.runtime.deviceSynchronize()
        self._modules.clear()
        for address in list(self._held):
            self._free(address)
        with self.calling("cudaFree at the end"):
            self._cupy.get_default_memory_pool().free_all_blocks()  # memory that libraries took through CuPy

    def abandon(self) -> None:
        """Mark the device as failed: CUDA would return the error to every call, so none is made from now on."""
        self.abandoned = True

    @property
    def allocated(self) -> int:
        with self._lock:
            return sum(nbytes for nbytes, _ in self._held.values())

    @contextmanager
    def calling(self, call: str, nbytes: int | None = None) -> Iterator[None]:
        """Raise a DeviceError that names `call` for every CUDA error in this block; the block runs on this device."""
        try:
            self._cupy.cuda.runtime.setDevice(self.number)  # a setting per thread: others may use other devices
            yield
        except self._refusals as error:
            raise refusal(call, error, nbytes) from error

    def allocate(self, nbytes: int, what: str) -> Array:
        """Return `nbytes` uint8 aligned to ALIGNMENT, contents undefined. Freed with the last array that views them.

        what  purpose, for messages.

        Raises DeviceError if the device has less.
        """
        cuda = self._cupy.cuda
        try:
            cuda.runtime.setDevice(self.number)
            address = cuda.runtime.malloc(max(1, nbytes))
        except self._refusals as error:
            raise refusal(f"cudaMalloc for {what}", error, nbytes, self.free_bytes()) from error
        owner = _Owner()
        freeing = weakref.finalize(owner, self._free, address)
        freeing.atexit = False  # the process frees everything at exit anyway
        with self._lock:
            self._held[address] = nbytes, freeing
        memory = cuda.UnownedMemory(address, max(1, nbytes), owner, self.number)
        return self._cupy.ndarray((nbytes,), np.uint8, memptr=cuda.MemoryPointer(memory, 0))

    def free(self, *arrays: Array) -> None:
        """Free memory from `allocate` at once, even if arrays still refer to it, as frames of exceptions may.

        arrays  arrays that start where their memory does.
        """
        self.synchronize(self.stream)
        for array in arrays:
            self._free(self.address(array))

    def view(
        self,
        data: Array,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        *,
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> Array:
        """Return an array in memory from `allocate`; ValueError if it would exceed `data`.

        offset, strides  bytes; None: C order.
        """
        kind = np.dtype(dtype)
        check_view(data.nbytes, shape, kind.itemsize, offset, strides)
        steps = c_strides(shape, kind.itemsize) if strides is None else tuple(strides)
        return self._cupy.ndarray(tuple(shape), kind, memptr=data.data + offset, strides=steps)

    def put(self, host: npt.NDArray[Any], what: str) -> Array:
        """Return a copy of `host` in memory of its own, complete on return. DeviceError as for `allocate`."""
        ready = np.ascontiguousarray(host)
        array = self.view(self.allocate(ready.nbytes, what), host.shape, ready.dtype)
        self.copy_async(array, ready.reshape(host.shape), self.stream)
        self.synchronize(self.stream)
        return array

    def get(self, array: Array) -> npt.NDArray[Any]:
        """Return a copy of `array` on the host, taken after all work queued on `stream` so far."""
        with self.calling("copying to the host", array.nbytes), self.stream:
            host: npt.NDArray[Any] = array.get(stream=self.stream)
            self.stream.synchronize()
        return host

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array in pinned host memory, from which the device copies directly."""
        count, kind = prod(shape), np.dtype(dtype)
        nbytes = max(1, count * kind.itemsize)
        with self.calling("cudaHostAlloc", nbytes):
            memory = self._cupy.cuda.PinnedMemory(nbytes)
        pointer = self._cupy.cuda.PinnedMemoryPointer(memory, 0)
        return np.frombuffer(pointer, kind, count).reshape(tuple(shape))

    def kernels(self, source: str, names: Sequence[str], **defines: int | str) -> dict[str, Kernel]:
        """Return kernels of kernels/gpu/`source`, compiled for this device and cached, also on disk (CuPy's cache).

        names    C++ name expressions: "whole", "forward<16, 8, half>".
        defines  macros the source is compiled with.

        Raises DeviceError with the compiler's log.
        """
        key = (source, tuple(names), tuple(sorted(defines.items())))
        with self._lock:
            found = self._modules.get(key)
        if found is None:
            found = self._compile(source, names, defines)
            with self._lock:
                self._modules[key] = found
        return found

    def address(self, array: Array) -> int:
        """Return the device address of its first element."""
        return int(array.data.ptr)

    def holds(self, array: object) -> bool:
        """Return whether `array` is in this device's memory, no matter what allocated it."""
        return isinstance(array, self._cupy.ndarray) and array.device.id == self.number

    def copy_async(self, target: Array, source: Array, stream: Any) -> None:
        """Queue a copy on `stream` between host and device or within the device; only pinned memory copies in parallel.

        Shapes and dtypes must be equal, and each array in C order except for the stride of its first axis (ValueError).
        Both arrays must live until the copy is done.
        """
        rows, width, to_step, from_step = copy_rows(target, source)
        runtime = self._cupy.cuda.runtime
        to_host, from_host = isinstance(target, np.ndarray), isinstance(source, np.ndarray)
        kind = runtime.memcpyDeviceToDevice if not to_host and not from_host else None
        kind = runtime.memcpyDeviceToHost if to_host and not from_host else kind
        kind = runtime.memcpyHostToDevice if from_host and not to_host else kind
        if kind is None:
            raise ValueError("a device does not copy from host to host")
        to = target.ctypes.data if to_host else self.address(target)
        origin = source.ctypes.data if from_host else self.address(source)
        with self.calling("cudaMemcpyAsync", rows * width):
            if rows == 1:
                runtime.memcpyAsync(to, origin, width, kind, stream.ptr)
            else:
                runtime.memcpy2DAsync(to, to_step, origin, from_step, width, rows, kind, stream.ptr)

    def clear(self, array: Array, stream: Any = None) -> None:
        """Queue zeros into all bytes of `array`, which must be in C order (ValueError)."""
        if not array.flags.c_contiguous:
            raise ValueError(f"clearing {array.shape} with strides {array.strides}: only arrays in C order")
        with self.calling("cudaMemsetAsync", array.nbytes):
            self._cupy.cuda.runtime.memsetAsync(
                self.address(array), 0, array.nbytes, (self.stream if stream is None else stream).ptr
            )

    def event(self, *, timing: bool = False) -> Any:
        """Create an event for `stream.record(event)`, `other.wait_event(event)`, `event.synchronize()` or `.done`."""
        with self.calling("cudaEventCreate"):
            return self._cupy.cuda.Event(block=True, disable_timing=not timing)

    def recorded(self, work: Callable[[], object]) -> Recording:
        """Return what `work` queues on `stream`, which does not run now: a CUDA graph.

        `work` may neither wait nor allocate. Its arrays have to live as long as the recording is played.
        """
        with self.calling("recording work"):
            self.stream.begin_capture()
            try:
                work()
            finally:
                graph = self.stream.end_capture()
        return Recording(self, graph)

    def elapsed(self, work: Callable[[], object], repeats: int = 1) -> list[float]:
        """Return the seconds on `stream` that each of `repeats` calls of `work` took, measured with events."""
        marks = [self.event(timing=True) for _ in range(repeats + 1)]
        with self.calling("cudaEventRecord"):
            self.stream.record(marks[0])
        for mark in marks[1:]:
            work()
            with self.calling("cudaEventRecord"):
                self.stream.record(mark)
        self.synchronize(self.stream)
        return [self.seconds_between(start, end) for start, end in pairwise(marks)]

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two events that were made with `timing` and have happened."""
        with self.calling("cudaEventElapsedTime"):
            return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def synchronize(self, stream: Any = None) -> None:
        """Wait for the work queued on `stream`; None: for all work of the device. DeviceError if some of it failed."""
        if stream is None:
            with self.calling("cudaDeviceSynchronize"):
                self._cupy.cuda.runtime.deviceSynchronize()
        else:
            with self.calling("cudaStreamSynchronize"):
                stream.synchronize()

    def free_bytes(self) -> int:
        """Return the free bytes of the device; other programs' memory counts as used."""
        with self.calling("cudaMemGetInfo"):
            return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def _compile(self, source: str, names: Sequence[str], defines: dict[str, int | str]) -> dict[str, Kernel]:
        described = describe_kernels(source, names, defines)
        module = self._cupy.RawModule(
            code=source_text(source), options=compiler_options(source, defines), name_expressions=tuple(names)
        )  # compiled when a function is requested, once per device
        try:
            with self.calling(f"loading {described}"):
                return {name: Kernel(self, name, module.get_function(name)) for name in names}
        except self._cupy.cuda.compiler.CompileException as error:
            log = [line for line in str(error).splitlines() if line.strip()]
            message = "\n".join(log[:_LOG_LINES])
            raise DeviceError(f"the CUDA compiler refused {described}:\n{message}") from error

    def _free(self, address: int) -> None:
        with self._lock:
            held = self._held.pop(address, None)
        if held is None or self.abandoned:
            return
        held[1].detach()  # another array may have the address by the time the last reference to this one is gone
        runtime = self._cupy.cuda.runtime
        before = runtime.getDevice()  # the collector may run in the middle of a call to another device
        try:
            with self.calling("cudaFree"):
                runtime.free(address)
        finally:
            runtime.setDevice(before)


class _Owner:
    """An object that lives as long as an array views the memory it stands for."""

    __slots__ = ("__weakref__",)
