"""Every plan there is for a small network: each patch and column shape, split and way to run the layers, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import Any

from tests.support.fake_primitives import CARRYING, FAKES, WITH_GPU, Fake
from tests.support.flat_requests import make_plan
from znnpy.costs.model import seconds
from znnpy.kernels.contract import Footprint, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits
from znnpy.network import Network
from znnpy.option_values import DeviceKind
from znnpy.patches import Cover
from znnpy.planner.layout import Tensor, carried_bytes, carried_planes, chain, live_peak, place, sub_batch_counts
from znnpy.planner.memory import (
    LIBRARIES_BYTES,
    READER_BYTES,
    WRITER_BYTES,
    reading_bytes,
    staging_bytes,
    writing_bytes,
)
from znnpy.planner.plan import patch_in
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.tilings import Sizes, Tiling, TilingSpace, all_sizes, all_spaces, splits, tiling_of
from znnpy.shapes import Vec3, fused

SMALL: Vec3 = (4, 4, 3)  # an output
BASELINE = 1000
AROUND = READER_BYTES + WRITER_BYTES  # of every plan
CONTEXT = LIBRARIES_BYTES  # of every plan for a GPU: CUDA itself takes nothing here
THREADS = 2
EDGE_BYTES = 5e9  # per second, of the first patch in and the last one out of a run on a GPU


def planned(network: Network, output: Vec3, ram_bytes: int, **arguments: Any) -> RunPlan:
    """Return what the search finds, with fakes and the figures that all plans here share."""
    settings: dict[str, Any] = {"table": FAKES, "rates": CARRYING, "baseline": BASELINE} | arguments
    return make_plan(network, output, WITH_GPU, Limits(ram_bytes, THREADS), **settings)


def planned_on_gpu(network: Network, output: Vec3, ram_bytes: int, vram_bytes: int, **arguments: Any) -> RunPlan:
    """Return what the search finds for a GPU of which CUDA itself takes nothing."""
    settings: dict[str, Any] = {"rates": CARRYING, "baseline": BASELINE, "context": 0, "device": "gpu"} | arguments
    return make_plan(network, output, WITH_GPU, Limits(ram_bytes, THREADS, vram_bytes), **settings)


@dataclass(frozen=True, slots=True)
class Run:
    """One layer, or two in one, and how to run it."""

    shape: LayerShape
    primitive: Fake
    variant: Variant
    steps: int  # of the whole output, in which it runs

    @property
    def footprint(self) -> Footprint:
        return self.primitive.footprint(self.shape, self.variant, THREADS)


@dataclass(frozen=True, slots=True)
class Known:
    """One plan of all."""

    peak: int  # bytes where the layers run
    around: int  # of them for the process or for CUDA, and for patches on their way in and out
    host: int  # bytes of the process
    assumed: int  # the same where the input of a convolution that a pooling follows is as large as for both in one
    seconds: float  # for the whole output
    walks: bool
    split: bool
    choices: int


def candidates(space: TilingSpace, sizes: Sizes) -> Iterator[Tiling]:
    """All combinations of sizes."""
    for z, y, x in product(*sizes):
        yield tiling_of(space, (z, y, x))


@cache
def everything(network: Network, output: Vec3, table: tuple[Fake, ...], device: DeviceKind = "cpu") -> list[Known]:
    """All plans, of patches and of columns along every axis."""
    found: list[Known] = []
    for space in all_spaces(network, output):
        for shape in candidates(space, all_sizes(space)):
            for at_once in splits(space.network):
                split = shape.split(at_once)
                steps = [steps_of(split.cover, ahead) for ahead in space.warmup_planes]
                runs = ways(split.shapes, steps, table)
                found.extend(known(space, split, way, device, split=any(at_once)) for way in runs)
    return found


def steps_of(cover: Cover, ahead: int) -> int:
    """Count one by one the steps that compute planes of a layer `ahead` planes before the output."""
    count = 0
    for column in cover:
        begins = next(step.out.lo[cover.axis] for step in column.steps if step.write.voxels)
        count += sum(step.out.hi[cover.axis] > begins - ahead for step in column.steps)
    return count


def ways(layers: Sequence[LayerShape], steps: Sequence[int], table: Sequence[Fake]) -> Iterator[tuple[Run, ...]]:
    """Every way to run layers, one by one or a convolution and the pooling behind it in one."""
    if not layers:
        yield ()
        return
    for run, rest in product(alone(layers[0], steps[0], table), list(ways(layers[1:], steps[1:], table))):
        yield (run, *rest)
    both = fused(layers[0], layers[1]) if len(layers) > 1 else None
    if both is not None:
        for run, rest in product(alone(both, steps[1], table), list(ways(layers[2:], steps[2:], table))):
            yield (run, *rest)


def alone(layer: LayerShape, steps: int, table: Sequence[Fake]) -> list[Run]:
    """Every way to run one layer, or two in one."""
    applying = (p for p in table if p.kind == layer.kind and p.why_not(layer, WITH_GPU) is None)
    return [Run(layer, p, v, steps) for p in applying for v in p.variants(layer, WITH_GPU)]


def known(space: TilingSpace, shape: Tiling, runs: Sequence[Run], device: DeviceKind, *, split: bool) -> Known:
    """Bytes and seconds of one plan, from the parts it is made of."""
    network = space.network
    new = patch_in(network, shape.patch, 0, streams=space.streams)
    shapes = [run.shape for run in runs]
    tensors, arena = place(chain([(run.shape, run.footprint) for run in runs], new[0]))
    reads, writes = shape.cover.steps(shape.cover.margin), shape.cover.steps(0)
    host = BASELINE + reading_bytes(network.input_channels, new, 1, steps=reads, device=device)
    host += writing_bytes(network.output_channels, shape.patch, 4, steps=writes, device=device)
    raw_bytes, out_bytes = network.input_channels * prod(new), 4 * network.output_channels * prod(shape.patch)
    staging = staging_bytes(raw_bytes, out_bytes, reads=reads, writes=writes)
    around = host if device == "cpu" else CONTEXT + staging
    beside = (
        carried_bytes(shapes, new[0])
        + sum(run.footprint.resident for run in runs)
        + max(run.footprint.allowance for run in runs)
    )
    spent = 0.0
    for run, times, kept in zip(runs, sub_batch_counts(shapes), carried_planes(shapes, new[0]), strict=True):
        times_moved = 2 if run.footprint.reads_carried else 4  # read and written to be kept, and to be put in front
        moved = times_moved * kept * run.shape.in_bytes / run.shape.in_shape[1]
        once = seconds(run.primitive.work(run.shape, run.variant), CARRYING) + moved / CARRYING.copy_bandwidth
        spent += run.steps * times * once
    assumed = max(arena, live_peak(widened(tensors, shapes)))
    if device == "gpu":
        spent += (raw_bytes + out_bytes) / EDGE_BYTES
    peak = around + beside + arena
    host = peak if device == "cpu" else host
    return Known(peak, around, host, around + beside + assumed, spent, space.streams, split, len(runs))


def widened(tensors: Sequence[Tensor], shapes: Sequence[LayerShape]) -> list[Tensor]:
    """Give the input of a convolution as many planes as one that pools needs, if a pooling follows."""
    planes = {}
    for index, (shape, behind) in enumerate(pairwise(shapes)):
        both = fused(shape, behind)
        if both is not None:
            planes[f"x{index}"] = both.in_bytes, shape.in_bytes
    wide = []
    for tensor in tensors:
        more, less = planes.get(tensor.name, (1, 1))
        wide.append(replace(tensor, nbytes=tensor.nbytes * more // less))
    return wide
