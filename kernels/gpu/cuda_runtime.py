"""Access CUDA's runtime through CuPy: its import, its errors and its descriptions of devices."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from znnpy.errors import DeviceError, VramError
from znnpy.extras import install
from znnpy.machine import Gpu
from znnpy.messages import option


def refusal(call: str, code: object, nbytes: int | None = None, free: int | None = None) -> DeviceError:
    """Return the error for a call that CUDA refused.

    code    CUDA's answer, e.g. "cudaErrorMemoryAllocation: out of memory".
    nbytes  bytes requested; None if the call is not about memory.
    free    free bytes of a device that refused memory: the error is a VramError.
    """
    sizes = "" if nbytes is None else f" of {nbytes} bytes"
    left = (
        "" if free is None else f"; {free} bytes are free, so lower {option('vram')} or stop other programs on the GPU"
    )
    return (DeviceError if free is None else VramError)(f"{call}{sizes} was refused: {code}{left}")


def import_cupy() -> Any:
    """Import CuPy; DeviceError if it is not installed or cannot be loaded."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"a GPU is driven through CuPy, which cannot be imported ({error}): {install('gpu')}"
        ) from error
    return cupy


def describe(cupy: Any, driver: int, library: int, number: int) -> Gpu:
    """Return device `number` as CUDA describes it; driver and library are versions of CUDA."""
    runtime = cupy.cuda.runtime

    def attribute(name: str) -> int:
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), number))

    try:
        properties = runtime.getDeviceProperties(number)
        return Gpu(
            name=properties["name"].decode(),
            capability=(properties["major"], properties["minor"]),
            multiprocessors=properties["multiProcessorCount"],
            memory_bytes=properties["totalGlobalMem"],
            l2_bytes=properties["l2CacheSize"],
            shared_block_bytes=attribute("MaxSharedMemoryPerBlockOptin"),
            shared_multiprocessor_bytes=attribute("MaxSharedMemoryPerMultiprocessor"),
            bandwidth=2e3 * attribute("MemoryClockRate") * attribute("GlobalMemoryBusWidth") / 8,  # two a clock (kHz)
            driver=driver,
            versions=_versions(cupy, library),
        )
    except runtime.CUDARuntimeError as error:
        raise refusal("cudaGetDeviceProperties", error) from error


def _versions(cupy: Any, library: int) -> tuple[tuple[str, str], ...]:
    try:
        compiler = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except (ImportError, RuntimeError) as error:  # CuPy alone, without CUDA's libraries
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(
            f"CUDA's compiler, which CuPy needs, cannot be loaded ({reason}): {install('gpu')}"
        ) from error
    found = [("cupy", cupy.__version__), ("cuda", dotted(library)), ("nvrtc", compiler)]
    for package in ("nvidia-cublas", "nvidia-cufft", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"):
        try:
            found.append((package.removeprefix("nvidia-"), version(package)))
        except PackageNotFoundError:
            continue  # not every installation has it as a package
    return tuple(found)


def dotted(cuda: int) -> str:
    """Return a version of CUDA as text, e.g. 13000 as `13.0`."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"
