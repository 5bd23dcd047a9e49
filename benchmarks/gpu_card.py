"""What benchmarks on a GPU share: what is said of the card, how work on it is timed, and what the card can do at most.

Products are PyTorch's (cuBLAS), of random matrices; the copy is the device's own. Both run in the process that
measures, between its other work, so that clocks and temperature are those of the figures beside them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any

from header import machine_header
from watch import PAUSE, Watch

if TYPE_CHECKING:
    from znnpy.kernels.contract import Work
    from znnpy.machine import Gpu

Device = Any  # znnpy.kernels.gpu.device.Device, or what stands in for one

ROUNDS = 5  # of every limit; the median counts
LEAST_SECONDS = 4e-3  # between two events: shorter work is queued more often
MOST_REPEATS = 50
COPIED_BYTES = 2**30
MATRIX = 8192  # rows and columns
READINGS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "power.draw",
    "temperature.gpu",
)
ARITHMETIC = {  # which product limits which unit of work
    "gpu_fft16": "fp32",
    "gpu_fft24": "fp32",
    "gpu_fft32": "fp32",
    "gpu_half_product": "fp16",
    "gpu_split_product": "fp16",
    "gpu_float_product": "fp32",
    "gpu_direct": "fp32",
    "gpu_gemm_float": "fp32",
    "gpu_gemm_half": "fp16",
    "gpu_gemm_split": "fp16",
    "gpu_wgmma_half": "fp16",
    "gpu_wgmma_split": "fp16",
    "gpu_first": "fp32",
    "gpu_block": "fp32",
    "gpu_cuconv": "fp32",
    "gpu_stream": "fp32",
    "gpu_cufft": "fp32",
    "gpu_cudnn_fp32": "fp32",
    "gpu_cudnn_tf32": "tf32",
    "gpu_cudnn_fp16": "fp16",
    "gpu_upload": "fp32",
    "gpu_link": "fp32",
}


def torch_on_the_card() -> bool:
    """Whether PyTorch is here and sees a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def readings() -> dict[str, str] | None:
    """What the driver says of the card now; None where it is not to be asked."""
    command = ["nvidia-smi", f"--query-gpu={','.join(READINGS)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, as under the emulator
        return None
    return dict(zip(READINGS, (word.strip() for word in said.splitlines()[0].split(",")), strict=True))


def gpu_header(gpu: Gpu) -> dict[str, Any]:
    """`machine_header`, and of the GPU: what it is, what drives it, and its clocks as they are read now."""
    torch_versions: dict[str, Any] = {}
    if find_spec("torch") is not None:
        import torch

        torch_versions = {
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "torch_cudnn": torch.backends.cudnn.version(),
        }
    return machine_header() | {
        "gpu": asdict(gpu) | {"versions": dict(gpu.versions)},
        "readings": readings(),
        "peers": torch_versions,
    }


def often(once_seconds: float) -> int:
    """How often work is queued between two events."""
    return min(MOST_REPEATS, max(1, ceil(LEAST_SECONDS / max(once_seconds, 1e-9))))


class Clock:
    """Seconds of queued work by events of the device, on znnpy's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Of one run, when `repeats` are queued one behind the other on an idle device."""
        self._device.synchronize()
        return float(sum(self._device.elapsed(run, repeats))) / repeats


class TorchClock:
    """The same for work that PyTorch queues."""

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        import torch

        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats


class WallClock:
    """The same where nothing is queued: PyTorch on the processor."""

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats


class Lowest(Watch):
    """The least memory that was free on the device while this is open.

    free_bytes  so far
    """

    def __init__(self, device: Device, pause: float = PAUSE) -> None:
        super().__init__(pause)
        self._device = device
        self.free_bytes = int(device.free_bytes())

    def look(self) -> None:
        self.free_bytes = min(self.free_bytes, int(self._device.free_bytes()))


def copy_rate(device: Device, nbytes: int = COPIED_BYTES) -> float:
    """Bytes per second of a copy within the device's memory, those read and those written counted."""
    source, target = (device.allocate(nbytes, f"the {what} of a copy") for what in ("source", "target"))
    clock = Clock(device)

    def copy() -> None:
        device.copy_async(target, source, device.stream)

    clock.seconds(copy)
    return 2 * nbytes / median(clock.seconds(copy, 4) for _ in range(ROUNDS))


def product_rates(size: int = MATRIX) -> dict[str, float]:
    """Operations per second of PyTorch's matrix products, by precision."""
    import torch

    rates = {}
    clock = TorchClock()
    for precision, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("fp16", torch.float16)):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        clock.seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        rates[precision] = 2 * size**3 / median(clock.seconds(lambda a=a, b=b: a @ b, 4) for _ in range(ROUNDS))  # type: ignore[misc]
    torch.cuda.empty_cache()
    return rates


def shares(work: Sequence[Work], seconds: float, copied: float, products: dict[str, float]) -> dict[str, float]:
    """Which part of a run's time the card's limits account for.

    work      what the primitive says it does
    copied    bytes per second, as `copy_rate`
    products  operations per second, as `product_rates`; without them only the memory's share is told

    of_memory: all bytes at the speed of a copy. of_arithmetic: all operations at the speed of a matrix product.
    of_both: each stage at the slower of its two limits, one after the other.
    """
    moved = [stage.nbytes / copied for stage in work]
    found = {"of_memory": sum(moved) / seconds}
    if products:
        computed = [stage.flops / products[ARITHMETIC[stage.unit]] for stage in work]
        found["of_arithmetic"] = sum(computed) / seconds
        found["of_both"] = sum(map(max, moved, computed)) / seconds
    return found


def kernels_of(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Every kernel that one run starts, by PyTorch's profiler, which sees those of every library: name, times, seconds.

    `run` synchronises; it was warm before.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
    return [
        {"name": event.key, "times": event.count, "seconds": event.device_time_total / 1e6}
        for event in sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
        if event.device_time_total > 0
    ]
