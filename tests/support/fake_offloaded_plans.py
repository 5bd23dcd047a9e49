"""Plans of fakes whose first layers are offloaded, and a fake that computes such layers on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tests.support.brute_force import BASELINE, THREADS
from tests.support.fake_primitives import BOTH, CARRYING, FAST, FILTER, MAXOUT, OVER, POOL, SLOW, WITH_GPU, Fake, on_gpu
from tests.support.flat_requests import make_plan
from znnpy.costs.model import Rate, Rates
from znnpy.kernels.contract import Footprint, Scratch, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits, Machine
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.sublayers import HOST_TRAFFIC, TOLERANCE
from znnpy.shapes import ConvShape, Vec3

PLENTY = 2**40
UPLOAD = 5e12  # bytes per second
ON_CPU = (SLOW, replace(FAST, scale=(1, 4)), BOTH, POOL, FILTER, MAXOUT)
ON_GPU = on_gpu(SLOW, replace(OVER, reads_carried=True), BOTH, POOL, FILTER, MAXOUT)
HOST_RATES = CARRYING
LINK = 1 / (1 / UPLOAD + HOST_TRAFFIC / HOST_RATES.of("copy").nbytes)  # bytes per second, those that the host copies
GPU_RATES = Rates({**CARRYING.scaled(1.5, 1.0).units, "gpu_link": Rate(flops=1e12, nbytes=UPLOAD)}, stage_seconds=0.0)


@dataclass(frozen=True, slots=True)
class InHostRam(Fake):
    """Computed on the GPU, of tensors of the host; slower than its arithmetic where it has less memory."""

    least_bytes: int = 0  # of the GPU

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        scratch = (Scratch("host_ram.x", 300, 0, 1), Scratch("host_ram.out", 500, 1, 1))
        return Footprint(resident=100, host=200, input_until=-1, output_from=2, stages=2, scratch=scratch)

    def fastest(
        self,
        shape: ConvShape,
        machine: Machine,
        vram_bytes: int,
        speeds: Any,
        seconds: Any,
        *,
        within: float,
        few: bool,
    ) -> Any:
        assert (speeds.upload, speeds.memory, within, few) == (LINK, GPU_RATES.copy_bandwidth, TOLERANCE, True)
        assert shape.precision == "fp32"
        if vram_bytes < self.least_bytes:
            return None
        variant = Variant.of(scale=1)
        return SimpleNamespace(
            variant=variant, found=SimpleNamespace(seconds=seconds(self, shape, variant) + link(shape))
        )


def link(shape: LayerShape) -> float:
    """Seconds."""
    return max(shape.in_bytes, shape.out_bytes) / LINK


IN_HOST = InHostRam("gpu.conv.in_host", "conv", flops=0.5)


def best_offloaded(network: Network, output: Vec3, ram_bytes: int, vram_bytes: int, **arguments: Any) -> RunPlan:
    """Return what `make_plan` gives for the fakes of both devices, with some arguments replaced."""
    settings: dict[str, Any] = {
        "table": (*ON_CPU, *ON_GPU),
        "rates": GPU_RATES,
        "host_rates": HOST_RATES,
        "baseline": BASELINE,
        "context": 0,
        "mode": "cpu-to-gpu",
        "in_host_ram": (IN_HOST,),
    } | arguments
    threads = THREADS + (settings["mode"] == "cpu-to-gpu")  # where one of them feeds the GPU
    return make_plan(network, output, WITH_GPU, Limits(ram_bytes, threads, vram_bytes), **settings)
