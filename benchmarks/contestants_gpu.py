"""The child of networks_gpu.py: one network on the GPU. A request on stdin, lines of JSON on stdout, one a run.

Jobs
  znnpy_volume   by its own plan for the whole volume, in each precision: from the host's memory into the host's memory,
                 through the pipeline that a run goes through
  torch_patches  the same network in PyTorch on single patches of the same volume, in each of the ways that are asked
                 for, from the largest patch down, until a smaller one is slower

What fails is a line too; where a child dies, the lines before say how far it came.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from contestants import arithmetic_waste, corner_of, random_network
from gpu_card import Lowest

from znnpy.errors import ZnnpyError
from znnpy.formats.weights import random_weights
from znnpy.inference import peak_bytes
from znnpy.kernels.crew import Crew
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import pipeline
from znnpy.run.devices import Site, site_for
from znnpy.run.session import Session
from znnpy.shapes import ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.network import Network
    from znnpy.patches import Box

SEED = 20261121
BYTES = 2**24 - 3  # random ones; a prime number, so that their repetition meets no axis
WARM_STEPS = 2  # that do not count in a steady state: buffers are pinned, the pipeline fills
SMALLER_IS_SLOWER = 0.97  # below so much of the best speed no smaller patch is tried
TORCH_FLOPS = {"fp32": 12e12, "tf32": 80e12, "bf16": 120e12, "fp16": 120e12}  # per second, to tell what takes too long
DILATED = 0.2  # of that, where kernels have gaps

Request = dict[str, Any]
Answer = dict[str, Any]
Voxels = npt.NDArray[Any]


def noise(size: Vec3, channels: int) -> npt.NDArray[np.uint8]:
    """Random grey values (c, z, y, x), the same in every process."""
    some = np.random.default_rng(SEED).integers(0, 256, BYTES, np.uint8)
    return np.resize(some, channels * prod(size)).reshape(channels, *size)


@dataclass(frozen=True)
class Held:
    """A volume in memory; what a pipeline reads from. Outside of it there is the nearest voxel."""

    voxels: npt.NDArray[np.uint8]  # (c, z, y, x)
    dtype: np.dtype[np.uint8] = field(default_factory=lambda: np.dtype(np.uint8))

    def read(self, lo: Vec3, out: Voxels) -> None:
        there, missing = [slice(None)], [(0, 0)]
        for start, length, size in zip(lo, out.shape[1:], self.voxels.shape[1:], strict=True):
            first, last = (min(max(at, 0), size - 1) for at in (start, start + length - 1))
            there.append(slice(first, last + 1))
            before = min(max(first - start, 0), length - 1 - last + first)
            missing.append((before, length - 1 - last + first - before))
        part = self.voxels[tuple(there)]
        np.copyto(out, np.pad(part, missing, "edge") if any(map(any, missing)) else part)


@dataclass
class Kept:
    """An output in memory, written by so many threads at a time: one copies 3 GB/s, and several GPUs make more."""

    voxels: npt.NDArray[np.float32]  # (maps, z, y, x)
    threads: int = 1
    done: frozenset[int] = frozenset()
    dtype: np.dtype[np.float32] = field(default_factory=lambda: np.dtype(np.float32))

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads)  # of threads that begin when they are needed

    def write(self, box: Box, voxels: Voxels) -> None:
        target = self.voxels[(slice(None), *box.slices)]
        if self.threads == 1:
            target[...] = voxels
            return
        planes = [(channel, plane) for plane in range(target.shape[1]) for channel in range(len(target))]

        def copy(at: tuple[int, int]) -> None:
            target[at] = voxels[at]

        deque(self._pool.map(copy, planes), maxlen=0)

    def finish_column(self, index: int) -> None:
        """Nothing to record."""


class Warm:
    """A session whose every run has the buffers of its first: they are pinned once, for a volume of any size."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buffers: tuple[list[Voxels], list[Voxels]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def buffers(self, raw: np.dtype[Any], out: np.dtype[Any], **counts: int) -> tuple[list[Voxels], list[Voxels]]:
        if self._buffers is None:
            raws, outs = self._session.buffers(raw, out, **counts)
            self._buffers = list(raws), list(outs)
        return self._buffers


def steady_rate(events: list[pipeline.Event]) -> float:
    """Output voxels per second once the pipeline is full: by the share of all work done between two events.

    Steps of a column that give no output, and those that other columns computed too, count as what they are: work.
    """
    done = [event for event in events if event.steps_done >= WARM_STEPS and event.work_done < 1]
    if len(done) < 2:
        done = events
    work, spent = done[-1].work_done - done[0].work_done, done[-1].seconds - done[0].seconds
    return done[-1].voxels * work / spent if spent > 0 else 0.0


def znnpy_volume(request: Request) -> Iterator[Answer]:
    """Each precision after the other."""
    for precision in request["precisions"]:
        try:
            yield volume_run(request | {"precision": precision})
        except ZnnpyError as error:
            yield {"precision": precision, "failure": f"{type(error).__name__}: {error}"[:500]}


def volume_run(request: Request) -> Answer:
    """The whole volume in one precision, twice: what the first run prepares for all patches is told apart.

    By the plan of the request, where there is one.
    """
    network = random_network(request["network"])
    weights = random_weights(network)
    size: Vec3 = (request["side"],) * 3

    def make(site: Site) -> Plan:
        if given := request.get("plan"):
            return Plan.from_json(given)
        limits = site.limits(request["ram"], request["threads"], request["vram"])
        return make_plan(
            network,
            network.dense_size(size),
            site.machine,
            limits,
            patch=request["patch"],
            only=request["only"],
            rates=site.rates(network, limits),
            **site.words(),
        )

    began = time.perf_counter()
    with site_for(make, "gpu", request["vram"], request["precision"]) as (site, plan):
        planned = time.perf_counter()
        source = Held(noise(size, network.input_channels))
        target = Kept(np.full((network.output_channels, *plan.output), np.nan, np.float32))  # its pages are touched
        runs: list[list[pipeline.Event]] = []
        before = time.perf_counter()
        with (
            Lowest(site.gpu) as lowest,
            Crew(plan.limits.threads) as crew,
            Session(plan, network, weights, crew, device=site.gpu) as session,
        ):
            prepared = time.perf_counter()
            warm, columns = Warm(session), plan.cover(network)
            for _ in range(2):
                target.voxels[...] = np.nan
                runs.append([])
                timings = pipeline.run(warm, crew, source, target, columns, runs[-1].append)
        taken = site.free_bytes - lowest.free_bytes if site.free_bytes is not None else 0
    first, events = runs
    z, y, x = corner_of(plan.output)
    np.save(f"{request['corner']}-{request['precision']}.npy", target.voxels[:, :z, :y, :x])
    return {
        "precision": plan.precision,
        "output": plan.output,
        "voxels_per_second": timings.voxels / timings.seconds,
        "steady_voxels_per_second": steady_rate(events),
        "seconds": timings.seconds,
        "stage_seconds": dict(timings.stage_seconds),
        "planning_seconds": planned - began,  # and measuring layers, where no earlier run did
        "preparing_seconds": prepared - before,
        "first_seconds": first[-1].seconds,  # with the pinning of its buffers
        "not_written": sum(int(np.isnan(plane).sum()) for maps in target.voxels for plane in maps),
        "planned_voxels_per_second": plan.voxels_per_second,
        "planned_vram_bytes": plan.memory.vram,
        "vram_bytes": taken,  # at its peak, with what CUDA took
        "vram_limit_bytes": plan.limits.vram_bytes,
        "peak_bytes": peak_bytes(),
        "steps": events[-1].steps,
        "border_waste": arithmetic_waste(plan),
        **of_plan(plan, network),
    }


def of_plan(plan: Plan, network: Network) -> Answer:
    return {
        "patch_out": plan.patch_out,
        "column": plan.column_planes,
        "axis": plan.axis,
        "parts": plan.sub_batches,
        "steps_without_output": plan.cover(network).ahead,
        "rigor": plan.rigor,
        "choices": [f"{choice.primitive} {choice.variant}".strip() for choice in plan.choices],
        "layers": [str(choice.shape) for choice in plan.choices],
        "layer_seconds_planned": [choice.seconds * choice.executions for choice in plan.choices],
        "memory": asdict(plan.memory),
    }


@dataclass(frozen=True, slots=True)
class Way:
    """To run a network in PyTorch."""

    precision: Any
    method: Any  # fragments | dilated
    layout: Any
    sides: Sequence[int]  # of patches, the largest first

    @property
    def flops(self) -> float:
        return float(TORCH_FLOPS[self.precision] * (DILATED if self.method == "dilated" else 1.0))


def torch_patches(request: Request) -> Iterator[Answer]:
    """Each way after the other: the largest patches first; a line for each patch."""
    network = random_network(request["network"])
    volume = noise((request["side"],) * 3, network.input_channels)
    ways = [Way(*way) for way in request["ways"]]
    end = time.perf_counter() + request["seconds"]
    for number, way in enumerate(ways):
        share = (end - time.perf_counter()) / (len(ways) - number)
        for answer in way_of_torch(way, network, volume, request, time.perf_counter() + share):
            yield {"way": number, "precision": way.precision, "method": way.method, "layout": way.layout, **answer}
    if corner := request["corner"]:
        from dense_torch import DenseTorch

        side = reference_side(network)
        least = network.patch_in((side,) * 3)
        out = DenseTorch(network, random_weights(network), "fragments", "fp32", "contiguous", request["on"])(
            volume[:, : least[0], : least[1], : least[2]]
        )
        np.save(corner, out)
        yield {"reference": side}


def way_of_torch(way: Way, network: Network, volume: Voxels, request: Request, end: float) -> Iterator[Answer]:
    import torch
    from dense_torch import DenseTorch

    weights = random_weights(network)
    net = DenseTorch(
        network, weights, way.method, way.precision, way.layout, request["on"], tried=request["algorithms"]
    )
    best = 0.0
    for side in way.sides:
        left = end - time.perf_counter()
        patch: Vec3 = (side,) * 3
        once = patch_flops(network, patch) / way.flops
        if once > request["run_seconds"] or (request["algorithms"] + 2) * once > left:
            yield {"patch_out": patch, "failure": "not tried: it would take too long"}
            continue
        yield {"patch_out": patch, "failure": "it killed the process"}  # unless another line on it follows
        try:
            seconds = list(patches(net, network, volume, patch, request["repeat_seconds"], end))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield {"patch_out": patch, "failure": "out of memory"}
            continue
        held = 0
        if request["on"] == "cuda":
            held = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        speed = prod(patch) / float(np.median(seconds))
        yield {"patch_out": patch, "failure": None, "seconds": seconds, "vram_bytes": held}
        if speed < SMALLER_IS_SLOWER * best:
            return
        best = max(best, speed)


def patches(
    net: Callable[[Voxels], Voxels], network: Network, volume: Voxels, patch: Vec3, repeat_seconds: float, end: float
) -> Iterator[float]:
    """Seconds from voxels in the host's memory to a prediction in it, of patches along a diagonal; after a warm one.

    One at least, then as many as are likely to take no more than `repeat_seconds`, nor go on beyond `end`. The warm one
    counts in neither way: in it cuDNN tries its algorithms.
    """
    size = network.patch_in(patch)
    spent, seconds, turn = 0.0, 0.0, 0
    while turn < 2 or (spent * turn / (turn - 1) < repeat_seconds and time.perf_counter() + seconds < end):
        lo = [turn * side % max(1, n - m + 1) for side, n, m in zip(patch, volume.shape[1:], size, strict=True)]
        begin = time.perf_counter()
        net(volume[:, lo[0] : lo[0] + size[0], lo[1] : lo[1] + size[1], lo[2] : lo[2] + size[2]])
        seconds = time.perf_counter() - begin
        if turn:
            spent += seconds
            yield seconds
        turn += 1


def patch_flops(network: Network, patch: Vec3) -> float:
    shapes = [shape for shape in network.layer_shapes(patch) if isinstance(shape, ConvShape)]
    return float(sum(2 * prod(shape.out_shape) * shape.fin * prod(shape.k) for shape in shapes))


def reference_side(network: Network) -> int:
    """Output voxels along an axis of a small patch: a multiple of every period, about 24."""
    period = max(network.period)
    return -(-24 // period) * period


JOBS: dict[str, Callable[[Request], Iterator[Answer]]] = {
    "znnpy_volume": znnpy_volume,
    "torch_patches": torch_patches,
}


def main() -> None:
    request = json.load(sys.stdin)
    for answer in JOBS[request["job"]](request):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
