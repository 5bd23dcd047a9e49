"""The child of networks.py and volume.py: one measurement. A request on stdin, an answer on stdout, both JSON.

Jobs
  znnpy_steps    a network by znnpy's plan, a few steps of a random volume, through the pipeline a run goes through:
                 patches, or a column from its beginning on
  torch_patch    the same network in PyTorch on one patch that starts at the same voxel of the same volume
  torch_volume   a network in PyTorch over a volume in a file, patch by patch, into a file

The random volume has no end and takes no memory: a block of random bytes, repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from apart import limit_memory

from znnpy.formats.networks import read_network
from znnpy.formats.weights import random_weights
from znnpy.inference import peak_bytes
from znnpy.kernels.crew import Crew
from znnpy.machine import Limits, this_machine
from znnpy.network import Network, Normalise
from znnpy.patches import Box, cover
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import pipeline
from znnpy.run.session import Session
from znnpy.shapes import FLOAT32, ConvShape, Vec3, valid
from znnpy.trained import load_network

BLOCK: Vec3 = (61, 67, 71)  # primes: no pooling or kernel meets the repetition
PLANNED_FOR: Vec3 = (1024, 1024, 1024)  # dense output: patches and columns are chosen as in a long run
CORNER = 24  # output voxels per axis, from the first on, that are kept and compared
SEED = 20261120

Request = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Noise:
    """Random grey values at every voxel; what a pipeline reads from."""

    channels: int
    dtype: np.dtype[np.uint8] = field(default_factory=lambda: np.dtype(np.uint8))

    def read(self, lo: Vec3, out: npt.NDArray[np.uint8]) -> None:
        """Fill (c, z, y, x) with the voxels from `lo` on."""
        block = np.random.default_rng(SEED).integers(0, 256, (self.channels, *BLOCK), np.uint8)
        z, y, x = (np.arange(a, a + n) % b for a, n, b in zip(lo, out.shape[1:], BLOCK, strict=True))
        rows = block[:, :, :, x]
        for plane, at in enumerate(z):
            out[:, plane] = rows[:, at][:, y]


@dataclass
class Corner:
    """Where a pipeline writes to: the first voxels are kept, the rest is dropped."""

    kept: npt.NDArray[np.float32]  # (maps, z, y, x)
    done: frozenset[int] = frozenset()
    dtype: np.dtype[np.float32] = field(default_factory=lambda: np.dtype(np.float32))

    def write(self, box: Box, voxels: npt.NDArray[np.float32]) -> None:
        z, y, x = (min(c, hi) for c, hi in zip(self.kept.shape[1:], box.hi, strict=True))
        if box.lo == (0, 0, 0):
            self.kept[:, :z, :y, :x] = voxels[:, :z, :y, :x]

    def finish_column(self, index: int) -> None:
        """Nothing to record."""


def random_network(name: str) -> Network:
    """A network on noise: grey values are centred, else the mean hides what differs from voxel to voxel."""
    network = read_network(name).network
    return replace(network, normalise=Normalise((127.5,) * network.input_channels, (73.9,) * network.input_channels))


def corner_of(patch: Vec3) -> Vec3:
    return min(CORNER, patch[0]), min(CORNER, patch[1]), min(CORNER, patch[2])


def znnpy_steps(request: Request) -> Answer:
    """Seconds of every step, from the end of the one before; the first also touches memory for the first time.

    Steps are patches, or those of one column, which begins with some that give no output: `ahead_seconds`.
    """
    network = random_network(request["network"])
    begin = time.perf_counter()
    weights = random_weights(network)
    machine, limits = this_machine(), Limits(request["ram_bytes"], request["threads"])
    baseline = baseline_bytes() + FLOAT32 * network.parameters
    plan = make_plan(
        network, PLANNED_FOR, machine, limits, patch=request["patch"], only=request["only"], baseline=baseline
    )
    planned = time.perf_counter()
    z, y, x = (size * (request["steps"] if axis == plan.axis else 1) for axis, size in enumerate(plan.patch_out))
    columns = replace(plan.cover(network), size=(z, y, x))
    corner = Corner(np.full((network.output_channels, *corner_of(plan.patch_out)), np.nan, np.float32))
    ends: list[float] = []
    with Crew(limits.threads) as crew, Session(plan, network, weights, crew) as session:
        prepared = time.perf_counter()
        source = Noise(network.input_channels)
        used = time.process_time()
        pipeline.run(session, crew, source, corner, columns, lambda event: ends.append(time.perf_counter()))
        used = time.process_time() - used
    np.save(request["corner"], corner.kept)
    seconds = np.diff(ends)[:-1].tolist()  # the last event tells that all is written
    return {
        "patch_out": plan.patch_out,
        "ahead_seconds": seconds[: columns.ahead],
        "seconds": seconds[columns.ahead :],
        "column": plan.column_planes,
        "steps_of_a_column": max(
            1, plan.column_planes // plan.patch_out[plan.axis]
        ),  # that give output, in the run planned
        "border_waste": arithmetic_waste(plan),
        "cores_used": used / (ends[-1] - ends[0]),
        "planning_seconds": planned - begin,
        "preparing_seconds": prepared - planned,
        "planned_voxels_per_second": plan.voxels_per_second,
        "planned_peak_bytes": plan.memory.peak,
        "choices": [f"{choice.primitive} {choice.variant}".strip() for choice in plan.choices],
        "layer_seconds_planned": [choice.seconds for choice in plan.choices],
        "blas": machine.blas,
    }


def arithmetic_waste(plan: Plan) -> float:
    """Multiply-adds of all convolutions for the whole output, by their definition, over those without any border."""
    spent = needed = 0
    for choice in plan.choices:
        shape = choice.shape
        if isinstance(shape, ConvShape):
            each = shape.fin * shape.fout * prod(shape.k)
            spent += choice.executions * shape.batch * prod(valid(shape.n, shape.k)) * each
            needed += prod(plan.output) * each
    return spent / needed if needed else 1.0


def torch_patch(request: Request) -> Answer:
    """Seconds of every run on one patch; as many runs as fit into `repeat_seconds`, at least one."""
    import torch
    from dense_torch import DenseTorch

    torch.set_num_threads(request["threads"])
    network = random_network(request["network"])
    net = DenseTorch(network, random_weights(network), request["method"], request["precision"], request["layout"])
    patch: Vec3 = tuple(request["patch"])
    raw = np.empty((network.input_channels, *network.patch_in(patch)), np.uint8)
    Noise(network.input_channels).read((0, 0, 0), raw)
    seconds: list[float] = []
    used = time.process_time()
    while not seconds or sum(seconds) + seconds[-1] < request["repeat_seconds"]:
        begin = time.perf_counter()
        out = net(raw)
        seconds.append(time.perf_counter() - begin)
    used = time.process_time() - used
    z, y, x = corner_of(patch)
    np.save(request["corner"], out[:, :z, :y, :x])
    return {"patch_out": patch, "seconds": seconds, "cores_used": used / sum(seconds)}


def torch_volume(request: Request) -> Answer:
    """Seconds from opening the volume to closing the prediction; imports and reading the weights come before."""
    import h5py
    import torch
    from dense_torch import DenseTorch

    torch.set_num_threads(request["threads"])
    trained = load_network(request["network"])
    network = trained.network
    net = DenseTorch(network, trained.weights, request["method"], request["precision"], request["layout"])
    begin, used = time.perf_counter(), time.process_time()
    with h5py.File(request["volume"]) as file, h5py.File(request["out"], "w") as made:
        voxels = next(data for data in file.values() if data.ndim == 3)
        output = network.dense_size(voxels.shape)
        prediction = made.create_dataset("prediction", (network.output_channels, *output), np.float32)
        least = zip(request["patch"], output, network.period, strict=True)
        z, y, x = (min(side, size // period * period) for side, size, period in least)  # fragments come out whole
        for column in cover(output, (z, y, x)):
            for patch in column.steps:
                size = network.patch_in(patch.out.size)
                lo = patch.out.lo
                raw = voxels[lo[0] : lo[0] + size[0], lo[1] : lo[1] + size[1], lo[2] : lo[2] + size[2]]
                kept = tuple(slice(a - b, c - b) for a, b, c in zip(patch.write.lo, lo, patch.write.hi, strict=True))
                prediction[(slice(None), *patch.write.slices)] = net(raw[None])[(slice(None), *kept)]
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    return {"patch_out": (z, y, x), "seconds": seconds, "voxels": prod(output), "cores_used": used / seconds}


JOBS: dict[str, Callable[[Request], Answer]] = {
    "znnpy_steps": znnpy_steps,
    "torch_patch": torch_patch,
    "torch_volume": torch_volume,
}


def main() -> None:
    request = json.load(sys.stdin)
    limit_memory(request["ram_bytes"])
    answer = JOBS[request["job"]](request)
    print(json.dumps(answer | {"peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
